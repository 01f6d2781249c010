"""What a worker and its supervisor say to each other: facts in one direction, turns at the GPU in the other."""

import contextlib
import json
import os
import time
from typing import Any

import torch

import cuda_agent_stage as stage

PAUSE_AFTER = 0.02
"""Seconds: steps that are shorter don't keep a clock waiting."""


class TaskFailed(Exception):
    """The task's own code failed; the facts about it have been sent."""


class TooSlow(Exception):
    """Not worth measuring further."""


class Report:
    """The way back to the supervisor: one JSON object a line, each with the nonce of this worker."""

    def __init__(self, descriptor: Any, nonce: Any) -> None:
        self._descriptor, self.nonce = descriptor, nonce

    def send(self, **message: Any) -> None:
        line = json.dumps(stage.finite({"nonce": self.nonce, **message})) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(self._descriptor, data) :]

    def facts(self, **facts: Any) -> None:
        self.send(facts=facts)

    def at(self, where: Any) -> None:
        self.send(at=where)


def first_lines(error: Any) -> str:
    """The first two lines with text of an error's message: compilers put the cause in the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:500]


def kind_of(error: Any) -> str:
    text = str(error)
    # The last is how torch's allocator fails on a GPU where it can't ask how much memory there is: NVIDIA's library for
    # that does not work in forks.
    exhausted = (
        "can't allocate memory",
        "not enough memory",
        "Cannot allocate memory",
        "out of memory",
        "nvmlInit_v2_",
    )
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in text for words in exhausted):
        return "memory"
    return "exit" if isinstance(error, SystemExit) else "slow" if isinstance(error, TooSlow) else "exception"


class Step:
    """A named part of the work. What the task raises in it ends the measurement with a fact, not with a crash."""

    def __init__(self, report: Any, name: Any) -> None:
        self.report, self.name = report, name

    def __enter__(self) -> None:
        self.report.at(self.name)

    def __exit__(self, _: Any, error: Any, __: Any) -> bool:
        if error is None or isinstance(error, TaskFailed):
            return False
        self.report.facts(error_stage=self.name, error_kind=kind_of(error), error=first_lines(error))
        raise TaskFailed from error


class Commands:
    """The lines that the supervisor sends: jobs, and places at the gate."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor, self._data = descriptor, b""

    def line(self) -> Any:
        """The next line, or None at the end."""
        while b"\n" not in self._data:
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                return None
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return line


class NoGate:
    """On a CPU every task has its cores to itself."""

    waited = 0.0
    shared = alone = apart = staticmethod(contextlib.nullcontext)

    def pause(self) -> None:
        pass

    hold_alone = release = pause


class Gate:
    """Asks the supervisor for a place on the GPU; all work is over before it is given back."""

    def __init__(self, commands: Any, report: Any) -> None:
        self._commands, self._report, self._holding = commands, report, None
        self.waited = 0.0
        """Seconds, since the beginning."""

    def _enter(self, kind: Any) -> None:
        self._report.send(gate=kind)
        self._await_place()
        self._holding = kind

    def _leave(self) -> None:
        try:
            torch.cuda.synchronize()
        finally:
            self._holding = None
            self._report.send(gate="leave")

    @contextlib.contextmanager
    def shared(self) -> Any:
        """Beside others. Inside of either kind of place it is that place."""
        if self._holding is not None:
            yield
            return
        self._enter("shared")
        try:
            yield
        finally:
            self._leave()

    def pause(self) -> None:
        """Between two steps of a shared place: lets clocks pass."""
        if self._holding == "shared" and time.monotonic() - self._since > PAUSE_AFTER:
            torch.cuda.synchronize()
            self._report.send(gate="pause")
            self._await_place()

    def _await_place(self) -> None:
        began = time.monotonic()
        if self._commands.line() != b"enter":
            # The supervisor is gone or gave this worker up.
            os._exit(1)
        self._since = time.monotonic()
        self.waited += self._since - began

    def hold_alone(self) -> None:
        """Alone from here until the end of an `alone`, or `release`."""
        if self._holding != "alone":
            self._enter("alone")

    def release(self) -> None:
        """Gives the place back, if there is one."""
        if self._holding is not None:
            self._leave()

    @contextlib.contextmanager
    def alone(self) -> Any:
        self.hold_alone()
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def apart(self) -> Any:
        """Alone for a while in the middle of a shared place: what chooses among kernels by their times needs it."""
        was_shared = self._holding == "shared"
        if self._holding == "alone":
            yield
            return
        if was_shared:
            self._leave()
        try:
            with self.alone():
                yield
        finally:
            if was_shared:
                self._enter("shared")
