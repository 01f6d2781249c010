"""The process that `ops/rates` times operators in: reads jobs as JSON lines, answers each with one line.

A job that fails costs its own answer. After an error of CUDA nothing more can be run in a process, so the worker says
so and leaves; its supervisor starts another one. Memory on a GPU is always plain device memory.
"""

import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import transformers_task
from estimate import Count, counted_by_batch, load
from operator_binding import NotApplicable, Operand, bind, cost
from operator_scope import MODULE, operator_scope

# What a stream looks like at each rank, but for the batch; an index stream is short, as its operators ask.
SAMPLES = {2: (1024,), 3: (64, 256), 4: (32, 28, 28), 5: (8, 8, 12, 12)}
INDEX_SAMPLE = (32,)
WIDTH, TOKENS = 256, 128
FLOAT_BYTES = 4
# A small batch is run first: what is slow stays at a size that takes no longer than this, about.
FIRST_SHARE = 1 / 16
SLOW_SECONDS = {"cuda": 0.02, "cpu": 0.03}
REPEATS, MOST_SECONDS = 5, 0.1


class Stopwatch:
    """Times calls on a device: CUDA events on a GPU, the clock on a CPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def seconds(self, call: Callable[[], object]) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    def median(self, call: Callable[[], object], repeats: int = REPEATS, most_seconds: float = MOST_SECONDS) -> float:
        """The median of some calls after one to warm up; fewer where they take long."""
        first = self.seconds(call)
        times = [self.seconds(call)]
        while len(times) < repeats and sum(times) + first < most_seconds:
            times.append(self.seconds(call))
        return statistics.median(times)


# ---- operators


def fill(kind: Any, shape: tuple[int, ...], device: str, classes: int) -> torch.Tensor:
    """Random values of the fills that usages name; zeros would be faster than what models compute with."""
    if kind.startswith("index"):
        return torch.randint(0, classes, shape, device=device)
    if kind == "sign":
        return torch.randint(0, 2, shape, device=device) * 2.0 - 1.0
    if kind == "randn":
        return torch.randn(shape, device=device)
    values = torch.rand(shape, device=device)
    return {"rand": values, "positive": values + 0.5, "unit": values * 1.8 - 0.9, "above_one": values + 1.1}[kind]


def operator_at(
    usage: dict[str, Any], rank: int, elements: int, device: str
) -> tuple[Callable[..., Any], tuple[float, float, float]]:
    """A call of an operator on a stream of about so many elements, and the `Count` of its formulas."""
    sample = INDEX_SAMPLE if usage["input"] == "index" else SAMPLES[rank]
    shape = (max(2, elements // math.prod(sample)), *sample)
    bound = bind(usage, shape)

    def value(operand: Operand) -> torch.Tensor:
        scale = 1 if "index" in operand.fill else operand.scale
        return fill(operand.fill, operand.shape, device, shape[1]) * scale

    scope = operator_scope(bound, value, device)
    classes = bound.values.get("num_embeddings", 16)
    domain = "index" if usage["input"] == "index" else {"any": "randn"}.get(usage["domain"], usage["domain"])
    scope["x"] = fill(domain, shape, device, classes)
    code = compile(bound.call_text("x", MODULE), "call", "eval")
    out = eval(code, scope)
    weights = sum(parameter.numel() for parameter in scope["self"].parameters())
    flops, moved, steps = cost(bound, shape, tuple(out.shape), weights)
    return (lambda: eval(code, scope)), (flops, moved, steps)


def time_operator(job: dict[str, Any], stopwatch: Stopwatch) -> dict[str, float]:
    """The seconds of a usage at a rank, and the terms of its roofline at the size that they were taken at."""
    usage, rank, elements = job["usage"], job["rank"], job["elements"]
    call, terms = operator_at(usage, rank, max(2, int(elements * FIRST_SHARE)), stopwatch.device)
    call()
    first = min(stopwatch.seconds(call), stopwatch.seconds(call))
    growth = min(1.0 / FIRST_SHARE, SLOW_SECONDS[stopwatch.device] / max(first, 1e-9))
    if growth > 1.5:
        del call
        call, terms = operator_at(usage, rank, int(elements * FIRST_SHARE * growth), stopwatch.device)
    flops, moved, steps = terms
    return {"seconds": stopwatch.median(call), "flops": flops, "moved": moved, "steps": steps}


# ---- classes of transformers


def time_class(job: dict[str, Any], stopwatch: Stopwatch) -> dict[str, Any]:
    """The seconds of a class's task, and what it does, as it is counted on the meta device."""
    row, usage = job["row"], job["usage"]
    sizes = transformers_task.sizes_at(usage, WIDTH)
    code = transformers_task.task_code(usage, row["source"], transformers_task.header_lines(row), sizes, 2, TOKENS)
    count_at = counted_by_batch(code)
    wanted = job["elements"] * FLOAT_BYTES
    per_sample = max(1.0, (count_at(4).moved - count_at(2).moved) / 2)
    batch = max(2, min(1 << 14, int(wanted / per_sample)))
    namespace, module = load(code, stopwatch.device)
    first_batch = max(2, int(batch * FIRST_SHARE))
    call = class_call(namespace, module, first_batch, stopwatch.device)
    call()
    first = stopwatch.seconds(call)
    batch = max(2, min(batch, int(first_batch * SLOW_SECONDS[stopwatch.device] / max(first, 1e-9))))
    seconds = stopwatch.median(class_call(namespace, module, batch, stopwatch.device))
    count: Count = count_at(batch)
    return {"seconds": seconds, "flops": count.flops, "moved": count.moved, "operators": count.operators}


def class_call(namespace: dict[str, Any], module: Any, batch: int, device: str) -> Callable[..., Any]:
    namespace["batch_size"] = batch
    with torch.device(device):
        inputs = namespace["get_inputs"]()
    return lambda: module(*inputs)


# ---- the device


def device_figures(stopwatch: Stopwatch) -> dict[str, Any]:
    """What the device does at best in the operations that estimates are made of."""
    on_gpu = stopwatch.device == "cuda"
    size = 4096 if on_gpu else 1024
    left, right = (torch.randn(size, size, device=stopwatch.device) for _ in range(2))
    product = stopwatch.median(lambda: torch.mm(left, right), repeats=9, most_seconds=2)
    values = torch.randn(2**28 if on_gpu else 2**25, device=stopwatch.device)
    target = torch.empty_like(values)
    copy = stopwatch.median(lambda: target.copy_(values), repeats=9, most_seconds=2)
    return {
        "memory_bytes": memory_bytes(stopwatch.device),
        "gflops": 2 * size**3 / product / 1e9,
        "gbytes_per_s": 2 * values.nbytes / copy / 1e9,
        "operator_us": operator_seconds(stopwatch) * 1e6,
    }


def operator_seconds(stopwatch: Stopwatch) -> float:
    """What an operator takes on so little data that only its start counts, in a row of them."""
    value = torch.randn(16, 16, device=stopwatch.device)
    number = 200

    def row() -> None:
        for _ in range(number):
            torch.sin(value)

    return stopwatch.median(row, repeats=9) / number


def memory_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- the loop

ACTIONS = {
    "operator": time_operator,
    "class": time_class,
    "device": lambda _job, stopwatch: device_figures(stopwatch),
}


def answer(job: dict[str, Any], stopwatch: Stopwatch) -> tuple[dict[str, str], bool]:
    """`(answer, whether the process can go on)`."""
    try:
        with torch.no_grad():
            return ACTIONS[job["action"]](job, stopwatch), True
    except (torch.OutOfMemoryError, MemoryError):
        return {"reason": "out of memory"}, True
    except NotApplicable as error:
        return {"reason": f"does not fit: {error}"[:200]}, True
    except Exception as error:
        broken = stopwatch.device == "cuda" and ("CUDA" in str(error) or isinstance(error, torch.AcceleratorError))
        return {"reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}, not broken
    finally:
        if stopwatch.device == "cuda" and torch.cuda.memory_reserved() > job.get("keep_bytes", 0):
            torch.cuda.empty_cache()


def main() -> None:
    # What operators print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    device = sys.argv[1]
    # One thread, as tasks are measured with on a CPU.
    torch.set_num_threads(1)
    torch.manual_seed(1)
    stopwatch = Stopwatch(device)
    if device == "cuda":
        if not torch.cuda.is_available():
            answers.write(json.dumps({"ready": None}) + "\n")
            answers.flush()
            return
        name = torch.cuda.get_device_name(0)
        torch.mm(torch.randn(64, 64, device=device), torch.randn(64, 64, device=device))
    else:
        name = "cpu"
    answers.write(json.dumps({"ready": name}) + "\n")
    answers.flush()
    for line in sys.stdin:
        result, usable = answer(json.loads(line), stopwatch)
        answers.write(json.dumps(result) + "\n")
        answers.flush()
        if not usable:
            # The context of CUDA is lost; leaving in the ordinary way would wait for it.
            os._exit(1)


if __name__ == "__main__":
    main()
