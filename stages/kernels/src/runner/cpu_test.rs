//! Real candidates, compiled and run: honest ones give the right numbers in both programs and in every order; wrong ones
//! end with the fault that says what is wrong, at its line.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use tempfile::TempDir;

use super::*;
use crate::candidate::{Candidate, Format};
use crate::compile::host::tests::toolchain;
use crate::compile::{Artifact, Built, CompileFailure};

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

pub(super) fn build(format: Format, source: &str, task: &Task) -> (TempDir, Result<Built, CompileFailure>) {
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

pub(super) fn programs(built: &Built) -> [&Path; 2] {
    let Artifact::Host { memory, race } = &built.artifact else { panic!("not for the CPU") };
    [memory, race]
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
    let launches =
        built.program.launches().map(|(k, l)| (&*k.symbol, l.grid, l.block, l.shared_bytes, k.parameters.len()));
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

#[test]
fn blocks_that_write_one_place_race() {
    let task = one_to_one(256, 1);
    let source = r#"#include "task.h"
__global__ void sum(const float* x, float* out) {
    if (threadIdx.x == 0) out[0] += x[blockIdx.x];
}
TASK_LAUNCH(sum, 4, 32);
"#;
    assert_fault(&race_fault(source, &task), FaultKind::Race, Some(3), "out[0] that thread (0,0,0) of block");
}

#[test]
fn threads_that_store_one_value_do_not_race() {
    let task = one_to_one(256, 1);
    let source = r#"#include "task.h"
__global__ void flag(const float* x, float* out) {
    __shared__ int any;
    any = 7;
    if (any == 7) out[0] = 3.0f;
}
TASK_LAUNCH(flag, 4, 32);
"#;
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), [3.0]);
}

#[test]
fn halves_next_to_each_other_do_not_race() {
    let task = Task {
        inputs: vec![("x", floats(whole_numbers(64)))],
        output_bytes: 128,
        parameters: "const float* x, __half* out",
        arguments: "x, out",
        constants: String::new(),
    };
    let source = r#"#include <cuda_fp16.h>
#include "task.h"
__global__ void convert(const float* x, __half* out) { out[blockIdx.x] = __float2half(x[blockIdx.x]); }
TASK_LAUNCH(convert, 64, 1);
"#;
    assert_eq!(output(Format::Kernel, source, &task).len(), 128);
}

#[test]
fn lanes_meet_at_a_shuffle() {
    let task = one_to_one(32, 32);
    let source = r#"#include "task.h"
__global__ void swap(const float* x, float* out) {
    __shared__ float tile[32];
    int t = threadIdx.x;
    tile[t] = x[t];
    __syncwarp();
    out[t] = tile[t ^ 1];
}
TASK_LAUNCH(swap, 1, 32);
"#;
    let expected = (0..32).map(|i| whole_numbers(32)[i ^ 1]).collect::<Vec<_>>();
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), expected);
    let apart = source.replace("__syncwarp();", "");
    assert_eq!(race_fault(&apart, &task).kind, FaultKind::Race);
}

#[test]
fn reads_and_writes_out_of_bounds() {
    let task = one_to_one(1000, 1000);
    let source = |body: &str| {
        format!(
            "#include \"task.h\"\n__global__ void k(const float* x, float* out) {{\n    int i = blockIdx.x * 256 + threadIdx.x;\n    {body}\n}}\nTASK_LAUNCH(k, 4, 256);\n"
        )
    };
    let read = memory_fault(&source("float v = x[i]; out[i < 1000 ? i : 0] = v;"), &task);
    assert_fault(&read, FaultKind::OutOfBounds, Some(4), "past the end of x");
    assert!(read.message.contains("reads 4 bytes"), "{read:?}");
    let written = memory_fault(&source("if (i <= 1000) out[i] = 1.0f;"), &task);
    assert_fault(&written, FaultKind::OutOfBounds, Some(4), "writes 4 bytes: 0 bytes past the end of out");
    let before = memory_fault(&source("if (i < 1000) out[i] = x[i - 1];"), &task);
    assert_fault(&before, FaultKind::OutOfBounds, Some(4), "reads 4 bytes before x");
    let far = memory_fault(&source("if (i == 5) out[i + 100000] = 1.0f;"), &task);
    assert_fault(&far, FaultKind::OutOfBounds, Some(4), "writes 396020 bytes past the end of out");
    let local = memory_fault(
        &source("__shared__ float s[256]; s[threadIdx.x + 1] = x[0]; if (i < 1000) out[i] = s[0];"),
        &task,
    );
    assert_fault(&local, FaultKind::OutOfBounds, Some(4), "past the end of a shared variable of 1024 bytes");
    let twice = source("__shared__ float s[256]; s[threadIdx.x + 1] = i; if (i < 1000) out[i] = s[threadIdx.x + 1];");
    assert_fault(&race_fault(&twice, &task), FaultKind::OutOfBounds, Some(4), "past the end of a shared variable");
    let stack = memory_fault(
        &source("float a[8]; for (int j = 0; j <= (int)x[8] + 8; j++) a[j] = j; if (i < 1000) out[i] = a[i % 8];"),
        &task,
    );
    assert_fault(&stack, FaultKind::OutOfBounds, Some(4), "writes 4 bytes: outside every local variable");
}

#[test]
fn each_shared_variable_ends_at_its_own_last_byte() {
    let task = one_to_one(256, 1);
    let source = |declaration: &str| {
        format!(
            "#include \"task.h\"\ntemplate <int N>\n__global__ void sum(const float* x, float* out) {{\n    {declaration}\n    s[threadIdx.x] = x[threadIdx.x];\n    \
             __syncthreads();\n    out[0] = s[0] + ((size_t)s % 16 != 0);\n}}\n__global__ void k(TASK_PARAMETERS) {{\n    sum<256>(x, out);\n}}\nTASK_LAUNCH(k, 1, 256);\n"
        )
    };
    for (declaration, bytes) in [
        ("__shared__ __align__(16) float s[N - 2];", 1016),
        ("alignas(16) volatile __shared__ float s[254];", 1016),
        ("__shared__ alignas(32) float s[200], after[56]; after[0] = 0;", 800),
    ] {
        let fault = memory_fault(&source(declaration), &task);
        let says = format!("bytes past the end of a shared variable of {bytes} bytes");
        assert_fault(&fault, FaultKind::OutOfBounds, Some(5), &says);
    }
    let whole = source("__shared__ __align__(16) float s[N], after[3]; after[0] = 0;");
    assert_eq!(to_floats(&output(Format::Kernel, &whole, &task)), whole_numbers(1));
}

#[test]
fn vectors_that_reach_over_the_end() {
    let task = one_to_one(1002, 1002);
    let source = |body: &str| {
        format!(
            "#include \"task.h\"\n__global__ void k(const float* x, float* out) {{\n    int i = threadIdx.x;\n    {body}\n}}\nTASK_LAUNCH(k, 1, 251, 40);\n"
        )
    };
    let told = |body: &str, says: &str| {
        assert_fault(&memory_fault(&source(body), &task), FaultKind::OutOfBounds, Some(4), says);
    };
    told("((float4*)out)[i] = float4{0, 0, 0, 0};", "writes 16 bytes: 8 of them past the end of out");
    told("((float4*)out)[i % 250] = ((const float4*)x)[i];", "reads 16 bytes: 8 of them past the end of x");
    told(
        "__shared__ alignas(16) float s[9]; ((float4*)s)[2] = ((const float4*)x)[i % 250];",
        "writes 16 bytes: 12 of them past the end of a shared variable",
    );
    told(
        "extern __shared__ alignas(16) float s[]; ((float4*)s)[2] = ((const float4*)x)[i % 250];",
        "writes 16 bytes: 8 of them past the end of dynamic shared memory",
    );
}

#[test]
fn null_pointers() {
    let task = one_to_one(4, 4);
    let source = "#include \"task.h\"\n__global__ void k(const float* x, float* out) {\n    float* p = x[0] < 100 ? nullptr : out;\n    p[threadIdx.x] = 1;\n}\nTASK_LAUNCH(k, 1, 4);\n";
    assert_fault(&memory_fault(source, &task), FaultKind::OutOfBounds, Some(4), "a null pointer");
    assert_fault(&race_fault(source, &task), FaultKind::OutOfBounds, Some(4), "a null pointer");
}

#[test]
fn misaligned_vectors() {
    let task = one_to_one(64, 64);
    let source = "#include \"task.h\"\n__global__ void k(const float* x, float* out) {\n    const float4* v = (const float4*)(x + 1);\n    out[threadIdx.x] = v[threadIdx.x].y;\n}\nTASK_LAUNCH(k, 1, 4);\n";
    assert_fault(&memory_fault(source, &task), FaultKind::Misaligned, Some(4), "4 bytes off a multiple of 16");
}

#[test]
fn lanes_that_wait_for_lanes_that_never_come() {
    let task = one_to_one(64, 64);
    let source = r#"#include "task.h"
__global__ void k(const float* x, float* out) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) v += __shfl_down_sync(0xffffffffu, v, 8);
    else __syncthreads();
    out[threadIdx.x] = v;
}
TASK_LAUNCH(k, 1, 32);
"#;
    let fault = memory_fault(source, &task);
    assert_fault(&fault, FaultKind::Deadlock, Some(4), "for lane 16, which waits in __syncthreads");
    assert!(fault.message.starts_with("thread ("), "its kind is told beside it: {fault:?}");
}

#[test]
fn a_loop_without_end() {
    let task = one_to_one(4, 4);
    let source = "#include \"task.h\"\n__global__ void k(const float* x, float* out) { while (x[0] < 100) {} }\nTASK_LAUNCH(k, 1, 4);\n";
    let [memory, race] = faults(Format::Kernel, source, &task);
    assert_fault(&memory.expect("a fault"), FaultKind::Timeout, None, "did not end within 1.0 s");
    assert_fault(&race.expect("a fault"), FaultKind::Timeout, None, "did not end");
}

/// Those of a host function, which are known only when it runs; declared ones don't compile.
#[test]
fn launches_that_a_gpu_refuses() {
    let task = one_to_one(4, 4);
    let fault = |launch: &str| {
        let source = format!(
            "#include \"task.h\"\n__global__ void k(const float* x, float* out) {{}}\n\
             extern \"C\" cudaError_t launch(TASK_PARAMETERS, void* scratch, cudaStream_t stream) {{\n\
             cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024);\n\
             k<<<{launch}>>>(x, out);\nreturn cudaGetLastError();\n}}\n"
        );
        let [memory, _] = faults(Format::Launch, &source, &task);
        memory.expect("a fault of the memory program")
    };
    assert_fault(&fault("1, 4, 240 * 1024"), FaultKind::Launch, None, "the most is 232448");
    assert_fault(&fault("1, 2048"), FaultKind::Launch, None, "the most is 1024");
    assert_fault(&fault("0, 32"), FaultKind::Launch, None, "a grid of (0,1,1)");
}

#[test]
fn traps_and_assertions() {
    let task = one_to_one(4, 4);
    let source = "#include \"task.h\"\n__global__ void k(const float* x, float* out) {\n    assert(x[0] > 1000);\n}\nTASK_LAUNCH(k, 1, 4);\n";
    assert_fault(&memory_fault(source, &task), FaultKind::Crash, Some(3), "fails the assertion `x[0] > 1000`");
    let trap = source.replace("assert(x[0] > 1000)", "__trap()");
    assert_fault(&memory_fault(&trap, &task), FaultKind::Crash, Some(3), "called __trap");
}

#[test]
fn what_a_program_prints_is_no_answer() {
    let task = one_to_one(4, 4);
    let source = "#include <cstdio>\n#include \"task.h\"\n__global__ void k(const float* x, float* out) {\n    printf(\"done {}\\ncuda-cpu: {\\\"kind\\\":\\\"race\\\"}\\n\");\n    fprintf(stderr, \"\\ncuda-cpu: no json\\n\");\n    out[threadIdx.x] = 1;\n}\nTASK_LAUNCH(k, 1, 4);\n";
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), [1.0; 4]);
}

#[test]
fn a_program_that_ends_itself() {
    let task = one_to_one(4, 4);
    let source = "#include <cstdlib>\n#include \"task.h\"\nextern \"C\" cudaError_t launch(const float* x, float* out, void*, cudaStream_t) { abort(); }\n";
    let [memory, _] = faults(Format::Launch, source, &task);
    assert_fault(&memory.expect("a fault"), FaultKind::Crash, None, "ends the process by a signal (6)");
}

#[test]
fn too_much_memory() {
    let task = one_to_one(4, 4);
    let source = "#include <cstdlib>\n#include \"task.h\"\nextern \"C\" cudaError_t launch(const float* x, float* out, void*, cudaStream_t) {\n    for (;;) memset(malloc(1 << 24), 1, 1 << 24);\n}\n";
    let (_folder, built) = build(Format::Launch, source, &task);
    let built = built.expect("it compiles");
    let limits = CpuLimits { memory_bytes: 256 << 20, ..CpuLimits::default() };
    for program in programs(&built) {
        let arena = Arena::new(&task, 0);
        let mut runner = CpuRunner::start(program, arena.file.path(), arena.bytes, limits).unwrap().unwrap();
        let fault = runner.run(0, &arena.spans, arena.scratch, Duration::from_secs(20)).unwrap().unwrap_err();
        assert_fault(&fault, FaultKind::Crash, None, "more than 256 MiB");
    }
}

/// Kernels as people write them: each takes `x` and gives `out`, checked against numbers computed here.
#[test]
fn a_normalisation_with_vectors_and_templates() {
    let task = one_to_one(16 * 512, 16 * 512);
    let source = r#"#include <cuda_runtime.h>
#include <math.h>
#include "task.h"

#define WARP_SIZE 32
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

template <typename T> struct Sum { __device__ __forceinline__ T operator()(const T& a, const T& b) const { return a + b; } };

template <typename T, class Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value = op(value, __shfl_xor_sync(0xffffffff, value, mask, WARP_SIZE));
    return value;
}

template <typename T, int THREADS, class Op>
__device__ T block_reduce(T value, Op op, T zero) {
    static_assert(THREADS % WARP_SIZE == 0, "whole warps");
    __shared__ T shared[THREADS / WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    value = warp_reduce(value, op);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = threadIdx.x < THREADS / WARP_SIZE ? shared[lane] : zero;
    if (warp == 0) value = warp_reduce(value, op);
    if (threadIdx.x == 0) shared[0] = value;
    __syncthreads();
    T result = shared[0];
    __syncthreads();
    return result;
}

template <int THREADS, int COLUMNS>
__global__ void __launch_bounds__(THREADS) normalise(const float* __restrict__ x, float* __restrict__ out, const float epsilon) {
    const float4* row = reinterpret_cast<const float4*>(x + (size_t)blockIdx.x * COLUMNS);
    float4* to = reinterpret_cast<float4*>(out + (size_t)blockIdx.x * COLUMNS);
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < COLUMNS / 4; i += THREADS) {
        const float4 v = __ldg(&row[i]);
        sum += v.x + v.y + v.z + v.w;
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float mean = block_reduce<float, THREADS>(sum, Sum<float>(), 0.0f) / COLUMNS;
    const float variance = block_reduce<float, THREADS>(squares, Sum<float>(), 0.0f) / COLUMNS - mean * mean;
    const float scale = rsqrtf(variance + epsilon);
    for (int i = threadIdx.x; i < COLUMNS / 4; i += THREADS) {
        float4 v = row[i];
        v.x = (v.x - mean) * scale; v.y = (v.y - mean) * scale;
        v.z = (v.z - mean) * scale; v.w = (v.w - mean) * scale;
        to[i] = v;
    }
}

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {
    constexpr int columns = 512;
    normalise<128, columns><<<CEIL_DIV(task::x_size, columns), 128, 0, stream>>>(x, out, 1e-5f);
    return cudaGetLastError();
}
"#;
    let got = to_floats(&output(Format::Launch, source, &task));
    for (row, values) in whole_numbers(16 * 512).chunks(512).enumerate() {
        let mean = values.iter().sum::<f32>() / 512.0;
        let variance = values.iter().map(|x| x * x).sum::<f32>() / 512.0 - mean * mean;
        for (i, x) in values.iter().enumerate() {
            assert!((got[row * 512 + i] - (x - mean) / (variance + 1e-5).sqrt()).abs() < 1e-5);
        }
    }
}

#[test]
fn a_scan_a_transpose_and_constant_memory() {
    let task = one_to_one(64 * 64, 64 * 64);
    let source = r#"#include "task.h"
constexpr int TILE = 32, ROWS = 8, N = 64;
__constant__ float weights[3] = {1.0f, 2.0f, -1.0f};
__device__ float between[N * N];

extern "C" __global__ void transpose(const float* x, float* out) {
    __shared__ float tile[TILE][TILE + 1];
    int column = blockIdx.x * TILE + threadIdx.x, row = blockIdx.y * TILE + threadIdx.y;
    for (int j = 0; j < TILE; j += ROWS) tile[threadIdx.y + j][threadIdx.x] = x[(row + j) * N + column];
    __syncthreads();
    column = blockIdx.y * TILE + threadIdx.x, row = blockIdx.x * TILE + threadIdx.y;
    for (int j = 0; j < TILE; j += ROWS) between[(row + j) * N + column] = tile[threadIdx.x][threadIdx.y + j];
}
// An inclusive sum along each row, by warps, then weights along it.
extern "C" __global__ void scan(const float* x, float* out) {
    __shared__ float sums[2], row[N + 2];
    int t = threadIdx.x, lane = t % 32, warp = t / 32;
    float v = between[blockIdx.x * N + t];
    for (int offset = 1; offset < 32; offset <<= 1) {
        float other = __shfl_up_sync(~0u, v, offset);
        if (lane >= offset) v += other;
    }
    if (lane == 31) sums[warp] = v;
    if (t < 2) row[t] = 0.0f;
    __syncthreads();
    if (warp > 0) v += sums[warp - 1];
    row[t + 2] = v;
    __syncthreads();
    float sum = 0;
    #pragma unroll
    for (int k = 0; k < 3; ++k) sum += weights[k] * row[t + 2 - k];
    out[blockIdx.x * N + t] = sum;
}
TASK_LAUNCH(transpose, dim3(N / TILE, N / TILE), dim3(TILE, ROWS));
TASK_LAUNCH(scan, N, N);
"#;
    let x = whole_numbers(64 * 64);
    let mut expected = Vec::new();
    for row in 0..64 {
        let sums: Vec<f32> = (0..64).map(|i| (0..=i).map(|k| x[k * 64 + row]).sum()).collect();
        let at = |i: usize, back: usize| i.checked_sub(back).map_or(0.0, |i| sums[i]);
        expected.extend((0..64).map(|i| at(i, 0) + 2.0 * at(i, 1) - at(i, 2)));
    }
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), expected);
}

#[test]
fn locks_and_compare_and_swap() {
    let task = one_to_one(1024, 2);
    let source = r#"#include "task.h"
__device__ int lock = 0;
__device__ float largest(float* address, float value) {
    int* bits = (int*)address;
    int old = *bits, assumed;
    do {
        assumed = old;
        old = atomicCAS(bits, assumed, __float_as_int(fmaxf(value, __int_as_float(assumed))));
    } while (old != assumed);
    return __int_as_float(old);
}
extern "C" __global__ void clear(const float* x, float* out) { if (threadIdx.x == 0) { out[0] = -1e30f; out[1] = 0; } }
extern "C" __global__ void work(const float* x, float* out) {
    float v = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicMax((int*)out, __float_as_int(fabsf(v)));
    if (threadIdx.x == 0) {
        while (atomicCAS(&lock, 0, 1) != 0) {}
        __threadfence();
        out[1] += v;
        __threadfence();
        atomicExch(&lock, 0);
    }
}
TASK_LAUNCH(clear, 1, 32);
TASK_LAUNCH(work, 16, 64);
"#;
    let x = whole_numbers(1024);
    let largest = x.iter().fold(0f32, |a, b| a.max(b.abs()));
    let sum = (0..16).map(|block| x[block * 64]).sum::<f32>();
    assert_eq!(to_floats(&output(Format::Kernel, source, &task)), [largest, sum]);
}

#[test]
fn a_wait_for_another_block_is_not_judged() {
    let task = one_to_one(4, 4);
    let source = r#"#include "task.h"
__device__ int arrived = 0;
extern "C" __global__ void k(const float* x, float* out) {
    atomicAdd(&arrived, 1);
    while (atomicAdd(&arrived, 0) < 4) {}
    out[blockIdx.x] = x[blockIdx.x];
}
TASK_LAUNCH(k, 4, 1);
"#;
    let (_folder, built) = build(Format::Kernel, source, &task);
    for program in programs(&built.expect("it compiles")) {
        let fault = run(program, &task, 0, Duration::from_secs(20)).expect_err("it waits");
        assert_fault(&fault, FaultKind::Unsupported, Some(5), "one block after the other");
    }
}

#[test]
fn a_wait_that_no_thread_ends_is_a_deadlock() {
    let task = one_to_one(4, 4);
    let source = |place: &str, lock: &str, blocks: u32| {
        format!(
            "#include \"task.h\"\n__device__ int global = 1;\nTASK_SCRATCH(8)\n__global__ void k(const float* x, float* out, int* scratch) {{\n    {place}\n    \
             {lock} = 1;\n    __syncthreads();\n    while (atomicCAS(&{lock}, 0, 1) != 0) {{}}\n    out[blockIdx.x] = 1;\n}}\nTASK_LAUNCH(k, {blocks}, 64, 8);\n"
        )
    };
    for (place, lock, blocks, waits) in [
        ("__shared__ int lock;", "lock", 4, "waits for byte 0 of shared memory, which no thread changes"),
        ("extern __shared__ int s[];", "s[1]", 4, "waits for byte 4 of dynamic shared memory, which no"),
        ("", "global", 1, "waits for a device variable, which no thread changes"),
        ("", "scratch[1]", 1, "waits for the scratch buffer[4], which no thread changes"),
    ] {
        let (_folder, built) = build(Format::Kernel, &source(place, lock, blocks), &task);
        for program in programs(&built.expect("it compiles")) {
            let fault = run(program, &task, 8, Duration::from_secs(20)).expect_err("it waits");
            assert_fault(&fault, FaultKind::Deadlock, Some(8), waits);
        }
    }
}

/// The waits of each end only after many turns of the others.
#[test]
fn long_waits_within_a_block_end() {
    let task = one_to_one(512, 3);
    let source = r#"#include "task.h"
__global__ void k(const float* x, float* out) {
    __shared__ int next, serving, flag, total, largest;
    int t = threadIdx.x;
    if (t == 0) next = serving = flag = total = 0, largest = 100;
    __syncthreads();
    for (int round = 0; round < 2; round++) {
        int ticket = atomicAdd(&next, 1);
        while (atomicAdd(&serving, 0) != ticket) {}
        total++;
        __threadfence_block();
        atomicAdd(&serving, 1);
    }
    __syncthreads();
    if (t < 2)
        for (int round = 0; round < 500; round++) {
            while (atomicAdd(&flag, 0) != t) {}
            *(volatile int*)&flag = 1 - t;
        }
    for (int i = 0; i < 5000; i++) atomicMax(&largest, (int)x[t]);
    __syncthreads();
    if (t == 0) out[0] = total, out[1] = flag, out[2] = largest;
}
TASK_LAUNCH(k, 1, 512);
"#;
    let (_folder, built) = build(Format::Kernel, source, &task);
    let built = built.expect("it compiles");
    let [memory, _] = programs(&built);
    let output = run(memory, &task, 0, Duration::from_secs(60)).expect("no fault");
    assert_eq!(to_floats(&output), [1024.0, 0.0, 100.0]);
}

#[test]
fn the_headers_of_c_and_its_clock_beside_the_devices() {
    let task = one_to_one(64, 64);
    for header in ["chrono", "iostream", "complex", "ctime", "time.h", "thread", "cstdio"] {
        let source = format!(
            "#include <{header}>\n#include \"task.h\"\n__global__ void k(const float* x, float* out) {{\n    clock_t begin = clock();\n    \
             long long wide = clock64();\n    __syncthreads();\n    out[threadIdx.x] = clock() > begin && clock64() > wide;\n}}\nTASK_LAUNCH(k, 1, 64);\n"
        );
        assert_eq!(to_floats(&output(Format::Kernel, &source, &task)), [1.0; 64], "{header}");
    }
}

/// A thread that never waits costs less than 50 ns. `cargo test -- --ignored --nocapture speed` shows all figures.
#[test]
#[ignore = "on a busy machine times say nothing"]
fn speed() {
    let n = 1 << 18;
    let task = one_to_one(n, n);
    let plain = "#include \"task.h\"\n__global__ void k(const float* x, float* out) { int i = blockIdx.x * 256 + threadIdx.x; out[i] = x[i] * 2; }\nTASK_LAUNCH(k, task::x_size / 256, 256);\n";
    let barriers = plain
        .replace("out[i] = x[i] * 2;", "float v = x[i]; for (int j = 0; j < 10; j++) __syncthreads(); out[i] = v;");
    let shuffles = plain.replace(
        "out[i] = x[i] * 2;",
        "float v = x[i]; for (int j = 0; j < 10; j++) v += __shfl_xor_sync(~0u, v, 1); out[i] = v;",
    );
    for (name, source) in [("plain", plain), ("10 barriers", &barriers), ("10 shuffles", &shuffles)] {
        let (_folder, built) = build(Format::Kernel, source, &task);
        let built = built.expect("it compiles");
        for program in programs(&built) {
            let arena = Arena::new(&task, 0);
            let started = CpuRunner::start(program, arena.file.path(), arena.bytes, CpuLimits::default());
            let mut runner = started.unwrap().unwrap();
            let times = [0, 1, 2].map(|seed| {
                runner.run(seed, &arena.spans, arena.scratch, Duration::from_secs(60)).unwrap().unwrap().ms
            });
            let each = times.map(|ms| ms * 1e6 / n as f64);
            println!(
                "{name} {}: {each:.1?} ns a thread; built in {:.2} s",
                program.file_name().unwrap().display(),
                built.seconds
            );
            let measured = name == "plain" && program.ends_with("memory");
            assert!(!measured || each.iter().any(|each| *each < 50.0));
        }
    }
}

/// What a candidate registers by hand in place of the launch that it declares.
const FORGED_LAUNCH: &str = "#include \"task.h\"\n__global__ void k(TASK_PARAMETERS) { out[0] = x[0]; }\n\
    int call(void* const*) { return 0; }\nunsigned bytes[] = {4, 4, 4, 4};\n\
    #define Registration Registration forged(nullptr, &call, \"a, b, c, d\", bytes),\n\
    TASK_LAUNCH(k, 1, 1)\n";

#[test]
fn a_launch_that_was_registered_by_hand_ends_in_a_fault() {
    for fault in faults(Format::Kernel, FORGED_LAUNCH, &one_to_one(4, 1)) {
        let fault = fault.expect("it is none of the task's");
        assert_eq!(fault.kind, FaultKind::Crash);
        assert_eq!(fault.message, "it broke the CPU device's program: the number of arguments is not the task's");
    }
}

#[test]
fn answers_that_nobody_asked_for_end_in_a_fault() {
    let source = "#include <cstdio>\n#include \"task.h\"\n\
        __global__ void k(TASK_PARAMETERS) { out[0] = x[0]; }\n\
        extern \"C\" cudaError_t launch(TASK_PARAMETERS, void*, cudaStream_t) {\n\
        for (int pipe = 3; pipe < 64; pipe++) {\n\
        stdout->_fileno = pipe;\n\
        printf(\"done {\\\"ms\\\": -1}\\ndone {\\\"ms\\\": 1}\\n\");\nfflush(stdout);\n}\n\
        k<<<1, 1>>>(x, out);\nreturn cudaSuccess;\n}\n";
    for answer in ["-1", "1"] {
        for fault in faults(Format::Launch, &source.replace("-1", answer), &one_to_one(4, 1)) {
            let fault = fault.expect("it is no answer");
            assert!(fault.message.starts_with("it wrote into the evaluator's pipe: \"done {"), "{fault:?}");
        }
    }
}

#[test]
fn a_candidates_own_templates_and_names_stay_its_own() {
    let source = "#include <vector>\n#include \"task.h\"\nstruct Zero { template <class T> operator T() { return 0; } };\n\
        template <> void std::vector<void*>::push_back(const value_type&) { Zero(); }\n\
        template <> void std::vector<void*>::clear() noexcept {}\n\
        namespace runtime { int in_kernel; }\n\
        __global__ void k(TASK_PARAMETERS) { out[0] = x[0] + runtime::in_kernel; }\n\
        TASK_LAUNCH(k, 1, 1)\n";
    assert_eq!(to_floats(&output(Format::Kernel, source, &one_to_one(4, 1))), [-8.0]);
}
