//! Which stage of a pipeline is meant.

/// A stage of the pipeline that is run: its index among the pipeline's stages, by which the planner and the scheduler count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageId(pub usize);
