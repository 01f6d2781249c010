//! The training stages: model, sampler, RFT, critic pre-training and PPO.
//!
//! Without the feature `torch` this crate is the kinds' manifests and what starts the program `cuda-agent-train`, and
//! the binary `cuda-agent` links that much. With it (`make train-tools`) it is the program, the only one that links
//! libtorch.

#[cfg(feature = "torch")]
pub mod algorithm;
#[cfg(feature = "torch")]
pub mod bench;
mod catalog;
#[cfg(feature = "torch")]
pub mod checkpoint;
#[cfg(feature = "torch")]
mod error;
#[cfg(feature = "torch")]
pub mod group;
pub mod launch;
#[cfg(feature = "torch")]
pub mod model;
#[cfg(feature = "torch")]
pub mod optimizer;
#[cfg(feature = "torch")]
pub mod random;
#[cfg(feature = "torch")]
pub mod sampler;
#[cfg(feature = "torch")]
pub mod stage;
#[cfg(feature = "torch")]
pub mod text;
#[cfg(feature = "torch")]
pub mod trainer;

pub use self::catalog::builtin;

#[cfg(feature = "torch")]
pub use self::error::TrainError;
