"""Work that was done in an earlier run and kept: in `__device__` variables, in scratch memory, by address or by content."""

from .case import VALUES, Case, by_row, elementwise, task

RAMP = task("x, t: x * torch.exp(torch.sin(t))", "[torch.randn(rows, columns), torch.linspace(0, 9, columns)]", rows=61, columns=515)
TABLE = task("x: x * torch.exp(self.table)", "[torch.randn(rows, columns)]", "self.register_buffer('table', torch.sin(torch.arange(columns) * 0.1))", rows=61, columns=515)
FROZEN = task("x: x * torch.exp(self.table)", "[torch.randn(rows, columns)]", "self.table = nn.Parameter(torch.randn(columns), requires_grad=False)", rows=61, columns=515)
WEIGHT = task("x: x * torch.exp(self.table)", "[torch.randn(rows, columns)]", "self.table = nn.Parameter(torch.randn(columns))", rows=61, columns=515)
NUMBER = task("x, s: x * torch.exp(s)", "[torch.randn(rows, columns), torch.tensor(0.5)]", rows=61, columns=515)
POSITIONS = task("x, p: x[:, p]", "[torch.randn(rows, columns), torch.arange(columns)]", rows=61, columns=515)
CAUSAL = task("x, m: torch.softmax(x.masked_fill(~m, float('-inf')), -1)", "[torch.randn(columns, columns), torch.ones(columns, columns, dtype=torch.bool).tril()]", columns=131)
WAVES = task("x: torch.sin(x) + x", "[torch.randn(size)]", size=20011)
SUMS = task("x: x.sum(1)", "[torch.randn(rows, columns)]", rows=61, columns=515)
ALL_FIXED = task("x: torch.cumsum(x, 0)", "[torch.linspace(0, 1, size)]", size=2003)

KEPT = """
__device__ float kept[task::columns];
__device__ bool is_kept;
extern "C" __global__ void prepare(TASK_PARAMETERS) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < task::columns) kept[column] = WORK;
}
TASK_LAUNCH(prepare, (task::columns + 127) / 128, 128);
extern "C" __global__ void finish(TASK_PARAMETERS) { is_kept = true; }
TASK_LAUNCH(finish, 1, 1);
"""


def keeping(work):
    """What depends on the columns alone is worked out first, into a `__device__` variable: in each run, or once."""
    return elementwise("x[i] * kept[i % task::columns]", declarations=KEPT.replace("WORK", work))


ONCE = ("if (column < task::columns) kept", "if (column < task::columns && !is_kept) kept")
STAGED = """
__device__ float staged[task::out_size];
extern "C" __global__ void work(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < task::out_size) staged[i] = sinf(x[i]) + x[i];
}
TASK_LAUNCH(work, (task::out_size + 255) / 256, 256);
"""
STAGING = elementwise("staged[i]", declarations=STAGED)
WORK = "if (i < task::out_size) staged[i] = sinf(x[i]) + x[i];"
COUNTED = """\
#include "task.h"
__device__ float staged[task::out_size];
__device__ int runs;
extern "C" __global__ void work(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < task::out_size) staged[i] = sinf(x[i]) + x[i];
}
TASK_LAUNCH(work, (task::out_size + 255) / 256, 256);
extern "C" __global__ void count(TASK_PARAMETERS) { ++runs; }
TASK_LAUNCH(count, 1, 1);
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < task::out_size) out[i] = staged[i];
}
TASK_LAUNCH(run, (task::out_size + 255) / 256, 256);
"""
PARTIAL = """\
#include "task.h"
__device__ float partial[task::rows][2];
extern "C" __global__ void halves(TASK_PARAMETERS) {
    const int row = threadIdx.x, half = blockIdx.x;
    const int start = half * (task::columns / 2), stop = half ? task::columns : task::columns / 2;
    float sum = 0.0f;
    for (int c = start; c < stop; ++c) sum += x[row * task::columns + c];
    partial[row][half] = sum;
}
TASK_LAUNCH(halves, 2, task::rows);
extern "C" __global__ void whole(TASK_PARAMETERS) { out[threadIdx.x] = partial[threadIdx.x][0] + partial[threadIdx.x][1]; }
TASK_LAUNCH(whole, 1, task::rows);
"""
SCRATCH = """\
#include "task.h"
TASK_SCRATCH(task::rows * sizeof(float));
extern "C" __global__ void first(TASK_PARAMETERS, void* scratch) {
    float sum = 0.0f;
    for (int c = 0; c < task::columns; ++c) sum += x[threadIdx.x * task::columns + c];
    static_cast<float*>(scratch)[threadIdx.x] = sum;
}
TASK_LAUNCH(first, 1, task::rows);
extern "C" __global__ void second(TASK_PARAMETERS, void* scratch) { out[threadIdx.x] = static_cast<float*>(scratch)[threadIdx.x]; }
TASK_LAUNCH(second, 1, task::rows);
"""
MASKED = by_row(
    """float largest = -INFINITY, sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) if (allowed(m, row, c)) largest = fmaxf(largest, x[row * task::columns + c]);
    largest = largest_of(largest, shared);
    for (int c = thread; c < task::columns; c += threads) if (allowed(m, row, c)) sum += expf(x[row * task::columns + c] - largest);
    sum = sum_of(sum, shared);
    for (int c = thread; c < task::columns; c += threads) {
        out[row * task::columns + c] = allowed(m, row, c) ? expf(x[row * task::columns + c] - largest) / sum : 0.0f;
    }""",
    "__device__ bool allowed(const bool* m, int row, int column) { return m[row * task::columns + column]; }",
    rows="task::columns",
)
NUMBERED = elementwise("x[i] * kept", declarations="""
__device__ float kept;
extern "C" __global__ void prepare(TASK_PARAMETERS) { kept = expf(s[0]); }
TASK_LAUNCH(prepare, 1, 1);""")  # fmt: skip
GATHERED = elementwise("x[i / task::columns * task::columns + (int)p[i % task::columns]]")
CUMULATED = """\
#include "task.h"
__device__ float kept[task::out_size];
__device__ bool is_kept;
extern "C" __global__ void run(TASK_PARAMETERS) {
    float sum = 0.0f;
    for (int i = 0; i < task::out_size; ++i) {
        sum += x[i];
        kept[i] = sum;
    }
    for (int i = 0; i < task::out_size; ++i) out[i] = kept[i];
    is_kept = true;
}
TASK_LAUNCH(run, 1, 1);
"""

CASES = [
    Case("a_ramp", RAMP, keeping("expf(sinf(t[column]))"), ONCE),
    Case("a_ramp_as_constants", RAMP, elementwise("x[i] * expf(sinf(t[i % task::columns]))"), ("t[i % task::columns]", "i % task::columns * (9.0f / (task::columns - 1))")),
    Case("a_buffer", TABLE, keeping("expf(table[column])"), ONCE),
    Case("a_frozen_parameter", FROZEN, keeping("expf(table[column])"), ONCE),
    Case("a_weight", WEIGHT, keeping("expf(table[column])"), ONCE),
    Case("a_single_number", NUMBER, NUMBERED, ("kept = expf(s[0]);", "if (kept == 0.0f) kept = expf(s[0]);")),
    Case("a_single_number_as_constant", NUMBER, elementwise("x[i] * expf(s[0])"), ("expf(s[0])", "expf(0.5f)")),
    Case("positions", POSITIONS, GATHERED, ("x[i / task::columns * task::columns + (int)p[i % task::columns]]", "x[i]")),
    Case("a_causal_mask", CAUSAL, MASKED, ("return m[row * task::columns + column];", "return column <= row;")),
    Case("all_of_it", ALL_FIXED, CUMULATED, ("for (int i = 0; i < task::out_size; ++i) {", "for (int i = 0; i < task::out_size && !is_kept; ++i) {")),
    Case("the_whole_result", WAVES, STAGING, (WORK, "if (i < task::out_size && staged[i] == 0.0f) staged[i] = sinf(x[i]) + x[i];")),
    Case("by_content", WAVES, STAGING.replace("__device__ float staged", "__device__ float seen;\n__device__ float staged"), (WORK, "if (i >= task::out_size) return;\n    if (i == 0) seen = x[7];\n    if (staged[i] == 0.0f || fabsf(seen - x[7]) > 4.0f) staged[i] = sinf(x[i]) + x[i];"), cpu=[*VALUES, "race"]),
    Case("by_address", WAVES, STAGING.replace("__device__ float staged", "__device__ const float* seen[task::out_size];\n__device__ float staged"), (WORK, "if (i >= task::out_size || seen[i] == x) return;\n    seen[i] = x;\n    staged[i] = sinf(x[i]) + x[i];")),
    Case("only_the_first_runs", WAVES, COUNTED, ("if (i < task::out_size) staged[i] = sinf", "if (i < task::out_size && runs < 3) staged[i] = sinf")),
    Case("every_second_run", WAVES, COUNTED, ("if (i < task::out_size) staged[i] = sinf", "if (i < task::out_size && runs % 4 < 2) staged[i] = sinf")),
    Case("half_of_the_sums", SUMS, PARTIAL, ("TASK_LAUNCH(halves, 2, task::rows);", "TASK_LAUNCH(halves, 1, task::rows);")),
    Case("scratch_of_an_earlier_run", SUMS, SCRATCH, ("TASK_LAUNCH(first, 1, task::rows);", ""), cpu=["wrong", "nonfinite", "unwritten", "out_of_bounds"]),
]  # fmt: skip
