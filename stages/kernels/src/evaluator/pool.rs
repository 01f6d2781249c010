//! A fixed number of things, lent one at a time, to those first for whom a thing is ready.
//!
//! Whoever takes one names what it is for, its topic: here a task, which a lane's worker loads in 0.1 to 0.3 s and then
//! keeps. Candidates of one task come together, so without regard to that every lane would load every task.
//!
//! - A free thing goes to whoever asks: nobody waits beside an idle one. It is one that knows the topic, if there is one.
//! - A thing that comes back while several wait goes to the first whose topic it knows; else to the first whose topic none
//!   knows, since others have a thing that will come back; else to the first.
//! - Nobody is passed over more than [`PATIENCE`] times for each thing.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard};

/// How often who waits lets others go first, for each thing of the pool: a topic has some eight uses that come together, and
/// while one thing has its own, each of the others has as many.
const PATIENCE: usize = 8;

/// What may be ready for a topic.
pub trait Ready {
    /// How many topics it stays ready for, those of late.
    const KEPT: usize;

    /// Whether it has lost all that it was ready for.
    fn has_forgotten(&self) -> bool;
}

/// The things and who waits for them.
pub struct Pool<T> {
    size: usize,
    state: Mutex<State<T>>,
}

struct State<T> {
    /// The last that was returned is at the end.
    free: Vec<Slot<T>>,
    /// Topics of the things that are lent, by number of the thing.
    lent: Vec<VecDeque<String>>,
    /// In the order in which they came.
    waiting: Vec<Waiting<T>>,
}

/// A thing with what it is ready for, the latest topic last.
struct Slot<T> {
    number: usize,
    topics: VecDeque<String>,
    thing: T,
}

struct Waiting<T> {
    topic: String,
    passed_over: usize,
    /// Where it gets a thing, and the thing's number.
    give: SyncSender<(usize, T)>,
}

/// A thing, until it is dropped.
pub struct Lent<'a, T: Ready> {
    pool: &'a Pool<T>,
    number: usize,
    thing: Option<T>,
}

impl<T: Ready> Pool<T> {
    /// A pool of these.
    pub fn new(things: impl IntoIterator<Item = T>) -> Self {
        let slot = |(number, thing)| Slot { number, topics: VecDeque::new(), thing };
        let free: Vec<Slot<T>> = things.into_iter().enumerate().map(slot).collect();
        let lent = free.iter().map(|_| VecDeque::new()).collect();
        let size = free.len();
        Self { size, state: Mutex::new(State { free, lent, waiting: Vec::new() }) }
    }

    /// How many there are, lent or not.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Waits for one, to use it for this topic; an empty one is known by none.
    pub fn take(&self, topic: &str) -> Lent<'_, T> {
        let mut state = self.lock();
        if let Some(last) = state.free.len().checked_sub(1) {
            let ready = state.free.iter().rposition(|slot| slot.knows(topic)).unwrap_or(last);
            let slot = state.free.remove(ready);
            let (number, thing) = state.lend(slot, topic);
            return Lent { pool: self, number, thing: Some(thing) };
        }
        let (give, given) = sync_channel(1);
        state.waiting.push(Waiting { topic: topic.to_owned(), passed_over: 0, give });
        drop(state);
        let (number, thing) = given.recv().expect("who waits stays in the queue until a thing is given");
        Lent { pool: self, number, thing: Some(thing) }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().expect("no panics while it is held")
    }
}

impl<T> Slot<T> {
    fn knows(&self, topic: &str) -> bool {
        self.topics.iter().any(|known| known == topic)
    }
}

impl<T: Ready> State<T> {
    /// Notes that a thing is out, and for what.
    fn lend(&mut self, slot: Slot<T>, topic: &str) -> (usize, T) {
        let Slot { number, mut topics, thing } = slot;
        topics.retain(|known| known != topic);
        if !topic.is_empty() {
            topics.push_back(topic.to_owned());
        }
        while topics.len() > T::KEPT {
            topics.pop_front();
        }
        self.lent[number] = topics;
        (number, thing)
    }

    /// Which of those who wait gets a thing that has come back.
    fn next_for(&self, slot: &Slot<T>) -> Option<usize> {
        let patience = PATIENCE * self.lent.len();
        let first = |is_one: &dyn Fn(&Waiting<T>) -> bool| self.waiting.iter().position(is_one);
        let is_known = |topic: &str| self.lent.iter().flatten().any(|known| known == topic);
        first(&|one| one.passed_over >= patience)
            .or_else(|| first(&|one| slot.knows(&one.topic)))
            .or_else(|| first(&|one| !is_known(&one.topic)))
            .or_else(|| first(&|_| true))
    }
}

impl<T: Ready> Deref for Lent<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.thing.as_ref().expect("there until it is dropped")
    }
}

impl<T: Ready> DerefMut for Lent<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.thing.as_mut().expect("there until it is dropped")
    }
}

impl<T: Ready> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        let thing = self.thing.take().expect("dropped once");
        let mut state = self.pool.lock();
        let mut topics = std::mem::take(&mut state.lent[self.number]);
        if thing.has_forgotten() {
            topics.clear();
        }
        let slot = Slot { number: self.number, topics, thing };
        match state.next_for(&slot) {
            None => state.free.push(slot),
            Some(next) => {
                state.waiting[..next].iter_mut().for_each(|one| one.passed_over += 1);
                let Waiting { topic, give, .. } = state.waiting.remove(next);
                let lent = state.lend(slot, &topic);
                give.send(lent).expect("who waits stays until a thing is given");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// A lane that counts what it loads.
    #[derive(Default)]
    struct Loads {
        kept: VecDeque<String>,
        loads: usize,
        is_broken: bool,
    }

    impl Ready for Loads {
        const KEPT: usize = 2;

        fn has_forgotten(&self) -> bool {
            self.is_broken
        }
    }

    impl Loads {
        fn load(&mut self, topic: &str) {
            if !self.kept.iter().any(|kept| kept == topic) {
                self.loads += 1;
            }
            self.kept.retain(|kept| kept != topic);
            self.kept.push_back(topic.to_owned());
            while self.kept.len() > Self::KEPT {
                self.kept.pop_front();
            }
        }
    }

    fn pool(size: usize) -> Pool<Loads> {
        Pool::new((0..size).map(|_| Loads::default()))
    }

    /// Waits until so many stand in the queue.
    fn until_waiting(pool: &Pool<Loads>, count: usize) {
        while pool.lock().waiting.len() < count {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The order in which those who wait get the things of a pool, which are taken for `first` and come back one by one.
    fn order(first: &[&str], waiting: &[&str]) -> Vec<String> {
        let pool = pool(first.len());
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            let mut taken: Vec<_> = first.iter().map(|topic| pool.take(topic)).collect();
            for (count, topic) in waiting.iter().enumerate() {
                let (pool, sender) = (&pool, sender.clone());
                scope.spawn(move || {
                    let lent = pool.take(topic);
                    sender.send((topic.to_string(), lent)).unwrap();
                });
                until_waiting(pool, count + 1);
            }
            let mut served = Vec::new();
            while served.len() < waiting.len() {
                drop(taken.remove(0));
                let (topic, lent) = receiver.recv_timeout(Duration::from_secs(60)).unwrap();
                served.push(topic);
                taken.push(lent);
            }
            served
        })
    }

    #[test]
    fn a_free_one_that_is_ready_is_taken_before_others() {
        let pool = pool(3);
        let numbers = ["a", "b", "c"].map(|topic| (topic, pool.take(topic))).map(|(topic, lent)| (topic, lent.number));
        for _ in 0..2 {
            for (topic, number) in numbers {
                assert_eq!(pool.take(topic).number, number, "{topic}");
            }
        }
    }

    #[test]
    fn one_that_comes_back_goes_to_who_it_is_ready_for() {
        assert_eq!(order(&["a"], &["b", "a", "a"]), ["a", "a", "b"]);
    }

    #[test]
    fn a_topic_that_none_knows_goes_before_one_whose_thing_will_come_back() {
        // What had `x` comes back first: `b` has a lane that is still out, and `c` has none.
        assert_eq!(order(&["x", "b"], &["b", "c"]), ["c", "b"]);
        // Nobody waits beside an idle one for another.
        assert_eq!(order(&["x", "b"], &["b"]), ["b"]);
    }

    #[test]
    fn nobody_is_passed_over_for_ever() {
        let mut waiting = vec!["b"];
        waiting.extend(["a"; 3 * PATIENCE]);
        let order = order(&["a"], &waiting);
        assert_eq!(order.iter().position(|topic| topic == "b"), Some(PATIENCE));
    }

    #[test]
    fn what_a_broken_one_knew_is_forgotten() {
        let pool = pool(2);
        let (mut one, other) = (pool.take("a"), pool.take("b"));
        let kept = other.number;
        one.is_broken = true;
        drop((one, other));
        assert_eq!(pool.take("a").number, kept, "the one that came back last, since none knows it");
    }

    #[test]
    fn only_the_latest_topics_are_known() {
        let pool = pool(1);
        for topic in ["a", "b", "c"] {
            drop(pool.take(topic));
        }
        assert_eq!(pool.lock().free[0].topics, ["b", "c"]);
    }

    /// Twenty topics on four things, eight uses each, which come together and wait in order.
    #[test]
    fn uses_of_a_topic_that_come_together_load_it_seldom() {
        let pool = pool(4);
        std::thread::scope(|scope| {
            let held: Vec<_> = (0..4).map(|_| pool.take("")).collect();
            for number in 0..160 {
                let pool = &pool;
                scope.spawn(move || {
                    let topic = (number / 8).to_string();
                    let mut lent = pool.take(&topic);
                    lent.load(&topic);
                });
                until_waiting(pool, number + 1);
            }
            drop(held);
        });
        let state = pool.lock();
        let loads: usize = state.free.iter().map(|slot| slot.thing.loads).sum();
        assert!(state.free.len() == 4 && state.waiting.is_empty());
        assert!((20..=60).contains(&loads), "{loads} loads; 80 where each thing loads each topic");
    }
}
