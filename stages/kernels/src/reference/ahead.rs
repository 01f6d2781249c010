//! Runs that are drawn before the clock starts, and judged after it: `python/ahead.py`.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{ASK_LIMIT, Answered, Judgement, Reference};

/// A draw that is wanted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DrawAhead {
    /// Says which inputs.
    pub trial: u32,
    /// Which poison its run finds.
    pub pattern: u8,
    /// Whether it gets a quick look, as of [`Reference::draw_quickly`].
    pub quick: bool,
}

impl Reference {
    /// Draws runs into memory that no candidate can reach; how many of them, from the first on: memory may be short.
    pub fn draw_ahead(&mut self, draws: &[DrawAhead]) -> Answered<usize> {
        #[derive(Deserialize)]
        struct Drawn {
            drawn: usize,
        }
        let drawn: Result<Drawn, _> = self.step(&json!({ "do": "ahead", "draws": draws }))?;
        Ok(drawn.map(|drawn| drawn.drawn))
    }

    /// Fills a set for the run of a trial that was drawn ahead. Before, what the run of the trial `keep` left is copied.
    pub fn place(&mut self, trial: u32, set: usize, keep: Option<u32>) -> Answered<()> {
        let request = json!({ "do": "place", "trial": trial, "set": set, "keep": keep });
        Ok(self.ask::<Value>(&request, ASK_LIMIT)?.map(drop))
    }

    /// Copies what the run of a trial left in its set.
    pub fn keep(&mut self, trial: u32) -> Answered<()> {
        Ok(self.ask::<Value>(&json!({ "do": "keep", "trial": trial }), ASK_LIMIT)?.map(drop))
    }

    /// Judges runs by those copies, which are freed.
    pub fn judge_kept(&mut self, trials: &[u32]) -> Answered<Vec<Judgement>> {
        #[derive(Deserialize)]
        struct Judged {
            judged: Vec<Judgement>,
        }
        let judged: Result<Judged, _> = self.ask(&json!({ "do": "judge_kept", "trials": trials }), ASK_LIMIT)?;
        Ok(judged.map(|judged| judged.judged))
    }
}
