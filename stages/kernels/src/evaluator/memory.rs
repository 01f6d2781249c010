//! How much of a GPU's memory those may use together who work on it side by side.
//!
//! Without a limit twelve lanes that screen large tasks ask for more than there is every minute, and each time one of
//! them then has the card to itself, with all the others' processes ended. Seen on an H200: 3 tasks a second, the memory
//! full for half of the time and empty for the other half.
//!
//! Portions are estimates, and bounds: who needs a good deal more than estimated finds out from torch, and does it once
//! more with all the memory to itself, while the others wait between two tasks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What is held back: contexts of the lanes' processes, and what their allocators keep.
const HELD_BACK: f64 = 0.15;

/// The memory of one GPU; without a size, as on a CPU, there is always enough.
#[derive(Default)]
pub struct Memory {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes that may be lent.
    total: Option<u64>,
    lent: u64,
    /// Who comes next, and how many came: large portions are not overtaken by small ones.
    turn: u64,
    tickets: u64,
}

/// Bytes that were lent, until it is dropped.
pub struct Portion<'a> {
    memory: &'a Memory,
    bytes: u64,
}

impl Memory {
    /// Says how much the GPU has, in bytes, as soon as that is known.
    pub fn set_size(&self, bytes: u64) {
        self.state().total = Some((bytes as f64 * (1.0 - HELD_BACK)) as u64);
        self.changed.notify_all();
    }

    /// Waits, in the order of asking, until so many bytes are free, or all of them where more are asked for.
    pub fn take(&self, bytes: u64) -> Portion<'_> {
        let mut state = self.state();
        let ticket = state.tickets;
        state.tickets += 1;
        let bytes = loop {
            let portion = state.total.map_or(bytes, |total| bytes.min(total));
            if state.turn == ticket && state.total.is_none_or(|total| state.lent + portion <= total) {
                break portion;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.turn += 1;
        state.lent += bytes;
        self.changed.notify_all();
        Portion { memory: self, bytes }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Portion<'_> {
    /// What torch may take: estimates are about right.
    pub fn limit(&self) -> u64 {
        self.bytes + self.bytes / 4 + (1 << 30)
    }

    /// Gives it back and waits for one of another size: nobody waits for more while holding some.
    pub fn exchange(self, bytes: u64) -> Self {
        let memory = self.memory;
        drop(self);
        memory.take(bytes)
    }
}

impl Drop for Portion<'_> {
    fn drop(&mut self) {
        self.memory.state().lent -= self.bytes;
        self.memory.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Of 100 bytes, 85 are lent.
    fn of_100() -> Memory {
        let memory = Memory::default();
        memory.set_size(100);
        memory
    }

    #[test]
    fn no_more_is_lent_than_there_is() {
        let (memory, lent) = (of_100(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let (memory, lent) = (&memory, &lent);
                scope.spawn(move || {
                    for round in 0..200 {
                        let (first, second) = (1 + (thread * 7 + round) % 40, 1 + (thread * 13 + round * 5) % 85);
                        let mut portion = memory.take(first);
                        for bytes in [first, second] {
                            assert!(lent.fetch_add(bytes, Ordering::SeqCst) + bytes <= 85);
                            lent.fetch_sub(bytes, Ordering::SeqCst);
                            if bytes == first {
                                portion = portion.exchange(second);
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(memory.state().lent, 0);
    }

    #[test]
    fn a_large_portion_is_not_overtaken() {
        let memory = of_100();
        let (said, heard) = mpsc::channel();
        std::thread::scope(|scope| {
            let small = memory.take(50);
            let (memory, large) = (&memory, said.clone());
            scope.spawn(move || {
                let portion = memory.take(80);
                large.send("large").expect("it listens");
                drop(portion);
            });
            while memory.state().tickets < 2 {
                std::thread::yield_now();
            }
            scope.spawn(move || {
                let _portion = memory.take(10);
                said.send("small").expect("it listens");
            });
            while memory.state().tickets < 3 {
                std::thread::yield_now();
            }
            assert!(heard.recv_timeout(Duration::from_millis(20)).is_err(), "35 bytes are free, but 80 come first");
            drop(small);
            assert_eq!([heard.recv(), heard.recv()], [Ok("large"), Ok("small")]);
        });
    }

    #[test]
    fn what_is_larger_than_all_gets_all() {
        let memory = of_100();
        let portion = memory.take(1000);
        assert_eq!(portion.bytes, 85);
        assert_eq!(portion.exchange(3).bytes, 3);
    }

    #[test]
    fn without_a_size_there_is_enough_and_who_waits_learns_of_it() {
        let memory = Memory::default();
        let first = memory.take(1 << 40);
        let second = memory.take(1 << 40);
        drop((first, second));
        memory.set_size(100);
        assert_eq!(memory.take(60).bytes, 60);
    }
}
