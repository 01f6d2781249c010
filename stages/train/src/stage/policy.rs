//! The model in this process as a policy of episodes.

use cuda_agent_agent::policy::child::SampleRequest;
use cuda_agent_agent::policy::{Completion, Identity, Policy, PolicyError, Request, Tokens};

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
        let request = SampleRequest {
            id: 0,
            messages: request.messages.to_vec(),
            prefix: request.prefix.cloned(),
            sampling: request.sampling.clone(),
            key: request.key.clone(),
        };
        let answer = child::answer(&self.sampler, &self.tokenizer, &request)
            .map_err(|error| PolicyError::Refused(error.to_string()))?;
        Ok(Completion {
            text: answer.text,
            finish: answer.finish_reason,
            prompt_tokens: Some(answer.prompt_ids.len() as u64),
            completion_tokens: Some(answer.token_ids.len() as u64),
            tokens: Some(Tokens { prompt_ids: answer.prompt_ids, ids: answer.token_ids, log_probs: answer.log_probs }),
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    fn width(&self) -> usize {
        self.width
    }
}
