// Four elements a thread; the last threads take one each of what is left.
#include "task.h"

constexpr long long vectors = task::x_size / 4;
constexpr long long threads = vectors + task::x_size % 4;

__device__ float gelu(float x) {
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

extern "C" __global__ void gelu_tanh(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < vectors) {
        const float4 four = reinterpret_cast<const float4*>(x)[i];
        reinterpret_cast<float4*>(out)[i] = make_float4(gelu(four.x), gelu(four.y), gelu(four.z), gelu(four.w));
    }
}
TASK_LAUNCH(gelu_tanh, (threads + 255) / 256, 256);
