"""The trusted side of a measurement: starts the zygote, hands jobs to workers, watches each worker and ends it.

Nothing of a task runs here and torch is not imported. A worker is watched from outside: the time of each job, the
memory of all its processes together, and their number. What it says comes over a pipe of its own, at most
`RESULT_BYTES` a job, and counts only if every line has the job's nonce and every fact its declared type.

On a CPU each task has a worker of its own. On a GPU a worker lives for many tasks and is replaced after any that did
not end well: by a limit, a crash, an error, a thread, process or changed function left behind. Workers compute side by
side and take times one at a time: they ask for a place at the gate (gpu_gate.py) and this side grants it, so that a
worker which ends leaves its place, and waiting doesn't count as a task's time.

What this covers: a task that loops, forks, changes session, ignores signals, raises its limits, exhausts memory, disk
or processes, closes or floods its descriptors, crashes or exits costs its own row. What it does not: a task shares a
process with the code that measures it, so it can lie about itself, and on a GPU, where `tasks_per_worker` is not 1,
about the tasks that follow it in that process; and without namespaces (see `isolation`) it can write wherever the user
can, and kill the zygote.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import columns
import cuda_agent_stage as stage
import fork_server
import isolation
import zygote

POLL_SECONDS = 0.025
# Looking at the processes of sixteen workers takes time that whoever waits for an answer at the gate would miss.
GPU_POLL_SECONDS = 0.5
RESULT_BYTES = 1 << 20
NOISE_BYTES = 4096
END_SECONDS = 20
WARM_UP_SECONDS = 600
MAX_PROCESSES = 64
MAX_THREADS = 256
# A job whose process does not start is the machine's fault; compiling torch's own start takes a minute on a slow disk.
START_SECONDS = 300
HERE = os.path.dirname(os.path.abspath(__file__))


class WorkerUnavailable(Exception):
    """No worker could be started, or the zygote died: nothing was learnt about the task."""


class Outcome:
    """What a worker left of one job: its facts, where it was, how it ended."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.answers: list[Any] = []
        self.at: str | None = None
        self.finished = False
        self.garbled: str | None = None
        self.killed: str | None = None
        self.code: Any = None  # the exit status; there is one whenever the worker has ended
        self.noise = b""
        self.left_behind: str | None = None
        self.seconds: dict[str, float] = {}

    @property
    def suspicious(self) -> bool:
        """Ends that a busy or short machine can bring about by itself."""
        return self.killed == "timeout" or (self.killed is None and not self.finished and self.code == 137)

    @property
    def is_clean(self) -> bool:
        """Whether the worker can go on with another task."""
        failed = self.facts.get("error_stage") is not None
        return self.finished and self.code is None and not (self.killed or self.garbled or self.left_behind or failed)


class Zygote:
    """The fork server, and what its workers share."""

    def __init__(
        self, folder: str, *, compile: Any, environment: Any, log: Any, device: str = "cpu", gate: Any = None
    ) -> None:
        self.folder, self.log, self.device, self.gate = folder, log, device, gate
        self.process = None
        self.walls = True
        # Drawn and not the process id, which two programs in PID namespaces of their own may share.
        self.user = secrets.randbelow(1 << 29)
        self._request = {"compile": compile, "device": device}
        self._environment = environment
        self._sending = threading.Lock()
        self._workers = 0

    def start(self) -> dict[str, Any]:
        """Start it and wait until it is warm; returns what it found."""
        self.stop()
        warm = os.path.join(self.folder, "warm")
        shutil.rmtree(warm, ignore_errors=True)
        os.makedirs(warm)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **self._environment,
            "TORCHINDUCTOR_CACHE_DIR": warm,
            "TRITON_CACHE_DIR": warm,
            "TMPDIR": warm,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        fork_server.prepare_environment(environment)
        if self.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "zygote.py"), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=self.folder,
        )
        theirs.close()
        self.control = ours
        self.control.settimeout(WARM_UP_SECONDS)
        self._send(self._request)
        answer = self._receive()
        if "error" in answer:
            self.stop()
            raise WorkerUnavailable(answer["error"])
        if answer["ready"]["threads"] > 1:
            self.log(f"the zygote has {answer['ready']['threads']} threads; forks of it may hang", level="warning")
        self.inherited_bytes = resident(self.process.pid)
        self.walls = True
        self.walls = self.probe("probe_walls") is not None
        if not self.walls:
            self.log(
                "namespaces are not available here: tasks run with resource limits only, and could write files or "
                "reach the network",
                level="warning",
            )
        return answer["ready"]

    def probe(self, action: str, device: str = "cpu") -> dict[str, Any] | None:
        """The answer of a small action in a worker, or None where no worker could give it."""
        setup = {"action": action, "device": device, "params": {}, "memory_limit": 8 << 30, "disk_limit": 1 << 24}
        job = {"time_limit_s": 120, "memory_limit": setup["memory_limit"]}
        try:
            with self.worker(setup, slot="probe") as worker:
                outcome = worker.run(job, last=True)
        except WorkerUnavailable:
            if not self.alive():
                raise
            return None
        return outcome.answers[0] if outcome.answers else None

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def can_fork(self) -> bool:
        """Whether a worker can still be had: asked after one could not."""
        return self.alive() and self.probe("probe_walls") is not None

    def stop(self) -> None:
        if self.process is not None:
            self.control.close()
            self.process.kill()
            self.process.wait()
            self.process = None
            self.end_strays()

    def end_strays(self) -> None:
        """End whatever outlived its worker. With namespaces there is nothing: the kernel has done it."""
        mine = self.process.pid if self.alive() else None
        for _ in range(1000):
            strays = [child for child in zygote.children_of(os.getpid()) if child != mine]
            # Keepers of other workers are the zygote's children too.
            strays += zygote.children_of(mine) if mine and self._workers <= 1 else []
            if not strays:
                return
            for child in strays:
                try:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                except (ProcessLookupError, ChildProcessError):
                    time.sleep(0.001)

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            with self._sending:
                socket.send_fds(self.control, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            raise WorkerUnavailable(f"the zygote is gone: {error}") from error

    def _receive(self) -> dict[str, Any]:
        try:
            data = self.control.recv(zygote.MESSAGE_BYTES)
        except TimeoutError as error:
            self.process.kill()
            raise WorkerUnavailable("the zygote does not answer") from error
        except OSError as error:
            raise WorkerUnavailable(f"the zygote is gone: {error}") from error
        if not data:
            raise WorkerUnavailable("the zygote died")
        return json.loads(data)

    @contextlib.contextmanager
    def worker(self, setup: dict[str, Any], slot: int | str) -> "Iterator[Worker]":
        """A worker, ended with the block. `slot` tells apart those that live side by side."""
        # Counted before it is there: who looks for strays meanwhile must not take its keeper for one.
        self._count(1)
        try:
            worker = Worker(self, setup, slot)
            try:
                yield worker
            finally:
                worker.end()
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._sending:
            self._workers += more

    def open_worker(self, setup: dict[str, Any], descriptors: list[int]) -> None:
        self._send(setup, descriptors)


class _Ended(Exception):
    """The worker is gone, or has to go, while it waits at the gate."""


class Worker:
    """One worker, from its start to its end."""

    def __init__(self, server: Zygote, setup: dict[str, Any], slot: int | str) -> None:
        self.server, self.setup = server, setup
        self.scratch = os.path.join(server.folder, f"scratch-{slot}")
        os.makedirs(self.scratch, exist_ok=True)
        self.first: Any = None
        self.handle: Any = None
        self.jobs, self.over, self._holding, self._unsent, self._lines = 0, False, None, b"", b""
        self.job, self.outcome, self.received, self.waited = None, Outcome(), 0, 0.0
        # Bytes that its processes had added when they were last looked at.
        self.used = 0
        number = slot if isinstance(slot, int) else 0
        setup = {
            **setup,
            "walls": server.walls,
            "scratch": self.scratch,
            "user": server.user + number,
            "processes": MAX_THREADS + threads_of_user(),
            "cpu_seconds": setup.get("cpu_seconds", 1 << 30),
        }
        ours, theirs = self._pipes()
        try:
            server.open_worker(setup, theirs)
        except WorkerUnavailable:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        # Descriptors; None once they are closed.
        self._commands: Any
        self._result: Any
        self._noise: Any
        self._status: Any
        self._commands, self._result, self._noise, self._status = ours
        self._open = {self._result, self._noise}
        for descriptor in ours:
            os.set_blocking(descriptor, False)

    @staticmethod
    def _pipes() -> tuple[list[int], list[int]]:
        """Our ends and the worker's: commands, results, noise, status."""
        pairs = [os.pipe() for _ in range(4)]
        ours = [pairs[0][1], *(pair[0] for pair in pairs[1:])]
        return ours, [pairs[0][0], *(pair[1] for pair in pairs[1:])]

    def run(self, job: dict[str, Any], *, last: bool) -> Outcome:
        """Run one job, to whichever end. The last one closes the worker's commands. Raises WorkerUnavailable."""
        self.job = {**job, "nonce": secrets.token_hex(16)}
        self.outcome = Outcome()
        self.received, self.waited = 0, 0.0
        self.jobs += 1
        self._unsent += json.dumps(self.job).encode() + b"\n"
        self._close_when_sent = last
        self.started = self._stepped = time.monotonic()
        try:
            self._follow(last)
        finally:
            self._leave_gate()
        return self.outcome

    def end(self) -> None:
        """End the worker, if it is not over, and everything that it has started."""
        try:
            if not self.over:
                self._kill()
                self._await_end()
        finally:
            self._leave_gate()
            self._close_commands()
            for descriptor in (self._result, self._noise, self._status, self.handle):
                if descriptor is not None:
                    os.close(descriptor)
            self._result = self._noise = self._status = self.handle = None
            if not self.server.walls:
                self.server.end_strays()
                clear_folder(self.scratch)

    def _await_end(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        while not self.over:
            if time.monotonic() > deadline:
                raise WorkerUnavailable("a worker could not be ended")
            ready, _, _ = select.select([self._status, *self._open], [], [], POLL_SECONDS)
            for descriptor in ready:
                if descriptor == self._status:
                    self._take_end()
                elif not self._read(descriptor):
                    self._open.discard(descriptor)
            # What was not there yet at the first try may be by now.
            self._kill()

    def _follow(self, last: bool) -> None:
        killed_at = None
        poll = GPU_POLL_SECONDS if self.server.gate else POLL_SECONDS
        looks_at = time.monotonic() + poll
        while not self.over:
            writing = [self._commands] if self._unsent and self._commands is not None else []
            ready, writable, _ = select.select([self._status, *self._open], writing, [], poll)
            if writable:
                self._write()
            for descriptor in ready:
                if descriptor == self._status:
                    self._take_end()
                elif not self._read(descriptor):
                    self._open.discard(descriptor)
            if self.over:
                break
            if self.outcome.finished and not last and not self.outcome.killed:
                if not self.outcome.garbled:
                    self._step(None)
                return
            if time.monotonic() >= looks_at:
                self.outcome.killed = self.outcome.killed or self._overstepped()
                looks_at = time.monotonic() + poll
            if self.outcome.killed or (self.outcome.garbled and not last):
                killed_at = killed_at or time.monotonic()
                self._kill()
                if time.monotonic() - killed_at > END_SECONDS:
                    raise WorkerUnavailable("a worker could not be ended")
        if not self.server.walls:
            self.server.end_strays()
        for descriptor in self._open:
            while self._read(descriptor):
                pass
        self._step(None)
        self._judge_end()

    def _write(self) -> None:
        if self._commands is None:
            return
        try:
            sent = os.write(self._commands, self._unsent)
            self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return
        except OSError:
            # It is gone; its end comes over another pipe.
            self._unsent = b""
        if not self._unsent and self._close_when_sent:
            self._close_commands()

    def _close_commands(self) -> None:
        if self._commands is not None:
            os.close(self._commands)
            self._commands = None

    def _take_end(self) -> None:
        data = os.read(self._status, 4096)
        self.over = True
        if not data:
            raise WorkerUnavailable("the zygote died")
        self.outcome.code = json.loads(data)["ended"]

    def _kill(self) -> None:
        if self.handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def _overstepped(self) -> str | None:
        """Which limit the worker is over, if any."""
        limit = self.job["time_limit_s"] if self.first is not None else START_SECONDS
        if time.monotonic() - self.started - self.waited > limit:
            return "timeout"
        if self.received > RESULT_BYTES:
            return "garbled"
        return self._over_resources()

    def _over_resources(self) -> str | None:
        if self.first is None:
            return None
        processes = descendants(self.first)
        if len(processes) > MAX_PROCESSES:
            return "processes"
        self.used = sum(added_memory(process, self.server.inherited_bytes) for process in processes)
        return "memory" if self.used > self.job["memory_limit"] else None

    def _read(self, descriptor: int) -> bool:
        """Take what is there; False where there is nothing more."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return False
        if not data:
            return False
        if descriptor == self._noise:
            self.outcome.noise = (self.outcome.noise + data)[-NOISE_BYTES:]
            return True
        self.received += len(data)
        if self.received <= RESULT_BYTES:
            *lines, self._lines = (self._lines + data).split(b"\n")
            for line in lines:
                self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        """One line of results. The first comes from the keeper, before any task starts."""
        if self.first is None:
            self.first = json.loads(line)["first"]
            with contextlib.suppress(ProcessLookupError):
                self.handle = os.pidfd_open(self.first)
            self.started = time.monotonic()
            return
        if self.setup["action"] != "measure":
            self.outcome.answers.append(json.loads(line))
            return
        try:
            message = json.loads(line)
            if message.pop("nonce") != self.job["nonce"]:
                raise ValueError("a line without the worker's nonce")
            self._accept(message)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.outcome.garbled = self.outcome.garbled or f"{type(error).__name__}: {error}"[:200]

    def _accept(self, message: dict[str, Any]) -> None:
        if "facts" in message:
            refusal = columns.refuse(message["facts"])
            if refusal:
                raise ValueError(refusal)
            self.outcome.facts.update(message["facts"])
        elif "at" in message:
            self._step(str(message["at"])[:40])
        elif "gate" in message and self.server.gate is not None:
            self._pass_gate(message["gate"])
        elif message.get("finished") is True:
            self.outcome.left_behind = message.get("left_behind")
            self.outcome.finished = True
        else:
            raise ValueError("an unknown message")

    def _step(self, name: str | None) -> None:
        """Books the time since the last step."""
        now = time.monotonic()
        if self.outcome.at is not None:
            spent = self.outcome.seconds
            spent[self.outcome.at] = spent.get(self.outcome.at, 0.0) + now - self._stepped
        self._stepped = now
        self._book_place(now)
        if name is not None:
            self.outcome.at = name

    # ---- the gate

    def _pass_gate(self, wanted: Any) -> None:
        if wanted == "leave":
            self._leave_gate()
            return
        pausing = wanted == "pause" and self._holding == "shared"
        if not pausing and (wanted not in ("shared", "alone") or self._holding is not None):
            raise ValueError(f"asks for the gate's {str(wanted)[:20]!r} out of turn")
        began = time.monotonic()
        try:
            if pausing:
                self.server.gate.pause(self._may_wait)
            else:
                self.server.gate.enter(wanted, self._may_wait)
        except _Ended:
            return
        finally:
            waited = time.monotonic() - began
            self.waited += waited
            self._stepped += waited
            spent = self.outcome.seconds
            name = "waiting alone" if wanted == "alone" else "waiting shared"
            spent[name] = spent.get(name, 0.0) + waited
            if pausing:
                self._held_since += waited
        if not pausing:
            self._holding, self._held_since = wanted, time.monotonic()
        self._unsent += b"enter\n"
        # At once: others wait for as long as it has the place.
        self._write()

    def _may_wait(self) -> None:
        """Asked now and then by the gate. A worker has no reason to do anything while it waits."""
        if select.select([self._status], [], [], 0)[0]:
            raise _Ended
        self.outcome.killed = self.outcome.killed or self._over_resources()
        if self.outcome.killed:
            self._kill()
            raise _Ended

    def _book_place(self, now: float) -> None:
        """Books the time for which it has had its place at the gate in this step."""
        if self._holding is not None:
            spent = self.outcome.seconds
            name = f"holding {self._holding}: {self.outcome.at}"
            spent[name] = spent.get(name, 0.0) + now - self._held_since
            self._held_since = now

    def _leave_gate(self) -> None:
        if self._holding is not None:
            self._book_place(time.monotonic())
            self.server.gate.leave(self._holding)
            self._holding = None

    def _judge_end(self) -> None:
        outcome = self.outcome
        if self._lines:
            outcome.garbled = outcome.garbled or "the last line has no end"
        never_began = self.setup["action"] == "measure" and outcome.at is None and outcome.killed is None
        if outcome.code in (zygote.KEEPER_FAILED, zygote.FIRST_FAILED) or never_began:
            raise WorkerUnavailable(f"a worker could not start (code {outcome.code}){last_words(outcome)}")


def descendants(root: int) -> list[int]:
    """The processes below `root`; orphans of a namespace become children of its first process."""
    found, pending = [], [root]
    while pending and len(found) <= MAX_PROCESSES:
        process = pending.pop()
        try:
            threads = os.listdir(f"/proc/{process}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{process}/task/{thread}/children", encoding="ascii") as file:
                    children = [int(word) for word in file.read().split()]
            except OSError:
                continue
            found += children
            pending += children
    return found


def _sum_fields(path: str, names: tuple[str, ...]) -> int:
    total = 0
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in names:
                    total += int(rest.split()[0]) * 1024
    except OSError:
        pass
    return total


def resident(process: int) -> int:
    return _sum_fields(f"/proc/{process}/status", ("RssAnon", "RssShmem", "VmSwap"))


def added_memory(process: int, inherited: int) -> int:
    """What a worker's process holds beyond the zygote's pages, which every fork maps. One that executed another
    program (a compiler) mapped none of them. Cheap on purpose: an exact count walks every page table, which a fork
    bomb makes take minutes."""
    held = resident(process)
    return held - inherited if held >= 0.8 * inherited else held


def threads_of_user() -> int:
    """How many threads this user already has, which count in the limit on processes; 0 for root, whose tasks run as
    users of their own."""
    user = os.geteuid()
    if user == 0:
        return 0
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def clear_folder(folder: pathlib.Path | str) -> None:
    """Empty a folder; without walls a worker leaves its files in it."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def last_words(outcome: Outcome) -> str:
    lines = [line.strip() for line in outcome.noise.decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""


def hide_from_tasks() -> None:
    """Keep this process's memory and descriptors (the engine's events among them) from processes of the same user,
    and adopt whatever escapes a worker."""
    try:
        isolation.set_dumpable(False)
        isolation.adopt_orphans()
    except (OSError, ctypes.ArgumentError) as error:
        raise stage.StageError(f"prctl: {error}", kind="environment") from error
