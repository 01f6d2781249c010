//! The stage kind `agent/rollout`: tasks in, trajectories out.
//!
//! A row is a task, and its answer is `samples` trajectories. As many rows are in work as keep the policy and the evaluator
//! busy; an episode is a thread.

use std::collections::BTreeMap;
use std::sync::Mutex;

use cuda_agent_kernels::fault::EvaluatorError;
use cuda_agent_kernels::judge::{Admission, Judge};
use cuda_agent_kernels::stage;
use cuda_agent_protocol::request::InputFile;
use cuda_agent_protocol::{Event, InputRequest, Program, ProgramError, Request, RowInput, RowResult, RowStatus};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::episode::{Assignment, EpisodeError, Rules, Stage};
use crate::examples::Examples;
use crate::phases::Phases;
use crate::policy::anthropic::Messages;
use crate::policy::endpoint::Endpoint;
use crate::policy::http::Client;
use crate::policy::openai::{ByTokens, Chat};
use crate::policy::sampler::{self, Sampler};
use crate::policy::scripted::Scripted;
use crate::policy::served::{Served, Server, Settings};
use crate::policy::spread::Spread;
use crate::policy::{Policy, PolicyError, Sampling, anthropic, openai};
use crate::prompts::Prompts;
use crate::series::{SamplePlan, Series};
use crate::trajectory::{Ending, Trajectory};

/// The value of `LLM_ENDPOINT` that says: use what is recorded, call nothing.
const REPLAY_ONLY: &str = "replay-only";

/// Runs the stage.
pub fn main() -> u8 {
    Program::main(|program| {
        let request = program.request.clone();
        let rules = rules(&request)?;
        let plan = SamplePlan {
            samples: parameter(&request, "samples")?,
            enough: parameter(&request, "enough")?,
            most: parameter(&request, "most_samples")?,
            examples: parameter(&request, "examples_per_task")?,
            forget_examples: parameter(&request, "forget_examples")?,
        };
        let prompts = prompts(&request)?;
        let examples = examples(&request)?;
        if let Some(examples) = &examples {
            let message = format!("{} tasks have a correct answer to show as an example", examples.len());
            program.send(&Event::Log { level: "info".into(), message });
        }
        let place = Place::of(&request, rules.timing);
        // First: an endpoint that is missing is told before anything is started.
        let policy = policy(&request, place)?;
        let judge = stage::judge(&request, usize::from(place == Place::First))?;
        let phases = Phases::new(place == Place::InTurn);
        let rollout = Rollout {
            series: Series {
                stage: Stage {
                    policy: policy.as_ref(),
                    judge: &judge,
                    prompts: &prompts,
                    phases: &phases,
                    rules: &rules,
                },
                plan,
                examples: examples.as_ref(),
            },
            judge: &judge,
            counts: Mutex::default(),
        };
        let rows = (policy.width() + judge.width()).div_ceil(plan.samples as usize);
        let window = request.by_row.as_ref().map_or(1, |by_row| by_row.window as usize);
        program.each_row_at_once(rows.clamp(1, window), |row| rollout.answer(&row))?;
        let counts = rollout.counts.into_inner().expect("no panics while it was held");
        counts.report(program);
        Ok(())
    })
}

impl From<PolicyError> for ProgramError {
    fn from(error: PolicyError) -> Self {
        match error {
            PolicyError::Unusable { kind, message, hint } => Self { kind: kind.into(), message, hint },
            PolicyError::Failed(message) | PolicyError::Refused(message) => Self::environment(message),
        }
    }
}

/// Where the policy samples, beside the judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// On no card of this stage.
    Elsewhere,
    /// On the one card, while nothing is judged.
    InTurn,
    /// On the first of several cards. The others judge: a clock beside a sampler lies.
    First,
    /// On all of several cards, as the judge does, which takes no times.
    Everywhere,
}

impl Place {
    fn of(request: &Request, timing: bool) -> Self {
        match (is_local(request), request.resources.gpus.len(), timing) {
            (false, ..) | (true, 0, _) => Self::Elsewhere,
            (true, 1, _) => Self::InTurn,
            (true, _, true) => Self::First,
            (true, _, false) => Self::Everywhere,
        }
    }
}

/// What the rows share.
struct Rollout<'a> {
    series: Series<'a>,
    judge: &'a Judge,
    counts: Mutex<Counts>,
}

impl Rollout<'_> {
    fn answer(&self, row: &RowInput) -> Result<RowResult, ProgramError> {
        let Some(code) = row.columns.get("code").and_then(Value::as_str) else {
            return Ok(ended(row, RowStatus::Rejected, "format", "the row has no code".into()));
        };
        let task = self.judge.task(code);
        let contract = match self.judge.admit(&task) {
            Ok(Admission::Admitted(contract)) => contract,
            Ok(Admission::Refused(why)) => return Ok(ended(row, RowStatus::Rejected, "task", why)),
            Err(error) => return self.evaluator_failed(row, error),
        };
        match self.series.episodes(&Assignment { task, contract }) {
            Ok(trajectories) => self.done(row, &trajectories),
            Err(EpisodeError::Policy(PolicyError::Failed(why))) => Ok(ended(row, RowStatus::Failed, "endpoint", why)),
            Err(EpisodeError::Policy(error)) => Err(error.into()),
            Err(EpisodeError::Judge(error)) => self.evaluator_failed(row, error),
        }
    }

    /// Ends the stage where no row can do better.
    fn evaluator_failed(&self, row: &RowInput, error: EvaluatorError) -> Result<RowResult, ProgramError> {
        self.judge.is_in_service().map_err(cuda_agent_kernels::stage::environment)?;
        Ok(ended(row, RowStatus::Failed, "evaluator", error.message))
    }

    fn done(&self, row: &RowInput, trajectories: &[Trajectory]) -> Result<RowResult, ProgramError> {
        let rows = trajectories.iter().map(Trajectory::to_row).collect::<Result<Vec<_>, _>>();
        let rows = rows.map_err(|broken| ProgramError {
            kind: "internal".into(),
            message: broken.to_string(),
            hint: Some("a policy or an episode is at fault; the trajectory was not kept".into()),
        })?;
        let mut counts = self.counts.lock().expect("no panics while it is held");
        trajectories.iter().for_each(|trajectory| counts.add(trajectory));
        let outputs = BTreeMap::from([("trajectories".to_owned(), rows)]);
        Ok(RowResult { row: row.row.clone(), status: RowStatus::Done, reason: None, detail: None, outputs })
    }
}

fn ended(row: &RowInput, status: RowStatus, reason: &str, detail: String) -> RowResult {
    let (reason, outputs) = (Some(reason.to_owned()), BTreeMap::new());
    RowResult { row: row.row.clone(), status, reason, detail: Some(detail), outputs }
}

/// What came of the episodes.
#[derive(Default)]
struct Counts {
    episodes: u64,
    /// Of the last verdict.
    outcomes: BTreeMap<String, u64>,
    rewarded: u64,
    reward: f64,
    cut_off: u64,
    aborted: u64,
    generated: u64,
}

impl Counts {
    fn add(&mut self, trajectory: &Trajectory) {
        self.episodes += 1;
        let outcome = trajectory.last_verdict().and_then(|turn| turn.outcome.clone());
        *self.outcomes.entry(outcome.unwrap_or_else(|| "unjudged".to_owned())).or_default() += 1;
        self.rewarded += u64::from(trajectory.reward.is_some());
        self.reward += trajectory.reward.unwrap_or(0.0);
        self.cut_off += u64::from(trajectory.finish_reason == Ending::Length);
        self.aborted += u64::from(trajectory.finish_reason == Ending::Aborted);
        self.generated += trajectory.generated().unwrap_or(0) as u64;
    }

    fn report(&self, program: &mut Program) {
        if self.episodes == 0 {
            return;
        }
        let outcomes: Vec<String> = self.outcomes.iter().map(|(outcome, count)| format!("{count} {outcome}")).collect();
        let dropped = self.episodes - self.rewarded;
        let message = format!(
            "{} episodes: {}; {dropped} without a reward, {} cut off, {} broken off",
            self.episodes,
            outcomes.join(", "),
            self.cut_off,
            self.aborted
        );
        program.send(&Event::Log { level: "info".into(), message });
        let share = |count: u64| count as f64 / self.episodes as f64;
        let correct = self.outcomes.get("correct").copied().unwrap_or(0);
        for (name, value) in [
            ("rollout/episodes", self.episodes as f64),
            ("rollout/correct", share(correct)),
            ("rollout/reward_mean", self.reward / self.rewarded.max(1) as f64),
            ("rollout/without_reward", share(dropped)),
            ("rollout/cut_off", share(self.cut_off)),
            ("rollout/generated_tokens", self.generated as f64),
        ] {
            program.send(&Event::Metric { name: name.into(), step: None, value });
        }
    }
}

fn parameter<T: DeserializeOwned>(request: &Request, name: &str) -> Result<T, ProgramError> {
    let value = request.params.get(name).cloned().unwrap_or(Value::Null);
    serde_json::from_value(value.clone()).map_err(|error| ProgramError {
        kind: "params".into(),
        message: format!("{name}: {value}: {error}"),
        hint: None,
    })
}

fn rules(request: &Request) -> Result<Rules, ProgramError> {
    let top_k: u32 = parameter(request, "top_k")?;
    Ok(Rules {
        form: parameter(request, "form")?,
        turns: parameter(request, "turns")?,
        score: parameter(request, "score")?,
        goal: parameter(request, "goal")?,
        sampling: Sampling {
            temperature: parameter(request, "temperature")?,
            top_p: parameter(request, "top_p")?,
            top_k: (top_k > 0).then_some(top_k),
            max_tokens: parameter(request, "max_tokens")?,
            stop: parameter(request, "stop")?,
        },
        seed: parameter(request, "seed")?,
        timing: parameter(request, "timing")?,
        prefill: parameter(request, "prefill")?,
    })
}

fn input<'a>(request: &'a Request, port: &str) -> Option<&'a InputFile> {
    match request.inputs.get(port) {
        Some(InputRequest::One(file)) => Some(file),
        _ => None,
    }
}

fn prompts(request: &Request) -> Result<Prompts, ProgramError> {
    let Some(folder) = input(request, "prompts") else { return Ok(Prompts::own()) };
    Prompts::with(&folder.path).map_err(|error| ProgramError::input(error.to_string()))
}

fn examples(request: &Request) -> Result<Option<Examples>, ProgramError> {
    let Some(table) = input(request, "examples") else { return Ok(None) };
    let read = Examples::read(&table.path).map_err(|error| ProgramError::input(format!("examples: {error}")));
    read.map(Some)
}

fn is_local(request: &Request) -> bool {
    request.params.get("api").and_then(Value::as_str) == Some("local")
}

fn policy(request: &Request, place: Place) -> Result<Box<dyn Policy>, ProgramError> {
    let mismatch = |message: &str, hint: &str| Err(PolicyError::params(message, hint).into());
    let settings = Settings { model: parameter(request, "model")?, body: parameter(request, "body")? };
    let api: String = parameter(request, "api")?;
    match (api.as_str(), input(request, "model")) {
        ("local", Some(model)) => {
            let (context, slots) = (parameter(request, "context")?, parameter(request, "slots")?);
            Ok(Box::new(local(model, context, slots, place)?))
        }
        ("local", None) => mismatch("api: local, but there is no model", "give the stage an input `model`"),
        (_, Some(_)) => mismatch("the stage has an input `model`", "`api: local` is what samples from it"),
        ("scripted", None) => Ok(Box::new(Scripted)),
        (api, None) if settings.model.trim().is_empty() => {
            mismatch(&format!("api: {api}, but the parameter model is empty"), "the name that the endpoint knows it by")
        }
        (api, None) => served(api, settings),
    }
}

/// A model artifact with room for `slots` conversations (0: as its program thinks fit) of `context` tokens on each GPU.
fn local(model: &InputFile, context: u32, slots: u32, place: Place) -> Result<Spread<Sampler>, PolicyError> {
    let slots = (slots > 0).then(|| ["--slots".to_owned(), slots.to_string()]);
    let options: Vec<String> =
        ["--capacity".to_owned(), context.to_string()].into_iter().chain(slots.into_iter().flatten()).collect();
    let folder = std::path::absolute(&model.path).unwrap_or_else(|_| model.path.clone());
    let gpus = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let gpus: Vec<&str> = gpus.split(',').filter(|gpu| !gpu.is_empty()).collect();
    let used = if place == Place::Everywhere { gpus.len() } else { 1 };
    let program = sampler::find()?;
    let start = |gpu| Sampler::start(&program, &folder, &options, Some(model.digest.clone()), gpu);
    // Loading takes seconds: side by side.
    let samplers = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..used).map(|number| gpus.get(number).copied()).map(|gpu| scope.spawn(move || start(gpu))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect::<Result<_, _>>()
    })?;
    Ok(Spread::new(samplers))
}

/// A policy behind `LLM_ENDPOINT`.
fn served(api: &str, settings: Settings) -> Result<Box<dyn Policy>, ProgramError> {
    refuse_fields(&settings.body)?;
    let text = std::env::var("LLM_ENDPOINT").unwrap_or_default();
    if text.trim() == REPLAY_ONLY {
        let hint =
            "run with the parameters and the prompts of the recording, or give LLM_ENDPOINT the address of a model";
        let message = "some tasks have no recorded episodes, and nothing may be called";
        return Err(PolicyError::params(message, hint).into());
    }
    let key = std::env::var("LLM_API_KEY").ok().map(|key| key.trim().to_owned()).filter(|key| !key.is_empty());
    let server = |own: &str, headers: fn(Option<&str>) -> Vec<(&'static str, String)>| {
        let endpoint = Endpoint::parse(&text, own)?;
        let client = Client::new(endpoint, headers(key.as_deref()), key.clone());
        Ok::<_, PolicyError>(Server { client, settings })
    };
    Ok(match api {
        "anthropic" => Box::new(Served { format: Messages, server: server(anthropic::OWN_URL, anthropic::headers)? }),
        "openai-tokens" => Box::new(Served { format: ByTokens, server: server(openai::OWN_URL, openai::headers)? }),
        _ => Box::new(Served { format: Chat, server: server(openai::OWN_URL, openai::headers)? }),
    })
}

fn refuse_fields(body: &Map<String, Value>) -> Result<(), PolicyError> {
    const OURS: [&str; 5] = ["messages", "prompt", "system", "stream", "n"];
    let taken: Vec<&str> = OURS.into_iter().filter(|name| body.contains_key(*name)).collect();
    if taken.is_empty() {
        return Ok(());
    }
    Err(PolicyError::params(
        format!("body can't set {}", taken.join(", ")),
        "the prompts are files: see the input `prompts`",
    ))
}
