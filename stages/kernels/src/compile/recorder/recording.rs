//! What a recorder wrote, read as the claim of an untrusted program: every count is bounded, every name is one that was
//! given to it, and what is left over is an error.

use super::machine_code::MachineCode;
use crate::program::KernelAttribute;

/// What every recording begins with.
const MAGIC: &[u8] = b"CARECORD";

/// Steps of one candidate.
pub const MOST_STEPS: usize = 16_384;

/// A word of a refusal, in characters.
const LONGEST_TEXT: usize = 300;

/// What one run of `launch` came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recording {
    /// It returned this `cudaError_t`, having started this.
    Returned(u32, Vec<Noted>),
    /// It did something that can't be recorded: what the source calls, and why.
    Refused(String, String),
}

/// One note, with addresses as this run had them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
    /// A kernel.
    Launch(NotedLaunch),
    /// `height` rows of `width` bytes.
    Fill { to: u64, pitch: u64, value: u8, width: u64, height: u64 },
    /// Likewise.
    Copy { to: u64, to_pitch: u64, from: u64, from_pitch: u64, width: u64, height: u64 },
    /// Rows from the host, one after another.
    Write { to: u64, pitch: u64, width: u64, bytes: Vec<u8> },
    /// Of a kernel.
    Attribute { kernel: usize, attribute: KernelAttribute, value: i32 },
}

/// A launch as it was noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotedLaunch {
    /// Which kernel of the machine code.
    pub kernel: usize,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads.
    pub block: [u32; 3],
    /// Dynamic.
    pub shared_bytes: u32,
    /// Each a number and three values.
    pub attributes: Vec<[u32; 4]>,
    /// As many bytes as the kernel takes.
    pub parameters: Vec<u8>,
}

/// Reads a recording of a module; `None` where it is none.
pub fn read(bytes: &[u8], module: &MachineCode) -> Option<Recording> {
    let mut rest = Cursor(bytes.strip_prefix(MAGIC)?);
    let mut noted = Vec::new();
    let recording = loop {
        match rest.u8()? {
            1 => noted.push(Noted::Launch(rest.launch(module)?)),
            2 => noted.push(rest.fill()?),
            3 => noted.push(rest.copy()?),
            4 => noted.push(rest.write()?),
            5 => noted.push(rest.attribute(module)?),
            6 => break Recording::Refused(rest.text()?, rest.text()?),
            7 => break Recording::Returned(rest.u32()?, noted),
            _ => return None,
        }
        if noted.len() > MOST_STEPS {
            let why = format!("it starts more than {MOST_STEPS} pieces of work");
            return Some(Recording::Refused("launch".to_owned(), why));
        }
    };
    rest.0.is_empty().then_some(recording)
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(*self.take(4)?.first_chunk()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(*self.take(8)?.first_chunk()?))
    }

    fn three(&mut self) -> Option<[u32; 3]> {
        Some([self.u32()?, self.u32()?, self.u32()?])
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let count = self.u32()? as usize;
        self.take(count)
    }

    /// One line without anything that a terminal would take for more than text.
    fn text(&mut self) -> Option<String> {
        let text = String::from_utf8_lossy(self.bytes()?).into_owned();
        Some(text.chars().filter(|character| !character.is_control()).take(LONGEST_TEXT).collect())
    }

    fn kernel(&mut self, module: &MachineCode) -> Option<usize> {
        let kernel = self.u32()? as usize;
        (kernel < module.kernels.len()).then_some(kernel)
    }

    fn launch(&mut self, module: &MachineCode) -> Option<NotedLaunch> {
        let kernel = self.kernel(module)?;
        let (grid, block, shared_bytes) = (self.three()?, self.three()?, self.u32()?);
        let count = self.u32()?;
        // A launch has a handful of attributes.
        let attributes = (count <= 64).then_some(0..count)?;
        let attributes = attributes.map(|_| Some([self.u32()?, self.u32()?, self.u32()?, self.u32()?]));
        let attributes = attributes.collect::<Option<_>>()?;
        let parameters = self.bytes()?.to_vec();
        let fits = parameters.len() == module.kernels[kernel].parameter_bytes() as usize;
        fits.then_some(NotedLaunch { kernel, grid, block, shared_bytes, attributes, parameters })
    }

    fn fill(&mut self) -> Option<Noted> {
        let (to, pitch) = (self.u64()?, self.u64()?);
        let value = u8::try_from(self.u32()?).ok()?;
        Some(Noted::Fill { to, pitch, value, width: self.u64()?, height: self.u64()? })
    }

    fn copy(&mut self) -> Option<Noted> {
        let (to, to_pitch, from, from_pitch) = (self.u64()?, self.u64()?, self.u64()?, self.u64()?);
        Some(Noted::Copy { to, to_pitch, from, from_pitch, width: self.u64()?, height: self.u64()? })
    }

    fn write(&mut self) -> Option<Noted> {
        let (to, pitch, width, height) = (self.u64()?, self.u64()?, self.u64()?, self.u64()?);
        let bytes = self.bytes()?.to_vec();
        let fits = width > 0 && width.checked_mul(height) == Some(bytes.len() as u64);
        fits.then_some(Noted::Write { to, pitch, width, bytes })
    }

    fn attribute(&mut self, module: &MachineCode) -> Option<Noted> {
        let kernel = self.kernel(module)?;
        let attribute = match self.u32()? {
            8 => KernelAttribute::MaxDynamicShared,
            9 => KernelAttribute::Carveout,
            14 => KernelAttribute::NonPortableCluster,
            _ => return None,
        };
        Some(Noted::Attribute { kernel, attribute, value: self.u32()?.cast_signed() })
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::machine_code::KernelFacts;
    use super::*;

    /// One kernel that takes two pointers and a number.
    pub fn module() -> MachineCode {
        let kernel = KernelFacts {
            symbol: "k".into(),
            registers: 16,
            shared_bytes: 0,
            local_bytes: 0,
            max_threads: 1024,
            parameters: vec![[0, 8], [8, 8], [16, 4]],
        };
        MachineCode { kernels: vec![kernel], variables: vec![("table".into(), 64)] }
    }

    fn words(values: &[u32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn launch(kernel: u32, bytes: u32) -> Vec<u8> {
        [vec![1], words(&[kernel, 1, 1, 1, 32, 1, 1, 0, 0, bytes]), vec![0; bytes as usize]].concat()
    }

    fn recording(notes: &[Vec<u8>]) -> Option<Recording> {
        read(&[MAGIC.to_vec(), notes.concat()].concat(), &module())
    }

    fn returned() -> Vec<u8> {
        [vec![7], words(&[0])].concat()
    }

    #[test]
    fn what_was_noted_is_read() {
        let fill = [vec![2], 7_u64.to_le_bytes().to_vec(), 8_u64.to_le_bytes().to_vec(), words(&[255])].concat();
        let fill = [fill, 8_u64.to_le_bytes().to_vec(), 1_u64.to_le_bytes().to_vec()].concat();
        let Some(Recording::Returned(0, noted)) = recording(&[launch(0, 20), fill, returned()]) else { panic!() };
        assert!(matches!(&noted[0], Noted::Launch(launch) if launch.parameters.len() == 20));
        assert_eq!(noted[1], Noted::Fill { to: 7, pitch: 8, value: 255, width: 8, height: 1 });
        let refused = [vec![6], words(&[1]), b"f".to_vec(), words(&[3]), b"a\nb".to_vec()].concat();
        assert_eq!(recording(&[refused]), Some(Recording::Refused("f".into(), "ab".into())));
    }

    #[test]
    fn a_forged_recording_is_none() {
        let more = [returned(), vec![0]].concat();
        let wide_byte = [vec![2], vec![0; 16], words(&[256]), vec![0; 16]].concat();
        let odd_write = [vec![4], vec![0; 16], 3_u64.to_le_bytes().to_vec(), 1_u64.to_le_bytes().to_vec()].concat();
        let odd_write = [odd_write, words(&[2]), vec![0; 2]].concat();
        let endless_attributes = [vec![1], words(&[0, 1, 1, 1, 1, 1, 1, 0, u32::MAX])].concat();
        for notes in [
            vec![],
            vec![launch(0, 20)],
            vec![launch(1, 20), returned()],
            vec![launch(0, 19), returned()],
            vec![launch(0, 24), returned()],
            vec![more],
            vec![wide_byte, returned()],
            vec![odd_write, returned()],
            vec![endless_attributes],
            vec![[vec![5], words(&[0, 10, 1])].concat(), returned()],
            vec![[vec![5], words(&[1, 8, 1])].concat(), returned()],
            vec![vec![9]],
            vec![[vec![6], words(&[u32::MAX])].concat()],
        ] {
            assert_eq!(recording(&notes), None, "{notes:?}");
        }
        assert_eq!(read(b"CARECOR", &module()), None);
        assert_eq!(read(b"", &module()), None);
    }

    #[test]
    fn too_much_is_refused_by_name() {
        let mut notes: Vec<Vec<u8>> = std::iter::repeat_n(launch(0, 20), MOST_STEPS + 1).collect();
        notes.push(returned());
        assert!(matches!(recording(&notes), Some(Recording::Refused(name, _)) if name == "launch"));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_are_too_odd(kinds in proptest::collection::vec((0..9_u8, proptest::collection::vec(proptest::num::u8::ANY, 0..80)), 0..8)) {
            let bytes: Vec<u8> = kinds.into_iter().flat_map(|(kind, rest)| [vec![kind], rest].concat()).collect();
            let whole = [MAGIC, &bytes].concat();
            let _ = read(&whole, &module());
            let _ = read(&bytes, &module());
        }

        #[test]
        fn a_recording_that_was_cut_is_none(cut in 1..60_usize) {
            let whole = [MAGIC.to_vec(), launch(0, 20), returned()].concat();
            let cut = whole.len().saturating_sub(cut);
            proptest::prop_assert_eq!(read(&whole[..cut], &module()), None);
        }
    }
}
