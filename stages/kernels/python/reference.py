"""The trusted side of an evaluation: it has torch, the task, its inputs and the right answers, and judges.

    python reference.py --device cpu|cuda:N [--parent-pid P] [--arena-limit BYTES] [--compiler]

imports torch without touching CUDA, prints one line `{"ready": true, "torch", "cuda", "python", "device"}`, and forks a
worker for each connection: importing takes seconds, a fork milliseconds. Its standard input is a Unix socket, over
which connections come as descriptors, each with one byte: there is no name that anybody else could connect to. It ends
when that closes, and its workers end with it; a worker ends with its connection, and its crash costs nobody else
anything: its client reads an error of the kind `ended`. Nothing of a candidate ever runs here. Task code does: what it
prints goes to stderr.

Messages are JSON lines. A worker first sends `{"hello": {"pid"}}`; then each request gets one reply, `{"ok": {…}}` or
`{"error": {"kind", "message", "hint", "line"}}`, in order (kinds: refusal.py). Numbers that are NaN or infinite are
`null`. A worker is one thread and answers nothing while task code runs: a time limit is the caller's, who kills the
pid. A worker whose GPU context an error has spoilt replies and ends.

| do | fields, with what they are if left out | reply |
|---|---|---|
| `limit` | `bytes` = null | nothing; torch may have so much of the GPU's memory, or all of it |
| `task` | the task's fields | `spec` (TaskSpec), `eager_ms`, `device`, `gpu` (what its driver says of it), `fixed_inputs` (those that never vary), `working_bytes` (of a GPU, for screening) |
| `steps` | the task's fields | `lines`: the forward as elementary steps (steps.py), in which `$0`, `$1`, … are the arguments; empty where it has none |
| `begin` | `task`, `seed` (64 bits in hex), `scratch_bytes` = 0, `sets` = 1 | `arena`, `sets` |
| `draw` | `set` = 0, `trial` = the last, `pattern` = 0 or 1, `again` = false, `quick` = false (the next judgement is quick_look.py's, where that finds all well) | nothing; the set is filled |
| `judge` | `set` = 0 | `outputs`, `inputs_changed`, `red_zones` |
| `ahead` | `draws`: for each `trial`, `pattern`, `quick`, as in `draw` | `drawn`: so many, from the first on, are drawn into private images now (ahead.py); there is no memory for the others |
| `place` | `trial` of one drawn ahead, `set`, `keep` = null: a trial | nothing; first `keep` is done, then the set is filled with what was drawn |
| `keep` | `trial`, that was placed and has run | nothing; what the run left is copied to private memory |
| `judge_kept` | `trials`: a list | `judged`: for each what `judge` tells; they are gone then |
| `prepare` | `which`, `cache` = null, `task` = the begun one | `seconds`, `cache`, `error` |
| `time` | `which`, or a list of them, `set` = 0 | `ms`, `hidden` (whether the spin hid all launches), or lists of them |
| `times` | `task`, `which`: a list, `trials`, `seed` (64 bits in hex) | `ms`: for each of the list, the milliseconds of its trials; each trial on inputs of its own, in random order |
| `kernels` | `which`, `task` = the begun one | `kernel_ms`, `kernels` (how many) |
| `screen` | `task` = the begun one, `steps` = false | with `steps` one step, and nothing before the last one; else `passes`, `tried`, `failed`, `sensitivity`, `outputs`, `fixed_inputs`: screen.py |
| `end` | | nothing; frees the sets and old arenas |
| `forget` | | nothing; frees every task that is kept for speed |

- The task's fields: `code`, `name` = "task.py" (for messages), `set` = {} (constants to override), `protocol` =
  `cuda-agent` (the model evaluates; `kernelbench`: it trains), `policy` = `strict` (policy.py), `seed` = 0 (of the
  weights). `task` and `steps` have them at their top level; elsewhere they are an object `task`. The last 16 tasks are
  kept, so that sending one again costs nothing.
- `which`: `eager`, `compile`, `autotune` (timing.py).
- `arena`: `path` or `ipc_handle` (hex), `bytes`, `generation`. One of an older generation is freed at the `begin` or
  `end` after the `begin` that replaced it: the runner must have closed it by then. On the CPU device its file is
  removed, which leaves mappings intact.
- `sets`: for each, `arguments`: [[offset, bytes], …] in the order of the ABI, and `scratch`: [offset, bytes].
- `outputs`: for each, `name`, `pass`, `reason` (null, `unwritten`, `nonfinite`, `zeros`, `values`: the first that
  holds), `mismatched` and `total` elements, `worst` (null where all is exact, else `index`, `expected`, `got`,
  `error`, `allowed`, and `expected_text` and `got_text`, null where the numbers say it all), `nonfinite` (elements
  that are not finite where a number was expected), `held` (that hold this run's poison), `unwritten` (that held it in
  both runs; null before the second), `first_unwritten` (an index), `error_rms`, `reference_error_rms` (eager's own),
  `allowed_rms`: the last three null where the policy has no use for them.
- `red_zones`: `near` (a tensor, or "scratch"), `side` ("before" or "after") and `offset` of the nearest byte that was
  written, counted from 0 at the tensor's end, or from 1 backwards at its start.
"""  # noqa: E501 (a table)

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import stat
import sys
from typing import TYPE_CHECKING, Any

import fork_server
import isolation

fork_server.prepare_environment(os.environ, threads=os.environ.get("CUDA_AGENT_THREADS", "1"))

import torch  # noqa: E402

import arena as arenas  # noqa: E402
import device as devices  # noqa: E402
import inputs  # noqa: E402
import probe  # noqa: E402
import screen  # noqa: E402
import timing  # noqa: E402
from ahead import Ahead  # noqa: E402
from argument_sets import ArgumentSets  # noqa: E402
from refusal import Refusal, first_line, is_memory_error, poisons_gpu, unsupported  # noqa: E402
from task import Task  # noqa: E402

if TYPE_CHECKING:
    from ahead import Run
    from argument_sets import ArgumentSet
    from device import Device

TASKS_KEPT = 16
UNCOUNTED_TRIALS = 1
CLOCK_TRIALS = 1 << 20
"""Trials of the clock draw inputs that no check has seen."""
LONGEST_LINE = 1 << 30


class Fields:
    """A request's fields, checked as they are read."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request

    def get(self, name: str, kind: tuple[type, type] | type, default: Any = ...) -> Any:
        value = self._request.get(name, default)
        if value is ...:
            raise Refusal("internal", f"the request lacks the field {name}")
        is_right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if value is not default and not is_right:
            words = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise Refusal("internal", f"the field {name} is {value!r}, not a {words}")
        return value

    def count(self, name: str, default: Any, least: int = 0) -> int:
        value = self.get(name, int, default)
        if value < least:
            raise Refusal("internal", f"the field {name} is {value}: at least {least}")
        return value

    def draw(self, trial: Any = ...) -> tuple[int, int, bool]:
        """Of a draw: trial, pattern, and whether it is judged quickly."""
        pattern = self.count("pattern", 0)
        if pattern > 1:
            raise Refusal("internal", f"the field pattern is {pattern}, not 0 or 1")
        return self.count("trial", trial), pattern, self.get("quick", bool, False)

    def task(self) -> dict[str, Any]:
        return {
            "code": self.get("code", str),
            "name": self.get("name", str, "task.py"),
            "set": self.get("set", dict, {}),
            "protocol": self.get("protocol", str, "cuda-agent"),
            "policy": self.get("policy", str, "strict"),
            "seed": self.count("seed", 0),
        }


class Worker:
    """Answers the requests of one connection."""

    def __init__(self, device: "Device", arena_limit: int | None) -> None:
        self.device = device
        self.arena = arenas.Arena(device, arena_limit)
        self._tasks = collections.OrderedDict()
        self._timers = {}
        self._sets = None
        self._ahead = None
        self._secret = 0
        self._screening = None
        self._broken = None

    def start_device(self, sleeps: bool = False) -> None:
        """Makes the device ready before the first request comes."""
        try:
            self.device.start(sleeps)
        except Exception as error:
            self._broken = f"{self.device.home} can't be used: {first_line(error)}"

    def handle(self, request: dict[str, Any] | list[Any]) -> dict[str, Any]:
        if self._broken is not None:
            raise Refusal("internal", self._broken, "does nvidia-smi list the GPU?")
        if not isinstance(request, dict):
            raise Refusal("internal", "a request is an object")
        action = ACTIONS.get(str(request.get("do")))
        if action is None:
            raise Refusal("internal", f"there is no request {request.get('do')!r}", f"use {', '.join(ACTIONS)}")
        try:
            return action(self, Fields(request))
        except Refusal as refusal:
            if refusal.kind != "memory" or not self._drop_idle_tasks():
                raise
        return action(self, Fields(request))

    def _drop_idle_tasks(self) -> bool:
        """Frees what is only kept for speed; whether that was anything."""
        begun = self._sets.task if self._sets is not None else None
        idle = [key for key, task in self._tasks.items() if task is not begun]
        for key in idle:
            self._forget(key)
        self.device.release_stock()
        return bool(idle)

    def _forget(self, key: bytes) -> None:
        task = self._tasks.pop(key)
        self._timers.pop(task, None)
        task.source.forget()

    def _task(self, fields: dict[str, Any]) -> Task:
        """The task with these fields, made now or before."""
        key = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).digest()
        if key not in self._tasks:
            self._tasks[key] = Task(fields, self.device, self.arena)
        self._tasks.move_to_end(key)
        while len(self._tasks) > TASKS_KEPT:
            self._forget(next(iter(self._tasks)))
        return self._tasks[key]

    def _named_or_begun_task(self, fields: Fields) -> Task:
        named = fields.get("task", dict, None)
        if named is not None:
            return self._task(Fields(named).task())
        return self._begun().task

    def _begun(self) -> ArgumentSets:
        if self._sets is None:
            raise Refusal("internal", "no sets: `begin` comes first")
        return self._sets

    def _timer(self, task: Task) -> timing.Timer:
        if task not in self._timers:
            self._timers[task] = timing.Timer(task)
        return self._timers[task]

    def do_limit(self, fields: Fields) -> dict[str, Any]:
        self.device.limit_memory(fields.get("bytes", int, None))
        return {}

    def do_task(self, fields: Fields) -> dict[str, Any]:
        task = self._task(fields.task())
        # Who waits for memory now must not keep what loading took.
        self.device.release_stock()
        return {
            "spec": task.spec(),
            "eager_ms": task.eager_ms,
            "device": self.device.describe(),
            "gpu": self.device.facts(),
            "fixed_inputs": task.fixed_inputs,
            "working_bytes": task.working_bytes(),
        }

    def do_steps(self, fields: Fields) -> dict[str, list[str]]:
        return {"lines": self._task(fields.task()).steps()}

    def do_begin(self, fields: Fields) -> dict[str, Any]:
        secret = parse_secret(fields.get("seed", str))
        scratch, sets = fields.count("scratch_bytes", 0), fields.count("sets", 1, least=1)
        self._sets = self._ahead = None
        self.device.trim_stock()
        task = self._task(Fields(fields.get("task", dict)).task())
        if task.degenerate is not None:
            raise unsupported(
                task.degenerate, "no answer to it deserves a verdict: use another policy, sizes or inputs"
            )
        with task.running():
            self._sets = ArgumentSets(task, self.arena, scratch, sets, self.device.available_memory())
        self._secret = secret
        return {"arena": self.arena.describe(), "sets": [each.describe() for each in self._sets.sets]}

    def do_draw(self, fields: Fields) -> dict[str, Any]:
        sets = self._begun()
        number = fields.count("set", 0)
        chosen = sets[number]
        self._check_free(number)
        trial, pattern, quick = fields.draw(chosen.trial or 0)
        again = fields.get("again", bool, False)
        if again and chosen.trial != trial:
            raise Refusal("internal", f"the last draw of this set was trial {chosen.trial}, not {trial}")
        with sets.task.running():
            if not again:
                self._draw_for(chosen, trial, quick)
            chosen.fill(pattern)
        self.device.synchronize()
        return {}

    def _draw_for(self, chosen: "ArgumentSet | Run", trial: int, quick: bool) -> None:
        """New inputs for a set, or for a run that has none yet."""
        task, seed = self._sets.task, inputs.derive(self._secret, "inputs", trial)
        is_probe = not quick and task.probe is not None and probe.is_probe(self._secret, trial)
        values = task.draw_sparse(seed) if is_probe else task.draw(seed)
        task.check_draw(values)
        weights = inputs.derive(self._secret, "weights", trial)
        chosen.take_inputs(task, values, trial, weights, quick, is_probe)

    def _check_free(self, number: int) -> None:
        if self._ahead is not None:
            self._ahead.check_free(number)

    def do_judge(self, fields: Fields) -> dict[str, list[dict[str, Any] | str]]:
        sets = self._begun()
        number = fields.count("set", 0)
        self._check_free(number)
        with sets.task.running():
            return sets[number].judge()

    def _drawn_ahead(self) -> Ahead:
        if self._ahead is None:
            self._ahead = Ahead(self._begun(), self.device.ahead_bytes())
        return self._ahead

    def do_ahead(self, fields: Fields) -> dict[str, int]:
        ahead, drawn = self._drawn_ahead(), []
        draws = [Fields(each) for each in fields.get("draws", list)]
        try:
            with self._sets.task.running():
                for trial, pattern, quick in [each.draw() for each in draws]:
                    if not ahead.draw(trial, pattern, quick, lambda run, of=(trial, quick): self._draw_for(run, *of)):
                        break
                    drawn.append(trial)
        except Refusal:
            ahead.drop(drawn)
            raise
        # Who gives way to others must have nothing left to do on the card.
        self.device.synchronize()
        return {"drawn": len(drawn)}

    def do_place(self, fields: Fields) -> dict[str, Any]:
        ahead, sets = self._drawn_ahead(), self._begun()
        trial, number, kept = fields.count("trial", ...), fields.count("set", 0), fields.get("keep", int, None)
        with sets.task.running():
            if kept is not None:
                ahead.keep(kept)
            ahead.put(trial, number)
        self.device.synchronize()
        return {}

    def do_keep(self, fields: Fields) -> dict[str, Any]:
        ahead = self._drawn_ahead()
        with self._sets.task.running():
            ahead.keep(fields.count("trial", ...))
        self.device.synchronize()
        return {}

    def do_judge_kept(self, fields: Fields) -> dict[str, Any]:
        ahead = self._drawn_ahead()
        with self._sets.task.running():
            return {"judged": ahead.judge(fields.get("trials", list))}

    def do_prepare(self, fields: Fields) -> dict[str, Any]:
        task = self._named_or_begun_task(fields)
        return self._timer(task).prepare(fields.get("which", str), fields.get("cache", str, None))

    def do_time(self, fields: Fields) -> dict[str, Any]:
        sets = self._begun()
        number = fields.count("set", 0)
        chosen = sets[number]
        if self._ahead is not None:
            chosen = self._ahead.in_set(number) or chosen
        if chosen.values is None:
            raise Refusal("internal", "nothing was drawn for this set")
        chosen.use_weights()
        which, timer = fields.get("which", (str, list)), self._timer(sets.task)
        if isinstance(which, str):
            return timer.time(which, chosen.values)
        timed = [timer.time(each, chosen.values) for each in which]
        return {key: [each[key] for each in timed] for key in ("ms", "hidden")}

    def do_times(self, fields: Fields) -> dict[str, dict[Any, list[Any]]]:
        task = self._named_or_begun_task(fields)
        names, trials = fields.get("which", list), fields.count("trials", 20, least=1)
        secret, timer = parse_secret(fields.get("seed", str)), self._timer(task)
        found = {name: [] for name in names}
        order = random.Random(secret)
        for trial in range(UNCOUNTED_TRIALS + trials):
            with task.running():
                values = task.draw(inputs.derive(secret, "inputs", CLOCK_TRIALS + trial))
                task.check_draw(values)
                task.weights.become(inputs.derive(secret, "weights", CLOCK_TRIALS + trial))
            for name in order.sample(names, len(names)):
                timed = timer.time(name, values)
                if trial >= UNCOUNTED_TRIALS:
                    found[name].append(timed["ms"])
        task.weights.become(None)
        return {"ms": found}

    def do_forget(self, _fields: Fields) -> dict[str, Any]:
        self._drop_idle_tasks()
        return {}

    def do_kernels(self, fields: Fields) -> Any:
        return self._timer(self._named_or_begun_task(fields)).kernels(fields.get("which", str))

    def do_screen(self, fields: Fields) -> dict[str, Any] | None:
        task = self._named_or_begun_task(fields)
        task.weights.become(None)
        if not fields.get("steps", bool, False):
            return screen.screen(task)
        if self._screening is None:
            self._screening = screen.parts(task)
        report = None
        try:
            report = next(self._screening)
        finally:
            if report is not None or sys.exc_info()[0] is not None:
                self._screening = None
        return report or {}

    def do_end(self, _fields: Fields) -> dict[str, Any]:
        self._sets = self._ahead = None
        self.arena.release_retired()
        self.device.release_stock()
        return {}


ACTIONS = {
    "limit": Worker.do_limit,
    "task": Worker.do_task,
    "steps": Worker.do_steps,
    "begin": Worker.do_begin,
    "draw": Worker.do_draw,
    "judge": Worker.do_judge,
    "ahead": Worker.do_ahead,
    "place": Worker.do_place,
    "keep": Worker.do_keep,
    "judge_kept": Worker.do_judge_kept,
    "prepare": Worker.do_prepare,
    "time": Worker.do_time,
    "times": Worker.do_times,
    "forget": Worker.do_forget,
    "kernels": Worker.do_kernels,
    "screen": Worker.do_screen,
    "end": Worker.do_end,
}


def parse_secret(text: str) -> int:
    try:
        return int(text, 16) & ((1 << 64) - 1)
    except ValueError:
        raise Refusal("internal", "the field seed is no hexadecimal number") from None


def answer(worker: Worker, line: bytes) -> tuple[dict[str, Any], bool]:
    """The reply to one line, whatever it is; and whether the worker can go on."""
    try:
        return {"ok": worker.handle(json.loads(line))}, True
    except Refusal as refusal:
        return {"error": refusal.reply()}, not refusal.ends_worker
    except Exception as error:
        kind = "memory" if is_memory_error(error) else "internal"
        refusal = Refusal(kind, f"{type(error).__name__}: {first_line(error)}")
        return {"error": refusal.reply()}, not poisons_gpu(error)


def serve(connection: socket.socket, device: "Device", arena_limit: int | None, sleeps: bool) -> None:
    """A worker's life."""
    worker = Worker(device, arena_limit)
    with connection, connection.makefile("rwb") as stream:
        try:
            send(stream, {"hello": {"pid": os.getpid()}})
            worker.start_device(sleeps)
            goes_on = True
            while goes_on and (line := stream.readline(LONGEST_LINE)):
                reply, goes_on = answer(worker, line)
                send(stream, reply)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            worker.arena.close()


def send(stream: Any, message: dict[str, dict[str, Any]]) -> None:
    stream.write(json.dumps(message, allow_nan=False).encode() + b"\n")
    stream.flush()


def die_with(parent: int) -> None:
    """The kernel ends this process when its parent ends; one that has ended already is found by its absence."""
    isolation.die_with_parent()
    if parent is not None and os.getppid() != parent:
        sys.exit("the parent has ended")


def work(message: bytes, descriptors: list[int], device: "Device", arena_limit: int | None) -> int:
    """A worker, in its fork: answers one connection until that closes. `c` is for one that checks, `t` for times."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ.get("CUDA_AGENT_THREADS", device.usual_threads)))
    serve(socket.socket(fileno=descriptors[0]), device, arena_limit, message == b"c")
    return 0


def ended(kept: list[int], code: int) -> None:
    """Whoever still waits for a worker's answer is told how it ended."""
    with socket.socket(fileno=os.dup(kept[0])) as connection:
        tell_end(connection, code)


def tell_end(connection: socket.socket, code: int) -> None:
    # Only the machine, or the caller, kills this way.
    kind = "internal" if code == -signal.SIGKILL else "ended"
    error = Refusal(kind, f"the task's process ended with {in_words(code)}")
    with contextlib.suppress(OSError):
        connection.send(json.dumps({"error": error.reply()}).encode() + b"\n", socket.MSG_DONTWAIT)


def in_words(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--arena-limit", type=int)
    parser.add_argument(
        "--compiler", action="store_true", help="import a GPU's compiler once, for all workers but the first"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    die_with(arguments.parent_pid)
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        sys.exit("standard input is no socket: the evaluator starts this program")
    ready = {
        "ready": True,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "device": arguments.device,
    }
    print(json.dumps(ready), flush=True)
    device = devices.of(arguments.device)
    server = fork_server.ForkServer(
        socket.socket(fileno=0),
        lambda message, descriptors: work(message, descriptors, device, arguments.arena_limit),
        message_bytes=1,
        most_descriptors=1,
        started=lambda descriptors: descriptors,
        ended=ended,
        # The first worker, which checks, learns its task meanwhile. Should it be asked for a compiled baseline, it
        # imports by itself.
        after_first=fork_server.import_gpu_compiler if arguments.compiler else None,
    )
    try:
        server.serve()
    finally:
        server.end_all()


if __name__ == "__main__":
    main()
