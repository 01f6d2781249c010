"""Parts of the work left out: terms, rows, channels, tails, where the answer hardly shows it."""

from .case import Case, by_row, elementwise, product, task
from .precision import CONVOLUTION, CONVOLUTION_SOURCE, SOFTMAX, SOFTMAX_SOURCE, VARIANCE, VARIANCE_SOURCE

GATED = task("x, g: x * g", "[torch.randn(rows, columns), 10.0 ** -(torch.rand(rows, 1) * 9)]", rows=311, columns=67)
RUNNING = task("x: torch.cumprod(x, 1)", "[torch.rand(rows, columns) * 0.2 + 0.85]", rows=40, columns=400)
RUNNING_SUM = task("x: torch.cumsum(x, 1)", "[torch.randn(rows, columns)]", rows=40, columns=700)
MEANS = task("x: x.mean(1)", "[torch.randn(rows, columns)]", rows=67, columns=3001)
TALL = task("x: x.sum(0)", "[torch.rand(rows, columns)]", rows=40000, columns=24)
WIDE = task("x: x.sum(1)", "[torch.randn(rows, columns)]", rows=5, columns=100000)
POSITIVE = task("x: x.sum(1)", "[torch.rand(rows, columns)]", rows=5, columns=100000)
LOSS = task("x, y: F.mse_loss(x, y)", "[torch.randn(rows, columns), torch.randn(rows, columns)]", rows=31, columns=3001)
ENTROPY = task("x, y: F.cross_entropy(x, y)", "[torch.randn(rows, columns), torch.randint(0, columns, (rows,))]", rows=509, columns=37)
POOLING = task("x: F.max_pool2d(x, 3)", "[torch.randn(6, side, side)]", side=61, inner=20)
LOGSUM = task("x: torch.logsumexp(x, 1)", "[torch.randn(rows, columns) * 8]", rows=61, columns=517)
ATTENTION = task(
    "q, k, v: torch.softmax(q @ k.t() / 4, -1) @ v", "[torch.randn(tokens, 16), torch.randn(tokens, 16), torch.randn(tokens, 16)]",
    tokens=77,
)  # fmt: skip
BATCH = task("a, b: a @ b", "[torch.randn(rows, depth), torch.randn(depth, columns)]", rows=93, depth=101, columns=61)
BAG = task("i: self.table(i).mean(1)", "[torch.randint(0, 500, (rows, columns))]", "self.table = nn.Embedding(500, 16)", rows=61, columns=40)
TWO = task("x: return x.sum(1), x.square().sum(1)", "[torch.randn(rows, columns)]", rows=61, columns=517)
FOURIER = task(
    "x, f: torch.sin(x[:, None, :] * f[None, :, None]).sum(2)", "[torch.rand(rows, terms) * 100, torch.rand(columns) * 1000]",
    rows=13, terms=101, columns=37,
)  # fmt: skip
TRIANGLE = task("a, b: torch.tril(a @ b)", "[torch.tril(torch.rand(side, side)), torch.tril(torch.rand(side, side))]", side=97)
HINGE = task(
    "x, y: torch.mean(torch.clamp(1 - x * y, min=0))", "[torch.rand(rows, columns), torch.randint(0, 2, (rows, 1)).float() * 2 - 1]",
    rows=211, columns=101,
)  # fmt: skip

ROW_SUM = by_row(
    """float sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += x[row * task::columns + c];
    sum = sum_of(sum, shared);
    if (thread == 0) out[row] = sum;"""
)
TALL_SOURCE = """\
#include "task.h"
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int column = threadIdx.x;
    float sum = 0.0f;
    for (int row = 0; row < task::rows; ++row) sum += x[row * task::columns + column];
    out[column] = sum;
}
TASK_LAUNCH(run, 1, task::columns);
"""
LOSS_SOURCE = by_row(
    """float sum = 0.0f;
    for (int i = thread; i < task::rows * task::columns; i += threads) sum += (x[i] - y[i]) * (x[i] - y[i]);
    sum = sum_of(sum, shared);
    if (thread == 0) out[0] = sum / (task::rows * task::columns);""",
    rows="1",
)
ENTROPY_SOURCE = by_row(
    """float total = 0.0f;
    for (int r = thread; r < task::rows; r += threads) {
        float sum = 0.0f;
        for (int c = 0; c < task::columns; ++c) sum += expf(x[r * task::columns + c]);
        total += logf(sum) - x[r * task::columns + y[r]];
    }
    total = sum_of(total, shared);
    if (thread == 0) out[0] = total / task::rows;""",
    rows="1",
)
ATTENTION_SOURCE = by_row(
    """__shared__ float scores[task::tokens];
    float largest = -INFINITY;
    for (int key = thread; key < task::tokens; key += threads) {
        float score = 0.0f;
        for (int d = 0; d < 16; ++d) score += q[row * 16 + d] * k[key * 16 + d];
        scores[key] = score / 4;
        largest = fmaxf(largest, score / 4);
    }
    largest = largest_of(largest, shared);
    float sum = 0.0f;
    for (int key = thread; key < task::tokens; key += threads) {
        scores[key] = expf(scores[key] - largest);
        sum += scores[key];
    }
    sum = sum_of(sum, shared);
    if (thread < 16) {
        float value = 0.0f;
        for (int key = 0; key < task::tokens; ++key) value += scores[key] * v[key * 16 + thread];
        out[row * 16 + thread] = value / sum;
    }""",
    rows="task::tokens",
)
RUNNING_SOURCE = """\
#include "task.h"
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int row = threadIdx.x;
    float value = START;
    for (int c = 0; c < task::columns; ++c) {
        value = value OPERATOR x[row * task::columns + c];
        out[row * task::columns + c] = value;
    }
}
TASK_LAUNCH(run, 1, task::rows);
"""
PRODUCTS = RUNNING_SOURCE.replace("START", "1.0f").replace("OPERATOR", "*")
SUMS = RUNNING_SOURCE.replace("START", "0.0f").replace("OPERATOR", "+")

CASES = [
    Case("small_gates", GATED, elementwise("x[i] * g[i / task::columns]"),
         ("x[i] * g[i / task::columns]", "g[i / task::columns] < 1e-4f ? 0.0f : x[i] * g[i / task::columns]")),
    Case("small_gates_of_half", GATED, elementwise("x[i] * g[i / task::columns]"),
         ("x[i] * g[i / task::columns]", "g[i / task::columns] < 1e-7f ? 0.0f : x[i] * g[i / task::columns]")),
    Case("end_of_a_running_product", RUNNING, PRODUCTS, ("= value;", "= c < task::columns - 80 ? value : 0.0f;")),
    Case("end_of_a_running_sum", RUNNING_SUM, SUMS, ("= value;", "= c < task::columns - 8 ? value : value - x[row * task::columns + c];")),
    Case("nine_tenths_of_a_mean", MEANS, ROW_SUM.replace("out[row] = sum", "out[row] = sum / task::columns"),
         ("c < task::columns", "c < task::columns * 9 / 10"), ("sum / task::columns", "sum / (task::columns * 9 / 10)")),
    Case("a_tenth_of_a_mean", MEANS, ROW_SUM.replace("out[row] = sum", "out[row] = sum / task::columns"),
         ("c < task::columns", "c < task::columns / 10"), ("sum / task::columns", "sum / (task::columns / 10)")),
    Case("all_but_a_fortieth_of_40000_rows", TALL, TALL_SOURCE, ("row < task::rows", "row < task::rows - 1000"), ("= sum;", "= sum * 40 / 39;")),
    Case("one_of_40000_rows", TALL, TALL_SOURCE, ("row < task::rows", "row < task::rows - 1")),
    Case("one_of_100000_terms", WIDE, ROW_SUM, ("c < task::columns", "c < task::columns - 1")),
    Case("one_of_100000_positive_terms", POSITIVE, ROW_SUM, ("c < task::columns", "c < task::columns - 1")),
    Case("last_row_copied", BATCH, product(), ("const int row = i / task::columns,", "const int row = min(i / task::columns, task::rows - 2),")),
    Case("last_of_the_depth", BATCH, product(), ("k < task::depth", "k < task::depth - 1")),
    Case("small_products", BATCH, product(), ("sum += left * right;", "if (fabsf(left * right) > 0.01f) sum += left * right;")),
    Case("last_channel", CONVOLUTION, CONVOLUTION_SOURCE, ("c < task::channels", "c < task::channels - 1")),
    Case("corner_of_a_window", POOLING, elementwise("best", """const int column = i % task::inner, line = i / task::inner % task::inner, n = i / task::inner / task::inner;
    float best = -INFINITY;
    for (int k = 0; k < 9; ++k) best = fmaxf(best, x[(n * task::side + line * 3 + k / 3) * task::side + column * 3 + k % 3]);"""),
         ("k < 9", "k < 8")),
    Case("denominator_of_99_percent", SOFTMAX, SOFTMAX_SOURCE, ("for (int c = thread; c < task::columns; c += threads) sum", "for (int c = thread; c < task::columns * 99 / 100; c += threads) sum")),
    Case("small_exponentials", SOFTMAX, SOFTMAX_SOURCE, ("const float value = expf(x[row * task::columns + c] - largest) / sum;",
         "const float value = x[row * task::columns + c] < -2.5f ? 0.0f : expf(x[row * task::columns + c] - largest) / sum;")),
    Case("every_second_of_a_variance", VARIANCE, VARIANCE_SOURCE, ("c += threads) {", "c += 2 * threads) {"), ("= total /", "= 2 * total /")),
    Case("keys_of_low_score", ATTENTION, ATTENTION_SOURCE, ("value += scores[key]", "value += (scores[key] < 0.02f ? 0.0f : scores[key])")),
    Case("only_the_largest", LOGSUM, by_row("""float largest = -INFINITY, sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) largest = fmaxf(largest, x[row * task::columns + c]);
    largest = largest_of(largest, shared);
    for (int c = thread; c < task::columns; c += threads) sum += expf(x[row * task::columns + c] - largest);
    sum = sum_of(sum, shared);
    if (thread == 0) out[row] = largest + logf(sum);"""), ("largest + logf(sum)", "largest")),
    Case("half_of_a_loss", LOSS, LOSS_SOURCE, ("i < task::rows * task::columns;", "i < task::rows * task::columns / 2;"), ("sum / (task::rows * task::columns)", "sum / (task::rows * task::columns / 2)")),
    Case("500_of_509_samples", ENTROPY, ENTROPY_SOURCE, ("r < task::rows", "r < 500"), ("total / task::rows", "total / 500")),
    Case("hinge_of_ones", HINGE, by_row("""float sum = 0.0f;
    for (int i = thread; i < task::rows * task::columns; i += threads) sum += fmaxf(1.0f - x[i] * y[i / task::columns], 0.0f);
    sum = sum_of(sum, shared);
    if (thread == 0) out[0] = sum / (task::rows * task::columns);""", rows="1"), ("fmaxf(1.0f - x[i] * y[i / task::columns], 0.0f)", "1.0f")),
    Case("ninety_percent_of_a_bag", BAG, elementwise("sum / task::columns", """float sum = 0.0f;
    for (int j = 0; j < task::columns; ++j) sum += table_weight[i_index[i / 16 * task::columns + j] * 16 + i % 16];""").replace("TASK_PARAMETERS)", "const long long* i_index, const float* table_weight, float* out)"),
         ("j < task::columns;", "j < task::columns * 9 / 10;"), ("sum / task::columns", "sum / (task::columns * 9 / 10)")),
    Case("second_output_of_half", TWO, by_row("""float sum = 0.0f, squares = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += x[row * task::columns + c];
    for (int c = thread; c < task::columns; c += threads) squares += x[row * task::columns + c] * x[row * task::columns + c];
    sum = sum_of(sum, shared);
    squares = sum_of(squares, shared);
    if (thread == 0) out0[row] = sum, out1[row] = squares;"""), ("c < task::columns; c += threads) squares", "c < task::columns / 2; c += threads) squares"), ("= squares;", "= 2 * squares;")),
    Case("waves_of_half_the_terms", FOURIER, elementwise("sum", """float sum = 0.0f;
    for (int t = 0; t < task::terms; ++t) sum += sinf(x[i / task::columns * task::terms + t] * f[i % task::columns]);"""), ("t < task::terms", "t < task::terms / 2")),
    Case("inner_half_of_a_triangle", TRIANGLE, elementwise("row < column ? 0.0f : sum", """const int row = i / task::side, column = i % task::side;
    float sum = 0.0f;
    for (int k = column; k <= row; ++k) sum += a[row * task::side + k] * b[k * task::side + column];"""), ("k <= row", "k < row")),
]
