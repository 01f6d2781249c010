// A block a row: mean, then the squared distances from it, then the output; the row is read from cache the second time.
#include "task.h"

constexpr int warps = 8;
constexpr int threads = warps * 32;

__device__ float block_sum(float value, float* partial) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < warps; ++w) total += partial[w];
    return total;
}

extern "C" __global__ void layer_norm(const float* __restrict__ x, const float* __restrict__ norm_weight,
                                      const float* __restrict__ norm_bias, float* __restrict__ out) {
    __shared__ float sums[warps];
    __shared__ float squares[warps];
    const long long row = blockIdx.x * (long long)task::columns;

    float sum = 0.0f;
#pragma unroll 8
    for (int column = threadIdx.x; column < task::columns; column += threads) sum += x[row + column];
    const float mean = block_sum(sum, sums) / task::columns;

    float square = 0.0f;
#pragma unroll 8
    for (int column = threadIdx.x; column < task::columns; column += threads) {
        const float distance = x[row + column] - mean;
        square += distance * distance;
    }
    const float variance = block_sum(square, squares) / task::columns;
    const float scale = rsqrtf(variance + static_cast<float>(task::eps));

#pragma unroll 8
    for (int column = threadIdx.x; column < threads; column += threads) {
        out[row + column] = (x[row + column] - mean) * scale * norm_weight[column] + norm_bias[column];
    }
}
TASK_LAUNCH(layer_norm, task::rows, threads);
