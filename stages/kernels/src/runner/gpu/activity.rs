//! How long the GPU's kernels and copies took, each by itself, as CUPTI saw them: on whatever stream, gaps left out.
//!
//! CUPTI hands out buffers of records in a callback without context, so what it saw goes through a static.
#![expect(unsafe_code, reason = "CUPTI's interface takes callbacks and hands out raw buffers")]

use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use cudarc::cupti::result::{CuptiError, activity};
use cudarc::cupti::sys::{self, CUpti_ActivityKind as Kind};
use cudarc::driver::sys::CUcontext;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// What counts as work.
const WORK: [Kind; 3] =
    [Kind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, Kind::CUPTI_ACTIVITY_KIND_MEMCPY, Kind::CUPTI_ACTIVITY_KIND_MEMSET];

/// A record takes some 200 bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Nanoseconds of work since [`Watch::take`] was called last, and how many pieces there were.
static SEEN: Mutex<(u64, u32)> = Mutex::new((0, 0));

/// CUPTI, ready to watch.
pub struct Watch;

impl Watch {
    /// Opens the library; `None` where it or the machine doesn't allow it.
    pub fn open(library: &Path) -> Option<Self> {
        // SAFETY: NVIDIA's own library; it stays loaded, and is found by its name from then on.
        let library = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_GLOBAL) }.ok()?;
        std::mem::forget(library);
        // SAFETY: only asks whether it is there.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        // SAFETY: both are `extern "C"` functions that live as long as the program.
        unsafe { sys::cuptiActivityRegisterCallbacks(Some(give), Some(take)) }.result().ok()?;
        Some(Self)
    }

    /// Milliseconds of all work that `run` gave to the GPU, which are `steps` pieces. It must wait for its end. `None` where
    /// CUPTI did not see all of them: what it missed would count for nothing.
    pub fn milliseconds<E>(&self, steps: usize, run: impl FnOnce() -> Result<(), E>) -> Result<Option<f64>, E> {
        *seen() = (0, 0);
        let started = WORK.into_iter().try_for_each(activity::enable);
        let ran = run();
        let ended = flush();
        let stopped = WORK.map(activity::disable);
        ran?;
        let is_whole = started.is_ok() && ended.is_ok() && stopped.iter().all(Result::is_ok);
        let (nanoseconds, pieces) = *seen();
        Ok((is_whole && pieces as usize >= steps).then_some(nanoseconds as f64 / 1e6))
    }
}

fn seen() -> MutexGuard<'static, (u64, u32)> {
    SEEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn flush() -> Result<(), CuptiError> {
    // SAFETY: the callbacks are registered.
    unsafe { sys::cuptiActivityFlushAll(0) }.result()
}

/// CUPTI wants a buffer, aligned to eight bytes.
unsafe extern "C" fn give(buffer: *mut *mut u8, size: *mut usize, records: *mut usize) {
    let words = Box::new([0_u64; BUFFER_BYTES / 8]);
    // SAFETY: CUPTI passes three places to write to; the buffer comes back to `take`.
    unsafe {
        *buffer = Box::into_raw(words).cast();
        *size = BUFFER_BYTES;
        // As many as fit.
        *records = 0;
    }
}

/// CUPTI gives a buffer back.
unsafe extern "C" fn take(_: CUcontext, _: u32, buffer: *mut u8, _: usize, valid: usize) {
    let (mut nanoseconds, mut pieces) = (0, 0);
    let mut record: *mut sys::CUpti_Activity = std::ptr::null_mut();
    // SAFETY: the buffer came from `give`, and holds `valid` bytes of records.
    unsafe {
        while sys::cuptiActivityGetNextRecord(buffer, valid, &mut record).result().is_ok() {
            nanoseconds += duration(record);
            pieces += 1;
        }
        drop(Box::from_raw(buffer.cast::<[u64; BUFFER_BYTES / 8]>()));
    }
    let mut seen = seen();
    *seen = (seen.0 + nanoseconds, seen.1 + pieces);
}

/// Nanoseconds of a record. Newer CUPTIs append to these structures, and leave what is read here in its place.
///
/// # Safety
/// The record is one of CUPTI's, of a kind that was enabled here.
unsafe fn duration(record: *const sys::CUpti_Activity) -> u64 {
    // SAFETY: the kind says which structure it is; the fields are read without a reference, since records are packed.
    let (start, end) = unsafe {
        match (&raw const (*record).kind).read_unaligned() {
            Kind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL => {
                let record = record.cast::<sys::CUpti_ActivityKernel9>();
                ((&raw const (*record).start).read_unaligned(), (&raw const (*record).end).read_unaligned())
            }
            Kind::CUPTI_ACTIVITY_KIND_MEMCPY => {
                let record = record.cast::<sys::CUpti_ActivityMemcpy5>();
                ((&raw const (*record).start).read_unaligned(), (&raw const (*record).end).read_unaligned())
            }
            Kind::CUPTI_ACTIVITY_KIND_MEMSET => {
                let record = record.cast::<sys::CUpti_ActivityMemset4>();
                ((&raw const (*record).start).read_unaligned(), (&raw const (*record).end).read_unaligned())
            }
            _ => (0, 0),
        }
    };
    end.saturating_sub(start)
}
