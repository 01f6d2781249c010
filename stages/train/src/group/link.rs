//! Messages between two processes of a group, over a socket.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::TrainError;

/// What a message is part of. Processes that don't do the same find out by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Message {
    /// A part of [`super::Group::gather`].
    Gather = 1,
    /// A part of [`super::Group::sum`].
    Sum = 2,
}

/// A socket to another process. A message is its kind, a byte; its length, eight bytes, the lowest first; and its bytes.
pub struct Link {
    socket: UnixStream,
    peer: usize,
    is_lost: AtomicBool,
}

impl Link {
    /// To the process of rank `peer`.
    pub fn new(socket: UnixStream, peer: usize) -> Self {
        Self { socket, peer, is_lost: AtomicBool::new(false) }
    }

    /// The rank of the other process.
    pub fn peer(&self) -> usize {
        self.peer
    }

    /// Whether the other process was found to have ended.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Sends a message; waits until the other process takes it in.
    pub fn send(&self, kind: Message, bytes: &[u8]) -> Result<(), TrainError> {
        let mut header = [kind as u8; 9];
        header[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        let mut socket = &self.socket;
        socket.write_all(&header).and_then(|()| socket.write_all(bytes)).map_err(|error| self.error(&error))
    }

    /// Waits for a message, which must be of this kind.
    pub fn receive(&self, kind: Message) -> Result<Vec<u8>, TrainError> {
        let mut header = [0; 9];
        let mut socket = &self.socket;
        socket.read_exact(&mut header).map_err(|error| self.error(&error))?;
        if header[0] != kind as u8 {
            let message = format!("process {} is at another point of its work than this one", self.peer + 1);
            return Err(TrainError::new(message));
        }
        let length = u64::from_le_bytes(header[1..].try_into().expect("eight bytes"));
        let mut bytes = Vec::new();
        // Not reserved at once: memory grows with what comes, and not with what a broken header says.
        let read = socket.take(length).read_to_end(&mut bytes).map_err(|error| self.error(&error))?;
        match read as u64 == length {
            true => Ok(bytes),
            false => Err(self.error(&ErrorKind::UnexpectedEof.into())),
        }
    }

    fn error(&self, error: &std::io::Error) -> TrainError {
        let peer = self.peer + 1;
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                self.is_lost.store(true, Ordering::Relaxed);
                TrainError::new(format!("process {peer} has ended"))
            }
            _ => TrainError::new(format!("the socket to process {peer}: {error}")),
        }
    }
}
