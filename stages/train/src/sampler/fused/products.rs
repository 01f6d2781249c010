//! Products of matrices by cuBLAS, on a stream that may be recording.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublas::{CudaBlas, result, sys};
use cudarc::driver::CudaStream;
use tch::{Device, Kind, Tensor};

use super::{error, pointer};
use crate::TrainError;

/// What cuBLAS recommends for this generation of GPUs.
const WORKSPACE_BYTES: i64 = 32 << 20;

/// cuBLAS, with memory of its own: it may not ask for any while a graph is recorded.
pub(super) struct Products {
    blas: CudaBlas,
    _workspace: Tensor,
}

impl Products {
    #[expect(unsafe_code, reason = "a call into a C library")]
    pub fn new(stream: Arc<CudaStream>, device: Device) -> Result<Self, TrainError> {
        let blas = CudaBlas::new(stream).map_err(error)?;
        let workspace = Tensor::zeros([WORKSPACE_BYTES], (Kind::Uint8, device));
        // SAFETY: the memory lives as long as the handle.
        let status = unsafe {
            sys::cublasSetWorkspace_v2(*blas.handle(), pointer(&workspace) as *mut c_void, WORKSPACE_BYTES as usize)
        };
        status.result().map_err(error)?;
        Ok(Self { blas, _workspace: workspace })
    }

    /// `output = input · weightᵀ`, or `output += …`, for the first `rows` rows: `[rows, k]` and `[n, k]` to `[rows, n]`, all
    /// bfloat16, added up in float32.
    #[expect(unsafe_code, reason = "a call into a C library")]
    pub fn multiply(
        &self,
        rows: usize,
        input: &Tensor,
        weight: &Tensor,
        output: &Tensor,
        adds: bool,
    ) -> Result<(), TrainError> {
        let (n, k) = weight.size2().expect("a weight is a matrix");
        let (one, factor) = (1.0f32, if adds { 1.0f32 } else { 0.0 });
        let half = sys::cudaDataType_t::CUDA_R_16BF;
        let [input, weight, output] = [input, weight, output].map(pointer);
        // SAFETY: cuBLAS counts by columns, so that this is outputᵀ = weight · inputᵀ with the sizes of the tensors.
        unsafe {
            result::gemm_ex(
                *self.blas.handle(),
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                n as i32,
                rows as i32,
                k as i32,
                (&raw const one).cast(),
                weight as *const c_void,
                half,
                k as i32,
                input as *const c_void,
                half,
                k as i32,
                (&raw const factor).cast(),
                output as *mut c_void,
                half,
                n as i32,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .map_err(error)
    }
}
