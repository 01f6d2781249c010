//! The episodes with one task: how many, and which examples they are shown.

use std::ops::Range;

use crate::episode::{Assignment, EpisodeError, OtherPrompt, Stage};
use crate::examples::Examples;
use crate::policy::PolicyError;
use crate::prompts::Exchange;
use crate::trajectory::Trajectory;

/// How many episodes a task gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplePlan {
    /// Side by side.
    pub samples: u32,
    /// Correct episodes after which there are no more; 0 asks for `samples` alone.
    pub enough: u32,
    /// Most episodes, where fewer than `enough` are correct; `samples` if that is more.
    pub most: u32,
    /// Examples of earlier episodes that the samples are divided among.
    pub examples: u32,
    /// Whether trajectories have the prompts' own opening in place of the one with an example of earlier episodes.
    pub forget_examples: bool,
}

impl SamplePlan {
    fn most(&self) -> u32 {
        if self.enough == 0 { self.samples } else { self.most.max(self.samples) }
    }

    /// Which of `count` examples a sample is shown, the nearest first.
    fn example_of(&self, sample: u32, count: usize) -> usize {
        let share = self.samples.div_ceil(self.examples.max(1)).max(1);
        (sample / share) as usize % count
    }
}

/// What makes the episodes of a task.
pub struct Series<'a> {
    /// One episode.
    pub stage: Stage<'a>,
    /// How many of them.
    pub plan: SamplePlan,
    /// Correct answers to other tasks, where there are some to show.
    pub examples: Option<&'a Examples>,
}

impl Series<'_> {
    /// All episodes with a task, in the order of their samples: [`SamplePlan::samples`] side by side, and as many again until enough
    /// are correct.
    pub fn episodes(&self, assignment: &Assignment) -> Result<Vec<Trajectory>, EpisodeError> {
        let plan = &self.plan;
        let wanted = (plan.examples.max(1) * plan.most().div_ceil(plan.samples)) as usize;
        let mut shown =
            self.examples.map(|examples| examples.nearest(&assignment.task.code, wanted)).unwrap_or_default();
        let own = match plan.forget_examples && !shown.is_empty() {
            // Too long, say: episodes that are asked with it are broken off and counted, and no other may be recorded as it.
            true => match self.stage.own_prompt(assignment) {
                Err(EpisodeError::Policy(PolicyError::Refused(_))) => {
                    shown.clear();
                    None
                }
                ids => ids?,
            },
            false => None,
        };
        let mut episodes: Vec<Trajectory> = Vec::new();
        while (episodes.len() as u32) < plan.most() {
            let first = episodes.len() as u32;
            episodes.extend(self.wave(
                assignment,
                first..plan.most().min(first + plan.samples),
                &shown,
                own.as_deref(),
            )?);
            let correct = episodes.iter().filter(|episode| episode.reward.is_some_and(|reward| reward > 0.0)).count();
            if correct as u32 >= plan.enough {
                break;
            }
        }
        Ok(episodes)
    }

    /// Some of a task's episodes, side by side.
    fn wave(
        &self,
        assignment: &Assignment,
        samples: Range<u32>,
        shown: &[&Exchange],
        own: Option<&[u32]>,
    ) -> Result<Vec<Trajectory>, EpisodeError> {
        std::thread::scope(|scope| {
            let run = |sample| {
                let example = (!shown.is_empty()).then(|| shown[self.plan.example_of(sample, shown.len())]);
                let prompt = example.map(|example| OtherPrompt { example, recorded: own });
                scope.spawn(move || self.stage.run_with(assignment, sample, prompt))
            };
            let threads: Vec<_> = samples.map(run).collect();
            let ends: Vec<_> =
                threads.into_iter().map(|thread| thread.join().expect("an episode does not panic")).collect();
            // What ends the stage is told before what ends a row.
            let rank = |error: &EpisodeError| !matches!(error, EpisodeError::Policy(PolicyError::Unusable { .. }));
            let worst = ends.iter().filter_map(|end| end.as_ref().err()).min_by_key(|error| rank(error)).cloned();
            worst.map_or_else(|| Ok(ends.into_iter().flatten().collect()), Err)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use cuda_agent_kernels::fault::EvaluatorError;
    use cuda_agent_kernels::judge::Judged;
    use cuda_agent_kernels::reference::Task;
    use cuda_agent_kernels::verdict::Outcome;

    use super::*;
    use crate::episode::Judging;
    use crate::episode::tests::{assignment, judged, rules};
    use crate::phases::Phases;
    use crate::policy::scripted::Scripted;
    use crate::policy::{Message, Role};
    use crate::prompts::Prompts;
    use crate::trajectory::Form;
    use crate::trajectory::tests::example;

    /// Finds every `nth` answer correct.
    struct Every {
        nth: u32,
        asked: AtomicU32,
    }

    impl Judging for Every {
        fn ask(&self, _: &Task, _: &str, _: bool) -> Result<Judged, EvaluatorError> {
            let asked = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
            Ok(if asked.is_multiple_of(self.nth) {
                judged(Outcome::Correct, Some(1.0))
            } else {
                judged(Outcome::Wrong, Some(-1.0))
            })
        }
    }

    const PLAN: SamplePlan = SamplePlan { samples: 4, enough: 0, most: 10, examples: 2, forget_examples: true };

    fn episodes(nth: u32, plan: SamplePlan, examples: Option<&Examples>) -> Vec<Trajectory> {
        let judge = Every { nth, asked: AtomicU32::new(0) };
        let (prompts, phases, rules) = (Prompts::own(), Phases::new(true), rules(Form::Single));
        let stage = Stage { policy: &Scripted, judge: &judge, prompts: &prompts, phases: &phases, rules: &rules };
        let made = Series { stage, plan, examples }.episodes(&assignment()).unwrap();
        made.iter().for_each(|episode| episode.check().unwrap());
        let samples: Vec<u32> = made.iter().map(|episode| episode.sample).collect();
        assert_eq!(samples, (0..made.len() as u32).collect::<Vec<_>>());
        made
    }

    #[test]
    fn a_task_is_sampled_until_enough_are_correct_or_there_are_too_many() {
        let count = |nth, enough| episodes(nth, SamplePlan { enough, ..PLAN }, None).len();
        assert_eq!(count(100, 0), 4, "without a number that is enough there is one wave");
        assert_eq!(count(2, 2), 4);
        assert_eq!(count(4, 2), 8);
        assert_eq!(count(100, 1), 10, "the last wave is cut");
        let plan = SamplePlan { enough: 1, most: 2, ..PLAN };
        assert_eq!(episodes(100, plan, None).len(), 4);
    }

    fn solved() -> Examples {
        let mut relu = example();
        relu.code = "return torch.relu(x) + bias".into();
        relu.turns[0].text = "write relu and bias".into();
        let mut other = example();
        other.code = "return torch.exp(x)".into();
        Examples::of(&[relu, other])
    }

    /// What is sampled with an example of an earlier round is kept with the prompt that the policy is used with.
    #[test]
    fn an_example_of_an_earlier_round_is_shown_and_forgotten() {
        let examples = solved();
        let shown = &episodes(1, SamplePlan { forget_examples: false, ..PLAN }, Some(&examples))[0];
        let forgotten = &episodes(1, PLAN, Some(&examples))[0];
        let plain = &episodes(1, PLAN, None)[0];
        assert!(shown.messages.contains(&Message::new(Role::User, "write relu and bias")), "{:?}", shown.messages);
        assert_ne!(shown.messages[1], plain.messages[1]);
        assert_eq!(forgotten.messages, plain.messages);
        assert_eq!((&forgotten.tokens, &forgotten.turns), (&plain.tokens, &plain.turns), "the script answers alike");
        assert_ne!(shown.tokens, plain.tokens);
    }

    #[test]
    fn examples_are_divided_among_samples() {
        let of = |plan: SamplePlan, count| (0..8).map(|sample| plan.example_of(sample, count)).collect::<Vec<_>>();
        assert_eq!(of(PLAN, 4), [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(of(PLAN, 3), [0, 0, 1, 1, 2, 2, 0, 0]);
        assert_eq!(of(SamplePlan { examples: 9, ..PLAN }, 2), [0, 1, 0, 1, 0, 1, 0, 1]);
    }
}
