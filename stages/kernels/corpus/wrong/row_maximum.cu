// A warp a row, eight rows a block.
#include "task.h"

constexpr int warps = 8;

extern "C" __global__ void row_maximum(const float* x, float* out) {
    const long long row = blockIdx.x * warps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= task::rows) return;

    float largest = -INFINITY;
    for (long long column = lane; column < task::columns; column += 32) {
        largest = fmaxf(largest, x[column * task::rows + row]);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    if (lane == 0) out[row] = largest;
}
TASK_LAUNCH(row_maximum, (task::rows + warps - 1) / warps, warps * 32);
