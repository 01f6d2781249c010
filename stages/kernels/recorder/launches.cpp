// What starts work: launches, fills, copies.
#include "recorder.h"

#include <cstring>
#include <map>

using namespace recorder;

namespace {

std::map<const void*, Kernel*>& functions() {
    static auto* all = new std::map<const void*, Kernel*>;
    return *all;
}

std::map<const void*, Stretch*>& shadows() {
    static auto* all = new std::map<const void*, Stretch*>;
    return *all;
}

bool is_on_device(const void* address) {
    return (uint64_t)address >= facts().lowest && (uint64_t)address < facts().end;
}

// The default stream waits for the one that launch is given, and the other way round: in order, it is the same one.
void check(cudaStream_t stream, const char* name) {
    if (stream == (cudaStream_t)facts().end || stream == nullptr || stream == cudaStreamLegacy) return;
    if (stream == cudaStreamPerThread) {
        refuse("cudaStreamPerThread", "all work goes on the stream that launch is given");
    }
    refuse(name, "it names a stream that is not the one that launch is given");
}

struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};

std::vector<Configuration>& pushed() {
    static auto* all = new std::vector<Configuration>;
    return *all;
}

// What a launch may carry, as four numbers; others have no meaning without streams and events of one's own.
bool note_of(const cudaLaunchAttribute& attribute, uint32_t (&note)[4]) {
    const auto& value = attribute.val;
    note[0] = (uint32_t)attribute.id, note[2] = note[3] = 0;
    switch (attribute.id) {
        case cudaLaunchAttributeIgnore: return false;
        case cudaLaunchAttributeCooperative: note[1] = (uint32_t)value.cooperative; return true;
        case cudaLaunchAttributeClusterDimension:
            note[1] = value.clusterDim.x, note[2] = value.clusterDim.y, note[3] = value.clusterDim.z;
            return true;
        case cudaLaunchAttributeClusterSchedulingPolicyPreference:
            note[1] = (uint32_t)value.clusterSchedulingPolicyPreference;
            return true;
        case cudaLaunchAttributeProgrammaticStreamSerialization:
            note[1] = (uint32_t)value.programmaticStreamSerializationAllowed;
            return true;
        case cudaLaunchAttributePreferredSharedMemoryCarveout: note[1] = value.sharedMemCarveout; return true;
        case cudaLaunchAttributePriority:
            // There is one stream: nothing to go before.
            return false;
        default: {
            const char* name = attribute.id == cudaLaunchAttributeAccessPolicyWindow ? "cudaLaunchAttributeAccessPolicyWindow"
                : attribute.id == cudaLaunchAttributeProgrammaticEvent               ? "cudaLaunchAttributeProgrammaticEvent"
                : attribute.id == cudaLaunchAttributeLaunchCompletionEvent           ? "cudaLaunchAttributeLaunchCompletionEvent"
                                                                                     : "cudaLaunchKernelExC";
            refuse(name, "a launch can't have the attribute " + std::to_string((int)attribute.id) + " here");
        }
    }
}

cudaError_t start(Kernel* kernel, const Configuration& at, void** arguments, const cudaLaunchAttribute* attributes,
                  unsigned count, const char* name) {
    check(at.stream, name);
    if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
    uint64_t threads = (uint64_t)at.block.x * at.block.y * at.block.z;
    bool fits = at.grid.x && at.grid.y && at.grid.z && at.grid.x <= INT32_MAX && at.grid.y < 65536 && at.grid.z < 65536 &&
                at.block.x <= 1024 && at.block.y <= 1024 && at.block.z <= 64 && threads > 0;
    if (!fits) return fail(cudaErrorInvalidConfiguration);
    if (threads > (uint64_t)kernel->max_threads) {
        return fail(threads > 1024 ? cudaErrorInvalidConfiguration : cudaErrorLaunchOutOfResources);
    }
    if (at.shared > dynamic_shared_limit(*kernel)) return fail(cudaErrorInvalidValue);
    std::vector<unsigned char> bytes(kernel->parameter_bytes);
    if (!kernel->parameters.empty() && !arguments) return fail(cudaErrorInvalidValue);
    for (size_t index = 0; index < kernel->parameters.size(); ++index) {
        auto [offset, size] = kernel->parameters[index];
        memcpy(bytes.data() + offset, arguments[index], size);
    }
    std::vector<uint32_t> notes;
    for (unsigned index = 0; index < count; ++index) {
        uint32_t note[4];
        if (note_of(attributes[index], note)) notes.insert(notes.end(), note, note + 4);
    }
    Output& out = output();
    out.byte(LAUNCH), out.u32(kernel->index);
    for (unsigned size : {at.grid.x, at.grid.y, at.grid.z, at.block.x, at.block.y, at.block.z}) out.u32(size);
    out.u32((uint32_t)at.shared), out.u32((uint32_t)(notes.size() / 4)), out.put(notes.data(), notes.size() * 4);
    out.u32((uint32_t)bytes.size()), out.put(bytes.data(), bytes.size());
    return cudaSuccess;
}

cudaError_t fill(void* to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream, const char* name) {
    check(stream, name);
    if (width == 0 || height == 0) return cudaSuccess;
    if (!is_on_device(to) || (height > 1 && pitch < width)) return fail(cudaErrorInvalidValue);
    Output& out = output();
    out.byte(FILL), out.u64((uint64_t)to), out.u64(pitch), out.u32((uint32_t)value & 0xff), out.u64(width), out.u64(height);
    return cudaSuccess;
}

// Rows of `width` bytes from one place to another.
cudaError_t copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                 cudaMemcpyKind kind, cudaStream_t stream, const char* name) {
    check(stream, name);
    if (width == 0 || height == 0) return cudaSuccess;
    if (height > 1 && (to_pitch < width || from_pitch < width)) return fail(cudaErrorInvalidValue);
    bool from_device = is_on_device(from), to_device = is_on_device(to);
    bool as_said = kind == cudaMemcpyDefault || kind == (to_device ? (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                                                                  : (from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost));
    if (!as_said) {
        // A pointer of the other kind than the source says: the runtime refuses it.
        return fail(cudaErrorInvalidValue);
    }
    if (!to_device) refuse(name, "a result read back to the host can't be recorded: launch runs once, without a GPU, before any input is there");
    Output& out = output();
    if (from_device) {
        out.byte(COPY), out.u64((uint64_t)to), out.u64(to_pitch), out.u64((uint64_t)from), out.u64(from_pitch);
        out.u64(width), out.u64(height);
        return cudaSuccess;
    }
    if (width > UINT32_MAX || height > UINT32_MAX || width * height > UINT32_MAX) {
        refuse(name, "more is copied from the host than a recording holds");
    }
    out.byte(WRITE), out.u64((uint64_t)to), out.u64(to_pitch), out.u64(width), out.u64(height), out.u32((uint32_t)(width * height));
    for (size_t row = 0; row < height; ++row) out.put((const char*)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t set(Kernel* kernel, cudaFuncAttribute attribute, int value) {
    if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
    switch (attribute) {
        case cudaFuncAttributeMaxDynamicSharedMemorySize:
            if (value < 0 || value + kernel->static_shared > recorder::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) {
                return fail(cudaErrorInvalidValue);
            }
            kernel->max_dynamic_shared = value;
            break;
        case cudaFuncAttributePreferredSharedMemoryCarveout:
            if (value < -1 || value > 100) return fail(cudaErrorInvalidValue);
            kernel->carveout = value;
            break;
        case cudaFuncAttributeNonPortableClusterSizeAllowed: kernel->non_portable_cluster = value; break;
        default:
            refuse("cudaFuncSetAttribute", "a kernel can't have the attribute " + std::to_string((int)attribute) + " here");
    }
    output().begin_attribute();
    output().byte(ATTRIBUTE), output().u32(kernel->index), output().u32((uint32_t)attribute), output().u32((uint32_t)value);
    output().end_attribute();
    return cudaSuccess;
}

}  // namespace

Kernel* recorder::kernel_of(const void* function) {
    auto found = functions().find(function);
    if (found != functions().end()) return found->second;
    // A cudaKernel_t of cudaGetKernel and the launches made from it.
    for (Kernel& kernel : facts().kernels)
        if (function == &kernel) return &kernel;
    return nullptr;
}

uint64_t recorder::dynamic_shared_limit(const Kernel& kernel) {
    if (kernel.max_dynamic_shared >= 0) return (uint64_t)kernel.max_dynamic_shared;
    int usual = attribute(cudaDevAttrMaxSharedMemoryPerBlock) - kernel.static_shared;
    return usual < 0 ? 0 : (uint64_t)usual;
}

extern "C" {

void** __cudaRegisterFatBinary(void*) {
    // nvcc registers one, before main; only the kernels in there can be launched.
    static int count = 0;
    if (++count > 1) refuse("__cudaRegisterFatBinary", "a candidate has one binary, which is registered already");
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }

void __cudaRegisterFunction(void**, const char* function, char*, const char* symbol, int, uint3*, uint3*, dim3*, dim3*, int*) {
    for (Kernel& kernel : facts().kernels)
        if (kernel.symbol == symbol) functions()[function] = &kernel;
}

void __cudaRegisterVar(void**, char* shadow, char*, const char* symbol, int, size_t, int, int) {
    for (Stretch& variable : facts().variables)
        if (variable.symbol == symbol) shadows()[shadow] = &variable;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
    pushed().push_back({grid, block, shared, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    if (pushed().empty()) return fail(cudaErrorMissingConfiguration);
    Configuration& last = pushed().back();
    *grid = last.grid, *block = last.block, *shared = last.shared, *(cudaStream_t*)stream = last.stream;
    pushed().pop_back();
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* function) {
    *handle = (cudaKernel_t)kernel_of(function);
    return *handle ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    return start(kernel_of(function), {grid, block, shared, stream}, arguments, nullptr, 0, "cudaLaunchKernel");
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative, cooperative.val.cooperative = 1;
    return start(kernel_of(function), {grid, block, shared, stream}, arguments, &cooperative, 1, "cudaLaunchCooperativeKernel");
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* at, const void* function, void** arguments) {
    Configuration configuration{at->gridDim, at->blockDim, at->dynamicSmemBytes, at->stream};
    return start(kernel_of(function), configuration, arguments, at->attrs, at->numAttrs, "cudaLaunchKernelExC");
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    return set(kernel_of(function), attribute, value);
}

// A hint that GPUs of today take for nothing.
cudaError_t cudaFuncSetCacheConfig(const void* function, cudaFuncCache) {
    return kernel_of(function) ? cudaSuccess : fail(cudaErrorInvalidDeviceFunction);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t count, cudaStream_t stream) {
    return fill(to, count, value, count, 1, stream, "cudaMemsetAsync");
}

cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
    return fill(to, pitch, value, width, height, stream, "cudaMemset2DAsync");
}

cudaError_t cudaMemset3DAsync(cudaPitchedPtr to, int value, cudaExtent extent, cudaStream_t stream) {
    for (size_t slice = 0; slice < extent.depth; ++slice) {
        char* start = (char*)to.ptr + slice * to.pitch * to.ysize;
        cudaError_t error = fill(start, to.pitch, value, extent.width, extent.height, stream, "cudaMemset3DAsync");
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t count, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, count, from, count, count, 1, kind, stream, "cudaMemcpyAsync");
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, to_pitch, from, from_pitch, width, height, kind, stream, "cudaMemcpy2DAsync");
}

cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* all, cudaStream_t stream) {
    if (all->srcArray || all->dstArray) refuse("cudaMemcpy3DAsync", "there are no arrays here");
    for (size_t slice = 0; slice < all->extent.depth; ++slice) {
        const auto place = [slice](const cudaPitchedPtr& pointer, const cudaPos& position) {
            return (char*)pointer.ptr + ((position.z + slice) * pointer.ysize + position.y) * pointer.pitch + position.x;
        };
        cudaError_t error = copy(place(all->dstPtr, all->dstPos), all->dstPtr.pitch, place(all->srcPtr, all->srcPos),
                                 all->srcPtr.pitch, all->extent.width, all->extent.height, all->kind, stream, "cudaMemcpy3DAsync");
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
    auto found = shadows().find(symbol);
    if (found == shadows().end()) return fail(cudaErrorInvalidSymbol);
    *address = (void*)found->second->base;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolSize(size_t* size, const void* symbol) {
    auto found = shadows().find(symbol);
    if (found == shadows().end()) return fail(cudaErrorInvalidSymbol);
    *size = found->second->size;
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbolAsync(const void* symbol, const void* from, size_t count, size_t offset, cudaMemcpyKind kind, cudaStream_t stream) {
    void* to = nullptr;
    if (cudaError_t error = cudaGetSymbolAddress(&to, symbol); error != cudaSuccess) return error;
    return copy((char*)to + offset, count, from, count, count, 1, kind, stream, "cudaMemcpyToSymbolAsync");
}

cudaError_t cudaMemcpyFromSymbolAsync(void* to, const void* symbol, size_t count, size_t offset, cudaMemcpyKind kind, cudaStream_t stream) {
    void* from = nullptr;
    if (cudaError_t error = cudaGetSymbolAddress(&from, symbol); error != cudaSuccess) return error;
    return copy(to, count, (char*)from + offset, count, count, 1, kind, stream, "cudaMemcpyFromSymbolAsync");
}

// All that was started is noted already.
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    check(stream, "cudaStreamSynchronize");
    return cudaSuccess;
}

}  // extern "C"
