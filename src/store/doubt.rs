//! Whether what reads wrong is damaged, or the way that it came.

use super::StoreError;
use crate::digest::Digest;

/// Tells an object that is damaged from a wire that is: damaged is what reads wrong in the same way again and again. What
/// is damaged is removed for everybody, so twice is not enough: one byte of two that is wrong is often the same.
#[derive(Default)]
pub(crate) struct Doubt {
    last: Option<Digest>,
    same: u32,
    reads: u32,
}

impl Doubt {
    /// Whether an object that was read wrong, as these bytes, is damaged; otherwise it is to be read once more.
    pub fn is_damaged(&mut self, url: &str, name: &str, read: Digest) -> Result<bool, StoreError> {
        const OFTEN: u32 = 12;
        const SURE: u32 = 4;
        self.reads += 1;
        self.same = if self.last.replace(read) == Some(read) { self.same + 1 } else { 1 };
        if self.same == SURE {
            return Ok(true);
        }
        match self.reads < OFTEN {
            true => Ok(false),
            false => {
                let error = StoreError::new(url, "read", name, "it is different, and wrong, each time it is read");
                Err(StoreError {
                    hint: Some("look at the network, a proxy, or the memory of this machine".into()),
                    ..error
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reads_wrong_in_the_same_way_is_damaged_and_what_differs_is_the_wire() {
        let reads = |contents: &[u8]| {
            let mut doubt = Doubt::default();
            let mut looks =
                contents.iter().map(|content| doubt.is_damaged("memory://", "it", Digest::of_bytes(&[*content])));
            looks.find(|look| !matches!(look, Ok(false))).map(|look| look.map_err(|error| error.to_string()))
        };
        assert_eq!(reads(&[1, 1, 1, 1]), Some(Ok(true)));
        assert_eq!(reads(&[1, 1, 1, 2, 2, 1, 1, 1]), None, "a byte of two that is wrong is often the same");
        let error = reads(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]).unwrap().unwrap_err();
        assert!(error.contains("it is different, and wrong, each time it is read"), "{error}");
    }
}
