"""Who may use a GPU, among the workers of one program: many at once to compute, one alone to take times.

The same rules as the evaluator's gate (stages/kernels/src/gate.rs), for programs in Python: a clock waits until nobody
else works on the GPU, and nothing starts while it runs. Emptying the GPU takes about as long as a clock does, so
clocks wait for each other and then go one after another: the gate closes to newcomers when `enough` of them wait, or
when one has waited for PATIENCE. Clocks of other programs on the machine are excluded by a lock on a file, the same
that the evaluator's clocks lock.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from typing import Literal

PATIENCE = 0.1
"""Seconds that a clock waits for others of its kind before the gate closes for it."""


def lock_path(gpu: int | str) -> str:
    """The file that clocks of one GPU lock. The evaluator makes the same name (seat.rs)."""
    return f"/tmp/cuda-agent-clock-{gpu}"


class Gate:
    """`most` may compute at once; more would only wait for each other, and hold memory meanwhile.

    `now` is the clock by which the time is accounted for.
    """

    def __init__(
        self, *, enough: int = 3, most: int = 9, path: str | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._enough, self._most = enough, most
        self._changed = threading.Condition()
        self._sharing, self._alone, self._clocks, self._closed = 0, False, 0, False
        # Of those who share: they keep their place while clocks run.
        self._paused = 0
        self._began = self._marked = now()
        self._spent = {"alone": 0.0, "shared": 0.0, "idle": 0.0}
        self._file = _open(path)

    def enter(self, kind: Literal["shared", "alone"], may_wait: Callable[[], object]) -> None:
        """Wait for a place, `shared` or `alone`. `may_wait()` is asked now and then, and ends the wait by raising."""
        enter = {"shared": self._share, "alone": self._be_alone}[kind]
        enter(may_wait)

    def leave(self, kind: Literal["shared", "alone"]) -> None:
        with self._changed:
            self._mark()
            if kind == "shared":
                self._sharing -= 1
            else:
                if self._file is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                self._alone = False
                # Who waits goes before newcomers, now that the GPU is empty.
                self._closed = self._clocks > 0
            self._changed.notify_all()

    def pause(self, may_wait: Callable[[], object]) -> None:
        """Between two steps of one who shares: lets clocks pass. The place is kept, and with it the memory in use."""
        with self._changed:
            if not self._closed:
                return
            self._mark()
            self._sharing -= 1
            self._paused += 1
            self._changed.notify_all()
            try:
                while self._alone or self._closed:
                    self._changed.wait(0.1)
                    may_wait()
            finally:
                # Also where the wait has ended for good: `leave` then gives the place back.
                self._mark()
                self._paused -= 1
                self._sharing += 1

    def _share(self, may_wait: Callable[[], object]) -> None:
        with self._changed:
            while self._alone or self._closed or self._sharing + self._paused >= self._most:
                self._changed.wait(0.1)
                may_wait()
            self._mark()
            self._sharing += 1

    def _be_alone(self, may_wait: Callable[[], object]) -> None:
        closes_at = time.monotonic() + PATIENCE
        with self._changed:
            self._clocks += 1
            try:
                while self._alone or self._sharing > 0:
                    left = closes_at - time.monotonic()
                    if self._clocks >= self._enough or left <= 0:
                        self._closed = True
                    self._changed.wait(0.1 if self._closed else left)
                    may_wait()
                self._mark()
                self._alone = True
            finally:
                self._clocks -= 1
                if not self._alone and self._clocks == 0:
                    self._closed = False
                    self._changed.notify_all()
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def _mark(self) -> None:
        now = self._now()
        state = "alone" if self._alone else "shared" if self._sharing else "idle"
        self._spent[state] += now - self._marked
        self._marked = now

    def shares(self) -> dict[str, float]:
        """Parts of the time since the beginning: a clock ran, others computed, nobody had a place."""
        with self._changed:
            self._mark()
            whole = max(1e-9, self._marked - self._began)
            return {name: seconds / whole for name, seconds in self._spent.items()}


def _open(path: str | None) -> int | None:
    """Where the file cannot be made, this program's clocks are in order all the same."""
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    # Other users' clocks must be able to open it too; only its owner may say so.
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, 0o666)
    return descriptor
