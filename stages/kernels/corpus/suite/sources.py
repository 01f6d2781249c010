"""Sources that attack what compiles or watches them: attributes, pragmas, other files, macros, endless templates."""

from .case import REFUSED, Case, elementwise, task

RELU = task("x: torch.relu(x)", "[torch.randn(size)]", size=10007)
PLAIN = elementwise("fmaxf(x[i], 0.0f)", declarations="// declarations\n")
HELPER = elementwise("positive(x[i])", declarations="__device__ __noinline__ float positive(float v) { return fmaxf(v, 0.0f); }")
TEMPLATE = elementwise("power<DEPTH>(x[i])", declarations="""
template <int n> __device__ float power(float v) { return power<n - 1>(v); }
template <> __device__ float power<0>(float v) { return fmaxf(v, 0.0f); }
""").replace("DEPTH", "100")  # fmt: skip
RAW = elementwise("fmaxf(x[i], 0.0f)", declarations='constexpr const char* text = R"(// no comment " )";\n')
PAST = ("if (i >= task::out_size) return;", "if (i > task::out_size) return;")
BEFORE = "// declarations\n"


def refused(name, honest, *edits, cuda=("compile_error",), cpu=("compile_error",), **more):
    return Case(name, RELU, honest, *edits, cpu=cpu, cuda=cuda, **more)


CASES = [
    refused("no_sanitize", HELPER, ("__noinline__ float", '__attribute__((no_sanitize("address"))) __noinline__ float'), ("return fmaxf(v, 0.0f);", "return fmaxf(*(&v + 9) * 0.0f + v, 0.0f);"), cuda=(*REFUSED, "correct")),
    refused("no_sanitize_by_pasting", HELPER, ("__noinline__ float", "JOIN(__attri, bute__)((JOIN(no_sani, tize_address))) float"), ("__device__ ", "#define JOIN_(a, b) a##b\n#define JOIN(a, b) JOIN_(a, b)\n__device__ "), PAST, cuda=("out_of_bounds", "compile_error")),
    refused("sanitizer_functions", PLAIN, (BEFORE, 'extern "C" void __asan_unpoison_memory_region(void const volatile*, unsigned long);\n'), ("out[i] =", "__asan_unpoison_memory_region(out, 1 << 20);\n    out[i] ="), PAST),
    refused("functions_of_the_device", PLAIN, (BEFORE, 'extern "C" void cuda_cpu_barrier();\n'), ("out[i] =", "cuda_cpu_barrier();\n    out[i] ="), cpu=("compile_error", "unsupported", "crash")),
    refused("pragma_optimize", HELPER, ("__device__ __noinline__", '#pragma GCC optimize("no-sanitize=address")\n__device__ __noinline__'), PAST, cuda=("out_of_bounds", "compile_error"), cpu=("compile_error", "out_of_bounds")),
    refused("sections", PLAIN, (BEFORE, '__attribute__((section(".text"))) __device__ unsigned char code[] = {0xc3};\n'), PAST, cuda=("out_of_bounds", "compile_error")),
    refused("another_file", PLAIN, (BEFORE, '#include "/etc/passwd"\n')),
    refused("another_file_of_the_system", PLAIN, (BEFORE, '#include "/etc/group"\n')),
    refused("endless_templates", TEMPLATE, ("power<0>(float", "power<1000000>(float"), cuda=("compile_error", "timeout"), cpu=("compile_error", "timeout")),
    refused("a_large_table", PLAIN, (BEFORE, "__device__ char table[1ll << 36] = {1};\n"), ("out[i] =", "table[i] = 1;\n    out[i] ="), cuda=("compile_error", "launch_error"), cpu=("compile_error", "crash")),
    refused("launch_lines_of_its_own", PLAIN, (BEFORE, "#undef TASK_LAUNCH\n#define TASK_LAUNCH(kernel, grid, block)\n"), cuda=("compile_error",)),
    refused("sizes_of_its_own", PLAIN, (BEFORE, "namespace task { constexpr int out_size = 1; }\n")),
    refused("a_missing_barrier", elementwise("shared[(threadIdx.x + 1) % 256] * 0.0f + fmaxf(x[i], 0.0f)", """__shared__ float shared[256];
    shared[threadIdx.x] = 1.0f;
    __syncwarp();""").replace("if (i >= task::out_size) return;\n", "").replace("out[i] =", "if (i < task::out_size) out[i] =").replace("__syncwarp", "__syncthreads"), ("__syncthreads();", ""), cpu=("race",), cuda=(*REFUSED, "correct")),
    refused("code_in_a_raw_string", RAW, ('R"(// no comment " )"', 'R"(// no comment )" / 0 "'), ),
    refused("wrong_types", PLAIN, ("run(TASK_PARAMETERS)", "run(const int* x, float* out)")),
    refused("two_kernels_of_a_name", PLAIN, (BEFORE, 'extern "C" __global__ void run(float* out, const float* x) {}\n')),
    refused("no_kernel", PLAIN, ("__global__ void run", "__device__ void run")),
    refused("functions_of_the_host", PLAIN, (BEFORE, 'extern "C" int system(const char*);\n'), ("out[i] =", 'if (i == 0) system("true");\n    out[i] =')),
]  # fmt: skip
