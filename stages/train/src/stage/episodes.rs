//! Trajectories of the table as the trainer takes them.

use std::path::Path;

use cuda_agent_agent::policy::Role;
use cuda_agent_agent::trajectory::{self, Ending};
use cuda_agent_protocol::ProgramError;

use crate::trainer::funnel::{Episode, Turn};
use crate::trainer::trajectory::Trajectory;

/// What was read, and what was left out of it.
pub struct Read {
    /// Episodes with tokens and a reward.
    pub episodes: Vec<Episode>,
    /// Number of episodes without a reward: no verdict was given, or they were broken off.
    pub without_reward: usize,
}

/// Reads a table of trajectories. Its invariants are checked again, whatever wrote it.
pub fn read(path: &Path) -> Result<Read, ProgramError> {
    let rows = trajectory::read(path).map_err(|error| ProgramError::input(error.to_string()))?;
    let (mut episodes, mut without_reward) = (Vec::new(), 0);
    for row in rows {
        let turns = row.turns.iter().filter_map(turn).collect();
        match trajectory(row)? {
            Some(trajectory) => episodes.push(Episode { trajectory, turns }),
            None => without_reward += 1,
        }
    }
    Ok(Read { episodes, without_reward })
}

/// An episode as the trainer takes it; `None` where it has no reward.
pub fn trajectory(row: trajectory::Trajectory) -> Result<Option<Trajectory>, ProgramError> {
    // First: an episode whose policy broke off in its first turn has no tokens either, and is no mistake.
    let Some(reward) = row.reward else { return Ok(None) };
    let Some(tokens) = row.tokens else {
        let message = format!("sample {} of task {} has no token ids", row.sample, row.task_digest);
        let hint = "only a policy that reports its token ids and log-probabilities can be trained on";
        return Err(ProgramError::input(message).with_hint(hint));
    };
    let trajectory = Trajectory {
        task: row.task_digest,
        sample: u64::from(row.sample),
        ids: tokens.ids.iter().map(|id| i64::from(*id)).collect(),
        mask: tokens.mask,
        log_probs: tokens.log_probs.iter().map(|log_prob| log_prob.unwrap_or(0.0)).collect(),
        reward,
        truncated: row.finish_reason == Ending::Length,
        turns: row.turns.iter().filter(|turn| turn.role == Role::Assistant).count() as u64,
    };
    trajectory.check().map_err(super::input)?;
    Ok(Some(trajectory))
}

/// What the policy did in a turn. A tool's result is no action, but a call that named no tool was outside the schema.
fn turn(turn: &trajectory::Turn) -> Option<Turn> {
    match turn.role {
        Role::Assistant => Some(Turn {
            action: turn.text.clone(),
            violates_schema: false,
            falls_back: turn.source.as_deref().is_some_and(falls_back),
        }),
        Role::Tool if turn.tool.is_none() => Some(Turn { violates_schema: true, ..Turn::default() }),
        _ => None,
    }
}

/// Whether a candidate's source computes with torch's own operators.
fn falls_back(source: &str) -> bool {
    ["torch::", "at::", "<torch/", "<ATen/", "torch.nn"].iter().any(|word| source.contains(word))
}

#[cfg(test)]
mod tests {
    use cuda_agent_agent::policy::Role;
    use cuda_agent_agent::trajectory::{Form, Tokens, Trajectory as Row, Turn as RowTurn};

    use super::*;

    fn row(reward: Option<f64>, tokens: bool) -> Row {
        let tokens =
            tokens.then(|| Tokens { ids: vec![1, 2], mask: vec![false, true], log_probs: vec![None, Some(-0.5)] });
        Row {
            task_digest: "task".into(),
            code: String::new(),
            sample: 3,
            form: Form::Single,
            messages: Vec::new(),
            turns: vec![RowTurn::new(Role::User, "write"), RowTurn::new(Role::Assistant, "a")],
            reward_at: reward.and(tokens.as_ref()).map(|_| 1),
            tokens,
            reward,
            finish_reason: if reward.is_some() { Ending::Complete } else { Ending::Aborted },
            policy_digest: None,
            policy_model: "m".into(),
            prompt_digest: String::new(),
            temperature: 1.0,
            sampling_s: 0.0,
            judging_s: 0.0,
        }
    }

    #[test]
    fn an_episode_without_a_reward_is_left_out_and_one_with_a_reward_needs_its_tokens() {
        assert!(trajectory(row(None, false)).unwrap().is_none());
        assert!(trajectory(row(None, true)).unwrap().is_none());
        let whole = trajectory(row(Some(1.0), true)).unwrap().unwrap();
        assert_eq!((whole.ids, whole.reward, whole.turns, whole.truncated), (vec![1, 2], 1.0, 1, false));
        let error = trajectory(row(Some(1.0), false)).unwrap_err();
        assert_eq!(error.message, "sample 3 of task task has no token ids");
    }
}
