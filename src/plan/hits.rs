//! What the store has already: a run that finds everything does little else.

use std::collections::HashMap;
use std::sync::Mutex;

use super::{Found, Outputs, PlanError, Planner, Resolved, StagePlan, Verdict, lack, producers, waits};
use crate::spec::Pipeline;
use crate::store::local::{LocalView, Look};
use crate::store::record::Brief;
use crate::store::{CONCURRENT, Store};

/// Number of stages from which lookups are divided among threads.
const WORTH_THREADS: usize = 64;
/// The most stages that a thread looks up at a time.
const PART: usize = 32;

/// What is kept of a hit while others are looked up.
pub trait Hit: Sized + Send + Sync {
    /// `None` where it is no hit.
    fn of(plan: StagePlan, store: &Store) -> Option<Self>;
    /// Of a hit whose record was read as far as was needed.
    fn of_brief(resolved: Resolved, brief: Brief, generation: u32, store: &Store) -> Option<Self>;
    /// What it made.
    fn made(&self) -> Option<&Outputs>;
}

impl Hit for StagePlan {
    fn of(plan: StagePlan, _: &Store) -> Option<Self> {
        matches!(plan.verdict, Verdict::Hit { .. }).then_some(plan)
    }

    fn of_brief(resolved: Resolved, brief: Brief, generation: u32, _: &Store) -> Option<Self> {
        let verdict = Verdict::Hit { record: Box::new(brief.record()?), generation };
        Some(Self { resolved: Some(resolved), verdict })
    }

    fn made(&self) -> Option<&Outputs> {
        self.outputs()
    }
}

impl Hit for Found {
    fn of(plan: StagePlan, store: &Store) -> Option<Self> {
        let StagePlan { resolved: Some(resolved), verdict: Verdict::Hit { record, generation } } = plan else {
            return None;
        };
        let is_shared = store.is_shared(record.id(), generation);
        Some(Self::new(&resolved, record.rows, record.outputs, is_shared))
    }

    fn of_brief(resolved: Resolved, brief: Brief, generation: u32, store: &Store) -> Option<Self> {
        let is_shared = store.is_shared(brief.id(), generation);
        Some(Self::new(&resolved, brief.rows, brief.outputs, is_shared))
    }

    fn made(&self) -> Option<&Outputs> {
        Some(&self.outputs)
    }
}

impl Planner<'_> {
    /// What the store has already: a run that finds everything does little else. Whatever needs no request is looked up
    /// on all cores, and the rest level by level, many at once. Stages that are not found, or cannot be planned, are left
    /// to whoever looks at them one by one, and so is everything once `is_halted` says so.
    pub async fn hits<H: Hit>(
        &self,
        order: &[usize],
        selected: &[bool],
        is_halted: &(dyn Fn() -> bool + Sync),
    ) -> Result<HashMap<usize, H>, PlanError> {
        let has_remote = self.store.has_remote();
        let chosen: Vec<usize> = order.iter().copied().filter(|index| selected[*index]).collect();
        let mut found: HashMap<usize, H> = HashMap::with_capacity(chosen.len());
        let _end = self.store.ahead().map(|ahead| ahead.ends_with_this());
        let Some(view) = self.store.local_view().filter(|_| has_remote || chosen.len() >= WORTH_THREADS) else {
            return Ok(found);
        };
        let mut levels = Levels::new(self.pipeline, &chosen);
        let mut ready = levels.first(&chosen);
        let mut missed = Vec::new();
        while !ready.is_empty() && !is_halted() {
            let hits = self.hits_on_threads(&view, &ready, &found, is_halted);
            let next = levels.after(hits.iter().map(|(stage, _)| *stage));
            found.extend(hits);
            missed.extend(ready.into_iter().filter(|stage| !found.contains_key(stage)));
            ready = next;
        }
        let mut ready = if has_remote { missed } else { Vec::new() };
        while !ready.is_empty() && !is_halted() {
            let hits = self.hits_at_once(ready, &found).await;
            ready = levels.after(hits.iter().map(|(stage, _)| *stage));
            found.extend(hits);
        }
        Ok(found)
    }

    fn hits_on_threads<H: Hit>(
        &self,
        view: &LocalView,
        ready: &[usize],
        found: &HashMap<usize, H>,
        is_halted: &(dyn Fn() -> bool + Sync),
    ) -> Vec<(usize, H)> {
        let look = |index: &usize| {
            if is_halted() {
                return None;
            }
            let known = |producer| found.get(&producer).and_then(H::made);
            let (resolved, brief, generation) = self.hit_at_once(view, *index, known)?;
            Some((*index, H::of_brief(resolved, brief, generation, self.store)?))
        };
        if ready.len() < WORTH_THREADS {
            return ready.iter().filter_map(look).collect();
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        // Some stages were looked up ahead, so that equal parts would not take equally long.
        let parts = Mutex::new(ready.chunks(ready.len().div_ceil(threads).min(PART)));
        let next = || parts.lock().expect("no panic happens under this lock").next();
        let work = || {
            let mut hits = Vec::with_capacity(ready.len() / threads + PART);
            while let Some(part) = next() {
                hits.extend(part.iter().filter_map(look));
            }
            hits
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut hits = work();
            hits.extend(others.into_iter().flat_map(|thread| thread.join().expect("looking up does not panic")));
            hits
        })
    }

    async fn hits_at_once<H: Hit>(&self, ready: Vec<usize>, found: &HashMap<usize, H>) -> Vec<(usize, H)> {
        let looks = ready.into_iter().map(|index| async move {
            let plan = self.stage(index, |producer| found.get(&producer).and_then(H::made)).await.ok()?;
            Some((index, H::of(plan, self.store)?))
        });
        use futures::StreamExt;
        futures::stream::iter(looks).buffer_unordered(CONCURRENT).filter_map(std::future::ready).collect().await
    }

    /// What a stage is made of and its record with the generation of that, if what is at hand tells that it is a hit.
    fn hit_at_once<'k>(
        &self,
        view: &LocalView,
        index: usize,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Option<(Resolved, Brief, u32)> {
        let stage = &self.pipeline.stages[index];
        if self.refresh.contains(&index) || !waits(stage, &known).is_empty() {
            return None;
        }
        let (resolved, preimage) = self.resolve_at_once(stage, known)?;
        let Look { generation, record } = self.store.look_up_at_once(view, &resolved.key).ok()?;
        let (brief, missing) = record?;
        let is_hit = brief.is_of(&resolved.preimage, &preimage) && lack(stage, brief.rows, missing).is_none();
        is_hit.then_some((resolved, brief, generation))
    }
}

/// Which stages come next when others are found: each wire is followed once, however long the pipeline is.
pub(super) struct Levels {
    /// Producers that are not found, by stage.
    missing: HashMap<usize, usize>,
    consumers: HashMap<usize, Vec<usize>>,
}

impl Levels {
    pub fn new(pipeline: &Pipeline, chosen: &[usize]) -> Self {
        let mut levels = Self { missing: HashMap::with_capacity(chosen.len()), consumers: HashMap::new() };
        for stage in chosen {
            let mut before = producers(&pipeline.stages[*stage]);
            before.sort_unstable();
            before.dedup();
            levels.missing.insert(*stage, before.len());
            before.into_iter().for_each(|producer| levels.consumers.entry(producer).or_default().push(*stage));
        }
        levels
    }

    /// Those that wait for nothing, in this order.
    pub fn first(&self, chosen: &[usize]) -> Vec<usize> {
        chosen.iter().copied().filter(|stage| self.missing[stage] == 0).collect()
    }

    /// Those that wait for nothing any more, now that these are found.
    pub fn after(&mut self, found: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut free = Vec::new();
        for consumer in found.flat_map(|stage| self.consumers.remove(&stage).unwrap_or_default()) {
            let missing = self.missing.get_mut(&consumer).expect("every consumer was counted");
            *missing -= 1;
            if *missing == 0 {
                free.push(consumer);
            }
        }
        free
    }
}
