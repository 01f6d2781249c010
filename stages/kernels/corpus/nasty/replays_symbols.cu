// Right: pointers that a kernel finds in a variable of the device, written from the host.
#include "task.h"

__constant__ float least[1];
__device__ const float* sources[2];
__device__ float* targets[2];

__global__ void relu() {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) targets[1][i] = fmaxf(sources[0][i], least[0]);
}

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    const float zero[] = {0.0f};
    const float* from[] = {x, nullptr};
    float* to[] = {nullptr, out};
    cudaMemcpyToSymbolAsync(least, zero, sizeof zero, 0, cudaMemcpyHostToDevice, stream);
    cudaMemcpyToSymbolAsync(sources, from, sizeof from, 0, cudaMemcpyHostToDevice, stream);
    void* address = nullptr;
    cudaGetSymbolAddress(&address, targets);
    cudaMemcpyAsync(address, to, sizeof to, cudaMemcpyHostToDevice, stream);
    relu<<<static_cast<unsigned>((task::x_size + 255) / 256), 256, 0, stream>>>();
    return cudaGetLastError();
}
