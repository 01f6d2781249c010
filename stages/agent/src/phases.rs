//! Whose turn it is where a sampler and the evaluator share a card.
//!
//! A candidate that hangs stalls every process on a card, and a clock beside others lies. So on one card, nothing is judged
//! while anything is sampled, and the other way round. Whoever comes while the others are at work waits until the last of them
//! is done; an episode that waits for a verdict starts no answer and the other way round, so each phase ends.

use std::sync::{Condvar, Mutex};

/// What is done on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The policy answers.
    Sampling,
    /// The evaluator judges.
    Judging,
}

/// Either any number of answers, or any number of verdicts.
pub struct Phases {
    /// Whether they exclude each other at all.
    exclusive: bool,
    state: Mutex<Option<(Phase, usize)>>,
    changed: Condvar,
}

impl Phases {
    /// With `exclusive`, one phase at a time.
    pub fn new(exclusive: bool) -> Self {
        Self { exclusive, state: Mutex::new(None), changed: Condvar::new() }
    }

    /// Works in a phase.
    pub fn within<T>(&self, phase: Phase, work: impl FnOnce() -> T) -> T {
        if !self.exclusive {
            return work();
        }
        let state = self.state.lock().expect("no panics while it is held");
        let is_other = |state: &mut Option<(Phase, usize)>| state.is_some_and(|(current, _)| current != phase);
        let mut state = self.changed.wait_while(state, is_other).expect("no panics while it is held");
        *state = Some((phase, state.map_or(1, |(_, count)| count + 1)));
        drop(state);
        let _leaving = Leaving(self);
        work()
    }
}

struct Leaving<'a>(&'a Phases);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock().expect("no panics while it is held");
        *state = state.and_then(|(phase, count)| (count > 1).then_some((phase, count - 1)));
        if state.is_none() {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn phases_exclude_each_other_and_share_themselves() {
        let phases = Phases::new(true);
        let (sampling, judging, most) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let work = |mine: &AtomicUsize, other: &AtomicUsize| {
            let count = mine.fetch_add(1, Ordering::SeqCst) + 1;
            most.fetch_max(count, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(other.load(Ordering::SeqCst), 0);
            mine.fetch_sub(1, Ordering::SeqCst);
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        phases.within(Phase::Sampling, || work(&sampling, &judging));
                        phases.within(Phase::Judging, || work(&judging, &sampling));
                    }
                });
            }
        });
        assert!(most.load(Ordering::SeqCst) > 1, "a phase takes many");
    }

    #[test]
    fn apart_nobody_waits() {
        let phases = Phases::new(false);
        assert_eq!(phases.within(Phase::Sampling, || phases.within(Phase::Judging, || 7)), 7);
    }
}
