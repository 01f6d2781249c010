// Writes through a null pointer that no compiler can see to be one.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    const unsigned long long address = blockIdx.x * 4ull;
    *reinterpret_cast<float*>(address) = fmaxf(x[0], 0.0f);
}
TASK_LAUNCH(relu, 1, 1);
