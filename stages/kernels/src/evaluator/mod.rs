//! Tasks and candidates in, verdicts out: many at once, over every GPU that it was given.
//!
//! Each card has lanes, which check results side by side, and a few for clocks, which run alone, one after another. A
//! fault of a candidate costs one verdict; a fault of the machine, or short memory, costs one more try with the card to
//! itself.

mod assets;
mod baselines;
mod card;
mod clock;
mod draft;
mod judging;
mod lane;
mod memory;
mod pool;
mod runs;
mod verify;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::card::{Card, CardAccess, WorkError, settled};
use self::draft::Draft;
use self::judging::Job;
use crate::backend::{Backend, Parts};
use crate::baseline::Baseline;
use crate::candidate::Candidate;
use crate::fault::EvaluatorError;
use crate::judgement::{TaskError, TaskErrorKind};
use crate::reference::{Answered, Described, ReferenceServer, Task};
use crate::reward::Scheme;
use crate::verdict::Verdict;

pub use self::baselines::{Profiled, TimedBaseline, Wanted};
pub use crate::backend::Device;
pub use crate::random::secret;

/// What an evaluator is made from.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Where candidates run.
    pub device: Device,
    /// This program, which is started again as runner and compiler.
    pub executable: PathBuf,
    /// An interpreter with torch.
    pub python: PathBuf,
    /// For compiled candidates and unpacked files.
    pub cache: PathBuf,
    /// CPU cores to use.
    pub cores: usize,
    /// At most so many lanes on one GPU: [`VERDICT_LANES`] or [`PROFILE_LANES`].
    pub lanes: usize,
    /// Whether torch.compile will be a baseline. Without it a GPU's compiler, which takes seconds to import, is imported only
    /// by a worker that is asked to compile after all.
    pub compiles: bool,
    /// Of one step of a task: building it, compiling it, drawing inputs, screening it.
    pub step_limit: Duration,
}

/// How candidates are judged.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Inputs to check, each twice.
    pub inputs: u32,
    /// Of one run of a candidate.
    pub limit: Duration,
    /// Baselines to time beside a correct candidate; empty takes no times.
    pub baselines: Vec<Baseline>,
    /// At most so many trials.
    pub max_trials: u32,
    /// Whether correct candidates also run under compute-sanitizer.
    pub sanitizer: bool,
    /// What a verdict is worth.
    pub reward: Scheme,
}

/// The evaluator. Its methods can be called from many threads.
pub struct Evaluator {
    backend: Arc<dyn Backend>,
    cards: Vec<Card>,
    described: Mutex<HashMap<String, DescribedOnce>>,
}

/// A description that is made once, whoever asks first.
type DescribedOnce = Arc<Mutex<Option<Result<Arc<Described>, TaskError>>>>;

/// Judging candidates, more lanes than this on one GPU only wait for each other.
pub const VERDICT_LANES: usize = 6;

/// Profiling, a lane is busy in Python for most of the time: building models, drawing, comparing.
pub const PROFILE_LANES: usize = 12;

/// Descriptions kept; each is a few kilobytes.
const MAX_DESCRIBED: usize = 10_000;

/// Whether any of these baselines needs a compiler.
pub fn compiles(baselines: &[Baseline]) -> bool {
    baselines.iter().any(|baseline| baseline.compiles())
}

impl Evaluator {
    /// Starts the trusted processes.
    pub fn new(setup: &Setup) -> Result<Self, EvaluatorError> {
        let script = assets::unpack(&setup.cache)?;
        let Setup { executable, python, cache, cores, .. } = setup;
        let backend = setup.device.backend(&Parts { executable, python, cache, cores: *cores })?;
        let gpus = backend.cards();
        let lanes = (setup.cores / gpus.len()).clamp(1, backend.most_lanes(setup.lanes));
        let servers: Vec<_> = std::thread::scope(|scope| {
            let script = script.as_path();
            let start = |gpu| {
                scope.spawn(move || {
                    Ok(ReferenceServer::start(&setup.python, script, gpu, setup.compiles)?
                        .with_step_limit(setup.step_limit))
                })
            };
            let threads: Vec<_> = gpus.iter().copied().map(start).collect();
            // To import torch takes as long as what this may have to compile.
            scope.spawn(|| backend.make_ready());
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
        });
        let cards = servers.into_iter().enumerate();
        let cards = cards.map(|(number, server)| Ok(Card::new(server?, backend.clone(), number, lanes)));
        let cards = cards.collect::<Result<_, EvaluatorError>>()?;
        Ok(Self { cards, backend, described: Mutex::default() })
    }

    /// How many candidates it is worth giving it at once.
    pub fn width(&self) -> usize {
        // Twice the lanes: while one candidate is checked, the next compiles.
        2 * self.cards.iter().map(Card::width).sum::<usize>()
    }

    /// The contract between a task and its candidates.
    pub fn describe(&self, task: &Task) -> Answered<Arc<Described>> {
        self.on_a_card(|access| self.describe_in(access, task))
    }

    /// A task's forward as elementary steps, in which `$0`, `$1`, … are the arguments; empty where it has none.
    pub fn steps(&self, task: &Task) -> Answered<Vec<String>> {
        let digest = task.digest();
        self.on_a_card(|access| {
            settled(access.check(&digest, |lane, _| {
                let answered = lane.reference()?.steps(task);
                lane.keep_if(answered.is_ok());
                answered
            }))
        })
    }

    /// Judges a candidate. The inputs follow from `seed`, which must be secret while the candidate is made.
    pub fn evaluate(
        &self,
        task: &Task,
        candidate: &Candidate,
        seed: u64,
        settings: &Settings,
    ) -> Result<Verdict, EvaluatorError> {
        let job = Job { evaluator: self, task, candidate, seed, settings };
        let judged = self.on_a_card(|access| job.judge(access).map(Ok))?;
        Ok(judged.unwrap_or_else(|error| Draft::new(task, candidate, seed).task_error(error)))
    }

    /// Times baselines of a task, in random order, and finds out which answers without the work
    /// its policy would let through.
    pub fn profile(&self, wanted: &Wanted) -> Answered<Profiled> {
        let wanted = Wanted { kernel_times: wanted.kernel_times && self.backend.takes_times(), ..*wanted };
        let digest = wanted.task.digest();
        self.on_a_card(|access| {
            settled(access.measure(&digest, |lane, beside| {
                let answered = baselines::profile(lane, beside, &wanted);
                lane.keep_if(answered.is_ok());
                answered
            }))
        })
    }

    /// Works beside others, and once more with a card to itself, another one if there is one, if that gave no answer.
    fn on_a_card<T>(
        &self,
        mut work: impl FnMut(&mut CardAccess) -> Result<Result<T, TaskError>, WorkError>,
    ) -> Answered<T> {
        self.is_in_service()?;
        let card = self.least_busy(None);
        let beside = card.counted(|| work(&mut CardAccess::Beside(card)));
        let answered = beside.or_else(|_| {
            self.is_in_service()?;
            let card = self.least_busy(Some(card));
            let whole = card.counted(|| work(&mut card.whole()));
            if whole.is_err() {
                card.examine();
            }
            whole
        });
        match answered {
            Ok(answer) => Ok(answer),
            Err(WorkError::Task(error)) => self.is_in_service().map(|()| Err(error)),
            Err(WorkError::Machine(error)) => Err(error),
        }
    }

    /// An error once every card is out of service: whatever it is asked then fails.
    pub fn is_in_service(&self) -> Result<(), EvaluatorError> {
        match self.cards.iter().map(Card::lost).collect::<Option<Vec<_>>>() {
            None => Ok(()),
            Some(why) => Err(EvaluatorError::new(why.join("; ")).with_hint(
                "nvidia-smi says more; a card that a kernel took down needs `nvidia-smi --gpu-reset`, or a restart of the machine",
            )),
        }
    }

    /// The card with the least to do, other than `but` and those out of service if there are others.
    fn least_busy(&self, but: Option<&Card>) -> &Card {
        let is_but = |card: &Card| but.is_some_and(|but| std::ptr::eq(card, but));
        let order = |card: &&Card| (card.lost().is_some(), is_but(card), card.busy.load(Ordering::Relaxed));
        self.cards.iter().min_by_key(order).expect("there is at least one")
    }

    /// A task's description; whoever asks first makes it.
    fn describe_in(
        &self,
        access: &mut CardAccess,
        task: &Task,
    ) -> Result<Result<Arc<Described>, TaskError>, WorkError> {
        let digest = task.digest();
        let once = {
            let mut described = self.described.lock().expect("no panics while it is held");
            if described.len() >= MAX_DESCRIBED {
                described.clear();
            }
            described.entry(digest.clone()).or_default().clone()
        };
        // Who holds it may wait for a lane, and whoever has the card to itself holds them all.
        let mut once = match access.is_whole() {
            true => once.try_lock().ok(),
            false => Some(once.lock().expect("no panics while it is held")),
        };
        if let Some(known) = once.as_deref().and_then(Option::as_ref) {
            return Ok(known.clone());
        }
        let described = access.check(&digest, |lane, _| {
            let answered = lane.reference()?.describe(task);
            lane.keep_if(answered.is_ok());
            answered
        });
        // What may end otherwise another time is not remembered.
        let described = settled(described)?.and_then(varied).map(Arc::new);
        if let Some(once) = once.as_deref_mut() {
            *once = Some(described.clone());
        }
        Ok(described)
    }
}

/// Where every draw gives the same inputs, an answer could be remembered from one run to the next.
fn varied(described: Described) -> Result<Described, TaskError> {
    let fixed = &described.fixed_inputs;
    if fixed.is_empty() || fixed.len() < described.spec.inputs.len() {
        return Ok(described);
    }
    Err(TaskError {
        kind: TaskErrorKind::Unsupported,
        message: format!("every draw of get_inputs() gives the same values ({})", fixed.join(", ")),
        hint: Some("draw the inputs at random, so that no answer can be remembered".into()),
        line: None,
    })
}
