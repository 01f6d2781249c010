// A block a row: each warp adds up by shuffles, and the warps add up in shared memory.
#include "task.h"

constexpr int threads = 256;

extern "C" __global__ void row_sum(const float* x, float* out) {
    __shared__ float total;
    if (threadIdx.x == 0) total = 0.0f;
    __syncthreads();

    const float* row = x + blockIdx.x * (long long)task::columns;
    float sum = 0.0f;
#pragma unroll 8
    for (int column = threadIdx.x; column < task::columns; column += threads) sum += row[column];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, sum);
    __syncthreads();

    if (threadIdx.x == 0) out[blockIdx.x] = total;
}
TASK_LAUNCH(row_sum, task::rows, threads);
