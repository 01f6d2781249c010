//! What a policy is asked, and what its answers are worth.
//!
//! Each of several processes works with its part of a step's tasks, with a sampler and a judge of its own, and all of them get all
//! episodes. A task comes to the same process again where that makes no other wait, since the judge of that one knows it: its
//! reference, its baselines, its verdicts.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;
use std::vec::IntoIter;

use cuda_agent_agent::episode::{Assignment, EpisodeError, Judging, Rules, Stage};
use cuda_agent_agent::phases::Phases;
use cuda_agent_agent::policy::{Finish, Key, Message, Policy, Prefix, Request as Question, Role, Sampling};
use cuda_agent_agent::prompts::Prompts;
use cuda_agent_agent::trajectory::{self, Ending, Form, Trajectory as Episode, Turn};
use cuda_agent_kernels::judge::{Admission, Judge};
use cuda_agent_kernels::stage::environment;
use cuda_agent_protocol::{ProgramError, Request};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::policy::Local;
use super::{episodes, input_path, json};
use crate::TrainError;
use crate::group::Group;
use crate::trainer::trajectory::Trajectory;

/// A task of the table.
struct Row {
    code: String,
    /// The text that answers are compared with, where `judge: expected` asks for one.
    expected: Option<String>,
}

/// Who says what an answer is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The evaluator's verdicts on CUDA kernels.
    Kernels,
    /// How much of the text `expected` and of the answer is the same beginning.
    Expected,
}

/// Tasks, and how episodes with them go.
pub struct Environment {
    rules: Rules,
    /// Tasks that are left, in the order of their table, each with the process that it was admitted by.
    tasks: Vec<(usize, Task)>,
    kind: Kind,
    /// Why tasks were left out.
    pub refused: Vec<String>,
}

enum Task {
    Kernel(Assignment),
    Text(Row),
}

enum Kind {
    Kernels { judge: Box<Judge>, prompts: Prompts, phases: Phases },
    Expected,
}

/// The episodes of one step, ordered by task and sample. Made of plain values, so that a checkpoint can hold those of a step that
/// is still to come.
#[derive(Default, Serialize, Deserialize)]
pub struct Collected {
    /// Those with a reward, ordered by task and sample.
    pub trajectories: Vec<Trajectory>,
    /// Number of episodes without one: dropped from the loss.
    pub without_reward: usize,
    /// Seconds from the first question to the last verdict.
    pub took_s: f64,
    /// Seconds that sampling took, added up over episodes.
    pub sampling_s: f64,
    /// Seconds that verdicts took, added up over episodes.
    pub judging_s: f64,
    /// Episodes by the outcome of their last verdict; `unjudged` without one.
    pub outcomes: BTreeMap<String, usize>,
    /// Every episode as a row of a table of trajectories.
    pub rows: Vec<Value>,
}

impl Environment {
    /// Reads the tasks and starts what judges.
    pub fn open(
        request: &Request,
        source: Source,
        rules: Rules,
        column: &str,
        group: &Group,
    ) -> Result<Self, ProgramError> {
        let path = super::required(request, "tasks")?;
        let rows = read(path, source, column)?.into_iter().enumerate();
        let rows = rows.map(|(index, row)| (index % group.size(), row));
        let (mut tasks, mut refused) = (Vec::new(), Vec::new());
        if source == Source::Expected {
            let tasks = rows.map(|(owner, row)| (owner, Task::Text(row))).collect();
            return Ok(Self { rules, tasks, kind: Kind::Expected, refused });
        }
        let prompts = match input_path(request, "prompts") {
            Some(folder) => Prompts::with(folder).map_err(|error| ProgramError::input(error.to_string()))?,
            None => Prompts::own(),
        };
        // Of a process's cards the first one computes and the others judge. One card can't do both at once.
        let gpus = request.resources.gpus.len();
        let judge = cuda_agent_kernels::stage::judge(&own_folder(request, group)?, usize::from(gpus > 1))?;
        let rows: Vec<(usize, Row)> = rows.collect();
        let mut admitted = admit(&judge, &rows, group)?;
        for (owner, row) in rows {
            let task = judge.task(&row.code);
            match admitted[owner].next() {
                Some(Admission::Admitted(contract)) => tasks.push((owner, Task::Kernel(Assignment { task, contract }))),
                Some(Admission::Refused(why)) => refused.push(why),
                None => return Err(TrainError::new("a process has admitted fewer tasks than it was given").into()),
            }
        }
        let kind = Kind::Kernels { judge: Box::new(judge), prompts, phases: Phases::new(gpus == 1) };
        Ok(Self { rules, tasks, kind, refused })
    }

    /// Number of tasks that may be worked with.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// `samples` episodes with each of `chosen` tasks, all of them side by side. `seed` keys their random numbers, so that it
    /// doesn't matter which process has which.
    pub fn collect(
        &self,
        policy: &Local,
        chosen: &[usize],
        samples: u32,
        seed: i64,
        group: &Group,
    ) -> Result<Collected, ProgramError> {
        let started = Instant::now();
        let rules = Rules { seed, ..self.rules.clone() };
        let owners: Vec<usize> = chosen.iter().map(|task| self.tasks[*task].0).collect();
        let workers = workers(&owners, group.size());
        let own = chosen.iter().zip(&workers).filter(|(_, worker)| **worker == group.rank());
        let own: Vec<usize> = own.map(|(task, _)| *task).collect();
        policy.sampler.together(own.len() * samples as usize);
        let ends: Vec<_> = std::thread::scope(|scope| {
            let rules = &rules;
            let pairs = own.into_iter().flat_map(|task| (0..samples).map(move |sample| (task, sample)));
            let threads: Vec<_> =
                pairs.map(|(task, sample)| scope.spawn(move || self.episode(policy, rules, task, sample))).collect();
            threads.into_iter().map(|thread| thread.join().expect("an episode does not panic")).collect()
        });
        let own: Vec<One> = ends.into_iter().collect::<Result<_, _>>()?;
        let mut all: Vec<_> = exchange(group, own)?.into_iter().map(Vec::into_iter).collect();
        let mut collected = Collected::default();
        for worker in workers {
            all[worker].by_ref().take(samples as usize).for_each(|one| collected.add(one));
        }
        collected.took_s = started.elapsed().as_secs_f64();
        Ok(collected)
    }

    fn episode(&self, policy: &Local, rules: &Rules, task: usize, sample: u32) -> Result<One, ProgramError> {
        match (&self.tasks[task].1, &self.kind) {
            (Task::Kernel(assignment), Kind::Kernels { judge, prompts, phases }) => {
                let judge: &dyn Judging = judge.as_ref();
                let stage = Stage { policy, judge, prompts, phases, rules };
                let mut row = stage.run(assignment, sample).map_err(|error| match error {
                    EpisodeError::Policy(error) => error.into(),
                    EpisodeError::Judge(error) => environment(error),
                })?;
                row.code.clone_from(&assignment.task.code);
                let outcome = row.last_verdict().and_then(|turn| turn.outcome.clone());
                let (sampling_s, judging_s) = (row.sampling_s, row.judging_s);
                let line = line(&row)?;
                Ok(One { trajectory: episodes::trajectory(row)?, sampling_s, judging_s, outcome, line })
            }
            (Task::Text(row), _) => text_episode(policy, rules, row, sample),
            (Task::Kernel(_), Kind::Expected) => unreachable!("tasks and kind are made together"),
        }
    }
}

/// The request with a folder for this process's judge: its journal is its own.
fn own_folder(request: &Request, group: &Group) -> Result<Request, ProgramError> {
    let mut request = request.clone();
    if !group.is_first() {
        request.state_dir.push(format!("process-{}", group.rank()));
        std::fs::create_dir_all(&request.state_dir).map_err(TrainError::file(&request.state_dir))?;
    }
    Ok(request)
}

/// Whether tasks may be worked with, by the process that looked at them, in the order of the table. Each process looks at its own, and
/// none at another's: two judges might not agree.
fn admit(judge: &Judge, rows: &[(usize, Row)], group: &Group) -> Result<Vec<IntoIter<Admission>>, ProgramError> {
    let own = rows.iter().filter(|(owner, _)| *owner == group.rank());
    let own = own.map(|(_, row)| judge.admit(&judge.task(&row.code)).map_err(environment));
    let own = own.collect::<Result<Vec<_>, _>>()?;
    Ok(exchange(group, own)?.into_iter().map(Vec::into_iter).collect())
}

/// What every process has, by rank.
fn exchange<T: Serialize + DeserializeOwned>(group: &Group, own: Vec<T>) -> Result<Vec<Vec<T>>, ProgramError> {
    if group.size() == 1 {
        return Ok(vec![own]);
    }
    let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).map_err(|error| TrainError::new(error.to_string()));
    let all = group.gather(&json(&own))?;
    Ok(all.iter().map(read).collect::<Result<_, _>>()?)
}

/// Which process works with each task of a step, by the processes that know them: that one, unless it has its share already.
fn workers(owners: &[usize], size: usize) -> Vec<usize> {
    let (share, mut taken) = (owners.len().div_ceil(size), vec![0; size]);
    let choose = |owner: &usize| {
        let least = (0..size).min_by_key(|rank| taken[*rank]).expect("a group has a process");
        let worker = if taken[*owner] < share { *owner } else { least };
        taken[worker] += 1;
        worker
    };
    owners.iter().map(choose).collect()
}

/// One episode.
#[derive(Serialize, Deserialize)]
struct One {
    trajectory: Option<Trajectory>,
    sampling_s: f64,
    judging_s: f64,
    outcome: Option<String>,
    line: Value,
}

impl Collected {
    fn add(&mut self, one: One) {
        self.without_reward += usize::from(one.trajectory.is_none());
        self.trajectories.extend(one.trajectory);
        self.sampling_s += one.sampling_s;
        self.judging_s += one.judging_s;
        *self.outcomes.entry(one.outcome.unwrap_or_else(|| "unjudged".to_owned())).or_default() += 1;
        self.rows.push(one.line);
    }
}

/// A conversation of one question whose answer is compared with a text.
fn text_episode(policy: &Local, rules: &Rules, row: &Row, sample: u32) -> Result<One, ProgramError> {
    let expected = row.expected.as_deref().unwrap_or_default();
    let messages = [Message::new(Role::User, row.code.clone())];
    let key = Key { seed: rules.seed, task: row.code.clone(), sample, turn: 0 };
    let (prefix, sampling): (Option<&Prefix>, &Sampling) = (None, &rules.sampling);
    let completion = policy.complete(&Question { messages: &messages, prefix, sampling, key: &key })?;
    let sampled = completion.tokens.expect("the model in this process knows its tokens");
    let reward = agreement(&completion.text, expected);
    let outcome = if completion.text == expected { "correct" } else { "wrong" };
    let prompt = sampled.prompt_ids.len();
    let length = prompt + sampled.ids.len();
    let turn = |role, range: std::ops::Range<usize>, text: &str| Turn {
        start: Some(range.start),
        end: Some(range.end),
        ..Turn::new(role, text)
    };
    let answer = Turn {
        outcome: Some(outcome.to_owned()),
        reward: Some(reward),
        ..turn(Role::Assistant, prompt..length, &completion.text)
    };
    let nothing = std::iter::repeat_n(None, prompt);
    let row = Episode {
        task_digest: blake3::hash(row.code.as_bytes()).to_hex().to_string(),
        code: row.code.clone(),
        sample,
        form: Form::Single,
        messages: vec![messages[0].clone(), Message::new(Role::Assistant, &completion.text)],
        turns: vec![turn(Role::User, 0..prompt, &row.code), answer],
        tokens: Some(trajectory::Tokens {
            ids: [sampled.prompt_ids, sampled.ids].concat(),
            mask: (0..length).map(|token| token >= prompt).collect(),
            log_probs: nothing.chain(sampled.log_probs.iter().map(|log_prob| Some(log_prob.min(0.0)))).collect(),
        }),
        reward: Some(reward),
        reward_at: Some(length - 1),
        finish_reason: if completion.finish == Finish::Length { Ending::Length } else { Ending::Complete },
        policy_digest: None,
        policy_model: policy.identity().model,
        prompt_digest: String::new(),
        temperature: rules.sampling.temperature,
        sampling_s: completion.seconds,
        judging_s: 0.0,
    };
    let line = line(&row)?;
    let (sampling_s, judging_s) = (row.sampling_s, row.judging_s);
    Ok(One { trajectory: episodes::trajectory(row)?, sampling_s, judging_s, outcome: Some(outcome.to_owned()), line })
}

fn line(row: &Episode) -> Result<Value, ProgramError> {
    let row = row.to_row().map_err(|broken| ProgramError {
        kind: "internal".into(),
        message: broken.to_string(),
        hint: None,
    })?;
    Ok(Value::Object(row))
}

/// How many characters two texts begin with alike, of the longer one's: 1 where they are equal. A text that goes on too long is worth
/// less with each character, so ending in time can be learned.
fn agreement(answer: &str, expected: &str) -> f64 {
    let alike = answer.chars().zip(expected.chars()).take_while(|(one, other)| one == other).count();
    match answer.chars().count().max(expected.chars().count()) {
        0 => 1.0,
        longer => alike as f64 / longer as f64,
    }
}

/// Reads the tasks, ordered by a numeric column where one is named.
fn read(path: &Path, source: Source, column: &str) -> Result<Vec<Row>, ProgramError> {
    let wanted: &[&str] = if source == Source::Expected { &["code", "expected"] } else { &["code"] };
    let table = super::table::read(path, wanted, column)?;
    let mut rows: Vec<(f64, Row)> = Vec::new();
    for mut values in table {
        let expected = (source == Source::Expected).then(|| values.texts.pop()).flatten();
        let code = values.texts.pop().expect("a text for each column");
        rows.push((values.number, Row { code, expected }));
    }
    // Stable: rows that are equally hard keep their order.
    rows.sort_by(|one, other| one.0.total_cmp(&other.0));
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

#[cfg(test)]
mod tests {
    use super::{agreement, workers};

    #[test]
    fn a_task_is_its_owners_unless_another_has_less_to_do() {
        assert_eq!(workers(&[0, 0, 0], 1), [0, 0, 0]);
        assert_eq!(workers(&[0, 1, 1, 0], 2), [0, 1, 1, 0]);
        assert_eq!(workers(&[1, 1, 1, 1, 0], 2), [1, 1, 1, 0, 0]);
        assert_eq!(workers(&[2, 2, 2, 2], 3), [2, 2, 0, 1]);
        assert_eq!(workers(&[1], 4), [1]);
        assert!(workers(&[], 2).is_empty());
    }

    #[test]
    fn an_answer_is_worth_the_share_that_it_begins_with() {
        assert_eq!(agreement("abc", "abc"), 1.0);
        assert_eq!(agreement("", ""), 1.0);
        assert_eq!(agreement("abx", "abcd"), 0.5);
        assert_eq!(agreement("", "abcd"), 0.0);
        assert_eq!(agreement("abcdxx", "abc"), 0.5);
        assert_eq!(agreement("aaaa", "ab"), 0.25);
        assert_eq!(agreement("xabc", "abc"), 0.0);
        assert_eq!(agreement("éa", "éb"), 0.5);
    }
}
