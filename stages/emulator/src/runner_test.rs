//! Real candidates, compiled and run: honest ones give the right numbers in both programs and in every order; wrong ones
//! end with the fault that says what is wrong, at its line.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use cuda_agent_sandbox::candidate::{Candidate, Format};
use cuda_agent_sandbox::diagnostic::CompileFailure;
use tempfile::TempDir;

use super::*;
use crate::Programs;
use crate::host::tests::toolchain;

const SEEDS: u64 = 3;
const GAP: u64 = 4096;

/// A task of float tensors: the inputs, then one output.
pub(super) struct Task {
    inputs: Vec<(&'static str, Vec<u8>)>,
    output_bytes: usize,
    parameters: &'static str,
    arguments: &'static str,
    constants: String,
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

/// `x` of `length` small whole numbers, whose sums are exact in any order.
fn whole_numbers(length: usize) -> Vec<f32> {
    (0..length).map(|i| ((i * 7919) % 17) as f32 - 8.0).collect()
}

pub(super) fn one_to_one(length: usize, outputs: usize) -> Task {
    Task {
        inputs: vec![("x", floats(whole_numbers(length)))],
        output_bytes: outputs * 4,
        parameters: "const float* x, float* out",
        arguments: "x, out",
        constants: format!("constexpr long long x_size = {length}; constexpr long long out_size = {outputs};"),
    }
}

impl Task {
    fn header(&self) -> String {
        format!(
            "#pragma once\nnamespace task {{ {} }}\n#define TASK_PARAMETERS {}\n#define TASK_ARGUMENTS {}\n",
            self.constants, self.parameters, self.arguments
        )
    }
}

pub(super) fn build(format: Format, source: &str, task: &Task) -> (TempDir, Result<Programs, CompileFailure>) {
    let folder = TempDir::new().expect("a folder");
    let candidate = Candidate { format, source: source.to_owned(), name: "test".to_owned() };
    let built = toolchain().build(&candidate, &task.header(), folder.path()).expect("the toolchain works");
    (folder, built)
}

/// A file that holds the task's tensors, poison in the output, and a scratch buffer.
pub(super) struct Arena {
    pub(super) file: tempfile::NamedTempFile,
    pub(super) bytes: u64,
    pub(super) spans: Vec<Span>,
    pub(super) scratch: Span,
}

impl Arena {
    pub(super) fn new(task: &Task, scratch_bytes: u64) -> Self {
        let poison = vec![0xff; task.output_bytes];
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let mut at = GAP;
        let mut spans = Vec::new();
        for content in task.inputs.iter().map(|(_, content)| content).chain([&poison]) {
            file.as_file_mut().write_all_at(content, at).expect("room");
            spans.push(Span { offset: at, bytes: content.len() as u64 });
            at = (at + content.len() as u64).next_multiple_of(256) + GAP;
        }
        let bytes = at + scratch_bytes + GAP;
        file.as_file().set_len(bytes).expect("room");
        Self { file, bytes, spans, scratch: Span { offset: at, bytes: scratch_bytes } }
    }

    pub(super) fn output(&self) -> Vec<u8> {
        let span = self.spans.last().expect("an output");
        let mut bytes = vec![0; span.bytes as usize];
        let file = OpenOptions::new().read(true).open(self.file.path()).expect("the arena");
        file.read_exact_at(&mut bytes, span.offset).expect("the output");
        bytes
    }
}

/// Runs one program with several seeds; the outputs, or the first fault.
fn run(program: &Path, task: &Task, scratch_bytes: u64, limit: Duration) -> Result<Vec<u8>, Fault> {
    let arena = Arena::new(task, scratch_bytes);
    let started = CpuRunner::start(program, arena.file.path(), arena.bytes, CpuLimits::default());
    let mut runner = started.expect("the evaluator works")?;
    for seed in 0..SEEDS {
        runner.run(seed, &arena.spans, arena.scratch, limit).expect("the evaluator works")?;
    }
    Ok(arena.output())
}

pub(super) fn programs(built: &Programs) -> [&Path; 2] {
    [&built.memory, &built.race]
}

/// The output of a candidate that both programs accept.
pub(super) fn output(format: Format, source: &str, task: &Task) -> Vec<u8> {
    let (_folder, built) = build(format, source, task);
    let built = built.expect("it compiles");
    let [memory, race] = programs(&built).map(|program| {
        let result = run(program, task, built.scratch_bytes, Duration::from_secs(30));
        result.unwrap_or_else(|fault| panic!("{}: {fault:?}", program.display()))
    });
    assert_eq!(memory, race);
    memory
}

/// The faults of the two programs, `None` where a program finds nothing.
pub(super) fn faults(format: Format, source: &str, task: &Task) -> [Option<Fault>; 2] {
    let (_folder, built) = build(format, source, task);
    let built = built.expect("it compiles");
    programs(&built).map(|program| run(program, task, built.scratch_bytes, Duration::from_secs(1)).err())
}

fn memory_fault(source: &str, task: &Task) -> Fault {
    faults(Format::Kernel, source, task)[0].clone().expect("a fault of the memory program")
}

fn race_fault(source: &str, task: &Task) -> Fault {
    faults(Format::Kernel, source, task)[1].clone().expect("a fault of the race program")
}

fn assert_fault(fault: &Fault, kind: FaultKind, line: Option<u32>, says: &str) {
    assert_eq!((fault.kind, fault.line), (kind, line), "{fault:?}");
    assert!(fault.message.contains(says), "{fault:?}");
}

fn sums(values: &[f32], of: usize) -> Vec<f32> {
    values.chunks(of).map(|chunk| chunk.iter().sum()).collect()
}

#[test]
fn relu_with_a_tail() {
    let task = one_to_one(1000, 1000);
    let source = r#"#include "task.h"
extern "C" __global__ void __launch_bounds__(256) relu(const float* __restrict__ x, float* __restrict__ out) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < task::x_size) out[i] = fmaxf(x[i], 0.0f);
}
TASK_LAUNCH(relu, (task::x_size + 255) / 256, 256);
"#;
    let expected = whole_numbers(1000).iter().map(|x| x.max(0.0)).collect::<Vec<_>>();
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), expected);
}

#[test]
fn launches_and_scratch_are_read_out_of_the_program() {
    let task = one_to_one(1000, 1000);
    let source = r#"#include "task.h"
__global__ void first(const float* x, float* out, float* scratch) {
    if (threadIdx.x < 10) scratch[threadIdx.x] = x[threadIdx.x];
}
__global__ void second(const float* x, float* out, const float* scratch) {
    extern __shared__ float s[];
    s[threadIdx.x] = scratch[threadIdx.x % 10];
    out[blockIdx.x * 100 + threadIdx.x] = s[threadIdx.x];
}
TASK_SCRATCH(40)
TASK_LAUNCH(first, 1, 32)
TASK_LAUNCH(second, dim3(10), dim3(100, 1), 400)
"#;
    let (_folder, built) = build(Format::Kernel, source, &task);
    let built = built.expect("it compiles");
    assert_eq!(built.scratch_bytes, 40);
    let launches = built.launches.iter().map(|l| (&*l.symbol, l.grid, l.block, l.shared_bytes, l.arguments));
    let expected = [("first", [1, 1, 1], [32, 1, 1], 0, 3), ("second", [10, 1, 1], [100, 1, 1], 400, 3)];
    assert_eq!(launches.collect::<Vec<_>>(), expected);
    let expected = (0..1000).map(|i| whole_numbers(10)[i % 100 % 10]).collect::<Vec<_>>();
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), expected);
}

const BLOCK_SUM: &str = r#"#include "task.h"
extern "C" __global__ void sum(const float* x, float* out) {
    __shared__ float tile[256], *unused;
    int t = threadIdx.x;
    tile[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int s = 128; s > 0; s >>= 1) {
        if (t < s) tile[t] += tile[t + s];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = tile[0];
}
TASK_LAUNCH(sum, task::out_size, 256);
"#;

#[test]
fn a_block_sums_in_shared_memory() {
    let task = one_to_one(2560, 10);
    assert_eq!(to_floats(&output(Format::Kernel, BLOCK_SUM, &task)), sums(&whole_numbers(2560), 256));
}

#[test]
fn a_missing_barrier_is_a_race() {
    let task = one_to_one(2560, 10);
    let without_first = BLOCK_SUM.replacen("    __syncthreads();\n", "\n", 1);
    let fault = race_fault(&without_first, &task);
    assert_eq!(fault.kind, FaultKind::Race);
    assert!(matches!(fault.line, Some(5 | 8)), "{fault:?}");
    assert!(
        fault.message.starts_with("thread (") && fault.message.contains("of shared memory that thread"),
        "{fault:?}"
    );
    assert!(fault.message.contains("(there: line "), "{fault:?}");
    let without_second = BLOCK_SUM.replace("        __syncthreads();\n", "\n");
    assert_eq!(race_fault(&without_second, &task).kind, FaultKind::Race);
}

#[test]
fn a_missing_barrier_shows_in_the_numbers_too() {
    let task = one_to_one(2560, 10);
    let source = BLOCK_SUM.replacen("    __syncthreads();\n", "\n", 1);
    let (_folder, built) = build(Format::Kernel, &source, &task);
    let [memory, _] = programs(built.as_ref().expect("it compiles")).map(Path::to_owned);
    let output = run(&memory, &task, 0, Duration::from_secs(10)).expect("no fault of memory");
    assert_ne!(to_floats(&output), sums(&whole_numbers(2560), 256));
}

#[test]
fn warps_sum_by_shuffles() {
    let task = one_to_one(2560, 10);
    let source = r#"#include <cuda_runtime.h>
#include "task.h"
__device__ __forceinline__ float warp_sum(float v) {
    #pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_down_sync(0xffffffffu, v, offset);
    return v;
}
extern "C" __global__ void sum(const float* x, float* out) {
    __shared__ float partial[8];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float v = warp_sum(x[blockIdx.x * 256 + threadIdx.x]);
    if (lane == 0) partial[warp] = v;
    __syncthreads();
    if (warp == 0) {
        v = lane < 8 ? partial[lane] : 0.0f;
        v = warp_sum(v);
        if (lane == 0) out[blockIdx.x] = v;
    }
}
TASK_LAUNCH(sum, task::out_size, 256);
"#;
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), sums(&whole_numbers(2560), 256));
}

#[test]
fn warps_exchange_vote_and_reduce() {
    let task = one_to_one(64, 64);
    let source = r#"#include "task.h"
__global__ void exchange(const float* x, float* out) {
    int t = threadIdx.x, lane = t & 31;
    bool good = __shfl_sync(0xffffffff, lane, 5) == 5 && __shfl_up_sync(0xffffffff, lane, 1) == (lane ? lane - 1 : 0);
    good = good && __shfl_xor_sync(0xffffffff, lane, 3, 8) == (lane ^ 3) && __shfl_down_sync(0xffffffff, lane, 2, 4) == (lane % 4 < 2 ? lane + 2 : lane);
    good = good && __ballot_sync(0xffffffff, lane < 4) == 0xf && __any_sync(0xffffffff, lane == 9) && !__all_sync(0xffffffff, lane == 9);
    good = good && __reduce_add_sync(0xffffffff, lane) == 496 && __reduce_max_sync(0xffffffff, -lane) == 0;
    good = good && __match_any_sync(0xffffffff, lane / 16) == (lane < 16 ? 0xffffu : 0xffff0000u);
    if (lane < 7) good = good && __activemask() == 0x7f && __shfl_sync(0x7f, lane, 6) == 6;
    good = good && __syncthreads_count(t < 40) == 40 && __syncthreads_or(t == 3) && !__syncthreads_and(t == 3);
    out[t] = good;
}
TASK_LAUNCH(exchange, 1, 64)
"#;
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), vec![1.0; 64]);
}

#[test]
fn a_histogram_counts_with_atomics() {
    let task = one_to_one(4096, 17);
    let source = r#"#include "task.h"
extern "C" __global__ void zero(const float* x, float* out) { out[threadIdx.x] = 0; }
extern "C" __global__ void histogram(const float* x, float* out) {
    __shared__ int counts[17];
    if (threadIdx.x < 17) counts[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&counts[(int)x[blockIdx.x * 256 + threadIdx.x] + 8], 1);
    __syncthreads();
    if (threadIdx.x < 17) atomicAdd(out + threadIdx.x, (float)counts[threadIdx.x]);
}
TASK_LAUNCH(zero, 1, 17);
TASK_LAUNCH(histogram, 16, 256);
"#;
    let mut expected = vec![0.0; 17];
    whole_numbers(4096).iter().for_each(|x| expected[(x + 8.0) as usize] += 1.0);
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), expected);
}

const LAST_BLOCK: &str = r#"#include "task.h"
__device__ unsigned arrived = 0;
extern "C" __global__ void sum(const float* x, float* out, float* partial) {
    __shared__ float tile[128];
    __shared__ bool last;
    int t = threadIdx.x;
    tile[t] = x[blockIdx.x * 128 + t];
    __syncthreads();
    for (int s = 64; s > 0; s >>= 1) { if (t < s) tile[t] += tile[t + s]; __syncthreads(); }
    if (t == 0) {
        partial[blockIdx.x] = tile[0];
        __threadfence();
        last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && t == 0) {
        float total = 0;
        for (int i = 0; i < gridDim.x; i++) total += partial[i];
        out[0] = total;
    }
}
TASK_SCRATCH(20 * sizeof(float));
TASK_LAUNCH(sum, 20, 128);
"#;

#[test]
fn the_last_block_sums_what_the_others_left() {
    let task = one_to_one(2560, 1);
    assert_eq!(to_floats(&output(Format::Kernel, LAST_BLOCK, &task)), sums(&whole_numbers(2560), 2560));
}

#[test]
fn without_a_fence_the_last_block_races() {
    let task = one_to_one(2560, 1);
    let fault = race_fault(&LAST_BLOCK.replace("__threadfence();", ""), &task);
    assert_fault(&fault, FaultKind::Race, Some(18), "with nothing between (there: line 11)");
}

fn matrix_product(n: usize) -> (Task, Vec<f32>) {
    let (a, b) = (whole_numbers(n * n), whole_numbers(n * n + 5)[5..].to_vec());
    let cell = |i: usize| (0..n).map(|k| a[i / n * n + k] * b[k * n + i % n]).sum();
    let product = (0..n * n).map(cell).collect();
    let task = Task {
        inputs: vec![("a", floats(a)), ("b", floats(b))],
        output_bytes: n * n * 4,
        parameters: "const float* a, const float* b, float* out",
        arguments: "a, b, out",
        constants: format!("constexpr int n = {n};"),
    };
    (task, product)
}

#[test]
fn a_tiled_product_in_dynamic_shared_memory() {
    let (task, expected) = matrix_product(40);
    let source = r#"#include "task.h"
#define TILE 16
extern "C" __global__ void product(const float* a, const float* b, float* out) {
    extern __shared__ __align__(16) float memory[];
    float (*left)[TILE] = (float (*)[TILE])memory, (*right)[TILE] = left + TILE;
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < task::n; k += TILE) {
        left[threadIdx.y][threadIdx.x] = row < task::n && k + threadIdx.x < task::n ? a[row * task::n + k + threadIdx.x] : 0;
        right[threadIdx.y][threadIdx.x] = column < task::n && k + threadIdx.y < task::n ? b[(k + threadIdx.y) * task::n + column] : 0;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    if (row < task::n && column < task::n) out[row * task::n + column] = sum;
}
TASK_LAUNCH(product, dim3((task::n + TILE - 1) / TILE, (task::n + TILE - 1) / TILE), dim3(TILE, TILE), 2 * TILE * TILE * sizeof(float));
"#;
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), expected);
    let short = source.replace("2 * TILE * TILE * sizeof(float));", "2 * TILE * TILE * sizeof(float) - 4);");
    let fault = memory_fault(&short, &task);
    assert_fault(&fault, FaultKind::OutOfBounds, Some(10), "0 bytes past the 2044 bytes of dynamic shared memory");
}

#[test]
fn half_precision() {
    let values = whole_numbers(512);
    let task = Task {
        inputs: vec![("x", floats(values.clone()))],
        output_bytes: 512 * 2,
        parameters: "const float* x, __half* out",
        arguments: "x, out",
        constants: String::new(),
    };
    let source = r#"#include <cuda_fp16.h>
#include "task.h"
__global__ void scale(const float* x, __half* out) {
    int i = threadIdx.x;
    half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    pair = __hfma2(pair, __float2half2_rn(0.5f), half2(half(1.0f), __float2half(1.0f)));
    half one = __low2half(pair);
    out[2 * i] = one;
    out[2 * i + 1] = __high2half(pair) * half(1) + __float2half(0.0f);
}
TASK_LAUNCH(scale, 1, 256);
"#;
    let expected = values.iter().map(|x| (x * 0.5 + 1.0) * 2.0).collect::<Vec<_>>();
    let bits = output(Format::Kernel, source, &task);
    let halves = bits.chunks_exact(2).map(|b| half(u16::from_le_bytes([b[0], b[1]])) * 2.0).collect::<Vec<_>>();
    assert_eq!(halves, expected);
}

/// The value of a normal 16-bit float, or zero.
fn half(bits: u16) -> f32 {
    let exponent = i32::from(bits >> 10 & 0x1f);
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    if exponent == 0 { 0.0 } else { sign * (1.0 + f32::from(bits & 0x3ff) / 1024.0) * 2f32.powi(exponent - 15) }
}

#[test]
fn functions_that_c_lacks() {
    // What PyTorch's `torch.special` gives in float64; the rest follows from it.
    let expected: [(&str, f64); 24] = [
        ("erfinv(1e-300)", 8.86226925452758e-301),
        ("erfinv(0.1)", 0.08885599049425769),
        ("erfinv(-0.9999)", -2.75106390571208),
        ("erfinv(1.0)", f64::INFINITY),
        ("erfcinv(1e-300)", 26.20946996051612),
        ("erfcinv(1.7)", -0.7328690779592167),
        ("normcdfinv(0.15)", -1.03643338949379),
        ("erfcx(-3.0)", 16205.98885399959),
        ("erfcx(9.99)", 0.05619664070685882),
        ("erfcx(10.0)", 0.05614099274382259),
        ("erfcx(1e6)", 5.641895835474742e-07),
        ("erfcxf(30.0f)", 0.018795888861416754),
        ("cyl_bessel_i0(10.0)", 2815.716628466254),
        ("cyl_bessel_i1(-1.0)", -0.5651591039924851),
        ("norm3d(2e200, 3e200, 6e200)", 7e200),
        ("rnorm4df(2e-30f, 4e-30f, 5e-30f, 6e-30f)", 1.0 / 9e-30),
        ("rhypot(3.0, 4.0)", 0.2),
        ("sinpi(16777216.5)", 1.0),
        ("__double2uint_rn(5e9)", 4294967295.0),
        ("__float2ull_rz(-3.0f)", 0.0),
        ("__hadd(-1, -2)", -2.0),
        ("__urhadd(0xffffffffu, 0xfffffffeu)", 4294967295.0),
        ("__funnelshift_lc(1u, 2u, 40u)", 1.0),
        ("__funnelshift_rc(1u, 2u, 31u)", 4.0),
    ];
    let count = expected.len();
    let task = Task { parameters: "const float* x, double* out", ..one_to_one(1, 2 * count) };
    let lines: String = expected.iter().enumerate().map(|(i, (call, _))| format!("    out[{i}] = {call};\n")).collect();
    let source = format!(
        "#include \"task.h\"\nextern \"C\" __global__ void k(const float* x, double* out) {{\n{lines}}}\nTASK_LAUNCH(k, 1, 1)\n"
    );
    let bytes = output(Format::Kernel, &source, &task);
    for (found, (call, wanted)) in bytes.chunks_exact(8).zip(expected) {
        let found = f64::from_le_bytes(found.try_into().unwrap());
        let is_near = found == wanted || ((found - wanted) / wanted).abs() < 2e-7;
        let is_exact = call.contains("f(") || found == wanted || ((found - wanted) / wanted).abs() < 1e-14;
        assert!(is_near && is_exact, "{call} is {found:e}, not {wanted:e}");
    }
}

#[test]
fn conversions_to_16_bits_round_as_the_compilers_do() {
    let task = one_to_one(1, 3);
    // Every finite half's value and the points around the middle to its neighbour; the compiler's own type is the judge.
    let source = r#"#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include "task.h"
__global__ void check(const float* x, float* out) {
    int wrong = 0, bfloat = 0, doubles = 0;
    for (unsigned bits = 0; bits < 0x10000; bits++) {
        unsigned short s = (unsigned short)bits;
        _Float16 theirs;
        memcpy(&theirs, &s, 2);
        float value = (float)theirs, ours = __half2float(__ushort_as_half(s));
        if (value == value ? value != ours : ours == ours) wrong++;
        for (int around = -1; around <= 1; around++) {
            float middle = __int_as_float(__float_as_int(value) + 0x1000 + around);
            if (middle != middle) continue;
            _Float16 rounded = (_Float16)middle;
            unsigned short expected;
            memcpy(&expected, &rounded, 2);
            if (__half_as_ushort(__float2half(middle)) != expected) wrong++;
            double near = (double)middle * (1 + 1e-12);
            _Float16 from_double = (_Float16)near;
            memcpy(&expected, &from_double, 2);
            if (__half_as_ushort(__double2half(near)) != expected) doubles++;
            float upper = __uint_as_float(bits << 16 | 0x8000u + around);
            unsigned short b = __bfloat16_as_ushort(__float2bfloat16(upper));
            if (upper == upper && b != (unsigned short)(bits + (around > 0 || (around == 0 && bits & 1)))) bfloat++;
        }
    }
    out[0] = wrong, out[1] = bfloat, out[2] = doubles;
}
TASK_LAUNCH(check, 1, 1);
"#;
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), [0.0, 0.0, 0.0]);
}

const LAUNCHED: &str = r#"#include <cuda_runtime.h>
#include "task.h"
namespace ours {
template <typename T, int N>
__global__ void scale(const T* __restrict__ x, T* out, T factor, long long n) {
    __shared__ T tile[N];
    long long i = blockIdx.x * (long long)N + threadIdx.x;
    if (i < n) tile[threadIdx.x] = x[i];
    __syncthreads();
    if (i < n) out[i] = tile[threadIdx.x] * factor;
}
template <typename T>
__global__ void reverse(T* out, int n) {
    extern __shared__ __align__(sizeof(T)) unsigned char raw[];
    T* copy = reinterpret_cast<T*>(raw);
    copy[threadIdx.x] = out[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = copy[n - 1 - threadIdx.x];
}
}
extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    const int threads = 128;
    dim3 grid((task::x_size + threads - 1) / threads);
    ours::scale<float, 128><<<grid, threads, 0, stream>>>(x, out, 2.0f, task::x_size);
    int n = 1;
    float* cursor = out;
    ours::reverse<float><<<1, 1000, 1000 * sizeof(float)>>>(cursor++, (n += 999));
    return n == 1000 && cursor == out + 1 ? cudaGetLastError() : cudaErrorUnknown;
}
"#;

#[test]
fn a_host_function_launches_templates() {
    let task = one_to_one(1000, 1000);
    let expected = whole_numbers(1000).iter().rev().map(|x| x * 2.0).collect::<Vec<_>>();
    assert_eq!(to_floats(&output(Format::Launch, LAUNCHED, &task)), expected);
}

#[test]
fn host_code_does_not_reach_the_devices_memory() {
    let task = one_to_one(1000, 1000);
    let source = |body: &str| {
        format!(
            "#include <algorithm>\n#include \"task.h\"\n__global__ void k(const float* x, float* out, float factor) {{\n    \
             int i = blockIdx.x * 250 + threadIdx.x;\n    out[i] = x[i] * factor;\n}}\nTASK_SCRATCH(64)\n\
             extern \"C\" cudaError_t launch(TASK_PARAMETERS, void* scratch, cudaStream_t stream) {{\n    {body}\n    return cudaGetLastError();\n}}\n"
        )
    };
    for (body, verb, place) in [
        ("for (int i = 0; i < 1000; i++) out[i] = x[i] > 0 ? x[i] : 0;", "reads", "x[0]"),
        ("k<<<4, 250, 0, stream>>>(x, out, 2); out[7] = 1;", "writes", "out[7]"),
        ("cudaMemsetAsync(out, 0, 4000, stream); *out = 1;", "writes", "out[0]"),
        ("k<<<4, 250, 0, stream>>>(x, out, x[3]);", "reads", "x[3]"),
        ("((char*)scratch)[60] = 1;", "writes", "the scratch buffer[60]"),
    ] {
        for fault in faults(Format::Launch, &source(body), &task) {
            let says = format!("the host function {verb} {place}, which is memory of the device");
            assert_fault(&fault.expect("a fault"), FaultKind::Crash, Some(9), &says);
        }
    }
    // In a function of a library there is no line.
    for fault in faults(Format::Launch, &source("std::copy(x, x + 1000, out);"), &task) {
        assert!(fault.expect("a fault").message.contains("which is memory of the device"));
    }
    let copies = "float some[250];\n    k<<<4, 250, 0, stream>>>(x, out, 2);\n    \
                  cudaMemcpyAsync(some, out, 1000, cudaMemcpyDeviceToHost, stream);\n    some[0] = 5;\n    \
                  cudaMemcpyAsync(scratch, some, 64, cudaMemcpyHostToDevice, stream);\n    \
                  cudaMemcpyAsync(out, scratch, 64, cudaMemcpyDeviceToDevice, stream);\n    cudaMemsetAsync(out + 999, 0, 4);";
    let mut expected = whole_numbers(1000).iter().map(|x| x * 2.0).collect::<Vec<_>>();
    (expected[0], expected[999]) = (5.0, 0.0);
    assert_eq!(to_floats(&output(Format::Launch, &source(copies), &task)), expected);
}

#[test]
fn an_error_of_the_host_function_is_a_fault() {
    let task = one_to_one(1000, 1000);
    let source = LAUNCHED.replace("cursor == out + 1", "cursor == out");
    let [memory, _] = faults(Format::Launch, &source, &task);
    assert_fault(&memory.expect("a fault"), FaultKind::Launch, None, "cudaError_t 999");
}

#[path = "runner_whole_test.rs"]
mod whole;
#[path = "runner_faults_test.rs"]
mod wrong;
