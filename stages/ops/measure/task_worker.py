"""What runs inside a worker process: one task's code, and the measurements of it.

The task's code shares this process, so nothing here is a defence. It sends facts as soon as it has them, over one
pipe, so that a task which crashes in its compiled half still has the facts of its eager half.
"""

import copy
import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time

import cuda_agent_stage as stage
import tensors
import torch
from torch.utils._python_dispatch import TorchDispatchMode

MINIMUM_TRIALS = 3


class TaskFailed(Exception):
    """The task's own code failed; the facts about it have been sent."""


class Report:
    """The way back to the supervisor: one JSON object a line, each with the nonce of this worker."""

    def __init__(self, descriptor, nonce):
        self._descriptor, self._nonce = descriptor, nonce

    def send(self, **message):
        line = json.dumps(stage.finite({"nonce": self._nonce, **message})) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(self._descriptor, data) :]

    def facts(self, **facts):
        self.send(facts=facts)

    def at(self, where):
        self.send(at=where)


def first_lines(error):
    """The first two lines with text of an error's message: compilers put the cause in the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:500]


def kind_of(error):
    text = str(error)
    exhausted = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in text for words in exhausted):
        return "memory"
    return "exit" if isinstance(error, SystemExit) else "exception"


class Step:
    """A named part of the work. What the task raises in it ends the measurement with a fact, not with a crash."""

    def __init__(self, report, name):
        self.report, self.name = report, name

    def __enter__(self):
        self.report.at(self.name)

    def __exit__(self, _, error, __):
        if error is None or isinstance(error, TaskFailed):
            return False
        self.report.facts(error_stage=self.name, error_kind=kind_of(error), error=first_lines(error))
        raise TaskFailed from error


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


class RandomOperators(TorchDispatchMode):
    """Collects the operators that draw random numbers while a model runs.

    torch tags every operator that *can* draw; one whose arguments switch that off (dropout_p=0, training=False) is
    left out, else every attention would count as random.
    """

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in function.tags and self._draws(function, args, kwargs or {}):
            self.names.add(str(function.name()))
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _draws(function, args, kwargs):
        names = [argument.name for argument in function._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        if "dropout_p" in names:
            return bool(given.get("dropout_p", 0.0))
        for switch in ("train", "training"):
            if switch in names:
                return bool(given.get(switch, False))
        return True


class Task:
    """A loaded task: its module, its model, and how to run it."""

    def __init__(self, job, report):
        self.report, self.device = report, torch.device(job["device"])
        self.seed, self.params = job["seed"] % (1 << 31), job["params"]
        self.code = job["code"]

    def load(self):
        with Step(self.report, "load"):
            path = os.path.join(os.getcwd(), "task_module.py")
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.code)
            specification = importlib.util.spec_from_file_location("task_module", path)
            self.module = importlib.util.module_from_spec(specification)
            sys.modules["task_module"] = self.module
            seed_everything(self.seed)
            specification.loader.exec_module(self.module)
            for name in ("Model", "get_inputs"):
                if not callable(getattr(self.module, name, None)):
                    raise AttributeError(f"the file defines no {name}")
        self.report.facts(loads=True)

    def build(self):
        with Step(self.report, "init"):
            seed_everything(self.seed)
            arguments = self.module.get_init_inputs() if hasattr(self.module, "get_init_inputs") else []
            model = self.module.Model(**arguments) if isinstance(arguments, dict) else self.module.Model(*arguments)
            self.model = model.to(self.device).eval()
            parameters = sum(parameter.numel() for parameter in model.parameters())
        self.report.facts(builds=True, parameters=parameters)

    def draw(self, number):
        """Fresh inputs: the same for the same number, whatever was drawn before."""
        seed_everything(self.seed + number)
        values = list(self.module.get_inputs())
        return [value.to(self.device) if isinstance(value, torch.Tensor) else value for value in values]

    def forward(self, inputs, *, seed=0, model=None):
        """Outputs for a copy of the inputs, so that a model which writes into them can't spoil the next call."""
        copied = tensors.clone(inputs)
        seed_everything(self.seed + 1000 + seed)
        return [output.detach() for output in tensors.flatten((self.model if model is None else model)(*copied))]


def draw_inputs(task):
    with Step(task.report, "inputs"):
        first, second = task.draw(0), task.draw(1)
        again = task.draw(0)
    task.report.facts(
        inputs=json.dumps(tensors.describe(first)),
        inputs_fixed=[
            tensors.equal(*pair) for pair in zip(first, second) if isinstance(pair[0], torch.Tensor)
        ],
        inputs_repeatable=tensors.equal(first, again),
    )
    return first, second


def run_eager(task, first):
    """The first run: what comes out, and whether the inputs survive it."""
    with Step(task.report, "forward"):
        copied = tensors.clone(first)
        seed_everything(task.seed + 1000)
        outputs = [output.detach() for output in tensors.flatten(task.model(*copied))]
        if not outputs:
            raise TypeError("forward returned no tensor")
        summary = tensors.Summary(outputs)
    task.mutates = not tensors.equal(copied, first)
    task.report.facts(
        executes_eager=True,
        outputs=json.dumps(tensors.describe(outputs)),
        mutates_inputs=task.mutates,
        **summary.facts(),
    )
    task.finite = summary.finite
    return outputs, summary


def time_eager(task, first):
    with Step(task.report, "eager_timing"):
        task.report.facts(**time_calls(task, task.model, first, "eager"))


def check_randomness(task, first, outputs, deviations):
    with Step(task.report, "repeat"):
        with RandomOperators() as operators:
            again = task.forward(first)
        repeat = tensors.Difference(outputs, again, deviations)
        reseeded = tensors.Difference(outputs, task.forward(first, seed=1), deviations)
    task.report.facts(
        repeat_abs=repeat.absolute, reseed_abs=reseeded.absolute, random_ops=sorted(operators.names)
    )


def check_sensitivity(task, first, second, outputs, deviations):
    """What the outputs do when all inputs are fresh, and when one of them is."""
    positions = [index for index, value in enumerate(first) if isinstance(value, torch.Tensor)]
    absolute, relative, share = [], [], []
    with Step(task.report, "sensitivity"):
        fresh_outputs = task.forward(second)
        fresh = tensors.Difference(outputs, fresh_outputs, deviations)
        finite = task.finite and tensors.all_finite(fresh_outputs)
        del fresh_outputs
        shapes_vary = fresh.shapes_differ
        task.report.facts(fresh_abs=fresh.absolute, fresh_rel=fresh.relative, finite=finite)
        for index in positions:
            if tensors.equal(first[index], second[index]):
                difference = None
            elif len(first) == 1:
                difference = fresh
            else:
                mixed = first[:index] + [second[index]] + first[index + 1 :]
                difference = tensors.Difference(outputs, task.forward(mixed), deviations)
                shapes_vary = shapes_vary or difference.shapes_differ
            absolute.append(difference and difference.absolute)
            relative.append(difference and difference.relative)
            share.append(difference and difference.share)
    task.report.facts(
        sensitivity_abs=absolute, sensitivity_rel=relative, sensitivity_share=share, shapes_vary=shapes_vary
    )


def check_train_mode(task, first, outputs, deviations):
    """The model in train mode. Its buffers (running statistics) are put back; that it fails there is a fact only."""
    task.report.at("train_mode")
    buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    try:
        task.model.train()
        with RandomOperators() as operators:
            difference = tensors.Difference(outputs, task.forward(first), deviations)
        task.report.facts(
            train_abs=difference.absolute, train_rel=difference.relative, train_random_ops=sorted(operators.names)
        )
    except Exception as error:
        task.report.facts(train_error=first_lines(error))
    finally:
        task.model.eval()
        for name, buffer in task.model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


def check_compiled(task, first, outputs, deviations):
    with Step(task.report, "compile"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(task.model)
        started = time.perf_counter()
        results = task.forward(first, model=compiled)
        synchronise(task.device)
        seconds = time.perf_counter() - started
        difference = tensors.Difference(outputs, results, deviations)
    task.report.facts(
        executes_compiled=True,
        compile_s=seconds,
        graph_breaks=sum(torch._dynamo.utils.counters["graph_break"].values()),
        compiled_abs=difference.absolute,
        compiled_rel=difference.relative,
        compiled_tolerance=difference.tolerance,
    )
    del results
    with Step(task.report, "compiled_timing"):
        task.report.facts(**time_calls(task, compiled, first, "compiled"))


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_clock(call):
    """Milliseconds of a call on the CPU."""
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e6


def event_clock(call):
    """Milliseconds of a call on the current CUDA stream, from event to event."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def time_calls(task, model, inputs, name):
    """The median and its company. Trials stop early, but not before three, where they would take too long."""
    clock = event_clock if task.device.type == "cuda" else wall_clock
    arguments = tensors.clone(inputs)
    times = []
    gc.collect()
    gc.disable()
    try:
        for trial in range(task.params["warmup"] + task.params["trials"]):
            if task.mutates:
                arguments = tensors.clone(inputs)
            synchronise(task.device)
            milliseconds = clock(lambda: model(*arguments))
            if trial >= task.params["warmup"]:
                times.append(milliseconds)
            if len(times) >= MINIMUM_TRIALS and sum(times) > task.params["timing_s"] * 1000:
                break
    finally:
        gc.enable()
    quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return {
        f"{name}_ms": quarters[1],
        f"{name}_min_ms": min(times),
        f"{name}_iqr_ms": quarters[2] - quarters[0],
        f"{name}_trials": len(times),
    }


def resident_bytes(field):
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def peak_memory(device, before):
    """What eager execution took at its peak: allocated on a GPU, added to the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(0, resident_bytes("VmHWM") - before)


def prepare_process(job):
    """Point every cache at this worker's own folder, and fix the number of threads."""
    folder = os.getcwd()
    os.environ.update(
        TMPDIR=folder,
        TORCHINDUCTOR_CACHE_DIR=os.path.join(folder, "inductor"),
        TRITON_CACHE_DIR=os.path.join(folder, "triton"),
    )
    tempfile.tempdir = None
    torch.set_num_threads(job["params"]["threads"])
    if job["device"] == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["memory_limit"] / total))


def measure(job, report):
    before = resident_bytes("VmRSS")
    task = Task(job, report)
    task.load()
    with torch.no_grad():
        task.build()
        first, second = draw_inputs(task)
        outputs, summary = run_eager(task, first)
        time_eager(task, first)
        report.facts(peak_memory_bytes=peak_memory(task.device, before))
        check_randomness(task, first, outputs, summary.deviations)
        check_sensitivity(task, first, second, outputs, summary.deviations)
        check_train_mode(task, first, outputs, summary.deviations)
        if job["params"]["compile"]:
            check_compiled(task, first, outputs, summary.deviations)


def run(job, descriptor):
    """Measure one task and send the facts; returns only when everything was sent."""
    report = Report(descriptor, job["nonce"])
    report.at("start")
    prepare_process(copy.deepcopy(job))
    try:
        measure(job, report)
    except TaskFailed:
        pass
    report.send(finished=True)
