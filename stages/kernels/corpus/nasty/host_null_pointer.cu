// A host function that writes through a null pointer that no compiler can see to be one.
#include "task.h"

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    volatile unsigned long long nowhere = 0;
    *reinterpret_cast<volatile float*>(nowhere) = 1.0f;
    return cudaSuccess;
}
