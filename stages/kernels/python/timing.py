"""What PyTorch itself takes: eager, `torch.compile`, and `torch.compile` with autotuning.

Autotuning is mode `max-autotune-no-cudagraphs`: behind a spin a graph saves nothing, and its copies of the inputs into
fixed places would be counted against it.
"""

import base64
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler._cache import CacheArtifactManager

from cuda_clock import Launches
from refusal import Refusal, first_line

if TYPE_CHECKING:
    from device import Clock
    from task import Task

MODES = {"eager": None, "compile": "default", "autotune": "max-autotune-no-cudagraphs"}
WARM_UPS = 3


def check_which(which: str) -> None:
    if which not in MODES:
        raise Refusal("internal", f"there is no baseline {which!r}: use one of {', '.join(MODES)}")


class Baseline:
    """One way to run the task's model."""

    def __init__(self, task: "Task", which: str, cache: Any) -> None:
        self._task = task
        self.error = None
        self.model = task.model
        self.launches = Launches(0.0)
        self.cache = None
        started = time.perf_counter()
        try:
            if which != "eager":
                self._compile(which, cache)
            self._warm_up()
        except Refusal:
            raise
        except Exception as error:
            if which == "eager" or isinstance(error, torch.OutOfMemoryError):
                raise
            self.error = f"{type(error).__name__}: {first_line(error)}"
        if which != "eager" and self.error is None:
            self.cache = _saved_cache()
        self.seconds = time.perf_counter() - started

    def _compile(self, which: str, cache: Any) -> None:
        # Artifacts are kept for the whole process: without this, earlier tasks' would be saved along.
        # No torch._dynamo.reset() here: it would throw away other tasks' code, to be compiled again under the clock.
        CacheArtifactManager.clear()
        if cache:
            torch.compiler.load_cache_artifacts(base64.b64decode(cache))
        self.model = torch.compile(self._task.model, mode=MODES[which], dynamic=False)

    def _warm_up(self) -> None:
        values = self._task.draw(0)
        for _ in range(WARM_UPS):
            self._task.forward(values, self.model)
        self._task.device.synchronize()
        started = time.perf_counter()
        self._task.forward(values, self.model)
        self.launches = Launches(time.perf_counter() - started)
        self._task.device.synchronize()

    def report(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "cache": self.cache, "error": self.error}

    def check(self) -> None:
        if self.error is not None:
            raise Refusal("task", f"torch.compile failed: {self.error}", "use the baseline eager")


def _saved_cache() -> Any:
    saved = torch.compiler.save_cache_artifacts()
    return None if saved is None else base64.b64encode(saved[0]).decode()


class Timer:
    """The baselines of one task."""

    def __init__(self, task: "Task") -> None:
        self._task = task
        self._clock: Clock | None = None
        self._baselines = {}

    def prepare(self, which: str, cache: Any) -> dict[str, Any]:
        check_which(which)
        if which in self._baselines and cache is None:
            return self._baselines[which].report()
        with self._task.running():
            self._baselines[which] = Baseline(self._task, which, cache)
        return self._baselines[which].report()

    def _baseline(self, which: str) -> Baseline:
        check_which(which)
        if which not in self._baselines:
            self.prepare(which, None)
        baseline = self._baselines[which]
        baseline.check()
        return baseline

    def time(self, which: str, values: Any) -> dict[str, Any]:
        baseline = self._baseline(which)
        if self._clock is None:
            self._clock = self._task.device.clock()
        with self._task.running():
            return self._clock.milliseconds(lambda: self._task.forward(values, baseline.model), baseline)

    def kernels(self, which: str) -> dict[str, Any]:
        """Summed time of everything that the GPU did for one forward."""
        kernel_times = self._task.device.kernel_clock()
        baseline = self._baseline(which)
        with self._task.running():
            values = self._task.draw(1)
            times = kernel_times(lambda: self._task.forward(values, baseline.model))
        return {"kernel_ms": sum(times) / 1e3, "kernels": len(times)}
