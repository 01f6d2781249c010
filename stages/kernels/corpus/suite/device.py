"""Device code that hangs, waits, floods, faults, or does what not every device can."""

from .case import REFUSED, Case, by_row, elementwise, task

RELU = task("x: torch.relu(x)", "[torch.randn(size)]", size=10007)
SUMS = task("x: x.sum(1)", "[torch.randn(rows, columns)]", rows=61, columns=515)
PLAIN = elementwise("fmaxf(x[i], 0.0f)", before="// before")
BEFORE = "// before"
SUM_SOURCE = by_row(
    """float sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += x[row * task::columns + c];
    sum = sum_of(sum, shared);
    if (thread == 0) out[row] = sum;"""
)
WITH_PTX = elementwise("fmaxf(x[i], 0.0f)", before='unsigned lane;\n    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));\n    // before')
WAITING = """\
#include "task.h"
__device__ int arrived;
extern "C" __global__ void clear(TASK_PARAMETERS) { arrived = 0; }
TASK_LAUNCH(clear, 1, 1);
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < task::out_size) out[i] = fmaxf(x[i], 0.0f);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&arrived, 1);
}
TASK_LAUNCH(run, (task::out_size + 255) / 256, 256);
"""

CASES = [
    Case("endless_loop", RELU, PLAIN, (BEFORE, "for (volatile int n = 0; i < 32; n = n + 1);"), cpu=["timeout"]),
    Case("waits_for_a_flag", RELU, WAITING, ("if (threadIdx.x == 0) atomicAdd(&arrived, 1);", "if (threadIdx.x == 0) { atomicAdd(&arrived, 1); while (atomicAdd(&arrived, 0) <= gridDim.x); }"), cpu=["timeout", "deadlock", "unsupported"], cuda=["timeout"]),
    Case("sleeps", RELU, PLAIN, (BEFORE, "for (int n = 0; n < 20000000 && i < 32; ++n) __nanosleep(1000000);"), cpu=["timeout", "unsupported", "correct"], cuda=["timeout"]),
    Case("sleeps_by_the_clock", RELU, WITH_PTX, (BEFORE, 'unsigned long long start, now;\n    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));\n    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < 60000000000ull);'), cpu=["unsupported"], cuda=["timeout"], twin_cpu=["unsupported"]),
    Case("printf_flood", RELU, PLAIN, (BEFORE, 'for (int n = 0; n < 100; ++n) printf("%d %d the quick brown fox jumps over the lazy dog\\n", i, n);\n    if (i == 7) return;'), cpu=["unwritten", "timeout"]),
    Case("trap", RELU, PLAIN, (BEFORE, "if (i == 4999) __trap();"), cpu=["crash"]),
    Case("assertion", RELU, PLAIN.replace('#include "task.h"', '#include "task.h"\n#include <cassert>').replace(BEFORE, "assert(i >= 0);"), ("assert(i >= 0);", "assert(i != 4999);"), cpu=["crash", "compile_error", "unsupported"], cuda=["crash"]),
    Case("null_pointer", RELU, PLAIN, (BEFORE, "if (i == 17) *static_cast<volatile float*>(nullptr) = 1.0f;"), cpu=["crash", "out_of_bounds"]),
    Case("memory_of_its_own_for_ever", RELU, PLAIN, (BEFORE, "for (;;) { volatile char* more = static_cast<char*>(malloc(1 << 20)); if (more == nullptr) break; *more = 1; }\n    if (i == 5) return;"), cpu=REFUSED, cuda=REFUSED),
    Case("recursion", RELU, elementwise("deep(x[i], 3)", declarations="__device__ __noinline__ float deep(float v, int n) { volatile float kept[64]; kept[n % 64] = v; return n == 0 ? fmaxf(kept[0], 0.0f) : deep(kept[n % 64], n - 1); }"), ("deep(x[i], 3)", "deep(x[i], 1 << 22)"), cpu=["crash", "timeout", "out_of_bounds"], cuda=["crash", "timeout", "out_of_bounds", "correct"]),
    Case("some_threads_at_a_barrier", SUMS, SUM_SOURCE, ("sum = sum_of(sum, shared);", "if (thread < 64) __syncthreads();\n    sum = sum_of(sum, shared);"), cpu=["deadlock", "race", "wrong"], cuda=(*REFUSED, "correct")),
    Case("no_barrier", SUMS, SUM_SOURCE, ("shared[threadIdx.x] += shared[threadIdx.x + half];\n        __syncthreads();", "shared[threadIdx.x] += shared[threadIdx.x + half];"), cpu=["race"], cuda=["wrong"]),
    Case("not_atomic", SUMS, """\
#include "task.h"
extern "C" __global__ void clear(TASK_PARAMETERS) { out[threadIdx.x] = 0.0f; }
TASK_LAUNCH(clear, 1, task::rows);
extern "C" __global__ void run(TASK_PARAMETERS) {
    for (int c = threadIdx.x; c < task::columns; c += 256) atomicAdd(&out[blockIdx.x], x[blockIdx.x * task::columns + c]);
}
TASK_LAUNCH(run, task::rows, 256);
""", ("atomicAdd(&out[blockIdx.x], x[blockIdx.x * task::columns + c]);", "out[blockIdx.x] += x[blockIdx.x * task::columns + c];"), cpu=["race"], cuda=["wrong"]),
    Case("too_many_threads", RELU, PLAIN, ("(task::out_size + 255) / 256, 256", "(task::out_size + 2047) / 2048, 2048"), cpu=["launch_error", "compile_error"]),
    Case("too_much_shared_memory", RELU, PLAIN, ("(task::out_size + 255) / 256, 256", "(task::out_size + 255) / 256, 256, 300 * 1024"), cpu=["launch_error", "compile_error"]),
    Case("far_away", RELU, PLAIN, (BEFORE, "if (i == 3) out[1ll << 40] = 1.0f;"), cpu=["crash", "out_of_bounds"]),
    Case("reads_all_around", RELU, PLAIN, ("fmaxf(x[i], 0.0f)", "fmaxf(x[i], 0.0f) + (x[i + 2500000] != x[i + 2500000] ? 1.0f : 0.5f)"), cpu=["out_of_bounds", "crash"], cuda=["wrong", "crash", "nonfinite", "out_of_bounds"]),
    Case("exits", RELU, PLAIN.replace(BEFORE, "if (i < 0) return; // before"), ("if (i < 0) return;", "if (i > 9000) return;"), cpu=["unwritten"]),
]  # fmt: skip
