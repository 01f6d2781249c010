use std::collections::VecDeque;
use std::sync::Mutex;

use cuda_agent_kernels::reference::{Policy as Precision, Protocol};
use cuda_agent_kernels::verdict::Outcome;

use super::*;
use crate::policy::scripted::Scripted;
use crate::policy::{Identity, Tokens as Sampled};

const CONTRACT: &str = "namespace task {\nconstexpr long long x_size = 2048;\nconstexpr long long out_size = 2048;\n}\n\
    #define TASK_PARAMETERS const float* x, float* out\n";

pub(crate) fn assignment() -> Assignment {
    let code = "class Model(nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n".to_owned();
    let set = serde_json::Map::new();
    Assignment {
        task: Task { code, name: "t".into(), set, protocol: Protocol::CudaAgent, policy: Precision::Strict },
        contract: Contract {
            header: CONTRACT.into(),
            parameters: "const float* x, float* out".into(),
            steps: String::new(),
        },
    }
}

pub(crate) fn rules(form: Form) -> Rules {
    let sampling = Sampling { temperature: 1.0, top_p: 1.0, top_k: None, max_tokens: 4096, stop: Vec::new() };
    Rules { form, turns: 4, score: Score::Last, goal: 1.0, sampling, seed: 3, timing: false, prefill: true }
}

pub(crate) fn judged(outcome: Outcome, reward: Option<f64>) -> Judged {
    Judged {
        outcome,
        message: "why".into(),
        report: "wrong: at out[7]".into(),
        reward,
        speedup_eager: None,
        speedup_compile: None,
        seconds: 0.5,
    }
}

/// Gives these verdicts in turn, and notes what it was asked.
struct Verdicts(Mutex<VecDeque<Judged>>, Mutex<Vec<String>>);

impl Verdicts {
    fn of(verdicts: impl IntoIterator<Item = (Outcome, Option<f64>)>) -> Self {
        let verdicts = verdicts.into_iter().map(|(outcome, reward)| judged(outcome, reward));
        Self(Mutex::new(verdicts.collect()), Mutex::default())
    }
}

impl Judging for Verdicts {
    fn ask(&self, _: &Task, source: &str, _: bool) -> Result<Judged, EvaluatorError> {
        self.1.lock().unwrap().push(source.to_owned());
        self.0.lock().unwrap().pop_front().ok_or_else(|| EvaluatorError::new("nobody is left to judge"))
    }
}

fn run(policy: &dyn Policy, judge: &Verdicts, rules: &Rules) -> Result<Trajectory, EpisodeError> {
    let (prompts, phases) = (Prompts::own(), Phases::new(true));
    Stage { policy, judge, prompts: &prompts, phases: &phases, rules }.run(&assignment(), 2)
}

const WRONG: (Outcome, Option<f64>) = (Outcome::Wrong, Some(-1.0));
const CORRECT: (Outcome, Option<f64>) = (Outcome::Correct, Some(1.0));

fn roles(trajectory: &Trajectory) -> Vec<Role> {
    trajectory.turns.iter().map(|turn| turn.role).collect()
}

#[test]
fn a_single_episode_is_one_answer() {
    let judge = Verdicts::of([WRONG, CORRECT]);
    let trajectory = run(&Scripted, &judge, &rules(Form::Single)).unwrap();
    trajectory.check().unwrap();
    assert_eq!(roles(&trajectory), [Role::User, Role::Assistant]);
    assert_eq!((trajectory.reward, trajectory.finish_reason), (Some(-1.0), Ending::Complete));
    let source = trajectory.turns[1].source.as_deref().unwrap();
    assert!(source.starts_with("#include \"task.h\"") && source.ends_with("256);\n"), "{source}");
    assert_eq!(judge.1.lock().unwrap().as_slice(), [source]);
    assert_eq!(trajectory.judging_s, 0.5);
}

#[test]
fn a_repair_episode_goes_on_until_it_is_right() {
    let trajectory = run(&Scripted, &Verdicts::of([WRONG, WRONG, CORRECT, WRONG]), &rules(Form::Repair)).unwrap();
    trajectory.check().unwrap();
    let expected = [Role::User, Role::Assistant].repeat(3);
    assert_eq!(roles(&trajectory), expected);
    assert_eq!(trajectory.reward, Some(1.0));
    assert!(trajectory.turns[2].text.contains("wrong: at out[7]"), "{}", trajectory.turns[2].text);
    let rewards: Vec<Option<f64>> = trajectory.turns.iter().map(|turn| turn.reward).collect();
    assert_eq!(rewards, [None, Some(-1.0), None, Some(-1.0), None, Some(1.0)]);
}

#[test]
fn it_ends_after_its_turns_and_at_its_goal() {
    let wrong = run(&Scripted, &Verdicts::of([WRONG; 9]), &Rules { turns: 2, ..rules(Form::Repair) }).unwrap();
    assert_eq!((roles(&wrong).len(), wrong.reward), (4, Some(-1.0)));
    let verdicts = [CORRECT, (Outcome::Correct, Some(3.0)), WRONG];
    let fast = run(&Scripted, &Verdicts::of(verdicts), &Rules { goal: 3.0, ..rules(Form::Repair) }).unwrap();
    assert_eq!((roles(&fast).len(), fast.reward), (4, Some(3.0)));
}

#[test]
fn the_last_or_the_best_answer_counts() {
    let reward = |score| {
        let verdicts = Verdicts::of([CORRECT, WRONG]);
        run(&Scripted, &verdicts, &Rules { score, goal: 3.0, turns: 2, ..rules(Form::Repair) }).unwrap().reward
    };
    assert_eq!((reward(Score::Last), reward(Score::Best)), (Some(-1.0), Some(1.0)));
}

/// The policy's tokens alone have mask 1, and what a turn sampled is what the next one is asked with.
#[test]
fn tokens_are_kept_as_they_were_sampled() {
    let trajectory = run(&Scripted, &Verdicts::of([WRONG, CORRECT]), &rules(Form::Repair)).unwrap();
    let tokens = trajectory.tokens.as_ref().unwrap();
    let text = |range: std::ops::Range<usize>| {
        let bytes: Vec<u8> = tokens.ids[range].iter().filter(|id| **id < 256).map(|id| *id as u8).collect();
        String::from_utf8(bytes).unwrap()
    };
    for turn in &trajectory.turns {
        let range = turn.start.unwrap()..turn.end.unwrap();
        let generated = turn.role == Role::Assistant;
        assert!(tokens.mask[range.clone()].iter().all(|mask| *mask == generated));
        if generated {
            // The prefill was given, and is in the turn before.
            assert!(turn.text.ends_with(text(range.clone()).trim_start()), "{}", text(range));
        } else {
            assert!(text(range.clone()).contains(&turn.text), "{}", text(range));
        }
    }
    assert_eq!(trajectory.reward_at, Some(tokens.ids.len() - 1));
    assert_eq!(trajectory.generated(), Some(tokens.mask.iter().filter(|mask| **mask).count()));
}

#[test]
fn the_same_seed_gives_the_same_episode() {
    let episode = |seed| {
        let rules = Rules { seed, ..rules(Form::Single) };
        let trajectory = run(&Scripted, &Verdicts::of([WRONG]), &rules).unwrap();
        Trajectory { sampling_s: 0.0, ..trajectory }
    };
    assert_eq!(episode(3), episode(3));
    assert!((0..40).any(|seed| episode(seed).tokens != episode(3).tokens));
}

#[test]
fn what_nothing_is_said_of_has_no_reward() {
    let unsupported = (Outcome::Unsupported, None);
    let trajectory = run(&Scripted, &Verdicts::of([unsupported, CORRECT]), &rules(Form::Repair)).unwrap();
    trajectory.check().unwrap();
    assert_eq!((trajectory.reward, trajectory.reward_at, roles(&trajectory).len()), (None, None, 2));
}

/// A policy with answers of its own: text, and whether tokens are known.
struct Fixed(Vec<Result<(&'static str, Finish, bool), PolicyError>>);

impl Policy for Fixed {
    fn identity(&self) -> Identity {
        Identity { model: "fixed".into(), digest: Some("d".into()) }
    }

    fn width(&self) -> usize {
        1
    }

    fn complete(&self, request: &Request) -> Result<Completion, PolicyError> {
        let (text, finish, knows) = self.0[request.key.turn as usize].clone()?;
        // Every turn's prompt is rendered anew, as a chat server does: it does not go on from the ids before.
        let prompt_ids = vec![request.key.turn; 5];
        let tokens = knows.then(|| Sampled { prompt_ids, ids: vec![9, 9], log_probs: vec![-0.5, -0.5] });
        let (prompt_tokens, completion_tokens) = (None, None);
        Ok(Completion { text: text.into(), finish, tokens, prompt_tokens, completion_tokens, seconds: 1.0 })
    }
}

fn fixed(
    answers: impl IntoIterator<Item = Result<(&'static str, Finish, bool), PolicyError>>,
    verdicts: impl IntoIterator<Item = (Outcome, Option<f64>)>,
) -> Trajectory {
    let rules = Rules { prefill: false, ..rules(Form::Repair) };
    let trajectory = run(&Fixed(answers.into_iter().collect()), &Verdicts::of(verdicts), &rules).unwrap();
    trajectory.check().unwrap();
    trajectory
}

const KERNEL: &str = "```\n__global__ void f();\nTASK_LAUNCH(f, 1, 1);\n```";

#[test]
fn an_answer_without_a_candidate_is_incorrect_and_nobody_is_asked() {
    let answers = [Ok(("I can't.", Finish::Stop, true)), Ok((KERNEL, Finish::Stop, false))];
    let trajectory = fixed(answers, [CORRECT]);
    assert_eq!(trajectory.turns[1].outcome.as_deref(), Some(NO_CANDIDATE));
    assert_eq!(trajectory.turns[1].reward, Some(-1.0));
    assert!(trajectory.turns[2].text.contains("no code block"), "{}", trajectory.turns[2].text);
    assert_eq!((trajectory.reward, trajectory.sampling_s), (Some(1.0), 2.0));
}

#[test]
fn ids_that_do_not_go_on_are_not_kept() {
    let answers = [Ok((KERNEL, Finish::Stop, true)), Ok((KERNEL, Finish::Stop, true))];
    let trajectory = fixed(answers, [WRONG, CORRECT]);
    assert_eq!((trajectory.tokens.as_ref(), trajectory.reward), (None, Some(1.0)));
    assert!(trajectory.turns.iter().all(|turn| turn.start.is_none()));
}

#[test]
fn a_cut_off_answer_is_judged_and_says_so() {
    let rules = Rules { prefill: false, ..rules(Form::Single) };
    let policy = Fixed(vec![Ok((&KERNEL[..KERNEL.len() - 4], Finish::Length, true))]);
    let trajectory = run(&policy, &Verdicts::of([WRONG]), &rules).unwrap();
    assert_eq!((trajectory.finish_reason, trajectory.reward), (Ending::Length, Some(-1.0)));
}

#[test]
fn what_the_policy_breaks_off_has_no_reward() {
    for last in [Err(PolicyError::Refused("too long".into())), Ok((KERNEL, Finish::Abort, false))] {
        for before in [vec![], vec![Ok((KERNEL, Finish::Stop, true))]] {
            let verdicts = [WRONG].into_iter().cycle().take(before.len());
            let trajectory = fixed(before.into_iter().chain([last.clone()]), verdicts);
            assert_eq!((trajectory.finish_reason, trajectory.reward), (Ending::Aborted, None));
        }
    }
}

#[test]
fn errors_end_an_episode_without_a_trajectory() {
    let error = run(&Scripted, &Verdicts::of([]), &rules(Form::Single)).unwrap_err();
    assert_eq!(error, EpisodeError::Judge(EvaluatorError::new("nobody is left to judge")));
    let failed = PolicyError::Failed("busy".into());
    let error = run(&Fixed(vec![Err(failed.clone())]), &Verdicts::of([]), &rules(Form::Single)).unwrap_err();
    assert_eq!(error, EpisodeError::Policy(failed));
}
