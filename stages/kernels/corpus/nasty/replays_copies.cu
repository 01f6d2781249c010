// Right: fills and copies of many shapes before and after the kernel; the default stream is as good as the one that is given.
#include "task.h"

TASK_SCRATCH(task::x_size * sizeof(float) + 64);

__global__ void relu(const float* x, float* out) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] += fmaxf(x[i], 0.0f);
}

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    const size_t bytes = task::x_size * sizeof(float), rows = 7, width = bytes / rows, rest = bytes - rows * width;
    char* aside = static_cast<char*>(scratch) + 64;
    cudaMemcpyAsync(aside, x, bytes, cudaMemcpyDeviceToDevice, stream);
    cudaMemset2DAsync(out, width, 0, width, rows, stream);
    cudaMemsetAsync(reinterpret_cast<char*>(out) + rows * width, 0, rest);
    relu<<<static_cast<unsigned>((task::x_size + 255) / 256), 256>>>(reinterpret_cast<const float*>(aside), out);
    cudaMemcpy2DAsync(aside, width, out, width, width, rows, cudaMemcpyDefault, stream);
    cudaMemcpyAsync(aside + rows * width, reinterpret_cast<char*>(out) + rows * width, rest, cudaMemcpyDeviceToDevice, stream);
    cudaMemsetAsync(out, 0x7f, bytes, stream);
    cudaMemcpyAsync(out, aside, bytes, cudaMemcpyDefault, stream);
    cudaStreamSynchronize(stream);
    return cudaGetLastError();
}
