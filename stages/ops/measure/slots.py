"""Places for workers: which jobs run beside each other, when a worker is replaced, and the row that an outcome makes.

`supervisor` starts and watches the workers themselves.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import columns
from supervisor import MAX_PROCESSES, RESULT_BYTES, Outcome, WorkerUnavailable, Zygote, last_words


class Company:
    """Jobs beside each other, or one that has the machine to itself: whoever wants that goes before newcomers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs, self._alone, self._wanting = 0, False, 0

    @contextlib.contextmanager
    def beside_others(self) -> Iterator[bool]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._wanting)
            self._jobs += 1
            company = self._jobs > 1
        try:
            yield company
        finally:
            with self._changed:
                self._jobs -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._wanting += 1
            self._changed.wait_for(lambda: not self._alone and not self._jobs)
            self._wanting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class Slot:
    """A place for one worker at a time; a worker lives for `tasks_per_worker` jobs if each of them ends well."""

    def __init__(self, server: Zygote, number: int, company: Company, tasks_per_worker: int) -> None:
        self._server, self._number, self._company = server, number, company
        self._tasks_per_worker = tasks_per_worker
        self._worker, self._open = None, contextlib.ExitStack()

    def close(self) -> None:
        self._worker = None
        self._open.close()

    def measure(self, setup: dict[str, Any], job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """The facts about one task. An end that a busy machine can bring about counts only when it comes twice, the
        second time without company. Raises WorkerUnavailable where nothing was learnt."""
        started = time.monotonic()
        with self._company.beside_others():
            outcome, had_predecessors = self._run(setup, job)
            if had_predecessors and (outcome.killed or outcome.garbled or not outcome.finished):
                # What ended badly may be the fault of a task before it in that process.
                outcome, _ = self._run(setup, job)
        short_of_memory = self._server.gate is not None and outcome.facts.get("error_kind") == "memory"
        if outcome.suspicious or short_of_memory:
            with self._company.alone():
                self.close()
                outcome, _ = self._run(setup, job)
            if outcome.killed is None and not outcome.finished and outcome.code == 137:
                outcome.noise += b"\nkilled twice"
        facts = facts_of(outcome, job)
        facts["total_s"] = time.monotonic() - started
        return facts, outcome.seconds

    def _run(self, setup: dict[str, Any], job: dict[str, Any]) -> tuple[Outcome, bool]:
        """The outcome, and whether the process had measured other tasks before."""
        if self._worker is not None and self._worker.over:
            # It ended between two jobs, by itself or with the zygote.
            self.close()
        try:
            if self._worker is None:
                self._worker = self._open.enter_context(self._server.worker(setup, self._number))
            worker = self._worker
            last = worker.jobs + 1 >= self._tasks_per_worker
            outcome = worker.run(job, last=last)
        except WorkerUnavailable:
            self.close()
            raise
        # Processes grow; a task must not be ended for what those before it have taken.
        if last or not outcome.is_clean or worker.used > job["memory_limit"] / 2:
            self.close()
        if not last and not outcome.is_clean:
            error = outcome.facts.get("error_kind")
            why = outcome.killed or outcome.garbled or outcome.left_behind or error or f"exit status {outcome.code}"
            self._server.log(f"a worker is replaced: {why}", level="debug")
        return outcome, worker.jobs > 1


def describe_end(outcome: Outcome, job: dict[str, Any]) -> tuple[str, str] | None:
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


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def facts_of(outcome: Outcome, job: dict[str, Any]) -> dict[str, Any]:
    """The row that an outcome amounts to: every declared fact, null where it is not known."""
    facts: dict[str, Any] = dict.fromkeys(columns.FACTS)
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
