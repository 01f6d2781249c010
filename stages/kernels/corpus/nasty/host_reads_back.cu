// A host function that looks at what its kernel computed before it goes on.
#include "task.h"

__global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = fmaxf(x[i], 0.0f);
}

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    const unsigned blocks = static_cast<unsigned>((task::x_size + 255) / 256);
    relu<<<blocks, 256, 0, stream>>>(x, out);
    float first = 0.0f;
    cudaMemcpyAsync(&first, out, sizeof first, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    if (first < 0.0f) relu<<<blocks, 256, 0, stream>>>(x, out);
    return cudaGetLastError();
}
