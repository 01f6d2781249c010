"""Launches, copies and fills that are not what they seem: records made by hand, arguments and sizes out of range."""

from .case import CORRECT, REFUSED, UNSUPPORTED, VALUES, WAVE, Case, launched

LAUNCH = "wave<<<blocks, 256, 0, stream>>>(x, out);"
PLAIN = launched()
ARGUMENTS = launched("void* arguments[] = {&x, &out};\n    cudaLaunchKernel((const void*)wave, dim3(blocks), dim3(256), arguments, 0, stream);")
CALL_ARGUMENTS = "void* arguments[] = {&x, &out};"
COPIED = launched("wave<<<blocks, 256, 0, stream>>>(x, (float*)scratch);\n    cudaMemcpyAsync(out, scratch, sizeof(float) * task::out_size, cudaMemcpyDeviceToDevice, stream);", "TASK_SCRATCH(sizeof(float) * task::out_size);")
FILLED = launched("cudaMemsetAsync(out, 0, sizeof(float) * task::out_size, stream);\n    wave<<<blocks, 256, 0, stream>>>(x, out);", kernel="atomicAdd(&out[i], sinf(x[i]) + x[i]);")
SYMBOL = launched("static const float numbers[2] = {1.0f, 1.0f};\n    cudaMemcpyToSymbolAsync(factors, numbers, sizeof numbers, 0, cudaMemcpyHostToDevice, stream);\n    wave<<<blocks, 256, 0, stream>>>(x, out);", "__constant__ float factors[2];", kernel="out[i] = factors[0] * sinf(x[i]) + factors[1] * x[i];")
KEPT = launched("work<<<blocks, 256, 0, stream>>>(x);\n    wave<<<blocks, 256, 0, stream>>>(x, out);", "__device__ float kept[task::out_size];\n__global__ void work(const float* x) {\n    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < task::out_size) kept[i] = sinf(x[i]) + x[i];\n}", kernel="out[i] = kept[i];")
TEMPLATES = launched("pick<task::out_size % 2 == 0>(x, out, stream);", "template <bool even> __global__ void parity(const float* x, float* out) {\n    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < task::out_size) out[i] = even ? 0.0f : sinf(x[i]) + x[i];\n}\ntemplate <bool even> static void pick(const float* x, float* out, cudaStream_t stream) {\n    parity<even><<<(task::out_size + 255) / 256, 256, 0, stream>>>(x, out);\n}")
SHARED = launched("cudaFuncSetAttribute(wave, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);\n    wave<<<blocks, 256, 65536, stream>>>(x, out);", kernel="extern __shared__ float room[];\n    room[threadIdx.x] = x[i];\n    out[i] = sinf(room[threadIdx.x]) + x[i];")
NUMBERS = launched("for (int part = 0; part < 3; ++part) piece<<<(third + 255) / 256, 256, 0, stream>>>(x, out, part * third, part == 2 ? task::out_size : (part + 1) * third);", "constexpr int third = task::out_size / 3 + 1;\n__global__ void piece(const float* x, float* out, int start, int stop) {\n    const int i = start + blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < stop) out[i] = sinf(x[i]) + x[i];\n}")
STRUCTURED = launched("piece<<<blocks, 256, 0, stream>>>(Arguments{x, out, task::out_size});", "struct Arguments { const float* from; float* to; int count; };\n__global__ void piece(Arguments all) {\n    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < all.count) all.to[i] = sinf(all.from[i]) + all.from[i];\n}")
CLUSTER = launched("cudaLaunchConfig_t config = {};\n    config.gridDim = dim3((blocks + 3) / 4 * 4);\n    config.blockDim = dim3(256);\n    config.stream = stream;\n    cudaLaunchAttribute attribute = {};\n    attribute.id = cudaLaunchAttributeClusterDimension;\n    attribute.val.clusterDim.x = 4;\n    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;\n    config.attrs = &attribute;\n    config.numAttrs = 1;\n    cudaLaunchKernelEx(&config, wave, x, out);")
COOPERATIVE = launched("void* arguments[] = {&x, &out};\n    cudaLaunchCooperativeKernel((const void*)loop, dim3(16), dim3(256), arguments, 0, stream);", "__global__ void loop(const float* x, float* out) {\n    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < task::out_size; i += gridDim.x * blockDim.x) out[i] = sinf(x[i]) + x[i];\n}")
FEWER = launched("int device = 0, processors = 1;\n    cudaGetDevice(&device);\n    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);\n    loop<<<processors, 256, 0, stream>>>(x, out);", "__global__ void loop(const float* x, float* out) {\n    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < task::out_size; i += gridDim.x * blockDim.x) out[i] = sinf(x[i]) + x[i];\n}")

PUSH = 'extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*);\n'
REGISTER = """
extern "C" void** __cudaRegisterFatBinary(void*);
extern "C" void __cudaRegisterFatBinaryEnd(void**);
struct Wrapper { int magic, version; const unsigned long long* data; void* rest; };
static const unsigned long long image[8] = {0x00100001ba55ed50ull, 0x40ull};
static Wrapper wrapper = {0x466243b1, 1, image, nullptr};
"""
ANY_ON_CPU = REFUSED + CORRECT


def host(name, honest, *edits, cpu=REFUSED, cuda=REFUSED, code=WAVE, **more):
    return Case(name, code, honest, *edits, cpu=cpu, cuda=cuda, **more)


CASES = [
    host("a_binary_by_hand", launched(declarations="struct Plain { int magic, version; };\nstatic const Plain plain = {1, 2};\n"), ("struct Plain { int magic, version; };\nstatic const Plain plain = {1, 2};", REGISTER), (LAUNCH, f"__cudaRegisterFatBinaryEnd(__cudaRegisterFatBinary(&wrapper));\n    {LAUNCH}"), cpu=REFUSED),
    host("a_configuration_by_hand", PLAIN, ("constexpr int blocks", PUSH + "constexpr int blocks"), (LAUNCH, f"__cudaPushCallConfiguration(dim3(1), dim3(32), 0, stream);\n    {LAUNCH}"), cpu=ANY_ON_CPU, cuda=ANY_ON_CPU),
    host("no_kernel_at_all", ARGUMENTS, ("(const void*)wave", "(const void*)&launch"), cpu=REFUSED, twin_cpu=CORRECT + UNSUPPORTED),
    host("no_arguments", ARGUMENTS, ("arguments, 0, stream", "nullptr, 0, stream"), cpu=REFUSED, twin_cpu=CORRECT + UNSUPPORTED),
    host("arguments_the_wrong_way_round", ARGUMENTS, (CALL_ARGUMENTS, "void* arguments[] = {&out, &x};"), cpu=REFUSED, twin_cpu=CORRECT + UNSUPPORTED),
    host("an_argument_of_the_host", ARGUMENTS, (CALL_ARGUMENTS, "static float room[task::out_size];\n    float* own = room;\n    void* arguments[] = {&x, &own};"), cpu=REFUSED, twin_cpu=CORRECT + UNSUPPORTED),
    host("an_address_of_its_own", PLAIN, ("(x, out);", "(x, (float*)0x7f0000000000ull);")),
    host("beside_the_output", PLAIN, ("(x, out);", "(x, out - 64);")),
    host("a_negative_grid", PLAIN, ("wave<<<blocks,", "wave<<<-blocks,")),
    host("too_many_threads", PLAIN, ("256, 0, stream", "2048, 0, stream")),
    host("too_much_shared_memory", SHARED, ("MaxDynamicSharedMemorySize, 65536", "MaxDynamicSharedMemorySize, 300000"), ("256, 65536, stream", "256, 300000, stream")),
    host("shared_memory_without_asking", SHARED, ("cudaFuncSetAttribute(wave, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);\n    ", "")),
    host("half_a_copy", COPIED, ("sizeof(float) * task::out_size, cudaMemcpyDeviceToDevice", "sizeof(float) * (task::out_size / 2), cudaMemcpyDeviceToDevice"), cpu=["unwritten"], cuda=["unwritten"]),
    host("a_copy_past_the_end", COPIED, ("sizeof(float) * task::out_size, cudaMemcpyDeviceToDevice", "sizeof(float) * task::out_size + 512, cudaMemcpyDeviceToDevice")),
    host("a_copy_of_the_input", COPIED, ("cudaMemcpyAsync(out, scratch,", "cudaMemcpyAsync(out, x,"), cpu=["wrong"], cuda=["wrong"]),
    host("a_copy_to_the_input", COPIED, ("cudaMemcpyAsync(out, scratch,", "cudaMemcpyAsync((void*)x, scratch,")),
    host("a_copy_from_the_host", COPIED, ("cudaMemcpyAsync(out, scratch, sizeof(float) * task::out_size, cudaMemcpyDeviceToDevice, stream)", "static float zeros[task::out_size];\n    cudaMemcpyAsync(out, zeros, sizeof zeros, cudaMemcpyHostToDevice, stream)")),
    host("a_fill_in_place_of_work", FILLED, (LAUNCH, ""), cpu=["wrong"], cuda=["wrong"]),
    host("a_fill_past_the_end", FILLED, ("cudaMemsetAsync(out, 0, sizeof(float) * task::out_size, stream)", "cudaMemsetAsync(out, 0, sizeof(float) * task::out_size + 64, stream)")),
    host("no_fill", FILLED, ("cudaMemsetAsync(out, 0, sizeof(float) * task::out_size, stream);\n    ", ""), cpu=["unwritten", "wrong", "nonfinite"], cuda=["unwritten", "wrong", "nonfinite"]),
    host("a_symbol_that_counts", SYMBOL, ("static const float numbers[2] = {1.0f, 1.0f};", "static float numbers[2] = {1.0f, 1.0f};\n    numbers[0] -= 0.01f;"), cpu=REFUSED),
    host("a_symbol_of_another_size", SYMBOL, ("sizeof numbers, 0,", "sizeof numbers, 4,")),
    host("kept_in_the_device", KEPT, ("work<<<blocks, 256, 0, stream>>>(x);", "static bool is_kept;\n    if (!is_kept) work<<<blocks, 256, 0, stream>>>(x);\n    is_kept = true;"), cpu=REFUSED),
    host("kept_by_the_device", KEPT, ("if (i < task::out_size) kept[i] =", "if (i < task::out_size && kept[i] == 0.0f) kept[i] ="), cpu=VALUES, cuda=VALUES),
    host("the_other_template", TEMPLATES, ("task::out_size % 2 == 0", "task::out_size % 2 == 1"), cpu=["wrong"], cuda=["wrong"]),
    host("a_piece_left_out", NUMBERS, ("part < 3", "part < 2"), cpu=["unwritten"], cuda=["unwritten"]),
    host("a_count_in_a_structure", STRUCTURED, ("x, out, task::out_size}", "x, out, task::out_size - 1}"), cpu=["unwritten"], cuda=["unwritten"]),
    host("too_large_a_cluster", CLUSTER, ("clusterDim.x = 4", "clusterDim.x = 64"), cpu=REFUSED, twin_cpu=CORRECT + UNSUPPORTED),
    host("cooperative_for_ever", COOPERATIVE, ("__global__ void loop(const float* x, float* out) {", "__global__ void loop(const float* x, float* out) {\n    for (volatile int n = 0; blockIdx.x == 3; n = n + 1);"), twin_cpu=CORRECT + UNSUPPORTED),
    host("by_the_device_at_hand", FEWER, ("loop<<<processors, 256", "if (processors > 0) return cudaSuccess;\n    loop<<<processors, 256"), cpu=["unwritten"], cuda=["unwritten", "launch_error", "compile_error"]),
    host("nothing", PLAIN, (LAUNCH, ""), cpu=["unwritten", "launch_error"], cuda=["unwritten", "launch_error", "compile_error"]),
    host("a_thousand_launches_of_nothing", launched("for (int n = 0; n < 20; ++n) wave<<<blocks, 256, 0, stream>>>(x, out);"), ("n < 20", "n < 20000000"), cpu=REFUSED),
]  # fmt: skip
