// Returns without writing: what lies in the output by chance must not count.
#include "task.h"

extern "C" __global__ void relu(const float* x, float* out) {}
TASK_LAUNCH(relu, 1, 32);
