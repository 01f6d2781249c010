//! What a recording needs to know of a candidate's machine code: its kernels with their parameters, and its variables.

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection, ObjectSymbol, SymbolKind, SymbolSection};

use super::super::resources::{self, Spills};

/// Entries of `.nv.info.<kernel>`.
const EIATTR_MAX_THREADS: u8 = 0x05;
const EIATTR_KPARAM_INFO: u8 = 0x17;
/// Parameters that EIATTR_KPARAM_INFO has no room for.
const EIATTR_KPARAM_INFO_V2: u8 = 0x45;

/// The symbol of a `__managed__` variable has this bit of `st_other`.
const STO_CUDA_MANAGED: u8 = 0x04;

/// A kernel takes at most this much, in bytes.
const MOST_PARAMETER_BYTES: u32 = 32_764;

/// A module as its recording sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineCode {
    /// In the order of the symbols.
    pub kernels: Vec<KernelFacts>,
    /// Likewise: symbol and size in bytes.
    pub variables: Vec<(String, u64)>,
}

/// One kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFacts {
    /// As the driver finds it.
    pub symbol: String,
    /// A thread.
    pub registers: u32,
    /// Static, of a block.
    pub shared_bytes: u32,
    /// Of a thread.
    pub local_bytes: u32,
    /// Of a block: what `__launch_bounds__` says, else what every GPU has.
    pub max_threads: u32,
    /// Offset and size of each, in bytes.
    pub parameters: Vec<[u32; 2]>,
}

impl KernelFacts {
    /// All of its parameters, with the gaps between.
    pub fn parameter_bytes(&self) -> u32 {
        self.parameters.iter().map(|[offset, size]| offset + size).max().unwrap_or(0)
    }
}

impl MachineCode {
    /// Of a cubin.
    pub fn read(cubin: &[u8]) -> Result<Self, String> {
        let file = ElfFile64::<Endianness>::parse(cubin).map_err(|error| format!("the machine code: {error}"))?;
        let mut kernels = Vec::new();
        for (symbol, taken) in resources::of_module(&file, &Spills::new()) {
            let info = resources::info(&file, &format!(".nv.info.{symbol}"));
            let parameters = parameters(info).map_err(|why| format!("{}: {why}", taken.kernel))?;
            kernels.push(KernelFacts {
                registers: taken.registers,
                shared_bytes: taken.shared_bytes,
                local_bytes: taken.local_bytes,
                max_threads: max_threads(info).unwrap_or(1024),
                parameters,
                symbol,
            });
        }
        let is_variable = |symbol: &object::read::elf::ElfSymbol64<'_, '_, Endianness>| {
            let SymbolSection::Section(index) = symbol.section() else { return false };
            let section = file.section_by_index(index);
            let name = section.as_ref().ok().and_then(|section| section.name().ok()).unwrap_or_default();
            // `.nv.constant0.<kernel>` and the like are parameters and literals.
            let is_memory = name.starts_with(".nv.global") || name == ".nv.constant3";
            symbol.kind() == SymbolKind::Data && symbol.size() > 0 && is_memory
        };
        let variables = file.symbols().filter(is_variable);
        let variables = variables.filter_map(|symbol| Some((symbol.name().ok()?.to_owned(), symbol.size()))).collect();
        Ok(Self { kernels, variables })
    }

    /// The name of a managed variable, if there is one.
    pub fn managed(cubin: &[u8]) -> Option<String> {
        let file = ElfFile64::<Endianness>::parse(cubin).ok()?;
        let managed = file
            .symbols()
            .find(|symbol| symbol.kind() == SymbolKind::Data && symbol.elf_symbol().st_other & STO_CUDA_MANAGED != 0);
        managed.and_then(|symbol| symbol.name().ok().map(str::to_owned))
    }
}

/// Twelve bytes each: an index, the ordinal, the offset, and the size from the nineteenth bit on.
fn parameters(info: &[u8]) -> Result<Vec<[u32; 2]>, String> {
    let mut found: Vec<(u16, [u32; 2])> = Vec::new();
    for (attribute, value) in resources::attributes(info) {
        match (attribute, value) {
            (EIATTR_KPARAM_INFO, [_, _, _, _, o0, o1, f0, f1, bits @ ..]) => {
                let bits = bits.first_chunk().map_or(0, |bits| u32::from_le_bytes(*bits));
                let offset = u32::from(u16::from_le_bytes([*f0, *f1]));
                found.push((u16::from_le_bytes([*o0, *o1]), [offset, bits >> 18]));
            }
            (EIATTR_KPARAM_INFO | EIATTR_KPARAM_INFO_V2, _) => {
                return Err("a parameter is too large to be recorded".to_owned());
            }
            _ => {}
        }
    }
    found.sort_unstable();
    let is_in_order = found.iter().enumerate().all(|(index, (ordinal, _))| index == usize::from(*ordinal));
    let fits = found.iter().all(|(_, [offset, size])| *size > 0 && offset + size <= MOST_PARAMETER_BYTES);
    match is_in_order && fits {
        true => Ok(found.into_iter().map(|(_, place)| place).collect()),
        false => Err("its parameters can't be told from the machine code".to_owned()),
    }
}

/// Threads that `__launch_bounds__` names, over all three dimensions.
fn max_threads(info: &[u8]) -> Option<u32> {
    let (_, value) = resources::attributes(info).find(|(attribute, _)| *attribute == EIATTR_MAX_THREADS)?;
    let sizes = value.chunks_exact(4).filter_map(|four| Some(u32::from_le_bytes(four.try_into().ok()?)));
    sizes.take(3).try_fold(1_u32, u32::checked_mul)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry of `.nv.info`.
    fn entry(attribute: u8, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(value.len()).unwrap().to_le_bytes();
        [&[4, attribute], &length[..], value].concat()
    }

    fn parameter(ordinal: u16, offset: u16, size: u32) -> Vec<u8> {
        let bits = (size << 18) | 0x1f000;
        let value = [&[0; 4], &ordinal.to_le_bytes()[..], &offset.to_le_bytes(), &bits.to_le_bytes()].concat();
        entry(EIATTR_KPARAM_INFO, &value)
    }

    #[test]
    fn parameters_are_read_in_their_order() {
        let info = [parameter(1, 8, 4), entry(EIATTR_MAX_THREADS, &[64, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0])].concat();
        let info = [info, parameter(0, 0, 8)].concat();
        assert_eq!(parameters(&info).unwrap(), [[0, 8], [8, 4]]);
        assert_eq!(max_threads(&info), Some(128));
        assert!(parameters(&parameter(1, 0, 8)).is_err(), "the first one is missing");
        assert!(parameters(&parameter(0, 60_000, 8)).is_err());
        assert!(parameters(&entry(EIATTR_KPARAM_INFO_V2, &[0; 16])).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_are_too_odd(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            proptest::prop_assert!(MachineCode::read(&bytes).is_err());
            let _ = parameters(&bytes);
            max_threads(&bytes);
        }
    }
}
