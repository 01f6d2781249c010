//! What claims: the rows that this engine has claimed and no program has yet, and those that it may still claim.

use std::collections::{HashMap, VecDeque};

use super::claims::Claims;
use crate::execute::job::Context;
use crate::rows::{InputRows, SegmentSchema};

/// Rows to do.
pub struct Todo<'a> {
    input: &'a InputRows,
    /// Divides the rows with other engines.
    pub claims: Claims,
    claimed: VecDeque<usize>,
    by_digest: HashMap<String, usize>,
    total: u64,
}

impl<'a> Todo<'a> {
    /// For `total` rows of the input that `claims` divides.
    pub fn new(input: &'a InputRows, claims: Claims, total: u64) -> Self {
        Self { input, claims, claimed: VecDeque::new(), by_digest: HashMap::new(), total }
    }

    /// Claims rows until `enough` of them wait for a program, so that nobody else does them too.
    pub async fn claim(&mut self, context: &Context, schema: &SegmentSchema, enough: usize) {
        let count = enough.saturating_sub(self.claimed.len());
        let claimed = self.claims.claim(context, &self.input.digests, schema, count).await;
        self.total -= claimed.done as u64;
        claimed.rows.iter().for_each(|row| self.expect(*row));
        self.claimed.extend(claimed.rows);
    }

    /// Whether more should be claimed for programs that do not have to wait for it.
    pub fn is_low(&self, enough: usize) -> bool {
        self.may_grow() && self.claimed.len() < enough / 2
    }

    /// Whether there are rows that nobody was asked for yet.
    pub fn may_grow(&self) -> bool {
        !self.claims.is_over()
    }

    /// Whether every row has gone to a program, and no more can be claimed.
    pub fn is_over(&self) -> bool {
        self.claimed.is_empty() && self.claims.is_over()
    }

    /// How many rows no program has yet, claimed or not.
    pub fn left(&self) -> usize {
        self.claimed.len() + self.claims.left()
    }

    /// How many rows there are in all, but for those that others turned out to have done.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The next row for a program.
    pub fn next(&mut self) -> Option<usize> {
        self.claimed.pop_front()
    }

    /// The row of an answer, `None` where no program was given it.
    pub fn row(&self, digest: &str) -> Option<usize> {
        self.by_digest.get(digest).copied()
    }

    /// Lets a row be answered.
    pub fn expect(&mut self, row: usize) {
        self.by_digest.insert(self.input.digests[row].to_string(), row);
    }

    /// Gives no more rows to programs.
    pub fn stop(&mut self) {
        self.claimed.clear();
        self.claims.stop();
    }
}
