"""What an answer of the model must look like, told from its text alone: nothing is run here.

The rules of `ops/filter` that read the source are applied by its own module, so that a repair round can mend what the
filter would reject later. The others keep a task to the operators that were asked for, and away from everything but
torch. They are no wall: a task that gets by them runs in a process that has walls (`task_check`).
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

import source as task_source

MOST_CHARACTERS = 20_000
MOST_PROBLEMS = 4
IMPORTABLE = {"torch", "torch.nn", "torch.nn.functional", "torch.fft", "torch.linalg", "torch.special", "math"}
FORBIDDEN_NAMES = {
    "open", "exec", "eval", "compile", "input", "globals", "locals", "vars", "breakpoint", "getattr", "setattr",
    "delattr", "print", "exit", "quit", "memoryview", "super_", "object",
}  # fmt: skip
# What of torch has effects, loads code, or says where things run.
FORBIDDEN_TORCH = {
    "load", "save", "hub", "utils", "jit", "distributed", "multiprocessing", "package", "ops", "classes", "library",
    "compile", "export", "cuda", "backends", "onnx", "serialization", "manual_seed", "seed", "set_default_device",
    "set_default_dtype", "set_num_threads", "from_file", "autograd", "profiler", "overrides", "func", "futures",
}  # fmt: skip
# Calls that arrange and don't compute.
ARRANGING = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "movedim", "contiguous",
    "size", "dim", "numel", "expand", "expand_as", "view_as", "reshape_as", "t", "mT", "swapaxes", "moveaxis",
}  # fmt: skip
# What builds modules and parameters in __init__.
BUILDING = {
    "Module",
    "Parameter",
    "ParameterList",
    "ModuleList",
    "Sequential",
    "randn",
    "rand",
    "ones",
    "zeros",
    "full",
    "empty",
    "tensor",
    "register_buffer",
    "arange",
    "register_parameter",
    "Tensor",
}


def extract_code(text: str) -> str | None:
    """The Python file in an answer, or None: the longest block with a class Model, or a bare file."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    blocks = re.findall(r"^[ \t]*```[\w+-]*[ \t]*\n(.*?)^[ \t]*```[ \t]*$", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if "class Model" in block]
    if blocks:
        return max(blocks, key=len).strip() + "\n"
    if "class Model" in text and "```" not in text:
        return text.strip() + "\n"
    return None


def problems(code: str, operators: list[str]) -> list[str]:
    """What is wrong with a file that is to apply `operators`, most important first; empty where nothing is."""
    if len(code) > MOST_CHARACTERS:
        return [f"it has more than {MOST_CHARACTERS} characters"]
    try:
        source = task_source.parse(code)
    except task_source.NotATask as error:
        return [str(error)]
    found = [*_outline(source), *_imports(source), *_forbidden(source)]
    if not found:
        found = [*_contract(source), *_operators(source, operators), *_waste(source)]
    return found[:MOST_PROBLEMS]


def _at(node: ast.stmt | ast.expr | ast.alias) -> str:
    return f"line {node.lineno}: "


def _outline(source: task_source.Source) -> Iterator[str]:
    """Only definitions at the top level: importing the file runs nothing."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)
    for node in source.tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not isinstance(node, kinds) and not is_text:
            yield _at(node) + "only imports, constants, classes and functions belong at the top level of the file"


def _imports(source: task_source.Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module if not node.level else "." + (node.module or "")]
        else:
            continue
        for name in names:
            if isinstance(node, ast.ImportFrom) and any(alias.name == name.rpartition(".")[2] for alias in node.names):
                yield _at(node) + f"{name} has no {name.rpartition('.')[2]}; write `import {name} as …`"
            if name not in IMPORTABLE:
                yield _at(node) + f"{name} is imported; only torch and its nn may be"


def _forbidden(source: task_source.Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and (node.id in FORBIDDEN_NAMES or _is_dunder(node.id)):
            yield _at(node) + f"{node.id} can't be used"
        elif isinstance(node, ast.Attribute):
            if _is_dunder(node.attr) and node.attr != "__init__":
                yield _at(node) + f".{node.attr} can't be used"
            name = task_source.dotted(node, source.imports) or ""
            parts = name.split(".")
            if parts[0] == "torch" and (FORBIDDEN_TORCH & set(parts[1:]) or any(p.startswith("_") for p in parts[1:])):
                yield _at(node) + f"{name} can't be used"
        elif isinstance(node, (ast.AsyncFunctionDef, ast.Global, ast.Nonlocal, ast.Delete)):
            yield _at(node) + f"{type(node).__name__} can't be used"


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _contract(source: task_source.Source) -> Iterator[str]:
    """What callers of a task rely on."""
    functions = {node.name: node for node in source.tree.body if isinstance(node, ast.FunctionDef)}
    for name in ("get_inputs", "get_init_inputs"):
        if name not in functions:
            yield f"the function {name} is missing"
        elif functions[name].args.args:
            yield f"{name} takes no arguments"
    if "forward" not in source.methods:
        yield "Model has no method forward"
    bases = [task_source.dotted(base, source.imports) for base in source.model.bases]
    if "torch.nn.Module" not in bases:
        yield "Model is no nn.Module"
    if not isinstance(constants_of(source.tree).get("batch_size"), int):
        yield "there is no constant `batch_size` at the top level of the file"
    elif "get_inputs" in functions and "batch_size" not in _names(functions["get_inputs"]):
        yield "get_inputs() does not use batch_size"


def constants_of(tree: ast.Module) -> dict[str, int]:
    """The top level's assignments of plain values to single names."""
    found = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and not isinstance(value.value, bool):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


def _names(node: ast.FunctionDef) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _operators(source: task_source.Source, operators: list[str]) -> Iterator[str]:
    """Every operator that was asked for is used, and nothing else that computes."""
    missing = task_source.undeclared(source, operators)
    if missing:
        yield f"it does not use {', '.join(missing)}"
    words = {name.rpartition(".")[2] for name in operators}
    for name, method in source.methods.items():
        allowed = words | ARRANGING | (BUILDING if name == "__init__" else set())
        extra = dict.fromkeys(_computing(method, source, allowed))
        if extra:
            yield f"{name} uses {', '.join(extra)}, which {'is' if len(extra) == 1 else 'are'} not among the operators"


def _computing(method: ast.FunctionDef, source: task_source.Source, allowed: set[str]) -> Iterator[str]:
    """Names of calls and signs in a method that compute something beyond `allowed`."""
    values = _tensor_names(method)
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = task_source.dotted(node.func, source.imports)
            word = (name or getattr(node.func, "attr", "")).rpartition(".")[2]
            of_torch = name is not None and name.startswith("torch.") and not name.startswith("torch.nn.init.")
            root = name.split(".")[0] if name else None
            of_tensor = isinstance(node.func, ast.Attribute) and (name is None or root in values)
            if (of_torch or of_tensor) and word not in allowed and not _is_dunder(word):
                yield name if name and of_torch else f".{word}()"
        elif isinstance(node, (ast.BinOp, ast.AugAssign)):
            sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
            meanings = task_source.FUNCTIONAL_OPERATORS.get(type(node.op), (type(node.op).__name__.lower(),))
            touches = method.name == "forward" and any(_is_tensor(side, values) for side in sides)
            if touches and not set(meanings) & allowed:
                yield meanings[0]


NUMBERS = ("size", "dim", "numel", "len", "int")


def _is_tensor(node: ast.expr, values: Any) -> bool:
    """Whether an operand is a tensor: a name that holds one, or what a module or a function returns."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) not in NUMBERS
    return isinstance(node, ast.Name) and node.id in values


def _tensor_names(method: ast.FunctionDef) -> set[str]:
    """Names in `forward` that hold tensors: its arguments, and what calls of modules and functions return."""
    if method.name != "forward":
        return set()
    names = {argument.arg for argument in method.args.args[1:]}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            # What `x.size(0)` and `len(x)` return are numbers.
            word = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
            if word not in NUMBERS:
                names |= {
                    inner.id for target in node.targets for inner in ast.walk(target) if isinstance(inner, ast.Name)
                }
    return names - {"self"}


def _waste(source: task_source.Source) -> Iterator[str]:
    """The defects of the released set that the source shows; the filter has the same rules."""
    for method in ("__init__", "forward"):
        unused = task_source.unused_arguments(source, method)
        if unused:
            yield f"{method} never reads its argument {', '.join(unused)}"
    unused = task_source.unused_modules(source)
    if unused:
        yield f"Model never uses self.{', self.'.join(unused)}"
    dead = task_source.dead_values(source)
    if dead:
        yield f"forward computes {', '.join(dead)} and never uses it"
    read = task_source.read_globals(source)
    if read:
        yield f"Model reads the constant {', '.join(read)} of the file; it must be an argument of __init__"
