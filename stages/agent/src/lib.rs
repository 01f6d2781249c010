//! What a language model does with a task: policies that answer, episodes that ask, trajectories that record.
