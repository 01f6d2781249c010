// Half of a block waits at the barrier for the other half, which waits for what the first half writes after it.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    __shared__ volatile int ready;
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (threadIdx.x >= 128) {
        while (ready == 0) {
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) ready = 1;
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = fmaxf(x[i], 0.0f);
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
