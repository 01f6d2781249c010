"""Servers that check tasks (`task_check`), as many as cores were granted: threads borrow one for a task at a time."""

import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class CheckUnavailable(Exception):
    """No server could be started, or it died twice over one task: nothing is known about the task."""


class CheckServer:
    """One process with torch in it; used by one thread at a time."""

    def __init__(self, folder: str, environment: dict[str, str]) -> None:
        self.scratch = tempfile.mkdtemp(prefix="scratch-", dir=folder)
        self._environment, self._process = environment, None

    def check(self, job: dict[str, Any]) -> dict[str, Any]:
        job = {**job, "scratch": self.scratch, "user": secrets.randbelow(1 << 30), "walls": True}
        for _ in range(2):
            try:
                self._start()
                answer = self._ask(job)
                if "failure" in answer:
                    raise CheckUnavailable(f"a task could not be checked: {answer['failure']}")
                return answer
            except (OSError, ValueError) as error:
                self.stop()
                reason = error
        raise CheckUnavailable(f"the process that checks tasks does not work: {reason}")

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "task_check.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            text=True,
            encoding="utf-8",
        )
        if "ready" not in self._answer():
            raise ValueError("it did not get ready")

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"it ended with code {self._process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


class CheckPool:
    """`size` servers, each started when it is first needed."""

    def __init__(
        self,
        size: int,
        folder: str,
        log: Callable[..., Any],
        *,
        time_limit_s: float = 60.0,
        memory_bytes: int = 3 << 30,
    ) -> None:
        # Nothing of the engine's, and no key: tasks are somebody else's code.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("CUDA_AGENT_", "LLM_"))
        }
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._limits = {"time_limit_s": time_limit_s, "memory_bytes": memory_bytes}
        self._servers = [CheckServer(folder, environment) for _ in range(size)]
        self._free = queue.LifoQueue()
        self._log, self._warned = log, False
        for server in self._servers:
            self._free.put(server)

    def check(self, code: str, seed: int) -> dict[str, Any]:
        """`{"problem": None, "work", "batch_size"}`, or a problem in words. Raises CheckUnavailable."""
        server = self._free.get()
        try:
            facts = server.check({"code": code, "seed": seed, **self._limits})
        finally:
            self._free.put(server)
        if facts.pop("walls", True) is False and not self._warned:
            self._warned = True
            self._log(
                "namespaces are not available here: answers run with resource limits only, and could write files or "
                "reach the network",
                level="warning",
            )
        return facts

    def stop(self) -> None:
        for server in self._servers:
            server.stop()
