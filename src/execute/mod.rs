//! Executing a pipeline, from the ground up:
//!
//! | file | what it is |
//! |---|---|
//! | `failure`, `stage_id`, `durations`, `folders`, `files`, `sample` | words that the others share |
//! | `launch`, `supervise`, `log`, `publish`, `secrets`, `work` | processes and files, knowing no job |
//! | `report`, `checkpoint_state`, `job` | one attempt at a stage: what it has, and what it reports |
//! | `program`, `attempt`, `checkpoint`, `events`, `exit`, `commit` | the steps of an attempt |
//! | `whole`, `by_row` | the two ways to execute a stage; `stage` chooses one |
//! | `executor` | where attempts are executed: on this machine, or by workers |
//! | `engine` | what a run needs, and what it came to |
//! | `run` | the loop |
//!
//! Each names those above it, and none below.

pub mod attempt;
mod by_row;
mod checkpoint;
mod checkpoint_state;
mod commit;
mod durations;
mod engine;
mod events;
pub mod executor;
mod exit;
mod failure;
mod files;
mod folders;
mod job;
pub mod launch;
pub mod log;
mod program;
pub mod publish;
mod report;
mod run;
mod sample;
pub mod secrets;
mod spare;
mod stage;
mod stage_id;
pub mod supervise;
mod whole;
mod work;

pub use durations::{seconds, seconds_of};
pub use engine::{Engine, Report};
pub use failure::{Explanation, Failure};
pub use folders::{file_name, live_log};
pub use sample::Sample;
pub use work::oldest_live;
