// Two elements a thread, in the order of memory; sums in float, rounded once.
#include "task.h"

constexpr unsigned elements = task::x_size;
constexpr unsigned columns = task::columns;
constexpr unsigned threads = (elements + 1) / 2;

__device__ float scaled(float value, unsigned i, const __nv_bfloat16* scale, const __nv_bfloat16* bias) {
    const unsigned column = i / columns;
    return value * __bfloat162float(scale[column]) + __bfloat162float(bias[column]);
}

extern "C" __global__ void scale_bias(const __nv_bfloat16* x, const __nv_bfloat16* scale, const __nv_bfloat16* bias,
                                      __nv_bfloat16* out) {
    const unsigned i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 1 < elements) {
        const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x + i));
        *reinterpret_cast<__nv_bfloat162*>(out + i) =
            __floats2bfloat162_rn(scaled(pair.x, i, scale, bias), scaled(pair.y, i + 1, scale, bias));
    } else if (i < elements) {
        out[i] = __float2bfloat16(scaled(__bfloat162float(x[i]), i, scale, bias));
    }
}
TASK_LAUNCH(scale_bias, (threads + 255) / 256, 256);
