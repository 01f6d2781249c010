//! What is kept of an episode: one row of a table of type `trajectories`.
//!
//! The columns are listed in `rollout/stage.yaml` and docs/agent.md. An agent's tool calls fit in as they are: a call is
//! text that the policy wrote, in its turn; its result is a turn of role `tool` with the call's `tool` and `arguments`,
//! and with mask 0.
//!
//! **Invariants** ([`Trajectory::check`]), checked when a trajectory is written and again when it is read:
//!
//! 1. Ids, mask and log-probabilities are there together or not at all, and have one length.
//! 2. Mask 1 stands where there is a log-probability, and nowhere else; these are finite and at most 0.
//! 3. Turns follow one another without gap or overlap from the first token to the last; mask 1 lies in turns of the
//!    assistant only.
//! 4. The reward, where there is one, is finite and lies on the last generated token (`reward_at`).
//! 5. An episode without a verdict, or broken off, has no reward: null, never 0.

mod table;

use serde::{Deserialize, Serialize};

use crate::policy::{Message, Role};

#[cfg(test)]
pub(crate) use self::table::tests::parquet_with;
pub use self::table::{ReadError, read, read_bytes};

/// Which way an episode goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Prompt, candidate, verdict.
    Single,
    /// Answer, verdict, revision, and so on.
    Repair,
}

/// How an episode ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    /// The policy ended its last turn itself.
    Complete,
    /// Its last turn was cut off at the limit of tokens.
    Length,
    /// The policy broke off, or refused a turn: nothing is said of the episode.
    Aborted,
}

/// One turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turn {
    /// Who speaks.
    pub role: Role,
    /// The first of its tokens; null without ids.
    pub start: Option<usize>,
    /// Past the last of its tokens.
    pub end: Option<usize>,
    /// What is said; of the assistant, with the prefill before it.
    pub text: String,
    /// The candidate that was found in it.
    pub source: Option<String>,
    /// What the evaluator said of the candidate, in a word; `no_candidate` where there was none.
    pub outcome: Option<String>,
    /// Why, in one line.
    pub message: Option<String>,
    /// What it is worth; null where nothing is said of it.
    pub reward: Option<f64>,
    /// How many times faster than eager, where it was timed.
    pub speedup_eager: Option<f64>,
    /// How many times faster than torch.compile.
    pub speedup_compile: Option<f64>,
    /// Of role `tool`: what was called.
    pub tool: Option<String>,
    /// Of role `tool`: what with, as JSON.
    pub arguments: Option<String>,
}

impl Turn {
    /// A turn of which nothing but its text is known.
    pub fn new(role: Role, text: impl Into<String>) -> Self {
        Self {
            role,
            start: None,
            end: None,
            text: text.into(),
            source: None,
            outcome: None,
            message: None,
            reward: None,
            speedup_eager: None,
            speedup_compile: None,
            tool: None,
            arguments: None,
        }
    }
}

/// An episode by token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// Everything that the policy was given and wrote, in order.
    pub ids: Vec<u32>,
    /// Whether the policy wrote it.
    pub mask: Vec<bool>,
    /// Of what the policy wrote, its logarithm of the probability at the time and the temperature of sampling.
    pub log_probs: Vec<Option<f64>>,
}

/// An episode.
#[derive(Clone, Debug, PartialEq)]
pub struct Trajectory {
    /// Digest of the task with the evaluator's settings.
    pub task_digest: String,
    /// The task's Python; empty in what a by-row stage answers, since the table has the column from its input.
    pub code: String,
    /// Which of the episodes with this task, from 0.
    pub sample: u32,
    /// Which way it went.
    pub form: Form,
    /// The conversation, what the policy answered included.
    pub messages: Vec<Message>,
    /// By token, where the policy knows its tokens.
    pub tokens: Option<Tokens>,
    /// The conversation in turns.
    pub turns: Vec<Turn>,
    /// What the episode is worth.
    pub reward: Option<f64>,
    /// The token that bears it: the last that the policy wrote.
    pub reward_at: Option<usize>,
    /// How it ended.
    pub finish_reason: Ending,
    /// Digest of the policy's weights, where it is known.
    pub policy_digest: Option<String>,
    /// The policy's name.
    pub policy_model: String,
    /// Digest of the prompts' files.
    pub prompt_digest: String,
    /// Temperature of sampling.
    pub temperature: f64,
    /// Seconds that sampling took, waiting included.
    pub sampling_s: f64,
    /// Seconds that verdicts took, waiting included.
    pub judging_s: f64,
}

/// What does not hold of a trajectory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the trajectory of sample {sample} of task {task}: {problem}")]
pub struct Broken {
    /// The task's digest, in short.
    pub task: String,
    /// Which sample.
    pub sample: u32,
    /// What does not hold.
    pub problem: String,
}

impl Trajectory {
    /// How many tokens the policy wrote, where that is known.
    pub fn generated(&self) -> Option<usize> {
        self.tokens.as_ref().map(|tokens| tokens.mask.iter().filter(|generated| **generated).count())
    }

    /// The text that the last candidate was found in, and what came of it.
    pub fn last_verdict(&self) -> Option<&Turn> {
        self.turns.iter().rev().find(|turn| turn.outcome.is_some())
    }

    /// The invariants.
    pub fn check(&self) -> Result<(), Broken> {
        let problem = self.problem();
        problem.map_or(Ok(()), |problem| {
            let task = self.task_digest.chars().take(8).collect();
            Err(Broken { task, sample: self.sample, problem })
        })
    }

    fn problem(&self) -> Option<String> {
        let tokens = match &self.tokens {
            Some(tokens) => problem_of_tokens(tokens).or_else(|| problem_of_turns(tokens, &self.turns)),
            None => self.problem_without_tokens(),
        };
        tokens.or_else(|| self.problem_of_reward())
    }

    fn problem_without_tokens(&self) -> Option<String> {
        let placed = self.turns.iter().position(|turn| turn.start.is_some() || turn.end.is_some());
        placed.map(|turn| format!("turn {turn} has a place among tokens, and there are none"))
    }

    fn problem_of_reward(&self) -> Option<String> {
        let last = self.tokens.as_ref().and_then(|tokens| tokens.mask.iter().rposition(|generated| *generated));
        let Some(reward) = self.reward else {
            return self.reward_at.map(|at| format!("token {at} bears the reward, and there is none"));
        };
        if !reward.is_finite() {
            return Some(format!("the reward is {reward}"));
        }
        if self.finish_reason == Ending::Aborted {
            return Some("it was broken off, and has a reward all the same".into());
        }
        if !self.turns.iter().any(|turn| turn.reward.is_some()) {
            return Some("it has a reward, and no verdict that is worth one".into());
        }
        match (&self.tokens, last) {
            (Some(_), None) => Some("it has a reward, and the policy wrote no token to bear it".into()),
            _ if self.reward_at != last => Some(format!(
                "the reward lies on token {}, and the last that the policy wrote is {}",
                place(self.reward_at),
                place(last)
            )),
            _ => None,
        }
    }
}

fn place(at: Option<usize>) -> String {
    at.map_or_else(|| "none".to_owned(), |at| at.to_string())
}

fn problem_of_tokens(tokens: &Tokens) -> Option<String> {
    let lengths = [tokens.ids.len(), tokens.mask.len(), tokens.log_probs.len()];
    if lengths.iter().any(|length| *length != lengths[0]) {
        let [ids, mask, log_probs] = lengths;
        return Some(format!("{ids} token ids, a mask of {mask} and {log_probs} log-probabilities"));
    }
    let wrong = tokens.mask.iter().zip(&tokens.log_probs).position(|(generated, log_prob)| match log_prob {
        Some(log_prob) => !generated || !log_prob.is_finite() || *log_prob > 0.0,
        None => *generated,
    })?;
    let log_prob = tokens.log_probs[wrong].map_or_else(|| "null".to_owned(), |log_prob| log_prob.to_string());
    Some(format!("token {wrong} has mask {} and log-probability {log_prob}", u8::from(tokens.mask[wrong])))
}

fn problem_of_turns(tokens: &Tokens, turns: &[Turn]) -> Option<String> {
    let mut expected = 0;
    for (number, turn) in turns.iter().enumerate() {
        let (Some(start), Some(end)) = (turn.start, turn.end) else {
            return Some(format!("turn {number} has no place among the tokens"));
        };
        if start != expected || end < start || end > tokens.ids.len() {
            return Some(format!("turn {number} is tokens {start} to {end} of {}, after {expected}", tokens.ids.len()));
        }
        if turn.role != Role::Assistant && tokens.mask[start..end].iter().any(|generated| *generated) {
            return Some(format!("turn {number} is of the {}, and has tokens that the policy wrote", turn.role.word()));
        }
        expected = end;
    }
    (expected != tokens.ids.len()).then(|| format!("the turns end at token {expected} of {}", tokens.ids.len()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A prompt of three tokens, an answer of two, a verdict of one, an answer of two.
    pub(crate) fn example() -> Trajectory {
        let turn = |role, range: std::ops::Range<usize>, text: &str| Turn {
            start: Some(range.start),
            end: Some(range.end),
            ..Turn::new(role, text)
        };
        let verdict = |turn: Turn, outcome: &str, reward| Turn {
            source: Some("source \"é\"".into()),
            outcome: Some(outcome.into()),
            message: Some("why".into()),
            reward: Some(reward),
            ..turn
        };
        Trajectory {
            task_digest: "abcdef0123456789".into(),
            code: "class Model: …".into(),
            sample: 3,
            form: Form::Repair,
            messages: vec![
                Message::new(Role::User, "write"),
                Message::new(Role::Assistant, "a"),
                Message::new(Role::User, "wrong"),
                Message::new(Role::Assistant, "b"),
            ],
            tokens: Some(Tokens {
                ids: vec![1, 2, 3, 4, 5, 6, 7, 8],
                mask: vec![false, false, false, true, true, false, true, true],
                log_probs: vec![None, None, None, Some(-0.5), Some(-0.25), None, Some(-1e-300), Some(0.0)],
            }),
            turns: vec![
                turn(Role::User, 0..3, "write"),
                verdict(turn(Role::Assistant, 3..5, "a"), "wrong", -1.0),
                turn(Role::User, 5..6, "wrong"),
                Turn { speedup_eager: Some(1.5), ..verdict(turn(Role::Assistant, 6..8, "b"), "correct", 1.0) },
            ],
            reward: Some(1.0),
            reward_at: Some(7),
            finish_reason: Ending::Complete,
            policy_digest: None,
            policy_model: "m".into(),
            prompt_digest: "d".into(),
            temperature: 1.0,
            sampling_s: 0.5,
            judging_s: 0.25,
        }
    }

    fn problem(change: impl FnOnce(&mut Trajectory)) -> String {
        let mut trajectory = example();
        change(&mut trajectory);
        trajectory.check().expect_err("it was broken").problem
    }

    fn tokens(trajectory: &mut Trajectory) -> &mut Tokens {
        trajectory.tokens.as_mut().unwrap()
    }

    #[test]
    fn a_whole_trajectory_passes() {
        example().check().unwrap();
        let mut without = example();
        without.tokens = None;
        without.reward_at = None;
        without.turns.iter_mut().for_each(|turn| (turn.start, turn.end) = (None, None));
        without.check().unwrap();
    }

    #[test]
    fn lengths_agree() {
        assert_eq!(problem(|it| tokens(it).mask.truncate(7)), "8 token ids, a mask of 7 and 8 log-probabilities");
        assert!(problem(|it| tokens(it).log_probs.push(None)).contains("9 log-probabilities"));
    }

    #[test]
    fn mask_and_log_probabilities_go_together() {
        assert_eq!(problem(|it| tokens(it).mask[5] = true), "token 5 has mask 1 and log-probability null");
        assert!(problem(|it| tokens(it).log_probs[0] = Some(-1.0)).starts_with("token 0 has mask 0"));
        for value in [0.1, f64::NAN, f64::NEG_INFINITY] {
            assert!(problem(|it| tokens(it).log_probs[3] = Some(value)).starts_with("token 3 has mask 1"), "{value}");
        }
    }

    #[test]
    fn the_reward_lies_on_the_last_generated_token() {
        let told = problem(|it| it.reward_at = Some(6));
        assert_eq!(told, "the reward lies on token 6, and the last that the policy wrote is 7");
        assert!(problem(|it| it.reward_at = None).contains("lies on token none"));
        assert!(problem(|it| it.reward = None).contains("there is none"));
        assert!(problem(|it| it.reward = Some(f64::INFINITY)).contains("inf"));
    }

    #[test]
    fn what_was_broken_off_has_no_reward() {
        assert!(problem(|it| it.finish_reason = Ending::Aborted).contains("broken off"));
        let unjudged = problem(|it| it.turns.iter_mut().for_each(|turn| turn.reward = None));
        assert!(unjudged.contains("no verdict"), "{unjudged}");
    }

    #[test]
    fn turns_cover_the_tokens_once() {
        assert!(problem(|it| it.turns[1].end = Some(4)).starts_with("turn 2 is tokens 5 to 6"));
        assert!(problem(|it| drop(it.turns.pop())).contains("the turns end at token 6"));
        assert!(problem(|it| it.turns[3].end = Some(9)).starts_with("turn 3"));
        assert!(problem(|it| it.turns[0].start = None).contains("no place"));
        assert!(problem(|it| it.turns[1].role = Role::Tool).contains("turn 1 is of the tool"));
        assert!(problem(|it| it.tokens = None).contains("turn 0 has a place"));
    }
}
