// A block a row, the row kept in shared memory between the passes.
#include "task.h"

constexpr int warps = 8;
constexpr int threads = warps * 32;

__device__ float warp_maximum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

extern "C" __global__ void softmax(const float* __restrict__ x, float* __restrict__ out) {
    extern __shared__ float cached[];
    __shared__ float maxima[warps];
    __shared__ float sums[warps];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const long long row = blockIdx.x * (long long)task::columns;

    float largest = -INFINITY;
#pragma unroll 8
    for (int column = threadIdx.x; column < task::columns; column += threads) {
        const float value = x[row + column];
        cached[column] = value;
        largest = fmaxf(largest, value);
    }
    largest = warp_maximum(largest);
    if (lane == 0) maxima[warp] = largest;
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, maxima[w]);

    float sum = 0.0f;
#pragma unroll 8
    for (int column = threadIdx.x; column < task::columns; column += threads) {
        cached[column] = expf(cached[column] - largest);
        sum += cached[column];
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < warps; ++w) total += sums[w];

#pragma unroll 8
    for (int column = threadIdx.x; column < task::columns; column += threads) {
        out[row + column] = cached[column] / total;
    }
}
TASK_LAUNCH(softmax, task::rows, threads, task::columns * sizeof(float));
