//! Where work is done on a card: beside others, or with the card to itself.
//!
//! A card has lanes, which work side by side, and a few more for clocks, which run one after another. Beside others,
//! memory may be short, and what one process did to the card can hit another. So whatever ends without an answer is done
//! once more with the card to itself: every other lane is empty then, its processes ended and their memory given back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::lane::{Lane, Source};
use super::memory::Memory;
use super::pool::{Lent, Pool};
use crate::backend::Backend;
use crate::fault::EvaluatorError;
use crate::gate::{Alone, Gate, Shared};
use crate::judgement::TaskError;
use crate::reference::{Answered, Purpose, ReferenceServer};

/// A GPU, or the CPU.
pub struct Card {
    gate: Gate,
    memory: Memory,
    lanes: Pool<Lane>,
    clocks: Pool<Lane>,
    /// Read by who works beside others, written by who has the card to himself; writers go first.
    company: RwLock<()>,
    /// What is being done here.
    pub busy: AtomicUsize,
    source: Arc<Source>,
    /// Why it is out of service.
    lost: OnceLock<String>,
}

impl Card {
    /// This card of a backend, with so many lanes.
    pub fn new(server: ReferenceServer, backend: Arc<dyn Backend>, card: usize, lanes: usize) -> Self {
        let clock = backend.clock(card);
        let clocks = clock.as_ref().map_or(1, |clock| clock.lanes.min(lanes));
        let source = Arc::new(Source { server, backend, card });
        let pool = |size, purpose| Pool::new((0..size).map(|_| Lane::new(source.clone(), purpose)));
        Self {
            gate: Gate::new(clocks, clock.as_ref().map(|clock| clock.file.as_path())),
            memory: Memory::default(),
            lanes: pool(lanes, Purpose::Checks),
            clocks: pool(clocks, Purpose::Times),
            company: RwLock::new(()),
            busy: AtomicUsize::new(0),
            source,
            lost: OnceLock::new(),
        }
    }

    /// How many can be checked at a time.
    pub fn width(&self) -> usize {
        self.lanes.size()
    }

    /// Does something that counts as keeping the card busy.
    pub fn counted<T>(&self, work: impl FnOnce() -> T) -> T {
        self.busy.fetch_add(1, Ordering::Relaxed);
        let done = work();
        self.busy.fetch_sub(1, Ordering::Relaxed);
        done
    }

    /// Waits until nothing else is done on the card.
    pub fn whole(&self) -> CardAccess<'_> {
        let company = self.company.write().unwrap_or_else(PoisonError::into_inner);
        // Nobody has any of them now.
        let mut idle: Vec<_> = (0..self.clocks.size()).map(|_| self.clocks.take("")).collect();
        idle.extend((1..self.lanes.size()).map(|_| self.lanes.take("")));
        let mut lane = self.lanes.take("");
        let alone = self.gate.alone();
        idle.iter_mut().chain([&mut lane]).for_each(|lane| lane.reset());
        CardAccess::Whole(Box::new(Whole { lane, _alone: alone, _idle: idle, _company: company }))
    }

    /// Why it is out of service, if it is.
    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// After something failed on it: whether it is still of use.
    pub fn examine(&self) {
        if self.lost().is_some() {
            return;
        }
        if let Err(why) = self.source.backend.examine(self.source.card) {
            let _ = self.lost.set(why);
        }
    }

    fn company(&self) -> RwLockReadGuard<'_, ()> {
        self.company.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A card to oneself, until it is dropped.
pub struct Whole<'a> {
    lane: Lent<'a, Lane>,
    _alone: Alone<'a>,
    _idle: Vec<Lent<'a, Lane>>,
    _company: RwLockWriteGuard<'a, ()>,
}

/// What those who work beside each other share.
#[derive(Clone, Copy)]
pub struct Beside<'a> {
    /// Who may use the GPU.
    pub gate: &'a Gate,
    /// How much of its memory.
    pub memory: &'a Memory,
}

/// Where work is done.
pub enum CardAccess<'a> {
    /// Beside others.
    Beside(&'a Card),
    /// With the card to itself.
    Whole(Box<Whole<'a>>),
}

impl CardAccess<'_> {
    /// Does what others may do at the same time, with a task of that digest. Beside others it is told who they are.
    pub fn check<T>(&mut self, task: &str, work: impl FnOnce(&mut Lane, Option<&Shared>) -> T) -> T {
        match self {
            Self::Beside(card) => {
                let _company = card.company();
                let mut lane = card.lanes.take(task);
                let shared = card.gate.share();
                work(&mut lane, Some(&shared))
            }
            Self::Whole(whole) => work(&mut whole.lane, None),
        }
    }

    /// Takes times; `work` waits at the gate, where there is one.
    pub fn clock<T>(&mut self, task: &str, work: impl FnOnce(&mut Lane, Option<&Gate>) -> T) -> T {
        match self {
            Self::Beside(card) => {
                let _company = card.company();
                work(&mut card.clocks.take(task), Some(&card.gate))
            }
            Self::Whole(whole) => work(&mut whole.lane, None),
        }
    }

    /// Does what others may do at the same time and takes times in between; `work` goes through the gate itself, where
    /// there is one.
    pub fn measure<T>(&mut self, task: &str, work: impl FnOnce(&mut Lane, Option<Beside>) -> T) -> T {
        match self {
            Self::Beside(card) => {
                let _company = card.company();
                work(&mut card.lanes.take(task), Some(Beside { gate: &card.gate, memory: &card.memory }))
            }
            Self::Whole(whole) => work(&mut whole.lane, None),
        }
    }

    /// Whether nobody else is on the card.
    pub fn is_whole(&self) -> bool {
        matches!(self, Self::Whole(_))
    }
}

/// Why there is no answer: it may come with the card to oneself.
pub enum WorkError {
    /// A process or the card failed.
    Machine(EvaluatorError),
    /// Memory was short, or the task's process ended.
    Task(TaskError),
}

impl From<EvaluatorError> for WorkError {
    fn from(error: EvaluatorError) -> Self {
        Self::Machine(error)
    }
}

/// Takes out what a task cannot be blamed for yet.
pub fn settled<T>(answered: Answered<T>) -> Result<Result<T, TaskError>, WorkError> {
    match answered? {
        Err(error) if error.is_worth_another_try() => Err(WorkError::Task(error)),
        answer => Ok(answer),
    }
}
