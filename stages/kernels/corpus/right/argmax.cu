// A block a row: pairs of value and place, reduced by shuffles twice.
#include "task.h"

constexpr int warps = 8;
constexpr int threads = warps * 32;

struct Best {
    float value;
    int column;
};

__device__ Best better(Best a, Best b) {
    const bool take = b.value > a.value || (b.value == a.value && b.column < a.column);
    return take ? b : a;
}

__device__ Best warp_best(Best best) {
    for (int offset = 16; offset > 0; offset /= 2) {
        Best other;
        other.value = __shfl_down_sync(0xffffffffu, best.value, offset);
        other.column = __shfl_down_sync(0xffffffffu, best.column, offset);
        best = better(best, other);
    }
    return best;
}

extern "C" __global__ void argmax(const float* x, long long* out) {
    __shared__ float values[warps];
    __shared__ int columns[warps];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    Best best = {-INFINITY, task::columns};
    const float* row = x + blockIdx.x * (long long)task::columns;
#pragma unroll 8
    for (int column = threadIdx.x; column < task::columns; column += threads) {
        best = better(best, Best{row[column], column});
    }
    best = warp_best(best);
    if (lane == 0) {
        values[warp] = best.value;
        columns[warp] = best.column;
    }
    __syncthreads();

    if (warp == 0) {
        best = lane < warps ? Best{values[lane], columns[lane]} : Best{-INFINITY, task::columns};
        best = warp_best(best);
        if (lane == 0) out[blockIdx.x] = best.column;
    }
}
TASK_LAUNCH(argmax, task::rows, threads);
