"""Runs a model's answer, in a process that has torch loaded and forks one for each task.

Started by `check_server`; speaks JSON lines: {"code", "seed", ...} in, {"problem", "work", "batch_size", "walls"} out.
A task's process has walls where the system allows (`isolation` says which), and limits of memory, time, processes and
file sizes in any case. A task shares its process with the code that checks it, so it can lie about itself: then
`ops/measure` finds out, which believes nothing of what is said here.
"""

import json
import linecache
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import isolation

RESULT_BYTES = 1 << 16
TRIAL_BATCH = 3
# The tolerance of verdicts: what agrees to it counts as equal.
TOLERANCE = 1e-2
# What is noted of a call, at the file's batch size and at twice that: `estimate.Count` says what each is.
WORK = ("flops", "moved", "operators", "alive")
PROCESSES = 64
FILE_BYTES = 1 << 20


class Invalid(Exception):
    """What is wrong with the task, in words for whoever wrote it."""


# ---- in the task's process


def check(code: Any, seed: Any) -> dict[str, Any]:
    """The facts about a task that works. Raises Invalid."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    linecache.cache["task.py"] = (len(code), None, code.splitlines(keepends=True), "task.py")
    work, batch = on_meta(torch, code)
    on_cpu(torch, code, seed)
    return {"work": work, "batch_size": batch}


def run(what: str, body: Callable[[], Any]) -> Any:
    """Run a part of the task; what it raises is said with the line of the file."""
    try:
        return body()
    except Invalid:
        raise
    except MemoryError as error:
        raise Invalid(f"{what} takes too much memory, also at batch size {TRIAL_BATCH}") from error
    except BaseException as error:
        lines = [
            frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "task.py"
        ]
        at = f" (line {lines[-1]}: {linecache.getline('task.py', lines[-1]).strip()})" if lines else ""
        message = " ".join(str(error).split())[:300]
        raise Invalid(f"{what} fails{at}: {type(error).__name__}: {message}") from error


def load(torch: Any, code: str, device: str, batch: int | None = None) -> tuple[dict[str, Any], Any]:
    """`(namespace, model)`. The batch size is what the file says, or another one."""
    namespace: dict[str, Any] = {"__name__": "task"}
    with torch.device(device):
        run("the file", lambda: exec(compile(code, "task.py", "exec"), namespace))
        if batch is not None:
            namespace["batch_size"] = batch
        model = run("Model(*get_init_inputs())", lambda: namespace["Model"](*namespace["get_init_inputs"]()))
    if not isinstance(model, torch.nn.Module):
        raise Invalid("Model is no nn.Module")
    return namespace, model


def inputs_of(torch: Any, namespace: dict[str, Any], device: str) -> list[Any]:
    with torch.device(device):
        inputs = run("get_inputs()", namespace["get_inputs"])
    if not isinstance(inputs, (list, tuple)) or not inputs:
        raise Invalid("get_inputs() must return a list of tensors")
    if not all(isinstance(value, torch.Tensor) for value in inputs):
        raise Invalid("get_inputs() must return tensors only")
    return list(inputs)


def output_of(torch: Any, model: Any, inputs: list[Any]) -> Any:
    with torch.no_grad():
        output = run("forward", lambda: model(*inputs))
    if not isinstance(output, torch.Tensor):
        raise Invalid(f"forward must return one tensor, not {type(output).__name__}")
    if output.dtype != torch.float32:
        raise Invalid(f"forward must return float32, not {str(output.dtype).removeprefix('torch.')}")
    return output


def on_meta(torch: Any, code: str) -> tuple[dict[str, list[Any]], int]:
    """The shapes at full size, without computing: what a call costs at two batch sizes, and the file's batch size."""
    from estimate import counted

    namespace, model = load(torch, code, "meta")
    batch = namespace["batch_size"]
    counts = []
    for size in (batch, 2 * batch):
        namespace["batch_size"] = size
        inputs = inputs_of(torch, namespace, "meta")
        for number, value in enumerate(inputs):
            if value.dim() == 0 or value.shape[0] != size:
                raise Invalid(
                    f"input {number} has the shape {tuple(value.shape)}: its first dimension must be batch_size"
                )
        with torch.device("meta"):
            output = output_of(torch, model, inputs)
            counts.append(run("forward", lambda inputs=inputs: counted(model, inputs)))
        if output.dim() == 0 or output.shape[0] != size:
            raise Invalid(f"the output has the shape {tuple(output.shape)}: its first dimension must be batch_size")
    return {name: [getattr(count, name) for count in counts] for name in WORK}, batch


def on_cpu(torch: Any, code: str, seed: int) -> None:
    """The values at a small batch: finite, spread, repeatable, and dependent on every input."""
    torch.manual_seed(seed)
    namespace, model = load(torch, code, "cpu", TRIAL_BATCH)
    inputs, others = inputs_of(torch, namespace, "cpu"), inputs_of(torch, namespace, "cpu")
    kept = [value.clone() for value in inputs]
    output = output_of(torch, model, inputs)
    if not all(torch.equal(value, copy) for value, copy in zip(inputs, kept, strict=False)):
        raise Invalid("forward writes into its inputs")
    if not torch.isfinite(output).all():
        raise Invalid("the output is not finite")
    if output.numel() > 1 and not apart(torch, output.flatten()[1:], output.flatten()[0]) > 0:
        raise Invalid(f"the output is constant: every element is about {output.flatten()[0].item():.4g}")
    if not torch.equal(output, output_of(torch, model, inputs)):
        raise Invalid("forward is random: the same inputs give different outputs")
    if not torch.equal(output, output_of(torch, model.eval(), inputs)):
        raise Invalid("forward does something else in train mode than in eval mode")
    changed = apart(torch, output, output_of(torch, model, others))
    if changed < 0.5:
        raise Invalid(f"the output hardly depends on the inputs: other inputs change {changed:.0%} of its elements")
    for number, other in enumerate(others):
        mixed = [*inputs[:number], other, *inputs[number + 1 :]]
        if apart(torch, output, output_of(torch, model, mixed)) < 0.2:
            raise Invalid(f"the output hardly depends on input {number}")


def apart(torch: Any, one: Any, other: Any) -> Any:
    """The share of elements that differ by more than the tolerance."""
    return ((one - other).abs() > TOLERANCE + TOLERANCE * other.abs()).float().mean().item()


# ---- around it


def run_task(job: dict[str, Any], result: int) -> None:
    """Process 1 of the task's namespaces: puts up the walls, then checks the task."""
    isolation.die_with_parent()
    user = isolation.task_user(job["user"]) if job["walls"] else None
    if job["walls"]:
        isolation.wall_off_file_system(job["scratch"], FILE_BYTES, user)
    isolation.limit_resources(
        data_bytes=job["memory_bytes"],
        file_bytes=FILE_BYTES,
        cpu_seconds=int(job["time_limit_s"]) + 5,
        # Where the task is a user among others, theirs count too.
        processes=PROCESSES if user is not None else 1 << 16,
    )
    if user is None or not isolation.become(user):
        isolation.drop_privileges()
    isolation.die_with_parent()
    os.chdir(job["scratch"])
    try:
        answer = {"problem": None, **check(job["code"], job["seed"])}
    except Invalid as problem:
        answer = {"problem": str(problem)[:800]}
    except Exception as error:
        # Not the task's doing: this program's own code failed.
        at = traceback.extract_tb(error.__traceback__)[-1]
        answer = {"failure": f"{type(error).__name__}: {error} ({os.path.basename(at.filename)}:{at.lineno})"[:800]}
    answer["walls"] = job["walls"]
    os.write(result, json.dumps(answer).encode()[:RESULT_BYTES])


def keep_task(job: dict[str, Any], result: int) -> int:
    """The keeper: makes namespaces, has the task run in them, and waits. It dies with the server, the task with it."""
    isolation.die_with_parent()
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    job["walls"] = job["walls"] and isolation.enter_namespaces()
    task = os.fork()
    if task == 0:
        guarded(lambda: run_task(job, result))
    os.close(result)
    _, status = os.waitpid(task, 0)
    return min(255, abs(os.waitstatus_to_exitcode(status)))


def guarded(body: Callable[[], int | None]) -> None:
    """A forked process must never return into its parent's code."""
    code = 1
    try:
        code = body() or 0
    finally:
        os._exit(code)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """One job in processes of its own: its answer."""
    reader, writer = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(reader)
        guarded(lambda: keep_task(job, writer))
    os.close(writer)
    deadline = time.monotonic() + job["time_limit_s"]
    received, timed_out = b"", False
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            timed_out = True
            break
        part = os.read(reader, RESULT_BYTES)
        received += part
        if not part or len(received) > RESULT_BYTES:
            break
    os.close(reader)
    code = end(keeper, kill=timed_out or len(received) > RESULT_BYTES)
    if timed_out:
        return {"problem": f"it takes longer than {job['time_limit_s']:g} s at batch size {TRIAL_BATCH}: too large"}
    try:
        answer = json.loads(received)
        is_answer = isinstance(answer, dict) and ("problem" in answer or "failure" in answer)
        return answer if is_answer else {"problem": "its results are garbled"}
    except ValueError:
        return {"problem": f"its process ended with code {code}; it may take more memory than there is"}


def end(keeper: int, kill: bool) -> int:
    """Wait for the keeper, then end whatever is left of the task: without namespaces its children come to us."""
    if kill:
        os.kill(keeper, signal.SIGKILL)
    _, status = os.waitpid(keeper, 0)
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            left = [int(word) for word in file.read().split()]
        if not left:
            return min(255, abs(os.waitstatus_to_exitcode(status)))
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def main() -> None:
    isolation.die_with_parent()
    isolation.adopt_orphans()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    import estimate

    torch.set_num_threads(1)
    # The first call of either imports a good deal more, which forks then share.
    with torch.no_grad(), torch.device("meta"):
        estimate.counted(torch.nn.Linear(2, 2), [torch.empty(2, 2)])
    print(json.dumps({"ready": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
