// Half of a block reaches a barrier that the rest leaves out. It is forbidden, but GPUs let threads that ended pass.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = fmaxf(x[i], 0.0f);
    if (threadIdx.x < 128) __syncthreads();
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
