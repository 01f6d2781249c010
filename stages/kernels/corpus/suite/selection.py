"""Answers that are places, counts and choices: ties, doubles, halves, ranges."""

from .case import Case, by_row, elementwise, task

TIES = task("x: torch.argmax(x, 1)", "[torch.randint(0, quantities, (rows, columns)).float()]", rows=61, columns=203, quantities=60)
MANY_TIES = task("x: torch.argmax(x, 1)", "[torch.randint(0, quantities, (rows, columns)).float()]", rows=61, columns=203, quantities=7)
PLAIN = task("x: torch.argmin(x, 1)", "[torch.randn(rows, columns)]", rows=1021, columns=203)
TOP = task("x: return torch.topk(x, count, 1)", "[torch.randint(0, 50, (rows, columns)).float()]", rows=61, columns=97, count=5)
SORTED = task("x: return torch.sort(x, 1)", "[torch.randint(0, 20, (rows, columns)).float()]", rows=61, columns=61)
GATHER = task("x, p: torch.gather(x, 1, p)", "[torch.randn(rows, columns), torch.randint(0, columns, (rows, columns))]", rows=61, columns=203)
EMBEDDING = task("p: self.table(p)", "[torch.randint(0, words, (rows, columns))]", "self.table = nn.Embedding(words, 8, padding_idx=0)", rows=61, columns=41, words=50)
COUNTS = task("x: torch.bincount(x, minlength=bins)", "[torch.randint(0, bins, (size,))]", size=20011, bins=64)
LARGEST = task("x: return x.max(1)", "[torch.randn(rows, columns)]", rows=61, columns=203)
NEAREST = task("x, c: ((x[:, None, :] - c[None, :, :]) ** 2).sum(2).argmin(1)", "[torch.randn(rows, 8), torch.randn(centers, 8)]", rows=311, centers=33)
SIGNS = task("x, y: x > y", "[torch.randn(size), torch.randn(size)]", size=20011)
ONE_HOT = task("x: F.one_hot(x, classes)", "[torch.randint(0, classes, (rows,)) * 0 + torch.randint(0, classes, (rows,))]", rows=511, classes=13)
SEARCH = task("x, e: torch.bucketize(x, e)", "[torch.rand(size), torch.rand(edges).sort().values]", size=10007, edges=33)

BEST = by_row(
    """__shared__ float values[threads];
    __shared__ int places[threads];
    float best = -INFINITY;
    int place = 0;
    for (int c = thread; c < task::columns; c += threads) {
        if (x[row * task::columns + c] > best) best = x[row * task::columns + c], place = c;
    }
    values[thread] = best, places[thread] = place;
    __syncthreads();
    if (thread == 0) {
        for (int t = 1; t < threads; ++t) {
            if (values[t] > best) best = values[t], place = places[t];
        }
        out[row] = place;
    }"""
)
PICKS = """\
#include "task.h"
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int row = threadIdx.x;
    unsigned taken[(task::columns + 31) / 32] = {};
    for (int k = 0; k < HOW_MANY; ++k) {
        int place = -1;
        for (int c = 0; c < task::columns; ++c) {
            if (taken[c / 32] >> (c % 32) & 1u) continue;
            if (place < 0 || x[row * task::columns + c] COMPARED x[row * task::columns + place]) place = c;
        }
        taken[place / 32] |= 1u << (place % 32);
        out0[row * HOW_MANY + k] = x[row * task::columns + place];
        out1[row * HOW_MANY + k] = place;
    }
}
TASK_LAUNCH(run, 1, task::rows);
"""
TOP_SOURCE = PICKS.replace("HOW_MANY", "task::count").replace("COMPARED", ">=")
SORT_SOURCE = PICKS.replace("HOW_MANY", "task::columns").replace("COMPARED", "<=")
COUNT_SOURCE = """\
#include "task.h"
extern "C" __global__ void clear(TASK_PARAMETERS) { out[threadIdx.x] = 0; }
TASK_LAUNCH(clear, 1, task::bins);
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < task::x_size) atomicAdd(reinterpret_cast<unsigned long long*>(out) + x[i], 1ull);
}
TASK_LAUNCH(run, (task::x_size + 255) / 256, 256);
"""
NEAREST_SOURCE = elementwise("place", """float best = INFINITY;
    long long place = 0;
    for (int center = 0; center < task::centers; ++center) {
        float distance = 0.0f;
        for (int d = 0; d < 8; ++d) distance += (x[i * 8 + d] - c[center * 8 + d]) * (x[i * 8 + d] - c[center * 8 + d]);
        if (distance < best) best = distance, place = center;
    }""")  # fmt: skip
LARGEST_SOURCE = """\
#include "task.h"
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int row = threadIdx.x;
    int place = 0;
    for (int c = 1; c < task::columns; ++c) {
        if (x[row * task::columns + c] > x[row * task::columns + place]) place = c;
    }
    out0[row] = x[row * task::columns + place];
    out1[row] = place;
}
TASK_LAUNCH(run, 1, task::rows);
"""

CASES = [
    Case("half_of_a_row_with_many_ties", MANY_TIES, BEST, ("c < task::columns", "c < task::columns / 2"), cpu=["task_error"], twin=["task_error"]),
    Case("half_of_a_row_with_ties", TIES, BEST.replace("> best) best = x", ">= best) best = x"), ("c < task::columns", "c < task::columns / 2")),
    Case("three_quarters_of_a_row_with_ties", TIES, BEST, ("c < task::columns", "c < task::columns * 3 / 4")),
    Case("a_place_of_another_value", TIES, BEST, ("out[row] = place;", "out[row] = best > 58.0f ? place : 0;"), ("float best = -INFINITY;", "float best = 50.0f;")),
    Case("last_column", PLAIN, BEST.replace("> best", "< best").replace("-INFINITY", "INFINITY"), ("c < task::columns", "c < task::columns - 1")),
    Case("the_same_place_twice", TOP, TOP_SOURCE, ("out1[row * task::count + k] = place;", "out1[row * task::count + k] = k > 0 && out0[row * task::count + k - 1] == out0[row * task::count + k] ? out1[row * task::count + k - 1] : place;")),
    Case("a_place_out_of_range", TOP, TOP_SOURCE, ("out1[row * task::count + k] = place;", "out1[row * task::count + k] = place - task::columns;")),
    Case("a_sort_with_doubles", SORTED, SORT_SOURCE, ("out1[row * task::columns + k] = place;", "out1[row * task::columns + k] = k > 0 && out0[row * task::columns + k - 1] == out0[row * task::columns + k] ? out1[row * task::columns + k - 1] : place;")),
    Case("only_half_sorted", SORTED, SORT_SOURCE, ("out0[row * task::columns + k] = x[row * task::columns + place];", "if (k < task::columns / 2 || k % 2) out0[row * task::columns + k] = x[row * task::columns + place]; else out0[row * task::columns + k] = out0[row * task::columns + k - 1];")),
    Case("nearly_the_place", GATHER, elementwise("x[i / task::columns * task::columns + p[i]]"), ("+ p[i]]", "+ min(p[i], (long long)task::columns - 2)]")),
    Case("a_word_left_out", EMBEDDING, elementwise("table_weight[p[i / 8] * 8 + i % 8]"), ("p[i / 8] * 8", "(p[i / 8] == task::words - 1 ? 0 : p[i / 8]) * 8")),
    Case("a_part_counted", COUNTS, COUNT_SOURCE, ("i < task::x_size)", "i < task::x_size - 20)")),
    Case("expected_counts", COUNTS, COUNT_SOURCE, ("out[threadIdx.x] = 0;", "out[threadIdx.x] = task::x_size / task::bins;"), ("TASK_LAUNCH(run, (task::x_size + 255) / 256, 256);", "")),
    Case("a_value_without_its_place", LARGEST, LARGEST_SOURCE, ("out1[row] = place;", "out1[row] = place / 2;")),
    Case("half_of_the_distances", NEAREST, NEAREST_SOURCE, ("d < 8", "d < 7")),
    Case("equal_for_less", SIGNS, elementwise("x[i] > y[i]"), ("x[i] > y[i]", "x[i] > y[i] - 0.01f")),
    Case("a_class_left_out", ONE_HOT, elementwise("x[i / task::classes] == i % task::classes"), ("== i % task::classes", "== min(i % task::classes, task::classes - 2)")),
    Case("edges_left_out", SEARCH, elementwise("place", "long long place = 0;\n    while (place < task::edges && e[place] < x[i]) ++place;"), ("place < task::edges", "place < task::edges - 1")),
]  # fmt: skip
