//! What a candidate starts, as data: launches, fills and copies in their order, with addresses that are relative to the
//! task's tensors, the scratch buffer and the variables of the machine code.
//!
//! A `kernel` candidate declares its launches; what the host function of a `launch` candidate starts was recorded
//! (`compile/recorder`). The runner replays either in the same way, and no host code of a candidate runs where a GPU is.

use serde::{Deserialize, Serialize};

use crate::compile::DeclaredLaunch;

/// What is started, on one stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The kernels that are launched.
    pub kernels: Vec<Kernel>,
    /// Variables of the machine code whose addresses are needed, by symbol.
    pub variables: Vec<String>,
    /// In order.
    pub steps: Vec<Step>,
}

/// A kernel, and what is set for all of its launches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Its symbol in the machine code.
    pub symbol: String,
    /// Attributes of the function, each once.
    pub attributes: Vec<(KernelAttribute, i32)>,
    /// Where its parameters lie: offset and size of each, in bytes.
    pub parameters: Vec<[u32; 2]>,
}

/// What can be set for a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelAttribute {
    /// Bytes of dynamic shared memory that a launch may ask for.
    MaxDynamicShared,
    /// Percent of the L1 cache that are to be shared memory; -1 leaves it to the driver.
    Carveout,
    /// Whether clusters may have more than eight blocks.
    NonPortableCluster,
}

/// One piece of work. Pitches, widths and offsets are in bytes; what is filled or copied is `height` rows of `width`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// A kernel.
    Launch(Launch),
    /// Every byte gets the same value.
    Fill {
        /// The first row.
        to: Address,
        /// From row to row.
        pitch: u64,
        /// The byte.
        value: u8,
        /// Of a row.
        width: u64,
        /// Rows.
        height: u64,
    },
    /// From one place of the GPU to another.
    Copy {
        /// The first row that is written.
        to: Address,
        /// From row to row there.
        to_pitch: u64,
        /// The first row that is read.
        from: Address,
        /// From row to row there.
        from_pitch: u64,
        /// Of a row.
        width: u64,
        /// Rows.
        height: u64,
    },
    /// From the host.
    Write {
        /// The first row.
        to: Address,
        /// From row to row.
        pitch: u64,
        /// Of a row.
        width: u64,
        /// The rows, one after another.
        bytes: Bytes,
    },
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Which of the program's kernels.
    pub kernel: usize,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
    /// What else it asks for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attributes: Vec<LaunchAttribute>,
    /// The parameters, laid out as the kernel takes them.
    pub parameters: Bytes,
}

/// What a launch may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchAttribute {
    /// All blocks run at a time.
    Cooperative,
    /// Blocks of a cluster.
    Cluster([u32; 3]),
    /// How clusters are spread: the driver's number.
    ClusterScheduling(u32),
    /// May begin before the launch before it has ended.
    ProgrammaticSerialization,
    /// Percent of the L1 cache.
    Carveout(u32),
}

/// Bytes, and which of them are addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// Zero where an address goes.
    #[serde(with = "hex::serde")]
    pub data: Vec<u8>,
    /// In the order of their places; they do not overlap.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Relocation>,
}

/// Eight bytes that are an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocation {
    /// Where they begin.
    pub at: u32,
    /// Little-endian.
    pub address: Address,
}

/// An address that follows from where something lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// What it is in, or beside.
    pub of: Place,
    /// From its start; kernels may be given addresses before it or after its end.
    pub offset: i64,
}

/// Something that lies at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// One of the task's tensors in the order of its arguments; the scratch buffer is the last.
    Argument(usize),
    /// One of the program's variables.
    Variable(usize),
}

impl Bytes {
    /// With the addresses put in.
    pub fn resolved(&self, address_of: impl Fn(Address) -> u64) -> Vec<u8> {
        let mut bytes = self.data.clone();
        for relocation in &self.addresses {
            let start = relocation.at as usize;
            if let Some(place) = bytes.get_mut(start..start + 8) {
                place.copy_from_slice(&address_of(relocation.address).to_le_bytes());
            }
        }
        bytes
    }
}

impl Program {
    /// Of what a `kernel` candidate declares: each kernel takes the task's tensors, and perhaps the scratch buffer.
    pub fn declared(launches: &[DeclaredLaunch]) -> Self {
        let mut program = Self::default();
        for launch in launches {
            let kernel = program.kernel_of(launch);
            let addresses = (0..launch.arguments).map(|index| Relocation {
                at: 8 * index,
                address: Address { of: Place::Argument(index as usize), offset: 0 },
            });
            let parameters = Bytes { data: vec![0; 8 * launch.arguments as usize], addresses: addresses.collect() };
            program.steps.push(Step::Launch(Launch {
                kernel,
                grid: launch.grid,
                block: launch.block,
                shared_bytes: launch.shared_bytes,
                attributes: Vec::new(),
                parameters,
            }));
        }
        program
    }

    fn kernel_of(&mut self, launch: &DeclaredLaunch) -> usize {
        let known = self.kernels.iter().position(|kernel| kernel.symbol == launch.symbol);
        let index = known.unwrap_or_else(|| {
            let parameters = (0..launch.arguments).map(|index| [8 * index, 8]).collect();
            self.kernels.push(Kernel { symbol: launch.symbol.clone(), attributes: Vec::new(), parameters });
            self.kernels.len() - 1
        });
        let attributes = &mut self.kernels[index].attributes;
        let most = launch.shared_bytes.cast_signed();
        match attributes.first_mut() {
            Some((_, value)) => *value = most.max(*value),
            // So much a block may have without being asked for.
            None if launch.shared_bytes > 48 << 10 => attributes.push((KernelAttribute::MaxDynamicShared, most)),
            None => {}
        }
        index
    }

    /// The launches among its steps, each with its kernel.
    pub fn launches(&self) -> impl Iterator<Item = (&Kernel, &Launch)> {
        self.steps.iter().filter_map(|step| match step {
            Step::Launch(launch) => Some((self.kernels.get(launch.kernel)?, launch)),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(symbol: &str, shared_bytes: u32) -> DeclaredLaunch {
        DeclaredLaunch { symbol: symbol.into(), grid: [2, 1, 1], block: [32, 1, 1], shared_bytes, arguments: 3 }
    }

    #[test]
    fn declared_launches_take_every_argument_and_share_their_kernels() {
        let program = Program::declared(&[declared("a", 50_000), declared("b", 0), declared("a", 60_000)]);
        assert_eq!(program.kernels.len(), 2);
        assert_eq!(program.kernels[0].attributes, [(KernelAttribute::MaxDynamicShared, 60_000)]);
        assert!(program.kernels[1].attributes.is_empty());
        let Step::Launch(last) = &program.steps[2] else { panic!("{program:?}") };
        let bytes = last.parameters.resolved(|address| match address.of {
            Place::Argument(index) => 0x100 * (index as u64 + 1),
            Place::Variable(_) => 0,
        });
        assert_eq!(bytes, [0x100_u64, 0x200, 0x300].map(u64::to_le_bytes).concat());
    }

    proptest::proptest! {
        #[test]
        fn bytes_survive_their_text(data in proptest::collection::vec(proptest::num::u8::ANY, 0..40)) {
            let bytes = Bytes { data, addresses: Vec::new() };
            let text = serde_json::to_string(&bytes).unwrap();
            proptest::prop_assert_eq!(serde_json::from_str::<Bytes>(&text).unwrap(), bytes);
        }
    }

    #[test]
    fn half_a_byte_is_none() {
        for text in ["\"a\"", "\"0g\"", "\"é\""] {
            let text = format!("{{\"data\": {text}}}");
            assert!(serde_json::from_str::<Bytes>(&text).is_err(), "{text}");
        }
    }
}
