//! A candidate's program on a GPU: its machine code is loaded, and its steps are put on a stream, one after another.
#![expect(unsafe_code, reason = "the driver's API takes raw handles and addresses")]

use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};

use super::server::{Failure, Outcome, fault, launch_failure, machine};
use crate::fault::FaultKind;
use crate::program::{Address, Kernel, KernelAttribute, Launch, LaunchAttribute, Place, Program, Step};

/// Machine code in a context, with what its program names. It must be unloaded before the context is left.
pub struct Loaded {
    module: sys::CUmodule,
    functions: Vec<sys::CUfunction>,
    /// Where each of the program's variables lies.
    variables: Vec<sys::CUdeviceptr>,
    program: Program,
}

impl Loaded {
    /// Loads a cubin. `shared_limit` is what a block of this GPU can have, for messages.
    pub fn load(cubin: &[u8], program: Program, shared_limit: i32) -> Outcome<Self> {
        // SAFETY: the image outlives the call, and cubins carry their own length.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) };
        let module = module.map_err(|error| fault(FaultKind::Launch, "the module could not be loaded", error))?;
        let mut loaded = Self { module, functions: Vec::new(), variables: Vec::new(), program };
        match loaded.resolve(shared_limit) {
            Ok(()) => Ok(loaded),
            Err(failure) => {
                loaded.unload();
                Err(failure)
            }
        }
    }

    /// Nothing of it may run any more.
    pub fn unload(self) {
        // SAFETY: the module is loaded, and every run ends with a synchronisation.
        let _ = unsafe { result::module::unload(self.module) };
    }

    /// How many pieces of work a run is.
    pub fn steps(&self) -> usize {
        self.program.steps.len()
    }

    fn resolve(&mut self, shared_limit: i32) -> Outcome<()> {
        for kernel in &self.program.kernels {
            self.functions.push(self.function(kernel, shared_limit)?);
        }
        for symbol in &self.program.variables {
            let name = c_string(symbol)?;
            let (mut address, mut bytes) = (0, 0);
            // SAFETY: the module is loaded, and both places can be written.
            unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, self.module, name.as_ptr()) }
                .result()
                .map_err(|error| fault(FaultKind::Launch, &format!("no variable `{symbol}`"), error))?;
            self.variables.push(address);
        }
        Ok(())
    }

    fn function(&self, kernel: &Kernel, shared_limit: i32) -> Outcome<sys::CUfunction> {
        let symbol = &kernel.symbol;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.module, c_string(symbol)?) };
        let function = function.map_err(|error| fault(FaultKind::Launch, &format!("no kernel `{symbol}`"), error))?;
        agree_on_parameters(kernel, function)?;
        for (attribute, value) in &kernel.attributes {
            use sys::CUfunction_attribute as Attribute;
            let (number, what) = match attribute {
                KernelAttribute::MaxDynamicShared => (
                    Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    format!(
                        "{symbol} asks for {value} bytes of dynamic shared memory, a block of this GPU has {shared_limit}"
                    ),
                ),
                KernelAttribute::Carveout => (
                    Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    format!("{symbol} can't have {value} percent of the cache as shared memory"),
                ),
                KernelAttribute::NonPortableCluster => (
                    Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                    format!("{symbol} can't have clusters of another size"),
                ),
            };
            // SAFETY: the function is valid; the driver checks the value.
            let set = unsafe { result::function::set_function_attribute(function, number, *value) };
            set.map_err(|error| fault(FaultKind::Launch, &what, error))?;
        }
        Ok(function)
    }

    /// Puts all steps on a stream. The arguments are the addresses of the tensors and of the scratch buffer.
    pub fn enqueue(&self, arguments: &[sys::CUdeviceptr], stream: sys::CUstream) -> Outcome<()> {
        self.program.steps.iter().try_for_each(|step| self.step(step, arguments, stream))
    }

    fn address(&self, address: Address, arguments: &[sys::CUdeviceptr]) -> sys::CUdeviceptr {
        let base = match address.of {
            Place::Argument(index) => arguments.get(index),
            Place::Variable(index) => self.variables.get(index),
        };
        base.map_or(0, |base| base.wrapping_add_signed(address.offset))
    }

    fn step(&self, step: &Step, arguments: &[sys::CUdeviceptr], stream: sys::CUstream) -> Outcome<()> {
        let at = |address: &Address| self.address(*address, arguments);
        // SAFETY: for all of them: the recorder's reader has seen to it that rows stay within the tensor or the variable
        // that they begin in. What the driver doesn't take it refuses.
        let done = match step {
            Step::Launch(launch) => return self.launch(launch, arguments, stream),
            Step::Fill { to, value, width, height: 1, .. } => unsafe {
                result::memset_d8_async(at(to), *value, *width as usize, stream)
            },
            Step::Fill { to, pitch, value, width, height } => unsafe {
                sys::cuMemsetD2D8Async(at(to), *pitch as usize, *value, *width as usize, *height as usize, stream)
                    .result()
            },
            Step::Copy { to, from, width, height: 1, .. } => unsafe {
                result::memcpy_dtod_async(at(to), at(from), *width as usize, stream)
            },
            Step::Copy { to, to_pitch, from, from_pitch, width, height } => {
                let rows =
                    Rows { to: at(to), to_pitch: *to_pitch, from_pitch: *from_pitch, width: *width, height: *height };
                unsafe { rows.copy(From::Device(at(from)), stream) }
            }
            Step::Write { to, pitch, width, bytes } => {
                // The driver has a copy of it when the call returns: this is no pinned memory.
                let data = bytes.resolved(|address| self.address(address, arguments));
                let height = data.len() as u64 / (*width).max(1);
                match height {
                    1 => unsafe { result::memcpy_htod_async(at(to), &data, stream) },
                    _ => {
                        let rows = Rows { to: at(to), to_pitch: *pitch, from_pitch: *width, width: *width, height };
                        unsafe { rows.copy(From::Host(data.as_ptr().cast()), stream) }
                    }
                }
            }
        };
        done.map_err(|error| launch_failure("a fill or a copy was refused", error))
    }

    fn launch(&self, launch: &Launch, arguments: &[sys::CUdeviceptr], stream: sys::CUstream) -> Outcome<()> {
        let (Some(kernel), Some(function)) =
            (self.program.kernels.get(launch.kernel), self.functions.get(launch.kernel))
        else {
            return Err(Failure::Error("a launch names no kernel of its program".into()));
        };
        let mut bytes = launch.parameters.resolved(|address| self.address(address, arguments));
        let needed = kernel.parameters.iter().map(|[offset, size]| offset + size).max().unwrap_or(0);
        if bytes.len() < needed as usize {
            return Err(Failure::Error(format!("{} has parameters of {needed} bytes", kernel.symbol)));
        }
        let mut parameters: Vec<*mut c_void> = kernel
            .parameters
            .iter()
            .map(|[offset, _]| std::ptr::from_mut(&mut bytes[*offset as usize]).cast())
            .collect();
        let mut attributes = launch.attributes.iter().map(attribute).collect::<Outcome<Vec<_>>>()?;
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        let configuration = sys::CUlaunchConfig {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: a pointer for each of the kernel's parameters to as many bytes as the driver says it takes (looked at
        // when it was loaded); they are copied before the call returns.
        unsafe { sys::cuLaunchKernelEx(&configuration, *function, parameters.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(|error| {
                let shape = format!(
                    "grid ({gx}, {gy}, {gz}), block ({bx}, {by}, {bz}), {} bytes of shared memory",
                    launch.shared_bytes
                );
                launch_failure(&format!("{} could not be launched with {shape}", kernel.symbol), error)
            })
    }
}

/// The driver reads as many bytes as it takes a parameter to have: that must be what the program has for it. Their number is
/// that of the same table in the machine code; asking for one more would be an error that compute-sanitizer tells.
fn agree_on_parameters(kernel: &Kernel, function: sys::CUfunction) -> Outcome<()> {
    for (index, [offset, size]) in kernel.parameters.iter().enumerate() {
        let mut found = (0, 0);
        // SAFETY: the function is valid, and both places can be written.
        let answer = unsafe { sys::cuFuncGetParamInfo(function, index, &mut found.0, &mut found.1) };
        let symbol = &kernel.symbol;
        answer
            .result()
            .map_err(|error| machine(&format!("parameter {index} of {symbol}: cuFuncGetParamInfo"), error))?;
        if found != (*offset as usize, *size as usize) {
            let ours = format!("{size} bytes at {offset}");
            return Err(Failure::Error(format!("{symbol}, parameter {index}: {ours}, the driver says {found:?}")));
        }
    }
    Ok(())
}

fn attribute(asked: &LaunchAttribute) -> Outcome<sys::CUlaunchAttribute> {
    use sys::CUlaunchAttributeID as Id;
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    let id = match *asked {
        LaunchAttribute::Cooperative => {
            value.cooperative = 1;
            Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        }
        LaunchAttribute::Cluster([x, y, z]) => {
            value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        }
        LaunchAttribute::ClusterScheduling(policy) => {
            use sys::CUclusterSchedulingPolicy as Policy;
            value.clusterSchedulingPolicyPreference = match policy {
                0 => Policy::CU_CLUSTER_SCHEDULING_POLICY_DEFAULT,
                1 => Policy::CU_CLUSTER_SCHEDULING_POLICY_SPREAD,
                2 => Policy::CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING,
                _ => {
                    let message = format!("there is no way {policy} to spread clusters");
                    return Err(Failure::Fault(crate::fault::Fault { kind: FaultKind::Launch, message, line: None }));
                }
            };
            Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
        }
        LaunchAttribute::ProgrammaticSerialization => {
            value.programmaticStreamSerializationAllowed = 1;
            Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        }
        LaunchAttribute::Carveout(percent) => {
            value.sharedMemCarveout = percent;
            Id::CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        }
    };
    Ok(sys::CUlaunchAttribute { id, pad: [0; 4], value })
}

enum From {
    Device(sys::CUdeviceptr),
    Host(*const c_void),
}

/// A copy of several rows.
struct Rows {
    to: sys::CUdeviceptr,
    to_pitch: u64,
    from_pitch: u64,
    width: u64,
    height: u64,
}

impl Rows {
    /// # Safety
    /// The rows are there, on both sides.
    unsafe fn copy(&self, from: From, stream: sys::CUstream) -> Result<(), result::DriverError> {
        use sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        let (memory_type, host, device) = match from {
            From::Device(address) => (CU_MEMORYTYPE_DEVICE, std::ptr::null(), address),
            From::Host(address) => (CU_MEMORYTYPE_HOST, address, 0),
        };
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: memory_type,
            srcHost: host,
            srcDevice: device,
            srcArray: std::ptr::null_mut(),
            srcPitch: self.from_pitch as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: self.to,
            dstArray: std::ptr::null_mut(),
            dstPitch: self.to_pitch as usize,
            WidthInBytes: self.width as usize,
            Height: self.height as usize,
        };
        // SAFETY: as the caller promises.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) }.result()
    }
}

fn c_string(text: &str) -> Outcome<CString> {
    CString::new(text).map_err(|error| Failure::Error(error.to_string()))
}
