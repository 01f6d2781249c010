// A host function that never returns.
#include "task.h"

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    volatile bool more = true;
    while (more) {
    }
    return cudaSuccess;
}
