// Never ends.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    volatile bool more = true;
    while (more) out[0] = fmaxf(x[0], 0.0f);
}
TASK_LAUNCH(relu, 1, 32);
