//! The processes of a stage that has several GPUs.
//!
//! The engine starts one program for the stage. It finds that it is to be several, becomes the first of them (the same program
//! again, in the same process, with its own GPU and with what NCCL must be told before it is loaded), and starts the others.
//! All of them run the stage; the first one alone reports events, writes checkpoints and writes outputs.
//!
//! Each of the others has a socket to the first one as its standard input. If the first one dies the kernel kills them. If one of them
//! dies, the first one ends the stage with that one's reason, even while it waits for the dead one on its GPU.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs};

use cuda_agent_protocol::{Program, ProgramError, Request};

use crate::group::Group;

/// Which of the processes a process is: `0/2`.
const PLACE: &str = "CUDA_AGENT_TRAIN_PROCESS";

/// The stage's GPUs, as the engine named them in CUDA_VISIBLE_DEVICES.
const GPUS: &str = "CUDA_AGENT_TRAIN_GPUS";

/// What NCCL is told. Multicast is off in all that could use it: where a host's switches don't offer it, starting hangs or
/// fails. Processes find each other through the loopback: they are on one machine, and no other one should be asked.
const OF_NCCL: [(&str, &str); 4] = [
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("NCCL_SOCKET_IFNAME", "=lo"),
];

/// How long the first process may take to fail by itself after another one has, before it is ended.
const GRACE: Duration = Duration::from_secs(10);

/// How often it looks whether they are alive.
const INTERVAL: Duration = Duration::from_millis(50);

/// What a process does of a stage.
pub type Body<'a> = &'a dyn Fn(&mut Program, &Rc<Group>) -> Result<(), ProgramError>;

/// Runs a stage's program, by itself or as one of several; its exit status.
pub fn main(kind: &str, body: Body) -> u8 {
    let place = env::var(PLACE).ok().and_then(|text| Place::parse(&text));
    match place {
        Some(place) if place.rank > 0 => member(place, body),
        Some(place) => Program::main(|program| first(kind, place, program, body)),
        None => Program::main(|program| match wanted(&program.request)? {
            1 => body(program, &Rc::new(Group::alone())),
            size => Err(become_first(kind, &program.request, size)),
        }),
    }
}

/// A process's place among those of its stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    rank: usize,
    size: usize,
}

impl Place {
    fn parse(text: &str) -> Option<Self> {
        let (rank, size) = text.split_once('/')?;
        let place = Self { rank: rank.parse().ok()?, size: size.parse().ok()? };
        (place.rank < place.size).then_some(place)
    }

    /// Which of some things are this process's: each gets one in turn.
    fn own<T: Clone>(self, all: &[T]) -> Vec<T> {
        all.iter().skip(self.rank).step_by(self.size).cloned().collect()
    }

    /// What this process may use of what the stage was given.
    fn narrow(self, request: &mut Request) {
        let resources = &mut request.resources;
        resources.gpus = self.own(&resources.gpus);
        resources.cpu = (resources.cpu / self.size as u32).max(1);
        resources.memory_bytes /= self.size as u64;
    }

    /// The environment of a process with this place, beside what it inherits.
    fn environment(self, gpus: &[String], cores: u32) -> Vec<(&'static str, String)> {
        let threads = (cores / self.size as u32).max(1);
        let mut variables = vec![
            (PLACE, format!("{}/{}", self.rank, self.size)),
            (GPUS, gpus.join(",")),
            ("CUDA_VISIBLE_DEVICES", self.own(gpus).join(",")),
            ("OMP_NUM_THREADS", threads.to_string()),
        ];
        variables.extend(OF_NCCL.map(|(name, value)| (name, value.to_owned())));
        variables
    }
}

/// How many processes a stage is to have: as many as its parameter says, or one for each GPU.
fn wanted(request: &Request) -> Result<usize, ProgramError> {
    let gpus = request.resources.gpus.len();
    let asked = request.params.get("processes").map_or(1, |value| value.as_u64().unwrap_or(1)) as usize;
    match asked {
        0 => Ok(gpus.max(1)),
        asked if gpus > 0 && asked > gpus => Err(ProgramError {
            kind: "params".into(),
            message: format!("processes: {asked}, but the stage was given {gpus} GPUs"),
            hint: Some("each process needs a GPU of its own; 0 takes as many as there are GPUs".into()),
        }),
        asked => Ok(asked),
    }
}

fn gpus_of(variable: &str) -> Vec<String> {
    let text = env::var(variable).unwrap_or_default();
    text.split(',').filter(|gpu| !gpu.is_empty()).map(str::to_owned).collect()
}

fn this_program(kind: &str) -> Result<Command, ProgramError> {
    let program = env::current_exe().map_err(|error| ProgramError::environment(format!("this program: {error}")))?;
    let mut command = Command::new(program);
    command.args(["stage", kind]);
    Ok(command)
}

/// Starts the program anew in this process; comes back with an error alone.
fn become_first(kind: &str, request: &Request, size: usize) -> ProgramError {
    let variables = Place { rank: 0, size }.environment(&gpus_of("CUDA_VISIBLE_DEVICES"), request.resources.cpu);
    match this_program(kind) {
        Ok(mut command) => ProgramError::environment(format!("this program: {}", command.envs(variables).exec())),
        Err(error) => error,
    }
}

/// The first process's work, and that of a parent.
fn first(kind: &str, place: Place, program: &mut Program, body: Body) -> Result<(), ProgramError> {
    let gpus = gpus_of(GPUS);
    let (others, sockets) = Others::start(kind, place.size, &gpus, program.request.resources.cpu)?;
    place.narrow(&mut program.request);
    let group = Group::first(sockets);
    let mut lost = None;
    let outcome = connected(group, &program.request).and_then(|group| {
        let outcome = body(program, &group);
        lost = group.lost();
        outcome
    });
    match (outcome, lost) {
        // What this process says of it is that the other one has ended; that one knows why.
        (Err(_), Some(rank)) => Err(others.reason(rank, GRACE)),
        (outcome, _) => {
            others.finish(outcome.is_ok());
            outcome
        }
    }
}

/// With NCCL where the processes have GPUs.
fn connected(mut group: Group, request: &Request) -> Result<Rc<Group>, ProgramError> {
    if super::model::device(request)?.is_cuda() {
        group.connect_gpus()?;
    }
    Ok(Rc::new(group))
}

/// The work of one of the others; its exit status.
fn member(place: Place, body: Body) -> u8 {
    let mut is_left_alone = false;
    let outcome = adopt_socket().and_then(|socket| {
        let mut program = Program::open()?;
        place.narrow(&mut program.request);
        let group = connected(Group::member(place.rank, place.size, socket), &program.request)?;
        let outcome = body(&mut program, &group);
        is_left_alone = group.lost().is_some();
        outcome
    });
    match outcome {
        Ok(()) => 0,
        // The first one has ended and said why.
        Err(_) if is_left_alone => 1,
        Err(error) => {
            let text = serde_json::to_vec(&error).expect("errors are plain data");
            if let Err(cause) = fs::write(reason_file(place.rank), text) {
                eprintln!("process {}: {error} ({cause})", place.rank + 1);
            }
            1
        }
    }
}

/// Where a process that fails leaves its reason, in the folder that the stage's program works in.
fn reason_file(rank: usize) -> PathBuf {
    PathBuf::from(format!("process-{rank}.error.json"))
}

/// Makes sure that this process doesn't outlive the first, and takes the socket from where it was put.
fn adopt_socket() -> Result<UnixStream, ProgramError> {
    let error = |error: nix::Error| ProgramError::environment(format!("a process of the stage: {error}"));
    let io = |error: std::io::Error| ProgramError::environment(format!("a process of the stage: {error}"));
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).map_err(error)?;
    let socket = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned().map_err(io)?;
    // What this process starts would keep the socket open otherwise.
    nix::unistd::dup2_stdin(fs::File::open("/dev/null").map_err(io)?).map_err(error)?;
    let socket = UnixStream::from(socket);
    // Had the first one died before the signal was asked for, its end would be closed, and the next message says so.
    Ok(socket)
}

/// The other processes, as the first one sees them.
struct Others {
    shared: Arc<Mutex<State>>,
}

struct State {
    children: Vec<Child>,
    /// How each ended.
    ends: Vec<Option<ExitStatus>>,
    /// Nothing is watched any more.
    is_over: bool,
}

impl Others {
    /// Starts them, with a socket to each, and watches them.
    fn start(kind: &str, size: usize, gpus: &[String], cores: u32) -> Result<(Self, Vec<UnixStream>), ProgramError> {
        let error = |error: std::io::Error| ProgramError::environment(format!("a process of the stage: {error}"));
        let state = State { children: Vec::new(), ends: vec![None; size - 1], is_over: false };
        let (others, mut sockets) = (Self { shared: Arc::new(Mutex::new(state)) }, Vec::new());
        for rank in 1..size {
            let _none_is_left = fs::remove_file(reason_file(rank));
            let (own, theirs) = UnixStream::pair().map_err(error)?;
            let mut command = this_program(kind)?;
            command.envs(Place { rank, size }.environment(gpus, cores)).env_remove("CUDA_AGENT_EVENTS_FD");
            command.stdin(Stdio::from(OwnedFd::from(theirs)));
            others.state().children.push(command.spawn().map_err(error)?);
            sockets.push(own);
        }
        let shared = others.shared.clone();
        std::thread::spawn(move || watch(&shared));
        Ok((others, sockets))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why a process ended, once it has; those that go on are killed.
    fn reason(&self, rank: usize, most: Duration) -> ProgramError {
        let started = Instant::now();
        // It closed its socket before it ended.
        while self.state().look()[rank - 1].is_none() && started.elapsed() < most {
            std::thread::sleep(INTERVAL);
        }
        let mut state = self.state();
        let reason = reason(rank, state.look().len() + 1, state.ends[rank - 1]);
        state.end();
        reason
    }

    /// Waits for those that are about to end, if all went well, and kills the others.
    fn finish(&self, is_well: bool) {
        let started = Instant::now();
        while is_well && self.state().look().iter().any(Option::is_none) && started.elapsed() < GRACE {
            std::thread::sleep(INTERVAL);
        }
        self.state().end();
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        self.state().end();
    }
}

impl State {
    /// How each process ended, so far.
    fn look(&mut self) -> &[Option<ExitStatus>] {
        for (child, end) in self.children.iter_mut().zip(&mut self.ends) {
            *end = end.or_else(|| child.try_wait().ok().flatten());
        }
        &self.ends
    }

    fn end(&mut self) {
        self.is_over = true;
        for (child, end) in self.children.iter_mut().zip(&mut self.ends) {
            if end.is_none() {
                let _gone = child.kill();
                *end = child.wait().ok();
            }
        }
    }
}

/// In a thread of the first process: ends it when another one has failed and it doesn't notice, as one that waits on
/// its GPU for a dead one's part of a sum does not.
fn watch(shared: &Mutex<State>) {
    let mut failed: Option<(usize, Instant)> = None;
    loop {
        std::thread::sleep(INTERVAL);
        let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_over {
            return;
        }
        let size = state.ends.len() + 1;
        let first = state.look().iter().position(|end| end.is_some_and(|status| !status.success()));
        match (first, failed) {
            (Some(index), None) => failed = Some((index + 1, Instant::now())),
            (_, Some((rank, since))) if since.elapsed() > GRACE => {
                let error = reason(rank, size, state.ends[rank - 1]);
                state.end();
                leave(&error);
            }
            _ => {}
        }
    }
}

/// Why process `rank` ended, by its own account, or by the system's.
fn reason(rank: usize, size: usize, end: Option<ExitStatus>) -> ProgramError {
    let own = fs::read(reason_file(rank)).ok().and_then(|text| serde_json::from_slice::<ProgramError>(&text).ok());
    let name = format!("process {} of {size}", rank + 1);
    match (own, end) {
        (Some(own), _) => ProgramError { message: format!("{name}: {}", own.message), ..own },
        (None, Some(status)) => ProgramError::environment(format!("{name} ended unexpectedly: {status}")),
        (None, None) => ProgramError::environment(format!("{name} closed its socket and goes on")),
    }
}

/// Ends this process at once, with its reason. What is left at exit would wait for the GPU.
#[expect(unsafe_code, reason = "std's own way out runs what waits for the GPU")]
fn leave(error: &ProgramError) -> ! {
    eprintln!("error: {error}");
    let text = serde_json::to_vec(error).expect("errors are plain data");
    if let Err(cause) = fs::write("error.json", text) {
        eprintln!("error.json: {cause}");
    }
    // SAFETY: it does not return, and nothing of this process is used after it.
    unsafe { nix::libc::_exit(1) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request(processes: serde_json::Value, gpus: &[u32]) -> Request {
        let request = json!({
            "protocol": 1, "stage": "policy", "kind": "train/ppo", "params": processes, "seed": 0, "by_row": null,
            "device": null, "inputs": {}, "outputs": {}, "deadline_unix_s": null, "state_dir": "state",
            "resources": {"cpu": 16, "memory_bytes": 1000, "gpus": gpus},
        });
        serde_json::from_value(request).unwrap()
    }

    #[test]
    fn there_is_a_process_for_each_gpu_or_as_many_as_were_asked_for() {
        let wanted = |processes: u64, gpus: &[u32]| wanted(&request(json!({"processes": processes}), gpus)).unwrap();
        assert_eq!([wanted(0, &[]), wanted(0, &[3]), wanted(0, &[0, 1, 2, 3])], [1, 1, 4]);
        assert_eq!([wanted(3, &[]), wanted(1, &[0, 1]), wanted(2, &[0, 1, 2])], [3, 1, 2]);
        // A kind without the parameter is one process.
        assert_eq!(super::wanted(&request(json!({}), &[0, 1])).unwrap(), 1);
        let error = super::wanted(&request(json!({"processes": 3}), &[0, 1])).unwrap_err();
        assert_eq!(
            (error.kind.as_str(), error.message.as_str()),
            ("params", "processes: 3, but the stage was given 2 GPUs")
        );
    }

    #[test]
    fn gpus_and_cores_are_dealt_out_and_every_gpu_is_somebodys() {
        let gpus: Vec<String> = ["GPU-a", "GPU-b", "GPU-c"].map(str::to_owned).to_vec();
        let visible = |rank, size| {
            let variables = Place { rank, size }.environment(&gpus, 16);
            variables.into_iter().find(|(name, _)| *name == "CUDA_VISIBLE_DEVICES").unwrap().1
        };
        assert_eq!([visible(0, 3), visible(1, 3), visible(2, 3)], ["GPU-a", "GPU-b", "GPU-c"]);
        // The second one of the first process judges, and so with one process that has all.
        assert_eq!([visible(0, 2), visible(1, 2), visible(0, 1)], ["GPU-a,GPU-c", "GPU-b", "GPU-a,GPU-b,GPU-c"]);
        let mut narrowed = request(json!({}), &[4, 5, 6]);
        Place { rank: 1, size: 2 }.narrow(&mut narrowed);
        assert_eq!(
            (narrowed.resources.gpus, narrowed.resources.cpu, narrowed.resources.memory_bytes),
            (vec![5], 8, 500)
        );
        let variables = Place { rank: 1, size: 2 }.environment(&gpus, 16);
        for expected in
            [("NCCL_NVLS_ENABLE", "0"), ("OMP_NUM_THREADS", "8"), (PLACE, "1/2"), (GPUS, "GPU-a,GPU-b,GPU-c")]
        {
            assert!(variables.contains(&(expected.0, expected.1.to_owned())), "{expected:?}");
        }
    }

    #[test]
    fn a_place_is_read_as_it_is_written() {
        assert_eq!(Place::parse("1/2"), Some(Place { rank: 1, size: 2 }));
        assert_eq!([Place::parse("2/2"), Place::parse("1"), Place::parse("a/2")], [None; 3]);
    }
}
