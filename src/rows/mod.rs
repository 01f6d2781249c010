//! Results of single rows: segments in the store, finding what is there, and putting a stage's tables together.
//!
//! A row is known by the digest of the columns that the program reads, filed under the stage's base key, so order,
//! duplicates and other columns never matter. Formats are in `ARCHITECTURE.md`.

pub mod assembly;
pub mod index;
pub mod input;
pub mod journal;
pub mod segment;

pub use index::RowIndex;
pub use input::InputRows;
pub use segment::{RowOutcome, SegmentSchema};
