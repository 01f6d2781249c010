//! RFT's filters (paper §3.3), as a funnel: each step says how many it was given and how many it let through.

use std::collections::BTreeMap;

use serde::Serialize;

use super::trajectory::Trajectory;

/// What the filters look at beside tokens: one turn of an episode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    /// What the policy did: its answer, or the name and arguments of a tool call. Equal actions have equal texts.
    pub action: String,
    /// Whether a tool call was outside the tools' schema.
    pub violates_schema: bool,
    /// Whether the candidate falls back on torch's own operators.
    pub falls_back: bool,
}

/// An episode on its way through.
#[derive(Clone, Debug, PartialEq)]
pub struct Episode {
    /// Its tokens and reward.
    pub trajectory: Trajectory,
    /// Its turns.
    pub turns: Vec<Turn>,
}

/// What the filters allow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FunnelSettings {
    /// Rewards above this are kept. The paper's 0.
    pub above: f64,
    /// Longest run of equal actions. 3.
    pub max_repeats: usize,
    /// Most turns; 0 is any number.
    pub max_turns: usize,
    /// Most kept episodes of one task, the best rewards first and of these the shortest; 0 is any number.
    pub per_task: usize,
    /// Whether truncated episodes are dropped.
    pub drop_truncated: bool,
}

/// One filter's account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Passed {
    /// What it asks for.
    pub filter: &'static str,
    /// Episodes before it.
    pub before: usize,
    /// Episodes after it.
    pub after: usize,
}

/// The episodes that pass, in their order, and the account.
pub fn funnel(episodes: Vec<Episode>, settings: &FunnelSettings) -> (Vec<Episode>, Vec<Passed>) {
    let mut account = Vec::new();
    let mut left = episodes;
    let mut step = |filter: &'static str, left: &mut Vec<Episode>, passes: &dyn Fn(&Episode) -> bool| {
        let before = left.len();
        left.retain(|episode| passes(episode));
        account.push(Passed { filter, before, after: left.len() });
    };
    step("reward", &mut left, &|episode| episode.trajectory.reward > settings.above);
    step("no repeated action", &mut left, &|episode| longest_run(&episode.turns) <= settings.max_repeats);
    step("tool schema", &mut left, &|episode| !episode.turns.iter().any(|turn| turn.violates_schema));
    step("no torch fallback", &mut left, &|episode| !episode.turns.last().is_some_and(|turn| turn.falls_back));
    step("turn limit", &mut left, &|episode| settings.max_turns == 0 || episode.turns.len() <= settings.max_turns);
    step("not truncated", &mut left, &|episode| !(settings.drop_truncated && episode.trajectory.truncated));
    let best = best_of_each_task(&left, settings.per_task);
    let mut place = 0;
    left.retain(|_| {
        place += 1;
        best[place - 1]
    });
    account.push(Passed { filter: "per task", before: best.len(), after: left.len() });
    (left, account)
}

fn longest_run(turns: &[Turn]) -> usize {
    turns.chunk_by(|one, next| one.action == next.action).map(<[Turn]>::len).max().unwrap_or_default()
}

fn best_of_each_task(episodes: &[Episode], most: usize) -> Vec<bool> {
    let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, episode) in episodes.iter().enumerate() {
        groups.entry(&episode.trajectory.task).or_default().push(index);
    }
    let mut kept = vec![most == 0; episodes.len()];
    for members in groups.values_mut() {
        members.sort_by(|one, other| {
            let (one, other) = (&episodes[*one].trajectory, &episodes[*other].trajectory);
            other.reward.total_cmp(&one.reward).then(one.ids.len().cmp(&other.ids.len()))
        });
        members.iter().take(most).for_each(|index| kept[*index] = true);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: FunnelSettings =
        FunnelSettings { above: 0.0, max_repeats: 3, max_turns: 4, per_task: 2, drop_truncated: true };

    fn episode(task: &str, sample: u64, reward: f64, actions: &[&str]) -> Episode {
        let turns = actions.iter().map(|action| Turn { action: (*action).into(), ..Turn::default() }).collect();
        let ids = vec![0; 5 + sample as usize];
        Episode { trajectory: Trajectory { task: task.into(), sample, reward, ids, ..Trajectory::default() }, turns }
    }

    #[test]
    fn each_filter_drops_what_it_is_for_and_says_so() {
        let mut violating = episode("a", 4, 1.0, &["x"]);
        violating.turns[0].violates_schema = true;
        let mut falling_back = episode("a", 5, 1.0, &["x"]);
        falling_back.turns[0].falls_back = true;
        let mut truncated = episode("a", 7, 1.0, &["x"]);
        truncated.trajectory.truncated = true;
        let episodes = vec![
            episode("a", 0, 3.0, &["x", "y"]),
            episode("a", 1, 0.0, &["x"]),
            episode("a", 2, -1.0, &["x"]),
            episode("a", 3, 1.0, &["x", "x", "x", "x"]),
            violating,
            falling_back,
            episode("a", 6, 1.0, &["1", "2", "3", "4", "5"]),
            truncated,
            episode("a", 8, 1.0, &["x", "x", "x"]),
            episode("a", 9, 1.0, &["longer than the one before"]),
            episode("b", 10, 1.0, &["x"]),
        ];
        let (kept, account) = funnel(episodes, &SETTINGS);
        let samples: Vec<u64> = kept.iter().map(|episode| episode.trajectory.sample).collect();
        assert_eq!(samples, [0, 8, 10]);
        let counts: Vec<(&str, usize)> = account.iter().map(|passed| (passed.filter, passed.after)).collect();
        let expected = [
            ("reward", 9),
            ("no repeated action", 8),
            ("tool schema", 7),
            ("no torch fallback", 6),
            ("turn limit", 5),
            ("not truncated", 4),
            ("per task", 3),
        ];
        assert_eq!(counts, expected);
        assert!(account.windows(2).all(|pair| pair[0].after == pair[1].before));
    }

    #[test]
    fn without_limits_only_the_reward_counts() {
        let settings = FunnelSettings { max_turns: 0, per_task: 0, drop_truncated: false, ..SETTINGS };
        let episodes = (0..5).map(|sample| episode("a", sample, sample as f64 - 2.0, &["x"; 3])).collect();
        let (kept, _) = funnel(episodes, &settings);
        assert_eq!(kept.len(), 2);
    }
}
