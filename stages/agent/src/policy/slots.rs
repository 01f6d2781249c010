//! At most so many at a time.

use std::sync::{Condvar, Mutex};

/// Places that threads take and give back.
pub struct Slots {
    free: Mutex<usize>,
    freed: Condvar,
}

/// A place that was taken.
pub struct Slot<'a>(&'a Slots);

impl Slots {
    /// So many places, at least one.
    pub fn new(count: usize) -> Self {
        Self { free: Mutex::new(count.max(1)), freed: Condvar::new() }
    }

    /// Waits for a place.
    pub fn take(&self) -> Slot<'_> {
        let free = self.free.lock().expect("no panics while it is held");
        let mut free = self.freed.wait_while(free, |free| *free == 0).expect("no panics while it is held");
        *free -= 1;
        Slot(self)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().expect("no panics while it is held") += 1;
        self.0.freed.notify_one();
    }
}
