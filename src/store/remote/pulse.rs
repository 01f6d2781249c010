//! Whether a server answers, for those who wait for it and want to know why nothing happens.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use object_store::client::HttpRequest;

/// What is known of the requests to a server. Clients of one store share it.
#[derive(Debug, Default)]
pub struct Pulse {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Requests that are on their way.
    waiting: usize,
    /// Since when nothing has been answered although something was asked.
    silence: Option<Silence>,
    /// How the last silence ended.
    answered: bool,
}

/// A server that was asked and has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// When the first request without an answer was made.
    pub since: Instant,
    /// What that is for.
    pub purpose: &'static str,
}

impl Pulse {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The silence that goes on, if one does.
    pub fn silence(&self) -> Option<Silence> {
        self.state().silence
    }

    /// Whether the last silence ended with an answer: otherwise the server was given up.
    pub fn has_answered(&self) -> bool {
        self.state().answered
    }

    /// A request is made. It is on its way until the guard is dropped.
    pub(super) fn begin(&self, request: &HttpRequest) -> OnItsWay<'_> {
        let mut state = self.state();
        state.waiting += 1;
        state.silence.get_or_insert_with(|| Silence { since: Instant::now(), purpose: purpose(request) });
        OnItsWay(self)
    }

    /// The server answered, whatever it said. Other requests are waited for from now on.
    pub(super) fn answer(&self) {
        let mut state = self.state();
        state.answered = true;
        state.silence = match state.silence {
            Some(silence) if state.waiting > 1 => Some(Silence { since: Instant::now(), ..silence }),
            _ => None,
        };
    }

    /// The server is not waited for any longer.
    pub(super) fn give_up(&self) {
        let mut state = self.state();
        state.answered = false;
        state.silence = None;
    }
}

/// A request that is on its way.
pub(super) struct OnItsWay<'p>(&'p Pulse);

impl Drop for OnItsWay<'_> {
    fn drop(&mut self) {
        self.0.state().waiting -= 1;
    }
}

/// Requests with larger bodies say nothing by taking long.
pub(super) const SMALL: usize = 256 * 1024;
/// From here on a silence is worth a word.
pub const NOTICED: Duration = Duration::from_secs(5);

/// What a request is for, by its method and what it is about.
fn purpose(request: &HttpRequest) -> &'static str {
    let (reads, uri) = (request.method() == "GET" || request.method() == "HEAD", request.uri().to_string());
    // The folder of the layout that it is about: in the path, or in the prefix of a listing.
    let folder = ["v1/", "v1%2F"].iter().find_map(|layout| uri.split_once(layout)).map_or("", |(_, rest)| rest);
    let folder = folder.split(['/', '%', '&', '?']).next().unwrap_or_default();
    match (folder, reads) {
        ("records", true) => "to look up results",
        ("records" | "replaced", false) => "to share results",
        ("blobs", true) => "to fetch files of results",
        ("blobs", false) => "to share files of results",
        ("rows", true) => "to look up results of rows",
        ("rows", false) => "to share results of rows",
        ("leases", _) => "to agree with other runs on who executes what",
        ("runs", true) => "to list runs",
        ("runs", false) => "to record the run",
        ("logs", _) => "to share or read a log",
        ("tags", _) => "for a tag",
        _ => "to look at the store",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, uri: &str) -> HttpRequest {
        let mut request = HttpRequest::new(object_store::client::HttpRequestBody::empty());
        *request.method_mut() = method.parse().unwrap();
        *request.uri_mut() = uri.parse().unwrap();
        request
    }

    #[test]
    fn a_silence_ends_with_an_answer_or_is_given_up() {
        let pulse = Pulse::default();
        assert_eq!(pulse.silence(), None);
        let one = pulse.begin(&request("GET", "http://h/b/v1/records/a"));
        let began = pulse.silence().unwrap();
        assert_eq!(began.purpose, "to look up results");
        // One that failed and is made again in a while is still waited for, by whoever asked.
        drop(one);
        assert_eq!(pulse.silence(), Some(began));
        let (two, three) =
            (pulse.begin(&request("PUT", "http://h/b/v1/runs/r")), pulse.begin(&request("GET", "http://h/b")));
        assert_eq!(pulse.silence(), Some(began), "it is the first request that tells since when");
        pulse.answer();
        drop(two);
        assert!(
            pulse.silence().is_some_and(|silence| silence.since > began.since),
            "the other is waited for from now on"
        );
        pulse.answer();
        drop(three);
        assert_eq!((pulse.silence(), pulse.has_answered()), (None, true));
        drop(pulse.begin(&request("GET", "http://h/b")));
        pulse.give_up();
        assert_eq!((pulse.silence(), pulse.has_answered()), (None, false));
    }

    #[test]
    fn requests_say_what_they_are_for() {
        let cases = [
            ("GET", "http://h/bucket?list-type=2&prefix=lab%2Fv1%2Fruns%2F", "to list runs"),
            ("PUT", "http://h/bucket/lab/v1/runs/20261122T190132.787Z-9e2c50", "to record the run"),
            ("HEAD", "http://h/bucket/v1/blobs/da/dac8", "to fetch files of results"),
            ("PUT", "http://h/bucket/v1/records/a/00000001", "to share results"),
            ("GET", "http://h/bucket/v1/store-id", "to look at the store"),
            ("POST", "http://h/bucket?delete", "to look at the store"),
            ("PUT", "http://h/bucket/v1/leases/a.1", "to agree with other runs on who executes what"),
        ];
        for (method, uri, told) in cases {
            assert_eq!(purpose(&request(method, uri)), told, "{method} {uri}");
        }
    }
}
