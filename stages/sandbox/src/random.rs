//! Numbers that nobody can guess.

use std::fs::File;
use std::io::Read;

use crate::fault::EvaluatorError;

/// A seed from the system.
pub fn secret() -> Result<u64, EvaluatorError> {
    let mut bytes = [0; 8];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| EvaluatorError::new(format!("/dev/urandom: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ() {
        assert_ne!(secret().unwrap(), secret().unwrap());
    }
}
