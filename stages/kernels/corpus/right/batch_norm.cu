// A row of blocks for each plane: what depends on the channel alone is computed once a thread.
#include "task.h"

constexpr int plane = task::height * task::width;
constexpr int each = 4;

extern "C" __global__ void batch_norm(TASK_PARAMETERS) {
    const int channel = blockIdx.y % task::channels;
    const float scale = norm_weight[channel] * rsqrtf(norm_running_var[channel] + static_cast<float>(task::eps));
    const float mean = norm_running_mean[channel];
    const float bias = norm_bias[channel];

    const long long start = blockIdx.y * (long long)plane;
    for (int k = 0; k < each; ++k) {
        const int i = (blockIdx.x * each + k) * blockDim.x + threadIdx.x;
        if (i < plane) out[start + i] = (x[start + i] - mean) * scale + bias;
    }
}
TASK_LAUNCH(batch_norm, dim3((plane + 256 * each - 1) / (256 * each), task::batch * task::channels), 256);
