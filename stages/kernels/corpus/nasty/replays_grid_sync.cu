// Right: as many blocks as fit at a time wait for each other; the kernel asks for more shared memory than is usual.
#include "task.h"
#include <cooperative_groups.h>

constexpr int threads = 256;
constexpr int shared_bytes = 64 << 10;

TASK_SCRATCH(task::x_size * sizeof(float));

__global__ void relu(const float* x, float* out, float* scratch) {
    extern __shared__ float share[];
    const long long step = gridDim.x * (long long)threads, start = blockIdx.x * (long long)threads + threadIdx.x;
    for (long long i = start; i < task::x_size; i += step) {
        share[threadIdx.x + 16000 - threads] = x[i];
        scratch[task::x_size - 1 - i] = share[threadIdx.x + 16000 - threads];
    }
    cooperative_groups::this_grid().sync();
    for (long long i = start; i < task::x_size; i += step) out[i] = fmaxf(scratch[task::x_size - 1 - i], 0.0f);
}

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    static const cudaError_t is_set = cudaFuncSetAttribute(relu, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (is_set != cudaSuccess) return is_set;
    int device = 0, blocks = 0;
    cudaDeviceProp properties;
    cudaGetDevice(&device);
    cudaGetDeviceProperties(&properties, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, relu, threads, shared_bytes);
    float* memory = static_cast<float*>(scratch);
    void* arguments[] = {&x, &out, &memory};
    return cudaLaunchCooperativeKernel(reinterpret_cast<void*>(relu), blocks * properties.multiProcessorCount, threads, arguments,
                                       shared_bytes, stream);
}
