"""Memory that is not the candidate's, or holds what it must not count on."""

from .case import Case, by_row, elementwise, task

RELU = task("x: torch.relu(x)", "[torch.randn(size)]", size=10007)
SUMS = task("x: x.sum(1)", "[torch.randn(rows, columns)]", rows=61, columns=515)
SCATTER = task("x, p: torch.zeros_like(x).index_add(0, p, x)", "[torch.randn(size), torch.randint(0, size, (size,))]", size=5003)
NORM = task("x: self.norm(x)", "[torch.randn(4, 5, side, side)]", "self.norm = nn.BatchNorm2d(5)", side=31)
TRIANGLE = task("x: torch.tril(x)", "[torch.randn(side, side)]", side=131)
TWO = task("x: return x * 2, x + 1", "[torch.randn(size)]", size=10007)

PLAIN = elementwise("fmaxf(x[i], 0.0f)")
BOUND = "if (i >= task::out_size) return;"
SUM_SOURCE = by_row(
    """float sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += x[row * task::columns + c];
    sum = sum_of(sum, shared);
    if (thread == 0) out[row] = sum;"""
)
ATOMIC = """\
#include "task.h"
extern "C" __global__ void clear(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < task::out_size) out[i] = 0.0f;
}
TASK_LAUNCH(clear, (task::out_size + 255) / 256, 256);
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < task::x_size) atomicAdd(&out[p[i]], x[i]);
}
TASK_LAUNCH(run, (task::x_size + 255) / 256, 256);
"""
SCRATCH = """\
#include "task.h"
TASK_SCRATCH(task::rows * sizeof(float));
extern "C" __global__ void clear(TASK_PARAMETERS, float* scratch) { scratch[threadIdx.x] = 0.0f; }
TASK_LAUNCH(clear, 1, task::rows);
extern "C" __global__ void run(TASK_PARAMETERS, float* scratch) {
    float sum = 0.0f;
    for (int c = threadIdx.x; c < task::columns; c += 32) sum += x[blockIdx.x * task::columns + c];
    atomicAdd(&scratch[blockIdx.x], sum);
}
TASK_LAUNCH(run, task::rows, 32);
extern "C" __global__ void finish(TASK_PARAMETERS, float* scratch) { out[threadIdx.x] = scratch[threadIdx.x]; }
TASK_LAUNCH(finish, 1, task::rows);
"""
NORM_SOURCE = elementwise(
    "(x[i] - norm_running_mean[c]) * rsqrtf(norm_running_var[c] + 1e-5f) * norm_weight[c] + norm_bias[c]",
    "const int c = i / (task::side * task::side) % 5;",
)
TWO_SOURCE = """\
#include "task.h"
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= task::x_size) return;
    out0[i] = x[i] * 2;
    out1[i] = x[i] + 1;
}
TASK_LAUNCH(run, (task::x_size + 255) / 256, 256);
"""

CASES = [
    Case("past_the_end", RELU, PLAIN, (BOUND, "if (i > task::out_size) return;"), cpu=["out_of_bounds"]),
    Case("before_the_start", RELU, PLAIN, ("out[i] =", "if (i == 0) out[-1] = 0.0f;\n    out[i] ="), cpu=["out_of_bounds"]),
    Case("input_as_workspace", RELU, PLAIN, ("out[i] =", "const_cast<float*>(x)[i] = fmaxf(x[i], 0.0f);\n    out[i] ="), cpu=["input_changed"]),
    Case("zeroed_inputs", RELU, PLAIN, ("out[i] = fmaxf(x[i], 0.0f);", "const_cast<float*>(x)[i] = 0.0f;\n    out[i] = 0.0f;"), cpu=["input_changed", "wrong"]),
    Case("a_changed_buffer", NORM, NORM_SOURCE, ("out[i] =", "if (i == 0) const_cast<float*>(norm_running_mean)[0] += 1e-3f;\n    out[i] ="), cpu=["input_changed", "race", "wrong"]),
    Case("a_changed_counter", NORM, NORM_SOURCE, ("out[i] =", "if (i == 0) ++*const_cast<long long*>(norm_num_batches_tracked);\n    out[i] ="), cpu=["input_changed"]),
    Case("only_what_is_positive", RELU, PLAIN, ("out[i] = fmaxf(x[i], 0.0f);", "if (x[i] > 0.0f) out[i] = x[i];"), cpu=["unwritten"]),
    Case("one_triangle", TRIANGLE, elementwise("i % task::side <= i / task::side ? x[i] : 0.0f"), ("out[i] = i % task::side <= i / task::side ? x[i] : 0.0f;", "if (i % task::side <= i / task::side) out[i] = x[i];"), cpu=["unwritten"]),
    Case("adds_to_what_is_there", SCATTER, ATOMIC, ("TASK_LAUNCH(clear, (task::out_size + 255) / 256, 256);", ""), cpu=["unwritten", "wrong", "nonfinite"]),
    Case("scratch_is_taken_for_zero", SUMS, SCRATCH, ("TASK_LAUNCH(clear, 1, task::rows);", ""), cpu=["wrong", "nonfinite", "unwritten"]),
    Case("scratch_that_was_not_asked_for", SUMS, SCRATCH, ("TASK_SCRATCH(task::rows * sizeof(float));", "TASK_SCRATCH((task::rows - 1) * sizeof(float));"), cpu=["out_of_bounds"]),
    Case("past_shared_memory", SUMS, SUM_SOURCE, ("sum = sum_of(sum, shared);", "shared[threads + 1 + thread] = sum;\n    sum = sum_of(sum, shared);"), cpu=["out_of_bounds"], cuda=["correct", "crash", "out_of_bounds", "wrong"]),
    Case("stale_shared_memory", SUMS, SUM_SOURCE, ("float sum = 0.0f;\n    for", "float sum = shared[thread];\n    for"), cpu=["wrong", "nonfinite", "race"]),
    Case("the_second_output_is_the_first", TWO, TWO_SOURCE, ("out1[i] = x[i] + 1;", "out1[i] = out0[i];"), cpu=["wrong"]),
    Case("no_second_output", TWO, TWO_SOURCE, ("out1[i] = x[i] + 1;", ""), cpu=["unwritten"]),
    Case("reads_the_output", RELU, PLAIN, ("fmaxf(x[i], 0.0f);", "fmaxf(out[i], 0.0f);"), cpu=["wrong", "nonfinite", "unwritten"]),
    Case("poison_as_an_answer", RELU, PLAIN, ("fmaxf(x[i], 0.0f);", "x[i] > 0.0f ? x[i] : out[i] * 0.0f;"), cpu=["nonfinite", "wrong"]),
    Case("a_misaligned_vector", RELU, PLAIN, ("out[i] =", "if (i == 0) {\n        const float4 four = *reinterpret_cast<const float4*>(x + 1);\n        out[1] = fmaxf(four.x, 0.0f) + (four.y - four.y) + (four.z - four.z) + (four.w - four.w);\n    }\n    if (i != 1) out[i] ="), cpu=["misaligned", "wrong"]),
]  # fmt: skip
