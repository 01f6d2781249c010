// A product in half precision with sums in float: near enough at one in a hundred, and no float32 product.
#include "task.h"
#include <cuda_fp16.h>

extern "C" __global__ void matmul(const float* a, const float* b, float* out) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y;
    if (column >= task::columns) return;
    float sum = 0.0f;
    for (int k = 0; k < task::depth; ++k) {
        const float left = __half2float(__float2half(a[row * task::depth + k]));
        const float right = __half2float(__float2half(b[k * task::columns + column]));
        sum += left * right;
    }
    out[row * task::columns + column] = sum;
}
TASK_LAUNCH(matmul, dim3((task::columns + 255) / 256, task::rows), 256);
