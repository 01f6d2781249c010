//! The file that verdicts are written to before they are used: one JSON object a line, only ever appended to.
//!
//! [`Journal::append`] returns when its line is on the disk. Lines that come while one batch is being written make the next
//! one, so many threads share one `fsync`. A process that dies while it writes leaves a torn last line, which the next
//! one cuts off; a line that is torn anywhere else is an error, since then something else wrote to the file.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};

use nix::fcntl::{Flock, FlockArg};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An open journal. Threads share it; another process can't have it at the same time.
pub struct Journal {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// `None` while a thread writes a batch.
    file: Option<Flock<File>>,
    /// Lines of the next batch.
    pending: Vec<u8>,
    /// Lines ever given, and those of them that are on the disk.
    given: u64,
    written: u64,
    /// Why no more can be written; told to everyone.
    broken: Option<String>,
}

impl Journal {
    /// Opens the journal at `path`, makes it where there is none, and hands each line to `line`.
    pub fn open<T: DeserializeOwned>(path: &Path, mut line: impl FnMut(T)) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
            io::Error::new(io::ErrorKind::WouldBlock, format!("another process writes to it ({error})"))
        })?;
        let whole = replay(&file, &mut line)?;
        if whole < file.metadata()?.len() {
            file.set_len(whole)?;
        }
        Ok(Self::over(file))
    }

    fn over(file: Flock<File>) -> Self {
        let state = State { file: Some(file), pending: Vec::new(), given: 0, written: 0, broken: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Appends a line; it is on the disk when this returns.
    pub fn append(&self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        let mut state = self.lock();
        state.pending.extend_from_slice(&line);
        state.given += 1;
        let mine = state.given;
        loop {
            if let Some(why) = &state.broken {
                return Err(io::Error::other(why.clone()));
            }
            if state.written >= mine {
                return Ok(());
            }
            state = match state.file.take() {
                Some(file) => self.write_batch(state, file),
                None => self.changed.wait(state).expect("no panics while it is held"),
            };
        }
    }

    /// Writes what is pending, with the lock given up meanwhile.
    fn write_batch<'a>(&'a self, mut state: MutexGuard<'a, State>, mut file: Flock<File>) -> MutexGuard<'a, State> {
        let (batch, upto) = (std::mem::take(&mut state.pending), state.given);
        drop(state);
        let outcome = file.write_all(&batch).and_then(|()| file.sync_data());
        let mut state = self.lock();
        match outcome {
            Ok(()) => (state.written, state.file) = (upto, Some(file)),
            // What is in the file now is unknown: the next process finds out.
            Err(error) => state.broken = Some(error.to_string()),
        }
        self.changed.notify_all();
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panics while it is held")
    }
}

/// Reads every whole line; gives the length of what is whole.
fn replay<T: DeserializeOwned>(mut file: &File, line: &mut impl FnMut(T)) -> io::Result<u64> {
    file.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::new(file);
    let (mut whole, mut text, mut number) = (0, Vec::new(), 0);
    loop {
        text.clear();
        number += 1;
        let length = reader.read_until(b'\n', &mut text)?;
        if length == 0 || text.last() != Some(&b'\n') {
            return Ok(whole);
        }
        match serde_json::from_slice(&text) {
            Ok(value) => line(value),
            // A machine that lost power may have kept the length of the last batch and not its bytes.
            Err(_) if reader.fill_buf()?.is_empty() => return Ok(whole),
            Err(error) => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, format!("line {number}: {error}")));
            }
        }
        whole += length as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> io::Result<Vec<u64>> {
        let mut lines = Vec::new();
        Journal::open(path, |line| lines.push(line)).map(|_| lines)
    }

    #[test]
    fn what_many_threads_append_is_there_once_each() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below/journal.jsonl");
        let journal = Journal::open(&path, |_: u64| panic!("it is new")).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let journal = &journal;
                scope.spawn(move || (0..50).for_each(|line| journal.append(&(thread * 50 + line)).unwrap()));
            }
        });
        assert!(read(&path).is_err(), "one process, one writer");
        drop(journal);
        let mut lines = read(&path).unwrap();
        lines.sort_unstable();
        assert_eq!(lines, (0..400).collect::<Vec<_>>());
    }

    #[test]
    fn a_torn_last_line_is_cut_off_and_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        for torn in ["1\n2\n{\"ke", "1\n2\n\0\0\0\0\n"] {
            std::fs::write(&path, torn).unwrap();
            let journal = Journal::open(&path, |_: u64| ()).unwrap();
            journal.append(&3).unwrap();
            drop(journal);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n2\n3\n");
        }
    }

    #[test]
    fn a_line_that_is_torn_elsewhere_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        std::fs::write(&path, "1\n{\n3\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().starts_with("line 2"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n{\n3\n", "nothing was cut off");
    }

    #[test]
    fn a_disk_that_fails_is_told_to_everyone() {
        let full = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let journal = Journal::over(Flock::lock(full, FlockArg::LockShared).unwrap());
        assert!(journal.append(&1).is_err());
        assert!(journal.append(&2).is_err(), "nothing is used that is not on the disk");
    }
}
