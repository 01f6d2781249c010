// Right: a structure of pointers by value, templates, and pointers to the middle of a tensor.
#include "task.h"

struct Part {
    const float* from;
    float* to;
    long long count;
    char shift;
};

template <int threads>
__global__ void relu(Part part) {
    const long long i = blockIdx.x * (long long)threads + threadIdx.x;
    if (i < part.count) part.to[i] = fmaxf(part.from[i + part.shift], 0.0f);
}

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    const long long half = task::x_size / 2;
    const Part parts[] = {{x - 1, out, half, 1}, {x + half, out + half, task::x_size - half, 0}};
    for (const Part& part : parts) relu<256><<<static_cast<unsigned>((part.count + 255) / 256), 256, 0, stream>>>(part);
    return cudaGetLastError();
}
