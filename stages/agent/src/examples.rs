//! Correct answers of earlier episodes, as examples in prompts.
//!
//! A small model that is shown a correct kernel for a similar task writes more correct ones than with the prompts' own example:
//! what one round of rollouts found is shown in the next. Similar means that two tasks' code has rare words in common; operators
//! are such words, and what every task has counts nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::prompts::Exchange;
use crate::trajectory::{self, ReadError, Trajectory};

/// One correct answer, and the task that it is for.
struct Example {
    task: String,
    words: BTreeSet<String>,
    exchange: Exchange,
}

/// The pool that examples are chosen from: one answer for each task, the shortest correct one.
pub struct Examples {
    pool: Vec<Example>,
    /// Rarity of each word, from 0 (in every task) upwards.
    weights: BTreeMap<String, f64>,
}

impl Examples {
    /// Those of a table of trajectories.
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        Ok(Self::of(&trajectory::read(path)?))
    }

    /// Those of trajectories whose last answer is correct.
    pub fn of(trajectories: &[Trajectory]) -> Self {
        let mut shortest: BTreeMap<&str, (&Trajectory, &str)> = BTreeMap::new();
        for trajectory in trajectories.iter().filter(|trajectory| trajectory.reward.is_some_and(|reward| reward > 0.0))
        {
            let Some(answer) = trajectory.last_verdict().filter(|turn| turn.reward > Some(0.0)) else { continue };
            let kept = shortest.entry(&trajectory.code).or_insert((trajectory, &answer.text));
            if (answer.text.len(), &answer.text[..]) < (kept.1.len(), kept.1) {
                *kept = (trajectory, &answer.text);
            }
        }
        let example = |(trajectory, answer): &(&Trajectory, &str)| {
            let request = trajectory.turns.first()?.text.clone();
            let exchange = Exchange { request, answer: (*answer).to_owned() };
            Some(Example { task: trajectory.code.clone(), words: words(&trajectory.code), exchange })
        };
        let pool: Vec<Example> = shortest.values().filter_map(example).collect();
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for word in pool.iter().flat_map(|example| &example.words) {
            *counts.entry(word.clone()).or_default() += 1;
        }
        let weight = |count: usize| (pool.len() as f64 / count as f64).ln();
        let weights = counts.into_iter().map(|(word, count)| (word, weight(count))).collect();
        Self { pool, weights }
    }

    /// Number of tasks with an example.
    pub fn len(&self) -> usize {
        self.pool.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.pool.is_empty()
    }

    /// The `most` examples that are nearest to a task, the nearest first; never the task's own, and none that has no word of
    /// weight in common with it.
    pub fn nearest(&self, code: &str, most: usize) -> Vec<&Exchange> {
        let wanted = words(code);
        let score = |example: &Example| {
            let common = example.words.intersection(&wanted).map(|word| self.weights[word]).sum::<f64>();
            let all = example.words.union(&wanted).map(|word| self.weights.get(word).copied().unwrap_or(0.0));
            if common > 0.0 { common / all.sum::<f64>() } else { 0.0 }
        };
        let others = self.pool.iter().filter(|example| example.task != code);
        let mut scored: Vec<(f64, &Example)> = others.map(|example| (score(example), example)).collect();
        scored.retain(|(score, _)| *score > 0.0);
        scored.sort_by(|one, other| other.0.total_cmp(&one.0).then_with(|| one.1.task.cmp(&other.1.task)));
        scored.into_iter().take(most).map(|(_, example)| &example.exchange).collect()
    }
}

/// The identifiers of a task's code, without those that are numbers or of one letter.
fn words(code: &str) -> BTreeSet<String> {
    let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| word.len() > 1 && !word.starts_with(|c: char| c.is_ascii_digit())).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Role;
    use crate::trajectory::Turn;
    use crate::trajectory::tests::example;

    fn solved(operator: &str, answer: &str, reward: f64) -> Trajectory {
        let mut trajectory = example();
        trajectory.code =
            format!("import torch\nclass Model:\n    def forward(self, x):\n        return {operator}(x)\n");
        trajectory.reward = Some(reward);
        let verdict =
            Turn { outcome: Some("correct".into()), reward: Some(reward), ..Turn::new(Role::Assistant, answer) };
        trajectory.turns = vec![Turn::new(Role::User, format!("write {operator}")), verdict];
        trajectory
    }

    fn answers(examples: &Examples, code: &str, most: usize) -> Vec<String> {
        examples.nearest(code, most).into_iter().map(|exchange| exchange.answer.clone()).collect()
    }

    #[test]
    fn a_task_is_shown_what_shares_its_operators() {
        let episodes = [
            solved("torch.relu", "longer relu", 1.0),
            solved("torch.relu", "relu", 1.0),
            solved("torch.softmax", "softmax", 1.0),
            solved("F.silu", "silu", 1.0),
            solved("torch.exp", "wrong", -1.0),
        ];
        let examples = Examples::of(&episodes);
        assert_eq!(examples.len(), 3, "one a task, and no wrong one");
        let pair = "class Model:\n    def forward(self, x):\n        return torch.softmax(F.silu(x), dim=1)\n";
        let both = answers(&examples, pair, 4);
        assert_eq!(both.iter().map(String::as_str).collect::<BTreeSet<_>>(), BTreeSet::from(["silu", "softmax"]));
        assert_eq!(answers(&examples, "torch.relu(torch.relu(x))", 1), ["relu"], "the shortest");
        assert!(answers(&examples, "torch.exp(x)", 4).is_empty(), "what every task has is nothing in common");
    }

    #[test]
    fn a_task_is_not_shown_its_own_answer() {
        let episodes = [solved("torch.relu", "relu", 1.0), solved("F.silu", "silu", 1.0)];
        let examples = Examples::of(&episodes);
        assert!(answers(&examples, &episodes[0].code, 4).is_empty());
        assert!(Examples::of(&[]).is_empty());
    }
}
