// Blocks of 2048 threads.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = fmaxf(x[i], 0.0f);
}
TASK_LAUNCH(relu, (task::x_size + 2047) / 2048, 2048);
