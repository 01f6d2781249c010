//! BLAKE3 digests, each made in a named context, so that digests of different things never meet.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A 32-byte BLAKE3 digest, written as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

/// What a digest stands for. The strings are part of the formats in `ARCHITECTURE.md`.
pub mod context {
    /// A stage's key, over its canonical pre-image.
    pub const STAGE_KEY: &str = "cuda-agent stage key v1";
    /// One column of a table.
    pub const COLUMN: &str = "cuda-agent column v1";
    /// A table.
    pub const TABLE: &str = "cuda-agent table v1";
    /// A file or folder.
    pub const TREE: &str = "cuda-agent tree v1";
    /// The columns of one row that a program reads.
    pub const ROW: &str = "cuda-agent row v1";
    /// The seed of one row.
    pub const ROW_SEED: &str = "cuda-agent row seed v1";
}

impl Digest {
    /// Of plain bytes: what a blob's name is.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Of a file's bytes. They are read and not mapped: mapped pages count as the engine's memory, and one of a file that
    /// is cut off meanwhile kills it.
    pub fn of_file(path: &Path) -> std::io::Result<Self> {
        Self::of_file_counted(path, &AtomicU64::new(0))
    }

    /// Of a file's bytes, adding them to `read` as they are read.
    pub fn of_file_counted(path: &Path, read: &AtomicU64) -> std::io::Result<Self> {
        const STEP: usize = 1 << 20;
        let mut file = std::fs::File::open(path)?;
        let mut hasher = blake3::Hasher::new();
        let mut bytes = vec![0; STEP.min(file.metadata()?.len() as usize + 1)];
        loop {
            let count = match file.read(&mut bytes) {
                Ok(0) => return Ok(Self::finish(&hasher)),
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            hasher.update(&bytes[..count]);
            read.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// Of bytes in a context.
    pub fn keyed(context: &'static str, bytes: &[u8]) -> Self {
        let mut hasher = Self::hasher(context);
        hasher.update(bytes);
        Self::finish(&hasher)
    }

    /// A hasher for a context; deriving the context's key is done once.
    pub fn hasher(context: &'static str) -> blake3::Hasher {
        thread_local! {
            static READY: std::cell::RefCell<Vec<(&'static str, blake3::Hasher)>> = const { std::cell::RefCell::new(Vec::new()) };
        }
        READY.with_borrow_mut(|ready| {
            if let Some((_, hasher)) = ready.iter().find(|(name, _)| *name == context) {
                return hasher.clone();
            }
            let hasher = blake3::Hasher::new_derive_key(context);
            ready.push((context, hasher.clone()));
            hasher
        })
    }

    /// What a hasher has come to.
    pub fn finish(hasher: &blake3::Hasher) -> Self {
        Self(*hasher.finalize().as_bytes())
    }

    /// The first digits, for people.
    pub fn short(&self) -> String {
        self.to_string()[..12].to_owned()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0u8; 64];
        for (index, byte) in self.0.iter().enumerate() {
            text[2 * index] = DIGITS[(byte >> 4) as usize];
            text[2 * index + 1] = DIGITS[(byte & 15) as usize];
        }
        f.pad(std::str::from_utf8(&text).expect("hex digits are text"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A text that is no digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a digest (64 lower-case hex digits)")]
pub struct DigestError(String);

/// What each byte stands for as a digit of a digest, over 15 where it is none. A table, since nobody can guess which kind of
/// digit comes next: branches on it cost a twentieth of a run that finds everything.
const DIGITS: [u8; 256] = {
    let (mut digits, mut value) = ([255; 256], 0);
    while value < 16 {
        digits[b"0123456789abcdef"[value as usize] as usize] = value;
        value += 1;
    }
    digits
};

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut digest, mut wrong) = ([0u8; 32], text.len() != 64);
        for (byte, digits) in digest.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let (high, low) = (DIGITS[usize::from(digits[0])], DIGITS[usize::from(digits[1])]);
            wrong |= (high | low) > 15;
            *byte = high << 4 | low & 15;
        }
        if wrong { Err(DigestError(text.to_owned())) } else { Ok(Self(digest)) }
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Digest;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a digest")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Digest, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn text_reads_back(bytes in any::<[u8; 32]>()) {
            prop_assert_eq!(Digest(bytes).to_string().parse::<Digest>().unwrap(), Digest(bytes));
        }
    }

    #[test]
    fn contexts_keep_digests_apart() {
        assert_ne!(Digest::keyed(context::TREE, b"x"), Digest::keyed(context::TABLE, b"x"));
        assert_eq!(Digest::keyed(context::TREE, b"x").0, blake3::derive_key(context::TREE, b"x"));
    }

    #[test]
    fn files_and_bytes_agree() {
        let folder = tempfile::tempdir().unwrap();
        for length in [0usize, 1, 65_536, 65_537, 300_000] {
            let bytes: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            let path = folder.path().join("file");
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(Digest::of_file(&path).unwrap(), Digest::of_bytes(&bytes));
        }
    }

    #[test]
    fn upper_case_and_short_texts_are_refused() {
        assert!("AB".repeat(32).parse::<Digest>().is_err());
        assert!("ab".repeat(31).parse::<Digest>().is_err());
    }
}
