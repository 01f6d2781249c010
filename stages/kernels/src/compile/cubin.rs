//! What a `kernel` candidate declares, read out of its machine code.
//!
//! `TASK_LAUNCH` and `TASK_SCRATCH` make constant objects (`headers/task_machinery.h`), so nothing that the candidate computes
//! at run time can change what is launched. Everything is checked once more here: a candidate may write such objects itself.

use std::collections::BTreeMap;

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection, ObjectSymbol, SymbolKind, SymbolSection};

use super::names::{demangle, line_of_word};
use super::{DeclaredLaunch, Diagnostic, KernelResources, resources};

/// Shared memory that a block can have, in bytes.
const SHARED_BYTES: u64 = 227 * 1024;

/// Threads that a block can have.
const THREADS: u64 = 1024;

/// The symbol of a `__managed__` variable has this bit of `st_other`.
const STO_CUDA_MANAGED: u8 = 0x04;

/// An entry of `.nv.info.<kernel>` that describes one parameter.
const EIATTR_KPARAM_INFO: u8 = 0x17;

/// What a candidate declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// In the order of the source.
    pub launches: Vec<DeclaredLaunch>,
    /// Bytes of scratch memory.
    pub scratch_bytes: u64,
    /// Of each kernel.
    pub resources: Vec<KernelResources>,
}

/// Reads a candidate's declarations. `tensors` is how many arguments every kernel takes at least; the log ends with what
/// ptxas says.
pub fn declared(cubin: &[u8], log: &str, source: &str, tensors: u32) -> Result<Declared, Vec<Diagnostic>> {
    let file =
        ElfFile64::<Endianness>::parse(cubin).map_err(|error| vec![nowhere(format!("the machine code: {error}"))])?;
    let resources = resources::of_module(&file, &resources::spills(resources::said_by_ptxas(log)));
    let module = Module::read(&file, &resources);
    if let Some(variable) = &module.managed {
        let message = format!("{variable} is __managed__: managed memory can take a whole host's GPUs out of service");
        return Err(vec![Diagnostic { line: line_of_word(source, "__managed__"), column: None, message }]);
    }
    if module.records.is_empty() {
        let line = line_of_word(source, "__global__");
        let message = "nothing is launched: add TASK_LAUNCH(kernel, grid, block) at file scope".to_owned();
        return Err(vec![Diagnostic { line, column: None, message }]);
    }
    let scratch_bytes = module.scratch_bytes;
    let (launches, faults): (Vec<_>, Vec<_>) =
        module.records.iter().map(|record| module.launch(record, tensors)).partition(Result::is_ok);
    let faults: Vec<Diagnostic> = faults.into_iter().filter_map(Result::err).collect();
    if !faults.is_empty() {
        return Err(faults);
    }
    let resources = resources.into_iter().map(|(_, kernel)| kernel).collect();
    Ok(Declared { launches: launches.into_iter().flatten().collect(), scratch_bytes, resources })
}

fn nowhere(message: String) -> Diagnostic {
    Diagnostic { line: None, column: None, message }
}

/// One `TASK_LAUNCH`.
struct Record {
    kernel: String,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    arguments: u32,
    line: u32,
}

impl Record {
    /// `struct Launch` of `headers/task_machinery.h`: 64 bytes of name, then nine numbers.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (name, rest) = bytes.split_at_checked(64)?;
        let kernel = String::from_utf8(name.split(|byte| *byte == 0).next()?.to_vec()).ok()?;
        let numbers: Vec<u32> =
            rest.chunks_exact(4).filter_map(|four| Some(u32::from_le_bytes(four.try_into().ok()?))).collect();
        let &[gx, gy, gz, bx, by, bz, shared_bytes, arguments, line] = numbers.as_slice() else { return None };
        Some(Self { kernel, grid: [gx, gy, gz], block: [bx, by, bz], shared_bytes, arguments, line })
    }

    fn fault(&self, message: impl std::fmt::Display) -> Diagnostic {
        let message = format!("TASK_LAUNCH({}): {message}", self.kernel);
        Diagnostic { line: Some(self.line), column: None, message }
    }

    fn size_fault(&self) -> Option<Diagnostic> {
        let threads: u64 = self.block.iter().map(|&size| u64::from(size)).product();
        if self.grid.contains(&0) || self.grid[0] > i32::MAX as u32 || self.grid[1].max(self.grid[2]) > 65_535 {
            return Some(self.fault(format!("there is no grid of {:?} blocks", self.grid)));
        }
        let fits =
            (1..=THREADS).contains(&threads) && self.block.iter().all(|&size| size <= 1024) && self.block[2] <= 64;
        (!fits).then(|| self.fault(format!("there is no block of {:?} threads", self.block)))
    }
}

/// A `__global__` function of the module.
struct Kernel {
    symbol: String,
    name: String,
    static_shared_bytes: u64,
    parameters: u32,
}

struct Module {
    kernels: Vec<Kernel>,
    records: Vec<Record>,
    scratch_bytes: u64,
    managed: Option<String>,
}

type File<'a> = ElfFile64<'a, Endianness>;

impl Module {
    fn read(file: &File, resources: &[(String, KernelResources)]) -> Self {
        let mut records: BTreeMap<u32, Record> = BTreeMap::new();
        let mut module = Self { kernels: Vec::new(), records: Vec::new(), scratch_bytes: 0, managed: None };
        for symbol in file.symbols() {
            let (Ok(name), other) = (symbol.name(), symbol.elf_symbol().st_other) else { continue };
            if resources::is_kernel(&symbol) && symbol.is_global() {
                module.kernels.push(kernel(file, name, resources));
            } else if symbol.kind() == SymbolKind::Data && other & STO_CUDA_MANAGED != 0 {
                module.managed = Some(demangle(name));
            } else if name.starts_with("task_launch_") {
                let record = contents(file, &symbol).and_then(Record::parse);
                records.extend(record.map(|record| (record.line, record)));
            } else if name == "task_scratch_bytes" {
                let bytes = contents(file, &symbol).and_then(|bytes| bytes.try_into().ok());
                module.scratch_bytes = bytes.map_or(0, u64::from_le_bytes);
            }
        }
        module.records = records.into_values().collect();
        module
    }

    fn launch(&self, record: &Record, tensors: u32) -> Result<DeclaredLaunch, Diagnostic> {
        let kernel = self.resolve(record)?;
        if let Some(fault) = record.size_fault() {
            return Err(fault);
        }
        let shared = kernel.static_shared_bytes + u64::from(record.shared_bytes);
        if shared > SHARED_BYTES {
            let message =
                format!("{shared} bytes of shared memory (static and dynamic together), {SHARED_BYTES} at most");
            return Err(record.fault(message));
        }
        let fits = (tensors..=tensors + 1).contains(&record.arguments) && kernel.parameters == record.arguments;
        if !fits {
            return Err(record.fault(format!("the kernel takes {} arguments, not {tensors}", kernel.parameters)));
        }
        let Record { grid, block, shared_bytes, arguments, .. } = *record;
        Ok(DeclaredLaunch { symbol: kernel.symbol.clone(), grid, block, shared_bytes, arguments })
    }

    fn resolve(&self, record: &Record) -> Result<&Kernel, Diagnostic> {
        let named = |kernel: &&Kernel| kernel.symbol == record.kernel || kernel.name == record.kernel;
        let mut found = self.kernels.iter().filter(named);
        match (found.next(), found.next()) {
            (Some(kernel), None) => Ok(kernel),
            (Some(_), Some(_)) => Err(record.fault("several kernels have this name: give each its own")),
            (None, _) if record.kernel.contains('<') => {
                Err(record.fault("a template can't be launched here: call it from a plain __global__ function"))
            }
            (None, _) => {
                Err(record.fault("there is no such kernel: it must be a plain, non-static __global__ function"))
            }
        }
    }
}

fn kernel(file: &File, symbol: &str, resources: &[(String, KernelResources)]) -> Kernel {
    let own = resources.iter().find(|(name, _)| name == symbol);
    let info = resources::info(file, &format!(".nv.info.{symbol}"));
    Kernel {
        symbol: symbol.to_owned(),
        name: demangle(symbol),
        static_shared_bytes: own.map_or(0, |(_, resources)| u64::from(resources.shared_bytes)),
        parameters: parameters(info),
    }
}

/// Counts the entries for parameters.
fn parameters(info: &[u8]) -> u32 {
    let count = resources::attributes(info).filter(|(attribute, _)| *attribute == EIATTR_KPARAM_INFO).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The bytes of a symbol. In a cubin, sections have the address zero and symbols are offsets into theirs.
fn contents<'a, S: ObjectSymbol<'a>>(file: &File<'a>, symbol: &S) -> Option<&'a [u8]> {
    let SymbolSection::Section(index) = symbol.section() else { return None };
    let section = file.section_by_index(index).ok()?;
    let start = usize::try_from(symbol.address().checked_sub(section.address())?).ok()?;
    let length = usize::try_from(symbol.size()).ok()?;
    section.data().ok()?.get(start..start.checked_add(length)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn no_bytes_are_too_odd(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            proptest::prop_assert!(declared(&bytes, "", "", 2).is_err());
            parameters(&bytes);
        }
    }

    #[test]
    fn a_record_has_its_layout() {
        let mut bytes = vec![0_u8; 64];
        bytes[..4].copy_from_slice(b"relu");
        bytes.extend((1_u32..=9).flat_map(u32::to_le_bytes));
        let record = Record::parse(&bytes).unwrap();
        assert_eq!((record.kernel.as_str(), record.grid, record.block), ("relu", [1, 2, 3], [4, 5, 6]));
        assert_eq!((record.shared_bytes, record.arguments, record.line), (7, 8, 9));
        assert!(Record::parse(&bytes[1..]).is_none());
        assert!(record.size_fault().is_none());
    }
}
