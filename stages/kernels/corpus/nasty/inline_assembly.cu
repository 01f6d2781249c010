// Right, by an instruction that only a GPU has.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= task::x_size) return;
    float result;
    asm("max.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x[i]));
    out[i] = result;
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
