//! `train/ppo-warmup` and `train/ppo`: the policy samples, the judge judges, the trainer learns, step by step.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use cuda_agent_agent::episode::{Rules, Score};
use cuda_agent_agent::policy::Sampling;
use cuda_agent_agent::trajectory::Form;
use cuda_agent_protocol::{Program, ProgramError, Request};
use serde::Deserialize;

use super::environment::{Collected, Environment, Source};
use super::model::{ModelParams, write, write_adapter};
use super::policy::Local;
use super::{Run, input_path, output_path, params, required, say, train};
use crate::TrainError;
use crate::algorithm::advantage::GroupBaseline;
use crate::algorithm::control::{AdaptiveRate, KlCoefficient, KlEstimate};
use crate::algorithm::correction::Correction;
use crate::algorithm::loss::{Aggregation, PolicyLoss};
use crate::group::Group;
use crate::model::{Decoder, Head};
use crate::optimizer::AdamW;
use crate::sampler::{Options, Sampler};
use crate::text::Tokenizer;
use crate::trainer::alarm::{Alarm, AlarmSettings};
use crate::trainer::ppo::{KlPlace, Lambda, Ppo, PpoSettings};
use crate::trainer::{Metrics, shuffled};

/// In a checkpoint, the episodes of its step.
const TRAJECTORIES: &str = "trajectories.jsonl";

/// In a checkpoint, with `overlap`, the episodes of the step after it, which the policy before its update sampled.
const AHEAD: &str = "ahead.json";

/// How episodes are made.
#[derive(Clone, Debug, Deserialize)]
struct RolloutParams {
    judge: Source,
    steps: u64,
    tasks_per_step: usize,
    samples: u32,
    turns: u32,
    score: Score,
    goal: f64,
    temperature: f64,
    max_tokens: u32,
    prefill: bool,
    timing: bool,
    curriculum: String,
    curriculum_steps: u64,
    sampler_slots: usize,
    sampler_capacity: i64,
    checkpoint_every: u64,
    alarms: bool,
    overlap: bool,
    exact: bool,
    seed: i64,
}

/// How PPO learns from them.
#[derive(Clone, Debug, Deserialize)]
struct LearningParams {
    algorithm: Algorithm,
    actor_learning_rate: f64,
    critic_learning_rate: f64,
    warmup_steps: u64,
    critic_only_steps: u64,
    mini_batch: usize,
    epochs: usize,
    clip_low: f64,
    clip_high: f64,
    dual_clip: f64,
    value_clip: f64,
    gamma: f64,
    lambda_policy: f64,
    lambda_critic: f64,
    lambda_alpha: f64,
    aggregation: Aggregation,
    whiten: bool,
    drop_equal_groups: bool,
    drop_truncated: bool,
    correction: CorrectionName,
    correction_cap: f64,
    kl_coefficient: f64,
    kl_target: f64,
    kl_horizon: f64,
    kl_estimate: KlEstimate,
    kl_place: KlPlace,
    adaptive_rate_kl: f64,
    entropy: f64,
    weight_decay: f64,
    max_grad_norm: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Algorithm {
    Ppo,
    Grpo,
    DrGrpo,
    Rloo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CorrectionName {
    None,
    Token,
    Sequence,
    Geometric,
}

impl LearningParams {
    fn settings(&self, rollout: &RolloutParams, model: &ModelParams) -> PpoSettings {
        let lambda =
            |fixed| if self.lambda_alpha > 0.0 { Lambda::ByLength(self.lambda_alpha) } else { Lambda::Fixed(fixed) };
        let cap = self.correction_cap;
        PpoSettings {
            forward: model.forward(rollout.temperature),
            policy_loss: PolicyLoss { clip_low: self.clip_low, clip_high: self.clip_high, dual_clip: self.dual_clip },
            aggregation: self.aggregation,
            width: rollout.max_tokens as usize * rollout.turns as usize,
            gamma: self.gamma,
            lambda_policy: lambda(self.lambda_policy),
            // VAPO: the length decides the actor's λ alone.
            lambda_critic: Lambda::Fixed(self.lambda_critic),
            group_baseline: match self.algorithm {
                Algorithm::Ppo => None,
                Algorithm::Grpo => Some(GroupBaseline::Grpo),
                Algorithm::DrGrpo => Some(GroupBaseline::MeanOnly),
                Algorithm::Rloo => Some(GroupBaseline::LeaveOneOut),
            },
            whiten: self.whiten,
            drop_equal_groups: self.drop_equal_groups,
            drop_truncated: self.drop_truncated,
            value_clip: self.value_clip,
            correction: match self.correction {
                CorrectionName::None => Correction::None,
                CorrectionName::Token => Correction::Token { cap },
                CorrectionName::Sequence => Correction::Sequence { cap },
                CorrectionName::Geometric => Correction::Geometric { low: 1.0 / cap, high: cap },
            },
            kl_estimate: self.kl_estimate,
            kl_place: self.kl_place,
            entropy: self.entropy,
            actor_rate: self.actor_learning_rate,
            critic_rate: self.critic_learning_rate,
            warmup_steps: self.warmup_steps,
            critic_only_steps: self.critic_only_steps,
            mini_batch: self.mini_batch,
            epochs: self.epochs,
            adamw: AdamW { weight_decay: self.weight_decay, max_grad_norm: self.max_grad_norm, ..AdamW::default() },
            seed: rollout.seed as u64,
        }
    }

    fn kl(&self) -> KlCoefficient {
        match self.kl_target {
            0.0 => KlCoefficient::Fixed(self.kl_coefficient),
            target => KlCoefficient::Adaptive { beta: self.kl_coefficient, target, horizon: self.kl_horizon },
        }
    }
}

/// A run with what it samples from.
struct Online<'a> {
    ppo: Ppo,
    policy: Local,
    environment: &'a Environment,
    params: RolloutParams,
    alarm: Alarm,
    /// The last step's episodes, in checkpoints too: a run that ended right after its last one has them there.
    last: PathBuf,
    /// With `overlap`, the episodes of the next step.
    ahead: Option<Collected>,
    group: Rc<Group>,
}

/// The `wanted` tasks of a step, of `all` that are ordered by difficulty: the next of a pass over those that the curriculum
/// has reached. They follow from the step, so that a checkpoint needs no place in the data.
fn tasks(step: u64, all: usize, wanted: usize, curriculum_steps: u64, seed: u64) -> Vec<usize> {
    let reached = match curriculum_steps {
        steps if step < steps => (all as u64 * (step + 1)).div_ceil(steps) as usize,
        _ => all,
    };
    let reached = reached.max(wanted.min(all));
    let place = |index: u64| {
        let (pass, place) = (index / reached as u64, (index % reached as u64) as usize);
        shuffled(reached, seed, pass)[place]
    };
    (0..wanted as u64).map(|index| place(step * wanted as u64 + index)).collect()
}

/// The episodes of a step, from the weights that the sampler has.
fn episodes(
    environment: &Environment,
    policy: &Local,
    params: &RolloutParams,
    step: u64,
    group: &Group,
) -> Result<Collected, TrainError> {
    // Each step draws anew, also where it meets a task again.
    let seed = params.seed.wrapping_mul(1_000_003).wrapping_add(step as i64);
    let all = environment.len();
    let tasks = tasks(step, all, params.tasks_per_step, params.curriculum_steps, params.seed as u64);
    environment
        .collect(policy, &tasks, params.samples, seed, group)
        .map_err(|error| TrainError { message: error.message, hint: error.hint })
}

impl Online<'_> {
    /// Learns from a step's episodes. With `overlap` those of the next step are made meanwhile, from the weights before this
    /// update; also in the last step, so that a run with more steps goes on from its checkpoint.
    fn learn(&mut self, collected: &Collected) -> Result<Metrics, TrainError> {
        if !self.params.overlap {
            return self.ppo.update(&collected.trajectories);
        }
        let (environment, policy, params) = (self.environment, &self.policy, &self.params);
        let next = self.ppo.step() + 1;
        let ppo = &mut self.ppo;
        let (metrics, ahead) = std::thread::scope(|scope| {
            let ahead = scope.spawn(move || episodes(environment, policy, params, next, &Group::alone()));
            (ppo.update(&collected.trajectories), ahead.join().expect("episodes do not panic"))
        });
        self.ahead = Some(ahead?);
        metrics
    }
}

impl Run for Online<'_> {
    fn step(&self) -> u64 {
        self.ppo.step()
    }

    fn update(&mut self) -> Result<Metrics, TrainError> {
        let step = self.ppo.step();
        let started = std::time::Instant::now();
        self.policy.sampler.update(self.ppo.actor().weights())?;
        let mut collected = match self.ahead.take() {
            Some(ahead) => ahead,
            None => episodes(self.environment, &self.policy, &self.params, step, &self.group)?,
        };
        let episodes = collected.trajectories.len() + collected.without_reward;
        if collected.trajectories.is_empty() {
            let message = format!("none of the {episodes} episodes of step {} has a reward", step + 1);
            return Err(TrainError::new(message).with_hint("`cuda-agent log STAGE` has the judge's messages"));
        }
        if self.group.is_first() {
            super::report::write_lines(&self.last, std::mem::take(&mut collected.rows).into_iter())?;
        }
        let waited_s = started.elapsed().as_secs_f64();
        let mut metrics = self.learn(&collected)?;
        let mut put = |name: &str, value: f64| metrics.insert(name.to_owned(), value);
        let share = |outcome: &str| collected.outcomes.get(outcome).copied().unwrap_or(0) as f64 / episodes as f64;
        put("rollout/correct", share("correct"));
        for outcome in collected.outcomes.keys() {
            put(&format!("rollout/outcome/{outcome}"), share(outcome));
        }
        put("rollout/without_reward", collected.without_reward as f64 / episodes as f64);
        put("timing_s/rollout", collected.took_s);
        put("timing_s/sampling_of_episodes", collected.sampling_s);
        put("timing_s/judging_of_episodes", collected.judging_s);
        let total = started.elapsed().as_secs_f64();
        put("timing_s/update", total - waited_s);
        let tokens: usize = collected.trajectories.iter().map(|trajectory| trajectory.ids.len()).sum();
        put("perf/throughput", tokens as f64 / total);
        match self.alarm.observe(&metrics).filter(|_| self.params.alarms) {
            None => Ok(metrics),
            Some(reason) => Err(TrainError::new(format!("the run has collapsed at step {}: {reason}", step + 1))
                .with_hint("the state folder has the last checkpoints; change a parameter, or set `alarms: false`")),
        }
    }

    fn save(&self, folder: &Path) -> Result<(), TrainError> {
        copy(&self.last, &folder.join(TRAJECTORIES))?;
        if let Some(ahead) = &self.ahead {
            let path = folder.join(AHEAD);
            std::fs::write(&path, super::json(ahead)).map_err(TrainError::file(&path))?;
        }
        self.ppo.save(folder)
    }

    fn load(&mut self, folder: &Path) -> Result<(), TrainError> {
        if self.group.is_first() {
            copy(&folder.join(TRAJECTORIES), &self.last)?;
        }
        if self.params.overlap {
            let path = folder.join(AHEAD);
            let text = std::fs::read(&path).map_err(TrainError::file(&path))?;
            let ahead = serde_json::from_slice(&text);
            self.ahead = Some(ahead.map_err(|error| TrainError::new(format!("{}: {error}", path.display())))?);
        }
        self.ppo.load(folder)
    }

    fn fingerprint(&self) -> u64 {
        self.ppo.fingerprint()
    }
}

/// Runs either kind: `form` is what they differ in, beside the defaults of their parameters.
pub fn ppo(program: &mut Program, form: Form, group: &Rc<Group>) -> Result<(), ProgramError> {
    let request = program.request.clone();
    let (rollout, learning): (RolloutParams, LearningParams) = (params(&request)?, params(&request)?);
    let model: ModelParams = params(&request)?;
    if rollout.overlap {
        can_overlap(request.resources.gpus.len(), group.size())?;
    }
    if rollout.exact && rollout.temperature != 1.0 {
        let error = ProgramError::input(format!("exact: true with temperature: {}", rollout.temperature));
        return Err(error.with_hint("sampler and trainer divide by other temperatures than 1 with different rounding"));
    }
    let folder = required(&request, "model")?;
    let settings = learning.settings(&rollout, &model);
    let actor = model.load(&request, folder, Head::Language)?.exact(rollout.exact);
    let critic_folder = input_path(&request, "critic").unwrap_or(folder);
    let critic = match settings.group_baseline {
        None => Some(model.load(&request, critic_folder, Head::Value)?),
        Some(_) => None,
    };
    let reference = match learning.kl_coefficient > 0.0 {
        true => Some(model.load_frozen(&request, folder)?),
        false => None,
    };
    let rules = Rules {
        form,
        turns: rollout.turns,
        score: rollout.score,
        goal: rollout.goal,
        sampling: Sampling {
            temperature: rollout.temperature,
            top_p: 1.0,
            top_k: None,
            max_tokens: rollout.max_tokens,
            stop: Vec::new(),
        },
        seed: rollout.seed,
        timing: rollout.timing,
        prefill: rollout.prefill,
    };
    let environment = Environment::open(&request, rollout.judge, rules, &rollout.curriculum, group)?;
    if let Some(first) = environment.refused.first() {
        let message = format!("{} tasks are left out; the first one: {first}", environment.refused.len());
        say(program, "warning", message);
    }
    if environment.len() == 0 {
        return Err(ProgramError::input("no task is left to train on"));
    }
    let policy = policy(&request, &model, &rollout, folder)?;
    let rate = AdaptiveRate { factor: 1.0, target: learning.adaptive_rate_kl };
    let ppo = Ppo::new(settings, actor, critic, reference, learning.kl(), rate)?.within(group.clone());
    let alarm = Alarm::new(AlarmSettings::default());
    let (steps, every) = (rollout.steps, rollout.checkpoint_every);
    let last = output_path(&request, "trajectories").with_extension("jsonl");
    let mut run = Online {
        ppo,
        policy,
        environment: &environment,
        params: rollout,
        alarm,
        last,
        ahead: None,
        group: group.clone(),
    };
    let log = train(program, &mut run, steps, every, group)?;
    if !group.is_first() {
        return Ok(());
    }
    write(run.ppo.actor(), output_path(&request, "model"), folder)?;
    write_adapter(run.ppo.actor(), &request)?;
    match run.ppo.critic() {
        Some(critic) => write(critic, output_path(&request, "critic"), critic_folder)?,
        // The port is there for every algorithm; without a critic it is an empty folder with a note.
        None => note_without_critic(output_path(&request, "critic"))?,
    }
    log.write(&request)?;
    Ok(())
}

/// Whether one side can compute while the other judges.
fn can_overlap(gpus: usize, processes: usize) -> Result<(), ProgramError> {
    let refused = |message: &str, hint: &str| ProgramError { hint: Some(hint.into()), ..ProgramError::input(message) };
    match (gpus, processes) {
        (1, _) => Err(refused(
            "overlap: true, but the stage has one GPU, which can't judge while it computes",
            "give it two: resources: {gpu: 2}, with processes: 1",
        )),
        (_, 2..) => Err(refused(
            "overlap: true goes with one process, whose other GPUs judge",
            "set processes: 1, or overlap: false",
        )),
        _ => Ok(()),
    }
}

fn policy(
    request: &Request,
    model: &ModelParams,
    rollout: &RolloutParams,
    folder: &Path,
) -> Result<Local, ProgramError> {
    let decoder: Decoder = model.load_frozen(request, folder)?.exact(rollout.exact);
    let options = Options { slots: rollout.sampler_slots, capacity: rollout.sampler_capacity, is_plain: false };
    let sampler = Sampler::new(decoder, Some(Tokenizer::load(folder).map_err(super::input)?), options);
    Ok(Local { sampler, tokenizer: Tokenizer::load(folder).map_err(super::input)?, width: rollout.sampler_slots })
}

fn copy(from: &Path, to: &Path) -> Result<(), TrainError> {
    std::fs::copy(from, to).map(drop).map_err(TrainError::file(from))
}

fn note_without_critic(folder: &Path) -> Result<(), TrainError> {
    std::fs::create_dir_all(folder).map_err(TrainError::file(folder))?;
    let path = folder.join("README.md");
    std::fs::write(&path, "This algorithm has a baseline of groups, and no critic.\n").map_err(TrainError::file(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_is_drawn_once_a_pass_and_passes_differ() {
        let drawn: Vec<usize> = (0..12).flat_map(|step| tasks(step, 9, 3, 0, 7)).collect();
        let mut passes: Vec<Vec<usize>> = drawn.chunks(9).map(<[usize]>::to_vec).collect();
        assert_ne!(passes[0], passes[1]);
        for pass in &mut passes {
            pass.sort_unstable();
            assert_eq!(*pass, (0..9).collect::<Vec<_>>());
        }
        assert_ne!(tasks(0, 9, 3, 0, 8), tasks(0, 9, 3, 0, 7), "the seed counts");
        assert_eq!(tasks(0, 2, 5, 0, 7).len(), 5, "fewer tasks than wanted come again");
    }

    #[test]
    fn one_card_or_several_processes_do_not_overlap() {
        let refused = |gpus, processes| can_overlap(gpus, processes).err().map(|error| error.hint.is_some());
        assert_eq!([refused(0, 1), refused(2, 1), refused(3, 1)], [None; 3]);
        assert_eq!([refused(1, 1), refused(2, 2), refused(0, 2)], [Some(true); 3]);
    }

    #[test]
    fn a_curriculum_reaches_further_from_step_to_step() {
        let hardest = |step| tasks(step, 100, 8, 5, 7).into_iter().max().unwrap();
        for step in 0..5 {
            assert!(hardest(step) < 20 * (step as usize + 1), "{step}: {}", hardest(step));
        }
        let after: Vec<usize> = (5..30).flat_map(|step| tasks(step, 100, 8, 5, 7)).collect();
        assert!((0..100).all(|task| after.contains(&task)));
        assert!(tasks(0, 100, 40, 50, 7).into_iter().all(|task| task < 40), "as many as a step wants are within reach");
    }
}
