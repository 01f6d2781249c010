//! One policy on several GPUs.

use std::sync::Mutex;

use super::{Completion, Identity, Policy, PolicyError, Request};

/// The same policy several times. A call goes to the one that has the fewest; what is sampled does not depend on which that is
/// (see [`super::Key`]), but for the rounding of another batch.
pub struct Spread<P> {
    policies: Vec<P>,
    calls: Mutex<Vec<usize>>,
}

impl<P: Policy> Spread<P> {
    /// Of at least one.
    pub fn new(policies: Vec<P>) -> Self {
        let calls = Mutex::new(vec![0; policies.len()]);
        Self { policies, calls }
    }

    fn least_busy(&self) -> Call<'_> {
        let mut calls = self.calls.lock().expect("no panics while it is held");
        let number = (0..calls.len()).min_by_key(|&number| calls[number]).expect("there is at least one");
        calls[number] += 1;
        Call { calls: &self.calls, number }
    }
}

/// A call under way.
struct Call<'a> {
    calls: &'a Mutex<Vec<usize>>,
    number: usize,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.calls.lock().expect("no panics while it is held")[self.number] -= 1;
    }
}

impl<P: Policy> Policy for Spread<P> {
    fn identity(&self) -> Identity {
        self.policies[0].identity()
    }

    fn complete(&self, request: &Request) -> Result<Completion, PolicyError> {
        let call = self.least_busy();
        self.policies[call.number].complete(request)
    }

    fn width(&self) -> usize {
        self.policies.iter().map(Policy::width).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::policy::{Key, Sampling};

    /// Answers once `together` calls are under way.
    struct Waiting<'a> {
        answered: AtomicUsize,
        together: &'a Barrier,
    }

    impl Policy for Waiting<'_> {
        fn identity(&self) -> Identity {
            Identity { model: "m".into(), digest: None }
        }

        fn complete(&self, _: &Request) -> Result<Completion, PolicyError> {
            self.together.wait();
            self.answered.fetch_add(1, Ordering::SeqCst);
            Err(PolicyError::Failed("an answer of a test".into()))
        }

        fn width(&self) -> usize {
            3
        }
    }

    #[test]
    fn calls_go_where_the_fewest_are() {
        let together = Barrier::new(6);
        let waiting = || Waiting { answered: AtomicUsize::new(0), together: &together };
        let spread = Spread::new(vec![waiting(), waiting()]);
        assert_eq!((spread.width(), spread.identity().model.as_str()), (6, "m"));
        let sampling = Sampling { temperature: 1.0, top_p: 1.0, top_k: None, max_tokens: 1, stop: Vec::new() };
        let key = Key { seed: 0, task: "t".into(), sample: 0, turn: 0 };
        for round in 1..=2 {
            std::thread::scope(|scope| {
                for _ in 0..6 {
                    let request = Request { messages: &[], prefix: None, sampling: &sampling, key: &key };
                    let spread = &spread;
                    scope.spawn(move || spread.complete(&request).unwrap_err());
                }
            });
            let answered: Vec<usize> =
                spread.policies.iter().map(|policy| policy.answered.load(Ordering::SeqCst)).collect();
            assert_eq!(answered, [3 * round, 3 * round], "an error ends a call too");
        }
    }
}
