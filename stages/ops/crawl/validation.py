"""Runs candidates in child processes that can't import transformers, several at a time.

A child answers one candidate after another. One that crashes or hangs loses its candidate alone: the next goes to a
fresh child. The verdicts come back in the candidates' order, whatever the number of children.
"""

import json
import os
import pathlib
import select
import subprocess
import sys
import threading
from typing import Any

CHILD = pathlib.Path(__file__).with_name("validate_standalone.py")
# Far above what any piece takes at the sizes tried, so that a busy machine keeps the same classes as an idle one.
SECONDS = 120


def validate(candidates: list[dict[str, Any]], processes: int) -> list[dict[str, Any]]:
    """A verdict for each candidate: `usage`, or None with `reason` and `detail`."""
    verdicts: list[Any] = [None] * len(candidates)
    waiting = iter(range(len(candidates)))
    lock = threading.Lock()

    def work() -> None:
        child = None
        while True:
            with lock:
                index = next(waiting, None)
            if index is None:
                break
            child = child or Child()
            verdicts[index] = child.judge(candidates[index])
            if child.is_dead:
                child = None
        if child:
            child.close()

    # A child takes seconds to start: there is no use in more of them than there are handfuls of candidates.
    count = max(1, min(processes, (len(candidates) + 7) // 8))
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


class Child:
    """One child process."""

    def __init__(self) -> None:
        # The child finds the helper modules where this process does.
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        )
        self.is_dead = False

    def judge(self, candidate: dict[str, Any]) -> dict[str, Any]:
        document = {key: candidate[key] for key in ("operator", "usages", "body", "path", "version")}
        commands, output = self.process.stdin, self.process.stdout
        assert commands is not None and output is not None
        try:
            commands.write(json.dumps(document).encode() + b"\n")
            commands.flush()
            ready, _, _ = select.select([output], [], [], SECONDS)
            answer = output.readline() if ready else None
        except OSError:
            answer = b""
        if answer:
            return json.loads(answer)
        self.process.kill()
        code = self.process.wait()
        self.is_dead = True
        reason = ("too slow", f"took more than {SECONDS} s") if answer is None else ("crashes", f"exit status {code}")
        return {"usage": None, "reason": reason[0], "detail": reason[1]}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
