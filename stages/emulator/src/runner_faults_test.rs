//! What is wrong in a candidate: races, accesses out of bounds, waits that nobody ends, and whatever else must not come out as
//! a result.

use super::*;

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
