//! Sums of tensors over GPUs, by NCCL.
//!
//! The library is the one that torch has loaded into this process, found by the name that torch links it by, or that of the wheel beside
//! torch. cudarc has the types and would load the functions too, but tries neither that name (`libnccl.so.2`) nor the wheels'
//! folders, and panics where it finds none.
//!
//! Sums are queued on the stream that torch computes on, its default one, and so come after what was computed before and
//! before what is computed next. A process that dies leaves the others waiting on their GPUs; what ends them is the stage
//! (`stage::processes`), by ending the process.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use libloading::Library;
use tch::{Kind, Tensor};

use crate::TrainError;

/// As torch's own libraries name it.
const LIBRARY: &str = "libnccl.so.2";

type GetUniqueId = unsafe extern "C" fn(*mut ncclUniqueId) -> ncclResult_t;
type CommInitRank = unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> ncclResult_t;
type AllReduce = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    ncclRedOp_t,
    ncclComm_t,
    *mut c_void,
) -> ncclResult_t;
type CommAbort = unsafe extern "C" fn(ncclComm_t) -> ncclResult_t;
type GetLastError = unsafe extern "C" fn(ncclComm_t) -> *const c_char;

/// The library's functions.
struct Nccl {
    get_unique_id: GetUniqueId,
    comm_init_rank: CommInitRank,
    all_reduce: AllReduce,
    comm_abort: CommAbort,
    get_last_error: GetLastError,
    /// Last: the functions are its.
    _library: Library,
}

impl Nccl {
    #[expect(unsafe_code, reason = "functions of a C library, by its header")]
    fn load() -> Result<Self, TrainError> {
        let error = |error: libloading::Error| {
            let hint = "NCCL comes with torch for CUDA; `processes: 1` trains on one GPU without it";
            TrainError::new(format!("{LIBRARY}: {error}")).with_hint(hint)
        };
        // SAFETY: torch has run this library's initialisers already, and the types are those of nccl.h.
        unsafe {
            let beside = |missing| beside_torch().and_then(|path| Library::new(path).ok()).ok_or(missing);
            let library = Library::new(LIBRARY).or_else(beside).map_err(error)?;
            Ok(Self {
                get_unique_id: *library.get(b"ncclGetUniqueId\0").map_err(error)?,
                comm_init_rank: *library.get(b"ncclCommInitRank\0").map_err(error)?,
                all_reduce: *library.get(b"ncclAllReduce\0").map_err(error)?,
                comm_abort: *library.get(b"ncclCommAbort\0").map_err(error)?,
                get_last_error: *library.get(b"ncclGetLastError\0").map_err(error)?,
                _library: library,
            })
        }
    }

    #[expect(unsafe_code, reason = "reads NCCL's account of an error")]
    fn check(&self, result: ncclResult_t, what: &str) -> Result<(), TrainError> {
        if result == ncclResult_t::ncclSuccess {
            return Ok(());
        }
        // SAFETY: a null communicator asks for the last error of any; the text is NCCL's and ends with 0.
        let text = unsafe { (self.get_last_error)(null_mut()).as_ref().map(|text| CStr::from_ptr(text)) };
        let text = text.map(|text| text.to_string_lossy().trim().to_owned()).unwrap_or_default();
        let hint = "NCCL_DEBUG=INFO in the stage's `env` has NCCL say more";
        Err(TrainError::new(format!("NCCL: {what}: {result:?}: {text}")).with_hint(hint))
    }
}

/// The library in the wheel beside the torch that this process has loaded.
fn beside_torch() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let torch = maps.lines().filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])));
    let library = torch.into_iter().find(|path| path.file_name().is_some_and(|name| name == "libtorch_cpu.so"))?;
    // site-packages/torch/lib/libtorch_cpu.so
    let packages = library.ancestors().nth(3)?;
    Some(packages.join("nvidia/nccl/lib").join(LIBRARY)).filter(|path| path.is_file())
}

/// What the processes of a group find each other by: made by one of them, and given to all.
#[expect(unsafe_code, reason = "a call into NCCL")]
pub fn unique_id() -> Result<[u8; 128], TrainError> {
    let nccl = Nccl::load()?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: it writes the 128 bytes of the structure.
    nccl.check(unsafe { (nccl.get_unique_id)(&raw mut id) }, "an identifier")?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// This process's GPU among those of its group.
pub struct Communicator {
    nccl: Nccl,
    raw: ncclComm_t,
}

impl Communicator {
    /// Waits until all processes have come. torch's current device must be this process's GPU.
    #[expect(unsafe_code, reason = "a call into NCCL")]
    pub fn new(id: &[u8], rank: usize, size: usize) -> Result<Self, TrainError> {
        let bytes: [u8; 128] =
            id.try_into().map_err(|_| TrainError::new(format!("an identifier of {} bytes", id.len())))?;
        let nccl = Nccl::load()?;
        // The first tensor makes torch's context the current one, which NCCL takes.
        let _context = Tensor::f_zeros([1], (Kind::Float, tch::Device::Cuda(0)))?;
        let mut raw = null_mut();
        let id = ncclUniqueId { internal: bytes.map(|byte| byte as c_char) };
        // SAFETY: it writes the pointer and copies the identifier.
        let result = unsafe { (nccl.comm_init_rank)(&raw mut raw, size as c_int, id, rank as c_int) };
        nccl.check(result, "the processes could not be connected")?;
        Ok(Self { nccl, raw })
    }

    /// Puts the sum over all processes in the place of a float32 tensor on this GPU, when torch's stream comes to it.
    #[expect(unsafe_code, reason = "a call into NCCL")]
    pub fn sum(&self, tensor: &Tensor) -> Result<(), TrainError> {
        assert!(tensor.kind() == Kind::Float && tensor.is_contiguous(), "a flat float32 tensor");
        let (data, count) = (tensor.data_ptr(), tensor.numel());
        let (kind, sum) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
        // SAFETY: the tensor has so many values; torch reuses its memory only in the order of the same stream.
        let result = unsafe { (self.nccl.all_reduce)(data, data, count, kind, sum, self.raw, null_mut()) };
        self.nccl.check(result, "a sum")
    }
}

impl Drop for Communicator {
    #[expect(unsafe_code, reason = "a call into NCCL")]
    fn drop(&mut self) {
        // Not ncclCommDestroy, which waits for what is under way, even where another process has died.
        // SAFETY: nothing else has the communicator.
        unsafe { (self.nccl.comm_abort)(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wheels of torch's CUDA build have it; what a machine without a GPU can show is that the names are right.
    #[test]
    fn the_library_that_torch_brings_has_the_functions() {
        let nccl = Nccl::load().unwrap();
        let error = nccl.check(ncclResult_t::ncclInvalidUsage, "a sum").unwrap_err();
        assert!(error.message.starts_with("NCCL: a sum: ncclInvalidUsage"), "{error}");
        nccl.check(ncclResult_t::ncclSuccess, "a sum").unwrap();
    }

    /// `cargo test --package cuda-agent-train --features torch --lib -- --ignored one_gpu`
    #[test]
    #[ignore = "needs a GPU"]
    fn one_gpu_is_a_group_of_its_own() {
        let communicator = Communicator::new(&unique_id().unwrap(), 0, 1).unwrap();
        let numbers = Tensor::arange(1000, (Kind::Float, tch::Device::Cuda(0))) * 2.0;
        communicator.sum(&numbers).unwrap();
        let expected = Tensor::arange(1000, (Kind::Float, tch::Device::Cpu)) * 2.0;
        assert!(numbers.to_device(tch::Device::Cpu).equal(&expected));
    }
}
