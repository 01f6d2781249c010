//! Calls over HTTP: limits, retries, and what an error means.
//!
//! The rules are those of `ops/generate` (docs/generate.md): 408, 409, 425, 429, 5xx, time-outs and bodies that can't be read are
//! repeated, after 1 s and twice as long each time, or after `Retry-After`; a refused key or an unknown model ends the
//! stage; a request that is refused after others were answered is this request's own fault.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use serde_json::Value;
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};

use super::PolicyError;
use super::endpoint::{Endpoint, Pace};
use super::slots::Slots;

const MOST_BYTES: u64 = 64 << 20;
const FIRST_WAIT_S: f64 = 1.0;
const LONGEST_WAIT_S: f64 = 60.0;
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(600);
/// Calls that fail one after another without any success: then it is not the requests.
const FAILURES_IN_A_ROW: u32 = 3;
/// Low for English and for code, so that a reservation is rather too large.
const CHARACTERS_PER_TOKEN: u64 = 3;
const RETRIED: [u16; 12] = [408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529];
const BUSY: [u16; 3] = [429, 503, 529];
const REFUSED: [u16; 3] = [400, 413, 422];

/// A server of a model. Threads share it.
pub struct Client {
    endpoint: Endpoint,
    headers: Vec<(&'static str, String)>,
    key: Option<String>,
    agent: ureq::Agent,
    pace: Pace,
    slots: Slots,
    /// Whether any call succeeded.
    answered: AtomicBool,
    failures: AtomicU32,
    /// Why nothing is called any more; whoever waits hears of it.
    ended: Mutex<Option<PolicyError>>,
    woken: Condvar,
}

/// One call.
pub struct Call<'a> {
    /// Address.
    pub url: String,
    /// What is sent.
    pub body: &'a Value,
    /// Most tokens of the answer, for the limit of tokens; 0 where it generates nothing.
    pub max_tokens: u32,
    /// Spreads retries.
    pub jitter: u64,
}

/// Why one try did not succeed, where another may.
struct Again {
    message: String,
    wait: Option<Duration>,
    busy: bool,
}

enum Miss {
    Again(Again),
    Final(PolicyError),
}

impl From<String> for Miss {
    fn from(message: String) -> Self {
        Self::Again(Again { message, wait: None, busy: false })
    }
}

impl Client {
    /// `headers` are sent with each call; the key is among them, and is named so that no message shows it.
    pub fn new(endpoint: Endpoint, headers: Vec<(&'static str, String)>, key: Option<String>) -> Self {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::PlatformVerifier)
            .unversioned_rustls_crypto_provider(provider);
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // A redirect would send the key to another address.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(Duration::from_secs_f64(endpoint.timeout_s)))
            .max_idle_connections(endpoint.concurrency)
            .max_idle_connections_per_host(endpoint.concurrency)
            .user_agent("cuda-agent")
            .tls_config(tls.build())
            .build();
        Self {
            pace: Pace::new(&endpoint),
            slots: Slots::new(endpoint.concurrency),
            agent: ureq::Agent::new_with_config(config),
            endpoint,
            headers,
            key,
            answered: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            ended: Mutex::new(None),
            woken: Condvar::new(),
        }
    }

    /// Where the model is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Calls, with all retries; `read` says what the answer means, and how many tokens the call took.
    pub fn call<T>(
        &self,
        call: &Call,
        read: impl Fn(&Value) -> Result<(T, Option<u64>), String>,
    ) -> Result<T, PolicyError> {
        let data = serde_json::to_vec(call.body).expect("plain data");
        let tokens = data.len() as u64 / CHARACTERS_PER_TOKEN + u64::from(call.max_tokens);
        let mut tried = 0;
        loop {
            let (start, reservation) = self.pace.reserve(Instant::now(), tokens);
            self.sleep_until(start)?;
            let outcome = {
                let _slot = self.slots.take();
                self.sleep_until(Instant::now())?;
                self.once(&call.url, &data).and_then(|answer| read(&answer).map_err(unreadable))
            };
            match outcome {
                Ok((answer, taken)) => {
                    if let Some(taken) = taken {
                        self.pace.settle(reservation, taken);
                    }
                    self.answered.store(true, Ordering::Relaxed);
                    self.failures.store(0, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(Miss::Final(error)) => return Err(self.end(error)),
                Err(Miss::Again(again)) if tried == self.endpoint.retries => return Err(self.give_up(&again.message)),
                Err(Miss::Again(again)) => self.wait_before_retry(again, tried, call.jitter)?,
            }
            tried += 1;
        }
    }

    /// What no call can survive ends all of them.
    fn end(&self, error: PolicyError) -> PolicyError {
        if matches!(error, PolicyError::Unusable { .. }) {
            self.ended.lock().expect("no panics while it is held").get_or_insert_with(|| error.clone());
            self.woken.notify_all();
        }
        error
    }

    fn sleep_until(&self, then: Instant) -> Result<(), PolicyError> {
        let ended = self.ended.lock().expect("no panics while it is held");
        let wait = then.saturating_duration_since(Instant::now());
        let (ended, _) =
            self.woken.wait_timeout_while(ended, wait, |ended| ended.is_none()).expect("no panics while it is held");
        ended.clone().map_or(Ok(()), Err)
    }

    fn wait_before_retry(&self, again: Again, tried: u32, jitter: u64) -> Result<(), PolicyError> {
        let spread = 0.75 + 0.5 * (jitter.rotate_left(tried) % 1024) as f64 / 1024.0;
        let backoff = (FIRST_WAIT_S * 2_f64.powi(tried.min(16) as i32)).min(LONGEST_WAIT_S) * spread;
        let wait = again.wait.unwrap_or(Duration::from_secs_f64(backoff));
        if wait > LONGEST_RETRY_AFTER {
            let message = format!("{}; it asks to wait for {} s", again.message, wait.as_secs());
            return Err(PolicyError::Failed(message));
        }
        eprintln!("retry {}: {}; waiting for {:.1} s", tried + 1, again.message, wait.as_secs_f64());
        let until = Instant::now() + wait;
        if again.busy {
            self.pace.hold(until);
        }
        self.sleep_until(until)
    }

    fn give_up(&self, message: &str) -> PolicyError {
        let retries = self.endpoint.retries;
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 < FAILURES_IN_A_ROW {
            return PolicyError::Failed(format!("{message}, after {retries} retries"));
        }
        self.end(PolicyError::environment(
            format!("the last {FAILURES_IN_A_ROW} calls all failed after {retries} retries each ({message})"),
            "what was answered is kept; run again once the endpoint is well",
        ))
    }

    fn once(&self, url: &str, data: &[u8]) -> Result<Value, Miss> {
        let mut request = self.agent.post(url).header("content-type", "application/json");
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let mut response = request.send(data).map_err(|error| self.unreachable(&error))?;
        let status = response.status().as_u16();
        let wait = response.headers().get("retry-after").and_then(|value| retry_after(value.to_str().ok()?));
        let content = response.body_mut().with_config().limit(MOST_BYTES).read_to_vec();
        let content = content.map_err(|error| self.unreachable(&error))?;
        if status != 200 {
            return Err(self.refused(status, wait, &content));
        }
        serde_json::from_slice(&content).map_err(|error| unreadable(error.to_string()))
    }

    /// No answer at all. Before the first success, what no waiting cures ends the stage.
    fn unreachable(&self, error: &ureq::Error) -> Miss {
        let host = self.endpoint.host();
        if matches!(error, ureq::Error::Timeout(_)) {
            return format!("{host}: no answer within {} s", self.endpoint.timeout_s).into();
        }
        let message = format!("{host} can't be reached: {error}");
        let is_lasting = match error {
            ureq::Error::Io(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
            ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::BadUri(_) => true,
            _ => false,
        };
        if is_lasting && !self.answered.load(Ordering::Relaxed) {
            let hint = "LLM_ENDPOINT says where the model is; is the server running? What was answered before is kept";
            return Miss::Final(PolicyError::environment(message, hint));
        }
        if matches!(error, ureq::Error::Tls(_) | ureq::Error::Rustls(_)) {
            let hint = "the system's certificates are trusted, and those that SSL_CERT_FILE names";
            return Miss::Final(PolicyError::environment(message, hint));
        }
        message.into()
    }

    /// The server answered with an error.
    fn refused(&self, status: u16, wait: Option<Duration>, content: &[u8]) -> Miss {
        let said = self.said(content);
        let message =
            format!("{} answers {status}{}{said}", self.endpoint.host(), if said.is_empty() { "" } else { ": " });
        if RETRIED.contains(&status) && !said.contains("insufficient_quota") {
            return Miss::Again(Again { message, wait, busy: BUSY.contains(&status) });
        }
        if REFUSED.contains(&status) && self.answered.load(Ordering::Relaxed) {
            return Miss::Final(PolicyError::Refused(message));
        }
        let hint = match status {
            429 => "the account has no credit left; what was answered is kept",
            401 | 403 => "is LLM_API_KEY the key of this endpoint, and may it use this model?",
            404 => "is it the right model, and the right address? A base_url in OpenAI's format usually ends in /v1",
            301 | 302 | 303 | 307 | 308 => "redirects are not followed: give LLM_ENDPOINT the final address",
            status if REFUSED.contains(&status) => {
                "it refuses the first request: see the parameters model, temperature, max_tokens, prefill and body (a null \
                 in `body` takes a field away that the endpoint does not know)"
            }
            _ => "LLM_ENDPOINT and the parameter api must belong together",
        };
        Miss::Final(PolicyError::params(message, hint))
    }

    /// What an error's body says, in one line, without the key: servers quote parts of a refused one.
    fn said(&self, content: &[u8]) -> String {
        let text = String::from_utf8_lossy(content);
        let value: Option<Value> = serde_json::from_slice(content).ok();
        let error = value.as_ref().map(|value| value.get("error").or_else(|| value.get("detail")).unwrap_or(value));
        let text = match error {
            Some(error) => error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned),
            None => text.into_owned(),
        };
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect::<String>();
        match &self.key {
            Some(key) => line.replace(key, "[key]"),
            None => line,
        }
    }
}

fn unreadable(problem: String) -> Miss {
    format!("the endpoint's answer can't be read: {problem}").into()
}

/// The header Retry-After: seconds, or a date, of which the seconds from now on are taken.
fn retry_after(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse::<f64>() {
        return Duration::try_from_secs_f64(seconds.max(0.0)).ok();
    }
    let wait = DateTime::parse_from_rfc2822(text.trim()).ok()?.to_utc() - Utc::now();
    Some(wait.to_std().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        assert_eq!(retry_after("1.5"), Some(Duration::from_millis(1500)));
        assert_eq!(retry_after("-3"), Some(Duration::ZERO));
        let date = |text| DateTime::parse_from_rfc2822(text).unwrap().timestamp();
        assert_eq!(date("Sun, 06 Nov 1994 08:49:37 GMT"), 784_111_777);
        assert_eq!(date("Thu, 29 Feb 2024 00:00:00 GMT"), 1_709_164_800);
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        let soon = (Utc::now() + Duration::from_secs(60)).format("%a, %d %b %Y %H:%M:%S GMT").to_string();
        assert!(
            retry_after(&soon).is_some_and(|wait| wait <= Duration::from_secs(60) && wait > Duration::from_secs(50))
        );
        assert_eq!(retry_after("soon"), None);
    }
}
