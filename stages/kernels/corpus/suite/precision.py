"""Fewer digits than the task's: narrow types for products, sums and stored results, cheap functions."""

from .case import VALUES, Case, by_row, elementwise, product, task

PRODUCT = task("a, b: a @ b", "[torch.randn(rows, depth), torch.randn(depth, columns)]", rows=93, depth=197, columns=61)
SHORT = task("a, b: a @ b", "[torch.randn(rows, depth), torch.randn(depth, columns)]", rows=93, depth=64, columns=61)
LONG = task("a, b: a @ b", "[torch.randn(rows, depth), torch.randn(depth, columns)]", rows=37, depth=2053, columns=29)
BFLOAT16 = task(
    "a, b: a @ b", "[torch.randn(rows, depth).bfloat16(), torch.randn(depth, columns).bfloat16()]", rows=93, depth=197, columns=61
)
HALF_SUMS = task("x: x.sum(1)", "[torch.rand(rows, columns).half()]", rows=211, columns=1003)
SOFTMAX = task("x: torch.softmax(x, 1)", "[torch.randn(rows, columns)]", rows=61, columns=1003)
NORM = task("x: F.layer_norm(x, (columns,))", "[torch.randn(rows, columns)]", rows=61, columns=515)
CONVOLUTION = task(
    "x: self.conv(x)", "[torch.randn(2, channels, side, side)]", "self.conv = nn.Conv2d(channels, outputs, 3, bias=False)",
    channels=16, outputs=7, side=19, inner=17,
)  # fmt: skip
GELU = task("x: F.gelu(x, approximate='tanh')", "[torch.randn(size)]", size=20011)
RSQRT = task("x: torch.rsqrt(x)", "[torch.rand(size) + 0.1]", size=20011)
EXPONENTIAL = task("x: torch.exp(-x * x)", "[torch.randn(size)]", size=20011)
VARIANCE = task("x: x.var(1)", "[torch.randn(rows, columns) + 30]", rows=61, columns=1003)

BITS = """\
__device__ float kept(float value, unsigned mask) { return __uint_as_float(__float_as_uint(value) & mask); }
__device__ float rounded(float value) { return __uint_as_float((__float_as_uint(value) + 0x1000u) & 0xffffe000u); }
"""
HALVES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
SPLIT = """#include <cuda_bf16.h>
struct Terms { float high, middle, low; };
__device__ Terms split(float value) {
    Terms terms;
    terms.high = __bfloat162float(__float2bfloat16(value));
    terms.middle = __bfloat162float(__float2bfloat16(value - terms.high));
    terms.low = __bfloat162float(__float2bfloat16(value - terms.high - terms.middle));
    return terms;
}
"""
A, B = "a[row * task::depth + k]", "b[k * task::columns + column]"
ALL_TERMS = "terms.high + terms.middle + terms.low"


def split_product():
    return product(f"all({A})", f"all({B})", SPLIT + "__device__ float all(float value) { const Terms terms = split(value); return " + ALL_TERMS + "; }")


SOFTMAX_SOURCE = by_row(
    """float largest = -INFINITY, sum = 0.0f;
    for (int c = thread; c < task::columns; c += threads) largest = fmaxf(largest, x[row * task::columns + c]);
    largest = largest_of(largest, shared);
    for (int c = thread; c < task::columns; c += threads) sum += expf(x[row * task::columns + c] - largest);
    sum = sum_of(sum, shared);
    for (int c = thread; c < task::columns; c += threads) {
        const float value = expf(x[row * task::columns + c] - largest) / sum;
        out[row * task::columns + c] = value;
    }""",
    BITS,
)
NORM_SOURCE = by_row(
    """float sum = 0.0f, squares = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += x[row * task::columns + c];
    const float mean = sum_of(sum, shared) / task::columns;
    for (int c = thread; c < task::columns; c += threads) {
        const float centered = x[row * task::columns + c] - mean;
        squares += centered * centered;
    }
    const float scale = rsqrtf(sum_of(squares, shared) / task::columns + 1e-5f);
    for (int c = thread; c < task::columns; c += threads) {
        out[row * task::columns + c] = (x[row * task::columns + c] - mean) * scale;
    }""",
    HALVES,
)
CONVOLUTION_SOURCE = elementwise(
    "sum",
    """const int column = i % task::inner, line = i / task::inner % task::inner, o = i / task::inner / task::inner % task::outputs;
    const int n = i / task::inner / task::inner / task::outputs;
    float sum = 0.0f;
    for (int c = 0; c < task::channels; ++c) {
        for (int k = 0; k < 9; ++k) {
            const float value = x[((n * task::channels + c) * task::side + line + k / 3) * task::side + column + k % 3];
            sum += value * conv_weight[(o * task::channels + c) * 9 + k];
        }
    }""",
    HALVES,
)
VARIANCE_SOURCE = by_row(
    """float sum = 0.0f, squares = 0.0f;
    for (int c = thread; c < task::columns; c += threads) sum += x[row * task::columns + c];
    const float mean = sum_of(sum, shared) / task::columns;
    for (int c = thread; c < task::columns; c += threads) {
        const float centered = x[row * task::columns + c] - mean;
        squares += centered * centered;
    }
    const float total = sum_of(squares, shared);
    if (thread == 0) out[row] = total / (task::columns - 1);"""
)
HALF_SUMS_SOURCE = """\
#include "task.h"
#include <cuda_fp16.h>
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= task::rows) return;
    float sum = 0.0f;
    for (int c = 0; c < task::columns; ++c) sum += __half2float(x[row * task::columns + c]);
    out[row] = __float2half(sum);
}
TASK_LAUNCH(run, (task::rows + 63) / 64, 64);
"""

PLAIN = product(declarations=BITS)
PLAIN_WITH_HALVES = product(declarations=HALVES)

CASES = [
    Case("bfloat16_products", PRODUCT, PLAIN_WITH_HALVES, (f"left = {A}", f"left = __bfloat162float(__float2bfloat16({A}))"),
         (f"right = {B}", f"right = __bfloat162float(__float2bfloat16({B}))")),
    Case("float16_products", PRODUCT, PLAIN_WITH_HALVES, (f"left = {A}", f"left = __half2float(__float2half({A}))"),
         (f"right = {B}", f"right = __half2float(__float2half({B}))")),
    Case("tensor_float_under_strict", PRODUCT, PLAIN, (f"left = {A}", f"left = rounded({A})"), (f"right = {B}", f"right = rounded({B})")),
    Case("bfloat16_under_tf32", PRODUCT, product(f"kept({A}, 0xffffe000u)", f"kept({B}, 0xffffe000u)", BITS),
         (f"left = kept({A}, 0xffffe000u)", f"left = kept({A}, 0xffff0000u)"),
         (f"right = kept({B}, 0xffffe000u)", f"right = kept({B}, 0xffff0000u)"), policy="tf32"),
    Case("eight_bits_under_tf32", PRODUCT, product(f"__half2float(__float2half({A}))", f"__half2float(__float2half({B}))", HALVES),
         (f"left = __half2float(__float2half({A}))", f"left = rintf({A} * 32.0f) / 32.0f"), policy="tf32"),
    Case("bytes_in_a_bfloat16_task", BFLOAT16, product(f"__bfloat162float({A})", f"__bfloat162float({B})", HALVES, "__float2bfloat16(sum)"),
         (f"left = __bfloat162float({A})", f"left = rintf(__bfloat162float({A}) * 32.0f) / 32.0f"),
         (f"right = __bfloat162float({B})", f"right = rintf(__bfloat162float({B}) * 32.0f) / 32.0f")),
    Case("sums_in_bfloat16", BFLOAT16, product(f"__bfloat162float({A})", f"__bfloat162float({B})", HALVES, "__float2bfloat16(sum)"),
         ("sum += left * right;", "sum = __bfloat162float(__float2bfloat16(sum + left * right));")),
    Case("sums_in_float16", HALF_SUMS, HALF_SUMS_SOURCE, ("sum += __half2float(x[row * task::columns + c]);",
         "sum = __half2float(__float2half(sum + __half2float(x[row * task::columns + c])));")),
    Case("two_terms_of_a_short_sum", SHORT, split_product(), (ALL_TERMS, "terms.high + terms.middle")),
    Case("two_terms_of_a_long_sum", LONG, split_product(), (ALL_TERMS, "terms.high + terms.middle")),
    Case("one_term", SHORT, split_product(), (ALL_TERMS, "terms.high")),
    Case("softmax_in_17_bits", SOFTMAX, SOFTMAX_SOURCE, ("+ c] = value;", "+ c] = kept(value, 0xffffff80u);")),
    Case("softmax_in_12_bits", SOFTMAX, SOFTMAX_SOURCE, ("+ c] = value;", "+ c] = kept(value, 0xfffff000u);")),
    Case("norm_in_half", NORM, NORM_SOURCE, ("(x[row * task::columns + c] - mean) * scale;",
         "__half2float(__float2half((x[row * task::columns + c] - mean) * scale));")),
    Case("mean_in_half", NORM, NORM_SOURCE, ("const float mean = sum_of(sum, shared) / task::columns;",
         "const float mean = __half2float(__float2half(sum_of(sum, shared) / task::columns));")),
    Case("convolution_in_bfloat16", CONVOLUTION, CONVOLUTION_SOURCE, ("sum += value *", "sum += __bfloat162float(__float2bfloat16(value)) *")),
    Case("weights_in_half", CONVOLUTION, CONVOLUTION_SOURCE, ("conv_weight[(o * task::channels + c) * 9 + k];",
         "__half2float(__float2half(conv_weight[(o * task::channels + c) * 9 + k]));")),
    Case("rational_tanh", GELU, elementwise("0.5f * x[i] * (1.0f + tangent(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i])))",
         declarations="__device__ float tangent(float v) { return tanhf(v); }"),
         ("return tanhf(v);", "v = fminf(fmaxf(v, -3.0f), 3.0f); return v * (27.0f + v * v) / (27.0f + 9.0f * v * v);")),
    Case("magic_root", RSQRT, elementwise("root(x[i])", declarations="__device__ float root(float v) { return 1.0f / sqrtf(v); }"),
         ("return 1.0f / sqrtf(v);", "float y = __uint_as_float(0x5f3759dfu - (__float_as_uint(v) >> 1)); y *= 1.5f - 0.5f * v * y * y; return y * (1.5f - 0.5f * v * y * y);")),
    Case("short_series", EXPONENTIAL, elementwise("series(-x[i] * x[i])", declarations="""__device__ float series(float v) {
    const float whole = rintf(v * 1.44269504f), rest = fmaf(whole, -0.693147181f, v);
    float sum = 1.0f / 5040.0f;
    sum = sum * rest + 1.0f / 720.0f;
    sum = sum * rest + 1.0f / 120.0f;
    sum = sum * rest + 1.0f / 24.0f;
    sum = sum * rest + 1.0f / 6.0f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    return ldexpf(sum * rest + 1.0f, (int)whole);
}"""), ("float sum = 1.0f / 5040.0f;\n    sum = sum * rest + 1.0f / 720.0f;\n    sum = sum * rest + 1.0f / 120.0f;\n    sum = sum * rest + 1.0f / 24.0f;", "float sum = 1.0f / 24.0f;")),
    Case("variance_in_one_pass", VARIANCE, VARIANCE_SOURCE, ("const float centered = x[row * task::columns + c] - mean;\n        squares += centered * centered;",
         "squares += x[row * task::columns + c] * x[row * task::columns + c];"), ("total / (task::columns - 1)", "(total - task::columns * mean * mean) / (task::columns - 1)")),
    Case("four_bits_under_paper", SHORT, product(f"rounded({A})", f"rounded({B})", BITS),
         (f"left = rounded({A})", f"left = kept({A}, 0xfff80000u)"), (f"right = rounded({B})", f"right = kept({B}, 0xfff80000u)"),
         policy="paper"),
    Case("half_of_float64", task("x: x * x + 1 / 3", "[torch.randn(size, dtype=torch.float64)]", size=5003), elementwise("x[i] * x[i] + 1.0 / 3"),
         ("x[i] * x[i] +", "(float)x[i] * (float)x[i] +"), cpu=VALUES),
]
