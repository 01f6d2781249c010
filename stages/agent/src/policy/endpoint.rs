//! Where a served model is, and how fast it may be called: `LLM_ENDPOINT` and `LLM_API_KEY`, as for `ops/generate`
//! (docs/generate.md). Nothing here changes an answer, so nothing of it is in a key.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use super::PolicyError;

const HINT: &str =
    "LLM_ENDPOINT is a URL such as http://127.0.0.1:8080/v1, or a JSON object with base_url; docs/generate.md";

/// `LLM_ENDPOINT`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Endpoint {
    /// Where the model is, without a slash at its end.
    pub base_url: String,
    /// Calls at a time.
    pub concurrency: usize,
    /// Calls in any 60 seconds; 0: no limit.
    pub requests_per_minute: u64,
    /// Tokens in any 60 seconds; 0: no limit.
    pub tokens_per_minute: u64,
    /// Seconds that one call may take.
    pub timeout_s: f64,
    /// How often a call is repeated.
    pub retries: u32,
    /// Price of what is sent, for the report of costs that other kinds make; taken and not used here.
    pub usd_per_million_input: Option<f64>,
    /// Price of what is written, likewise.
    pub usd_per_million_output: Option<f64>,
}

impl Default for Endpoint {
    fn default() -> Self {
        Self {
            base_url: String::new(),
            concurrency: 4,
            requests_per_minute: 0,
            tokens_per_minute: 0,
            timeout_s: 300.0,
            retries: 6,
            usd_per_million_input: None,
            usd_per_million_output: None,
        }
    }
}

impl Endpoint {
    /// Reads `LLM_ENDPOINT`; `own` is where the API's own servers are.
    pub fn parse(text: &str, own: &str) -> Result<Self, PolicyError> {
        let text = text.trim();
        let value = if text.starts_with('{') {
            serde_json::from_str(text).map_err(|error| wrong(format!("is not JSON: {error}")))?
        } else {
            json!({ "base_url": text })
        };
        Self::checked(value, own)
    }

    fn checked(value: Value, own: &str) -> Result<Self, PolicyError> {
        let mut endpoint: Self = serde_json::from_value(value).map_err(|error| wrong(error.to_string()))?;
        if endpoint.base_url.is_empty() {
            endpoint.base_url = own.to_owned();
        }
        if !(1..=256).contains(&endpoint.concurrency) {
            return Err(wrong("concurrency must be from 1 to 256".into()));
        }
        if !(endpoint.timeout_s > 0.0 && endpoint.timeout_s < 1e6) {
            return Err(wrong("timeout_s must be above 0".into()));
        }
        let rest = ["http://", "https://"].iter().find_map(|scheme| endpoint.base_url.strip_prefix(scheme));
        let host = rest.unwrap_or_default().split('/').next().unwrap_or_default();
        if host.is_empty() || host.starts_with(':') {
            return Err(wrong("is no http or https URL".into()));
        }
        if host.contains('@') || endpoint.base_url.contains(['?', '#']) {
            let hint = "the key belongs into LLM_API_KEY";
            return Err(PolicyError::params("LLM_ENDPOINT: a URL without user, query and fragment is expected", hint));
        }
        endpoint.base_url = endpoint.base_url.trim_end_matches('/').to_owned();
        Ok(endpoint)
    }

    /// The host, for messages.
    pub fn host(&self) -> &str {
        self.base_url.split('/').nth(2).unwrap_or(&self.base_url)
    }
}

fn wrong(problem: String) -> PolicyError {
    PolicyError::params(format!("LLM_ENDPOINT: {problem}"), HINT)
}

const WINDOW: Duration = Duration::from_secs(60);

/// At most so many units in any window of 60 seconds; 0 is no limit.
#[derive(Debug, Default)]
struct Limit {
    most: u64,
    /// Start and units of calls, by start, with a number for [`Pace::settle`].
    calls: VecDeque<(Instant, u64, u64)>,
}

impl Limit {
    /// When a call of so many units may start. One larger than the limit may have a window to itself.
    fn earliest(&mut self, now: Instant, units: u64) -> Instant {
        if self.most == 0 {
            return now;
        }
        let units = units.min(self.most);
        while self.calls.front().is_some_and(|(start, ..)| *start + WINDOW <= now) {
            self.calls.pop_front();
        }
        // Starts are in order, so that a small call does not overtake a large one for ever.
        let mut start = self.calls.back().map_or(now, |(last, ..)| now.max(*last));
        let counting = self.calls.iter().filter(|(begun, ..)| *begun + WINDOW > start);
        let mut used: u64 = counting.clone().map(|(_, spent, _)| spent).sum();
        for (begun, spent, _) in counting.cloned().collect::<Vec<_>>() {
            if used + units <= self.most {
                break;
            }
            start = start.max(begun + WINDOW);
            used -= spent;
        }
        start
    }

    fn reserve(&mut self, start: Instant, units: u64, number: u64) {
        if self.most > 0 {
            self.calls.push_back((start, units.min(self.most), number));
        }
    }
}

/// Says when the next call may start. It waits for nothing itself, so tests need not wait either.
#[derive(Debug)]
pub struct Pace(Mutex<PaceState>);

#[derive(Debug)]
struct PaceState {
    requests: Limit,
    tokens: Limit,
    not_before: Option<Instant>,
    number: u64,
}

/// What a call reserved, until it is known what it took.
#[derive(Clone, Copy, Debug)]
pub struct Reservation(u64);

impl Pace {
    /// The limits of an endpoint.
    pub fn new(endpoint: &Endpoint) -> Self {
        let limit = |most| Limit { most, calls: VecDeque::new() };
        Self(Mutex::new(PaceState {
            requests: limit(endpoint.requests_per_minute),
            tokens: limit(endpoint.tokens_per_minute),
            not_before: None,
            number: 0,
        }))
    }

    /// Reserves a call of at most so many tokens, and says when it may start.
    pub fn reserve(&self, now: Instant, tokens: u64) -> (Instant, Reservation) {
        let mut state = self.0.lock().expect("no panics while it is held");
        let start = state.not_before.map_or(now, |held| held.max(now));
        let start = state.requests.earliest(start, 1);
        let start = state.tokens.earliest(start, tokens);
        state.number += 1;
        let number = state.number;
        state.requests.reserve(start, 1, number);
        state.tokens.reserve(start, tokens, number);
        (start, Reservation(number))
    }

    /// What a call took in truth, once that is known.
    pub fn settle(&self, reservation: Reservation, tokens: u64) {
        let mut state = self.0.lock().expect("no panics while it is held");
        let most = state.tokens.most;
        if let Some(call) = state.tokens.calls.iter_mut().find(|(.., number)| *number == reservation.0) {
            call.1 = tokens.min(most);
        }
    }

    /// Starts no call before then: the endpoint has said that it is busy.
    pub fn hold(&self, until: Instant) {
        let mut state = self.0.lock().expect("no panics while it is held");
        state.not_before = Some(state.not_before.map_or(until, |held| held.max(until)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Endpoint, PolicyError> {
        Endpoint::parse(text, "https://api.example.com/v1")
    }

    #[test]
    fn an_endpoint_is_a_url_or_an_object() {
        assert_eq!(parse("").unwrap().base_url, "https://api.example.com/v1");
        assert_eq!(parse(" http://127.0.0.1:8080/v1/ ").unwrap().base_url, "http://127.0.0.1:8080/v1");
        let object = parse(r#"{"base_url": "http://h:1/v1", "concurrency": 16, "usd_per_million_input": 3}"#).unwrap();
        assert_eq!((object.concurrency, object.retries, object.host()), (16, 6, "h:1"));
    }

    #[test]
    fn mistakes_are_told() {
        for (text, expected) in [
            ("ftp://h", "is no http"),
            ("http://", "is no http"),
            ("http://user:pass@h/v1", "without user"),
            ("http://h/v1?key=1", "without user"),
            ("{", "is not JSON"),
            (r#"{"url": "http://h"}"#, "unknown field `url`"),
            (r#"{"base_url": "http://h", "concurrency": 0}"#, "concurrency"),
            (r#"{"base_url": "http://h", "timeout_s": 0}"#, "timeout_s"),
            (r#"{"base_url": "http://h", "retries": -1}"#, "LLM_ENDPOINT"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    fn pace(requests_per_minute: u64, tokens_per_minute: u64) -> Pace {
        Pace::new(&Endpoint { requests_per_minute, tokens_per_minute, ..Endpoint::default() })
    }

    #[test]
    fn calls_keep_to_the_limits_of_a_minute() {
        let (pace, now) = (pace(2, 0), Instant::now());
        let starts: Vec<u64> = (0..5).map(|_| (pace.reserve(now, 10).0 - now).as_secs()).collect();
        assert_eq!(starts, [0, 0, 60, 60, 120]);
    }

    #[test]
    fn tokens_that_were_not_needed_are_given_back() {
        let (pace, now) = (pace(0, 100), Instant::now());
        let (_, first) = pace.reserve(now, 90);
        pace.settle(first, 20);
        assert_eq!(pace.reserve(now, 80).0, now);
        assert_eq!((pace.reserve(now, 500).0 - now).as_secs(), 60, "one that is larger has a window to itself");
    }

    #[test]
    fn a_busy_endpoint_is_left_alone() {
        let (pace, now) = (pace(0, 0), Instant::now());
        pace.hold(now + Duration::from_secs(7));
        pace.hold(now + Duration::from_secs(3));
        assert_eq!((pace.reserve(now, 1).0 - now).as_secs(), 7);
    }
}
