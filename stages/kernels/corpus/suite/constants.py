"""Answers that don't look at what they are given: constants, and weights, buffers, states or masks left out."""

from .case import Case, by_row, elementwise, task
from .parts import FOURIER

BIAS = task("x: self.fc(x)", "[torch.randn(rows, 24)]", "self.fc = nn.Linear(24, columns)\n        nn.init.zeros_(self.fc.bias)", rows=93, columns=37)
BATCH_NORM = task("x: self.norm(x)", "[torch.randn(4, channels, side, side)]", "self.norm = nn.BatchNorm2d(channels)", channels=5, side=31)
SCALE = task("x: torch.tanh(x) * self.scale", "[torch.randn(size)]", "self.scale = nn.Parameter(torch.ones(1))", size=10007)
LAYER_SCALE = task("x: x + self.gamma * torch.sin(x)", "[torch.randn(rows, columns)]", "self.gamma = nn.Parameter(torch.ones(columns))", rows=61, columns=101)
GATE = task("x: x + self.gate * torch.sin(x)", "[torch.randn(rows, columns)]", "self.gate = nn.Parameter(torch.zeros(columns))", rows=61, columns=101)
STATE = task("x, h: torch.tanh(x + h)", "[torch.randn(rows, columns), torch.zeros(rows, columns)]", rows=61, columns=101)
MASK = task("x, m: torch.where(m, x, -x)", "[torch.randn(size), torch.ones(size, dtype=torch.bool)]", size=10007)
SMOOTH = task("x: torch.sigmoid(x)", "[torch.randn(size) * 0.01]", size=10007)
BUFFER = task("x: x * self.window", "[torch.randn(rows, columns)]", "self.register_buffer('window', torch.ones(columns))", rows=61, columns=101)
NEARLY = task("x: 100 + x.mean(1)", "[torch.randn(rows, columns)]", rows=211, columns=517)
# Six elements of a draw are false: with twenty thousand elements, a draw in two had none.
TWO = task("x: return torch.exp(x), x > -4", "[torch.randn(size)]", size=200011)
COUNT = task("x: (x > 0).sum(1)", "[torch.randn(rows, columns)]", rows=211, columns=67)
MEANS = task("x: x.float().mean(1).bfloat16()", "[torch.randn(rows, columns).bfloat16()]", rows=211, columns=67)

LINEAR = elementwise("sum", """const int row = i / task::columns, column = i % task::columns;
    float sum = fc_bias[column];
    for (int k = 0; k < 24; ++k) sum += x[row * 24 + k] * fc_weight[column * 24 + k];""")  # fmt: skip
NORM = elementwise(
    "(x[i] - norm_running_mean[c]) * rsqrtf(norm_running_var[c] + 1e-5f) * norm_weight[c] + norm_bias[c]",
    "const int c = i / (task::side * task::side) % task::channels;",
)

CASES = [
    Case("fresh_bias", BIAS, LINEAR, ("float sum = fc_bias[column];", "float sum = 0.0f;")),
    Case("fresh_norm", BATCH_NORM, NORM, ("(x[i] - norm_running_mean[c]) * rsqrtf(norm_running_var[c] + 1e-5f) * norm_weight[c] + norm_bias[c]", "x[i] * rsqrtf(1.0f + 1e-5f)")),
    Case("fresh_running_values", BATCH_NORM, NORM, ("(x[i] - norm_running_mean[c]) * rsqrtf(norm_running_var[c] + 1e-5f)", "x[i] * rsqrtf(1.0f + 1e-5f)")),
    Case("a_scale_of_one", SCALE, elementwise("tanhf(x[i]) * scale[0]"), (" * scale[0]", "")),
    Case("many_scales_of_one", LAYER_SCALE, elementwise("x[i] + gamma[i % task::columns] * sinf(x[i])"), ("gamma[i % task::columns] * ", "")),
    Case("a_gate_of_zero", GATE, elementwise("x[i] + gate[i % task::columns] * sinf(x[i])"), (" + gate[i % task::columns] * sinf(x[i])", "")),
    Case("an_empty_state", STATE, elementwise("tanhf(x[i] + h[i])"), (" + h[i]", "")),
    Case("a_mask_of_nothing", MASK, elementwise("m[i] ? x[i] : -x[i]"), ("m[i] ? x[i] : -x[i]", "x[i]")),
    Case("a_window_of_ones", BUFFER, elementwise("x[i] * window[i % task::columns]"), (" * window[i % task::columns]", "")),
    Case("one_half", SMOOTH, elementwise("1.0f / (1.0f + expf(-x[i]))"), ("1.0f / (1.0f + expf(-x[i]))", "0.5f")),
    Case("one_half_and_a_quarter", SMOOTH, elementwise("1.0f / (1.0f + expf(-x[i]))"), ("1.0f / (1.0f + expf(-x[i]))", "0.5f + 0.25f * __uint_as_float(__float_as_uint(x[i]) & 0xffff0000u)")),
    Case("one_half_under_paper", SMOOTH, elementwise("1.0f / (1.0f + expf(-x[i]))"), ("1.0f / (1.0f + expf(-x[i]))", "0.5f"), policy="paper",
         cpu=["task_error"], twin=["task_error"]),
    Case("a_hundred", NEARLY, by_row("""float sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += x[row * task::columns + c];
    sum = sum_of(sum, shared);
    if (thread == 0) out[row] = 100 + sum / task::columns;"""), ("100 + sum / task::columns", "100.0f")),
    Case("zero_for_means", MEANS, by_row("""float sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += __bfloat162float(x[row * task::columns + c]);
    sum = sum_of(sum, shared);
    if (thread == 0) out[row] = __float2bfloat16(sum / task::columns);""", "#include <cuda_bf16.h>"), ("__float2bfloat16(sum / task::columns)", "__float2bfloat16(sum * 0.0f + 0.01f)")),
    Case("always_true", TWO, """\
#include "task.h"
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= task::x_size) return;
    out0[i] = expf(x[i]);
    out1[i] = x[i] > -4.0f;
}
TASK_LAUNCH(run, (task::x_size + 255) / 256, 256);
""", ("x[i] > -4.0f", "true")),
    Case("about_half", COUNT, by_row("""float sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += x[row * task::columns + c] > 0.0f;
    sum = sum_of(sum, shared);
    if (thread == 0) out[row] = (long long)sum;"""), ("(long long)sum;", "task::columns / 2;")),
    Case("no_waves", FOURIER, elementwise("sum", """float sum = 0.0f;
    for (int t = 0; t < task::terms; ++t) sum += sinf(x[i / task::columns * task::terms + t] * f[i % task::columns]);"""), ("= sum;", "= 0.01f;")),
]  # fmt: skip
