//! Episodes: one conversation about one task, and what it is worth.
//!
//! `single` is prompt → candidate → verdict. `repair` goes on: the verdict's text is sent back, and the policy answers with the
//! whole file again, up to `turns` answers; it ends sooner with a candidate whose reward reaches `goal`.
//!
//! **The reward** of an episode is that of its last answer, as in the paper, where the workspace is judged as it was left
//! (`Score::Last`), or the best of all (`Score::Best`). An answer without a candidate is worth what an incorrect one is.
//! Where nothing is said of the answer that counts, or the policy broke off, there is no reward: the episode is dropped and
//! counted, never scored 0. An answer that was cut off is judged like any other, and the episode says `length`.

use cuda_agent_kernels::fault::EvaluatorError;
use cuda_agent_kernels::judge::{Bench, Contract, Judge, Judged};
use cuda_agent_kernels::reference::Task;
use cuda_agent_kernels::reward::INCORRECT;
use serde::{Deserialize, Serialize};

use crate::answer;
use crate::phases::{Phase, Phases};
use crate::policy::{Completion, Finish, Key, Message, Policy, PolicyError, Prefix, Request, Role, Sampling};
use crate::prompts::{Exchange, Prompts};
use crate::trajectory::{Ending, Form, Tokens, Trajectory, Turn};

/// The outcome of an answer in which no candidate was found.
pub const NO_CANDIDATE: &str = "no_candidate";

const NO_CANDIDATE_MESSAGE: &str = "the answer has no code block with a kernel";

/// A verdict's text is sent back up to so many characters.
const MOST_FEEDBACK: usize = 2000;

/// Who gives verdicts.
pub trait Judging: Sync {
    /// The verdict on a `kernel` candidate.
    fn ask(&self, task: &Task, source: &str, timing: bool) -> Result<Judged, EvaluatorError>;
}

impl<B: Bench> Judging for Judge<B> {
    fn ask(&self, task: &Task, source: &str, timing: bool) -> Result<Judged, EvaluatorError> {
        Judge::ask(self, task, source, timing)
    }
}

/// Which answer's reward is the episode's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Score {
    /// The last one's.
    Last,
    /// The best one's.
    Best,
}

/// How episodes go.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Which way.
    pub form: Form,
    /// Most answers of a `repair` episode.
    pub turns: u32,
    /// Which answer counts.
    pub score: Score,
    /// A reward at which a `repair` episode ends.
    pub goal: f64,
    /// How answers are sampled.
    pub sampling: Sampling,
    /// Of all random numbers.
    pub seed: i64,
    /// Whether correct candidates are timed.
    pub timing: bool,
    /// Whether answers begin as `prefill.md` says.
    pub prefill: bool,
}

/// What episodes share. Threads share it in turn.
pub struct Stage<'a> {
    /// Who answers.
    pub policy: &'a dyn Policy,
    /// Who judges.
    pub judge: &'a dyn Judging,
    /// What is asked.
    pub prompts: &'a Prompts,
    /// Whether these two keep out of each other's way.
    pub phases: &'a Phases,
    /// How.
    pub rules: &'a Rules,
}

/// A task that was admitted.
#[derive(Clone, Debug)]
pub struct Assignment {
    /// The task under the judge's rules.
    pub task: Task,
    /// What a candidate is told of it.
    pub contract: Contract,
}

/// A prompt that an episode is asked with in place of the prompts' own.
#[derive(Clone, Copy, Debug)]
pub struct OtherPrompt<'a> {
    /// The example that is shown.
    pub example: &'a Exchange,
    /// Token ids of the prompts' own opening, to be recorded in place of those that the episode was asked with; `None`
    /// records what was asked.
    pub recorded: Option<&'a [u32]>,
}

/// Why there is no trajectory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EpisodeError {
    /// The policy.
    #[error(transparent)]
    Policy(PolicyError),
    /// The evaluator.
    #[error(transparent)]
    Judge(EvaluatorError),
}

impl Stage<'_> {
    /// Runs one episode; the trajectory has no `code`.
    pub fn run(&self, assignment: &Assignment, sample: u32) -> Result<Trajectory, EpisodeError> {
        self.run_with(assignment, sample, None)
    }

    /// The same with a prompt of its own.
    pub fn run_with(
        &self,
        assignment: &Assignment,
        sample: u32,
        prompt: Option<OtherPrompt>,
    ) -> Result<Trajectory, EpisodeError> {
        let mut episode = Episode::new(self, assignment, sample, prompt.map(|prompt| prompt.example));
        let turns = if self.rules.form == Form::Single { 1 } else { self.rules.turns.max(1) };
        for turn in 0..turns {
            if !episode.answer(turn)? {
                break;
            }
            let report = episode.judge()?;
            let reward = episode.turns.last().and_then(|turn| turn.reward);
            if turn + 1 == turns || reward.is_none_or(|reward| reward >= self.rules.goal) {
                break;
            }
            episode.send_back(&report);
        }
        if let Some(ids) = prompt.and_then(|prompt| prompt.recorded) {
            episode.record_own_prompt(ids);
        }
        Ok(episode.finished())
    }

    /// Token ids of the opening that the prompts have for a task, the prefill among them; `None` where the policy does not know
    /// its tokens.
    pub fn own_prompt(&self, assignment: &Assignment) -> Result<Option<Vec<u32>>, EpisodeError> {
        let Assignment { task, contract } = assignment;
        let mut messages = self.prompts.opening(&task.code, contract);
        let prefill = self.prompts.prefill(&task.code, contract).filter(|_| self.rules.prefill);
        messages.extend(prefill.map(|prefill| Message::new(Role::Assistant, prefill)));
        // Policies answer, and say with the answer what they were asked: one token is the least.
        let sampling = Sampling { max_tokens: 1, ..self.rules.sampling.clone() };
        let key = Key { seed: self.rules.seed, task: task.digest(), sample: 0, turn: 0 };
        let request = Request { messages: &messages, prefix: None, sampling: &sampling, key: &key };
        let completion = self.phases.within(Phase::Sampling, || self.policy.complete(&request));
        Ok(completion.map_err(EpisodeError::Policy)?.tokens.map(|tokens| tokens.prompt_ids))
    }
}

/// An episode underway.
struct Episode<'a> {
    stage: &'a Stage<'a>,
    assignment: &'a Assignment,
    sample: u32,
    sampling: Sampling,
    prefill: Option<String>,
    messages: Vec<Message>,
    /// How many of the messages the tokens stand for.
    covered: usize,
    tokens: Option<Tokens>,
    turns: Vec<Turn>,
    ending: Ending,
    sampling_s: f64,
    judging_s: f64,
}

impl<'a> Episode<'a> {
    fn new(stage: &'a Stage<'a>, assignment: &'a Assignment, sample: u32, example: Option<&Exchange>) -> Self {
        let Assignment { task, contract } = assignment;
        let messages = match example {
            Some(example) => stage.prompts.opening_with(Some(example), &task.code, contract),
            None => stage.prompts.opening(&task.code, contract),
        };
        let asked = messages.last().expect("the task is asked for").clone();
        let prefill = stage.prompts.prefill(&task.code, contract).filter(|_| stage.rules.prefill);
        let mut sampling = stage.rules.sampling.clone();
        // An answer whose prefill opens a block ends with that block.
        if prefill.as_deref().is_some_and(answer::is_open) {
            sampling.stop.push("\n```".to_owned());
        }
        Self {
            stage,
            assignment,
            sample,
            sampling,
            prefill,
            turns: vec![Turn::new(asked.role, asked.content)],
            messages,
            covered: 0,
            tokens: Some(Tokens::default()),
            ending: Ending::Complete,
            sampling_s: 0.0,
            judging_s: 0.0,
        }
    }

    /// One answer of the policy; false where it broke off.
    fn answer(&mut self, turn: u32) -> Result<bool, EpisodeError> {
        let stage = self.stage;
        let key = Key { seed: stage.rules.seed, task: self.assignment.task.digest(), sample: self.sample, turn };
        let prefix = self.tokens.as_ref().filter(|_| self.covered > 0);
        let prefix = prefix.map(|tokens| Prefix { ids: tokens.ids.clone(), messages: self.covered });
        let mut messages = self.messages.clone();
        messages.extend(self.prefill.clone().map(|prefill| Message::new(Role::Assistant, prefill)));
        let request = Request { messages: &messages, prefix: prefix.as_ref(), sampling: &self.sampling, key: &key };
        let completion = match stage.phases.within(Phase::Sampling, || stage.policy.complete(&request)) {
            Ok(completion) => completion,
            Err(PolicyError::Refused(why)) => {
                eprintln!("an episode ends unfinished: {why}");
                self.ending = Ending::Aborted;
                return Ok(false);
            }
            Err(error) => return Err(EpisodeError::Policy(error)),
        };
        self.sampling_s += completion.seconds;
        self.ending = match completion.finish {
            Finish::Stop => Ending::Complete,
            Finish::Length => Ending::Length,
            Finish::Abort => Ending::Aborted,
        };
        self.take(&completion);
        Ok(self.ending != Ending::Aborted)
    }

    /// Appends an answer to the conversation.
    fn take(&mut self, completion: &Completion) {
        let mut text = self.prefill.clone().unwrap_or_default() + &completion.text;
        // The string that ended sampling is no part of the text, and is of the block.
        if completion.finish == Finish::Stop && answer::is_open(&text) {
            text.push_str("\n```");
        }
        let mut turn = Turn::new(Role::Assistant, &text);
        if let Some(tokens) = &mut self.tokens {
            match append(tokens, completion) {
                Some((start, end)) => {
                    let asked = self.turns.last_mut().expect("an answer follows a request");
                    asked.start = Some(asked.start.unwrap_or(0));
                    asked.end = Some(start);
                    (turn.start, turn.end) = (Some(start), Some(end));
                }
                None => self.forget_tokens(),
            }
        }
        self.turns.push(turn);
        self.messages.push(Message::new(Role::Assistant, text));
        self.covered = self.messages.len();
    }

    /// The policy does not know its tokens, or not all of them: text is all that is left.
    fn forget_tokens(&mut self) {
        self.tokens = None;
        self.turns.iter_mut().for_each(|turn| (turn.start, turn.end) = (None, None));
    }

    /// The verdict on the last answer; returns its text.
    fn judge(&mut self) -> Result<String, EpisodeError> {
        let stage = self.stage;
        let turn = self.turns.last_mut().expect("there is an answer");
        turn.source = answer::candidate(&turn.text);
        let Some(source) = turn.source.clone() else {
            turn.outcome = Some(NO_CANDIDATE.to_owned());
            turn.message = Some(NO_CANDIDATE_MESSAGE.to_owned());
            turn.reward = Some(INCORRECT);
            return Ok(NO_CANDIDATE_MESSAGE.to_owned());
        };
        let ask = || stage.judge.ask(&self.assignment.task, &source, stage.rules.timing);
        let judged = stage.phases.within(Phase::Judging, ask).map_err(EpisodeError::Judge)?;
        self.judging_s += judged.seconds;
        turn.outcome = Some(judged.outcome.word());
        turn.message = Some(judged.message);
        turn.reward = judged.reward;
        (turn.speedup_eager, turn.speedup_compile) = (judged.speedup_eager, judged.speedup_compile);
        Ok(judged.report)
    }

    /// Asks for a revision.
    fn send_back(&mut self, report: &str) {
        let outcome = self.turns.last().and_then(|turn| turn.outcome.clone()).unwrap_or_default();
        let report: String = report.chars().take(MOST_FEEDBACK).collect();
        let message = self.stage.prompts.repair(&outcome, &report);
        let start = self.tokens.as_ref().map(|tokens| tokens.ids.len());
        self.turns.push(Turn { start, ..Turn::new(message.role, &message.content) });
        self.messages.push(message);
    }

    /// Puts the prompts' own opening in the place of the one that was asked with: the answers stay as they were sampled.
    fn record_own_prompt(&mut self, ids: &[u32]) {
        let Assignment { task, contract } = self.assignment;
        let asked = self.messages.iter().position(|message| *message == Message::new(Role::User, &self.turns[0].text));
        let request = asked.expect("the request is a message");
        self.messages.splice(..=request, self.stage.prompts.opening(&task.code, contract));
        let (Some(tokens), Some(before)) = (&mut self.tokens, self.turns[0].end) else { return };
        tokens.ids.splice(..before, ids.iter().copied());
        tokens.mask.splice(..before, std::iter::repeat_n(false, ids.len()));
        tokens.log_probs.splice(..before, std::iter::repeat_n(None, ids.len()));
        for place in self.turns.iter_mut().flat_map(|turn| [&mut turn.start, &mut turn.end]).flatten() {
            *place = if *place == 0 { 0 } else { *place - before + ids.len() };
        }
    }

    fn finished(mut self) -> Trajectory {
        // A request that was never answered has no tokens.
        if let (Some(tokens), Some(last)) = (&self.tokens, self.turns.last_mut())
            && last.end.is_none()
        {
            (last.start, last.end) = (Some(tokens.ids.len()), Some(tokens.ids.len()));
        }
        // Nothing was ever answered: whether the policy knows its tokens is not known.
        if self.covered == 0 {
            self.forget_tokens();
        }
        let last = self.tokens.as_ref().and_then(|tokens| tokens.mask.iter().rposition(|generated| *generated));
        let has_bearer = self.tokens.is_none() || last.is_some();
        let reward = score(self.stage.rules.score, &self.turns);
        let reward = reward.filter(|_| self.ending != Ending::Aborted && has_bearer);
        let identity = self.stage.policy.identity();
        Trajectory {
            task_digest: self.assignment.task.digest(),
            code: String::new(),
            sample: self.sample,
            form: self.stage.rules.form,
            messages: self.messages,
            tokens: self.tokens,
            turns: self.turns,
            reward,
            reward_at: last.filter(|_| reward.is_some()),
            finish_reason: self.ending,
            policy_digest: identity.digest,
            policy_model: identity.model,
            prompt_digest: self.stage.prompts.digest(),
            temperature: self.stage.rules.sampling.temperature,
            sampling_s: self.sampling_s,
            judging_s: self.judging_s,
        }
    }
}

/// Appends what was asked and what was sampled; gives the latter's place. `None` where the policy does not know its tokens, or
/// they don't go on from those that are there.
fn append(tokens: &mut Tokens, completion: &Completion) -> Option<(usize, usize)> {
    let sampled = completion.tokens.as_ref()?;
    let asked = sampled.prompt_ids.strip_prefix(tokens.ids.as_slice())?;
    tokens.ids.extend(asked);
    tokens.mask.resize(tokens.ids.len(), false);
    tokens.log_probs.resize(tokens.ids.len(), None);
    let start = tokens.ids.len();
    tokens.ids.extend(&sampled.ids);
    tokens.mask.resize(tokens.ids.len(), true);
    tokens.log_probs.extend(sampled.log_probs.iter().map(|log_prob| Some(*log_prob)));
    Some((start, tokens.ids.len()))
}

fn score(score: Score, turns: &[Turn]) -> Option<f64> {
    let mut judged = turns.iter().filter(|turn| turn.outcome.is_some()).map(|turn| turn.reward);
    match score {
        Score::Last => judged.next_back().flatten(),
        Score::Best => judged.flatten().reduce(f64::max),
    }
}

#[cfg(test)]
pub(crate) mod tests;
