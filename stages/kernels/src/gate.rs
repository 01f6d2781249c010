//! Who may use a GPU: many at once to check results, one alone to take times.
//!
//! A time that was taken while something else ran on the card is wrong by up to a factor of two, so a clock waits until
//! the card is idle, and nothing starts while it runs. Emptying the card takes about as long as a clock does, so clocks
//! wait for each other and then go one after another: the gate closes to newcomers when enough of them wait, or when
//! one has waited long enough.
//!
//! Beside others, one that hangs perhaps, a run can be many times as slow as alone. Whose run timed out therefore waits until
//! only others whose runs timed out are left, and runs once more.
//!
//! A fault that meets a switch between contexts is what drivers bear worst: a kernel that trapped then kept an H200 for 5 s,
//! until the driver tore its context down, and several at once took the card out of service. Most candidates that fault do
//! so in their first run. So while one of those is on, nobody else works: whoever comes to the end of a step gives way.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

/// The longest that others are waited for.
#[derive(Clone, Copy)]
struct Patience {
    /// A clock's for others of its kind, before the gate closes for it.
    clock: Duration,
    /// An untried candidate's for steps of others to end.
    step: Duration,
}

impl Patience {
    const DEFAULT: Self = Self { clock: Duration::from_millis(100), step: Duration::from_millis(50) };
}

/// The gate of one GPU.
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// So many waiting clocks close it at once.
    enough: usize,
    patience: Patience,
    /// Clocks of other processes on the same machine.
    file: Option<PathBuf>,
}

#[derive(Default)]
struct State {
    sharing: usize,
    alone: bool,
    /// Clocks that wait.
    waiting: usize,
    /// Whether newcomers have to wait until no clock does.
    closed: bool,
    timed_out: usize,
    /// When one of many left last.
    left: Option<Instant>,
    /// Whether an untried candidate runs.
    trying: bool,
    /// Those who want to run one, or do.
    callers: usize,
    /// Those of the many who wait for that, or give way to it.
    idle: usize,
    /// Those whom nobody waits for.
    aside: usize,
}

/// One of many, until it is dropped.
pub struct Shared<'a>(&'a Gate);

/// The only one with an untried candidate, until it is dropped.
pub struct First<'a> {
    gate: &'a Gate,
    is_alone: bool,
}

/// One whom untried candidates don't wait for, until it is dropped.
pub struct Aside<'a>(&'a Gate);

/// Among others whose runs timed out, until it is dropped.
pub struct TimedOut<'a>(&'a Gate);

/// Alone, until it is dropped.
pub struct Alone<'a> {
    gate: &'a Gate,
    _file: Option<Flock<File>>,
}

impl Gate {
    /// A gate that `enough` waiting clocks close at once; clocks of other processes that name the same file are waited
    /// for too.
    pub fn new(enough: usize, file: Option<&Path>) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            enough,
            patience: Patience::DEFAULT,
            file: file.map(Path::to_owned),
        }
    }

    /// Waits until it is open and no clock runs.
    pub fn share(&self) -> Shared<'_> {
        let mut state = self.lock();
        while state.alone || state.closed || state.timed_out > 0 || state.callers > 0 {
            state = self.changed.wait(state).expect("no panics while it is held");
        }
        state.sharing += 1;
        Shared(self)
    }

    /// Waits until nobody else is there.
    pub fn alone(&self) -> Alone<'_> {
        let patience_ends = Instant::now() + self.patience.clock;
        let mut state = self.lock();
        state.waiting += 1;
        while state.alone || state.sharing > 0 {
            let left = patience_ends.saturating_duration_since(Instant::now());
            state.closed |= state.waiting >= self.enough || left.is_zero();
            state = match state.closed {
                true => self.changed.wait(state).expect("no panics while it is held"),
                false => self.changed.wait_timeout(state, left).expect("no panics while it is held").0,
            };
        }
        state.waiting -= 1;
        state.alone = true;
        drop(state);
        Alone { gate: self, _file: self.file.as_deref().and_then(lock_file) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panics while it is held")
    }
}

/// Where the file cannot be made, this process's clocks are in order all the same.
fn lock_file(path: &Path) -> Option<Flock<File>> {
    let file = File::options().create(true).append(true).open(path).ok()?;
    // Other users' clocks must be able to open it too; only its owner may say so.
    let _ = file.set_permissions(Permissions::from_mode(0o666));
    Flock::lock(file, FlockArg::LockExclusive).ok()
}

impl<'a> Shared<'a> {
    /// Whether anybody else was there at some time since `start`, this one being there all the time.
    pub fn had_company(&self, start: Instant) -> bool {
        let state = self.0.lock();
        state.sharing > 1 || state.left.is_some_and(|left| left > start)
    }

    /// Waits until nobody else works, but no longer than others' steps should take, nor for who stands aside.
    pub fn first(&self) -> First<'a> {
        let patience_ends = Instant::now() + self.0.patience.step;
        let mut state = self.0.lock();
        state.callers += 1;
        state.idle += 1;
        self.0.changed.notify_all();
        while state.trying || state.sharing > state.idle + state.aside {
            let left = patience_ends.saturating_duration_since(Instant::now());
            state = match state.trying {
                true => self.0.changed.wait(state).expect("no panics while it is held"),
                false if left.is_zero() => break,
                false => self.0.changed.wait_timeout(state, left).expect("no panics while it is held").0,
            };
        }
        let is_alone = state.sharing <= state.idle;
        state.idle -= 1;
        state.trying = true;
        First { gate: self.0, is_alone }
    }

    /// Between two steps: waits while others have first runs of candidates to do.
    pub fn yield_to_first_runs(&self) {
        let mut state = self.0.lock();
        if state.callers == 0 {
            return;
        }
        state.idle += 1;
        self.0.changed.notify_all();
        let waited = self.0.changed.wait_while(state, |state| state.callers > 0);
        waited.expect("no panics while it is held").idle -= 1;
    }

    /// For a step that takes long and uses the GPU little.
    pub fn step_aside(&self) -> Aside<'a> {
        self.0.lock().aside += 1;
        self.0.changed.notify_all();
        Aside(self.0)
    }

    /// After a run that timed out: waits until the runs of all others who are there have, too, or `patience` ends. Nobody
    /// comes in meanwhile.
    pub fn after_timeout(&self, patience: Duration) -> TimedOut<'a> {
        let mut state = self.0.lock();
        state.timed_out += 1;
        self.0.changed.notify_all();
        let others_work = |state: &mut State| state.sharing > state.timed_out + state.idle;
        let waited = self.0.changed.wait_timeout_while(state, patience, others_work);
        drop(waited.expect("no panics while it is held"));
        TimedOut(self.0)
    }
}

impl First<'_> {
    /// Whether everybody else was idle when it began, and so is until it ends.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }
}

impl Drop for First<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.callers -= 1;
        state.trying = false;
        drop(state);
        self.gate.changed.notify_all();
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        self.0.lock().aside -= 1;
    }
}

impl Drop for TimedOut<'_> {
    fn drop(&mut self) {
        self.0.lock().timed_out -= 1;
        self.0.changed.notify_all();
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.sharing -= 1;
        state.left = Some(Instant::now());
        drop(state);
        self.0.changed.notify_all();
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.alone = false;
        // Who waits goes before newcomers, now that the card is empty.
        state.closed = state.waiting > 0;
        drop(state);
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI32, Ordering};

    use super::*;

    /// Longer than a test may take.
    const FOREVER: Duration = Duration::from_secs(600);

    /// One whose patience a busy machine does not exhaust.
    fn patient(enough: usize) -> Gate {
        Gate { patience: Patience { clock: FOREVER, step: FOREVER }, ..Gate::new(enough, None) }
    }

    /// Waits until the others have come to it.
    fn until(gate: &Gate, is_so: impl Fn(&State) -> bool) {
        let start = Instant::now();
        while !is_so(&gate.lock()) {
            assert!(start.elapsed() < FOREVER / 10, "they never come to it");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Enough for a mistake to show on a machine that is not busy; nothing fails where it is not.
    fn a_moment() {
        std::thread::sleep(Duration::from_millis(50));
    }

    #[test]
    fn whose_run_timed_out_does_not_wait_for_ever_for_others_that_stand_still() {
        let gate = Gate::new(2, None);
        let (late, _stalled) = (gate.share(), gate.share());
        drop(late.after_timeout(Duration::from_millis(20)));
    }

    #[test]
    fn company_is_noticed() {
        let gate = Gate::new(2, None);
        drop(gate.share());
        let (one, start) = (gate.share(), Instant::now());
        assert!(!one.had_company(start));
        let other = gate.share();
        assert!(one.had_company(start));
        drop(other);
        assert!(one.had_company(start) && !one.had_company(Instant::now()));
    }

    #[test]
    fn a_clock_is_alone_and_nobody_starves() {
        let (gate, inside) = (Gate::new(2, None), AtomicI32::new(0));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (gate, inside) = (&gate, &inside);
                scope.spawn(move || {
                    for _ in 0..200 {
                        if thread % 4 == 0 {
                            let _alone = gate.alone();
                            assert_eq!(inside.fetch_sub(1000, Ordering::SeqCst), 0);
                            inside.fetch_add(1000, Ordering::SeqCst);
                        } else {
                            let _shared = gate.share();
                            assert!(inside.fetch_add(1, Ordering::SeqCst) >= 0);
                            inside.fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert_eq!(inside.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn clocks_go_one_after_another_once_enough_of_them_wait() {
        let gate = patient(2);
        let order = Mutex::new(Vec::new());
        let shared = gate.share();
        std::thread::scope(|scope| {
            let clock = |name| {
                let _alone = gate.alone();
                order.lock().unwrap().push(name);
            };
            scope.spawn(move || clock("first clock"));
            until(&gate, |state| state.waiting == 1);
            // One clock alone does not close it.
            drop(gate.share());
            scope.spawn(move || clock("second clock"));
            until(&gate, |state| state.closed);
            scope.spawn(|| {
                let _shared = gate.share();
                order.lock().unwrap().push("newcomer");
            });
            a_moment();
            drop(shared);
        });
        let mut order = order.into_inner().unwrap();
        assert_eq!(order.pop(), Some("newcomer"));
        order.sort_unstable();
        assert_eq!(order, ["first clock", "second clock"]);
    }

    #[test]
    fn a_single_clock_is_not_kept_waiting_by_a_stream_of_others() {
        let gate = Gate::new(9, None);
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !done.load(Ordering::SeqCst) {
                        let _shared = gate.share();
                        std::thread::sleep(Duration::from_millis(3));
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(10));
            drop(gate.alone());
            done.store(true, Ordering::SeqCst);
        });
    }

    #[test]
    fn whose_run_timed_out_waits_for_the_others_and_keeps_new_ones_out() {
        let gate = Gate::new(2, None);
        let (late, other) = (gate.share(), gate.share());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(late.after_timeout(FOREVER)));
            until(&gate, |state| state.timed_out == 1);
            let newcomer = scope.spawn(|| drop(gate.share()));
            a_moment();
            assert!(!waiting.is_finished() && !newcomer.is_finished());
            drop(other);
            waiting.join().unwrap();
            newcomer.join().unwrap();
        });
        drop(late);
        let both = [gate.share(), gate.share()];
        std::thread::scope(|scope| {
            both.into_iter().for_each(|one| drop(scope.spawn(move || drop(one.after_timeout(FOREVER)))))
        });
    }

    #[test]
    fn an_untried_candidate_runs_while_everybody_else_is_idle() {
        let (gate, tries, working) = (patient(2), AtomicI32::new(0), AtomicI32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let shared = gate.share();
                        for step in 0..5 {
                            shared.yield_to_first_runs();
                            if step == 1 {
                                let first = shared.first();
                                assert!(first.is_alone());
                                assert_eq!(
                                    (working.load(Ordering::SeqCst), tries.fetch_add(1, Ordering::SeqCst)),
                                    (0, 0)
                                );
                                std::thread::sleep(Duration::from_micros(200));
                                tries.fetch_sub(1, Ordering::SeqCst);
                            } else {
                                working.fetch_add(1, Ordering::SeqCst);
                                assert_eq!(tries.load(Ordering::SeqCst), 0);
                                std::thread::sleep(Duration::from_micros(100));
                                working.fetch_sub(1, Ordering::SeqCst);
                            }
                        }
                    }
                });
            }
        });
        let state = gate.lock();
        assert_eq!((state.sharing, state.callers, state.idle, state.trying), (0, 0, 0, false));
    }

    #[test]
    fn an_untried_candidate_is_not_alone_beside_a_long_step_or_one_that_stands_aside() {
        let gate = Gate::new(2, None);
        let (one, other) = (gate.share(), gate.share());
        let start = Instant::now();
        assert!(!one.first().is_alone());
        assert!(start.elapsed() >= gate.patience.step);
        drop((one, other));
        let gate = patient(2);
        let (one, other) = (gate.share(), gate.share());
        let aside = other.step_aside();
        let start = Instant::now();
        assert!(!one.first().is_alone());
        assert!(start.elapsed() < gate.patience.step);
        drop((aside, other));
        assert!(one.first().is_alone());
    }

    #[test]
    fn nobody_comes_in_beside_an_untried_candidate_and_others_wait_for_their_turn() {
        let gate = Gate::new(2, None);
        let (one, other) = (gate.share(), gate.share());
        let first = one.first();
        std::thread::scope(|scope| {
            let newcomer = scope.spawn(|| drop(gate.share()));
            let waiting = scope.spawn(|| drop(other.first()));
            until(&gate, |state| state.callers == 2);
            a_moment();
            // A hang: the other must not keep it from waiting for its second run.
            drop(one.after_timeout(FOREVER));
            assert!(!waiting.is_finished() && !newcomer.is_finished());
            drop((first, one));
        });
    }

    #[test]
    fn two_gates_of_one_file_exclude_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let (first, second) = (Gate::new(1, Some(&path)), Gate::new(1, Some(&path)));
        let alone = first.alone();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(second.alone()));
            a_moment();
            assert!(!waiting.is_finished());
            drop(alone);
        });
    }
}
