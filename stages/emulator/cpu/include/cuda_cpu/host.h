// What a `launch` candidate's host function uses of the CUDA runtime. There is one stream, and everything is done when a
// call returns.
#pragma once

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNotSupported = 801,
    cudaErrorUnknown = 999,
};
typedef cudaError_t cudaError;
struct CUstream_st;
typedef CUstream_st* cudaStream_t;
typedef CUstream_st* CUstream;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1, cudaFuncCachePreferEqual };
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

CUDA_CPU_INLINE const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "an error"; }
CUDA_CPU_INLINE const char* cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : "cudaError"; }
// A launch that the GPU would refuse ends the run as a fault, so that no error is ever pending.
CUDA_CPU_INLINE cudaError_t cudaGetLastError() { return cudaSuccess; }
CUDA_CPU_INLINE cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
CUDA_CPU_INLINE cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
CUDA_CPU_INLINE cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
// Copies and fills without a stream of their own are refused, as for a GPU.
CUDA_CPU_INLINE cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
    return cuda_cpu_fill(to, value, bytes), cudaSuccess;
}
CUDA_CPU_INLINE cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t = nullptr) {
    return cuda_cpu_copy(to, from, bytes), cudaSuccess;
}
template <class T>
CUDA_CPU_INLINE cudaError_t cudaMemcpyToSymbolAsync(T& symbol, const void* from, size_t bytes, size_t offset,
                                                    cudaMemcpyKind, cudaStream_t = nullptr) {
    return cuda_cpu_copy((char*)&symbol + offset, from, bytes), cudaSuccess;
}
template <class T>
CUDA_CPU_INLINE cudaError_t cudaGetSymbolAddress(void** address, T& symbol) { return *address = (void*)&symbol, cudaSuccess; }
template <class F>
CUDA_CPU_INLINE cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value > 227 * 1024) return cudaErrorInvalidValue;
        cuda_cpu_opt_in(value);
    }
    return cudaSuccess;
}
template <class F>
CUDA_CPU_INLINE cudaError_t cudaFuncSetCacheConfig(F, cudaFuncCache) { return cudaSuccess; }
CUDA_CPU_INLINE cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
CUDA_CPU_INLINE cudaError_t cudaSetDevice(int) { return cudaSuccess; }
// The figures of an H100, which candidates are written for.
CUDA_CPU_INLINE cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 * 1024; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 * 1024; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 * 1024; break;
        default: return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}
template <class F>
CUDA_CPU_INLINE cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int threads, size_t shared) {
    int by_threads = 2048 / (threads > 0 ? threads : 1), by_shared = shared ? (int)(228 * 1024 / (shared + 1024)) : 32;
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    return cudaSuccess;
}

namespace cuda_cpu {
// `kernel<<<grid, block, shared, stream>>>(arguments)`, as rewrite.rs spells it.
struct Configuration {
    dim3 grid, block;
    unsigned long long shared;
};
CUDA_CPU_INLINE Configuration configure(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr) {
    return {grid, block, shared};
}
// For arguments that are to be evaluated once, not by each thread.
template <class Kernel, class... Values>
CUDA_CPU_INLINE auto bind(Kernel kernel, Values... values) {
    return [=]() { kernel(values...); };
}
template <class Body>
__attribute__((noinline)) void operator<<(const Configuration& c, Body body) {
    unsigned grid[3] = {c.grid.x, c.grid.y, c.grid.z}, block[3] = {c.block.x, c.block.y, c.block.z};
    cuda_cpu_launch(grid, block, c.shared, [](void* data) { (*static_cast<Body*>(data))(); }, &body);
}
}  // namespace cuda_cpu
