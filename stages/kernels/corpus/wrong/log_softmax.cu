// A block for every fourth row, the row kept in registers between the passes.
#include "task.h"

template <int warps>
__device__ float block_reduce(float value, bool maximum) {
    __shared__ float partial[warps];
    for (int offset = 16; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, offset);
        value = maximum ? fmaxf(value, other) : value + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = partial[0];
    for (int w = 1; w < warps; ++w) value = maximum ? fmaxf(value, partial[w]) : value + partial[w];
    return value;
}

template <int warps>
__global__ void log_softmax(const float* x, float* out) {
    constexpr int threads = warps * 32;
    constexpr int each = (task::columns + threads - 1) / threads;
    if (long long row = blockIdx.x; row < task::rows) {
        float values[each];
        float largest = -INFINITY;
#pragma unroll
        for (int k = 0; k < each; ++k) {
            const int column = k * threads + threadIdx.x;
            values[k] = column < task::columns ? x[row * task::columns + column] : -INFINITY;
            largest = fmaxf(largest, values[k]);
        }
        largest = block_reduce<warps>(largest, true);
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < each; ++k) sum += expf(values[k] - largest);
        const float shift = largest + logf(block_reduce<warps>(sum, false));
#pragma unroll
        for (int k = 0; k < each; ++k) {
            const int column = k * threads + threadIdx.x;
            if (column < task::columns) out[row * task::columns + column] = values[k] - shift;
        }
    }
}

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    log_softmax<8><<<(task::rows + 3) / 4, 256, 0, stream>>>(x, out);
    return cudaGetLastError();
}
