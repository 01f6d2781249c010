//! What identifies a result.
//!
//! A stage's key is a digest over its [`Preimage`]. The table in `ARCHITECTURE.md` lists what counts and what is
//! absent on purpose; the struct here is that table. The pre-image is kept with the record, so that a miss can say
//! why ([`MissReason`]).

pub mod canonical;
mod reason;

use std::collections::{BTreeMap, BTreeSet};

use cuda_agent_protocol::Device;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::digest::{Digest, context};
pub use reason::{ChangedParam, MissReason, difference};

/// The version of the pre-image; a change of meaning gets a new one.
///
/// 1. The first.
/// 2. Programs see a table's columns in an order, and may execute files: both count. Tables are handed out in one
///    layout, so results that were made with another one are not found again. Only pre-images with a table, or with
///    files of a command, are of this version; all others mean what they did, and their results stay.
pub const SCHEMA: u32 = 2;

/// Everything that can change a stage's result.
///
/// Fields are in the order of their names here and in what they hold, so that what serde writes is canonical JSON: the key
/// is digested over it, and records have the same text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preimage {
    /// What was measured on, for measured kinds.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "canonical::serialize")]
    pub device: Option<Device>,
    /// Declared environment variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Option<String>>,
    /// Files of the program that may be executed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub executable: BTreeSet<String>,
    /// By port.
    pub inputs: BTreeMap<String, InputIdentity>,
    /// The stage kind.
    pub kind: String,
    /// Declared outputs, for kinds that a pipeline declares itself.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "canonical::optional")]
    pub outputs: Option<Value>,
    /// Every parameter of the kind.
    #[serde(serialize_with = "canonical::map")]
    pub params: BTreeMap<String, Value>,
    /// What runs.
    pub program: ProgramIdentity,
    /// The by-row port, in a base key only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows_of: Option<String>,
    /// At most [`SCHEMA`]; see [`Preimage::versioned`].
    pub schema: u32,
    /// Names of secrets, never their values: a rotated token makes the same result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// Versions of what the program stands on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub toolchain: BTreeMap<String, String>,
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
        #[serde(serialize_with = "canonical::serialize")]
        command: Value,
        /// Digests of the declared files.
        files: BTreeMap<String, Digest>,
    },
}

/// What identifies an input, as far as the port reads it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputIdentity {
    /// A table: the columns that the port declares.
    Table {
        /// Number of rows.
        rows: u64,
        /// Name → type and digest.
        columns: BTreeMap<String, (String, Digest)>,
        /// Their names as programs see them; empty in version 1.
        #[serde(default)]
        order: Vec<String>,
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
    /// With the lowest version that says all of it, and no higher one than it has: what an older engine made is not of a
    /// newer version.
    pub fn versioned(mut self) -> Self {
        let has_files = matches!(&self.program, ProgramIdentity::Command { files, .. } if !files.is_empty());
        let needed = if has_files || self.inputs.values().any(InputIdentity::has_table) { SCHEMA } else { 1 };
        self.schema = self.schema.min(needed);
        self
    }

    /// Its canonical JSON.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a pre-image is plain data")
    }

    /// The key.
    pub fn key(&self) -> Digest {
        Self::key_of(&self.to_bytes())
    }

    /// The key, of canonical JSON.
    pub fn key_of(bytes: &[u8]) -> Digest {
        Digest::keyed(context::STAGE_KEY, bytes)
    }
}

/// As serde would write it, were a tag written in the order of names.
impl Serialize for InputIdentity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::Table { rows, columns, order } => {
                map.serialize_entry("columns", columns)?;
                if !order.is_empty() {
                    map.serialize_entry("order", order)?;
                }
                map.serialize_entry("rows", rows)?;
                map.serialize_entry("type", "table")?;
            }
            Self::Tree { digest } => {
                map.serialize_entry("digest", digest)?;
                map.serialize_entry("type", "tree")?;
            }
            Self::List { items } => {
                map.serialize_entry("items", items)?;
                map.serialize_entry("type", "list")?;
            }
            Self::Rows { columns } => {
                map.serialize_entry("columns", columns)?;
                map.serialize_entry("type", "rows")?;
            }
        }
        map.end()
    }
}

impl InputIdentity {
    fn has_table(&self) -> bool {
        match self {
            Self::Table { .. } => true,
            Self::List { items } => items.iter().any(Self::has_table),
            Self::Tree { .. } | Self::Rows { .. } => false,
        }
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
            schema: 1,
            kind: "ops/filter".into(),
            program: ProgramIdentity::Version("1.0.0".into()),
            executable: BTreeSet::new(),
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
                    order: vec!["a".into()],
                }],
            },
        );
        let text = serde_json::to_string(&preimage).unwrap();
        assert_eq!(serde_json::from_str::<Preimage>(&text).unwrap(), preimage);
    }

    fn table(names: &[&str]) -> InputIdentity {
        let columns = names.iter().map(|name| ((*name).to_owned(), ("utf8".to_owned(), Digest([1; 32]))));
        InputIdentity::Table {
            rows: 2,
            columns: columns.collect(),
            order: names.iter().map(|n| (*n).to_owned()).collect(),
        }
    }

    #[test]
    fn the_order_of_columns_and_the_executable_bit_count() {
        let of = |input: InputIdentity, executable: &[&str]| {
            let mut preimage = Preimage { schema: SCHEMA, ..sample() };
            preimage.inputs.insert("rows".into(), input);
            preimage.executable = executable.iter().map(|name| (*name).to_owned()).collect();
            preimage.versioned().key()
        };
        assert_ne!(of(table(&["a", "b"]), &[]), of(table(&["b", "a"]), &[]));
        assert_ne!(of(table(&["a"]), &[]), of(table(&["a"]), &["work.sh"]));
    }

    #[test]
    fn results_made_before_version_2_stay_where_nothing_of_it_is_in_them() {
        let now = Preimage { schema: SCHEMA, ..sample() }.versioned();
        assert_eq!(now.key(), sample().key(), "without a table");
        let mut lists = Preimage { schema: SCHEMA, ..sample() };
        lists.inputs.insert("rows".into(), InputIdentity::List { items: vec![table(&["a"])] });
        assert_eq!(lists.clone().versioned().schema, 2);
        assert_eq!(
            Preimage { schema: 1, ..lists }.versioned().schema,
            1,
            "what an older engine made stays what it was"
        );
        let command = |files: &[&str]| ProgramIdentity::Command {
            command: json!("x"),
            files: files.iter().map(|name| ((*name).to_owned(), Digest([1; 32]))).collect(),
        };
        let of = |program| Preimage { schema: SCHEMA, program, ..sample() }.versioned().schema;
        assert_eq!((of(command(&[])), of(command(&["x"]))), (1, 2));
    }

    fn name() -> impl Strategy<Value = String> {
        // Quotes, control characters and what comes after the letters in UTF-16 and not in UTF-8 are in it too.
        prop_oneof!["[a-z_]{1,4}", ".{0,3}", "[\u{e000}\u{10000}\"\\\\\n]{1,2}"]
    }

    fn digest() -> impl Strategy<Value = Digest> {
        any::<[u8; 32]>().prop_map(Digest)
    }

    fn map<T: std::fmt::Debug>(values: impl Strategy<Value = T>) -> impl Strategy<Value = BTreeMap<String, T>> {
        prop::collection::btree_map(name(), values, 0..3)
    }

    fn input() -> impl Strategy<Value = InputIdentity> {
        let leaf = prop_oneof![
            (any::<u64>(), map((name(), digest())), prop::collection::vec(name(), 0..3))
                .prop_map(|(rows, columns, order)| InputIdentity::Table { rows, columns, order }),
            digest().prop_map(|digest| InputIdentity::Tree { digest }),
            map(name()).prop_map(|columns| InputIdentity::Rows { columns }),
        ];
        leaf.prop_recursive(2, 6, 3, |inner| {
            prop::collection::vec(inner, 0..3).prop_map(|items| InputIdentity::List { items })
        })
    }

    fn program() -> impl Strategy<Value = ProgramIdentity> {
        prop_oneof![
            name().prop_map(ProgramIdentity::Version),
            map(digest()).prop_map(ProgramIdentity::Files),
            (canonical::tests::json(), map(digest()))
                .prop_map(|(command, files)| ProgramIdentity::Command { command, files }),
        ]
    }

    fn device() -> impl Strategy<Value = Device> {
        prop_oneof![
            name().prop_map(|model| Device::Cpu { model }),
            (name(), name()).prop_map(|(model, driver)| Device::Cuda { model, driver }),
        ]
    }

    prop_compose! {
        fn preimages()(
            device in prop::option::of(device()),
            env in map(prop::option::of(name())),
            executable in prop::collection::btree_set(name(), 0..3),
            inputs in map(input()),
            kind in name(),
            outputs in prop::option::of(canonical::tests::json()),
            params in map(canonical::tests::json()),
            program in program(),
            rows_of in prop::option::of(name()),
            (schema, secrets, toolchain) in (any::<u32>(), prop::collection::vec(name(), 0..3), map(name())),
        ) -> Preimage {
            let (device, outputs) = (device, outputs.filter(|outputs| !outputs.is_null()));
            Preimage {
                device, env, executable, inputs, kind, outputs, params, program, rows_of, schema, secrets, toolchain,
            }
        }
    }

    proptest! {
        /// Keys were digested over this form before serde wrote it at once.
        #[test]
        fn what_is_written_is_canonical_and_reads_back(preimage in preimages()) {
            let value: Value = serde_json::from_slice(&preimage.to_bytes()).unwrap();
            prop_assert_eq!(preimage.to_bytes(), canonical::to_bytes(&value));
            let back: Preimage = serde_json::from_value(canonical::tests::reversed(&value)).unwrap();
            prop_assert_eq!(back.key(), preimage.key());
            prop_assert_eq!(back, preimage);
        }

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
