"""`ops/rates`: how fast the device is, in plain figures and for each usage of each crawled operator.

The operators run in a worker process, one job at a time; a job that ends the worker or takes too long costs its own
answer. What is written is coarse on purpose: the sizes of tasks depend on it, and should not change with every
measurement of the same device.
"""

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

import cuda_agent_stage as stage
from estimate import measured_device, milliseconds
from granted_device import device_type

if TYPE_CHECKING:
    from estimate import Device

HERE = os.path.dirname(os.path.abspath(__file__))
FACTOR_STEP = 2**0.5
FIGURE_STEP = 1.1
START_SECONDS = 180
# Elements of a stream. On a GPU it is several times the cache; on a CPU there is no time for as much.
ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 20}
KEEP_BYTES = 8 << 30
# In which order the ranks of an operator are measured: where time runs out, the first ones stand for the others.
RANK_ORDER = (4, 2, 3, 5)
CLASS_RANK = 0


class Worker:
    """A process that answers jobs; started again after one that it did not survive."""

    def __init__(self, device: str, log: Callable[..., Any]) -> None:
        self.command = [sys.executable, os.path.join(HERE, "rate_worker.py"), device]
        self.log, self.process, self.name = log, None, None

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_AGENT_")}
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout, self.lines), daemon=True).start()
        ready = self._next(START_SECONDS)
        if ready is None:
            self.stop()
            raise stage.StageError("torch does not start in a process of its own", kind="environment")
        self.name = ready["ready"]
        if self.name is None:
            self.stop()
            raise stage.StageError("torch sees no CUDA device", kind="device", hint="`cuda-agent doctor` says why")

    @staticmethod
    def _read(pipe: TextIO, lines: queue.Queue[Any]) -> None:
        for line in pipe:
            lines.put(line)
        lines.put(None)

    def _next(self, seconds: int) -> dict[str, Any] | None:
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            return None
        return None if line is None else json.loads(line)

    def do(self, job: dict[str, Any], seconds: int) -> dict[str, Any]:
        """The answer to a job, with `reason` in place of figures where there are none."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        started = time.monotonic()
        answer = self._next(seconds)
        if answer is None:
            late = time.monotonic() - started >= seconds
            self.stop()
            return {"reason": "timeout" if late else "the process ended"}
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def coarse(value: float, step: float) -> float:
    """The nearest power of `step`, to three significant digits."""
    return float(f"{step ** round(math.log(value, step)):.3g}")


def device_rows(figures: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of the device's own figures."""
    return [row("device", name, None, None, coarse(value, FIGURE_STEP), None, value) for name, value in figures.items()]


def row(
    kind: str,
    name: str,
    usage: int | None,
    rank: int | None,
    value: float | None,
    reason: str | None,
    measured: float | None,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "usage": usage,
        "rank": rank,
        "value": value,
        "reason": reason,
        "measured": measured,
    }


def jobs_of(operators: list[dict[str, Any]], device: str) -> list[tuple[str, int, int, dict[str, Any]]]:
    """`(name, usage's number, rank, job)` of everything to measure, the most useful first."""
    elements = ELEMENTS[device]
    passes = [[] for _ in RANK_ORDER]
    for item in operators:
        usages = json.loads(item["usages"])
        if item["library"] == "transformers":
            job = {
                "action": "class",
                "row": {k: item[k] for k in ("qualified", "version", "source", "path")},
                "usage": usages[0],
                "elements": elements,
                "keep_bytes": KEEP_BYTES,
            }
            passes[0].append((item["operator"], 0, CLASS_RANK, job))
            continue
        for number, usage in enumerate(usages):
            ranks = sorted(usage["ranks"], key=RANK_ORDER.index)
            for order, rank in enumerate(ranks):
                job = {
                    "action": "operator",
                    "usage": usage,
                    "rank": rank,
                    "elements": elements,
                    "keep_bytes": KEEP_BYTES,
                }
                passes[order].append((item["operator"], number, rank, job))
    return [entry for entries in passes for entry in entries]


def factor_of(device: "Device", answer: dict[str, Any]) -> float:
    """Seconds over the roofline's estimate."""
    if "operators" in answer:
        number = max(1, answer["operators"])
        estimate = number * milliseconds(device, answer["flops"] / number, answer["moved"] / number, 0)
    else:
        estimate = milliseconds(device, answer["flops"], answer["moved"], answer["steps"])
    return answer["seconds"] * 1e3 / estimate


def measured_rows(
    worker: Worker,
    operators: list[dict[str, Any]],
    kind: str,
    device: "Device",
    budget_s: int,
    limit_s: int,
    progress: Callable[..., Any],
) -> list[dict[str, Any]]:
    """A row for each usage at each rank; once the budget is spent, only its first rank counts and the rest is left."""
    jobs = jobs_of(operators, kind)
    ends = time.monotonic() + budget_s
    rows = []
    for done, (name, usage, rank, job) in enumerate(jobs):
        answer = {"reason": "out of time"} if time.monotonic() > ends else worker.do(job, limit_s)
        if "reason" in answer:
            rows.append(row("operator", name, usage, rank, None, answer["reason"], None))
        else:
            factor = factor_of(device, answer)
            rows.append(row("operator", name, usage, rank, coarse(factor, FACTOR_STEP), None, factor))
        if done % 50 == 0 or done + 1 == len(jobs):
            progress(done + 1, len(jobs), "measurements")
    return sorted(rows, key=lambda item: (item["name"], item["usage"], item["rank"]))


def check_model(program: stage.Program, kind: str, name: str | None) -> None:
    """The GPU that was measured must be the one that the result is filed under."""
    if kind == "cuda" and name != program.device["model"]:
        raise stage.StageError(
            f"this is a {name}, but results would be filed under {program.device['model']}", kind="device"
        )


def work(program: stage.Program) -> None:
    kind = device_type(program)
    operators = program.read_table(
        "operators", ["operator", "qualified", "library", "version", "family", "usages", "source", "path"]
    )
    worker = Worker(kind, program.log)
    limit_s = program.params["time_limit_s"]
    try:
        worker.start()
        check_model(program, kind, worker.name)
        figures = worker.do({"action": "device", "keep_bytes": KEEP_BYTES}, START_SECONDS)
        if "reason" in figures:
            raise stage.StageError(f"the device can't be measured: {figures['reason']}", kind="device")
        rows = device_rows(figures)
        device = measured_device(kind, {item["name"]: item["value"] for item in rows})
        rows += measured_rows(worker, operators, kind, device, program.params["budget_s"], limit_s, program.progress)
    finally:
        worker.stop()
    report(program, rows, figures)
    program.write_table("rates", rows)


def report(program: stage.Program, rows: list[dict[str, Any]], figures: dict[str, float]) -> None:
    """The device's figures, and how many usages have none."""
    for name, value in figures.items():
        program.metric(name, value)
    missing = [item for item in rows if item["value"] is None]
    program.log(
        f"{figures['gbytes_per_s']:.0f} GB/s, {figures['gflops'] / 1e3:.1f} TFLOPS in float32, "
        f"{figures['operator_us']:.1f} us an operator; {len(rows) - len(missing)} factors, {len(missing)} without"
    )
    reasons = sorted({item["reason"].split(":")[0] for item in missing})
    for reason in reasons:
        number = sum(item["reason"].split(":")[0] == reason for item in missing)
        program.log(f"no factor, {reason}: {number}", level="debug")
    program.metric("without_factor", len(missing))


if __name__ == "__main__":
    stage.main(work)
