//! What identifies a result.
//!
//! A stage's key is a digest over its [`Preimage`]. The table in `ARCHITECTURE.md` lists what counts and what is
//! absent on purpose; the struct here is that table. The pre-image is kept with the record, so that a miss can say
//! why ([`MissReason`]).

pub mod canonical;
mod reason;

use std::collections::BTreeMap;

use cuda_agent_protocol::Device;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::digest::{Digest, context};
pub use reason::{MissReason, difference};

/// The version of the pre-image; a change of meaning gets a new one.
pub const SCHEMA: u32 = 1;

/// Everything that can change a stage's result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preimage {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The stage kind.
    pub kind: String,
    /// What runs.
    pub program: ProgramIdentity,
    /// Every parameter of the kind.
    pub params: BTreeMap<String, Value>,
    /// By port.
    pub inputs: BTreeMap<String, InputIdentity>,
    /// Declared outputs, for kinds that a pipeline declares itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outputs: Option<Value>,
    /// Declared environment variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Option<String>>,
    /// Names of secrets, never their values: a rotated token makes the same result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// Versions of what the program stands on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub toolchain: BTreeMap<String, String>,
    /// What was measured on, for measured kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Device>,
    /// The by-row port, in a base key only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows_of: Option<String>,
}

/// What runs: a released version, or the files themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramIdentity {
    /// A built-in kind whose sources match its lock.
    Version(String),
    /// Digests of the declared sources.
    Files(BTreeMap<String, Digest>),
    /// A command that the pipeline itself holds, and the files beside it.
    Command {
        /// The text or the words.
        command: Value,
        /// Digests of the declared files.
        files: BTreeMap<String, Digest>,
    },
}

/// What identifies an input, as far as the port reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputIdentity {
    /// A table: the columns that the port declares.
    Table {
        /// Number of rows.
        rows: u64,
        /// Name → type and digest.
        columns: BTreeMap<String, (String, Digest)>,
    },
    /// A file or folder.
    Tree {
        /// Its logical digest.
        digest: Digest,
    },
    /// What a list port took, in order.
    List {
        /// The inputs.
        items: Vec<InputIdentity>,
    },
    /// In a base key, what stands for the by-row port.
    Rows {
        /// Name → type of the columns that count.
        columns: BTreeMap<String, String>,
    },
}

impl Preimage {
    /// The key.
    pub fn key(&self) -> Digest {
        let value = serde_json::to_value(self).expect("a pre-image is plain data");
        Digest::keyed(context::STAGE_KEY, &canonical::to_bytes(&value))
    }
}

/// The seed of a row: from the stage's seed and the row's digest, never from its position.
pub fn row_seed(stage_seed: i64, row: &Digest) -> i64 {
    let mut hasher = Digest::hasher(context::ROW_SEED);
    hasher.update(&stage_seed.to_le_bytes());
    hasher.update(&row.0);
    let first: [u8; 8] = Digest::finish(&hasher).0[..8].try_into().expect("a digest has 32 bytes");
    (u64::from_le_bytes(first) >> 1) as i64
}

#[cfg(test)]
mod reason_test;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    pub(super) fn sample() -> Preimage {
        Preimage {
            schema: SCHEMA,
            kind: "ops/filter".into(),
            program: ProgramIdentity::Version("1.0.0".into()),
            params: BTreeMap::from([("limit".into(), json!(3)), ("name".into(), json!("x"))]),
            inputs: BTreeMap::from([("rows".into(), InputIdentity::Tree { digest: Digest([7; 32]) })]),
            outputs: None,
            env: BTreeMap::new(),
            secrets: Vec::new(),
            toolchain: BTreeMap::from([("python".into(), "3.11.7".into())]),
            device: None,
            rows_of: None,
        }
    }

    /// The layout of keys is a format: a change here makes every published artifact unfindable.
    #[test]
    fn the_key_of_a_known_preimage_stays() {
        insta::assert_snapshot!(sample().key().to_string());
        let bytes = canonical::to_bytes(&serde_json::to_value(sample()).unwrap());
        insta::assert_snapshot!(String::from_utf8(bytes).unwrap());
    }

    /// Programs draw from it, so row results stand on its value.
    #[test]
    fn the_seed_of_a_known_row_stays() {
        assert_eq!(row_seed(7, &Digest([1; 32])), 7_291_074_529_911_928_608);
    }

    #[test]
    fn a_preimage_reads_back() {
        let mut preimage = sample();
        preimage.device = Some(Device::Cpu { model: "X".into() });
        preimage.program = ProgramIdentity::Command { command: json!(["a"]), files: BTreeMap::new() };
        preimage.inputs.insert(
            "many".into(),
            InputIdentity::List {
                items: vec![InputIdentity::Table {
                    rows: 2,
                    columns: BTreeMap::from([("a".into(), ("utf8".into(), Digest([1; 32])))]),
                }],
            },
        );
        let text = serde_json::to_string(&preimage).unwrap();
        assert_eq!(serde_json::from_str::<Preimage>(&text).unwrap(), preimage);
    }

    proptest! {
        #[test]
        fn any_changed_parameter_changes_the_key(value in canonical::tests::json()) {
            let (mut a, mut b) = (sample(), sample());
            a.params.insert("p".into(), value.clone());
            prop_assert_ne!(a.key(), b.key());
            b.params.insert("p".into(), value);
            prop_assert_eq!(a.key(), b.key());
        }

        #[test]
        fn a_row_seed_is_of_its_row_and_its_stage(stage in any::<i64>(), row in any::<[u8; 32]>(), byte in 0usize..32) {
            let mut other = row;
            other[byte] ^= 1;
            let seed = row_seed(stage, &Digest(row));
            prop_assert_eq!(seed, row_seed(stage, &Digest(row)));
            prop_assert_ne!(seed, row_seed(stage, &Digest(other)));
            prop_assert_ne!(seed, row_seed(stage.wrapping_add(1), &Digest(row)));
        }

        #[test]
        fn row_seeds_fit_every_language(stage in any::<i64>(), row in any::<[u8; 32]>()) {
            prop_assert!(row_seed(stage, &Digest(row)) >= 0);
        }
    }
}
