"""Steps are what the forward computes: they are compiled as C++ and compared with torch, on random inputs."""

import ctypes
import pathlib
import re
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]

import steps

nn, F = torch.nn, torch.nn.functional


class Of(nn.Module):
    """A model of a function, or of modules one after another."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = parts
        for place, part in enumerate(parts):
            if isinstance(part, nn.Module):
                setattr(self, f"part{place}", part)

    def forward(self, *values):
        for part in self.parts:
            values = (part(*values),)
        return values[0]


ROWS = [torch.randn(4, 6, 5)]
IMAGES = [torch.randn(3, 8, 4, 5)]
PAIR = [torch.rand(4, 6, 5) + 0.5, torch.rand(6, 1) + 0.5]
CASES = {
    "softmax": (Of(lambda x: F.softmax(x, dim=1)), ROWS),
    "log_softmax": (Of(lambda x: F.log_softmax(torch.sign(x), -1)), ROWS),
    "softmin": (Of(lambda x: F.softmin(F.silu(x), 0)), ROWS),
    "softmax2d": (Of(nn.Softmax2d()), IMAGES),
    "layer_norm": (Of(nn.LayerNorm((6, 5))), ROWS),
    "group_norm": (Of(nn.GroupNorm(4, 8), nn.ReLU6()), IMAGES),
    "instance_norm": (Of(nn.InstanceNorm2d(8, affine=True)), IMAGES),
    "rms_norm": (Of(nn.RMSNorm(5)), ROWS),
    "batch_norm": (Of(nn.BatchNorm2d(8)), IMAGES),
    "normalize": (Of(lambda x: F.normalize(x, dim=1)), ROWS),
    "vector_norm": (Of(lambda x: torch.linalg.vector_norm(x, 3, dim=1)), ROWS),
    "std": (Of(lambda x: torch.std(x, dim=(0, 2))), ROWS),
    "var": (Of(lambda x: torch.var(F.selu(x), dim=0, keepdim=True, correction=0)), ROWS),
    "logsumexp": (Of(lambda x: torch.logsumexp(F.gelu(x, approximate="tanh"), dim=-1)), ROWS),
    "argmax": (Of(lambda x: torch.argmax(x, dim=1, keepdim=True)), ROWS),
    "argmin": (Of(torch.argmin), ROWS),
    "max": (Of(lambda x: torch.max(x, dim=1)[0] * torch.max(x, dim=1)[1]), ROWS),
    "sums": (
        Of(lambda x: torch.prod(x, 2) + torch.sum(x) + torch.mean(F.elu(x, 0.7)) + torch.amin(x, (0, 2)).sum()),
        ROWS,
    ),
    "nanmean": (Of(lambda x: torch.nanmean(torch.where(x > 1, torch.nan, x), 1)), ROWS),
    "activations": (
        Of(lambda x: F.mish(x) + F.celu(x, 0.3) + F.logsigmoid(x) * F.hardswish(x) - F.softshrink(x)),
        ROWS,
    ),
    "more_activations": (
        Of(lambda x: F.softplus(x, 2, 20) - F.tanhshrink(x) / F.gelu(x) + F.threshold(x, 0.1, 2.0)),
        ROWS,
    ),
    "clamps": (
        Of(lambda x: torch.clamp(x, -0.5, 0.7) - F.hardtanh(x) * F.relu6(x).clamp_max(1) - F.hardshrink(x)),
        ROWS,
    ),
    "prelu": (Of(nn.PReLU(6), torch.neg, torch.exp2), ROWS),
    "two": (Of(lambda x, y: torch.addcmul(x, y, x, value=0.5) + torch.lerp(x, y, 0.3) - torch.addcdiv(x, x, y)), PAIR),
    "functions": (
        Of(lambda x, y: torch.hypot(x, y) * torch.copysign(x, -y) + torch.pow(x, y) - torch.atan2(y, x)),
        PAIR,
    ),
    "order": (Of(lambda x: (x - (x - 1)) / (x / (2 - x)) - (x - x * (x + 3))), ROWS),
    "comparisons": (Of(lambda x, y: torch.where((x > y) & (x != 0.5) | (y <= 0.7), x - y, y)), PAIR),
    "laid_out": (Of(lambda x: x.permute(2, 0, 1).reshape(10, 12) * 3), ROWS),
    "group_of_a_view": (Of(lambda x: x.view(4, 3, 2, 5).sum((1, 3)).expand(3, 4, 2)), ROWS),
    "rows_and_more": (Of(lambda x: x - x.mean(1, keepdim=True).exp() * x.std(1, keepdim=True)), ROWS),
    "norm_of_norm": (Of(nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)), IMAGES),
    "norm_then_other_rows": (Of(nn.LayerNorm((4, 5)), lambda x: torch.std(F.silu(x), 1)), IMAGES),
    "rows_of_rows": (Of(lambda x: torch.std(x, 1), lambda x: F.softmax(torch.tanh(x), 0)), IMAGES),
    "softmax_then_max": (Of(lambda x: F.softmax(x, 1), lambda x: torch.max(x, 3)[0]), IMAGES),
    "two_outputs_rows": (Of(lambda x: F.log_softmax(x.permute(0, 2, 3, 1).reshape(60, 8), -1)), IMAGES),
    "back_to_the_whole": (Of(lambda x: x.sum((2, 3), keepdim=True) * x + x.amax(1, keepdim=True)), IMAGES),
    "argmin_of_rows": (Of(lambda x: torch.argmin(F.mish(x), 1).float(), lambda x: F.log_softmax(x, 1)), IMAGES),
    "transposed_rows": (Of(lambda x: x.mean(2).transpose(1, 2).softmax(-1)), IMAGES),
    "three": (Of(lambda x: x.std(3), lambda x: x.softmax(1), lambda x: x.norm(dim=2)), IMAGES),
    "one_row": (Of(lambda x: F.softmax(x.reshape(-1), 0)), ROWS),
    "one_number": (Of(lambda x: (x - x.mean()).square().mean().sqrt() + x.std()), ROWS),
    "argmax_of_softmax": (Of(lambda x: F.softmax(x, 1), lambda x: torch.argmax(x, 1)), ROWS),
    "double": (Of(lambda x: torch.log1p(torch.exp(x)) ** 3 + 1e-9), [ROWS[0].double()]),
}
LINE = re.compile(r"(\w+)\[i\] = (.*);  // i < (\d+)")
REDUCTION = re.compile(r"(\w+)(?: place k of the (\w+))? over k(?: < (\d+))? of (.*?)(?:, j = (.*))?")
KERNEL = re.compile(r"(?:Kernel \d of \d: )?[eE]ach thread has one i < (\d+)\.(?: For each k < (\d+), j = (.*)\.)?")
NEXT = {"sum": "v + w", "product": "v * w", "maximum": "w > v ? w : v", "minimum": "w < v ? w : v"}


def names_of(model, values):
    return [f"x{place}" for place in range(len(values) + len(list(model.parameters())) + len(list(model.buffers())))]


def reduced(right, length, place, needed=""):
    """A loop for a reduction, after which `v` or `at` is what it gives, and which of them it is."""
    what, which, own_length, element, own_place = REDUCTION.fullmatch(right).groups()
    place = own_place or place
    declared = f"long long j = {place}; (void)j;" if place else ""
    better = f"k == 0 || ({'w > v' if which == 'maximum' else 'w < v'})"
    step = f"if ({better}) {{ v = w; at = k; }}" if which else f"v = k == 0 ? w : {NEXT[what]};"
    loop = f"for (long long k = 0; k < {own_length or length}; k++)"
    body = f"{loop} {{ {declared} {needed} double w = {element}; {step} }}"
    return f"double v = 0; long long at = 0; (void)at; {body}", "at" if which else "v"


def of_elements(lines, kind):
    """The statements of steps that are each a tensor's."""
    for line in lines:
        name, right, count = LINE.fullmatch(line).groups()
        if name != "out":
            yield f"auto {name} = std::vector<{kind}>({count});"
        loop = f"for (long long i = 0; i < {count}; i++)"
        if REDUCTION.fullmatch(right) is None:
            yield f"{loop} {name}[i] = {right};"
        else:
            before, result = reduced(right, None, None)
            yield f"{loop} {{ {before} {name}[i] = {result}; }}"


def of_kernels(lines, kind):
    """The statements of steps that are kernels with loops."""
    begins = ""
    if lines[0].startswith("Each kernel begins with "):
        begins, size, *lines = lines
        begins = begins.removeprefix("Each kernel begins with ")
        size = size.removeprefix("TASK_SCRATCH(").removesuffix(");")
        yield f"auto scratch_memory = std::vector<char>({size}); void* scratch = scratch_memory.data(); {begins}"
    is_open = False
    for line in lines:
        if (begins := KERNEL.fullmatch(line)) is not None:
            rows, length, place = begins.groups()
            yield f"{'} ' if is_open else ''}for (long long i = 0; i < {rows}; i++) {{"
            is_open = True
            continue
        text, *where = line.split(", where ")
        values = re.split(r", (?=v\d+ = )", where[0]) if where else []
        needed = " ".join(f"{kind} {value};" for value in values)
        left, right = text.split(" = ", 1)
        declared = left if "[" in left else f"{'auto' if '(long' in right else kind} {left}"
        if left.startswith("for each k: "):
            target = left.removeprefix("for each k: ")
            loop = f"for (long long k = 0; k < {length}; k++)"
            yield f"{loop} {{ long long j = {place}; {needed} {target} = {right}; }}"
        elif (first := re.fullmatch(r"first k with (.*)", right)) is not None:
            found = f"{{ long long j = {place}; {needed} if ({first[1]}) return k; }}"
            yield f"auto {left} = [&] {{ for (long long k = 0; k < {length}; k++) {found} return -1LL; }}();"
        elif REDUCTION.fullmatch(right) is None:
            assert not needed, "values of a row have lines of their own"
            yield f"{declared} = {right};"
        else:
            before, result = reduced(right, length, place, needed)
            # As the examples of the prompts have it.
            declared = f"double {left}" if right.startswith("sum") else declared
            yield f"{declared} = [&] {{ {before} return {result}; }}();"
    yield "}"


def program(name, case):
    model, values = case
    names = names_of(model, values)
    lines = steps.steps(model.eval(), names, values, ["out"])
    assert lines, name
    kind = "double" if values[0].dtype == torch.float64 else "float"
    text = [f'extern "C" void case_{name}(const {kind}** of, double* out) {{']
    text += [f"const {kind}* {each} = of[{place}]; (void){each};" for place, each in enumerate(names)]
    text += (of_elements if LINE.fullmatch(lines[0]) else of_kernels)(lines, kind)
    return "\n".join([*text, "}"])


HEAD = """
#include <cmath>
#include <vector>
using namespace std;
static float rsqrtf(float v) { return 1 / sqrtf(v); }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    source, library = folder / "steps.cpp", folder / "steps.so"
    source.write_text(HEAD + "\n".join(program(name, case) for name, case in CASES.items()))
    subprocess.run(["g++", "-std=c++17", "-O0", "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("name", CASES)
def test_steps_compute_the_forward(compiled, name):
    model, values = CASES[name]
    tensors = [tensor.detach().contiguous() for tensor in [*values, *model.parameters(), *model.buffers()]]
    expected = model(*values).detach().double()
    out = torch.full(expected.shape, torch.nan, dtype=torch.float64)
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    getattr(compiled, f"case_{name}")(pointers, ctypes.c_void_p(out.data_ptr()))
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-5)


def lines(function, *values):
    return steps.steps(Of(function), names_of(Of(function), values), values, ["out"])


def test_a_step_is_one_operator_or_several_on_the_same_element():
    assert lines(lambda x: torch.relu(x) * 2 + 1, torch.randn(3, 4)) == [
        "out[i] = fmaxf(x0[i], 0.0f) * 2.0f + 1.0f;  // i < 12"
    ]
    assert lines(lambda x: F.softmax(x, 0), torch.randn(3, 4)) == [
        "Each thread has one i < 4. For each k < 3, j = i + k * 4.",
        "t1 = maximum over k of x0[j]",
        "t2 = sum over k of expf(x0[j] - t1)",
        "for each k: out[j] = expf(x0[j] - t1) / t2",
    ]


def test_a_reduction_over_other_rows_is_another_kernel():
    assert lines(lambda x: F.softmax(torch.std(x, 1), 0), torch.randn(3, 4, 5)) == [
        "Each kernel begins with float* s1 = (float*)scratch;",
        "TASK_SCRATCH(15 * sizeof(float));",
        "Kernel 1 of 2: each thread has one i < 15. For each k < 4, j = i / 5 * 20 + i % 5 + k * 5.",
        "t1 = sum over k of x0[j]",
        "t2 = t1 / 4.0f",
        "t3 = sum over k of (x0[j] - t2) * (x0[j] - t2)",
        "t4 = sqrtf(t3 / 3.0f)",
        "s1[i] = t4",
        "Kernel 2 of 2: each thread has one i < 5. For each k < 3, j = i + k * 5.",
        "t5 = maximum over k of s1[j]",
        "t6 = sum over k of expf(s1[j] - t5)",
        "for each k: out[j] = expf(s1[j] - t5) / t6",
    ]


@pytest.mark.parametrize("kind", ["example", "normalization", "softmax", "reduction", "scratch"])
def test_the_examples_of_the_prompts_have_their_steps(kind):
    prompts = pathlib.Path(__file__).resolve().parents[2] / "agent" / "prompts"
    scope = {}
    exec((prompts / f"{kind}_task.py").read_text(), scope)
    said = steps.steps(scope["Model"](), ["x"], scope["get_inputs"](), ["out"])
    assert "\n".join(said) == (prompts / f"{kind}_steps.txt").read_text().strip()


def test_a_place_is_where_the_extreme_is_and_an_output_has_a_line():
    assert lines(lambda x: torch.argmax(torch.tanh(x) * 2, 1), torch.randn(3, 4)) == [
        "Each thread has one i < 3. For each k < 4, j = i * 4 + k.",
        "t1 = maximum over k of tanhf(x0[j]) * 2.0f",
        "t2 = first k with (float)(tanhf(x0[j]) * 2.0f) == t1",
        "out[i] = t2",
    ]
    silu = lines(lambda x: torch.argmin(F.silu(torch.tanh(x) - 1), 0), torch.randn(3, 4))
    assert silu[2] == "t2 = first k with (float)(v1 * 1.0f / (1.0f + expf(-v1))) == t1, where v1 = tanhf(x0[j]) - 1.0f"


def test_arrays_in_scratch_memory_lie_one_behind_the_other():
    both = lines(lambda x: F.softmax(x, 1).sum(0), torch.randn(3, 4))
    assert both[:2] == [
        "Each kernel begins with float* s1 = (float*)scratch; float* s2 = (float*)(s1 + 3);",
        "TASK_SCRATCH(3 * sizeof(float) + 3 * sizeof(float));",
    ]


def test_a_square_is_a_product_of_what_has_a_name():
    assert lines(lambda x: (torch.sin(x) + 1) ** 2, torch.randn(4)) == [
        "t1[i] = sinf(x0[i]) + 1.0f;  // i < 4",
        "out[i] = t1[i] * t1[i];  // i < 4",
    ]


def test_what_is_no_such_step_has_none():
    square = torch.randn(4, 4)
    for function in [
        torch.matmul,
        lambda x, _: x[1:] * 2,
        lambda x, y: F.conv1d(x[None], y[:, :, None]),
        lambda x, _: torch.cumsum(x, 0),
        lambda x, y: x if x.sum() > 0 else y,
        lambda x, _: x.sort()[0],
    ]:
        assert lines(function, square, square) == []
    assert lines(lambda x: [x := torch.tanh(x) + x for _ in range(40)][-1], square) == [], "too many"
    assert lines(lambda x: x.add_(1), square) == [], "an input that changes"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [z := x + 1, z.view(2, 8).mul_(2), z.sum(1)][-1],
        lambda x: [z := x + 1, w := z.view(2, 8), z.mul_(2), w.sum(1)][-1],
        lambda x: [z := torch.zeros(4, 4, dtype=torch.int32), z.copy_(x * 10), z.sum(1)][-1],
        lambda x: (x * 10).int() & 3,
        lambda x: ((x > 0) + (x > 1)).float(),
        lambda x: x.half().float() * 2,
        lambda x: torch.exp(x.double()),
    ],
)
def test_what_would_be_said_wrongly_is_not_said(function):
    assert lines(function, torch.randn(4, 4)) == []


def test_values_that_are_used_twice_again_and_again_take_no_time():
    def forward(x):
        for _ in range(60):
            x = torch.tanh(x) + x
        return F.softmax(x, 1)

    started = time.monotonic()
    lines(forward, torch.randn(4, 4))
    assert time.monotonic() - started < 20


def test_one_number_is_one_kernel():
    assert lines(lambda x: x.sum() * 2, torch.randn(4, 4)) == [
        "Each thread has one i < 1. For each k < 16, j = k.",
        "t1 = sum over k of x0[j]",
        "out[i] = t1 * 2.0f",
    ]
