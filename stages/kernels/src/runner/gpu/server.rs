//! The child's side: one CUDA context, one candidate at a time. Only the driver's API is used, through cudarc.
#![expect(unsafe_code, reason = "the driver's API takes raw handles and addresses")]

use std::io::BufRead;
use std::path::Path;

use cudarc::driver::{result, sys};

use super::activity::Watch;
use super::poison::Poison;
use super::replay::Loaded;
use super::{Answer, Ask, PRIVATE, SLEEPS};
use crate::child::answers::Answers;
use crate::compile::Artifact;
use crate::fault::{Fault, FaultKind};
use crate::program::Program;
use crate::runner::Spans;

/// Steps of a program that the time of one flush hides; enqueuing one takes about 3 µs, the flush some 60 µs.
const STEPS_PER_FLUSH: usize = 12;

/// A GPU whose L2 cannot be told is flushed with this.
const DEFAULT_FLUSH: usize = 256 << 20;

/// Why there is no answer.
pub enum Failure {
    /// The candidate's fault.
    Fault(Fault),
    /// The machine's.
    Error(String),
}

/// Of a step.
pub type Outcome<T> = Result<T, Failure>;

/// Runs the child: lines on standard input, answers on what was standard output.
pub fn main() -> u8 {
    let mut answers = match Answers::open() {
        Ok(answers) => answers,
        Err(error) => {
            eprintln!("no channel for answers: {error}");
            return 1;
        }
    };
    let mut server = match Server::start() {
        Ok(server) => server,
        Err(failure) => {
            answer(&mut answers, &failure.into_answer());
            return 1;
        }
    };
    answer(&mut answers, &Answer::Ready { device: server.device.clone() });
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let reply = match serde_json::from_str(&line) {
            Ok(ask) => server.serve(ask).map_or_else(Failure::into_answer, |ms| Answer::Done { ms }),
            Err(error) => Answer::Error(format!("a runner was asked `{line}`: {error}")),
        };
        answer(&mut answers, &reply);
    }
    0
}

fn answer(answers: &mut Answers, answer: &Answer) {
    // Nobody to answer: the parent is gone, and the next read will end us.
    let _ = answers.say(answer);
}

impl Failure {
    fn into_answer(self) -> Answer {
        match self {
            Self::Fault(fault) => Answer::Fault(fault),
            Self::Error(message) => Answer::Error(message),
        }
    }
}

struct Server {
    device: String,
    stream: sys::CUstream,
    events: [sys::CUevent; 2],
    flush: Option<(sys::CUdeviceptr, usize)>,
    flush_bytes: usize,
    arena: Option<(sys::CUdeviceptr, u64)>,
    program: Option<Loaded>,
    shared_limit: i32,
    poison: Poison,
    /// CUPTI, once it was asked for and where it can be had.
    watch: Option<Option<Watch>>,
    /// Whether each argument gets an allocation of its own.
    is_private: bool,
}

impl Server {
    fn start() -> Outcome<Self> {
        // SAFETY: loading the driver's library runs its own initialisers only.
        if !unsafe { sys::is_culib_present() } {
            return Err(Failure::Error("libcuda.so.1, the NVIDIA driver's library, is not on this machine".into()));
        }
        result::init().map_err(|e| machine("cuInit", e))?;
        let device = result::device::get(0).map_err(|e| machine("no GPU is visible: cuDeviceGet", e))?;
        let is_asked = |word: &str| std::env::args().any(|argument| argument == word);
        if is_asked(SLEEPS) {
            let flags = sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32;
            // SAFETY: `device` is valid, and has no context in this process yet.
            let set = unsafe { sys::cuDevicePrimaryCtxSetFlags_v2(device, flags) };
            set.result().map_err(|e| machine("cuDevicePrimaryCtxSetFlags", e))?;
        }
        // SAFETY: `device` is valid; the context lives as long as the process.
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(|e| machine("no context could be made", e))?;
            result::ctx::set_current(context).map_err(|e| machine("cuCtxSetCurrent", e))?;
        }
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE as L2, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
        };
        // SAFETY: `device` is valid.
        let [l2, shared, multiprocessors] =
            unsafe { [L2, SHARED, MULTIPROCESSORS].map(|which| result::device::get_attribute(device, which)) };
        let shared_limit = shared.unwrap_or(48 << 10);
        let event =
            || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(|e| machine("cuEventCreate", e));
        Ok(Self {
            device: result::device::get_name(device).map_err(|e| machine("cuDeviceGetName", e))?,
            stream: result::stream::create(result::stream::StreamKind::Default)
                .map_err(|e| machine("cuStreamCreate", e))?,
            events: [event()?, event()?],
            flush: None,
            flush_bytes: l2.ok().filter(|bytes| *bytes > 0).map_or(DEFAULT_FLUSH, |bytes| 4 * bytes as usize),
            arena: None,
            program: None,
            shared_limit,
            poison: Poison::load(shared_limit as u32, multiprocessors.unwrap_or(1) as u32)?,
            watch: None,
            is_private: is_asked(PRIVATE),
        })
    }

    fn serve(&mut self, ask: Ask) -> Outcome<Option<f64>> {
        match ask {
            Ask::Open { ipc_handle, bytes } => self.open(&ipc_handle, bytes)?,
            Ask::Load { artifact, program } => self.load(&artifact, program)?,
            Ask::Run { arguments } if self.is_private => self.run_privately(&arguments)?,
            Ask::Run { arguments } => {
                self.poison.enqueue(self.stream)?;
                self.run(&arguments)?;
            }
            Ask::Time { arguments } => return self.time(&arguments).map(Some),
            Ask::Activity { arguments, cupti } => return self.activity(&arguments, &cupti),
        }
        Ok(None)
    }

    /// Summed time of what the GPU does for one run with cold caches, where CUPTI can tell.
    fn activity(&mut self, arguments: &Spans, cupti: &Path) -> Outcome<Option<f64>> {
        if self.watch.is_none() {
            self.watch = Some(Watch::open(cupti));
        }
        self.evict_caches(1)?;
        self.synchronize()?;
        let steps = self.loaded()?.steps();
        match self.watch.as_ref().and_then(Option::as_ref) {
            Some(watch) => watch.milliseconds(steps, || self.run(arguments)),
            // It is judged like all others.
            None => self.run(arguments).map(|()| None),
        }
    }

    fn open(&mut self, handle: &str, bytes: u64) -> Outcome<()> {
        if let Some((address, _)) = self.arena.take() {
            // SAFETY: it was opened below, and nothing runs.
            let _ = unsafe { sys::cuIpcCloseMemHandle(address) };
        }
        let mut reserved = [0; 64];
        let decoded = hex::decode(handle).ok().filter(|decoded| decoded.len() == reserved.len());
        let decoded = decoded.ok_or_else(|| Failure::Error(format!("`{handle}` is no IPC handle")))?;
        reserved.iter_mut().zip(decoded).for_each(|(to, from)| *to = from as std::ffi::c_char);
        let mut address = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the handle is 64 bytes, whatever they say; the driver checks them.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, sys::CUipcMemHandle_st { reserved }, flags) }
            .result()
            .map_err(|error| machine("the arena could not be mapped: cuIpcOpenMemHandle", error))?;
        self.arena = Some((address, bytes));
        Ok(())
    }

    fn load(&mut self, artifact: &Artifact, program: Program) -> Outcome<()> {
        if let Some(loaded) = self.program.take() {
            loaded.unload();
        }
        let Artifact::Cubin(path) = artifact else {
            return Err(Failure::Error("a program for the CPU device was sent to a GPU".into()));
        };
        let cubin = std::fs::read(path).map_err(|error| Failure::Error(format!("{}: {error}", path.display())))?;
        self.program = Some(Loaded::load(&cubin, program, self.shared_limit)?);
        Ok(())
    }

    fn loaded(&self) -> Outcome<&Loaded> {
        self.program.as_ref().ok_or_else(|| Failure::Error("no candidate is loaded".into()))
    }

    /// The device addresses of the arguments; spans outside the arena are the parent's mistake.
    fn addresses(&self, arguments: &Spans) -> Outcome<Vec<sys::CUdeviceptr>> {
        let (base, bytes) = self.arena.ok_or_else(|| Failure::Error("no arena is mapped".into()))?;
        let inside = |[offset, length]: &[u64; 2]| offset.checked_add(*length).is_some_and(|end| end <= bytes);
        match arguments.iter().all(inside) {
            true => Ok(arguments.iter().map(|[offset, _]| base + offset).collect()),
            false => Err(Failure::Error("an argument lies outside the arena".into())),
        }
    }

    fn run(&self, arguments: &Spans) -> Outcome<()> {
        self.loaded()?.enqueue(&self.addresses(arguments)?, self.stream)?;
        self.synchronize()
    }

    /// Runs once on copies of the arguments, and copies back what it wrote.
    fn run_privately(&self, arguments: &Spans) -> Outcome<()> {
        let shared = self.addresses(arguments)?;
        let copy = |error| machine("the arguments could not be copied", error);
        let mut own = Vec::new();
        for ([_, bytes], from) in arguments.iter().zip(&shared) {
            // SAFETY: plain allocations, freed below; both sides are that long.
            unsafe {
                let to = result::malloc_sync((*bytes).max(1) as usize).map_err(copy)?;
                result::memcpy_dtod_sync(to, *from, *bytes as usize).map_err(copy)?;
                own.push(to);
            }
        }
        self.loaded()?.enqueue(&own, self.stream)?;
        self.synchronize()?;
        for (([_, bytes], to), from) in arguments.iter().zip(&shared).zip(own) {
            // SAFETY: as above; nothing runs any more.
            unsafe {
                result::memcpy_dtod_sync(*to, from, *bytes as usize).map_err(copy)?;
                result::free_sync(from).map_err(copy)?;
            }
        }
        Ok(())
    }

    fn synchronize(&self) -> Outcome<()> {
        result::ctx::synchronize().map_err(|error| launch_failure("a kernel failed", error))
    }

    fn time(&mut self, arguments: &Spans) -> Outcome<f64> {
        let addresses = self.addresses(arguments)?;
        self.evict_caches(self.loaded()?.steps().div_ceil(STEPS_PER_FLUSH).max(1))?;
        let [start, stop] = self.events;
        let clock = |error| machine("the clock failed", error);
        // SAFETY: the events and the stream are ours and alive.
        unsafe { result::event::record(start, self.stream) }.map_err(clock)?;
        self.loaded()?.enqueue(&addresses, self.stream)?;
        // SAFETY: as above.
        unsafe { result::event::record(stop, self.stream) }.map_err(clock)?;
        self.synchronize()?;
        // SAFETY: both events have happened.
        unsafe { result::event::elapsed(start, stop) }.map(f64::from).map_err(clock)
    }

    /// Overwrites shared memory, writes more than the L2 holds, and takes back what a candidate made persist there. The writing also gives the
    /// GPU something to do while the launches are enqueued, so that no gap between them is timed.
    fn evict_caches(&mut self, times: usize) -> Outcome<()> {
        self.poison.enqueue(self.stream)?;
        let flush = |error| machine("the L2 cache could not be flushed", error);
        let (address, bytes) = match self.flush {
            Some(flush) => flush,
            None => {
                // SAFETY: a plain allocation, kept for the process's life.
                let address = unsafe { result::malloc_sync(self.flush_bytes) }.map_err(flush)?;
                *self.flush.insert((address, self.flush_bytes))
            }
        };
        // SAFETY: no arguments. Cards without persistence say so, which is no harm.
        let _ = unsafe { sys::cuCtxResetPersistingL2Cache() };
        for value in 0..times {
            // SAFETY: the allocation is ours and that long.
            unsafe { result::memset_d8_async(address, value as u8, bytes, self.stream) }.map_err(flush)?;
        }
        Ok(())
    }
}

/// What the driver refused us.
pub fn machine(what: &str, error: result::DriverError) -> Failure {
    Failure::Error(format!("{what}: {}", describe(error)))
}

/// What the driver refused the candidate.
pub fn fault(kind: FaultKind, what: &str, error: result::DriverError) -> Failure {
    Failure::Fault(Fault { kind, message: format!("{what}: {}", describe(error)), line: None })
}

fn describe(error: result::DriverError) -> String {
    let text = |found: Result<&std::ffi::CStr, _>| found.ok().map(|text| text.to_string_lossy().into_owned());
    let words = text(error.error_string()).unwrap_or_default();
    let name = text(error.error_name()).unwrap_or_else(|| format!("error {}", error.0 as i32));
    format!("{words} ({name})")
}

/// A failed launch or kernel, by what the driver says of it.
pub fn launch_failure(what: &str, error: result::DriverError) -> Failure {
    use sys::CUresult::*;
    let kind = match error.0 {
        CUDA_ERROR_ILLEGAL_ADDRESS | CUDA_ERROR_INVALID_ADDRESS_SPACE => FaultKind::OutOfBounds,
        CUDA_ERROR_MISALIGNED_ADDRESS => FaultKind::Misaligned,
        CUDA_ERROR_LAUNCH_TIMEOUT => FaultKind::Timeout,
        CUDA_ERROR_INVALID_VALUE
        | CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        | CUDA_ERROR_NO_BINARY_FOR_GPU
        | CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        | CUDA_ERROR_INVALID_CLUSTER_SIZE
        | CUDA_ERROR_NOT_SUPPORTED
        | CUDA_ERROR_NOT_PERMITTED => FaultKind::Launch,
        CUDA_ERROR_LAUNCH_FAILED
        | CUDA_ERROR_ASSERT
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_INVALID_PC
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_UNKNOWN => FaultKind::Crash,
        _ => return machine(what, error),
    };
    fault(kind, what, error)
}
