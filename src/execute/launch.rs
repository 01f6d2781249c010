//! Starting a program, and everything that goes between it and the engine while it runs.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cuda_agent_protocol::{Event, RowInput};
use futures::future::BoxFuture;
use nix::fcntl::OFlag;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};

use super::log::Log;
use super::supervise;
use crate::artifact::json::long_integer;

/// How long a program may take to end when it is asked to.
pub const GRACE: Duration = Duration::from_secs(5);

/// A program to start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The stage, for fakes and messages.
    pub stage: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// The whole environment.
    pub environment: BTreeMap<String, String>,
    /// The attempt's folder.
    pub folder: PathBuf,
}

/// The engine's end of a running program.
pub struct Channels {
    /// What the program says. A line that is no event is an `Err`. The channel is short, so that a program that talks
    /// without end has to wait.
    pub events: mpsc::Sender<Result<Event, String>>,
    /// Rows for its standard input, where it is by-row; it ends when the sender does.
    pub rows: Option<mpsc::Receiver<RowInput>>,
    /// What it prints.
    pub log: Arc<Mutex<Log>>,
    /// Whether it should go on.
    pub stop: watch::Receiver<Stop>,
}

/// How many events may wait to be heard.
pub const EVENTS: usize = 256;

/// Whether a program should go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It should.
    Go,
    /// It is asked to end, and killed after [`GRACE`].
    Terminate,
    /// It is killed at once.
    Kill,
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Status 0.
    Success,
    /// Another status.
    Code(i32),
    /// Killed by a signal.
    Signal(i32),
    /// It never started.
    NotStarted(String),
}

/// Starts programs. The local one starts processes; tests have fakes that assert what ran.
pub trait Launcher: Send + Sync {
    /// Runs a program to its end.
    fn launch(&self, launch: Launch, channels: Channels) -> BoxFuture<'static, Exit>;
}

/// Programs as processes of this machine, each under a supervisor (see [`supervise`]).
pub struct LocalLauncher {
    supervisor: PathBuf,
    server: Mutex<Option<Server>>,
}

/// The process that forks supervisors. It ends when this does.
struct Server {
    socket: OwnedFd,
    process: std::process::Child,
}

impl LocalLauncher {
    /// Supervisors are this binary (`cuda-agent supervise`), or another that has that command.
    pub fn new(supervisor: PathBuf) -> Self {
        Self { supervisor, server: Mutex::default() }
    }

    /// The running executable, which stays what it is when its file is replaced.
    pub fn this_binary() -> Self {
        Self::new("/proc/self/exe".into())
    }

    fn spawn(&self, launch: Launch, rows: bool) -> io::Result<Process> {
        let (control_theirs, control) = descriptors()?;
        let (events, events_theirs) = descriptors()?;
        let (output, output_theirs) = descriptors()?;
        let (status, status_theirs) = descriptors()?;
        let (input_theirs, input) = match rows {
            true => descriptors().map(|(theirs, ours)| (theirs, Some(ours)))?,
            false => (std::fs::File::open("/dev/null")?.into(), None),
        };
        let ends = supervise::Ends {
            control: control_theirs,
            events: events_theirs,
            input: input_theirs,
            output: output_theirs,
            status: status_theirs,
        };
        self.request(&program(launch)?, &ends)?;
        Ok(Process {
            status: pipe::Receiver::from_owned_fd(status)?,
            input: input.map(pipe::Sender::from_owned_fd).transpose()?,
            control: Some(control),
            events: pipe::Receiver::from_owned_fd(events)?,
            output: pipe::Receiver::from_owned_fd(output)?,
        })
    }

    /// Asks the server, which the first request starts. Where it has ended, another one is started.
    fn request(&self, program: &supervise::Program, ends: &supervise::Ends) -> io::Result<()> {
        let mut held = self.server.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(server) = &mut *held {
            match supervise::request(server.socket.as_fd(), program, ends) {
                Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                    let _ = server.process.wait();
                }
                done => return done,
            }
        }
        let server = held.insert(Server::start(&self.supervisor)?);
        supervise::request(server.socket.as_fd(), program, ends)
    }
}

impl Server {
    fn start(supervisor: &std::path::Path) -> io::Result<Self> {
        let (socket, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(io::Error::from)?;
        let process = std::process::Command::new(supervisor)
            .args([supervise::COMMAND, "serve"])
            .env_clear()
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for the engine, which ends its programs in its own way.
            .process_group(0)
            .spawn()?;
        Ok(Self { socket, process })
    }
}

fn program(launch: Launch) -> io::Result<supervise::Program> {
    let text = |text: &str| {
        CString::new(text).map_err(|_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("there is a NUL byte in {:?}", text.replace('\0', "\u{fffd}")),
            )
        })
    };
    let Launch { command, mut environment, folder, .. } = launch;
    environment.insert("CUDA_AGENT_EVENTS_FD".to_owned(), supervise::EVENTS.to_string());
    Ok(supervise::Program {
        plain: std::env::var_os("CUDA_AGENT_NO_NAMESPACES").is_some(),
        folder: CString::new(std::path::absolute(folder)?.as_os_str().as_bytes())?,
        environment: environment
            .iter()
            .map(|(name, value)| text(&format!("{name}={value}")))
            .collect::<Result<_, _>>()?,
        words: command.iter().map(|word| text(word)).collect::<Result<_, _>>()?,
    })
}

/// A pipe: its reading and its writing end, neither inherited.
fn descriptors() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe2(OFlag::O_CLOEXEC)?)
}

struct Process {
    status: pipe::Receiver,
    input: Option<pipe::Sender>,
    control: Option<OwnedFd>,
    events: pipe::Receiver,
    output: pipe::Receiver,
}

impl Launcher for LocalLauncher {
    fn launch(&self, launch: Launch, channels: Channels) -> BoxFuture<'static, Exit> {
        let process = self.spawn(launch, channels.rows.is_some());
        Box::pin(async move {
            match process {
                Ok(process) => process.run(channels).await,
                Err(error) => Exit::NotStarted(error.to_string()),
            }
        })
    }
}

impl Process {
    async fn run(mut self, channels: Channels) -> Exit {
        let Channels { events, rows, log, mut stop } = channels;
        let reading_events = tokio::spawn(forward_events(self.events, events));
        let reading_output = tokio::spawn(forward_output(self.output, log));
        let feeding = rows.zip(self.input.take()).map(|(rows, stdin)| tokio::spawn(feed(rows, stdin)));
        let mut deadline = None;
        let status = loop {
            tokio::select! {
                status = ended(&mut self.status) => break status,
                changed = stop.changed(), if self.control.is_some() => {
                    let wanted = if changed.is_err() { Stop::Kill } else { *stop.borrow_and_update() };
                    match wanted {
                        Stop::Go => {}
                        Stop::Kill => self.control = None,
                        Stop::Terminate => {
                            if let Some(control) = &self.control {
                                let _ = nix::unistd::write(control, b"T");
                            }
                            deadline.get_or_insert(tokio::time::Instant::now() + GRACE);
                        }
                    }
                }
                () = sleep_until(deadline), if deadline.is_some() && self.control.is_some() => self.control = None,
            }
        };
        if let Some(feeding) = feeding {
            feeding.abort();
        }
        // The supervisor ends last, so nobody holds the other ends of these any more.
        let _ = reading_events.await;
        let _ = reading_output.await;
        match status {
            Ok(0) => Exit::Success,
            Ok(code) => Exit::Code(code),
            Err(signal) => Exit::Signal(signal),
        }
    }
}

/// Waits for how the program ended. A supervisor that does not say so was killed itself.
async fn ended(status: &mut pipe::Receiver) -> Result<i32, i32> {
    let mut bytes = [0; 4];
    match status.read_exact(&mut bytes).await {
        Ok(_) => supervise::ended(bytes),
        Err(_) => Err(nix::sys::signal::Signal::SIGKILL as i32),
    }
}

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// No event is longer: whatever writes more without a line end is not speaking the protocol.
const LONGEST_EVENT: usize = 256 * 1024 * 1024;

async fn forward_events(pipe: pipe::Receiver, events: mpsc::Sender<Result<Event, String>>) {
    let mut reader = BufReader::with_capacity(1 << 16, pipe);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(LONGEST_EVENT as u64).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let event = serde_json::from_slice(&line).map_err(|error| {
            let start: String = String::from_utf8_lossy(&line).trim().chars().take(120).collect();
            format!("{error}: {start}")
        });
        if events.send(event.and_then(|event| exact(event, &line))).await.is_err() {
            return;
        }
    }
}

/// An answer to a row, unless reading it has changed a number in it.
fn exact(event: Event, line: &[u8]) -> Result<Event, String> {
    let text = std::str::from_utf8(line).unwrap_or_default();
    match &event {
        Event::Row(row) if let Some(integer) = long_integer(text) => {
            Err(format!("row {}: {integer} is an integer of more than 64 bits; write it as text", row.row))
        }
        _ => Ok(event),
    }
}

async fn forward_output(mut pipe: pipe::Receiver, log: Arc<Mutex<Log>>) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count) = pipe.read(&mut buffer).await {
        if count == 0 {
            return;
        }
        log.lock().expect("no panic happens under this lock").write(&buffer[..count]);
    }
}

async fn feed(mut rows: mpsc::Receiver<RowInput>, mut stdin: pipe::Sender) {
    while let Some(row) = rows.recv().await {
        let mut line = serde_json::to_vec(&row).expect("rows are plain data");
        line.push(b'\n');
        if stdin.write_all(&line).await.is_err() {
            return;
        }
    }
}
