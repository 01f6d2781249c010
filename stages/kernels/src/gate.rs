//! Who may use a GPU: many at once to check results, one alone to take times.
//!
//! A time that was taken while something else ran on the card is wrong by up to a factor of two, so a clock waits until
//! the card is idle, and nothing starts while it runs. Clocks go first: each is short, and whoever waits for one
//! holds a finished candidate.
//!
//! Beside others, one that hangs perhaps, a run can be many times as slow as alone. Who is late therefore waits until only
//! others that are late are left, and is given the same time once more.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard};

use nix::fcntl::{Flock, FlockArg};

/// The gate of one GPU.
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Clocks of other processes on the same machine.
    file: Option<PathBuf>,
}

#[derive(Default)]
struct State {
    sharing: usize,
    alone: bool,
    waiting: usize,
    late: usize,
}

/// One of many, until it is dropped.
pub struct Shared<'a>(&'a Gate);

/// Among others that are late, until it is dropped.
pub struct Late<'a>(&'a Gate);

/// Alone, until it is dropped.
pub struct Alone<'a> {
    gate: &'a Gate,
    _file: Option<Flock<File>>,
}

impl Gate {
    /// A gate; clocks of other processes that name the same file are waited for too.
    pub fn new(file: Option<&Path>) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), file: file.map(Path::to_owned) }
    }

    /// Waits until no clock runs or waits.
    pub fn share(&self) -> Shared<'_> {
        let mut state = self.lock();
        while state.alone || state.waiting > 0 || state.late > 0 {
            state = self.changed.wait(state).expect("no panics while it is held");
        }
        state.sharing += 1;
        Shared(self)
    }

    /// Waits until nobody else is there.
    pub fn alone(&self) -> Alone<'_> {
        let mut state = self.lock();
        state.waiting += 1;
        while state.alone || state.sharing > 0 {
            state = self.changed.wait(state).expect("no panics while it is held");
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
    /// Waits until everybody else who is there is late, too; nobody comes in meanwhile.
    pub fn be_late(&self) -> Late<'a> {
        let mut state = self.0.lock();
        state.late += 1;
        self.0.changed.notify_all();
        while state.sharing > state.late {
            state = self.0.changed.wait(state).expect("no panics while it is held");
        }
        Late(self.0)
    }
}

impl Drop for Late<'_> {
    fn drop(&mut self) {
        self.0.lock().late -= 1;
        self.0.changed.notify_all();
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        self.0.lock().sharing -= 1;
        self.0.changed.notify_all();
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.gate.lock().alone = false;
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI32, Ordering};

    use super::*;

    #[test]
    fn a_clock_is_alone_and_nobody_starves() {
        let (gate, inside) = (Gate::new(None), AtomicI32::new(0));
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
    fn who_is_late_waits_for_the_others_and_keeps_new_ones_out() {
        let gate = Gate::new(None);
        let (late, other) = (gate.share(), gate.share());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(late.be_late()));
            std::thread::sleep(std::time::Duration::from_millis(50));
            let newcomer = scope.spawn(|| drop(gate.share()));
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!waiting.is_finished() && !newcomer.is_finished());
            drop(other);
            waiting.join().unwrap();
            newcomer.join().unwrap();
        });
        drop(late);
        let both = [gate.share(), gate.share()];
        std::thread::scope(|scope| both.into_iter().for_each(|one| drop(scope.spawn(move || drop(one.be_late())))));
    }

    #[test]
    fn two_gates_of_one_file_exclude_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let (first, second) = (Gate::new(Some(&path)), Gate::new(Some(&path)));
        let alone = first.alone();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(second.alone()));
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!waiting.is_finished());
            drop(alone);
        });
    }
}
