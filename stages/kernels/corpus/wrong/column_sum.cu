// A thread a column over some of the rows, the sums into scratch; then a block for every 32 columns adds them up.
#include "task.h"

constexpr int rows_each = 256;
constexpr int chunks = (task::rows + rows_each - 1) / rows_each;
constexpr int warps = 8;

TASK_SCRATCH(chunks * sizeof(float) * task::columns);

extern "C" __global__ void sum_chunks(const float* x, float* out, float* sums) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= task::columns) return;
    const int first = blockIdx.y * rows_each;
    const int end = first + rows_each < task::rows ? first + rows_each : task::rows;
    float sum = 0.0f;
#pragma unroll 8
    for (int row = first; row < end; ++row) sum += x[row * (long long)task::columns + column];
    sums[blockIdx.y * task::columns + column] = sum;
}
TASK_LAUNCH(sum_chunks, dim3((task::columns + 255) / 256, chunks), 256);

extern "C" __global__ void sum_columns(const float* x, float* out, const float* sums) {
    __shared__ float totals[32];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    for (int chunk = warp; chunk < chunks && column < task::columns; chunk += warps) {
        sum += sums[chunk * task::columns + column];
    }
    if (warp == 0) totals[lane] = 0.0f;
    __syncthreads();
    totals[lane] += sum;
    __syncthreads();
    if (warp == 0 && column < task::columns) out[column] = totals[lane];
}
TASK_LAUNCH(sum_columns, (task::columns + 31) / 32, warps * 32);
