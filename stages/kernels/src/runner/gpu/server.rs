//! The child's side: one CUDA context, one candidate at a time. Only the driver's API is used, through cudarc.
#![expect(unsafe_code, reason = "the driver's API takes raw handles and addresses")]

use std::ffi::{CString, c_void};
use std::io::BufRead;
use std::path::{Path, PathBuf};

use cudarc::driver::{result, sys};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW, Symbol};

use super::activity::Watch;
use super::{Answer, Ask, PRIVATE};
use crate::child::answers::Answers;
use crate::compile::{Artifact, Launch};
use crate::fault::{Fault, FaultKind};
use crate::runner::Spans;

/// The function that the generated header makes of a `launch` candidate: arguments by address, then the stream.
type Entry = unsafe extern "C" fn(*const *mut c_void, sys::CUstream) -> i32;

/// Launches that the time of one flush hides; enqueuing one takes about 3 µs, the flush some 60 µs.
const LAUNCHES_PER_FLUSH: usize = 12;

/// A GPU whose L2 cannot be told is flushed with this.
const DEFAULT_FLUSH: usize = 256 << 20;

enum Failure {
    Fault(Fault),
    Error(String),
}

type Outcome<T> = Result<T, Failure>;

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
    program: Option<Program>,
    preloaded: Vec<PathBuf>,
    shared_limit: i32,
    /// CUPTI, once it was asked for and where it can be had.
    watch: Option<Option<Watch>>,
    /// Whether each argument gets an allocation of its own.
    is_private: bool,
}

enum Program {
    Module { module: sys::CUmodule, kernels: Vec<Kernel> },
    Library { entry: Symbol<Entry>, _library: Library },
}

struct Kernel {
    function: sys::CUfunction,
    launch: Launch,
}

impl Server {
    fn start() -> Outcome<Self> {
        // SAFETY: loading the driver's library runs its own initialisers only.
        if !unsafe { sys::is_culib_present() } {
            return Err(Failure::Error("libcuda.so.1, the NVIDIA driver's library, is not on this machine".into()));
        }
        result::init().map_err(|e| machine("cuInit", e))?;
        let device = result::device::get(0).map_err(|e| machine("no GPU is visible: cuDeviceGet", e))?;
        // SAFETY: `device` is valid; the context lives as long as the process.
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(|e| machine("no context could be made", e))?;
            result::ctx::set_current(context).map_err(|e| machine("cuCtxSetCurrent", e))?;
        }
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE as L2, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
        };
        // SAFETY: `device` is valid.
        let (l2, shared) =
            unsafe { (result::device::get_attribute(device, L2), result::device::get_attribute(device, SHARED)) };
        let event =
            || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(|e| machine("cuEventCreate", e));
        Ok(Self {
            device: result::device::get_name(device).map_err(|e| machine("cuDeviceGetName", e))?,
            // It waits for the default stream and is waited for: a `launch` candidate may forget to name its stream.
            stream: result::stream::create(result::stream::StreamKind::Default)
                .map_err(|e| machine("cuStreamCreate", e))?,
            events: [event()?, event()?],
            flush: None,
            flush_bytes: l2.ok().filter(|bytes| *bytes > 0).map_or(DEFAULT_FLUSH, |bytes| 4 * bytes as usize),
            arena: None,
            program: None,
            preloaded: Vec::new(),
            shared_limit: shared.unwrap_or(48 << 10),
            watch: None,
            is_private: std::env::args().any(|argument| argument == PRIVATE),
        })
    }

    fn serve(&mut self, ask: Ask) -> Outcome<Option<f64>> {
        match ask {
            Ask::Open { ipc_handle, bytes } => self.open(&ipc_handle, bytes)?,
            Ask::Load { artifact, launches, preload } => {
                self.preload(&preload)?;
                self.load(&artifact, launches)?;
            }
            Ask::Run { arguments } if self.is_private => self.run_privately(&arguments)?,
            Ask::Run { arguments } => self.repeat(&arguments, 1)?,
            Ask::Time { arguments } => return self.time(Some(&arguments)).map(Some),
            Ask::Nothing => return self.time(None).map(Some),
            Ask::Repeat { arguments, count } => self.repeat(&arguments, count)?,
            Ask::Activity { arguments, cupti } => return self.activity(&arguments, &cupti),
        }
        Ok(None)
    }

    /// Summed time of what the GPU does for one run with cold caches.
    fn activity(&mut self, arguments: &Spans, cupti: &Path) -> Outcome<Option<f64>> {
        if self.watch.is_none() {
            self.watch = Some(Watch::open(cupti));
        }
        self.evict_caches(1)?;
        self.synchronize()?;
        match self.watch.as_ref().and_then(Option::as_ref) {
            Some(watch) => watch.milliseconds(|| self.repeat(arguments, 1)),
            None => Ok(None),
        }
    }

    fn open(&mut self, handle: &str, bytes: u64) -> Outcome<()> {
        if let Some((address, _)) = self.arena.take() {
            // SAFETY: it was opened below, and nothing runs.
            let _ = unsafe { sys::cuIpcCloseMemHandle(address) };
        }
        let mut reserved = [0; 64];
        let decoded = decode_hex(handle).filter(|decoded| decoded.len() == reserved.len());
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

    fn preload(&mut self, libraries: &[PathBuf]) -> Outcome<()> {
        for path in libraries {
            if self.preloaded.contains(path) {
                continue;
            }
            // SAFETY: the toolkit's own libraries; they stay loaded.
            let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
            let library = library.map_err(|error| Failure::Error(format!("{}: {error}", path.display())))?;
            std::mem::forget(library);
            self.preloaded.push(path.clone());
        }
        Ok(())
    }

    fn load(&mut self, artifact: &Artifact, launches: Vec<Launch>) -> Outcome<()> {
        if let Some(Program::Module { module, .. }) = self.program.take() {
            // SAFETY: nothing of it runs any more: every run ends with a synchronisation.
            let _ = unsafe { result::module::unload(module) };
        }
        self.program = Some(match artifact {
            Artifact::Cubin(path) => self.load_module(path, launches)?,
            Artifact::Library(path) => load_library(path)?,
            Artifact::Host { .. } => {
                return Err(Failure::Error("a program for the CPU device was sent to a GPU".into()));
            }
        });
        Ok(())
    }

    fn load_module(&self, path: &Path, launches: Vec<Launch>) -> Outcome<Program> {
        let image = std::fs::read(path).map_err(|error| Failure::Error(format!("{}: {error}", path.display())))?;
        // SAFETY: the image outlives the call, and cubins carry their own length.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
        let module = module.map_err(|error| fault(FaultKind::Launch, "the module could not be loaded", error))?;
        let kernels = launches.into_iter().map(|launch| self.kernel(module, launch)).collect::<Outcome<_>>()?;
        Ok(Program::Module { module, kernels })
    }

    fn kernel(&self, module: sys::CUmodule, launch: Launch) -> Outcome<Kernel> {
        let name = CString::new(launch.symbol.as_str()).map_err(|error| Failure::Error(error.to_string()))?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(module, name) };
        let function =
            function.map_err(|error| fault(FaultKind::Launch, &format!("no kernel `{}`", launch.symbol), error))?;
        if launch.shared_bytes > 48 << 10 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is valid; the driver checks the size.
            let set =
                unsafe { result::function::set_function_attribute(function, attribute, launch.shared_bytes as i32) };
            let what = format!(
                "{} asks for {} bytes of dynamic shared memory, a block of this GPU has {}",
                launch.symbol, launch.shared_bytes, self.shared_limit
            );
            set.map_err(|error| fault(FaultKind::Launch, &what, error))?;
        }
        Ok(Kernel { function, launch })
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

    fn enqueue(&self, addresses: &mut [sys::CUdeviceptr]) -> Outcome<()> {
        match &self.program {
            Some(Program::Module { kernels, .. }) => {
                kernels.iter().try_for_each(|kernel| self.launch(kernel, addresses))
            }
            Some(Program::Library { entry, .. }) => self.call(entry, addresses),
            None => Err(Failure::Error("no candidate is loaded".into())),
        }
    }

    fn launch(&self, kernel: &Kernel, addresses: &mut [sys::CUdeviceptr]) -> Outcome<()> {
        let launch = &kernel.launch;
        let mut parameters: Vec<*mut c_void> = addresses
            .iter_mut()
            .take(launch.arguments as usize)
            .map(|address| std::ptr::from_mut(address).cast())
            .collect();
        if parameters.len() != launch.arguments as usize {
            return Err(Failure::Error(format!("{} takes {} arguments", launch.symbol, launch.arguments)));
        }
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: as many parameters as the kernel takes, each an address; they are copied before the call returns.
        unsafe {
            result::launch_kernel(
                kernel.function,
                (gx, gy, gz),
                (bx, by, bz),
                launch.shared_bytes,
                self.stream,
                &mut parameters,
            )
        }
        .map_err(|error| {
            let shape = format!(
                "grid ({gx}, {gy}, {gz}), block ({bx}, {by}, {bz}), {} bytes of shared memory",
                launch.shared_bytes
            );
            launch_failure(&format!("{} could not be launched with {shape}", launch.symbol), error)
        })
    }

    fn call(&self, entry: &Symbol<Entry>, addresses: &[sys::CUdeviceptr]) -> Outcome<()> {
        let pointers: Vec<*mut c_void> = addresses.iter().map(|address| *address as *mut c_void).collect();
        // SAFETY: none can be given: this is the candidate's code, which is why this process holds nothing of worth.
        match unsafe { entry(pointers.as_ptr(), self.stream) } {
            0 => Ok(()),
            code => Err(runtime_failure(code)),
        }
    }

    fn repeat(&self, arguments: &Spans, count: u32) -> Outcome<()> {
        let mut addresses = self.addresses(arguments)?;
        for _ in 0..count {
            self.enqueue(&mut addresses)?;
        }
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
        self.enqueue(&mut own.clone())?;
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
        // The whole context: a `launch` candidate may use streams of its own.
        result::ctx::synchronize().map_err(|error| launch_failure("a kernel failed", error))
    }

    fn time(&mut self, arguments: Option<&Spans>) -> Outcome<f64> {
        let mut addresses = arguments.map(|arguments| self.addresses(arguments)).transpose()?;
        let launches = match &self.program {
            Some(Program::Module { kernels, .. }) => kernels.len(),
            _ => LAUNCHES_PER_FLUSH,
        };
        self.evict_caches(launches.div_ceil(LAUNCHES_PER_FLUSH).max(1))?;
        let [start, stop] = self.events;
        let clock = |error| machine("the clock failed", error);
        // SAFETY: the events and the stream are ours and alive.
        unsafe { result::event::record(start, self.stream) }.map_err(clock)?;
        if let Some(addresses) = &mut addresses {
            self.enqueue(addresses)?;
        }
        // SAFETY: as above.
        unsafe { result::event::record(stop, self.stream) }.map_err(clock)?;
        self.synchronize()?;
        // SAFETY: both events have happened.
        unsafe { result::event::elapsed(start, stop) }.map(f64::from).map_err(clock)
    }

    /// Writes more than the L2 holds, and takes back what a candidate made persist there. The writing also gives the
    /// GPU something to do while the launches are enqueued, so that no gap between them is timed.
    fn evict_caches(&mut self, times: usize) -> Outcome<()> {
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

fn load_library(path: &Path) -> Outcome<Program> {
    let missing = |error: libloading::Error| {
        Failure::Fault(Fault {
            kind: FaultKind::Launch,
            message: format!("its library could not be loaded: {error}"),
            line: None,
        })
    };
    // SAFETY: none can be given: see `call`.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(missing)?;
    // SAFETY: the generated header declares the symbol with this type.
    let entry = unsafe { library.get::<Entry>(b"task_run") }.map_err(missing)?;
    Ok(Program::Library { entry, _library: library })
}

fn machine(what: &str, error: result::DriverError) -> Failure {
    Failure::Error(format!("{what}: {}", describe(error)))
}

fn fault(kind: FaultKind, what: &str, error: result::DriverError) -> Failure {
    Failure::Fault(Fault { kind, message: format!("{what}: {}", describe(error)), line: None })
}

fn describe(error: result::DriverError) -> String {
    let text = |found: Result<&std::ffi::CStr, _>| found.ok().map(|text| text.to_string_lossy().into_owned());
    let words = text(error.error_string()).unwrap_or_default();
    let name = text(error.error_name()).unwrap_or_else(|| format!("error {}", error.0 as i32));
    format!("{words} ({name})")
}

/// A failed launch or kernel, by what the driver says of it.
fn launch_failure(what: &str, error: result::DriverError) -> Failure {
    use sys::CUresult::*;
    let kind = match error.0 {
        CUDA_ERROR_ILLEGAL_ADDRESS | CUDA_ERROR_INVALID_ADDRESS_SPACE => FaultKind::OutOfBounds,
        CUDA_ERROR_MISALIGNED_ADDRESS => FaultKind::Misaligned,
        CUDA_ERROR_LAUNCH_TIMEOUT => FaultKind::Timeout,
        CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES | CUDA_ERROR_NO_BINARY_FOR_GPU => {
            FaultKind::Launch
        }
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

/// What a `launch` candidate returned: a `cudaError_t`, whose numbers are the driver's for errors of kernels.
fn runtime_failure(code: i32) -> Failure {
    let kind = match code {
        700 | 717 => FaultKind::OutOfBounds,
        716 => FaultKind::Misaligned,
        702 => FaultKind::Timeout,
        710 | 714 | 715 | 718 | 719 => FaultKind::Crash,
        _ => FaultKind::Launch,
    };
    Failure::Fault(Fault { kind, message: format!("launch returned cudaError_t {code}"), line: None })
}

fn decode_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    digits.len().is_multiple_of(2).then(|| digits.chunks(2).map(pair).collect())?
}
