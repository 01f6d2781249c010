"""Why a request can't be answered, in a form that the evaluator can pass on.

| kind | meaning |
|---|---|
| `task` | the task's own code is wrong: it raises, exits, defines no `Model` |
| `unsupported` | the task is fine, but a candidate can't be given it; the message names what |
| `memory` | the device, or the arena's limit, is too small for what was asked |
| `ended` | the worker's process ended: the task's code did that, or the machine |
| `internal` | the request makes no sense, or the reference itself failed |
"""

import linecache
from typing import Any


class Refusal(Exception):
    """An error reply."""

    def __init__(self, kind: str, message: str, hint: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = " ".join(str(message).split())
        self.hint = hint
        self.line = line
        self.ends_worker = False

    def reply(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "hint": self.hint, "line": self.line}


def unsupported(message: str, hint: str | None = None) -> Refusal:
    return Refusal("unsupported", message, hint)


def blame(error: Any, filename: str) -> Refusal:
    """What an exception that came out of task code means: a shortage of memory, or a fault at a line of the task."""
    if isinstance(error, Refusal):
        return error
    if is_memory_error(error):
        return Refusal("memory", first_line(error) or "out of memory", "use smaller sizes (`set`), or fewer sets")
    line = line_in(error, filename)
    refusal = Refusal("task", describe(error), quote(filename, line), line)
    refusal.ends_worker = poisons_gpu(error)
    return refusal


def poisons_gpu(error: Any) -> bool:
    """An error of the GPU (an index out of bounds, say) stays in the process's context for good."""
    import torch

    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)


def is_memory_error(error: Any) -> bool:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def describe(error: Any) -> str:
    if isinstance(error, SystemExit):
        return f"the task calls sys.exit({'' if error.code is None else error.code})"
    if isinstance(error, KeyboardInterrupt):
        return "the task raises KeyboardInterrupt"
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: Any) -> str:
    """torch appends pages of advice to some messages; the first line says what happened."""
    # A SyntaxError's own text ends with the file's made-up name.
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip()
    return text.splitlines()[0] if text else "no message"


def line_in(error: Any, filename: str) -> int | None:
    """The innermost line of the task's file that the exception passed through."""
    if isinstance(error, SyntaxError) and error.filename == filename:
        return error.lineno
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == filename:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def quote(filename: str, line: int | None) -> str | None:
    if line is None:
        return None
    return linecache.getline(filename, line).strip() or None
