//! A [`Judge`] for a stage of another crate that has the parameters of `kernels/evaluate`, and `screen`.

use std::io::ErrorKind;

use cuda_agent_protocol::{ProgramError, Request};

use super::{choice, device, evaluate, evaluator_on, flag, overrides};
use crate::evaluator::{VERDICT_LANES, compiles};
use crate::judge::{Judge, Rules};
use crate::reference::STEP_LIMIT;

/// Engines that share a stage on one machine have a journal each; more than this many don't.
const MOST_JOURNALS: usize = 64;

/// A judge on the device that the stage was given, but for the first `taken` GPUs, which somebody else uses. Its journal is
/// in the stage's folder that outlives attempts.
pub fn judge(request: &Request, taken: usize) -> Result<Judge, ProgramError> {
    let rules = || -> Result<Rules, ProgramError> {
        Ok(Rules {
            policy: choice(request, "policy")?,
            protocol: choice(request, "protocol")?,
            set: overrides(request),
            settings: evaluate::settings(request)?,
            screen: flag(request, "screen"),
        })
    };
    // Mistakes in the parameters are told before anything is started.
    rules()?;
    let device = device(request)?.without_first(taken);
    for number in 0..MOST_JOURNALS {
        let path = request.state_dir.join(format!("verdicts-{number}.jsonl"));
        let journal = match crate::judge::journal_at(&path) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            journal => journal.map_err(|error| ProgramError::environment(format!("{}: {error}", path.display())))?,
        };
        let rules = rules()?;
        let compiles = compiles(&rules.settings.baselines);
        return Ok(Judge::over(evaluator_on(request, device, STEP_LIMIT, VERDICT_LANES, compiles)?, rules, journal));
    }
    Err(ProgramError::environment(format!("{MOST_JOURNALS} engines work on this stage here already")))
}
