"""What runs inside a worker process: tasks' code, one after another, and the measurements of it.

A task's code shares this process, so nothing here is a defence. It sends facts as soon as it has them, over one
pipe, so that a task which crashes in its compiled half still has the facts of its eager half.

On a GPU several workers run side by side. Whatever computes there is inside `gate.shared()`, in steps of a few
milliseconds with `gate.pause()` between them, and times are taken inside `gate.alone()`; compiling needs neither. A
task is alone once: from the compiled model's first run, in which the compiler chooses among kernels by their times, to
the last timed forward. Only a task's inputs and weights are kept in the GPU's memory while it is compiled.
"""

import contextlib
import gc
import importlib.util
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import threading
import time
import types
from typing import Any

import torch

import tensors
from call_times import CpuClock, synchronise, time_calls
from cuda_clock import CudaClock
from graph_trace import Trace
from worker_channel import Commands, Gate, NoGate, Report, Step, TaskFailed, TooSlow, first_lines

CHOICE = {"estimation_iters": 2, "max_benchmark_duration": 5, "memory_warmup_iters": 20}
"""How the compiler times a candidate for a kernel: runs to see how long it takes, milliseconds of runs after that, and
writes to the L2 cache before. The least time counts."""


def seed_everything(seed: Any) -> None:
    # Not torch.manual_seed: for devices that are not in use it keeps a growing list of calls, each with a formatted
    # stack.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


class Task:
    """A loaded task: its module, its model, and how to run it."""

    def __init__(self, setup: Any, job: Any, report: Any, gate: Any) -> None:
        self.report, self.gate, self.device = report, gate, torch.device(setup["device"])
        self.seed, self.params = job["seed"] % (1 << 31), setup["params"]
        self.code = job["code"]
        self.drawn_on = self.device
        self.mutates = False

    def load(self) -> None:
        with Step(self.report, "load"):
            path = os.path.join(os.getcwd(), "task_module.py")
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.code)
            specification: Any = importlib.util.spec_from_file_location("task_module", path)
            self.module = importlib.util.module_from_spec(specification)
            sys.modules["task_module"] = self.module
            seed_everything(self.seed)
            specification.loader.exec_module(self.module)
            for name in ("Model", "get_inputs"):
                if not callable(getattr(self.module, name, None)):
                    raise AttributeError(f"the file defines no {name}")
        self.report.facts(loads=True)

    def make_model(self, seed: Any) -> Any:
        seed_everything(seed)
        arguments = self.module.get_init_inputs() if hasattr(self.module, "get_init_inputs") else []
        return self.module.Model(**arguments) if isinstance(arguments, dict) else self.module.Model(*arguments)

    def build(self) -> None:
        with Step(self.report, "init"):
            model = self.make_model(self.seed)
            with self.gate.shared():
                self.model = model.to(self.device).eval()
            parameters = sum(parameter.numel() for parameter in model.parameters())
        self.report.facts(builds=True, parameters=parameters)

    def draw(self, number: Any) -> list[torch.Tensor]:
        """Fresh inputs: the same for the same number, whatever was drawn before. They are made on the device, which
        draws gigabytes in milliseconds, unless the task's code does not bear that."""
        if self.drawn_on.type != "cpu":
            try:
                return self._draw_on(self.drawn_on, number)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError):
                # It mixes devices or hands a GPU tensor to numpy; it will do so the next time too.
                self.drawn_on = torch.device("cpu")
        return self._draw_on(self.drawn_on, number)

    def _draw_on(self, device: Any, number: Any) -> list[torch.Tensor]:
        seed_everything(self.seed + number)
        with contextlib.nullcontext() if device.type == "cpu" else device:
            values = list(self.module.get_inputs())
        return [value.to(self.device) if isinstance(value, torch.Tensor) else value for value in values]

    def arguments(self, inputs: Any) -> Any:
        """For one call: a copy where the model writes into its inputs, so that it can't spoil the next call."""
        return tensors.clone(inputs) if self.mutates else inputs

    def forward(self, inputs: Any, *, seed: int = 0, model: Any = None) -> list[torch.Tensor]:
        arguments = self.arguments(inputs)
        seed_everything(self.seed + 1000 + seed)
        return [output.detach() for output in tensors.flatten((self.model if model is None else model)(*arguments))]


def draw_inputs(task: Any) -> Any:
    """The inputs for nearly everything, and what the other draws say of them."""
    with Step(task.report, "inputs"), task.gate.shared():
        first = task.draw(0)
        repeatable = tensors.equal(first, task.draw(0))
        second = task.draw(1)
        fixed = [tensors.equal(*pair) for pair in zip(first, second, strict=False) if isinstance(pair[0], torch.Tensor)]
    task.report.facts(inputs=json.dumps(tensors.describe(first)), inputs_fixed=fixed, inputs_repeatable=repeatable)
    return first


def run_eager(task: Any, first: Any) -> tuple[list[torch.Tensor], tensors.Summary]:
    """The first run: what comes out, and whether the inputs survive it."""
    with Step(task.report, "forward"):
        versions = [value._version for value in first if isinstance(value, torch.Tensor)]
        before = tensors.clone(first) if task.device.type == "cpu" else None
        seed_everything(task.seed + 1000)
        synchronise(task.device)
        started = time.perf_counter()
        # The outputs of a model that returns its inputs must not change with them.
        outputs = [output.detach() for output in tensors.flatten(task.model(*first))]
        synchronise(task.device)
        task.first_forward_ms = (time.perf_counter() - started) * 1e3
        if not outputs:
            raise TypeError("forward returned no tensor")
        task.mutates = versions != [value._version for value in first if isinstance(value, torch.Tensor)]
        if before is not None:
            task.mutates = task.mutates or not tensors.equal(before, first)
        if task.mutates:
            outputs = [output.clone() for output in outputs]
            first[:] = task.draw(0) if before is None else before
        summary = tensors.Summary(outputs)
    task.report.facts(
        executes_eager=True,
        outputs=json.dumps(tensors.describe(outputs)),
        mutates_inputs=task.mutates,
        **summary.facts(),
    )
    task.finite, task.deviations_seen = summary.finite, [summary.deviation]
    return outputs, summary


def refuse_slow(task: Any, first: Any) -> None:
    """A task that takes far longer than anybody wants ends here: a forward of a second would keep everybody else from
    the GPU for half a minute."""
    limit = task.params["slow_ms"]
    # The first one has warmed up too, and others computed beside it: only what is slow twice is slow.
    if not limit or task.first_forward_ms <= limit:
        return
    with Step(task.report, "eager_timing"):
        with task.gate.apart():
            started = time.perf_counter()
            task.forward(first)
            synchronise(task.device)
            milliseconds = (time.perf_counter() - started) * 1e3
        if milliseconds <= limit:
            return
        task.report.facts(eager_ms=milliseconds, eager_min_ms=milliseconds, eager_trials=1)
        raise TooSlow(f"a forward takes {milliseconds:.3g} ms, slow_ms is {limit:g}")


def check_randomness(task: Any, first: Any, outputs: Any, deviations: Any) -> None:
    """Another run, with another seed before the forward. Only where that differs does it matter whether the same seed
    gives the same."""
    with Step(task.report, "repeat"):
        with Trace(task.model, first) as trace:
            again = task.forward(first, seed=1)
        reseeded = tensors.Difference(outputs, again, deviations)
        del again
        repeat = reseeded
        if reseeded.absolute != 0:
            repeat = tensors.Difference(outputs, task.forward(first), deviations)
    task.report.facts(
        repeat_abs=repeat.absolute,
        reseed_abs=reseeded.absolute,
        random_ops=sorted(trace.random),
        graph=trace.digest(),
        graph_operators=trace.operators,
    )


def check_sensitivity(task: Any, first: Any, outputs: Any, deviations: Any) -> None:
    """What the outputs do when all inputs are fresh, and when one of them is."""
    positions = [index for index, value in enumerate(first) if isinstance(value, torch.Tensor)]
    absolute, relative, share = [], [], []
    with Step(task.report, "sensitivity"):
        second = task.draw(1)
        fresh_outputs = task.forward(second)
        fresh = tensors.Difference(outputs, fresh_outputs, deviations)
        summary = tensors.Summary(fresh_outputs)
        task.finite = task.finite and summary.finite
        task.deviations_seen.append(summary.deviation)
        del fresh_outputs
        shapes_vary = fresh.shapes_differ
        task.report.facts(fresh_abs=fresh.absolute, fresh_rel=fresh.relative, finite=task.finite)
        for index in positions:
            task.gate.pause()
            if tensors.equal(first[index], second[index]):
                difference = None
            elif len(first) == 1:
                difference = fresh
            else:
                mixed = [*first[:index], second[index], *first[index + 1 :]]
                difference = tensors.Difference(outputs, task.forward(mixed), deviations)
                shapes_vary = shapes_vary or difference.shapes_differ
            absolute.append(difference and difference.absolute)
            relative.append(difference and difference.relative)
            share.append(difference and difference.share)
    task.report.facts(
        sensitivity_abs=absolute, sensitivity_rel=relative, sensitivity_share=share, shapes_vary=shapes_vary
    )


def check_other_weights(task: Any, model: Any) -> None:
    """A third draw of the inputs, and weights of another seed: is what comes out still finite, and of a like size?"""
    with Step(task.report, "other_weights"):
        summary = tensors.Summary(task.forward(task.draw(2), model=model.to(task.device).eval()))
    task.deviations_seen.append(summary.deviation)
    low, high = min(task.deviations_seen), max(task.deviations_seen)
    task.report.facts(finite=task.finite and summary.finite, seed_std_ratio=high / low if low > 0 else None)


def check_train_mode(task: Any, first: Any, outputs: Any, deviations: Any) -> None:
    """The model in train mode. Its buffers (running statistics) are put back; that it fails there is a fact only."""
    task.report.at("train_mode")
    buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    try:
        task.model.train()
        with Trace(task.model, first) as trace:
            difference = tensors.Difference(outputs, task.forward(first), deviations)
        task.report.facts(
            train_abs=difference.absolute, train_rel=difference.relative, train_random_ops=sorted(trace.random)
        )
    except Exception as error:
        task.report.facts(train_error=first_lines(error))
    finally:
        task.model.eval()
        for name, buffer in task.model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


def compile_model(task: Any, first: Any) -> tuple[Any, Any]:
    """The compiled model, after its first call. What compiling needs of the GPU is inside the gate: see `compiler`."""
    with Step(task.report, "compile"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(task.model, **compiler(task))
        started, waited = time.perf_counter(), task.gate.waited
        results = task.forward(first, model=compiled)
        synchronise(task.device)
        seconds = time.perf_counter() - started - (task.gate.waited - waited)
    task.report.facts(
        executes_compiled=True,
        compile_s=seconds,
        graph_breaks=sum(torch._dynamo.utils.counters["graph_break"].values()),
    )
    return compiled, results


def compiler(task: Any) -> dict[str, Any]:
    """Options of torch.compile: none on a CPU. On a GPU its own compiler, and whatever it made runs alone: its first
    run chooses among kernels by their times, and the timed ones follow."""
    if task.device.type == "cpu":
        return {}
    from torch._inductor.compile_fx import compile_fx

    def gated(graph: Any, examples: Any):
        # Where the model is compiled in parts, the one before has run.
        task.gate.release()
        function: Any = compile_fx(graph, examples)

        def run(*arguments: Any):
            task.gate.hold_alone()
            return function(*arguments)

        return run

    return {"backend": gated}


def choose_kernels_apart(gate: Any) -> None:
    """Have the compiler take the times that it chooses kernels by while nobody else works on the GPU, and less of them:
    25 ms for each of several candidates for each kernel kept the GPU from others for a quarter of the time."""
    from torch._inductor.runtime.benchmarking import InductorBenchmarker
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    choose, benchmark = CachingAutotuner.autotune_to_one_config, InductorBenchmarker.benchmark_gpu

    def shorter(self: Any, call: Any, **named: Any):
        return benchmark(self, call, **{**named, **CHOICE})

    InductorBenchmarker.benchmark_gpu = shorter

    def apart(self: Any, *arguments: Any, **named: Any):
        with gate.apart():
            return choose(self, *arguments, **named)

    CachingAutotuner.autotune_to_one_config = apart


def compare_compiled(task: Any, first: Any, results: Any, deviations: Any) -> None:
    with Step(task.report, "compile"), task.gate.shared():
        difference = tensors.Difference(task.forward(first), results, deviations)
    task.report.facts(
        compiled_abs=difference.absolute,
        compiled_rel=difference.relative,
        compiled_tolerance=difference.tolerance,
    )


def resident_bytes(field: Any) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def peak_memory(device: Any, before: Any) -> int:
    """What eager execution took at its peak: allocated on a GPU, added to the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(0, resident_bytes("VmHWM") - before)


def prepare_process(setup: Any) -> None:
    """Point every cache at this worker's own folder, and fix the number of threads."""
    folder = os.getcwd()
    os.environ.update(
        TMPDIR=folder,
        TORCHINDUCTOR_CACHE_DIR=os.path.join(folder, "inductor"),
        TRITON_CACHE_DIR=os.path.join(folder, "triton"),
    )
    tempfile.tempdir = None
    torch.set_num_threads(setup["params"]["threads"])
    if setup["device"] == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(setup["gpu_memory_limit"] / total, 0.25))


def measure(setup: Any, job: Any, report: Any, gate: Any, clock: Any) -> None:
    before = resident_bytes("VmRSS")
    task = Task(setup, job, report, gate)
    task.load()
    with torch.no_grad():
        task.build()
        first = draw_inputs(task)
        others = other_model(task)
        with gate.shared():
            if task.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            outputs, summary = run_eager(task, first)
            report.facts(peak_memory_bytes=peak_memory(task.device, before))
            refuse_slow(task, first)
            if task.device.type == "cpu":
                gc.collect()
                # Before anything that could break the process, so that a crash still leaves a time.
                time_calls(task, clock, task.model, first, "eager")
            gate.pause()
            check_randomness(task, first, outputs, summary.deviations)
            gate.pause()
            check_sensitivity(task, first, outputs, summary.deviations)
            gate.pause()
            check_train_mode(task, first, outputs, summary.deviations)
            gate.pause()
            check_other_weights(task, others)
            del outputs, others
            if task.device.type == "cuda":
                # Others need what torch would keep in stock while this task is compiled.
                torch.cuda.empty_cache()
        models, results = {"eager": task.model} if task.device.type == "cuda" else {}, None
        # Not while it is alone on the GPU: torch's heap takes a quarter of a second.
        gc.collect()
        try:
            if setup["params"]["compile"]:
                # On a GPU it is alone from here on.
                models["compiled"], results = compile_model(task, first)
        finally:
            # What does not compile still has its eager time.
            with gate.alone() if models else contextlib.nullcontext():
                for name, model in models.items():
                    time_calls(task, clock, model, first, name)
        if results is not None:
            compare_compiled(task, first, results, summary.deviations)


def other_model(task: Any) -> Any:
    with Step(task.report, "init"):
        return task.make_model(task.seed + 1)


def warm_up(setup: Any, gate: Any) -> None:
    """Has torch do what it does once in a process, some of which replaces its own functions, before a task does."""
    device = torch.device(setup["device"])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Softmax(-1)).eval()
    with torch.no_grad(), gate.shared():
        model, values = model.to(device), torch.randn(4, 8, device=device)
        with Trace(model, [values]):
            model(values)
    if setup["params"]["compile"]:
        task = types.SimpleNamespace(device=device, gate=gate)
        # Where it can't compile, the tasks' facts say so.
        with torch.no_grad(), contextlib.suppress(Exception):
            torch.compile(model, **compiler(task))(values)
        gate.release()
    torch._dynamo.reset()


class Traces:
    """What a task may leave behind in the process: functions replaced, threads, settings. A worker that finds any is
    not used again."""

    MODULES = (
        *"torch torch.nn torch.nn.functional torch.cuda torch.compiler torch._dynamo builtins time os json".split(),
        *"random statistics importlib.util gc tensors cuda_clock graph_trace".split(),
        __name__,
    )

    def __init__(self) -> None:
        self._before = {name: dict(vars(sys.modules[name])) for name in self.MODULES if name in sys.modules}
        self._classes = {
            owner: dict(vars(owner))
            for owner in (torch.Tensor, torch.nn.Module, torch.cuda.Event, torch.Generator, CudaClock, Gate, Report)
        }
        self._threads = threading.active_count()
        self._settings = self.settings()

    @staticmethod
    def settings() -> Any:
        backends = torch.backends
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            backends.cuda.matmul.allow_tf32,
            backends.cudnn.allow_tf32,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            backends.cudnn.enabled,
            torch.get_float32_matmul_precision(),
            os.getcwd(),
            gc.isenabled(),
        )

    def found(self) -> Any:
        """What differs from the beginning, or None."""
        for name, before in self._before.items():
            now = vars(sys.modules[name])
            changed = [key for key, value in before.items() if now.get(key) is not value]
            if changed:
                return f"{name}.{changed[0]} was replaced"
        for owner, before in self._classes.items():
            changed = [key for key, value in vars(owner).items() if before.get(key) is not value and key != "__doc__"]
            if changed:
                return f"{owner.__name__}.{changed[0]} was replaced"
        if threading.active_count() > self._threads:
            return "a thread"
        if self.settings() != self._settings:
            return "a setting of torch"
        return None


def clean_up(folder: pathlib.Path | str) -> None:
    """Room for the next task: its module, what was compiled, and files, but for compiled kernels, which are found by
    their whole source."""
    sys.modules.pop("task_module", None)
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    os.chdir(folder)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name == "triton":
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def serve(setup: Any, results: Any, commands_descriptor: Any) -> None:
    """Measure the tasks of the jobs that come, until there are no more."""
    commands, folder = Commands(commands_descriptor), os.getcwd()
    line = commands.line()
    if line is None:
        return
    job = json.loads(line)
    report = Report(results, job["nonce"])
    report.at("start")
    prepare_process(setup)
    gate, clock, traces = NoGate(), CpuClock(), None
    if setup["device"] == "cuda":
        gate = Gate(commands, report)
        choose_kernels_apart(gate)
        with gate.shared():
            clock = CudaClock(torch.device("cuda"))
    if setup["lives_on"]:
        warm_up(setup, gate)
        traces = Traces()
    while True:
        with contextlib.suppress(TaskFailed):
            measure(setup, job, report, gate, clock)
        left_behind = None
        if traces is not None:
            # Nothing is remembered of a task that failed: the supervisor ends this process.
            clean_up(folder)
            left_behind = traces.found()
        report.send(finished=True, left_behind=left_behind)
        line = commands.line()
        if line is None:
            return
        job = json.loads(line)
        report.nonce = job["nonce"]
        report.at("start")
