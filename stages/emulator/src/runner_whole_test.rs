//! Kernels as people write them, and what the headers and the clock bring; a measurement of speed at the end.

use super::*;

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
