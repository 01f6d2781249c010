//! Writing to standard output and standard error, whoever reads them.
//!
//! A command finishes what it was asked to do whether or not anybody reads on: a reader that went away (`| head`) is no
//! error, and a full disk behind standard output is one, told when the command is done.

use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::Exit;

/// What standard output is, and what it refused.
struct Output {
    /// Nothing more is written to it.
    closed: AtomicBool,
    failed: Mutex<Option<io::Error>>,
}

static STANDARD: Output = Output { closed: AtomicBool::new(false), failed: Mutex::new(None) };

impl Output {
    fn write(&self, text: &str, out: &mut dyn Write) {
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            self.closed.store(true, Ordering::Relaxed);
            *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    }

    /// Why what was to be printed is lost, unless its reader did not want it.
    fn lost(&self) -> Option<io::Error> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner).take();
        failed.filter(|error| error.kind() != ErrorKind::BrokenPipe)
    }
}

/// Writes to standard output.
pub fn print(text: &str) {
    STANDARD.write(text, &mut io::stdout().lock());
}

/// Prints a value as JSON.
pub fn print_json(value: &impl serde::Serialize) {
    print(&format!("{}\n", serde_json::to_string_pretty(value).expect("output is plain data")));
}

/// Writes a line to standard error, which may be closed: `eprintln` would panic. At once: it would also write a line in
/// pieces, with those of a worker in the same terminal between them.
pub fn note(line: &str) {
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// The exit status of a command that ended with `status`: output that was lost is an error, even where all else went well.
pub fn status(status: u8) -> u8 {
    let Some(error) = STANDARD.lost() else { return status };
    note(&format!("error: standard output: {error}"));
    note("hint: what the command did is done, only its output is lost; make room, or send the output elsewhere");
    if status == Exit::Done as u8 { Exit::Environment as u8 } else { status }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Refusing(ErrorKind, usize);

    impl Write for Refusing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            self.1 += 1;
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_went_away_is_no_error_and_a_full_disk_is() {
        for (kind, is_lost) in [(ErrorKind::BrokenPipe, false), (ErrorKind::StorageFull, true)] {
            let output = Output { closed: AtomicBool::new(false), failed: Mutex::new(None) };
            let mut out = Refusing(kind, 0);
            output.write("a", &mut out);
            output.write("b", &mut out);
            assert_eq!(out.1, 1, "nothing more is tried");
            assert_eq!(output.lost().is_some(), is_lost);
        }
    }
}
