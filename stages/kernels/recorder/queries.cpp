// What a candidate may ask about: errors, the device, its kernels.
#include "recorder.h"

#include <cuda_occupancy.h>

#include <algorithm>
#include <cstring>

using namespace recorder;

static cudaError_t last_error = cudaSuccess;

cudaError_t recorder::fail(cudaError_t error) { return last_error = error; }

int recorder::attribute(int number) {
    const auto& all = facts().attributes;
    return number >= 0 && (size_t)number < all.size() ? all[(size_t)number] : 0;
}

namespace {

// Threads that a block of the kernel can have: by its registers, whose unit is 256 for a warp and whose warps come in fours.
int threads_at_most(const Kernel& kernel) {
    int of_warp = (std::max(kernel.registers, 1) * 32 + 255) / 256 * 256;
    int warps = attribute(cudaDevAttrMaxRegistersPerBlock) / of_warp / 4 * 4;
    return std::max(32, std::min({1024, kernel.max_threads, warps * 32}));
}

cudaOccDeviceProp device() {
    cudaOccDeviceProp of{};
    of.computeMajor = attribute(cudaDevAttrComputeCapabilityMajor);
    of.computeMinor = attribute(cudaDevAttrComputeCapabilityMinor);
    of.maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
    of.maxThreadsPerMultiprocessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    of.regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
    of.regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    of.warpSize = attribute(cudaDevAttrWarpSize);
    of.sharedMemPerBlock = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    of.sharedMemPerMultiprocessor = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    of.numSms = attribute(cudaDevAttrMultiProcessorCount);
    of.sharedMemPerBlockOptin = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    of.reservedSharedMemPerBlock = (size_t)attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    return of;
}

cudaOccFuncAttributes of_kernel(const Kernel& kernel) {
    cudaOccFuncAttributes of{};
    of.maxThreadsPerBlock = threads_at_most(kernel);
    of.numRegs = kernel.registers;
    of.sharedSizeBytes = (size_t)kernel.static_shared;
    of.partitionedGCConfig = PARTITIONED_GC_OFF;
    of.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    of.maxDynamicSharedSizeBytes = dynamic_shared_limit(kernel);
    of.numBlockBarriers = 1;
    return of;
}

cudaOccDeviceState state_of(const Kernel& kernel) {
    cudaOccDeviceState state{};
    state.carveoutConfig = kernel.carveout;
    return state;
}

// Blocks of a kernel on one multiprocessor.
cudaError_t blocks(int* count, const Kernel* kernel, int threads, size_t shared) {
    *count = 0;
    if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
    if (threads <= 0) return fail(cudaErrorInvalidValue);
    cudaOccDeviceProp properties = device();
    cudaOccFuncAttributes attributes = of_kernel(*kernel);
    cudaOccDeviceState state = state_of(*kernel);
    cudaOccResult result{};
    cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &properties, &attributes, &state, threads, shared);
    if (error != CUDA_OCC_SUCCESS) return fail(cudaErrorInvalidValue);
    *count = result.activeBlocksPerMultiprocessor;
    return cudaSuccess;
}

// The size of a launch's clusters; 1 where it asks for none.
unsigned cluster_of(const cudaLaunchConfig_t& at) {
    unsigned size = 1;
    for (unsigned index = 0; index < at.numAttrs; ++index) {
        const auto& value = at.attrs[index].val.clusterDim;
        if (at.attrs[index].id == cudaLaunchAttributeClusterDimension) size = value.x * value.y * value.z;
    }
    return std::max(size, 1u);
}

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidSymbol: return "cudaErrorInvalidSymbol";
        case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorLaunchOutOfResources: return "cudaErrorLaunchOutOfResources";
        case cudaErrorMissingConfiguration: return "cudaErrorMissingConfiguration";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        default: return "cudaErrorUnknown";
    }
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidSymbol: return "invalid device symbol";
        case cudaErrorInvalidDeviceFunction: return "invalid device function";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorLaunchOutOfResources: return "too many resources requested for launch";
        case cudaErrorMissingConfiguration: return "__global__ function call is not configured";
        case cudaErrorNotSupported: return "operation not supported";
        default: return "unknown error";
    }
}

cudaError_t cudaGetDevice(int* number) {
    *number = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int device) {
    if (device != 0) return fail(cudaErrorInvalidDevice);
    if (number <= 0 || (size_t)number >= facts().attributes.size()) return fail(cudaErrorInvalidValue);
    *value = attribute(number);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = facts().driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
    if (device != 0) return fail(cudaErrorInvalidDevice);
    memset((void*)of, 0, sizeof *of);
    strncpy(of->name, facts().name.c_str(), sizeof of->name - 1);
    of->totalGlobalMem = facts().memory;
    of->sharedMemPerBlock = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    of->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
    of->warpSize = attribute(cudaDevAttrWarpSize);
    of->memPitch = (size_t)attribute(cudaDevAttrMaxPitch);
    of->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
    const int dimensions[] = {cudaDevAttrMaxBlockDimX, cudaDevAttrMaxBlockDimY, cudaDevAttrMaxBlockDimZ};
    const int sizes[] = {cudaDevAttrMaxGridDimX, cudaDevAttrMaxGridDimY, cudaDevAttrMaxGridDimZ};
    for (int axis = 0; axis < 3; ++axis) {
        of->maxThreadsDim[axis] = attribute(dimensions[axis]);
        of->maxGridSize[axis] = attribute(sizes[axis]);
    }
    of->totalConstMem = (size_t)attribute(cudaDevAttrTotalConstantMemory);
    of->major = attribute(cudaDevAttrComputeCapabilityMajor);
    of->minor = attribute(cudaDevAttrComputeCapabilityMinor);
    of->textureAlignment = (size_t)attribute(cudaDevAttrTextureAlignment);
    of->texturePitchAlignment = (size_t)attribute(cudaDevAttrTexturePitchAlignment);
    of->surfaceAlignment = (size_t)attribute(cudaDevAttrSurfaceAlignment);
    of->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    of->integrated = attribute(cudaDevAttrIntegrated);
    of->concurrentKernels = attribute(cudaDevAttrConcurrentKernels);
    of->ECCEnabled = attribute(cudaDevAttrEccEnabled);
    of->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
    of->unifiedAddressing = attribute(cudaDevAttrUnifiedAddressing);
    of->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
    of->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
    of->persistingL2CacheMaxSize = attribute(cudaDevAttrMaxPersistingL2CacheSize);
    of->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    of->streamPrioritiesSupported = attribute(cudaDevAttrStreamPrioritiesSupported);
    of->globalL1CacheSupported = attribute(cudaDevAttrGlobalL1CacheSupported);
    of->localL1CacheSupported = attribute(cudaDevAttrLocalL1CacheSupported);
    of->sharedMemPerMultiprocessor = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    of->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    of->computePreemptionSupported = attribute(cudaDevAttrComputePreemptionSupported);
    of->cooperativeLaunch = attribute(cudaDevAttrCooperativeLaunch);
    of->sharedMemPerBlockOptin = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    of->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    of->accessPolicyMaxWindowSize = attribute(cudaDevAttrMaxAccessPolicyWindowSize);
    of->reservedSharedMemPerBlock = (size_t)attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    of->clusterLaunch = attribute(cudaDevAttrClusterLaunch);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* of, int device) { return cudaGetDeviceProperties(of, device); }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void* function) {
    const Kernel* kernel = kernel_of(function);
    if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
    memset((void*)of, 0, sizeof *of);
    int version = attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor);
    of->binaryVersion = of->ptxVersion = version;
    of->sharedSizeBytes = (size_t)kernel->static_shared;
    of->localSizeBytes = (size_t)kernel->local;
    of->maxThreadsPerBlock = threads_at_most(*kernel);
    of->numRegs = kernel->registers;
    of->maxDynamicSharedSizeBytes = (int)dynamic_shared_limit(*kernel);
    of->preferredShmemCarveout = kernel->carveout;
    of->nonPortableClusterSizeAllowed = kernel->non_portable_cluster;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void* function, int threads, size_t shared, unsigned) {
    return blocks(count, kernel_of(function), threads, shared);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* function, int threads, size_t shared) {
    return blocks(count, kernel_of(function), threads, shared);
}

cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, const void* function, int count, int threads) {
    const Kernel* kernel = kernel_of(function);
    if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
    cudaOccDeviceProp properties = device();
    cudaOccFuncAttributes attributes = of_kernel(*kernel);
    cudaOccDeviceState state = state_of(*kernel);
    cudaOccError error = cudaOccAvailableDynamicSMemPerBlock(bytes, &properties, &attributes, &state, count, threads);
    return error == CUDA_OCC_SUCCESS ? cudaSuccess : fail(cudaErrorInvalidValue);
}

// Which multiprocessors can form clusters only the driver of the card knows; sixteen to a group is what an H100 has at least.
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void* function, const cudaLaunchConfig_t* at) {
    int each = 0;
    unsigned size = cluster_of(*at);
    int threads = (int)(at->blockDim.x * at->blockDim.y * at->blockDim.z);
    *count = 0;
    if (cudaError_t error = blocks(&each, kernel_of(function), threads, at->dynamicSmemBytes); error != cudaSuccess) return error;
    int groups = attribute(cudaDevAttrMultiProcessorCount) / 16;
    *count = std::max(groups, 1) * ((16 * each) / (int)size);
    return cudaSuccess;
}

// The size that every GPU with clusters has.
cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, const void* function, const cudaLaunchConfig_t*) {
    const Kernel* kernel = kernel_of(function);
    if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
    *size = attribute(cudaDevAttrClusterLaunch) ? (kernel->non_portable_cluster ? 16 : 8) : 1;
    return cudaSuccess;
}

}  // extern "C"
