//! The model in this process as a policy of episodes.

use cuda_agent_agent::policy::child::SampleRequest;
use cuda_agent_agent::policy::{Completion, Identity, Policy, PolicyError, Request};

use crate::sampler::{Sampler, child};
use crate::text::Tokenizer;

/// A sampler with its tokenizer. Episodes are threads, and the sampler batches what they ask for.
pub struct Local {
    /// The sampler, whose weights the trainer replaces between steps.
    pub sampler: Sampler,
    /// What turns conversations into ids.
    pub tokenizer: Tokenizer,
    /// Sequences that it samples at a time.
    pub width: usize,
}

impl Policy for Local {
    fn identity(&self) -> Identity {
        Identity { model: "in training".into(), digest: None }
    }

    fn complete(&self, request: &Request) -> Result<Completion, PolicyError> {
        let started = std::time::Instant::now();
        let answer = child::answer(&self.sampler, &self.tokenizer, &SampleRequest::of(request, 0))
            .map_err(|error| PolicyError::Refused(error.to_string()))?;
        Ok(answer.completion(started.elapsed()))
    }

    fn width(&self) -> usize {
        self.width
    }
}
