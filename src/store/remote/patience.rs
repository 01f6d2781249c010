//! How long a store is waited for.
//!
//! object_store has one rule for all retries. A command line needs two: a server that was never reached (a wrong address, no
//! network) is an error soon, while one that is being restarted is waited for. So connections are watched here, and what
//! should not be retried any more is passed on as an error of a kind that object_store doesn't retry.

use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};

use super::pulse::{self, Pulse};

/// How long a server may be silent that has never answered: two attempts to connect.
const STRANGER: Duration = Duration::from_secs(10);
/// How long one may be silent, or answer 5xx, that has answered before: a rolling restart, a throttled bucket.
const RIDE_OUT: Duration = Duration::from_secs(60);
/// A connection on which nothing moves for this long is dead.
const STALL: Duration = Duration::from_secs(30);
/// Bodies from this size on are given time by their size.
const LARGE_BODY: usize = pulse::SMALL;
/// The slowest that an upload may be, in bytes a second: many share one line.
const SLOWEST: u64 = 16 * 1024;

/// What requests wait for. Nothing limits a request as a whole: 256 MiB over a slow line take many minutes.
pub(super) fn client_options() -> ClientOptions {
    ClientOptions::new()
        .with_connect_timeout(Duration::from_secs(5))
        .with_timeout_disabled()
        .with_read_timeout(STALL)
        // One connection carries one request, and 64 to 128 run at once; HTTP/2 would squeeze them into one connection.
        .with_http1_only()
        .with_pool_max_idle_per_host(128)
        // Below the 20 s after which S3 hangs up, so that few requests meet a connection that is just being closed.
        .with_pool_idle_timeout(Duration::from_secs(15))
        .with_user_agent(object_store::HeaderValue::from_static(concat!("cuda-agent/", env!("CARGO_PKG_VERSION"))))
}

/// Retries go by time alone. object_store's default of ten would be over in some five seconds.
pub(super) fn retry() -> RetryConfig {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(200), max_backoff: Duration::from_secs(5), base: 3.0 };
    RetryConfig { backoff, max_retries: 1000, retry_timeout: RIDE_OUT }
}

/// Makes clients that know when to give up.
#[derive(Debug)]
pub(super) struct Connector {
    /// How long a server may be silent that has never answered.
    pub stranger: Duration,
    /// What others may know of the server.
    pub pulse: Arc<Pulse>,
}

impl Connector {
    /// One that tells a pulse whether the server answers.
    pub fn new(pulse: &Arc<Pulse>) -> Self {
        Self { stranger: STRANGER, pulse: pulse.clone() }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Watched {
            client,
            // The read timeout of reqwest runs from a request's start until the answer begins, uploading included.
            upload_options: options.clone().with_read_timeout_disabled(),
            uploads: OnceLock::new(),
            stranger: self.stranger,
            pulse: self.pulse.clone(),
            server: Mutex::default(),
        }))
    }
}

/// A client that watches whether its server answers.
#[derive(Debug)]
struct Watched {
    client: HttpClient,
    upload_options: ClientOptions,
    /// Made when it is needed: a client takes milliseconds to make, and most commands upload nothing.
    uploads: OnceLock<HttpClient>,
    stranger: Duration,
    pulse: Arc<Pulse>,
    server: Mutex<Server>,
}

#[derive(Debug, Default)]
struct Server {
    known: bool,
    silent_since: Option<Instant>,
}

impl Server {
    fn answered(&mut self) {
        *self = Self { known: true, silent_since: None };
    }

    /// For how long the server has been silent, if that is too long. `started` is when the failed attempt began.
    fn gave_up(&mut self, started: Instant, now: Instant, stranger: Duration) -> Option<Duration> {
        let since = *self.silent_since.get_or_insert(started);
        let limit = if self.known { RIDE_OUT } else { stranger };
        let silent = now.saturating_duration_since(since);
        (silent >= limit).then_some(silent)
    }
}

/// A server that doesn't answer, and isn't waited for any longer.
#[derive(Debug)]
pub(super) struct Unanswered {
    server: String,
    silent: Duration,
    source: HttpError,
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut root: &dyn Error = &self.source;
        while let Some(source) = root.source() {
            root = source;
        }
        write!(f, "{} has not answered for {} s: {root}", self.server, self.silent.as_secs())
    }
}

impl Error for Unanswered {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

impl Watched {
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        use HttpErrorKind::{Connect, Interrupted, Request, Timeout};
        let uri = request.uri();
        let server =
            format!("{}://{}", uri.scheme_str().unwrap_or("http"), uri.authority().map_or("", |host| host.as_str()));
        let started = Instant::now();
        let _on_its_way = (request.body().content_length() < pulse::SMALL).then(|| self.pulse.begin(&request));
        let outcome = self.attempt(request).await;
        let mut state = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let given_up =
            |state: &mut Server, source: HttpError| match state.gave_up(started, Instant::now(), self.stranger) {
                Some(silent) => {
                    self.pulse.give_up();
                    Err(HttpError::new(HttpErrorKind::Unknown, Unanswered { server, silent, source }))
                }
                None => Ok(source),
            };
        match outcome {
            Ok(response) if response.status().is_server_error() => {
                state.known = true;
                let source =
                    HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(response.status().to_string()));
                given_up(&mut state, source).map(|_| response)
            }
            Ok(response) => {
                state.answered();
                self.pulse.answer();
                Ok(response)
            }
            // Also where every connection is accepted and then reset, as by a balancer with nobody behind it.
            Err(source) if matches!(source.kind(), Connect | Timeout | Request | Interrupted) => {
                given_up(&mut state, source).and_then(Err)
            }
            Err(error) => Err(error),
        }
    }

    async fn attempt(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let length = request.body().content_length();
        if length < LARGE_BODY {
            return self.client.execute(request).await;
        }
        let allowed = STALL + Duration::from_secs(length as u64 / SLOWEST);
        let answer = tokio::time::timeout(allowed, self.uploads()?.execute(request)).await;
        answer.unwrap_or_else(|elapsed| Err(HttpError::new(HttpErrorKind::Timeout, elapsed)))
    }

    fn uploads(&self) -> Result<&HttpClient, HttpError> {
        if self.uploads.get().is_none() {
            let made = ReqwestConnector::default().connect(&self.upload_options);
            // Where two made one at once, one of them is dropped.
            let _ = self.uploads.set(made.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?);
        }
        Ok(self.uploads.get().expect("it was just set"))
    }
}

impl HttpService for Watched {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> BoxFuture<'b, Result<HttpResponse, HttpError>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.send(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stranger_is_given_up_sooner_than_a_server_that_answered() {
        let start = Instant::now();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let mut server = Server::default();
        let gave_up = |server: &mut Server, started, now| server.gave_up(after(started), after(now), STRANGER);
        assert_eq!(gave_up(&mut server, 0, 5), None);
        assert_eq!(gave_up(&mut server, 6, 11), Some(Duration::from_secs(11)));
        server.answered();
        assert_eq!(gave_up(&mut server, 20, 25), None);
        assert_eq!(gave_up(&mut server, 26, 79), None);
        assert_eq!(gave_up(&mut server, 75, 80), Some(Duration::from_secs(60)));
        server.answered();
        assert_eq!(gave_up(&mut server, 81, 86), None);
    }
}
