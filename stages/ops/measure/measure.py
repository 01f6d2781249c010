"""`ops/measure`: runs each task in a worker process and records facts about it. It judges nothing.

This is the program that the engine starts: it checks the request against the machine, then answers rows, several at a
time where it has the cores. `slots` gives tasks to workers, `supervisor` watches these, `zygote` forks them,
`task_worker` measures inside one, `isolation` is the walls, `gpu_gate` decides who may use the GPU, `columns` are the
facts.
"""

import collections
import importlib.metadata
import os
import platform
import queue
import re
import shutil
import sys
import tempfile
import threading
import time
from typing import Any, Literal

import cuda_agent_stage as stage
import gpu_gate
import slots
import supervisor
from granted_device import device_type

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
UNITS.update({f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")})

TASKS_PER_GPU_WORKER = 200
PARAMS_OF_WORKERS = ("compile", "threads", "trials", "warmup", "settled", "timing_s", "slow_ms")
TELL_SECONDS = 60
SWITCH_SECONDS = 0.0005

COMPILER_HINT = (
    "torch.compile needs a C++ compiler (g++ or clang++; the variable CXX names another) and Python's headers; "
    "`compile: false` measures eager execution only"
)


def parse_bytes(text: str, name: str) -> int:
    """A size such as 4GiB, or a plain number of bytes."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2] not in UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise stage.StageError(f"{name}: {text!r} is not a size such as 4GiB", kind="params")
    return int(float(match[1]) * UNITS[match[2]])


def cpu_model() -> str | None:
    """The CPU as /proc/cpuinfo names it, or None where it does not."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return None


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where the system does not show it."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def check_compiler() -> None:
    """Fail before the first row where torch.compile can't work at all."""
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else ["g++", "clang++", "c++"])):
        missing = f"the C++ compiler {named!r}" if named else "a C++ compiler"
        raise stage.StageError(f"{missing} is not installed", kind="environment", hint=COMPILER_HINT)


def check_device(program: stage.Program, server: supervisor.Zygote, device: str) -> None:
    """The declared device must be the one that measurements will be taken on."""
    if device == "cpu":
        found = cpu_model()
    else:
        answer = server.probe("probe_cuda", device="cuda") or {}
        found = answer.get("device_name")
        if found is None:
            problem = answer.get("problem") or "a worker that was to look for one ended"
            raise stage.StageError(
                f"torch sees no CUDA device: {problem}", kind="device", hint="`cuda-agent doctor` says more"
            )
        driver = driver_version()
        if driver and driver != program.device.get("driver"):
            raise stage.StageError(
                f"the NVIDIA driver is {driver}, but results would be filed under {program.device.get('driver')}",
                kind="device",
            )
    if found is not None and found != program.device["model"]:
        raise stage.StageError(
            f"this is a {found}, but results would be filed under {program.device['model']}", kind="device"
        )


def check_threads(program: stage.Program) -> None:
    threads, granted = program.params["threads"], max(1, program.resources["cpu"])
    if threads > granted:
        raise stage.StageError(
            f"threads is {threads}, but the stage was granted {granted} CPU cores",
            kind="params",
            hint=f"set `resources: {{ cpu: {threads} }}`",
        )


def worker_environment() -> dict[str, str]:
    """What workers see of the environment: nothing of the engine's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CUDA_AGENT_")}


def start(server: supervisor.Zygote, *, compile: bool) -> dict[str, Any]:
    try:
        return server.start()
    except supervisor.WorkerUnavailable as error:
        hint = COMPILER_HINT if compile else None
        raise stage.StageError(f"torch does not start: {error}", kind="environment", hint=hint) from error


def setup_for(program: stage.Program, device: str, limits: dict[str, Any]) -> dict[str, Any]:
    """What every worker of this program is told once."""
    cpu_seconds = int(program.params["time_limit_s"] * program.params["threads"]) + 10
    return {
        "action": "measure",
        "device": device,
        "params": {name: program.params[name] for name in PARAMS_OF_WORKERS},
        **limits,
        "lives_on": tasks_per_worker(program, device) > 1,
        # A worker that lives for many tasks is watched by the clock on the wall alone.
        **({"cpu_seconds": cpu_seconds} if tasks_per_worker(program, device) == 1 else {}),
    }


def job_for(program: stage.Program, row: stage.Row, limits: dict[str, Any]) -> dict[str, Any]:
    return {
        "code": row["columns"]["code"],
        "seed": row["seed"],
        "time_limit_s": float(program.params["time_limit_s"]),
        "memory_limit": limits["memory_limit"],
        "params": {"compile": program.params["compile"]},
    }


def tasks_per_worker(program: stage.Program, device: str) -> int:
    return program.params["tasks_per_worker"] or (TASKS_PER_GPU_WORKER if device == "cuda" else 1)


def workers_wanted(program: stage.Program, device: str) -> int:
    """How many tasks to measure side by side."""
    granted = max(1, program.resources["cpu"])
    usual = max(1, granted - 1) if device == "cuda" else max(1, granted // program.params["threads"])
    return program.params["workers"] or usual


def provenance(program: stage.Program) -> dict[str, Any]:
    """What every row was measured with, so that a published row says it by itself."""
    model = program.device["model"] if program.device else platform.processor()
    return {"device": model, "torch": importlib.metadata.version("torch"), "threads": program.params["threads"]}


class Measuring:
    """The slots of one program, each a thread that measures one task at a time."""

    def __init__(self, program: stage.Program, server: supervisor.Zygote, device: str, limits: dict[str, Any]) -> None:
        self.program, self.server, self.device, self.limits = program, server, device, limits
        self.setup = setup_for(program, device, limits)
        self.rows: queue.Queue[stage.Row | None] = queue.Queue()
        self.company = slots.Company()
        self.spent = collections.Counter()
        self.answered, self.began, self.told = 0, time.monotonic(), time.monotonic()
        self._starting, self._booking = threading.Lock(), threading.Lock()
        self._failure: Exception | None = None

    def run(self, count: int) -> None:
        threads = [threading.Thread(target=self._slot, args=(number, count)) for number in range(count)]
        # A daemon: it may be waiting for rows when a failure ends the program.
        threading.Thread(target=self._read, args=(count,), daemon=True).start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _read(self, count: int) -> None:
        for row in self.program.rows():
            self.rows.put(row)
        self._let_go(count)

    def _let_go(self, count: int) -> None:
        for _ in range(count):
            self.rows.put(None)

    def _slot(self, number: int, count: int) -> None:
        slot = slots.Slot(self.server, number, self.company, tasks_per_worker(self.program, self.device))
        try:
            while self._failure is None and (row := self.rows.get()) is not None:
                self._answer(slot, row)
        except Exception as error:
            # The first failure ends the program; rows without an answer are done by another try.
            self._failure = self._failure or error
            self._let_go(count)
        finally:
            slot.close()

    def _answer(self, slot: slots.Slot, row: stage.Row) -> None:
        """Measure one row. Where no worker could be had, say so and go on with a new zygote: the task is not to
        blame."""
        program = self.program
        if not isinstance(row["columns"].get("code"), str):
            program.answer(row, status="rejected", reason="no code", detail="the column code is null")
            return
        try:
            self._ensure_started()
            facts, spent = slot.measure(self.setup, job_for(program, row, self.limits))
        except supervisor.WorkerUnavailable as error:
            self._restart()
            program.answer(row, status="failed", reason="no worker", detail=str(error))
            return
        facts["waiting_s"] = sum(seconds for name, seconds in spent.items() if name.startswith("waiting "))
        program.answer(row, {"rows": [facts | provenance(program)]})
        self._book(spent)

    def _ensure_started(self) -> None:
        with self._starting:
            if not self.server.alive():
                start(self.server, compile=self.program.params["compile"])

    def _restart(self) -> None:
        """Ends the zygote, and with it what workers there are, unless that has been done."""
        with self._starting:
            if not self.server.can_fork():
                self.server.stop()

    def _book(self, spent: dict[str, float]) -> None:
        with self._booking:
            self.spent.update(spent)
            self.answered += 1
            if time.monotonic() - self.told < TELL_SECONDS:
                return
            self.told = time.monotonic()
        self.tell(level="info")

    def tell(self, level: Literal["debug", "info", "warning", "error"]) -> None:
        """Where the time goes: of the workers, by step, and of the GPU."""
        if not self.answered:
            return
        seconds = time.monotonic() - self.began
        steps = {name: value for name, value in self.spent.items() if not name.startswith("holding ")}
        whole = sum(steps.values()) or 1.0
        parts = sorted(steps.items(), key=lambda item: -item[1])[:6]
        text = ", ".join(f"{name.replace('_', ' ')} {value / whole:.0%}" for name, value in parts)
        message = f"{self.answered / seconds:.2f} tasks a second; workers: {text}"
        if self.server.gate is not None:
            shares = self.server.gate.shares()
            alone = {name: value for name, value in self.spent.items() if name.startswith("holding alone")}
            choosing = alone.get("holding alone: compile", 0.0) / (sum(alone.values()) or 1.0)
            message += (
                f"; GPU: {shares['alone'] * (1 - choosing):.0%} one task's clock, "
                f"{shares['alone'] * choosing:.0%} the compiler's choice of kernels, "
                f"{shares['shared']:.0%} computing, {shares['idle']:.0%} nobody"
            )
        self.program.log(message, level=level)


def work(program: stage.Program) -> None:
    if platform.system() != "Linux":
        raise stage.StageError(f"tasks are measured on Linux, not on {platform.system()}", kind="environment")
    params = program.params
    limits = {name: parse_bytes(params[name], name) for name in ("memory_limit", "disk_limit", "gpu_memory_limit")}
    device = device_type(program)
    check_threads(program)
    if params["compile"]:
        check_compiler()
    supervisor.hide_from_tasks()
    # A thread for each worker: whoever waits for its place on the GPU should not also wait 5 ms for Python.
    sys.setswitchinterval(SWITCH_SECONDS)
    gate = None
    if device == "cuda":
        gate = gpu_gate.Gate(path=gpu_gate.lock_path(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]))
    with tempfile.TemporaryDirectory(prefix="measure-", dir=os.getcwd(), ignore_cleanup_errors=True) as folder:
        server = supervisor.Zygote(
            folder,
            compile=params["compile"],
            environment=worker_environment(),
            log=program.log,
            device=device,
            gate=gate,
        )
        try:
            found = start(server, compile=params["compile"])
            check_device(program, server, device)
            count = workers_wanted(program, device)
            walls = "namespaces" if server.walls else "limits"
            program.log(f"ready: {found}, {count} at a time, isolated by {walls}", level="debug")
            measuring = Measuring(program, server, device, limits)
            measuring.run(count)
            measuring.tell(level="info" if device == "cuda" else "debug")
        finally:
            server.stop()


if __name__ == "__main__":
    stage.main(work)
