"""What a case is: a task, an honest kernel for it, and the edits that make an attack of that."""

import dataclasses

OUTCOMES = tuple(
    "correct compile_error wrong unwritten nonfinite input_changed out_of_bounds race misaligned crash deadlock timeout "
    "launch_error unsupported task_error".split()
)
REFUSED = tuple(outcome for outcome in OUTCOMES if outcome not in ("correct", "task_error"))
"""Anything that gives the candidate no reward; the CPU device may say that it lacks a feature."""
CORRECT = ("correct",)
UNSUPPORTED = ("unsupported",)
VALUES = ("wrong", "nonfinite")


def task(forward, inputs, init="pass", init_inputs="[]", arguments="", **constants):
    """A task's file: `forward` is `x, y: expression` or statements that end in a return."""
    names, _, body = forward.partition(":")
    lines = "\n        ".join((body if "return" in body else f"return {body.strip()}").strip().split("\n"))
    numbers = "\n".join(f"{name} = {value!r}" for name, value in constants.items())
    return f"""\
import torch
from torch import nn
import torch.nn.functional as F

{numbers}


class Model(nn.Module):
    def __init__(self{', ' + arguments if arguments else ''}):
        super().__init__()
        {init}

    def forward(self, {names}):
        {lines}


def get_inputs():
    return {inputs}


def get_init_inputs():
    return {init_inputs}
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One candidate, and what may come out of it."""

    id: str
    code: str
    source: str
    format: str
    policy: str
    expected: dict
    """By device, `cpu` and `cuda`: any of these outcomes will do."""
    is_attack: bool


class Case:
    """An attack and its honest twin, which is the same kernel but for what makes it one."""

    def __init__(self, name, code, honest, *edits, policy="strict", attack=None, cpu=VALUES, cuda=None, twin=CORRECT,
                 twin_cpu=None):  # fmt: skip
        """`edits` are pairs: what stands once in the honest source, and what the attack has there. `attack` is a whole
        source in place of edits. `cpu` and `cuda` are what may come of the attack, `twin` of the twin; without
        `cuda` it is what `cpu` says."""
        self.name, self.code, self.honest, self.policy = name, code, honest, policy
        self.attack = edited(honest, edits, name) if attack is None else attack
        self._attack_expected = {"cpu": tuple(cpu), "cuda": tuple(cuda or cpu)}
        self._twin_expected = {"cpu": tuple(twin_cpu or twin), "cuda": tuple(twin)}

    def entries(self, group):
        for kind, source, expected in (("attack", self.attack, self._attack_expected), ("twin", self.honest, self._twin_expected)):
            format = "kernel" if "TASK_LAUNCH" in source else "launch"
            yield Entry(f"{group}/{self.name}/{kind}", self.code, source, format, self.policy, expected, kind == "attack")


def edited(source, edits, name):
    for before, after in edits:
        if source.count(before) != 1:
            raise ValueError(f"{name}: {before!r} stands {source.count(before)} times in the honest twin")
        source = source.replace(before, after)
    if not edits:
        raise ValueError(f"{name}: an attack needs an edit")
    return source


def elementwise(expression, before="", declarations="", parameters="TASK_PARAMETERS"):
    """A thread for each element i of the output; `expression` is what is stored there."""
    return f"""\
#include "task.h"
{declarations}
extern "C" __global__ void run({parameters}) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= task::out_size) return;
    {before}
    out[i] = {expression};
}}
TASK_LAUNCH(run, (task::out_size + 255) / 256, 256);
"""


def by_row(body, declarations="", before="", rows="task::rows"):
    """A block of 128 threads for each row. The body has `row`, `thread`, and `sum_of`, `largest_of`, which all threads call."""
    return f"""\
#include "task.h"
{declarations}
constexpr int threads = 128;

__device__ float sum_of(float value, float* shared) {{
    shared[threadIdx.x] = value;
    __syncthreads();
    for (int half = threads / 2; half > 0; half /= 2) {{
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }}
    const float result = shared[0];
    __syncthreads();
    return result;
}}

__device__ float largest_of(float value, float* shared) {{
    shared[threadIdx.x] = value;
    __syncthreads();
    for (int half = threads / 2; half > 0; half /= 2) {{
        if (threadIdx.x < half) shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
        __syncthreads();
    }}
    const float result = shared[0];
    __syncthreads();
    return result;
}}

extern "C" __global__ void run(TASK_PARAMETERS) {{
    __shared__ float shared[threads];
    const int row = blockIdx.x, thread = threadIdx.x;
    {before}
    {body}
}}
TASK_LAUNCH(run, {rows}, threads);
"""


def product(left="a[row * task::depth + k]", right="b[k * task::columns + column]", declarations="", store="sum", type="float"):
    """A thread for each element of a product of a and b, added up in order."""
    return f"""\
#include "task.h"
{declarations}
extern "C" __global__ void run(TASK_PARAMETERS) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= task::rows * task::columns) return;
    const int row = i / task::columns, column = i % task::columns;
    {type} sum = 0.0f;
    for (int k = 0; k < task::depth; ++k) {{
        const float left = {left};
        const float right = {right};
        sum += left * right;
    }}
    out[i] = {store};
}}
TASK_LAUNCH(run, (task::rows * task::columns + 255) / 256, 256);
"""


WAVE = task("x: torch.sin(x) + x", "[torch.randn(size)]", size=20011)
"""The task of candidates that attack by their host code."""


def launched(statements="wave<<<blocks, 256, 0, stream>>>(x, out);", declarations="", ending="return cudaGetLastError();",
             kernel="out[i] = sinf(x[i]) + x[i];"):  # fmt: skip
    """A `launch` candidate for WAVE."""
    return f"""\
#include "task.h"
{declarations}
__global__ void wave(const float* x, float* out) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= task::out_size) return;
    {kernel}
}}

constexpr int blocks = (task::out_size + 255) / 256;

extern "C" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream) {{
    {statements}
    {ending}
}}
"""
