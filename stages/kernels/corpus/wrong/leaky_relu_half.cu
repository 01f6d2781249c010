// Two elements a thread; one more thread takes the last element of an odd length.
#include "task.h"

constexpr long long pairs = task::x_size / 2;
constexpr long long threads = pairs + task::x_size % 2;

__device__ float leaky(float x) {
    return x > 0.0f ? x : x * static_cast<float>(task::negative_slope);
}

extern "C" __global__ void leaky_relu(const __half* x, __half* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < pairs) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2*>(x)[i]);
        reinterpret_cast<__half2*>(out)[i] = __floats2half2_rn(leaky(pair.x), leaky(pair.y));
    } else if (i < threads) {
        out[2 * pairs] = __float2half(leaky(__half2float(x[2 * pairs])));
    }
}
TASK_LAUNCH(leaky_relu, (threads / 2 + 255) / 256, 256);
