//! A fixed number of things, lent one at a time.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex};

/// The things that are not lent.
pub struct Pool<T> {
    size: usize,
    free: Mutex<Vec<T>>,
    returned: Condvar,
}

/// A thing, until it is dropped.
pub struct Lent<'a, T> {
    pool: &'a Pool<T>,
    thing: Option<T>,
}

impl<T> Pool<T> {
    /// A pool of these.
    pub fn new(things: impl IntoIterator<Item = T>) -> Self {
        let things: Vec<T> = things.into_iter().collect();
        Self { size: things.len(), free: Mutex::new(things), returned: Condvar::new() }
    }

    /// How many there are, lent or not.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Waits for a free one; the one that was returned last comes first, since it is the warmest.
    pub fn take(&self) -> Lent<'_, T> {
        let mut free = self.free.lock().expect("no panics while it is held");
        loop {
            if let Some(thing) = free.pop() {
                return Lent { pool: self, thing: Some(thing) };
            }
            free = self.returned.wait(free).expect("no panics while it is held");
        }
    }
}

impl<T> Deref for Lent<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.thing.as_ref().expect("there until it is dropped")
    }
}

impl<T> DerefMut for Lent<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.thing.as_mut().expect("there until it is dropped")
    }
}

impl<T> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        let thing = self.thing.take().expect("dropped once");
        self.pool.free.lock().expect("no panics while it is held").push(thing);
        self.pool.returned.notify_one();
    }
}
