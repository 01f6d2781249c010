// Does its work, and writes one element before the first.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = fmaxf(x[i], 0.0f);
    if (i == 0) out[-1] = 1.0f;
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
