// Ends itself.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {
    if (x[0] == x[0]) __trap();
    out[0] = 0.0f;
}
TASK_LAUNCH(relu, 1, 32);
