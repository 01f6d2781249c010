//! Which stage may start now: a pure state machine that starts nothing.
//!
//! A stage waits for its producers, then for resources. Among ready stages the one with the longest chain of stages
//! behind it goes first, then the order of the file. By-row stages that run may be given more programs while
//! nothing ready fits.

use std::collections::{BTreeMap, BTreeSet};

use cuda_agent_protocol::ResourceGrant;
use cuda_agent_protocol::manifest::Resources;

/// What there is to give out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pools {
    /// CPU cores.
    pub cpus: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Free GPUs, each for itself.
    pub gpus: BTreeSet<u32>,
}

impl Pools {
    /// Whether what a program needs is there.
    pub fn fit(&self, need: &Resources) -> bool {
        need.cpu <= self.cpus && need.memory <= self.memory && need.gpu as usize <= self.gpus.len()
    }

    /// Takes what a program needs, or nothing.
    pub fn take(&mut self, need: &Resources) -> Option<ResourceGrant> {
        if !self.fit(need) {
            return None;
        }
        self.cpus -= need.cpu;
        self.memory -= need.memory;
        let gpus: Vec<u32> = (0..need.gpu).filter_map(|_| self.gpus.pop_first()).collect();
        Some(ResourceGrant { cpu: need.cpu, memory_bytes: need.memory, gpus })
    }

    /// Gives back.
    pub fn put(&mut self, grant: &ResourceGrant) {
        self.cpus += grant.cpu;
        self.memory += grant.memory_bytes;
        self.gpus.extend(&grant.gpus);
    }

    /// What is asked for beyond what the machine has, in words.
    pub fn lack(&self, need: &Resources) -> Option<String> {
        let mut lack = Vec::new();
        if need.cpu > self.cpus {
            lack.push(format!("{} CPU cores (there are {})", need.cpu, self.cpus));
        }
        if need.memory > self.memory {
            lack.push(format!("{} of memory (there is {})", bytes(need.memory), bytes(self.memory)));
        }
        if need.gpu as usize > self.gpus.len() {
            lack.push(format!("{} GPUs (there are {})", need.gpu, self.gpus.len()));
        }
        (!lack.is_empty()).then(|| lack.join(", "))
    }
}

/// A number of bytes for people.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// How a stage stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not selected.
    Idle,
    /// For producers.
    Waiting,
    /// To be looked up in the store.
    Ready,
    /// For resources.
    Queued,
    /// A program runs (or waits to be tried again).
    Running,
    /// Outputs are known.
    Done,
    /// It failed.
    Failed,
    /// Something before it failed.
    Skipped,
}

impl State {
    /// Whether nothing more will happen to it.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Idle | Self::Done | Self::Failed | Self::Skipped)
    }
}

/// How often narrower stages may start before the one that is first in line.
const PATIENCE: u32 = 16;

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Look the stage up: its inputs are known.
    Look(usize),
    /// Start the stage's (first) program.
    Start(usize, ResourceGrant),
    /// Start one more program of a running by-row stage.
    Widen(usize, ResourceGrant),
}

/// Among ready stages, the smallest goes first: the one with the longest chain behind it, then the first of the file.
type Rank = (std::cmp::Reverse<usize>, usize);

/// Stages that wait for resources, those of equal needs together: there may be a hundred thousand of them that do not
/// fit now, but they need few different things.
#[derive(Debug, Default)]
struct Queue {
    by_need: BTreeMap<(u32, u64, u32), BTreeSet<Rank>>,
}

impl Queue {
    fn need(need: &Resources) -> (u32, u64, u32) {
        (need.cpu, need.memory, need.gpu)
    }

    fn add(&mut self, rank: Rank, need: &Resources) {
        self.by_need.entry(Self::need(need)).or_default().insert(rank);
    }

    fn remove(&mut self, rank: Rank, need: &Resources) {
        let need = Self::need(need);
        if let Some(ranks) = self.by_need.get_mut(&need) {
            ranks.remove(&rank);
            if ranks.is_empty() {
                self.by_need.remove(&need);
            }
        }
    }

    fn first(&self) -> Option<Rank> {
        self.by_need.values().filter_map(BTreeSet::first).min().copied()
    }

    fn first_that_fits(&self, pools: &Pools) -> Option<Rank> {
        let fit =
            |(cpu, memory, gpu): &(u32, u64, u32)| pools.fit(&Resources { cpu: *cpu, memory: *memory, gpu: *gpu });
        let fitting = self.by_need.iter().filter(|(need, _)| fit(need));
        fitting.filter_map(|(_, ranks)| ranks.first()).min().copied()
    }

    fn is_empty(&self) -> bool {
        self.by_need.is_empty()
    }
}

/// The state machine.
#[derive(Debug)]
pub struct Scheduler {
    states: Vec<State>,
    missing: Vec<usize>,
    consumers: Vec<Vec<usize>>,
    priority: Vec<usize>,
    needs: Vec<Resources>,
    ready: BTreeSet<Rank>,
    queue: Queue,
    widening: BTreeMap<usize, u32>,
    pools: Pools,
    overtaken: u32,
    unfinished: usize,
    closed: bool,
}

impl Scheduler {
    /// For stages given by their producers (indices into the same list), in topological order or not; only `selected`
    /// ones take part, and their producers must be among them.
    pub fn new(producers: &[Vec<usize>], selected: &[bool], needs: Vec<Resources>, pools: Pools) -> Self {
        let count = producers.len();
        let mut consumers = vec![Vec::new(); count];
        let mut missing = vec![0; count];
        for (stage, before) in producers.iter().enumerate().filter(|(stage, _)| selected[*stage]) {
            let before: BTreeSet<usize> = before.iter().copied().collect();
            missing[stage] = before.len();
            before.into_iter().for_each(|producer| consumers[producer].push(stage));
        }
        let priority = chain_lengths(&consumers, &missing);
        let mut scheduler = Self {
            states: selected.iter().map(|chosen| if *chosen { State::Waiting } else { State::Idle }).collect(),
            missing,
            consumers,
            priority,
            needs,
            ready: BTreeSet::new(),
            queue: Queue::default(),
            widening: BTreeMap::new(),
            pools,
            overtaken: 0,
            unfinished: selected.iter().filter(|chosen| **chosen).count(),
            closed: false,
        };
        (0..count).for_each(|stage| scheduler.release(stage));
        scheduler
    }

    fn rank(&self, stage: usize) -> Rank {
        (std::cmp::Reverse(self.priority[stage]), stage)
    }

    fn release(&mut self, stage: usize) {
        if self.states[stage] == State::Waiting && self.missing[stage] == 0 {
            self.states[stage] = State::Ready;
            self.ready.insert(self.rank(stage));
        }
    }

    /// The next step that can be taken, if any. Lookups come first: they cost nothing and may free whole branches.
    pub fn next_step(&mut self) -> Option<Step> {
        if self.closed {
            return None;
        }
        if let Some((_, stage)) = self.ready.pop_first() {
            return Some(Step::Look(stage));
        }
        if let Some(step) = self.start_queued() {
            return Some(step);
        }
        // What waits for resources must get what is given back, before a stage that runs grows wider.
        if !self.queue.is_empty() {
            return None;
        }
        let fits = |stage: usize| self.pools.fit(&self.needs[stage]);
        let wide = self.widening.iter().find(|(stage, more)| **more > 0 && fits(**stage)).map(|(stage, _)| *stage)?;
        let grant = self.pools.take(&self.needs[wide]).expect("just tried");
        *self.widening.get_mut(&wide).expect("just found") -= 1;
        Some(Step::Widen(wide, grant))
    }

    fn start_queued(&mut self) -> Option<Step> {
        let first = self.queue.first()?;
        // A wide stage must not be overtaken for ever by narrow ones.
        let rank = match self.overtaken >= PATIENCE {
            true => Some(first).filter(|rank| self.pools.fit(&self.needs[rank.1])),
            false => self.queue.first_that_fits(&self.pools),
        }?;
        self.overtaken = if rank == first { 0 } else { self.overtaken + 1 };
        let stage = rank.1;
        self.queue.remove(rank, &self.needs[stage]);
        self.states[stage] = State::Running;
        let grant = self.pools.take(&self.needs[stage]).expect("it fits");
        Some(Step::Start(stage, grant))
    }

    /// A looked-up stage has to run.
    pub fn queue(&mut self, stage: usize) {
        self.states[stage] = State::Queued;
        self.queue.add(self.rank(stage), &self.needs[stage]);
    }

    /// A looked-up stage must be looked up again later, when `unpark` is called (another stage makes the same thing).
    pub fn park(&mut self, stage: usize) {
        self.widening.remove(&stage);
        self.states[stage] = State::Waiting;
    }

    /// A stage cannot start because what `producer` made is gone: that is looked up again, and `stage` waits for it.
    pub fn redo(&mut self, producer: usize, stage: usize) {
        if self.states[producer] == State::Done {
            self.unfinished += 1;
            self.states[producer] = State::Ready;
            self.ready.insert(self.rank(producer));
            // Consumers that are over, or run, take no notice when it is done again.
            for consumer in self.consumers[producer].clone() {
                self.missing[consumer] += 1;
            }
        }
        self.widening.remove(&stage);
        self.states[stage] = State::Waiting;
    }

    /// Looks a parked stage up again.
    pub fn unpark(&mut self, stage: usize) {
        self.release(stage);
    }

    /// Number of further programs that a running by-row stage could use.
    pub fn widen(&mut self, stage: usize, more: u32) {
        self.widening.insert(stage, more);
    }

    /// A program has ended.
    pub fn give_back(&mut self, grant: &ResourceGrant) {
        self.pools.put(grant);
    }

    /// A stage is over. Returns the stages that are skipped because of it.
    pub fn finish(&mut self, stage: usize, succeeded: bool) -> Vec<usize> {
        self.widening.remove(&stage);
        self.states[stage] = if succeeded { State::Done } else { State::Failed };
        self.unfinished -= 1;
        if !succeeded {
            return self.skip_after(stage);
        }
        for consumer in self.consumers[stage].clone() {
            self.missing[consumer] -= 1;
            self.release(consumer);
        }
        Vec::new()
    }

    /// Chains may be longer than a thread's stack is deep, so those to look at are in a list.
    fn skip_after(&mut self, stage: usize) -> Vec<usize> {
        let (mut skipped, mut failed) = (Vec::new(), vec![stage]);
        while let Some(stage) = failed.pop() {
            for consumer in self.consumers[stage].clone() {
                // One that runs has what it needs (its producer was made once more for another), and ends by itself.
                if !self.states[consumer].is_over() && self.states[consumer] != State::Running {
                    let rank = self.rank(consumer);
                    self.ready.remove(&rank);
                    self.queue.remove(rank, &self.needs[consumer]);
                    self.states[consumer] = State::Skipped;
                    self.unfinished -= 1;
                    skipped.push(consumer);
                    failed.push(consumer);
                }
            }
        }
        skipped
    }

    /// Whether a stage waits for resources: by-row stages then give back what they can spare.
    pub fn is_short(&self) -> bool {
        !self.closed && !self.queue.is_empty()
    }

    /// Starts nothing more.
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// Whether every stage is over.
    pub fn is_done(&self) -> bool {
        self.unfinished == 0
    }

    /// How a stage stands.
    pub fn state(&self, stage: usize) -> State {
        self.states[stage]
    }

    /// What is free now.
    pub fn pools(&self) -> &Pools {
        &self.pools
    }
}

/// How many stages the longest chain behind each stage has.
fn chain_lengths(consumers: &[Vec<usize>], missing: &[usize]) -> Vec<usize> {
    let mut missing = missing.to_vec();
    let mut order: Vec<usize> = (0..consumers.len()).filter(|stage| missing[*stage] == 0).collect();
    let mut next = 0;
    while next < order.len() {
        for consumer in &consumers[order[next]] {
            missing[*consumer] -= 1;
            if missing[*consumer] == 0 {
                order.push(*consumer);
            }
        }
        next += 1;
    }
    let mut length = vec![0; consumers.len()];
    for stage in order.into_iter().rev() {
        length[stage] = consumers[stage].iter().map(|consumer| length[*consumer] + 1).max().unwrap_or(0);
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pools(cpus: u32, gpus: u32) -> Pools {
        Pools { cpus, memory: 1 << 30, gpus: (0..gpus).collect() }
    }

    fn need(cpu: u32, gpu: u32) -> Resources {
        Resources { cpu, memory: 0, gpu }
    }

    fn all(producers: &[Vec<usize>], needs: Vec<Resources>, pools: Pools) -> Scheduler {
        Scheduler::new(producers, &vec![true; producers.len()], needs, pools)
    }

    /// Looks everything up that can be and queues it.
    fn queue_ready(scheduler: &mut Scheduler) -> Vec<(usize, ResourceGrant)> {
        let mut started = Vec::new();
        while let Some(step) = scheduler.next_step() {
            match step {
                Step::Look(stage) => scheduler.queue(stage),
                Step::Start(stage, grant) | Step::Widen(stage, grant) => started.push((stage, grant)),
            }
        }
        started
    }

    #[test]
    fn independent_stages_run_side_by_side_and_each_gpu_has_one_owner() {
        let mut scheduler = all(&[vec![], vec![], vec![]], vec![need(1, 1); 3], pools(8, 2));
        let started = queue_ready(&mut scheduler);
        let gpus: Vec<_> = started.iter().map(|(stage, grant)| (*stage, grant.gpus.clone())).collect();
        assert_eq!(gpus, [(0, vec![0]), (1, vec![1])]);
        scheduler.give_back(&started[0].1);
        scheduler.finish(0, true);
        assert_eq!(queue_ready(&mut scheduler)[0].1.gpus, [0]);
    }

    #[test]
    fn the_longest_chain_goes_first() {
        // 0 stands alone; 1 → 2 → 3.
        let mut scheduler = all(&[vec![], vec![], vec![1], vec![2]], vec![need(1, 0); 4], pools(1, 0));
        assert_eq!(queue_ready(&mut scheduler)[0].0, 1);
    }

    #[test]
    fn what_depends_on_a_failure_is_skipped_and_the_rest_goes_on() {
        let mut scheduler = all(&[vec![], vec![], vec![0], vec![2, 1]], vec![need(1, 0); 4], pools(2, 0));
        let started = queue_ready(&mut scheduler);
        started.iter().for_each(|(_, grant)| scheduler.give_back(grant));
        assert_eq!(scheduler.finish(0, false), [2, 3]);
        scheduler.finish(1, true);
        assert!(scheduler.is_done());
    }

    #[test]
    fn a_chain_of_any_length_is_skipped() {
        const LENGTH: usize = 200_000;
        let producers: Vec<Vec<usize>> = (0..LENGTH).map(|stage| stage.checked_sub(1).into_iter().collect()).collect();
        let mut scheduler = all(&producers, vec![need(1, 0); LENGTH], pools(1, 0));
        assert_eq!(queue_ready(&mut scheduler).len(), 1);
        assert_eq!(scheduler.finish(0, false).len(), LENGTH - 1);
        assert!(scheduler.is_done());
    }

    #[test]
    fn what_does_not_fit_lets_what_fits_go_first_for_a_while() {
        // The first in line needs both GPUs, of which one is taken.
        let needs = [vec![need(1, 1), need(1, 2)], vec![need(1, 0); 40]].concat();
        let mut scheduler = all(&vec![vec![]; 42], needs, pools(64, 2));
        let started: Vec<usize> = queue_ready(&mut scheduler).into_iter().map(|(stage, _)| stage).collect();
        assert_eq!(started, std::iter::once(0).chain(2..2 + PATIENCE as usize).collect::<Vec<_>>());
    }

    #[test]
    fn by_row_stages_widen_only_into_what_nothing_ready_wants() {
        let mut scheduler = all(&[vec![], vec![]], vec![need(1, 0), need(2, 0)], pools(4, 0));
        let started = queue_ready(&mut scheduler);
        assert_eq!(started.len(), 2);
        scheduler.widen(0, 5);
        assert_eq!(queue_ready(&mut scheduler), [(0, ResourceGrant { cpu: 1, memory_bytes: 0, gpus: vec![] })]);
        scheduler.give_back(&started[1].1);
        scheduler.finish(1, true);
        assert_eq!(queue_ready(&mut scheduler).len(), 2);
    }

    #[test]
    fn a_wide_stage_is_not_overtaken_for_ever() {
        // 0 is first in line (a chain waits behind it) and wants the whole machine; all the others want half.
        let mut producers = vec![vec![]; 100];
        producers[99] = vec![0];
        let needs = (0..100).map(|stage| need(if stage == 0 { 2 } else { 1 }, 0)).collect();
        let mut scheduler = all(&producers, needs, pools(2, 0));
        let mut running = Vec::new();
        let mut order = Vec::new();
        // Something narrow is in already, so that the machine is never empty by itself.
        while let Some(step) = scheduler.next_step() {
            match step {
                Step::Look(0) => {}
                Step::Look(stage) => scheduler.queue(stage),
                Step::Start(stage, grant) | Step::Widen(stage, grant) => running.push((stage, grant)),
            }
        }
        scheduler.queue(0);
        while !scheduler.is_done() {
            let (stage, grant) = running.remove(0);
            order.push(stage);
            scheduler.give_back(&grant);
            scheduler.finish(stage, true);
            running.extend(queue_ready(&mut scheduler));
        }
        let place = order.iter().position(|stage| *stage == 0).unwrap();
        assert!(place < 2 * PATIENCE as usize, "it came after {place} others");
    }

    #[test]
    fn too_much_is_told() {
        let told = pools(2, 0).lack(&Resources { cpu: 3, memory: 1 << 31, gpu: 1 }).unwrap();
        insta::assert_snapshot!(told, @"3 CPU cores (there are 2), 2.0 GiB of memory (there is 1.0 GiB), 1 GPUs (there are 0)");
    }

    /// What a stage made is gone, it is made again, and that fails: only what has not started is skipped.
    #[test]
    fn a_redone_stage_that_fails_leaves_alone_what_runs() {
        let needs = vec![need(1, 0); 4];
        let mut scheduler = Scheduler::new(&[vec![], vec![0], vec![0], vec![1, 2]], &[true; 4], needs, pools(4, 0));
        let start = |scheduler: &mut Scheduler, stages: &[usize]| {
            for _ in stages {
                let Some(Step::Look(stage)) = scheduler.next_step() else { panic!() };
                scheduler.queue(stage);
            }
            for stage in stages {
                assert!(matches!(scheduler.next_step(), Some(Step::Start(started, _)) if started == *stage));
            }
        };
        start(&mut scheduler, &[0]);
        scheduler.finish(0, true);
        start(&mut scheduler, &[1, 2]);
        scheduler.redo(0, 1);
        start(&mut scheduler, &[0]);
        assert_eq!(scheduler.finish(0, false), [1, 3]);
        assert_eq!(scheduler.state(2), State::Running);
        assert!(!scheduler.is_done());
        assert_eq!(scheduler.finish(2, true), [0; 0]);
        assert!(scheduler.is_done());
        assert_eq!(scheduler.next_step(), None);
    }

    proptest! {
        /// Whatever the graph, everything ends, resources are never overdrawn, and all come back.
        #[test]
        fn every_graph_ends(
            edges in prop::collection::vec((0usize..20, 0usize..20), 0..40),
            costs in prop::collection::vec((1u32..4, 0u32..2), 20),
            failing in prop::collection::btree_set(0usize..20, 0..3),
        ) {
            let mut producers = vec![Vec::new(); 20];
            edges.iter().filter(|(a, b)| a < b).for_each(|(a, b)| producers[*b].push(*a));
            let needs: Vec<Resources> = costs.iter().map(|(cpu, gpu)| need(*cpu, *gpu)).collect();
            let whole = pools(4, 2);
            let mut scheduler = all(&producers, needs, whole.clone());
            let mut running = Vec::new();
            let mut finished = BTreeSet::new();
            while !scheduler.is_done() {
                running.extend(queue_ready(&mut scheduler));
                prop_assert!(!running.is_empty(), "stuck");
                let (stage, grant) = running.remove(0);
                prop_assert!(producers[stage].iter().all(|producer| finished.contains(producer)));
                scheduler.give_back(&grant);
                let succeeded = !failing.contains(&stage);
                scheduler.finish(stage, succeeded);
                if succeeded {
                    finished.insert(stage);
                }
            }
            prop_assert_eq!(scheduler.pools(), &whole);
        }
    }
}
