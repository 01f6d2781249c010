// A block a row, tile by tile: each thread sums four neighbours, warps scan by shuffles, and the rest is carried on.
#include "task.h"

constexpr int each = 4;
constexpr int warps = 8;
constexpr int tile = warps * 32 * each;

extern "C" __global__ void cumulative_sum(const float* x, float* out) {
    __shared__ float totals[warps];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const long long row = blockIdx.x * (long long)task::columns;

    float carried = 0.0f;
    for (int base = 0; base < task::columns; base += tile) {
        const int first = base + threadIdx.x * each;
        float sums[each];
        float sum = 0.0f;
        for (int k = 0; k < each; ++k) {
            sum += first + k < task::columns ? x[row + first + k] : 0.0f;
            sums[k] = sum;
        }
        float upto = sum;
        for (int offset = 1; offset < 32; offset *= 2) {
            const float left = __shfl_up_sync(0xffffffffu, upto, offset);
            if (lane >= offset) upto += left;
        }
        if (lane == 31) totals[warp] = upto;
        __syncthreads();

        float before = carried + (upto - sum);
        for (int w = 0; w < warps; ++w) {
            if (w < warp) before += totals[w];
            carried += totals[w];
        }
        for (int k = 0; k < each; ++k) {
            if (first + k < task::columns) out[row + first + k] = before + sums[k];
        }
        __syncthreads();
    }
}
TASK_LAUNCH(cumulative_sum, task::rows, warps * 32);
