"""The trusted side of a measurement: starts the zygote, hands it jobs, watches each worker and ends it.

Nothing of a task runs here and torch is not imported. A worker is watched from outside: wall time, the memory of all
its processes together, and their number. What it says comes over a pipe of its own, at most `RESULT_BYTES` of it, and
counts only if every line has the worker's nonce and every fact its declared type.

What this covers: a task that loops, forks, changes session, ignores signals, raises its limits, exhausts memory, disk
or processes, closes or floods its descriptors, crashes or exits costs its own row. What it does not: a task shares a
process with the code that measures it, so it can lie about itself; and without namespaces (see `isolation`) it can
write wherever the user can, and kill the zygote.
"""

import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

import columns
import cuda_agent_stage as stage
import isolation
import zygote

POLL_SECONDS = 0.025
RESULT_BYTES = 1 << 20
NOISE_BYTES = 4096
END_SECONDS = 20
WARM_UP_SECONDS = 600
MAX_PROCESSES = 64
MAX_THREADS = 256
HERE = os.path.dirname(os.path.abspath(__file__))


class WorkerUnavailable(Exception):
    """No worker could be started, or the zygote died: nothing was learnt about the task."""


class Outcome:
    """What a worker left: its facts, where it was, how it ended."""

    def __init__(self):
        self.facts, self.answers = {}, []
        self.at, self.finished, self.garbled = None, False, None
        self.killed, self.code, self.noise = None, None, b""

    @property
    def suspicious(self):
        """Ends that a busy or short machine can bring about by itself."""
        return self.killed == "timeout" or (self.killed is None and not self.finished and self.code == 137)


class Zygote:
    """The fork server and the folder that its workers use."""

    def __init__(self, folder, *, compile, environment, log, device="cpu"):
        self.folder, self.log = folder, log
        self.scratch = os.path.join(folder, "scratch")
        self.process = None
        self.walls = True
        # Drawn and not the process id, which two programs in PID namespaces of their own may share.
        self.user = secrets.randbelow(1 << 30)
        self._request = {"compile": compile, "device": device}
        self._environment = environment
        os.makedirs(self.scratch, exist_ok=True)

    def start(self):
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
            "OPENBLAS_NUM_THREADS": "1",
            # "Is there a GPU?" goes to the management library: CUDA, once asked, is of no use to forks.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        if self._request["device"] == "cpu":
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

    def probe(self, action, device="cpu"):
        """The answer of a small action in a worker, or None where no worker could give it."""
        job = {
            "action": action, "device": device, "params": {}, "memory_limit": 8 << 30, "disk_limit": 1 << 24,
            "time_limit_s": 120,
        }  # fmt: skip
        try:
            outcome = self.run(job)
        except WorkerUnavailable:
            if not self.alive():
                raise
            return None
        return outcome.answers[0] if outcome.answers else None

    def alive(self):
        return self.process is not None and self.process.poll() is None

    def stop(self):
        if self.process is not None:
            self.control.close()
            self.process.kill()
            self.process.wait()
            self.process = None
            self.end_strays()

    def end_strays(self):
        """End whatever outlived its worker. With namespaces there is nothing: the kernel has done it."""
        mine = self.process.pid if self.alive() else None
        for _ in range(1000):
            strays = [child for child in zygote.children_of(os.getpid()) if child != mine]
            strays += zygote.children_of(mine) if mine else []
            if not strays:
                return
            for child in strays:
                try:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                except (ProcessLookupError, ChildProcessError):
                    time.sleep(0.001)

    def _send(self, message, descriptors=()):
        try:
            socket.send_fds(self.control, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            raise WorkerUnavailable(f"the zygote is gone: {error}") from error

    def _receive(self):
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

    def run(self, job):
        """Run one job in a worker of its own, to whichever end. Raises WorkerUnavailable."""
        job = {
            **job, "nonce": secrets.token_hex(16), "walls": self.walls, "scratch": self.scratch, "user": self.user,
            "processes": MAX_THREADS + threads_of_user(),
        }  # fmt: skip
        job_descriptor = os.memfd_create("job")
        os.write(job_descriptor, json.dumps(job).encode())
        os.lseek(job_descriptor, 0, os.SEEK_SET)
        result, result_end = os.pipe()
        noise, noise_end = os.pipe()
        try:
            self._send({"run": True}, [job_descriptor, result_end, noise_end])
        except WorkerUnavailable:
            for descriptor in (result, noise):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (job_descriptor, result_end, noise_end):
                os.close(descriptor)
        watch = Watch(self, job, result, noise)
        try:
            return watch.follow()
        finally:
            watch.close()
            if not self.walls:
                self.end_strays()
                clear_folder(self.scratch)


class Watch:
    """Follows one worker from its start to its end."""

    def __init__(self, server, job, result, noise):
        self.server, self.job, self.result, self.noise = server, job, result, noise
        self.outcome = Outcome()
        self.lines, self.received = b"", 0
        self.first = self.handle = None
        self.started = time.monotonic()
        for descriptor in (result, noise):
            os.set_blocking(descriptor, False)

    def close(self):
        for descriptor in (self.result, self.noise, self.handle):
            if descriptor is not None:
                os.close(descriptor)

    def follow(self):
        ended = False
        open_pipes = {self.result, self.noise}
        killed_at = None
        while not ended:
            control = self.server.control
            ready, _, _ = select.select([control, *open_pipes], [], [], POLL_SECONDS)
            for descriptor in ready:
                if descriptor is control:
                    self.outcome.code = self.server._receive()["ended"]
                    ended = True
                elif not self.read(descriptor):
                    open_pipes.discard(descriptor)
            if ended:
                break
            self.outcome.killed = self.outcome.killed or self.overstepped()
            if self.outcome.killed:
                killed_at = killed_at or time.monotonic()
                self.kill()
                if time.monotonic() - killed_at > END_SECONDS:
                    raise WorkerUnavailable("a worker could not be ended")
        if not self.server.walls:
            self.server.end_strays()
        for descriptor in open_pipes:
            while self.read(descriptor):
                pass
        self.judge_end()
        return self.outcome

    def kill(self):
        if self.handle is None:
            return
        try:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def overstepped(self):
        """Which limit the worker is over, if any."""
        if time.monotonic() - self.started > self.job["time_limit_s"]:
            return "timeout"
        if self.received > RESULT_BYTES:
            return "garbled"
        if self.first is None:
            return None
        processes = descendants(self.first)
        if len(processes) > MAX_PROCESSES:
            return "processes"
        used = sum(added_memory(process, self.server.inherited_bytes) for process in processes)
        return "memory" if used > self.job["memory_limit"] else None

    def read(self, descriptor):
        """Take what is there; False where there is nothing more."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return False
        if not data:
            return False
        if descriptor == self.noise:
            self.outcome.noise = (self.outcome.noise + data)[-NOISE_BYTES:]
        else:
            self.received += len(data)
            if self.received <= RESULT_BYTES:
                *lines, self.lines = (self.lines + data).split(b"\n")
                for line in lines:
                    self.take(line)
        return True

    def take(self, line):
        """One line of results. The first comes from the keeper, before the task starts."""
        if self.first is None:
            self.first = json.loads(line)["first"]
            try:
                self.handle = os.pidfd_open(self.first)
            except ProcessLookupError:
                pass
            self.started = time.monotonic()
            return
        if self.job["action"] != "measure":
            self.outcome.answers.append(json.loads(line))
            return
        try:
            message = json.loads(line)
            if message.pop("nonce") != self.job["nonce"]:
                raise ValueError("a line without the worker's nonce")
            self.accept(message)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.outcome.garbled = self.outcome.garbled or f"{type(error).__name__}: {error}"[:200]

    def accept(self, message):
        if "facts" in message:
            refusal = columns.refuse(message["facts"])
            if refusal:
                raise ValueError(refusal)
            self.outcome.facts.update(message["facts"])
        elif "at" in message:
            self.outcome.at = str(message["at"])[:40]
        elif message.get("finished") is True:
            self.outcome.finished = True
        else:
            raise ValueError("an unknown message")

    def judge_end(self):
        outcome = self.outcome
        if self.lines:
            outcome.garbled = outcome.garbled or "the last line has no end"
        never_began = self.job["action"] == "measure" and outcome.at is None and outcome.killed is None
        if outcome.code in (zygote.KEEPER_FAILED, zygote.FIRST_FAILED) or never_began:
            raise WorkerUnavailable(f"a worker could not start (code {outcome.code})")


def descendants(root):
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


def _sum_fields(path, names):
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


def resident(process):
    return _sum_fields(f"/proc/{process}/status", ("RssAnon", "RssShmem", "VmSwap"))


def added_memory(process, inherited):
    """What a worker's process holds beyond the zygote's pages, which every fork maps. One that executed another
    program (a compiler) mapped none of them. Cheap on purpose: an exact count walks every page table, which a fork
    bomb makes take minutes."""
    held = resident(process)
    return held - inherited if held >= 0.8 * inherited else held


def threads_of_user():
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


def clear_folder(folder):
    """Empty a folder; without walls a worker leaves its files in it."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def describe_end(outcome, job):
    """`error_kind` and `error` for a worker that did not finish, or None for one that did."""
    if outcome.garbled:
        return "garbled", f"the worker's results are not what this program sends: {outcome.garbled}"
    if outcome.killed == "timeout":
        return "timeout", f"took longer than {job['time_limit_s']:g} s"
    if outcome.killed == "memory":
        return "memory", f"used more than {job['memory_limit']} bytes of memory"
    if outcome.killed == "processes":
        return "processes", f"started more than {MAX_PROCESSES} processes"
    if outcome.killed == "garbled":
        return "garbled", f"sent more than {RESULT_BYTES} bytes of results"
    if outcome.finished:
        return None
    if outcome.code > 128:
        return "crash", f"ended by signal {signal_name(outcome.code - 128)}{last_words(outcome)}"
    return "exit", f"the process ended with code {outcome.code} before it was done{last_words(outcome)}"


def signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def last_words(outcome):
    lines = [line.strip() for line in outcome.noise.decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""


def facts_of(outcome, job):
    """The row that an outcome amounts to: every declared fact, null where it is not known."""
    facts = dict.fromkeys(columns.FACTS)
    end = describe_end(outcome, job)
    if end is None or end[0] != "garbled":
        facts.update(outcome.facts)
    for name in ("loads", "builds", "executes_eager"):
        facts[name] = bool(facts[name])
    if job["params"]["compile"]:
        facts["executes_compiled"] = bool(facts["executes_compiled"])
    if end is not None and facts["error"] is None:
        facts["error_stage"], (facts["error_kind"], facts["error"]) = outcome.at, end
    return facts


def measure_task(server, job):
    """The facts about one task. An end that a busy machine can bring about counts only when it comes twice. Raises
    WorkerUnavailable where nothing was learnt."""
    started = time.monotonic()
    outcome = server.run(job)
    if outcome.suspicious:
        outcome = server.run(job)
        if outcome.killed is None and not outcome.finished and outcome.code == 137:
            outcome.noise += b"\nkilled twice"
    facts = facts_of(outcome, job)
    facts["total_s"] = time.monotonic() - started
    return facts


def hide_from_tasks():
    """Keep this process's memory and descriptors (the engine's events among them) from processes of the same user,
    and adopt whatever escapes a worker."""
    try:
        isolation.set_dumpable(False)
        isolation.adopt_orphans()
    except (OSError, ctypes.ArgumentError) as error:
        raise stage.StageError(f"prctl: {error}", kind="environment") from error
