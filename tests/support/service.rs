//! Programs that serve on the loopback address while tests run.
//!
//! A server ends with the process of the tests, whichever way that ends: a shell beside it reads from a pipe that only
//! the tests hold open.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, mpsc};
use std::time::{Duration, Instant};

/// How long a server may take until it answers, on a machine that is busy with other tests.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Becomes the program given after the folder and the pattern of files outside it. When the pipe closes, what stays
/// behind of the shell ends the program and removes what it left.
const KEEPER: &str = r#"
folder=$1 litter=$2; shift 2
exec 3<&0
( read -r nothing; kill -KILL $$; sleep 0.1; rm -rf "$folder" $litter ) <&3 >/dev/null 2>&1 &
exec "$@" </dev/null 3<&- >"$folder/log" 2>&1
"#;

/// A program that serves on the loopback address, until it is dropped or the process of the tests ends.
pub struct Service {
    child: Child,
    pub folder: PathBuf,
    pub ports: Vec<u16>,
}

impl Service {
    /// Starts what `command` makes of a folder and so many free ports, and waits until `ready` says yes.
    pub fn start(ports: usize, command: impl Fn(&Path, &[u16]) -> Command, ready: impl Fn(&[u16]) -> bool) -> Self {
        // Somebody may take a port between the look and the use: then the program ends at once.
        for _ in 0..3 {
            let (folder, ports) = (tempfile::tempdir().unwrap(), free_ports(ports));
            let command = command(folder.path(), &ports);
            let mut service = Self::spawn(&command, folder.keep(), ports);
            let started = Instant::now();
            while service.child.try_wait().unwrap().is_none() {
                if ready(&service.ports) {
                    return service;
                }
                assert!(started.elapsed() < START_LIMIT, "the server does not answer:\n{}", service.log());
                std::thread::sleep(Duration::from_millis(20));
            }
            eprintln!("the server ended at its start:\n{}", service.log());
        }
        panic!("the server does not start");
    }

    /// What the program has printed.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    fn spawn(command: &Command, folder: PathBuf, ports: Vec<u16>) -> Self {
        // SeaweedFS makes sockets with names of its own choice.
        let litter: Vec<String> = ports.iter().map(|port| format!("/tmp/seaweedfs-*-{port}.sock")).collect();
        let mut keeper = Command::new("sh");
        keeper.args(["-c", KEEPER, "sh"]).arg(&folder).arg(litter.join(" "));
        keeper.arg(command.get_program()).args(command.get_args());
        keeper.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        keeper.current_dir(&folder).stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        Self { child: keeper.spawn().unwrap(), folder, ports }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A program that `make venv-dev` installs.
pub fn program(name: &str) -> PathBuf {
    let chosen = std::env::var_os("CUDA_AGENT_TEST_BIN").map(PathBuf::from);
    let folders = chosen.into_iter().chain([super::repository().join(".venv/bin")]);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates = folders.chain(std::env::split_paths(&path)).map(|folder| folder.join(name));
    candidates
        .find(|candidate| candidate.is_file())
        .unwrap_or_else(|| panic!("{name} is neither in .venv/bin nor in PATH: `make venv-dev` installs it"))
}

/// Ports below those that the system gives to outgoing connections, so that no client comes to sit on one.
fn free_ports(count: usize) -> Vec<u16> {
    let random = RandomState::new();
    let start = |attempt: u64| 10_000 + (random.hash_one(attempt) % 20_000) as u16;
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port));
    for attempt in 0.. {
        let ports: Vec<u16> = (start(attempt)..).take(count).collect();
        if ports.iter().map(|port| free(*port)).collect::<Result<Vec<_>, _>>().is_ok() {
            return ports;
        }
    }
    unreachable!()
}

/// The status of the answer to a plain request; nothing while there is no answer.
pub fn request(method: &str, port: u16, path: &str, body: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n");
    write!(stream, "{head}Content-Length: {length}\r\n\r\n{body}").ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer);
    answer.split(' ').nth(1)?.parse().ok()
}

/// Waits for something that needs a runtime, from a test with or without one.
pub fn wait<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    static RUNTIME: LazyLock<tokio::runtime::Runtime> =
        LazyLock::new(|| tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());
    let (sender, receiver) = mpsc::channel();
    RUNTIME.spawn(async move { sender.send(work.await) });
    receiver.recv().expect("the work panicked")
}
