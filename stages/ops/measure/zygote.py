"""A process that has torch and its compiler warm, and forks a worker for each request.

`import torch` costs 2 s and the first `torch.compile` of a process another 15 to 25; a fork of a process that has
both costs 10 ms. Forking is safe only from a process with one thread, so nothing here may start another: one torch
thread (no OpenMP team), no OpenBLAS threads, compilation in-process, no progress-bar monitor.

A worker is three processes deep:

    zygote - keeper (makes the namespaces, waits) - first (process 1 of its namespace, waits) - the task

When `first` ends, by itself or killed by the supervisor, the kernel ends all that the task has started. The task's
process takes jobs from a pipe until that closes: one on a CPU, where a fresh fork is cheap and the better wall; many
on a GPU, where starting CUDA and the first compilation take seconds.

It is driven over a socket (fork_server.py): the first message asks for warmth, every other one is the setup of a worker
with four descriptors: where jobs come from, where results and noise go, and where its end is told.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import fork_server
import isolation

# The second one is high: NVIDIA's libraries keep descriptors from before the fork, which are closed here, and take what
# has one of their numbers for theirs. With a pipe at 4 they found no GPU.
RESULT_DESCRIPTOR, COMMAND_DESCRIPTOR = 3, 900
MESSAGE_BYTES = 1 << 16
KEEPER_FAILED = 251
FIRST_FAILED = 252


def warm_up(request: Any) -> dict[str, Any]:
    """Import torch, compile something small, and say what is there."""
    # Hardly anything of an import is garbage, and looking for it takes a tenth of the time.
    gc.disable()
    import torch

    # Caches are off so that no task can leave anything for the next; torch says so each time. And Python warns of forks
    # of processes with threads, which the count of threads below is about.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    torch.set_num_threads(1)
    answer = {"torch": torch.__version__, "cuda_built": torch.version.cuda is not None}
    # Imported here so that workers find them loaded: the first dispatch mode of a process needs the compiler's front.
    import torch._dynamo

    import task_worker  # noqa: F401

    if request["compile"]:
        started = time.perf_counter()
        if request["device"] == "cuda":
            fork_server.import_gpu_compiler()
        else:
            warm_up_compiler(torch)
        answer["compile_warm_up_s"] = time.perf_counter() - started
    # What is there by now stays: workers need not look through it each time they collect garbage.
    gc.collect()
    gc.freeze()
    gc.enable()
    answer["threads"] = count_threads()
    return answer


def warm_up_compiler(torch: Any) -> None:
    import tqdm

    # torch.fx draws a progress bar, whose monitor would be a second thread.
    tqdm.tqdm.monitor_interval = 0
    import torch._dynamo
    import torch._inductor.compile_fx

    class Sample(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 8, 3)
            self.normalisation = torch.nn.BatchNorm2d(8)
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: Any):
            x = torch.relu(self.normalisation(self.convolution(x))).mean((2, 3))
            return torch.softmax(self.linear(x), -1).sum(-1)

    plain_call = subprocess.check_call
    subprocess.check_call = fork_instead_of_python(plain_call)
    try:
        with torch.no_grad():
            torch.compile(Sample().eval())(torch.randn(2, 3, 8, 8))
    finally:
        subprocess.check_call = plain_call
    torch._dynamo.reset()


def count_threads() -> Any:
    """Threads of this process, but for the one that the CUDA driver starts when it is asked for devices: no worker on
    a CPU has anything to do with it, and a worker on a GPU never comes from a process that has it."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm", encoding="ascii", errors="replace") as file:
            count += not file.read().startswith("cuda")
    return count


def fork_instead_of_python(plain_call: Any) -> Callable[..., Any]:
    """The compiler probes each vector instruction set in a Python child that imports torch anew, 2 s each, six in a
    row. A fork of this process already has torch, and an illegal instruction there is as harmless here."""

    def call(command: Any, *args: Any, **kwargs: Any):
        if not (isinstance(command, list) and command[:2] == [sys.executable, "-c"] and len(command) == 3):
            return plain_call(command, *args, **kwargs)
        child = os.fork()
        if child == 0:
            try:
                exec(command[2], {"__name__": "__main__"})
                os._exit(0)
            except BaseException:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            raise subprocess.CalledProcessError(status, command)
        return 0

    return call


def probe_cuda(_setup: Any, results: Any, _commands: Any) -> None:
    """Run in a worker: which GPU torch sees, or why it sees none."""
    import torch

    name = problem = None
    try:
        name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
        problem = None if name else "the driver shows no GPU"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    os.write(results, (json.dumps({"device_name": name, "problem": problem}) + "\n").encode())


def probe_walls(_setup: Any, results: Any, _commands: Any) -> None:
    """Run in a worker: that one can be started at all."""
    os.write(results, b'{"walls": true}\n')


def measure(setup: Any, results: Any, commands: Any) -> None:
    import task_worker

    task_worker.serve(setup, results, commands)


ACTIONS = {"probe_cuda": probe_cuda, "probe_walls": probe_walls, "measure": measure}


def exit_code(status: Any) -> int:
    """A child's end as a number that survives being an exit code itself: 128 + signal, as shells have it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def close_descriptors(*, keep: Any) -> None:
    """Close every descriptor but the kept ones and the three standard ones."""
    low = 3
    for descriptor in sorted(keep):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, 1 << 20)


def keep_worker(job: Any, commands: Any, result: Any, noise: Any) -> int:
    """The keeper: makes the namespaces, then `first` in them, tells its process id, and waits for it."""
    close_descriptors(keep=[commands, result, noise])
    isolation.set_dumpable(True)  # Else its own files in /proc would be closed to it.
    isolation.offer_to_memory_killer()
    walls = job["walls"] and isolation.enter_namespaces()
    # A change of namespaces may undo what the fork server asked for.
    isolation.die_with_parent()
    if job["walls"] and not walls:
        return KEEPER_FAILED
    if not walls:
        isolation.adopt_orphans()
    gate, gate_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_end)
        run_guarded(lambda: run_first(job, commands, result, noise, gate), FIRST_FAILED)
    # The process id is the first line of the results: the task does not run before the gate opens.
    os.write(result, (json.dumps({"first": child}) + "\n").encode())
    os.write(gate_end, b"go")
    close_descriptors(keep=[])
    code = exit_code(os.waitpid(child, 0)[1])
    end_orphans()
    return code


def end_orphans() -> None:
    """Without a PID namespace, the task's stray children became the keeper's; end them."""
    while True:
        for child in children_of(os.getpid()):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children_of(process: Any) -> list[int]:
    try:
        with open(f"/proc/{process}/task/{process}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def run_first(job: Any, commands: Any, result: Any, noise: Any, gate: Any) -> int:
    """The first process of the namespace: puts up the walls, starts the task, waits for it, ends everything."""
    isolation.die_with_parent()
    user = isolation.task_user(job["user"]) if job["walls"] else None
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    if job["walls"]:
        isolation.wall_off_file_system(job["scratch"], job["disk_limit"], user)
    else:
        isolation.adopt_orphans()
    if os.read(gate, 2) != b"go":
        return FIRST_FAILED
    isolation.set_dumpable(False)  # The task must not reach this process's descriptors through /proc.
    child = os.fork()
    if child == 0:
        run_guarded(lambda: run_task(job, commands, result, noise, user), 1)
    close_descriptors(keep=[])
    isolation.drop_privileges()
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return exit_code(status)


def run_task(job: Any, commands: Any, result: Any, noise: Any, user: Any) -> int:
    """The tasks' own process."""
    arrange_descriptors(commands, result, noise)
    os.chdir(job["scratch"])
    isolation.limit_resources(
        data_bytes=None if job["device"] == "cuda" else job["memory_limit"],
        file_bytes=job["disk_limit"],
        cpu_seconds=job["cpu_seconds"],
        processes=job["processes"],
    )
    if user is None or not isolation.become(user):
        isolation.drop_privileges()
    # A change of user undoes both of these.
    isolation.die_with_parent()
    isolation.set_dumpable(True)
    os.environ.update(HOME=job["scratch"], USER="task", LOGNAME="task")
    ACTIONS[job["action"]](job, RESULT_DESCRIPTOR, COMMAND_DESCRIPTOR)
    return 0


def arrange_descriptors(commands: Any, result: Any, noise: Any) -> None:
    """Standard input is empty, both outputs go to the noise pipe, results to descriptor 3, commands come from 900, and
    nothing else is open. Programs that the task starts don't inherit these two."""
    import fcntl

    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in (result, commands, noise)]
    empty = os.open("/dev/null", os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(high[2], 1)
    os.dup2(high[2], 2)
    os.dup2(high[0], RESULT_DESCRIPTOR, inheritable=False)
    os.dup2(high[1], COMMAND_DESCRIPTOR, inheritable=False)
    close_descriptors(keep=[RESULT_DESCRIPTOR, COMMAND_DESCRIPTOR])


def run_guarded(body: Any, code_on_error: Any) -> None:
    """Run a forked process's body; it must never return into its parent's code."""
    code = code_on_error
    try:
        code = body()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def start_worker(message: Any, descriptors: Any) -> int:
    """In a fork: becomes the keeper of a worker."""
    commands, result, noise, _ = descriptors
    return keep_worker(json.loads(message), commands, result, noise)


def tell_end(kept: Any, code: Any) -> None:
    """How a keeper ended goes to whoever waits for it, as a number that survives being an exit code itself."""
    os.write(kept[0], json.dumps({"ended": code if code >= 0 else 128 - code}).encode())


def main() -> None:
    isolation.die_with_parent()
    isolation.set_dumpable(False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    request = json.loads(control.recv(MESSAGE_BYTES))
    try:
        answer = warm_up(request)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()][:6]
        control.send(json.dumps({"error": f"{type(error).__name__}: " + "\n".join(lines)}).encode())
        return
    control.send(json.dumps({"ready": answer}).encode())
    fork_server.ForkServer(
        control,
        start_worker,
        message_bytes=MESSAGE_BYTES,
        most_descriptors=4,
        started=lambda descriptors: descriptors[3:],
        ended=tell_end,
    ).serve()


if __name__ == "__main__":
    main()
