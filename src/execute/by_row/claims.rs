//! Which rows of a stage this engine does: several engines, and several stages with one base key, share them by leases on
//! parts of the rows.
//!
//! A row is done by whoever holds its part, and a part is given back only when its answers are published. So whoever gets
//! a part looks at what is published after that, and leaves out what is done: that is what makes each row be done once.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use crate::digest::Digest;
use crate::execute::{Context, Sample};
use crate::rows::{RowIndex, SegmentSchema};
use crate::store::SegmentName;
use crate::store::lease::{self, Asked, Lease};

/// Rows are claimed in so many parts, by their digests.
const PARTS: u8 = 64;
/// So many parts are asked for at a time.
const CLAIMS: usize = 8;

/// Which results count as there.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// What is done now is filed under this epoch.
    pub epoch: u32,
    /// Whether results of earlier epochs are done again…
    pub refresh: bool,
    /// …all of them, or some.
    pub sample: Option<Sample>,
}

impl Wanted {
    /// Whether a row need not be done.
    pub fn is_there(&self, index: &RowIndex, row: &Digest) -> bool {
        let again = |epoch: u32| self.refresh && epoch < self.epoch && self.sample.is_none_or(|sample| sample.has(row));
        index.find(row).is_some_and(|place| !again(index.segments[place.segment as usize].epoch))
    }
}

/// Where a stage's rows are filed.
#[derive(Clone)]
pub struct Filing {
    /// The base key.
    pub base: Digest,
    /// The local index of its segments.
    pub cache: PathBuf,
    /// Its journals.
    pub state: PathBuf,
}

/// The rows that a stage has to do, in parts.
pub struct Claims {
    filing: Filing,
    wanted: Wanted,
    /// Parts that were not asked for yet.
    unclaimed: VecDeque<(u8, Vec<usize>)>,
    /// What is claimed, with how many of its rows are not answered.
    held: BTreeMap<u8, (Lease, usize)>,
    /// Leases of parts that others do.
    foreign: Vec<String>,
    /// What is published…
    index: RowIndex,
    /// …by this listing, and what was published here since.
    listed: Vec<SegmentName>,
}

/// What came of claiming.
#[derive(Default)]
pub struct Claimed {
    /// Rows to do.
    pub rows: Vec<usize>,
    /// How many rows of the claimed parts others have done.
    pub done: usize,
}

impl Claims {
    /// Divides `todo`, which `index` lacks. Runs that begin together begin at different parts.
    pub fn new(
        filing: Filing,
        wanted: Wanted,
        index: RowIndex,
        todo: impl IntoIterator<Item = usize>,
        digests: &[Digest],
        run: &str,
    ) -> Self {
        let mut parts: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
        todo.into_iter().for_each(|row| parts.entry(part(&digests[row])).or_default().push(row));
        let mut unclaimed: VecDeque<(u8, Vec<usize>)> = parts.into_iter().collect();
        let first = unclaimed.len() * usize::from(Digest::of_bytes(run.as_bytes()).0[0]) / 256;
        unclaimed.rotate_left(first);
        let listed = index.segments.clone();
        Self { filing, wanted, unclaimed, held: BTreeMap::new(), foreign: Vec::new(), index, listed }
    }

    /// What was published when it was last looked at.
    pub fn index(&self) -> &RowIndex {
        &self.index
    }

    /// Rows that nobody was asked for yet.
    pub fn left(&self) -> usize {
        self.unclaimed.iter().map(|(_, rows)| rows.len()).sum()
    }

    /// Whether every part was asked for.
    pub fn is_over(&self) -> bool {
        self.unclaimed.is_empty()
    }

    /// Asks for nothing more.
    pub fn stop(&mut self) {
        self.unclaimed.clear();
    }

    /// Claims parts until they have `count` rows that are to be done. Parts that others have are left to them.
    pub async fn claim(
        &mut self,
        context: &Context,
        digests: &[Digest],
        schema: &SegmentSchema,
        count: usize,
    ) -> Claimed {
        let mut claimed = Claimed::default();
        while claimed.rows.len() < count && !self.unclaimed.is_empty() {
            let parts = self.next_parts(count - claimed.rows.len());
            let parts = self.ask(context, schema, parts).await;
            self.look(context).await;
            for (part, mut rows) in parts {
                let before = rows.len();
                rows.retain(|row| !self.wanted.is_there(&self.index, &digests[*row]));
                claimed.done += before - rows.len();
                if let Some((_, left)) = self.held.get_mut(&part) {
                    *left = rows.len();
                }
                claimed.rows.extend(rows);
            }
        }
        claimed
    }

    /// Asks for parts; those that are ours.
    async fn ask(
        &mut self,
        context: &Context,
        schema: &SegmentSchema,
        parts: Vec<(u8, Vec<usize>)>,
    ) -> Vec<(u8, Vec<usize>)> {
        let names: Vec<String> = parts.iter().map(|(part, _)| lease::of_rows(&self.filing.base, *part)).collect();
        let asking = names.iter().map(|name| context.store.lease(name, &context.claimant));
        let answers = futures::future::join_all(asking).await;
        let (mut granted, mut inherited) = (Vec::new(), false);
        for ((part, name), answer) in parts.into_iter().zip(names).zip(answers) {
            match answer {
                Ok(Asked::Granted(lease)) => {
                    inherited |= lease.is_inherited();
                    self.held.insert(part.0, (lease, part.1.len()));
                    granted.push(part);
                }
                Ok(Asked::Taken(_)) => self.foreign.push(name),
                // A store that is away costs double work at worst.
                Err(_) => granted.push(part),
            }
        }
        if inherited {
            // Whoever had it may have died on this machine, with answers in its journal.
            let _ = super::adopt_orphans(&context.store, &self.filing, schema).await;
        }
        granted
    }

    /// Looks at what is published by now.
    async fn look(&mut self, context: &Context) {
        let Ok(listed) = context.store.segments(&self.filing.base).await else { return };
        if listed == self.listed {
            return;
        }
        if let Ok(index) = RowIndex::load(&context.store, &self.filing.base, &self.filing.cache).await {
            (self.index, self.listed) = (index, listed);
        }
    }

    /// Takes notice that a row is answered.
    pub fn answered(&mut self, row: &Digest) {
        if let Some((_, left)) = self.held.get_mut(&part(row)) {
            *left = left.saturating_sub(1);
        }
    }

    /// Takes notice of a segment that was published here.
    pub fn published(&mut self, segment: SegmentName) {
        self.listed.push(segment);
        self.listed.sort_unstable();
    }

    /// The leases of parts whose rows are all answered. They are to be given back, when the answers are published.
    pub fn finished(&mut self) -> Vec<Lease> {
        let over: Vec<u8> = self.held.iter().filter(|(_, (_, left))| *left == 0).map(|(part, _)| *part).collect();
        over.iter().filter_map(|part| self.held.remove(part)).map(|(lease, _)| lease).collect()
    }

    /// Ends claiming: the leases of others to wait for, and what is still held.
    pub fn end(self) -> (Vec<String>, Vec<Lease>) {
        (self.foreign, self.held.into_values().map(|(lease, _)| lease).collect())
    }

    fn next_parts(&mut self, count: usize) -> Vec<(u8, Vec<usize>)> {
        let (mut parts, mut rows) = (Vec::new(), 0);
        while rows < count && parts.len() < CLAIMS {
            let Some(part) = self.unclaimed.pop_front() else { break };
            rows += part.1.len();
            parts.push(part);
        }
        parts
    }
}

/// The part that a row is claimed with.
fn part(row: &Digest) -> u8 {
    row.0[0] / (u8::MAX / PARTS + 1)
}
