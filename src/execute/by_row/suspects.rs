//! What suspects: rows whose programs died, and what has to be shown before one of them is rejected.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use cuda_agent_protocol::{RowResult, RowStatus};

use crate::digest::Digest;
use crate::rows::index::Place;
use crate::rows::{InputRows, RowIndex, RowOutcome, segment};
use crate::store::Store;

/// Programs that die one after another without any row being answered: then it is not the rows.
const DEATHS: u32 = 3;

/// Whether a program still does a row that it did before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trial {
    NotStarted,
    Running,
    Passed,
}

/// Rows that may have killed their programs. This decides; it starts nothing.
pub struct Suspects {
    /// To be given to a program alone.
    waiting: VecDeque<usize>,
    suspected: HashSet<usize>,
    /// Rows that killed a program twice.
    condemned: Vec<RowResult>,
    /// A row that a program has done; it is tried again before anything is rejected.
    control: Option<usize>,
    is_control_sought: bool,
    trial: Trial,
    /// Programs that died since the last answer.
    deaths: u32,
}

/// How a program died, and what it had then.
pub struct Death<'a> {
    /// Rows that it had and did not answer.
    pub unanswered: &'a [usize],
    /// Whether it was given one row and nothing else.
    pub was_alone: bool,
    /// Whether it was killed for taking too long.
    pub was_overdue: bool,
    /// How it ended, in words.
    pub exit: String,
}

impl Suspects {
    /// None yet.
    pub fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            suspected: HashSet::new(),
            condemned: Vec::new(),
            control: None,
            is_control_sought: false,
            trial: Trial::NotStarted,
            deaths: 0,
        }
    }

    /// Whether none waits to be tried alone.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The next row that a program gets alone.
    pub fn next(&mut self) -> Option<usize> {
        self.waiting.pop_front()
    }

    /// Tries none any more.
    pub fn stop(&mut self) {
        self.waiting.clear();
    }

    /// Takes notice of an answer. Whether it is the control's, which has its result already.
    pub fn answered(&mut self, row: Option<usize>, status: RowStatus) -> bool {
        self.deaths = 0;
        if self.trial != Trial::NotStarted && row == self.control {
            self.trial = Trial::Passed;
            return true;
        }
        if status == RowStatus::Done {
            self.control = row;
        }
        false
    }

    /// Whether programs now die on a row that they did before.
    pub fn has_control_failed(&self) -> bool {
        self.trial == Trial::Running
    }

    /// Counts a program that died, with so many others still running. How many died one after another, where it can't be
    /// the rows.
    pub fn count_death(&mut self) {
        self.deaths += 1;
    }

    /// How many programs died one after another, where that can't be the rows' doing: none was ever done, or the last one
    /// `had_rows` not at all.
    pub fn deaths_beyond_rows(&self, had_rows: bool, others: usize) -> Option<u32> {
        let never_worked = self.control.is_none() && self.deaths > DEATHS + others as u32;
        (never_worked || (!had_rows && self.deaths >= DEATHS)).then_some(self.deaths)
    }

    /// Suspects the rows that a program had when it died; one that was suspected and alone is condemned.
    pub fn accuse(&mut self, death: &Death, input: &InputRows) {
        for row in death.unanswered {
            let is_first = self.suspected.insert(*row);
            if is_first || !death.was_alone {
                self.waiting.push_back(*row);
                continue;
            }
            let (reason, detail) = match death.was_overdue {
                true => ("timeout", "it took too long, twice".to_owned()),
                false => ("crash", death.exit.clone()),
            };
            self.condemned.push(RowResult {
                row: input.digests[*row].to_string(),
                status: RowStatus::Rejected,
                reason: Some(reason.into()),
                detail: Some(detail),
                outputs: BTreeMap::new(),
            });
        }
    }

    /// Rows that killed a program twice, of which none is rejected before a program has done a row that it did before.
    pub fn undecided(&self) -> &[RowResult] {
        if self.trial == Trial::NotStarted { &self.condemned } else { &[] }
    }

    /// Puts the control on trial; `false` where no row was ever done.
    pub fn try_control(&mut self) -> bool {
        let Some(control) = self.control else { return false };
        self.trial = Trial::Running;
        self.waiting.push_back(control);
        true
    }

    /// Takes the condemned, which are to be rejected.
    pub fn take_condemned(&mut self) -> Vec<RowResult> {
        std::mem::take(&mut self.condemned)
    }

    /// Looks once for a row that was done in an earlier run, where none was done in this one: it is to be the control. One
    /// that was rejected proves nothing, and may itself have been rejected for killing its program.
    pub async fn seek_control(
        &mut self,
        store: &Store,
        base: &Digest,
        input: &InputRows,
        published: &RowIndex,
    ) -> Option<usize> {
        if self.control.is_some() || std::mem::replace(&mut self.is_control_sought, true) {
            return None;
        }
        let mut outcomes: HashMap<u32, Vec<RowOutcome>> = HashMap::new();
        for (row, digest) in input.digests.iter().enumerate() {
            let Some(Place { segment, row: place }) = published.find(digest) else { continue };
            if self.suspected.contains(&row) {
                continue;
            }
            if let Entry::Vacant(entry) = outcomes.entry(segment) {
                let name = published.segments[segment as usize];
                let bytes = store.segment(base, &name).await.ok().flatten();
                let batches = bytes.and_then(|bytes| segment::decode(bytes).ok()).unwrap_or_default();
                entry.insert(batches.iter().flat_map(segment::outcomes).collect());
            }
            if outcomes[&segment].get(place as usize) == Some(&RowOutcome::Done) {
                self.control = Some(row);
                return self.control;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(count: usize) -> InputRows {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.parquet");
        let ids: arrow::array::ArrayRef =
            std::sync::Arc::new(arrow::array::Int64Array::from_iter_values(0..count as i64));
        let batch = arrow::array::RecordBatch::try_from_iter([("id", ids)]).unwrap();
        crate::artifact::table::write(&path, &batch.schema(), &[batch]).unwrap();
        InputRows::read(&path, &["id".to_owned()]).unwrap()
    }

    fn crash(unanswered: &[usize], was_alone: bool) -> Death<'_> {
        Death { unanswered, was_alone, was_overdue: false, exit: "exit status 3".into() }
    }

    #[test]
    fn a_row_is_condemned_when_it_kills_a_second_program_alone() {
        let (input, mut suspects) = (input(3), Suspects::new());
        suspects.accuse(&crash(&[0, 1], false), &input);
        assert_eq!([suspects.next(), suspects.next(), suspects.next()], [Some(0), Some(1), None]);
        // Not alone: others may have killed it.
        suspects.accuse(&crash(&[0, 2], false), &input);
        assert!(suspects.undecided().is_empty());
        assert_eq!([suspects.next(), suspects.next()], [Some(0), Some(2)]);
        suspects.accuse(&Death { was_overdue: true, ..crash(&[0], true) }, &input);
        suspects.accuse(&crash(&[2], true), &input);
        assert!(suspects.is_empty());
        let why: Vec<_> = suspects.undecided().iter().map(|row| (row.reason.clone(), row.detail.clone())).collect();
        let expected = [("timeout", "it took too long, twice"), ("crash", "exit status 3")];
        assert_eq!(why, expected.map(|(reason, detail)| (Some(reason.to_owned()), Some(detail.to_owned()))));
        let rows: Vec<String> = suspects.take_condemned().into_iter().map(|row| row.row).collect();
        assert_eq!(rows, [input.digests[0].to_string(), input.digests[2].to_string()]);
    }

    #[test]
    fn the_control_is_a_row_that_was_done_and_its_second_answer_is_not_kept() {
        let (input, mut suspects) = (input(3), Suspects::new());
        assert!(!suspects.try_control(), "no row was done");
        assert!(
            !suspects.answered(Some(0), RowStatus::Rejected) && !suspects.try_control(),
            "a rejection proves nothing"
        );
        assert!(!suspects.answered(Some(1), RowStatus::Done));
        suspects.accuse(&crash(&[2], false), &input);
        suspects.accuse(&crash(&[2], true), &input);
        assert_eq!((suspects.next(), suspects.undecided().len(), suspects.has_control_failed()), (Some(2), 1, false));
        assert!(suspects.try_control());
        assert_eq!((suspects.next(), suspects.undecided().len(), suspects.has_control_failed()), (Some(1), 0, true));
        assert!(suspects.answered(Some(1), RowStatus::Done));
        assert!(!suspects.has_control_failed());
    }

    #[test]
    fn deaths_that_no_row_explains_are_counted_until_an_answer() {
        let mut suspects = Suspects::new();
        let mut died = |times: u32, had_rows: bool, others: usize| {
            (0..times).for_each(|_| suspects.count_death());
            suspects.deaths_beyond_rows(had_rows, others)
        };
        assert_eq!([died(2, false, 0), died(1, true, 0), died(0, false, 0)], [None, None, Some(3)]);
        // While none was ever done, each of the other programs may die once more.
        assert_eq!([died(1, true, 1), died(1, true, 1)], [None, Some(5)]);
        suspects.answered(Some(0), RowStatus::Done);
        (0..9).for_each(|_| suspects.count_death());
        assert_eq!(suspects.deaths_beyond_rows(true, 0), None, "rows were done, so these may be to blame");
        assert_eq!(suspects.deaths_beyond_rows(false, 0), Some(9));
    }
}
