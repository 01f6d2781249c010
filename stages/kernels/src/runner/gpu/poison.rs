//! Shared memory holds what the kernel before left there. So that nobody can count on it (it is often zero, or the right
//! sum of the run before), all of it is overwritten with NaN before each run.
#![expect(unsafe_code, reason = "the driver's API takes raw handles and addresses")]

use std::ffi::{CStr, CString, c_void};

use cudarc::driver::{result, sys};

use super::server::{Outcome, machine};

/// Each thread writes every 1,024th word, up to as many bytes as it is told.
const PTX: &CStr = cr"
.version 7.0
.target sm_70
.address_size 64
.extern .shared .align 16 .b8 room[];
.visible .entry overwrite(.param .u32 bytes)
{
    .reg .pred %p;
    .reg .u32 %at, %end, %place, %word;
    ld.param.u32 %end, [bytes];
    mov.u32 %at, %tid.x;
    shl.b32 %at, %at, 2;
    mov.u32 %place, room;
    add.u32 %place, %place, %at;
    mov.u32 %word, 0xffffffff;
NEXT:
    setp.ge.u32 %p, %at, %end;
    @%p bra DONE;
    st.shared.u32 [%place], %word;
    add.u32 %at, %at, 4096;
    add.u32 %place, %place, 4096;
    bra NEXT;
DONE:
    ret;
}
";

const THREADS: u32 = 1024;

/// The kernel that overwrites.
pub struct Poison {
    function: sys::CUfunction,
    /// What a block can have.
    bytes: u32,
    /// A block fills a multiprocessor; twice as many as there are leave none out.
    blocks: u32,
}

impl Poison {
    /// Loads it for a GPU with so much shared memory for a block, and so many multiprocessors.
    pub fn load(bytes: u32, multiprocessors: u32) -> Outcome<Self> {
        let refused = |error| machine("the kernel that overwrites shared memory could not be loaded", error);
        let name = CString::new("overwrite").expect("no zero byte");
        // SAFETY: the text ends in a zero byte, and the module stays loaded as long as the process lives.
        let function = unsafe {
            let module = result::module::load_data(PTX.as_ptr().cast()).map_err(refused)?;
            let function = result::module::get_function(module, name).map_err(refused)?;
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            result::function::set_function_attribute(function, most, bytes as i32).map_err(refused)?;
            function
        };
        Ok(Self { function, bytes, blocks: 2 * multiprocessors.max(1) })
    }

    /// Queues it.
    pub fn enqueue(&self, stream: sys::CUstream) -> Outcome<()> {
        let mut bytes = self.bytes;
        let mut parameters: [*mut c_void; 1] = [(&raw mut bytes).cast()];
        // SAFETY: one parameter of four bytes, copied before the call returns; the kernel stays within its shared memory.
        let launched = unsafe {
            let (grid, block) = ((self.blocks, 1, 1), (THREADS, 1, 1));
            result::launch_kernel(self.function, grid, block, self.bytes, stream, &mut parameters)
        };
        launched.map_err(|error| machine("shared memory could not be overwritten", error))
    }
}
