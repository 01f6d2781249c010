// Factors cut to the ten bits of TensorFloat-32. The `tf32` policy may let it pass; `strict` must not.
#include "task.h"

__device__ float cut(float value) {
    return __uint_as_float(__float_as_uint(value) & 0xffffe000u);
}

extern "C" __global__ void matmul(const float* a, const float* b, float* out) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y;
    if (column >= task::columns) return;
    float sum = 0.0f;
    for (int k = 0; k < task::depth; ++k) sum += cut(a[row * task::depth + k]) * cut(b[k * task::columns + column]);
    out[row * task::columns + column] = sum;
}
TASK_LAUNCH(matmul, dim3((task::columns + 255) / 256, task::rows), 256);
