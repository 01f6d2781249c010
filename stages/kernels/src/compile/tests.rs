//! Real compilers on real sources. They need CUDA's compilers, not a GPU; `make venv` brings them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cpu::CpuCompiler;
use super::cuda::{CudaCompiler, GpuTarget};
use super::recorder::GpuFacts;
use super::toolkit::Toolkit;
use super::*;
use crate::candidate::{Candidate, Format};
use crate::compile::toolkit::PARTS;
use crate::task::{Constant, DataType, TaskSpec, Tensor};

/// The workers of the other tests are this test in a process of its own.
#[test]
#[ignore = "a compile worker, started by the other tests"]
fn as_compile_worker() {
    // The harness has not ended its line.
    println!();
    worker_main().unwrap();
}

fn worker_command() -> WorkerCommand {
    let arguments = ["--exact", "compile::tests::as_compile_worker", "--ignored", "--nocapture", "--test-threads=1"];
    WorkerCommand {
        program: std::env::current_exe().unwrap(),
        arguments: arguments.map(str::to_owned).to_vec(),
        variables: Vec::new(),
    }
}

struct Bench {
    compiler: CudaCompiler,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self::with_limits(Limits::default())
    }

    fn with_limits(limits: Limits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let compiler = CudaCompiler::with_worker(Toolkit::find(), folder.path(), 2, worker_command(), limits).unwrap();
        Self { compiler, _folder: folder }
    }

    fn compile(&self, format: Format, source: &str) -> Outcome {
        self.compiler
            .compile(&candidate(format, source), &relu_task(), &gpu())
            .unwrap_or_else(|error| panic!("{error:?}"))
    }

    fn kernel(&self, source: &str) -> Outcome {
        self.compile(Format::Kernel, source)
    }

    fn launch(&self, source: &str) -> Outcome {
        self.compile(Format::Launch, source)
    }
}

fn candidate(format: Format, source: &str) -> Candidate {
    Candidate { format, source: source.to_owned(), name: "test".to_owned() }
}

fn target(architecture: &str) -> GpuTarget {
    GpuTarget { architecture: architecture.to_owned(), facts: Arc::new(GpuFacts::of_an_h100()) }
}

fn gpu() -> GpuTarget {
    target("sm_90")
}

pub fn tensor(name: &str, shape: &[u64], dtype: DataType) -> Tensor {
    Tensor { name: name.to_owned(), shape: shape.to_vec(), dtype }
}

fn relu_task() -> TaskSpec {
    TaskSpec {
        inputs: vec![tensor("x", &[64, 1000], DataType::Float32)],
        parameters: Vec::new(),
        buffers: Vec::new(),
        outputs: vec![tensor("out", &[64, 1000], DataType::Float32)],
        constants: vec![Constant { name: "slope".to_owned(), value: serde_json::json!(0.01) }],
        flops: 64_000,
        bytes: 512_000,
    }
}

const RELU: &str = r#"#include "task.h"
extern "C" __global__ void relu(const float* x, float* out) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = fmaxf(x[i], 0.0f);
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
"#;

/// A source with the given device code before, and body of, its kernel.
fn kernel_source(before: &str, body: &str) -> String {
    format!(
        "#include \"task.h\"\n{before}\n__global__ void k(const float* x, float* out) {{\n{body}\n}}\nTASK_LAUNCH(k, 1, 32)\n"
    )
}

fn launch_source(before: &str, body: &str) -> String {
    format!(
        "#include \"task.h\"\n{before}\n__global__ void k(const float* x, float* out) {{ out[threadIdx.x] = x[threadIdx.x]; }}\n\
         extern \"C\" cudaError_t launch(TASK_PARAMETERS, void* scratch, cudaStream_t stream) {{\n{body}\n\
         k<<<1, 32, 0, stream>>>(x, out);\n  return cudaGetLastError();\n}}\n"
    )
}

/// Symbol, grid, block, dynamic shared memory and count of parameters.
type Launched<'a> = (&'a str, [u32; 3], [u32; 3], u32, usize);

fn launched(built: &Built) -> Vec<Launched<'_>> {
    let launches = built.program.launches();
    launches.map(|(k, l)| (k.symbol.as_str(), l.grid, l.block, l.shared_bytes, k.parameters.len())).collect()
}

fn shown(outcome: &Outcome) -> String {
    match outcome {
        Ok(built) => format!("built: {:?}", built.artifact.files().iter().map(|(what, _)| *what).collect::<Vec<_>>()),
        Err(CompileFailure::Source(found)) => found.iter().map(shown_diagnostic).collect::<Vec<_>>().join("\n"),
        Err(other) => format!("{other:?}"),
    }
}

fn shown_diagnostic(found: &Diagnostic) -> String {
    let place = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
    format!("{}:{} {}", place(found.line), place(found.column), found.message)
}

#[test]
fn a_kernel_becomes_machine_code_with_its_launches() {
    let built = Bench::new().kernel(RELU).unwrap();
    assert_eq!(launched(&built), [("relu", [250, 1, 1], [256, 1, 1], 0, 2)]);
    assert_eq!((built.scratch_bytes, built.resources.len()), (0, 1));
    assert_eq!(built.resources[0].kernel, "relu");
    assert!(built.resources[0].registers > 4);
    assert_eq!(built.compiler, "NVRTC 13.0");
}

#[test]
fn launches_keep_the_order_of_the_source_and_take_many_forms() {
    let source = r#"#include "task.h"
static __device__ float twice(float v) { return 2 * v; }
__global__ void zulu(const float* __restrict__ x, float* __restrict__ out, void* scratch) { ((float*)scratch)[0] = twice(x[0]); }
__global__ void alpha(TASK_PARAMETERS, float* scratch) {
    extern __shared__ float s[];
    s[threadIdx.x] = scratch[0] + task::slope + task::x_shape[threadIdx.x % task::x_rank];
    __syncthreads();
    out[threadIdx.x] = s[0];
}
constexpr dim3 grid(2, 3, 4);
TASK_LAUNCH(zulu, grid, dim3(8, 8))
TASK_LAUNCH(alpha, task::x_shape[1] / 10, 32u, 100 * 1024);
TASK_LAUNCH(zulu, task::x_shape[0], (task::x_rank) * 16)
TASK_SCRATCH(task::x_size * sizeof(float))
"#;
    let built = Bench::new().kernel(source).unwrap();
    assert_eq!(
        launched(&built),
        [
            ("_Z4zuluPKfPfPv", [2, 3, 4], [8, 8, 1], 0, 3),
            ("_Z5alphaPKfPfS1_", [100, 1, 1], [32, 1, 1], 102_400, 3),
            ("_Z4zuluPKfPfPv", [64, 1, 1], [32, 1, 1], 0, 3),
        ]
    );
    assert_eq!(built.scratch_bytes, 256_000);
}

/// What front ends print is the source's to choose.
const FORGED: &str = "#pragma message(\"\\nptxas info    : 0 bytes gmem\\nptxas info    : Compiling entry function '_Z1kPKfPf' for 'sm_90'\\n\
    ptxas info    : Function properties for _Z1kPKfPf\\n    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\\n\
    ptxas info    : Used 1 registers\\n\")\n\
    #line 1 \"a\\nptxas info    : Used 2 registers\"\n";

/// Takes many registers, 4,800 bytes of shared memory and a stack.
const GREEDY: &str = "__shared__ float s[1200]; float a[100];\n\
    asm volatile(\".pragma \\\"ptxas info    : 0 bytes gmem\\\";\");\n\
    _Pragma(\"message(\\\"ptxas info    : Used 3 registers, 4 bytes smem\\\")\")\n\
    for (int i = 0; i < 100; i++) a[i] = x[i * i + threadIdx.x];\n\
    s[threadIdx.x] = a[(int)x[0] & 63]; __syncthreads();\n\
    for (int i = 0; i < 100; i++) out[i] = a[i] * a[99 - i] + s[i];";

#[test]
fn a_source_does_not_say_what_its_kernels_take() {
    let bench = Bench::new();
    let launch = format!("__global__ void k(const float* x, float* out) {{ {GREEDY} }}");
    let launch = format!(
        "#include \"task.h\"\nLAUNCH_FORGED\n{launch}\nextern \"C\" cudaError_t launch(TASK_PARAMETERS, void*, cudaStream_t stream) {{\n\
         k<<<1, 32, 0, stream>>>(x, out);\nreturn cudaGetLastError();\n}}\n"
    );
    let honest = [bench.kernel(&kernel_source("", GREEDY)), bench.launch(&launch.replace("LAUNCH_FORGED", ""))];
    let forged = [bench.kernel(&kernel_source(FORGED, GREEDY)), bench.launch(&launch.replace("LAUNCH_FORGED", FORGED))];
    for (honest, forged) in honest.into_iter().zip(forged) {
        let [honest, forged] = [honest, forged].map(|outcome| outcome.unwrap_or_else(|failure| panic!("{failure:?}")));
        let [kernel] = honest.resources.as_slice() else { panic!("{:?}", honest.resources) };
        assert_eq!((kernel.kernel.as_str(), kernel.shared_bytes), ("k", 4800));
        assert!(kernel.registers > 8 && kernel.local_bytes >= 400, "{kernel:?}");
        assert_eq!(forged.resources, honest.resources);
    }
}

#[test]
fn kernels_that_only_their_file_knows_count_too() {
    let source = launch_source("", "").replace("__global__ void k", "template <int n> static __global__ void k");
    let built = Bench::new().launch(&source.replace("k<<<", "k<3><<<")).unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(built.resources.len() == 1 && built.resources[0].registers > 4, "{:?}", built.resources);
}

#[test]
fn cudas_own_headers_compile() {
    let bench = Bench::new();
    for (name, include, body) in PARTS {
        let outcome = bench.kernel(&kernel_source(include, body));
        assert!(outcome.is_ok(), "{name}: {}", shown(&outcome));
    }
}

/// A toolkit whose headers are those of this machine but for some.
fn partial_toolkit(folder: &Path, without: &[&str]) -> (Toolkit, PathBuf) {
    let whole = Toolkit::find().headers().unwrap().folders()[0].clone();
    let root = folder.join("toolkit");
    std::fs::create_dir_all(root.join("include")).unwrap();
    for entry in std::fs::read_dir(&whole).unwrap().flatten() {
        if !without.contains(&&*entry.file_name().to_string_lossy()) {
            std::os::unix::fs::symlink(entry.path(), root.join("include").join(entry.file_name())).unwrap();
        }
    }
    let library = Toolkit::find().nvrtc().unwrap().library.clone();
    std::os::unix::fs::symlink(library.parent().unwrap(), root.join("lib")).unwrap();
    (Toolkit::among(vec![root]), whole.parent().unwrap().to_owned())
}

#[test]
fn headers_in_part_are_completed_or_the_machines_fault() {
    let folder = tempfile::tempdir().unwrap();
    let (partial, whole) = partial_toolkit(folder.path(), &["crt", "cccl", "cooperative_groups"]);
    let compile = |toolkit: Toolkit, source: &str| {
        let cache = tempfile::tempdir().unwrap();
        let compiler =
            CudaCompiler::with_worker(toolkit, cache.path(), 1, worker_command(), Limits::default()).unwrap();
        compiler.compile(&candidate(Format::Kernel, source), &relu_task(), &gpu())
    };
    for (name, include, body) in PARTS {
        let error = compile(partial.clone(), &kernel_source(include, body)).unwrap_err();
        assert!(error.message.contains("on this machine") && error.hint.unwrap().contains("CUDA_AGENT_CUDA"), "{name}");
    }
    let (_, include, body) = PARTS[0];
    let both = Toolkit::among(vec![folder.path().join("toolkit"), whole]);
    let outcome = compile(both, &kernel_source(include, body)).unwrap();
    assert!(outcome.is_ok(), "{}", shown(&outcome));
    // What no toolkit has is the candidate's mistake.
    let outcome = compile(partial, &kernel_source("#include <cuda_fp16_faster.h>", "")).unwrap();
    assert!(matches!(outcome, Err(CompileFailure::Source(_))), "{outcome:?}");
}

#[test]
fn spilled_bytes_are_told() {
    let many: String = (0..100).map(|i| format!("float a{i} = x[{i} * 7 + threadIdx.x];\n")).collect();
    let all: String = (0..100).map(|i| format!("out[{i}] = a{i} * a{};\n", 99 - i)).collect();
    let body = format!("{many}__syncthreads();\n{all}");
    let bounded = |source: String| source.replace("void k(", "void __launch_bounds__(1024, 2) k(");
    let bench = Bench::new();
    let kernel = bench.kernel(&bounded(kernel_source("", &body))).unwrap();
    let launch = launch_source("", "").replace("out[threadIdx.x] = x[threadIdx.x];", &body);
    for built in [kernel, bench.launch(&bounded(launch)).unwrap()] {
        let taken = &built.resources[0];
        assert!(taken.registers <= 32 && taken.spill_store_bytes > 0 && taken.spill_load_bytes > 0, "{taken:?}");
    }
}

#[test]
fn the_usual_headers_are_there_for_device_code() {
    let names = "cuda_runtime.h cuda.h device_launch_parameters.h math.h cmath stdint.h cstdint stddef.h cstddef float.h cfloat \
        limits.h climits stdio.h cstdio stdlib.h string.h assert.h algorithm limits type_traits utility cuda_fp16.h cuda_bf16.h \
        mma.h cuda_pipeline.h vector_types.h math_constants.h cooperative_groups.h cooperative_groups/reduce.h curand_kernel.h";
    let includes: String = names.split_whitespace().map(|name| format!("#include <{name}>\n")).collect();
    let before = format!("{includes}constexpr float least = -INFINITY; constexpr int64_t many = INT64_MAX;");
    let body = "uint8_t byte = UCHAR_MAX; size_t size = byte; assert(size > 0); printf(\"%d\", INT_MAX);\n\
        float v = std::max(x[0], std::sqrt(std::abs(x[1]))) + FLT_MAX + NAN + (float)M_PI + std::numeric_limits<float>::lowest();\n\
        out[0] = std::isnan(v) ? least : v + __half2float(__float2half(v)) + cooperative_groups::this_thread_block().size();";
    assert_eq!(shown(&Bench::new().kernel(&kernel_source(&before, body))), "built: [\"cubin\"]");
}

/// One table of broken sources, one snapshot of what is said of them.
#[test]
fn what_is_said_of_broken_kernels() {
    let bench = Bench::new();
    let plain = |body: &str| kernel_source("", body);
    let launched = |launch: &str| RELU.replace("TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);", launch);
    let cases: Vec<(&str, String)> = vec![
        ("missing semicolon", plain("float v = x[0]\nout[0] = v;")),
        ("unknown function", plain("out[0] = sigmoid(x[0]);")),
        ("wrong type", plain("float* p = x;\nout[0] = p[0];")),
        ("missing brace", plain("if (x[0] > 0) {\nout[0] = x[0];")),
        ("function of the host", kernel_source("float twice(float v) { return 2 * v; }", "out[0] = twice(x[0]);")),
        ("call of the host", plain("cudaDeviceSynchronize();")),
        ("unknown header", kernel_source("#include <torch/extension.h>", "")),
        ("too much static shared memory", plain("__shared__ float s[60000];\ns[threadIdx.x] = x[0];\n__syncthreads();\nout[0] = s[5];")),
        (
            "template error",
            kernel_source("template <class T> __device__ T first(T* v) { return v.size(); }", "out[0] = first(x);"),
        ),
        ("undefined extern", kernel_source("extern __device__ float elsewhere(float);", "out[0] = elsewhere(x[0]);")),
        ("bad assembly", plain("asm volatile(\"foo.bar %0;\" :: \"f\"(x[0]));")),
        ("many errors", plain(&(0..150).map(|n| format!("a{n} = 1;\n")).collect::<String>())),
        ("write to an input", plain("x[0] = 1;")),
        ("managed memory", kernel_source("__managed__ float cache[4];", "out[0] = cache[0];")),
        ("wrong parameter type", RELU.replace("const float* x", "const double* x")),
        ("swapped parameters", RELU.replace("const float* x, float* out", "float* out, const float* x")),
        ("too few parameters", RELU.replace("const float* x, float* out", "float* out").replace("x[i]", "1.0f")),
        ("too many parameters", RELU.replace("float* out)", "float* out, float* scratch, int n)")),
        ("no launch", launched("")),
        ("unknown kernel", launched("TASK_LAUNCH(gelu, 1, 32)")),
        ("no arguments", launched("TASK_LAUNCH(relu)")),
        ("empty grid", launched("TASK_LAUNCH(relu, 0, 32)")),
        ("large block", launched("TASK_LAUNCH(relu, 1, dim3(64, 32))")),
        ("much dynamic shared memory", launched("TASK_LAUNCH(relu, 1, 32, 300 * 1024)")),
        ("grid known at run time", launched("static int blocks = 4;\nTASK_LAUNCH(relu, blocks, 32)")),
        ("fractional block", launched("TASK_LAUNCH(relu, 1, 32.5)")),
        ("two on a line", launched("TASK_LAUNCH(relu, 1, 32) TASK_LAUNCH(relu, 2, 32)")),
        ("two scratches", launched("TASK_LAUNCH(relu, 1, 32)\nTASK_SCRATCH(4)\nTASK_SCRATCH(8)")),
        (
            "shared memory, both kinds",
            kernel_source("", "__shared__ float s[10000];\ns[threadIdx.x] = x[0];\n__syncthreads();\nout[0] = s[5];")
                .replace("TASK_LAUNCH(k, 1, 32)", "TASK_LAUNCH(k, 1, 32, 200000)"),
        ),
        (
            "template kernel",
            "#include \"task.h\"\ntemplate <class T> __global__ void k(const T* x, T* out) { out[0] = x[0]; }\nTASK_LAUNCH(k<float>, 1, 32)\n"
                .to_owned(),
        ),
        ("device function launched", RELU.replace("__global__", "__device__")),
        ("static kernel", RELU.replace("extern \"C\"", "static")),
        (
            "two kernels of one name",
            "#include \"task.h\"\n__global__ void k(const float* x, float* out) {}\n__global__ void k(const float* x, float* out, void* s) {}\nTASK_LAUNCH(k, 1, 32)\n"
                .to_owned(),
        ),
        ("no task.h", RELU.replace("#include \"task.h\"\n", "")),
    ];
    let said: Vec<String> =
        cases.iter().map(|(what, source)| format!("## {what}\n{}", shown(&bench.kernel(source)))).collect();
    insta::assert_snapshot!(said.join("\n\n"));
}

#[test]
fn a_launch_candidate_becomes_machine_code_and_what_it_starts() {
    let source = format!(
        "{}TASK_SCRATCH(task::x_size * 4)\n",
        launch_source(
            "#include <vector>\n#include <cmath>",
            "std::vector<int> sizes(task::x_shape[task::x_rank - 1]);\nif (sizes.empty()) return cudaErrorUnknown;"
        )
    );
    let bench = Bench::new();
    let built = bench.launch(&source).unwrap_or_else(|failure| panic!("{}", shown(&Err(failure))));
    assert_eq!(built.scratch_bytes, 256_000);
    assert_eq!(launched(&built), [("_Z1kPKfPf", [1, 1, 1], [32, 1, 1], 0, 2)]);
    assert_eq!(built.resources.iter().map(|kernel| kernel.kernel.as_str()).collect::<Vec<_>>(), ["k"]);
    assert!(built.compiler.starts_with("nvcc cuda_13"), "{}", built.compiler);
    assert!(matches!(&built.artifact, Artifact::Cubin(path) if path.is_file()));
}

/// Special functions of C++, and textures, are left out at first.
#[test]
fn headers_that_are_left_out_are_there_for_who_needs_them() {
    let source = launch_source(
        "__global__ void sampled(cudaTextureObject_t from, float* to) { to[0] = tex1Dfetch<float>(from, 0); }",
        "volatile double order = 1.0;\nif (std::cyl_bessel_j(0.0, order) < 0 || std::numeric_limits<float>::max() < 1) return cudaErrorUnknown;",
    );
    let built = Bench::new().launch(&source);
    assert!(built.is_ok(), "{}", shown(&built));
}

#[test]
fn what_is_said_of_broken_launches() {
    let bench = Bench::new();
    let plain = |body: &str| launch_source("", body);
    let with = |before: &str| launch_source(before, "");
    let cases: Vec<(&str, String)> = vec![
        ("missing semicolon", plain("int a = 1\n")),
        ("unknown function on the device", with("__global__ void other(float* y) {\ny[0] = sigmoid(y[1]);\n}")),
        ("unknown function on the host", plain("prepare(out);")),
        ("missing brace", plain("if (x) {")),
        ("wrong type", plain("int a = \"text\";")),
        ("unknown header", with("#include <torch/extension.h>")),
        ("template error", with("template <class T> T first(T* v) { return v.size(); }\nfloat f = first((float*)0);")),
        (
            "too much static shared memory",
            with(
                "__global__ void other(float* y) {\n__shared__ float s[60000];\ns[threadIdx.x] = y[0];\n__syncthreads();\ny[0] = s[5];\n}",
            ),
        ),
        (
            "host function in device code",
            with("float twice(float v) { return 2 * v; }\n__global__ void other(float* y) { y[0] = twice(y[1]); }"),
        ),
        ("bad assembly on the host", plain("asm(\"foobar %eax\");")),
        (
            "wrong signature",
            plain("").replace("TASK_PARAMETERS, void* scratch", "TASK_PARAMETERS, int n, void* scratch"),
        ),
        (
            "wrong result",
            plain("").replace("cudaError_t launch", "void launch").replace("return cudaGetLastError();", ""),
        ),
        ("no launch", plain("").replace("launch(", "start(")),
        ("TASK_LAUNCH", format!("{}TASK_LAUNCH(k, 1, 32)\n", plain(""))),
        ("managed memory", plain("float* p;\ncudaMallocManaged(&p, 4);")),
        (
            "managed variable",
            with("__managed__ float cache[4];").replace("out[threadIdx.x] =", "out[threadIdx.x] = cache[0] +"),
        ),
        ("multicast", launch_source("#include <cuda.h>", "cuMulticastCreate(nullptr, nullptr);")),
        ("memory of other processes", plain("cudaIpcMemHandle_t h;\ncudaIpcGetMemHandle(&h, out);")),
        ("memory of its own", plain("float* p;\ncudaMalloc(&p, 4);")),
        ("a stream of its own", plain("cudaStream_t other;\ncudaStreamCreate(&other);")),
        ("system", launch_source("#include <cstdlib>", "system(\"ls\");")),
        (
            "fork and exec",
            launch_source("#include <unistd.h>", "if (fork() == 0) execl(\"/bin/ls\", \"ls\", nullptr);"),
        ),
        ("dlopen", launch_source("#include <dlfcn.h>", "dlopen(\"libcuda.so.1\", 1);")),
        ("socket", launch_source("#include <sys/socket.h>", "socket(AF_INET, SOCK_STREAM, 0);")),
        ("ptrace", launch_source("#include <sys/ptrace.h>", "ptrace(PTRACE_TRACEME, 0, 0, 0);")),
        ("thread", launch_source("#include <thread>", "std::thread([] {}).detach();")),
        ("file", launch_source("#include <fstream>", "std::ofstream(\"a\") << 1;")),
        ("environment", launch_source("#include <cstdlib>", "if (getenv(\"A\")) return cudaSuccess;")),
    ];
    let said: Vec<String> =
        cases.iter().map(|(what, source)| format!("## {what}\n{}", shown(&bench.launch(source)))).collect();
    insta::assert_snapshot!(said.join("\n\n"));
}

/// Every element type, a scalar, an empty tensor, names that need care.
fn odd_task() -> TaskSpec {
    use DataType::*;
    let all = [Bool, Uint8, Int8, Int16, Int32, Int64, Float16, Bfloat16, Float32, Float64];
    let inputs = all.iter().map(|dtype| tensor(&format!("in.{dtype:?}"), &[2, 3], *dtype)).collect();
    let constant = |name: &str, value| Constant { name: name.to_owned(), value };
    TaskSpec {
        inputs,
        parameters: vec![tensor("layers.0.weight", &[], Float32), tensor("layers_0.weight", &[0], Float32)],
        buffers: vec![tensor("float", &[4], Int64)],
        outputs: vec![tensor("out0", &[2], Bool), tensor("out1", &[2, 3], Int64)],
        constants: vec![
            constant("N", serde_json::json!(9_000_000_000_i64)),
            constant("INT_MAX", serde_json::json!(i64::MIN)),
            constant("least", serde_json::json!(i64::from(i32::MIN))),
            constant("eps", serde_json::json!(1e-5)),
            constant("class", serde_json::json!(true)),
            constant("float_size", serde_json::json!(-0.1)),
        ],
        flops: 0,
        bytes: 0,
    }
}

#[test]
fn every_element_type_and_name_compiles_in_both_formats() {
    let bench = Bench::new();
    // A boolean can be read as a byte; int64_t is another type than the header's under nvcc, the same under NVRTC.
    let source = "#include \"task.h\"\n#include <stdint.h>\n\
        __global__ void k(TASK_PARAMETERS) { out1[0] = task::INT_MAX_ + task::float__shape[threadIdx.x] + task::class_; }\n\
        __global__ void bytes(const unsigned char* b, const uint8_t* u, const int8_t* c, const int16_t* s, const int* i,\n\
            const int64_t* l, const __half* h, const __nv_bfloat16* g, float* f, const double* d, const float* w, const float* v,\n\
            const long long* n, unsigned char* o, int64_t* p) {}\n";
    let kernel = format!("{source}TASK_LAUNCH(k, 1, 32)\nTASK_LAUNCH(bytes, 1, 32)\n");
    let launch = format!(
        "{source}extern \"C\" cudaError_t launch(TASK_PARAMETERS, void* scratch, cudaStream_t stream) {{\n\
         k<<<1, 32, 0, stream>>>(TASK_ARGUMENTS);\nreturn cudaGetLastError();\n}}\n"
    );
    for (format, source) in [(Format::Kernel, kernel), (Format::Launch, launch)] {
        let outcome = bench.compiler.compile(&candidate(format, &source), &odd_task(), &gpu()).unwrap();
        assert!(outcome.is_ok(), "{}", shown(&outcome));
    }
}

/// Machine code without the mark that nvcc makes of its folder's name, in names that only their file knows.
fn without_marks(mut code: Vec<u8>) -> Vec<u8> {
    for mark in [&b"_INTERNAL_"[..], b"_GLOBAL__N__"] {
        let places: Vec<usize> =
            code.windows(mark.len()).enumerate().filter(|(_, bytes)| *bytes == mark).map(|(at, _)| at).collect();
        places.iter().for_each(|at| code[at + mark.len()..at + mark.len() + 8].fill(b'0'));
    }
    code
}

/// Sources in their order: those after the third have what is prepared, the first again is compiled by nvcc elsewhere.
#[test]
fn a_launch_compiled_with_what_is_prepared_is_the_same() {
    let (bench, by_nvcc) = (Bench::new(), Bench::new());
    for number in 0..4 {
        assert!(bench.launch(&launch_source(&format!("// {number}"), "")).is_ok());
    }
    let prepared: Vec<_> = std::fs::read_dir(bench._folder.path().join("prepared")).unwrap().flatten().collect();
    assert_eq!(prepared.len(), 1, "nothing could be prepared: {prepared:?}");
    let half = "#include <cuda_fp16.h>\n#include <cooperative_groups.h>\n#include <cmath>\n#include <type_traits>\n\
        template <class T> __global__ void also(T* p) { __shared__ T kept[8]; kept[threadIdx.x & 7] = p[0];\n\
        cooperative_groups::this_thread_block().sync(); p[1] = kept[3] + T(std::sqrt(2.0f)); }\n";
    let sources = [
        launch_source("", ""),
        launch_source(half, "also<__half><<<2, 8, 0, stream>>>((__half*)scratch);"),
        launch_source("__device__ float table[4] = {1, 2, 3, 4};", "int device; cudaGetDevice(&device);"),
        launch_source("#if !defined(__CUDACC__) || defined(linux) != 0 && 0\n#error\n#endif", ""),
    ];
    for source in sources {
        let (one, other) = (bench.launch(&source).unwrap(), by_nvcc.launch(&source));
        let other = other.unwrap();
        let bytes = |built: &Built| without_marks(std::fs::read(built.artifact.files()[0].1).unwrap());
        assert_eq!(one.program, other.program, "{source}");
        assert!(bytes(&one) == bytes(&other), "other machine code: {source}");
        assert_eq!(one.resources, other.resources);
        // So that this one never has what is prepared.
        by_nvcc.compiler.nvcc().unwrap().forget_prepared();
    }
    let error = bench.launch(&launch_source("", "int count = 1 count++;"));
    assert_eq!(error, by_nvcc.launch(&launch_source("", "int count = 1 count++;")));
}

/// Instantiates two to the power of thirty templates.
const ENDLESS: &str = "template <int a, int b> struct Tree {\n\
    static constexpr int v = Tree<a - 1, 2 * b>::v + Tree<a - 1, 2 * b + 1>::v;\n};\n\
    template <int b> struct Tree<0, b> { static constexpr int v = b; };\n";

#[test]
fn a_source_that_takes_for_ever_ends_at_the_limit() {
    let bench = Bench::with_limits(Limits { time: Duration::from_secs(2), ..Limits::default() });
    let endless = kernel_source(ENDLESS, "out[0] = Tree<30, 1>::v;");
    let outcome = bench.kernel(&endless);
    assert!(matches!(&outcome, Err(CompileFailure::Limit(why)) if why.contains("more than 2 s")), "{outcome:?}");
    assert!(bench.kernel(RELU).is_ok(), "the next one gets a fresh worker");
    let outcome = bench.launch(&launch_source(ENDLESS, "int a[Tree<30, 1>::v];"));
    assert!(matches!(&outcome, Err(CompileFailure::Limit(why)) if why.contains("more than 2 s")), "{outcome:?}");
}

#[test]
fn a_source_that_takes_all_memory_ends_at_the_limit() {
    let bench = Bench::with_limits(Limits { memory_bytes: 700 << 20, ..Limits::default() });
    let outcome = bench.kernel(&kernel_source(ENDLESS, "out[0] = Tree<30, 1>::v;"));
    assert!(matches!(outcome, Err(CompileFailure::Limit(_))), "{outcome:?}");
    assert!(bench.kernel(RELU).is_ok());
}

#[test]
fn a_source_that_crashes_the_compiler_says_so() {
    let bench = Bench::new();
    let deep = format!("out[0] = {}x[0]{};", "(".repeat(200_000), ")".repeat(200_000));
    let outcome = bench.kernel(&kernel_source("", &deep));
    assert!(matches!(&outcome, Err(CompileFailure::Limit(why)) if why.contains("crashed")), "{outcome:?}");
    assert!(bench.kernel(RELU).is_ok());
}

#[path = "kept_test.rs"]
mod kept;
