//! What each kernel takes of a multiprocessor.
//!
//! A log has the messages of the compiler's front end too, and a source decides what these are (`#pragma message`), so
//! nothing that counts is read from it: registers, shared memory and stack come from the machine code, where ptxas wrote
//! them. Bytes spilled are in no machine code; they come from what ptxas says ([`spills`]), and are told, but cost nothing.

use std::collections::HashMap;

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection, ObjectSymbol, SymbolKind};

use super::KernelResources;
use super::names::demangle;

/// The symbol of a `__global__` function has this bit of `st_other`.
const STO_CUDA_ENTRY: u8 = 0x10;

/// Entries of `.nv.info` that have a symbol's number and a value.
const EIATTR_FRAME_SIZE: u8 = 0x11;
const EIATTR_REGCOUNT: u8 = 0x2f;

/// The driver's own share of every block's shared memory, which sections of the machine code count where this section is.
const RESERVED_SHARED: &str = ".nv.shared.reserved.0";
const RESERVED_SHARED_BYTES: u64 = 1024;

type File<'a> = ElfFile64<'a, Endianness>;

/// Bytes of registers that are stored and loaded, by a kernel's symbol.
pub type Spills = HashMap<String, (u32, u32)>;

/// The kernels of a module with their symbols, in its order.
pub fn of_module(file: &File, spills: &Spills) -> Vec<(String, KernelResources)> {
    let values = |attribute| by_symbol(info(file, ".nv.info"), attribute);
    let (registers, frames) = (values(EIATTR_REGCOUNT), values(EIATTR_FRAME_SIZE));
    let of_symbol = |values: &HashMap<u32, u32>, index: usize| {
        u32::try_from(index).ok().and_then(|index| values.get(&index)).copied().unwrap_or(0)
    };
    let kernels = file.symbols().filter(is_kernel).filter_map(|symbol| Some((symbol.index().0, symbol.name().ok()?)));
    let described = kernels.map(|(index, name)| {
        let local_bytes = of_symbol(&frames, index);
        // What has no stack has nothing to spill to.
        let spilled = spills.get(name).copied().filter(|_| local_bytes > 0);
        let (spill_store_bytes, spill_load_bytes) = spilled.unwrap_or_default();
        let resources = KernelResources {
            kernel: demangle(name),
            registers: of_symbol(&registers, index),
            shared_bytes: shared_bytes(file, name),
            local_bytes,
            spill_store_bytes,
            spill_load_bytes,
        };
        (name.to_owned(), resources)
    });
    described.collect()
}

/// Whether a symbol is a `__global__` function, `static` ones included.
pub fn is_kernel<'a>(symbol: &object::read::elf::ElfSymbol64<'a, '_, Endianness>) -> bool {
    symbol.kind() == SymbolKind::Text && symbol.elf_symbol().st_other & STO_CUDA_ENTRY != 0
}

fn shared_bytes(file: &File, symbol: &str) -> u32 {
    let size = file.section_by_name(&format!(".nv.shared.{symbol}")).map_or(0, |section| section.size());
    let reserved = file.section_by_name(RESERVED_SHARED).map_or(0, |_| RESERVED_SHARED_BYTES);
    u32::try_from(size.saturating_sub(reserved)).unwrap_or(u32::MAX)
}

/// The entries of a section of attributes.
pub fn info<'a>(file: &File<'a>, section: &str) -> &'a [u8] {
    file.section_by_name(section).and_then(|section| section.data().ok()).unwrap_or_default()
}

/// Each entry is a format, an attribute, and two bytes that are a value or the length of what follows.
pub fn attributes(mut info: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    const WITH_LENGTH: u8 = 4;
    std::iter::from_fn(move || {
        let [format, attribute, low, high, rest @ ..] = info else { return None };
        let length = if *format == WITH_LENGTH { usize::from(u16::from_le_bytes([*low, *high])) } else { 0 };
        let (value, after) = rest.split_at_checked(length).unwrap_or_default();
        info = after;
        Some((*attribute, value))
    })
}

fn by_symbol(info: &[u8], wanted: u8) -> HashMap<u32, u32> {
    let number = |bytes: &[u8]| bytes.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    let found = attributes(info).filter(|(attribute, _)| *attribute == wanted);
    found.filter_map(|(_, value)| Some((number(value)?, number(value.get(4..)?)?))).collect()
}

/// What ptxas says last of all in a log: what is before its first line there is the front end's, or quotes the source.
pub fn said_by_ptxas(log: &str) -> &str {
    let mut start = log.len();
    let mut at = 0;
    for line in log.split_inclusive('\n') {
        if line.starts_with("ptxas info ") && line.contains(" bytes gmem") {
            start = at;
        }
        at += line.len();
    }
    &log[start..]
}

/// What `ptxas -v` says of spilling, in a text that is its own.
pub fn spills(own: &str) -> Spills {
    let mut spills = Spills::new();
    let mut described = "";
    for line in own.lines() {
        if let Some((_, symbol)) = line.split_once("Function properties for ") {
            described = symbol.trim();
        } else if line.contains(" bytes stack frame") {
            let bytes = (number_before(line, " bytes spill stores"), number_before(line, " bytes spill loads"));
            spills.entry(described.to_owned()).or_insert(bytes);
        }
    }
    spills
}

/// The first kernel whose shared memory is more than `most`, in the log of a compiler that made nothing, and how much it
/// is. Only good for a message.
pub fn greedy(log: &str, most: u32) -> Option<(String, u32)> {
    let mut kernel = "";
    for line in log.lines() {
        if let Some(symbol) = quoted_after(line, "Compiling entry function '") {
            kernel = symbol;
        } else if line.contains("Used ") && number_before(line, " bytes smem") > most {
            return Some((demangle(kernel), number_before(line, " bytes smem")));
        }
    }
    None
}

/// What is not mentioned is not used.
fn number_before(line: &str, unit: &str) -> u32 {
    let before = line.split_once(unit).map(|(before, _)| before);
    before.and_then(|before| before.rsplit([' ', ',', ':']).next()).and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn quoted_after<'a>(line: &'a str, start: &str) -> Option<&'a str> {
    line.split_once(start)?.1.split_once('\'').map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_are_the_kernels_own() {
        let log = "candidate.cu(1): remark #20200-D: #pragma message: \"\n\
            ptxas info    : 0 bytes gmem\n\
            ptxas info    : Function properties for _Z4reluPKfPf\n    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            \"\nptxas warning : Pragma 'ptxas info    : 0 bytes gmem' unsupported\n\
            ptxas info    : 0 bytes gmem, 8 bytes cmem[4]\n\
            ptxas info    : Compiling entry function '_Z4reluPKfPf' for 'sm_90'\n\
            ptxas info    : Function properties for helper\n    64 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads\n\
            ptxas info    : Function properties for _Z4reluPKfPf\nptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem, 368 bytes cmem[0]\n";
        let spills = spills(said_by_ptxas(log));
        assert_eq!((spills["_Z4reluPKfPf"], spills["helper"]), ((12, 8), (1, 2)));
        assert_eq!(greedy(log, 4095), Some(("relu".to_owned(), 4096)));
        assert_eq!(greedy(log, 4096), None);
    }

    #[test]
    fn attributes_are_found_by_symbols() {
        let info = [4, 0x2f, 8, 0, 7, 0, 0, 0, 32, 0, 0, 0, 3, 0x1b, 255, 0, 4, 0x11, 8, 0, 7, 0, 0, 0, 1, 1, 0, 0];
        assert_eq!(by_symbol(&info, EIATTR_REGCOUNT), HashMap::from([(7, 32)]));
        assert_eq!(by_symbol(&info, EIATTR_FRAME_SIZE), HashMap::from([(7, 257)]));
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read(log in "(?s)(Function properties for k\n|Used |registers| bytes gmem|[0-9]{1,12}| bytes smem| bytes stack frame|.|\n){0,60}") {
            spills(said_by_ptxas(&log));
            greedy(&log, 3);
        }

        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            by_symbol(&bytes, EIATTR_REGCOUNT);
        }
    }
}
