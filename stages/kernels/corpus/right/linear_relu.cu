// Tiles of 64 by 64 outputs, 4 by 4 a thread; bias and ReLU are done where the sums are.
#include "task.h"

template <int tile, int deep, int side>
__global__ void linear_relu(const float* x, const float* weight, const float* bias, float* out) {
    constexpr int each = tile / side;
    __shared__ float left[deep][tile + 1];
    __shared__ float right[deep][tile + 1];
    const int thread = threadIdx.x;
    const int across = thread % side;
    const int down = thread / side;
    const int top = blockIdx.y * tile;
    const int start = blockIdx.x * tile;

    float sums[each][each] = {};
    for (int base = 0; base < task::features; base += deep) {
        for (int i = thread; i < tile * deep; i += side * side) {
            const int row = top + i / deep, column = start + i / deep, inner = base + i % deep;
            const bool inside = inner < task::features;
            left[i % deep][i / deep] = inside && row < task::batch ? x[row * task::features + inner] : 0.0f;
            right[i % deep][i / deep] = inside && column < task::hidden ? weight[column * task::features + inner] : 0;
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
            if (row >= task::batch || column >= task::hidden) continue;
            out[row * task::hidden + column] = fmaxf(sums[i][j] + bias[column], 0.0f);
        }
    }
}

extern "C" cudaError_t launch(const float* x, const float* linear_weight, const float* linear_bias, float* out,
                              void* scratch, cudaStream_t stream) {
    const dim3 grid((task::hidden + 63) / 64, (task::batch + 63) / 64);
    linear_relu<64, 16, 16><<<grid, 256, 0, stream>>>(x, linear_weight, linear_bias, out);
    return cudaGetLastError();
}
