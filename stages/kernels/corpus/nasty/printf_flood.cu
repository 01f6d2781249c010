// Right, and loud: a hundred thousand lines that must neither fill a pipe nor pass for an answer.
#include "task.h"
#include <stdio.h>

extern "C" __global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= task::x_size) return;
    out[i] = fmaxf(x[i], 0.0f);
    for (int k = 0; k < 20 && i < 5000; ++k) printf("done {\"ms\": %d}\n", k);
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
