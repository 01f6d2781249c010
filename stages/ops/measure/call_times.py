"""Times of calls, until they are known well enough."""

import functools
import gc
import statistics
import time
from typing import Any

import torch

from cuda_clock import Launches
from worker_channel import Step

MINIMUM_TRIALS = 3


def synchronise(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CpuClock:
    """Wall time of a call."""

    def milliseconds(self, call: Any, _launches: Any) -> tuple[float, None]:
        started = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - started) / 1e6, None


def launch_seconds(task: Any, model: Any, inputs: Any) -> float:
    """How long the CPU is busy with a call, which the clock hides behind a spin."""
    if task.device.type == "cpu":
        return 0.0
    arguments = task.arguments(inputs)
    synchronise(task.device)
    started = time.perf_counter()
    model(*arguments)
    return time.perf_counter() - started


def time_calls(task: Any, clock: Any, model: Any, inputs: Any, name: Any) -> None:
    """The median and its company. Trials stop early, though not before three, where they agree or would take too
    long."""
    with Step(task.report, f"{name}_timing"):
        launches, times, all_hidden = Launches(launch_seconds(task, model, inputs)), [], None
        # A GPU is warm from what was run before, `launch_seconds` included.
        warmup = 0 if task.device.type == "cuda" else task.params["warmup"]
        gc.disable()
        try:
            for trial in range(warmup + task.params["trials"]):
                arguments = task.arguments(inputs)
                synchronise(task.device)
                milliseconds, hidden = clock.milliseconds(functools.partial(model, *arguments), launches)
                if trial < warmup:
                    continue
                times.append(milliseconds)
                if hidden is not None:
                    all_hidden = hidden and all_hidden is not False
                if is_enough(times, task.params):
                    break
        finally:
            gc.enable()
        quarters = quartiles(times)
    task.report.facts(
        **{
            f"{name}_ms": quarters[1],
            f"{name}_min_ms": min(times),
            f"{name}_iqr_ms": quarters[2] - quarters[0],
            f"{name}_trials": len(times),
            f"{name}_hidden": all_hidden,
        }
    )


def quartiles(times: Any) -> list[Any]:
    return statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3


def is_enough(times: Any, params: Any) -> Any:
    if len(times) < MINIMUM_TRIALS:
        return False
    if sum(times) > params["timing_s"] * 1000:
        return True
    low, middle, high = quartiles(times)
    return high - low <= params["settled"] * middle
