// One output is not a number.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = i == task::x_size / 3 ? NAN : fmaxf(x[i], 0.0f);
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
