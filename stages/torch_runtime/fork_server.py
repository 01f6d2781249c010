"""A fork server: a process that has imported torch and forks a child for each request.

Importing torch takes seconds, a fork milliseconds. Requests come over a Unix socket as a message with descriptors, so
there is no name that anybody else could connect to. Forking is safe only from a process with one thread that has not
touched CUDA: a context does not survive a fork.

`ops/measure` and the evaluator's reference are both such servers; each says what a child does and what happens at its
end.
"""

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, MutableMapping

import isolation


def prepare_environment(environment: MutableMapping[str, str], *, threads: str = "1") -> None:
    """Variables that must be set before numpy and torch are imported: no pool of threads would survive a fork, and the
    question "is there a GPU?" must go to the management library, since CUDA, once asked, is of no use to forks."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, threads)
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def import_gpu_compiler() -> None:
    """Import what `torch.compile` needs for a GPU. Compiling anything here would start CUDA (or, with the GPU hidden,
    have torch settle for none), so that every child compiles for the first time: a few seconds each."""
    import torch._dynamo
    import torch._inductor.codegen.triton
    import torch._inductor.codegen.wrapper
    import torch._inductor.compile_fx
    import torch._inductor.graph
    import torch._inductor.scheduler  # noqa: F401
    import triton  # noqa: F401


class ForkServer:
    """Forks children until the control socket closes.

    `work(message, descriptors)` runs in the child and returns its exit status. `started(descriptors)` runs in the
    parent after the fork and returns the descriptors to keep until the child's end; the others are closed.
    `ended(kept, code)` is told how a child ended: its exit status, or minus the signal. `after_first()` runs after the
    first fork: what takes seconds and the first child can do without.
    """

    def __init__(
        self,
        control: socket.socket,
        work: Callable[[bytes, list[int]], int],
        *,
        message_bytes: int,
        most_descriptors: int,
        started: Callable[[list[int]], list[int]],
        ended: Callable[[list[int], int], object],
        after_first: Callable[[], object] | None = None,
    ) -> None:
        self._control, self._work = control, work
        self._after_first = after_first
        self._message_bytes, self._most_descriptors = message_bytes, most_descriptors
        self._started, self._ended = started, ended
        self._children = {}

    def serve(self) -> None:
        """Returns when the other side has closed the socket; children are left to the caller (`end_all`)."""
        wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._control, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._control in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, self._message_bytes, self._most_descriptors)
                if not message:
                    return
                self._fork(message, descriptors)

    def _fork(self, message: bytes, descriptors: list[int]) -> None:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            self._run_child(parent, message, descriptors)
        kept = self._started(descriptors)
        for descriptor in set(descriptors) - set(kept):
            os.close(descriptor)
        self._children[child] = kept
        after_first, self._after_first = self._after_first, None
        if after_first is not None:
            after_first()

    def _run_child(self, parent: int, message: bytes, descriptors: list[int]) -> None:
        """Never returns: a child must not go on in its parent's code."""
        status = 1
        try:
            isolation.die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            self._control.close()
            for kept in self._children.values():
                for descriptor in kept:
                    os.close(descriptor)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = self._work(message, descriptors)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for process in list(self._children):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                kept = self._children.pop(process)
                try:
                    self._ended(kept, os.waitstatus_to_exitcode(status))
                finally:
                    for descriptor in kept:
                        os.close(descriptor)

    def end_all(self) -> None:
        for process in list(self._children):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
