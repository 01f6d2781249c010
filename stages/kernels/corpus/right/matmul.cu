// Tiles of 64 by 64 outputs, 4 by 4 a thread; both factors pass through shared memory 16 deep.
#include "task.h"

constexpr int tile = 64;
constexpr int deep = 16;
constexpr int side = 16;
constexpr int each = tile / side;

extern "C" __global__ void matmul(const float* a, const float* b, float* out) {
    __shared__ float left[deep][tile + 1];
    __shared__ float right[deep][tile];
    const int thread = threadIdx.x;
    const int across = thread % side;
    const int down = thread / side;
    const int top = blockIdx.y * tile;
    const int start = blockIdx.x * tile;

    float sums[each][each] = {};
    for (int base = 0; base < task::depth; base += deep) {
        for (int i = thread; i < tile * deep; i += side * side) {
            const int row = top + i / deep, inner = base + i % deep;
            const bool inside = row < task::rows && inner < task::depth;
            left[i % deep][i / deep] = inside ? a[row * task::depth + inner] : 0.0f;
        }
        for (int i = thread; i < tile * deep; i += side * side) {
            const int inner = base + i / tile, column = start + i % tile;
            const bool inside = inner < task::depth && column < task::columns;
            right[i / tile][i % tile] = inside ? b[inner * task::columns + column] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < deep; ++k) {
            for (int i = 0; i < each; ++i) {
                for (int j = 0; j < each; ++j) sums[i][j] += left[k][down + side * i] * right[k][across + side * j];
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < each; ++i) {
        for (int j = 0; j < each; ++j) {
            const int row = top + down + side * i, column = start + across + side * j;
            if (row < task::rows && column < task::columns) out[row * task::columns + column] = sums[i][j];
        }
    }
}
TASK_LAUNCH(matmul, dim3((task::columns + tile - 1) / tile, (task::rows + tile - 1) / tile), side * side);
