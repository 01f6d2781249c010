// Half of a warp waits at the warp's barrier, the other half at the block's: each waits for the other.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = fmaxf(x[i], 0.0f);
    if (threadIdx.x % 32 < 16) {
        __syncwarp();
        __syncthreads();
    } else {
        __syncthreads();
        __syncwarp();
    }
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
