//! A model behind a server, in whichever format it is spoken to.

use std::time::Instant;

use serde_json::{Map, Value};

use super::http::Client;
use super::{Completion, Identity, Policy, PolicyError, Request};

/// What all servers are told with each call, beside the conversation.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The model, by the name that the server knows it by.
    pub model: String,
    /// Further fields of the request; a null takes one away.
    pub body: Map<String, Value>,
}

impl Settings {
    /// `body`, with the settings of the pipeline over it.
    pub(super) fn over(&self, mut body: Map<String, Value>) -> Value {
        body.extend(self.body.clone());
        body.retain(|_, value| !value.is_null());
        Value::Object(body)
    }
}

/// Where a model is, and what it is told.
pub struct Server {
    /// Where it is.
    pub client: Client,
    /// What it is told.
    pub settings: Settings,
}

/// A format in which servers are spoken to.
pub trait Format: Sync {
    /// Answers; how long it took is not its concern.
    fn complete(&self, server: &Server, request: &Request) -> Result<Completion, PolicyError>;
}

/// A served model as a policy.
pub struct Served<F> {
    /// The format.
    pub format: F,
    /// The server.
    pub server: Server,
}

impl<F: Format> Policy for Served<F> {
    fn identity(&self) -> Identity {
        Identity { model: self.server.settings.model.clone(), digest: None }
    }

    fn width(&self) -> usize {
        self.server.client.endpoint().concurrency
    }

    fn complete(&self, request: &Request) -> Result<Completion, PolicyError> {
        let started = Instant::now();
        let completion = self.format.complete(&self.server, request)?;
        Ok(Completion { seconds: started.elapsed().as_secs_f64(), ..completion })
    }
}
