//! Real recordings: of host code that g++ alone compiles, with kernels that are only names, and of whole candidates by nvcc.

use std::time::Instant;

use super::machine_code::KernelFacts;
use super::*;
use crate::compile::Built;
use crate::compile::cuda::headers_identity;
use crate::compile::nvcc::{Job, Nvcc};
use crate::compile::toolkit::Toolkit;
use crate::program::{Address, Place, Step};
use crate::task::{DataType, TaskSpec, Tensor};

/// What nvcc adds to a source by itself: two kernels and a variable are registered.
const BEFORE: &str = r#"
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <vector>
extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int);
}
static void k() {}
static void packed() { asm(""); }
static float table[16];
__attribute__((constructor)) static void registering() {
    void** handle = __cudaRegisterFatBinary(nullptr);
    __cudaRegisterFunction(handle, (const char*)&k, nullptr, "k", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
    __cudaRegisterFunction(handle, (const char*)&packed, nullptr, "packed", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
    __cudaRegisterVar(handle, (char*)table, nullptr, "table", 0, sizeof table, 0, 0);
}
static cudaError_t start(const void* x, const void* out, int n, cudaStream_t stream) {
    void* arguments[] = {&x, &out, &n};
    return cudaLaunchKernel((const void*)&k, {(unsigned)n, 1, 1}, {32, 1, 1}, arguments, 0, stream);
}
"#;

struct Bench {
    recorder: Recorder,
    folder: tempfile::TempDir,
}

/// `k` takes two pointers and a number, `packed` 28 bytes.
fn module() -> MachineCode {
    let kernel = |symbol: &str, parameters: &[[u32; 2]]| KernelFacts {
        symbol: symbol.into(),
        registers: 32,
        shared_bytes: 1024,
        local_bytes: 0,
        max_threads: 1024,
        parameters: parameters.to_vec(),
    };
    let kernels = vec![kernel("k", &[[0, 8], [8, 8], [16, 4]]), kernel("packed", &[[0, 28]])];
    MachineCode { kernels, variables: vec![("table".into(), 64)] }
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let headers = Toolkit::find().headers().unwrap().clone();
        let identity = headers_identity(&headers).unwrap();
        Self { recorder: Recorder::new(headers, "g++", &identity, folder.path()), folder }
    }

    fn record(&self, before: &str, body: &str) -> Result<Program, String> {
        let folder = tempfile::tempdir_in(self.folder.path()).unwrap();
        let source = format!(
            "{BEFORE}{before}\nextern \"C\" int task_run(void* const* given, cudaStream_t stream) {{\n\
             float *x = (float*)given[0], *out = (float*)given[1];\nvoid* scratch = given[2];\n\
             (void)x, (void)out, (void)scratch;\n{body}\nreturn cudaGetLastError();\n}}\n"
        );
        std::fs::write(folder.path().join("host.cpp"), source).unwrap();
        let mut compile = self.recorder.command();
        compile.args(["-c", "host.cpp", "-o", "host.o"]);
        self.recorder.step(compile, folder.path()).unwrap();
        match self.recorder.link("host.o", "record", folder.path(), &Limits::default()).unwrap() {
            Ok(()) => {}
            Err(failure) => return Err(told(&failure)),
        }
        let subject = Subject {
            source: body,
            program: &folder.path().join("record"),
            arguments: vec![4000, 4000, 256],
            facts: &GpuFacts::of_an_h100(),
            module: &module(),
        };
        record(&subject).unwrap().map_err(|failure| told(&failure))
    }
}

fn told(failure: &CompileFailure) -> String {
    match failure {
        CompileFailure::Source(found) => {
            let line = |line: Option<u32>| line.map_or("-".to_owned(), |line| line.to_string());
            found.iter().map(|one| format!("{}: {}", line(one.line), one.message)).collect::<Vec<_>>().join("\n")
        }
        CompileFailure::Fault(fault) => format!("{:?}: {}", fault.kind, fault.message),
        other => format!("{other:?}"),
    }
}

/// One line for each kernel and step.
fn listed(program: &Program) -> String {
    let address = |address: &Address| {
        let place = match address.of {
            Place::Argument(index) => format!("argument {index}"),
            Place::Variable(index) => program.variables[index].clone(),
        };
        format!("{place}{:+}", address.offset)
    };
    let bytes = |bytes: &crate::program::Bytes| {
        let addresses = bytes.addresses.iter().map(|one| format!("{}: {}", one.at, address(&one.address)));
        format!("{} bytes {:02x?} [{}]", bytes.data.len(), bytes.data, addresses.collect::<Vec<_>>().join(", "))
    };
    let mut lines: Vec<String> = program
        .kernels
        .iter()
        .map(|kernel| format!("{} {:?} {:?}", kernel.symbol, kernel.parameters, kernel.attributes))
        .collect();
    lines.extend(program.steps.iter().map(|step| match step {
        Step::Launch(launch) => format!(
            "  launch {} {:?} {:?} {} {:?} {}",
            program.kernels[launch.kernel].symbol,
            launch.grid,
            launch.block,
            launch.shared_bytes,
            launch.attributes,
            bytes(&launch.parameters)
        ),
        Step::Fill { to, pitch, value, width, height } => {
            format!("  fill {} {value} {width} x {height} pitch {pitch}", address(to))
        }
        Step::Copy { to, to_pitch, from, from_pitch, width, height } => {
            format!("  copy {} to {} {width} x {height} pitches {from_pitch} {to_pitch}", address(from), address(to))
        }
        Step::Write { to, pitch, width, bytes: data } => {
            format!("  write {} {width} pitch {pitch} {}", address(to), bytes(data))
        }
    }));
    lines.join("\n")
}

#[test]
fn what_host_code_starts_is_noted() {
    let bench = Bench::new();
    let cases = [
        ("plain", "", "start(x, out, 3, stream);"),
        ("the default stream", "", "start(x, out, 3, 0); start(x, out, 4, cudaStreamLegacy);"),
        ("offsets", "", "start(x + 5, out + 1000, 3, stream); start(x - 7, scratch, 1, stream);"),
        (
            "a misaligned pointer in a packed structure",
            "struct __attribute__((packed)) Packed { char a; float* p; short b; const float* q; int n; char rest[5]; };",
            "Packed all{1, x + 2, 3, out, 4, {5, 6, 7, 8, 9}}; void* arguments[] = {&all};\n\
             cudaLaunchKernel((const void*)&packed, {1, 1, 1}, {32, 1, 1}, arguments, 0, stream);",
        ),
        (
            "fills and copies",
            "",
            "cudaMemsetAsync(out, 0x11ff, 4000, stream); cudaMemset2DAsync(out + 1, 400, 7, 16, 9, stream);\n\
             cudaMemset3DAsync(cudaPitchedPtr{out, 40, 40, 10}, 0, cudaExtent{8, 2, 2}, stream);\n\
             cudaMemcpyAsync(out, x + 1, 40, cudaMemcpyDefault, stream);\n\
             cudaMemcpy2DAsync(out, 400, x, 200, 100, 5, cudaMemcpyDeviceToDevice, stream);",
        ),
        (
            "an array of pointers in a variable",
            "",
            "const float* all[4] = {x, out, nullptr, (float*)scratch + 1};\n\
             cudaMemcpyToSymbolAsync(table, all, sizeof all, 16, cudaMemcpyHostToDevice, stream);\n\
             void* p; cudaGetSymbolAddress(&p, table); size_t size; cudaGetSymbolSize(&size, table); start(p, out, (int)size, stream);",
        ),
        (
            "copies from the host with a pitch",
            "static const char rows[] = \"abc.def.ghi\";",
            "cudaMemcpy2DAsync(out, 16, rows, 4, 3, 3, cudaMemcpyHostToDevice, stream);",
        ),
        (
            "attributes",
            "",
            "cudaFuncSetAttribute((const void*)&k, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000);\n\
             cudaFuncSetAttribute((const void*)&k, cudaFuncAttributePreferredSharedMemoryCarveout, 50);\n\
             cudaFuncSetAttribute((const void*)&packed, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);\n\
             int n = 4; void* arguments[] = {&x, &out, &n};\n\
             cudaLaunchAttribute list[4]; memset(list, 0, sizeof list);\n\
             list[0].id = cudaLaunchAttributeClusterDimension; list[0].val.clusterDim.x = 2; list[0].val.clusterDim.y = list[0].val.clusterDim.z = 1;\n\
             list[1].id = cudaLaunchAttributeProgrammaticStreamSerialization; list[1].val.programmaticStreamSerializationAllowed = 1;\n\
             list[2].id = cudaLaunchAttributePreferredSharedMemoryCarveout; list[2].val.sharedMemCarveout = 30;\n\
             list[3].id = cudaLaunchAttributeClusterSchedulingPolicyPreference; list[3].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;\n\
             cudaLaunchConfig_t at{}; at.gridDim = {4, 1, 1}; at.blockDim = {64, 1, 1}; at.dynamicSmemBytes = 99000; at.stream = stream; at.attrs = list; at.numAttrs = 4;\n\
             cudaLaunchKernelExC(&at, (const void*)&k, arguments); cudaLaunchKernelExC(&at, (const void*)&k, arguments);\n\
             cudaLaunchCooperativeKernel((const void*)&k, {2, 1, 1}, {32, 1, 1}, arguments, 0, stream);",
        ),
        (
            "answers to questions",
            "static int once() { int n = 0; cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0); return n; }\nstatic const int multiprocessors = once();",
            "cudaDeviceProp of; cudaGetDeviceProperties(&of, 0); cudaFuncAttributes taken; cudaFuncGetAttributes(&taken, (const void*)&k);\n\
             int blocks = 0, device = 7, driver = 0; cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, (const void*)&k, 256, 0);\n\
             size_t bytes = 0; cudaOccupancyAvailableDynamicSMemPerBlock(&bytes, (const void*)&k, 2, 256);\n\
             cudaGetDevice(&device); cudaDriverGetVersion(&driver);\n\
             start(x, out, multiprocessors, stream); start(x, out, of.multiProcessorCount, stream); start(x, out, taken.numRegs, stream);\n\
             start(x, out, taken.maxThreadsPerBlock, stream); start(x, out, blocks, stream); start(x, out, (int)bytes, stream);\n\
             start(x, out, device + 1, stream); start(x, out, driver, stream); start(x, out, (int)strlen(of.name), stream);",
        ),
        (
            "what is printed, waited for and forgotten",
            "",
            "printf(\"CARECORD\\a\"); fflush(stdout); cudaDeviceSynchronize(); cudaStreamSynchronize(stream); start(x, out, 1, stream);",
        ),
        (
            "a refused launch that is ignored",
            "",
            "start(x, out, 0, stream); cudaGetLastError(); start(x, out, 1, stream);",
        ),
    ];
    let said: Vec<String> = cases
        .iter()
        .map(|(what, before, body)| {
            let program = bench.record(before, body).unwrap_or_else(|failure| panic!("{what}: {failure}"));
            format!("## {what}\n{}", listed(&program))
        })
        .collect();
    insta::assert_snapshot!(said.join("\n\n"));
}

#[test]
fn what_cannot_be_recorded_is_refused_by_name() {
    let bench = Bench::new();
    let cases = [
        ("a difference of pointers", "", "start(x, out, (int)((x - out) & 0xffff) + 1, stream);"),
        ("half a pointer", "", "start(x, out, (int)((uintptr_t)x >> 20), stream);"),
        (
            "a choice by address",
            "",
            "for (int bit = 8; bit < 32; ++bit) if ((uintptr_t)x >> bit & 1) start(x, out, bit, stream);",
        ),
        ("an order of addresses", "", "start(x < out ? x : out, out, 1, stream);"),
        (
            "the time",
            "",
            "timespec now; clock_gettime(CLOCK_MONOTONIC, &now); start(x, out, (int)(now.tv_nsec % 1000000) + 1, stream);",
        ),
        (
            "the process",
            "",
            "for (int i = 0; i < getpid() % 7; ++i) start(x, out, 1, stream);\nstart(x, out, getpid(), stream);",
        ),
        ("a count of its calls", "static int calls;", "start(x, out, ++calls % 8 == 7 ? 2 : 1, stream);"),
        ("a choice by the stack", "", "int here; start(x, out, ((uintptr_t)&here >> 12) % 4 == 3 ? 2 : 1, stream);"),
        (
            "work that is done once",
            "static bool is_done;",
            "if (!is_done) start(x, out, 2, stream);\nis_done = true;\nstart(x, out, 1, stream);",
        ),
        (
            "an address that was seen before",
            "static const float* seen;",
            "start(x, out, seen == x ? 2 : 1, stream);\nseen = x;",
        ),
        (
            "a result that is read back",
            "",
            "float first;\ncudaMemcpyAsync(&first, out, 4, cudaMemcpyDeviceToHost, stream);",
        ),
        (
            "a variable that is read back",
            "",
            "float first;\ncudaMemcpyFromSymbolAsync(&first, table, 4, 0, cudaMemcpyDeviceToHost, stream);",
        ),
        ("a stream of one's own", "", "start(x, out, 1, (cudaStream_t)0x1234);"),
        ("the thread's stream", "", "start(x, out, 1, cudaStreamPerThread);"),
        (
            "an event in a launch",
            "",
            "cudaLaunchAttribute one; memset(&one, 0, sizeof one); one.id = cudaLaunchAttributeProgrammaticEvent;\n\
             cudaLaunchConfig_t at{}; at.gridDim = at.blockDim = {1, 1, 1}; at.stream = stream; at.attrs = &one; at.numAttrs = 1;\n\
             void* arguments[] = {&x, &out, &x}; cudaLaunchKernelExC(&at, (const void*)&k, arguments);",
        ),
        ("a fill past the end", "", "cudaMemsetAsync(out + 1, 0, 4000, stream);"),
        ("a copy from nowhere", "", "cudaMemcpyAsync(out, x - 1, 40, cudaMemcpyDeviceToDevice, stream);"),
        ("a fill of what is no tensor", "", "return cudaMemsetAsync((void*)64, 0, 4, stream);"),
        (
            "more than a recording holds",
            "",
            "static char much[20 << 20]; cudaMemcpyAsync(out, much, sizeof much, cudaMemcpyHostToDevice, stream);",
        ),
        ("endless launches", "", "for (;;) start(x, out, 1, stream);"),
        ("many launches", "", "for (int i = 0; i < 16385; ++i) start(x, out, 1, stream);"),
        ("an endless loop", "", "volatile bool more = true; while (more) {}"),
        ("a tensor that is read", "", "if (x[0] > 0) start(x, out, 1, stream);"),
        ("a tensor that is written", "", "out[0] = 1;"),
        ("an abort", "", "fprintf(stderr, \"no \\x1b[31mway\\n\"); abort();"),
        ("an exception", "", "std::vector<int>().at(5);"),
        ("all memory", "", "std::vector<char> much(1ull << 40, 1); start(x, out, much[5], stream);"),
        ("an end as if all were well", "", "start(x, out, 1, stream); exit(0);"),
        ("an end before it begins", "__attribute__((constructor)) static void early() { _exit(0); }", ""),
        ("an error", "", "return cudaErrorInvalidValue;"),
        ("an error of a launch", "", "start(x, out, 0, stream);"),
        (
            "too many threads",
            "",
            "int n = 1; void* arguments[] = {&x, &out, &n}; cudaLaunchKernel((const void*)&k, {1, 1, 1}, {2048, 1, 1}, arguments, 0, stream);",
        ),
        (
            "too much shared memory",
            "",
            "int n = 1; void* arguments[] = {&x, &out, &n}; cudaLaunchKernel((const void*)&k, {1, 1, 1}, {1, 1, 1}, arguments, 50000, stream);",
        ),
        (
            "no kernel",
            "static void other() {}",
            "cudaLaunchKernel((const void*)&other, {1, 1, 1}, {1, 1, 1}, nullptr, 0, stream);",
        ),
        ("a main of one's own", "int main() { return 0; }", ""),
    ];
    let said: Vec<String> = cases
        .iter()
        .map(|(what, before, body)| {
            let failure = bench.record(before, body).err().unwrap_or_else(|| panic!("{what} was recorded"));
            format!("## {what}\n{failure}")
        })
        .collect();
    insta::assert_snapshot!(said.join("\n\n"));
}

/// What a candidate writes in the place of the recorder is believed in nothing.
#[test]
fn forged_recordings_start_nothing_that_is_not_there() {
    let bench = Bench::new();
    let forge = "static void put(const char* bytes, size_t size) { for (int to = 3; to < 16; ++to) { if (write(to, bytes, size) > 0) break; } _exit(0); }\n\
        static void number(std::vector<char>& all, unsigned value) { all.insert(all.end(), (char*)&value, (char*)&value + 4); }\n\
        static std::vector<char> launch(unsigned kernel, unsigned grid, unsigned bytes) { std::vector<char> all{'C','A','R','E','C','O','R','D', 1};\n\
        for (unsigned value : {kernel, grid, 1u, 1u, 32u, 1u, 1u, 0u, 0u, bytes}) number(all, value); all.resize(all.size() + bytes); all.push_back(7); number(all, 0); return all; }\n";
    let forged = |body: &str| bench.record(forge, &format!("{body}\nput(all.data(), all.size());"));
    // This is what it could have launched by itself.
    let program = forged("auto all = launch(0, 9, 20);").unwrap();
    assert!(matches!(&program.steps[0], Step::Launch(launch) if launch.grid == [9, 1, 1]));
    for body in [
        "auto all = launch(2, 1, 20);",
        "auto all = launch(0, 1, 24);",
        "auto all = launch(0, 1, 16);",
        "auto all = launch(0, 1, 20); all.push_back(0);",
        "auto all = launch(0, 1, 20); all.pop_back();",
        "auto all = launch(0, 1, 20); all.resize(30 << 20);",
        "std::vector<char> all(100, 'x');",
        "std::vector<char> all;",
    ] {
        let failure = forged(body).unwrap_err();
        assert!(failure.starts_with("Crash: launch ended"), "{body}: {failure}");
    }
}

#[test]
fn host_code_is_recorded_behind_walls() {
    let bench = Bench::new();
    let includes = "#include <fcntl.h>\n#include <signal.h>\n#include <sys/mman.h>\n#include <sys/socket.h>\n";
    for attempt in [
        "socket(AF_INET, SOCK_STREAM, 0)",
        "fork()",
        "execl(\"/bin/true\", \"true\", (char*)0)",
        "kill(getppid(), 0)",
        "open(\"/tmp/x\", O_WRONLY | O_CREAT, 0600)",
        "memfd_create(\"x\", 0)",
        "chroot(\"/\")",
        "setsid()",
    ] {
        let said =
            bench.record(includes, &format!("if ({attempt} < 0) return 1;\nstart(x, out, 1, stream);")).unwrap_err();
        assert!(said.contains("a system call that is refused"), "{attempt}: {said}");
    }
    // What is read is refused to the caller, which can tell.
    for path in ["/etc/passwd", "/proc/self/status", "/", "/dev/nvidiactl", "/dev/null"] {
        let body = format!("if (open(\"{path}\", O_RDONLY) < 0) return 1;\nstart(x, out, 1, stream);");
        assert!(bench.record(includes, &body).unwrap_err().contains("launch returned cudaError_t 1"), "{path}");
    }
    // Its files are open and may be read again: what is written there is a claim like any other.
    assert!(bench.record(includes, "if (lseek(0, 0, SEEK_SET) < 0) return 1;\nstart(x, out, 1, stream);").is_ok());
}

#[test]
fn a_damaged_stand_in_is_made_again() {
    let bench = Bench::new();
    let folder = bench.recorder.folder().unwrap();
    for file in [OBJECT, "queries.cpp", "digest", LINKING] {
        std::fs::remove_file(folder.join(file)).unwrap();
        let again = Recorder { folder: Arc::default(), ..bench.recorder.clone() };
        assert_eq!(again.folder().unwrap(), folder);
        assert!(is_whole(&folder), "{file}");
    }
}

fn tensor(name: &str, shape: &[u64]) -> Tensor {
    Tensor { name: name.to_owned(), shape: shape.to_vec(), dtype: DataType::Float32 }
}

fn task(inputs: Vec<Tensor>, outputs: Vec<Tensor>) -> TaskSpec {
    TaskSpec { inputs, parameters: Vec::new(), buffers: Vec::new(), outputs, constants: Vec::new(), flops: 0, bytes: 0 }
}

fn by_nvcc(spec: &TaskSpec, source: &str) -> Result<Built, String> {
    let folder = tempfile::tempdir().unwrap();
    let toolkit = Toolkit::find();
    let headers = toolkit.headers().unwrap();
    let identity = headers_identity(headers).unwrap();
    let nvcc = Nvcc::new(toolkit.nvcc().unwrap(), headers.clone(), &identity, folder.path()).unwrap();
    let task_header = crate::header::task_header(spec);
    let facts = GpuFacts::of_an_h100();
    let job = Job { source, task_header: &task_header, architecture: "sm_90", spec, facts: &facts };
    let workshop = tempfile::tempdir_in(folder.path()).unwrap();
    let built = nvcc.build(&job, workshop.path(), &Limits::default()).unwrap();
    built.map_err(|failure| told(&failure))
}

/// Everything that a real front end makes of launches, in one source.
const WHOLE: &str = r#"#include "task.h"
#include <cooperative_groups.h>
#include <vector>
struct Pair { const float* from; float* to; int n; };  // four bytes of padding
template <class T, int n> __global__ void first(const T* x, T* out) { extern __shared__ T s[]; s[threadIdx.x] = x[n]; __syncthreads(); out[threadIdx.x] = s[0]; }
namespace { __global__ void second(Pair pair, char small, double large) { pair.to[0] = pair.from[pair.n] + small + large; } }
static __constant__ float weights[8];
__device__ const float* sources[4];
__global__ void __launch_bounds__(128) third(float* out) { cooperative_groups::this_grid().sync(); out[0] = sources[1][0] + weights[3]; }
TASK_SCRATCH(1000);
static int occupancy() { int blocks = 0; cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, first<float, 3>, 256, 4096); return blocks; }
extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    static const int blocks = occupancy();
    static bool is_set = false;
    if (!is_set) { cudaFuncSetAttribute(first<float, 3>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536); is_set = true; }
    first<float, 3><<<blocks, 256, 60000, stream>>>(x, out);
    second<<<1, dim3(8, 2), 0, stream>>>(Pair{x + 4, (float*)scratch, 3}, 'a', 0.5);
    std::vector<float> values(8);
    for (int i = 0; i < 8; ++i) values[i] = 1.0f / (1 + i);
    cudaMemcpyToSymbolAsync(weights, values.data(), 32, 0, cudaMemcpyHostToDevice, stream);
    const float* pointers[] = {x, x + 1, out, nullptr};
    cudaMemcpyToSymbolAsync(sources, pointers, sizeof pointers, 0, cudaMemcpyHostToDevice, stream);
    void* arguments[] = {&out};
    cudaLaunchCooperativeKernel((void*)third, 2, 128, arguments, 0, stream);
    cudaLaunchConfig_t at{}; at.gridDim = 4; at.blockDim = 32; at.stream = stream;
    cudaLaunchAttribute cluster[1]; cluster[0].id = cudaLaunchAttributeClusterDimension; cluster[0].val.clusterDim = {2, 1, 1};
    at.attrs = cluster; at.numAttrs = 1;
    cudaLaunchKernelEx(&at, third, out);
    int grid = 0, block = 0;
    cudaOccupancyMaxPotentialBlockSize(&grid, &block, third);
    third<<<grid, block, 0, stream>>>(out);
    return cudaGetLastError();
}
"#;

#[test]
fn a_whole_candidate_is_recorded() {
    let spec = task(vec![tensor("x", &[64])], vec![tensor("out", &[1024])]);
    let built = by_nvcc(&spec, WHOLE).unwrap_or_else(|failure| panic!("{failure}"));
    // A name in an anonymous namespace differs from file to file.
    let symbol = &built.program.kernels[1].symbol;
    assert!(symbol.contains("6second"), "{symbol}");
    insta::assert_snapshot!(listed(&built.program).replace(symbol, "(anonymous)::second"));
}

/// The corpus's `launch` candidates for two shapes of tasks.
#[test]
fn the_corpus_is_recorded() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let constant =
        |(name, value): (&str, i64)| crate::task::Constant { name: name.to_owned(), value: serde_json::json!(value) };
    let mut rows = task(vec![tensor("x", &[37, 211])], vec![tensor("out", &[37, 211])]);
    rows.constants.extend([("rows", 37), ("columns", 211), ("beta", 2)].map(constant));
    let vector = task(vec![tensor("x", &[10007])], vec![tensor("out", &[10007])]);
    let cases = [
        (&rows, "right/swish"),
        (&rows, "right/log_softmax"),
        (&vector, "nasty/replays_structures"),
        (&vector, "nasty/replays_symbols"),
        (&vector, "nasty/replays_clusters"),
        (&vector, "nasty/replays_grid_sync"),
        (&vector, "nasty/replays_copies"),
        (&vector, "nasty/host_reads_back"),
        (&vector, "nasty/host_knows_addresses"),
        (&vector, "nasty/host_returns_error"),
        (&vector, "nasty/host_exits"),
        (&vector, "nasty/host_loops"),
        (&vector, "nasty/host_null_pointer"),
    ];
    let said: Vec<String> = cases
        .iter()
        .map(|(spec, name)| {
            let source = std::fs::read_to_string(corpus.join(format!("{name}.cu"))).unwrap();
            let start = Instant::now();
            let built = by_nvcc(spec, &source);
            println!("{name}: {:.2} s", start.elapsed().as_secs_f64());
            format!("## {name}\n{}", built.map_or_else(|failure| failure, |built| listed(&built.program)))
        })
        .collect();
    insta::assert_snapshot!(said.join("\n\n"));
}
