// Blocks add their sums to a few places in scratch, so that they seldom wait for one another.
#include "task.h"

constexpr int places = 32;
constexpr int threads = 256;
constexpr long long wanted = (task::prediction_size + threads * 8 - 1) / (threads * 8);
constexpr int blocks = wanted < 2048 ? wanted : 2048;

TASK_SCRATCH(places * sizeof(float));

extern "C" __global__ void clear(const float* prediction, const float* target, float* out, float* sums) {
    sums[threadIdx.x] = 0.0f;
}
TASK_LAUNCH(clear, 1, places);

extern "C" __global__ void add_squares(const float* prediction, const float* target, float* out, float* sums) {
    __shared__ float partial[threads / 32];
    float sum = 0.0f;
    for (long long i = blockIdx.x * threads + threadIdx.x; i < task::prediction_size; i += blocks * threads) {
        const float difference = prediction[i] - target[i];
        sum += difference * difference;
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < threads / 32; ++w) sum += partial[w];
    sums[blockIdx.x % places] += sum;
}
TASK_LAUNCH(add_squares, blocks, threads);

extern "C" __global__ void finish(const float* prediction, const float* target, float* out, const float* sums) {
    float sum = sums[threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (threadIdx.x == 0) out[0] = sum / task::prediction_size;
}
TASK_LAUNCH(finish, 1, places);
