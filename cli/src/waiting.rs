//! Says what a command waits for when a shared store does not answer: silence looks like a hang.

use std::cell::RefCell;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_agent_engine::event::{RunEvent, Subscriber};
use cuda_agent_engine::execute::seconds;
use cuda_agent_engine::store::remote::pulse::{NOTICED, Pulse, Silence};
use indicatif::MultiProgress;

use crate::note;
use crate::progress::JsonLines;

/// How often the server's pulse is looked at.
const OFTEN: Duration = Duration::from_millis(500);

/// What a command shows, so that words about the store go where its own words go.
#[derive(Default)]
pub enum Voice {
    /// Lines on standard error.
    #[default]
    Plain,
    /// Bars, which lines go above.
    Bars(MultiProgress),
    /// JSON lines.
    Json,
}

/// The pulse of a project's store, and where to speak of it.
#[derive(Default)]
pub struct Waiting {
    /// Of the shared store; without one, it never says anything.
    pub pulse: Arc<Pulse>,
    /// How to say it.
    pub voice: RefCell<Voice>,
}

impl Waiting {
    /// Watches for as long as it is polled. `store` is what the store is called.
    pub async fn watch(&self, store: &str) -> Infallible {
        let mut told = None;
        loop {
            tokio::time::sleep(OFTEN).await;
            let (silence, answered) = (self.pulse.silence(), self.pulse.has_answered());
            if let Some(message) = news(store, &mut told, silence, answered, Instant::now()) {
                self.say(&message);
            }
        }
    }

    fn say(&self, message: &str) {
        let (stage, level) = ("store".to_owned(), "warning".to_owned());
        let event = RunEvent::Message { stage, level, message: message.to_owned() };
        match &*self.voice.borrow() {
            Voice::Json => JsonLines.notice(&event),
            Voice::Bars(bars) => drop(bars.println(super::progress::line(&event).unwrap_or_default())),
            Voice::Plain => note(&super::progress::line(&event).unwrap_or_default()),
        }
    }
}

/// What is to be said of a silence: once when it is long, once when it ends with an answer. `told` is the silence that was
/// spoken of.
fn news(
    store: &str,
    told: &mut Option<Silence>,
    silence: Option<Silence>,
    answered: bool,
    now: Instant,
) -> Option<String> {
    let so_far = |silence: &Silence| seconds(now.saturating_duration_since(silence.since));
    match *told {
        None => {
            let long = silence.filter(|silence| now.saturating_duration_since(silence.since) >= NOTICED)?;
            *told = Some(long);
            let (so_far, purpose) = (so_far(&long), long.purpose);
            Some(format!("{store} has not answered for {so_far} (asked {purpose}); asking again for up to a minute"))
        }
        Some(before) if silence.is_none_or(|now| now.since != before.since) => {
            *told = None;
            // Whoever gave the server up says so.
            answered.then(|| format!("{store} answers again, after {}", so_far(&before)))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_silence_is_told_once_and_its_end_too() {
        let since = Instant::now();
        let at = |seconds| since + Duration::from_secs(seconds);
        let silence = |purpose| Some(Silence { since, purpose });
        let mut told = None;
        let mut news = |silence, answered, seconds| news("s3://team/lab", &mut told, silence, answered, at(seconds));
        let asked = silence("to share results");
        let said = [
            news(None, true, 4),
            news(asked, true, 4),
            news(asked, true, 5),
            news(asked, true, 30),
            news(None, true, 31),
            news(asked, true, 40),
            news(None, false, 60),
        ];
        let said: Vec<String> = said.into_iter().map(Option::unwrap_or_default).collect();
        insta::assert_snapshot!(said.join("\n"));
    }
}
