//! Which rows of a stage this engine does: several engines, and several stages with one base key, share them by leases on
//! parts of the rows.
//!
//! A row is done by whoever holds its part, and a part is given back only when its answers are published. So whoever gets
//! a part looks at what is published after that, and leaves out what is done: that is what makes each row be done once.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use crate::digest::Digest;
use crate::execute::job::Context;
use crate::execute::sample::Sample;
use crate::rows::{RowIndex, SegmentSchema};
use crate::store::SegmentName;
use crate::store::lease::{self, Asked, Lease};

/// Number of parts in which rows are claimed, by their digests.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::segment;
    use crate::store::lease::{Claimant, Holder};
    use crate::store::{RunManifest, Store};
    use cuda_agent_protocol::{RowResult, RowStatus};
    use serde_json::json;

    const BASE: Digest = Digest([9; 32]);

    /// A row of a part: rows are divided by their first byte, four values to a part.
    fn row(first: u8, last: u8) -> Digest {
        let mut digest = Digest([last; 32]);
        digest.0[0] = first;
        digest
    }

    /// An index of one segment for each of these: its epoch, and its row.
    async fn index(of: &[(u32, Digest)]) -> RowIndex {
        let (store, folder) = (Store::memory(), tempfile::tempdir().unwrap());
        let manifest =
            json!({ "name": "lab/rows", "version": "1.0.0", "summary": "Rows.", "run": ["x"], "outputs": {} });
        let schema = SegmentSchema::new(&serde_json::from_value(manifest).unwrap());
        for (epoch, row) in of {
            let (row, outputs) = (row.to_string(), BTreeMap::new());
            let result = RowResult { row, status: RowStatus::Done, reason: None, detail: None, outputs };
            let bytes = segment::encode(&schema.batch(&[result]).unwrap()).unwrap();
            store.put_segment(&BASE, *epoch, bytes).await.unwrap();
        }
        RowIndex::load(&store, &BASE, &folder.path().join("index")).await.unwrap()
    }

    fn claims(rows: &[Digest], run: &str) -> Claims {
        let filing = Filing { base: BASE, cache: PathBuf::new(), state: PathBuf::new() };
        let wanted = Wanted { epoch: 0, refresh: false, sample: None };
        Claims::new(filing, wanted, RowIndex::default(), 0..rows.len(), rows, run)
    }

    #[tokio::test]
    async fn a_refresh_does_each_row_once() {
        let (old, new, none) = (row(0, 1), row(0, 2), row(0, 3));
        let index = index(&[(0, old), (1, new)]).await;
        let there = |refresh: bool, epoch: u32| {
            let wanted = Wanted { epoch, refresh, sample: None };
            [old, new, none].map(|row| wanted.is_there(&index, &row))
        };
        assert_eq!(there(false, 1), [true, true, false]);
        assert_eq!(there(true, 1), [false, true, false]);
        assert_eq!(there(true, 2), [false, false, false]);
    }

    #[test]
    fn rows_are_divided_by_their_first_byte() {
        assert_eq!([0, 3, 4, 7, 8, 255].map(|first| part(&row(first, 1))), [0, 0, 1, 1, 2, PARTS - 1]);
    }

    #[test]
    fn parts_are_asked_for_until_they_have_enough_rows() {
        // Two rows of each of 20 parts.
        let rows: Vec<Digest> = (0..40).map(|number| row(number / 2 * 4, number)).collect();
        let mut claims = claims(&rows, "run");
        let mut asked = Vec::new();
        for (count, parts, left) in [(1, 1, 38), (2, 1, 36), (3, 2, 32), (100, CLAIMS, 16), (100, CLAIMS, 0)] {
            let next = claims.next_parts(count);
            assert_eq!((next.len(), claims.left(), claims.is_over()), (parts, left, left == 0), "{count}");
            assert!(next.iter().all(|(number, of)| of.iter().all(|index| part(&rows[*index]) == *number)));
            asked.extend(next.into_iter().flat_map(|(_, rows)| rows));
        }
        asked.sort_unstable();
        assert_eq!(asked, (0..40).collect::<Vec<_>>());
        assert!(claims.next_parts(1).is_empty());
    }

    #[test]
    fn runs_begin_at_different_parts() {
        let rows: Vec<Digest> = (0..PARTS).map(|part| row(part * 4, 0)).collect();
        let first = |run: u32| claims(&rows, &format!("run-{run}")).next_parts(1)[0].0;
        let begun: std::collections::BTreeSet<u8> = (0..100).map(first).collect();
        assert!(begun.len() > 20 && begun.iter().all(|part| *part < PARTS), "{begun:?}");
    }

    #[tokio::test]
    async fn a_part_is_given_back_when_all_its_rows_are_answered() {
        let store = Store::memory();
        let run = json!({
            "schema": 1, "run": "a", "pipeline": "p", "started_at": 0.0, "heartbeat_at": 0.0, "ended_at": null,
            "outcome": "running", "params": {}, "stages": {},
        });
        store.put_run(&serde_json::from_value::<RunManifest>(run).unwrap()).await.unwrap();
        let claimant = Claimant::new(Holder::this("a"));
        let mut claims = claims(&[], "a");
        for part in [0, 1] {
            let Asked::Granted(lease) = store.lease(&lease::of_rows(&BASE, part), &claimant).await.unwrap() else {
                panic!("nobody has it")
            };
            claims.held.insert(part, (lease, 2));
        }
        assert_eq!(claims.finished().len(), 0);
        claims.answered(&row(0, 1));
        claims.answered(&row(4, 1));
        assert_eq!(claims.finished().len(), 0);
        claims.answered(&row(0, 2));
        assert_eq!((claims.finished().len(), claims.finished().len()), (1, 0), "once");
        claims.foreign.push("other".into());
        let (foreign, held) = claims.end();
        assert_eq!((foreign, held.len()), (vec!["other".to_owned()], 1));
    }
}
