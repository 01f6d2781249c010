// One element past the end of an array in shared memory. A GPU has slack there and says nothing.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    __shared__ float cached[256];
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    cached[threadIdx.x + 1] = i < task::x_size ? fmaxf(x[i], 0.0f) : 0.0f;
    __syncthreads();
    if (i < task::x_size) out[i] = cached[threadIdx.x + 1];
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
