"""A task's file: overriding its constants, running it, and reading what it fixes.

Constants are overridden in the source, before it runs, so that whatever the file derives from them follows. Only
assignments at the top level of the file to a plain name count as constants; line numbers stay what they were.
"""

import ast
import hashlib
import linecache
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from refusal import Refusal, blame


class TaskSource:
    """A task's file that has run: its module, and its numbers by name in order of appearance."""

    def __init__(
        self, module: types.ModuleType, filename: str, constants: dict[str, float], default_dtype: torch.dtype
    ) -> None:
        self.module = module
        self.filename = filename
        self.constants = constants
        self.default_dtype = default_dtype

    def function(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self.module, name, None)
        return found if callable(found) else None

    def model_class(self) -> type:
        found = self.function("Model")
        if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
            raise Refusal("task", "the task defines no class Model(torch.nn.Module)")
        return found

    def forget(self) -> None:
        sys.modules.pop(self.module.__name__, None)
        linecache.cache.pop(self.filename, None)


def load(code: str, name: str, overrides: dict[str, int | list[int]]) -> TaskSource:
    """Runs a task's file."""
    digest = hashlib.blake2b(repr((code, sorted(overrides.items()))).encode(), digest_size=6).hexdigest()
    filename = f"<{name} {digest}>"
    # Tracebacks, torch.jit and torch.compile read sources through this table.
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    try:
        tree = override(ast.parse(code, filename), overrides)
        module = types.ModuleType(f"cuda_agent_task_{digest}")
        module.__file__ = filename
        # Dataclasses and torch.compile's guards look classes up by their module's name.
        sys.modules[module.__name__] = module
        default_dtype = execute(compile(tree, filename, "exec"), module)
    except BaseException as error:
        sys.modules.pop(f"cuda_agent_task_{digest}", None)
        raise blame(error, filename) from error
    return TaskSource(module, filename, read_constants(tree, module), default_dtype)


def execute(code: Any, module: types.ModuleType) -> torch.dtype:
    """Runs the file; what it makes the default element type is its own affair, not the next task's."""
    try:
        exec(code, module.__dict__)
        return torch.get_default_dtype()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def assigned_names(statement: ast.stmt) -> list[str]:
    """The plain names that a top-level statement assigns, in order."""
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target] if statement.value is not None else []
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = []
    for target in targets:
        elements = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        names += [element.id for element in elements if isinstance(element, ast.Name)]
    return names


def override(tree: ast.Module, overrides: dict[str, int | list[int]]) -> ast.Module:
    """Puts new values where the file assigns constants."""
    left = dict(overrides)
    for statement in tree.body:
        names = assigned_names(statement)
        wanted = [name for name in names if name in overrides]
        if not wanted:
            continue
        if len(names) != 1:
            raise Refusal(
                "task", f"`set` can't change {wanted[0]}: it is assigned together with others", None, statement.lineno
            )
        # What assigns a name has a value.
        assignment: Any = statement
        assignment.value = literal(names[0], overrides[names[0]], assignment.value)
        left.pop(names[0], None)
    if left:
        known = [name for statement in tree.body for name in assigned_names(statement)]
        raise Refusal(
            "task",
            f"`set` names {', '.join(sorted(left))}, which the task does not assign",
            f"it assigns {', '.join(dict.fromkeys(known)) or 'nothing'}",
        )
    return ast.fix_missing_locations(tree)


def literal(name: str, value: Any, old: ast.expr) -> ast.expr:
    """The new value as source; a float stays a float, a tuple a tuple."""
    was = old.value if isinstance(old, ast.Constant) else None
    if isinstance(value, list):
        value = tuple(value) if isinstance(old, ast.Tuple) else value
    elif isinstance(value, bool) != isinstance(was, bool) and was is not None:
        raise Refusal("task", f"`set` makes {name} {value!r}, but it is {was!r}", None, old.lineno)
    elif isinstance(was, float) and isinstance(value, int):
        value = float(value)
    elif not isinstance(value, (bool, int, float, str)):
        raise Refusal("task", f"`set` gives {name} a value that is no number, string or list", None, old.lineno)
    return ast.copy_location(ast.parse(repr(value), mode="eval").body, old)


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))


def read_constants(tree: ast.Module, module: types.ModuleType) -> dict[str, float]:
    constants = {}
    for statement in tree.body:
        for name in assigned_names(statement):
            value = module.__dict__.get(name)
            if is_number(value):
                constants.setdefault(name, value)
    return constants
