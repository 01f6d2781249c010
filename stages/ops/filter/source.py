"""What a task's source says about itself, read from its syntax tree alone. No code is run.

Everything looks at the class `Model`, the one that a candidate has to replace; helper classes, as the closure of a
transformers class brings them, may have parts that nobody uses.
"""

import ast
import functools
from collections.abc import Iterator
from typing import Any

FUNCTIONAL_OPERATORS = {
    ast.MatMult: ("matmul", "mm", "bmm"),
    ast.Add: ("add",),
    ast.Sub: ("sub", "subtract"),
    ast.Mult: ("mul", "multiply"),
    ast.Div: ("div", "divide", "true_divide"),
    ast.Pow: ("pow",),
    ast.USub: ("neg", "negative"),
    ast.FloorDiv: ("floor_divide",),
    ast.Mod: ("remainder", "fmod"),
    ast.Gt: ("gt", "greater"),
    ast.GtE: ("ge", "greater_equal"),
    ast.Lt: ("lt", "less"),
    ast.LtE: ("le", "less_equal"),
    ast.Eq: ("eq",),
    ast.NotEq: ("ne", "not_equal"),
    ast.BitAnd: ("bitwise_and", "logical_and"),
    ast.BitOr: ("bitwise_or", "logical_or"),
    ast.BitXor: ("bitwise_xor", "logical_xor"),
    ast.Invert: ("bitwise_not", "logical_not"),
}


class NotATask(Exception):
    """The source can't be read as a task."""


class Source:
    """A parsed task."""

    def __init__(self, tree: ast.Module, model: ast.ClassDef) -> None:
        self.tree, self.model = tree, model
        self.methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)}

    @functools.cached_property
    def imports(self) -> dict[str, str]:
        """Local name to full dotted name, for everything that the file imports."""
        names = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    names[alias.asname or whole] = whole
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return names

    @functools.cached_property
    def classes(self) -> set[str]:
        return {node.name for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @functools.cached_property
    def constants(self) -> set[str]:
        """Names that the module's top level assigns."""
        names = set()
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for inner in ast.walk(target) if target is not None else ():
                    if isinstance(inner, ast.Name):
                        names.add(inner.id)
        return names


def parse(code: str) -> Source:
    """Read a task's file. Raises NotATask."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise NotATask(f"the code does not parse: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            return Source(tree, node)
    raise NotATask("the code defines no class Model")


def docstring(node: Any) -> ast.Expr | None:
    """The statement that is the docstring of a class or function, or None."""
    first = node.body[0] if node.body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return first if is_text else None


def dotted(node: ast.expr, imports: dict[str, str]) -> str | None:
    """The full name of `nn.Linear` and the like, or None for what is no chain of names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([imports.get(node.id, node.id), *reversed(parts)])


def _arguments(method: ast.FunctionDef) -> list[str]:
    arguments = method.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in named[1:] if not argument.arg.startswith("_")]


def _read_names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}


def unused_arguments(source: Source, method: str) -> list[str]:
    """Arguments of a method of Model that its body never reads, or of `__init__` that it only puts into an attribute
    that nobody reads."""
    node = source.methods.get(method)
    if node is None:
        return []
    idle = _idle_assignments(source) if method == "__init__" else []
    read = set().union(*(_read_names(statement) for statement in node.body if statement not in idle))
    return [name for name in _arguments(node) if name not in read]


def _idle_assignments(source: Source) -> list[ast.Assign]:
    """Statements `self.a = b` of `__init__` whose attribute nobody reads."""
    read = _read_attributes(source)
    return [
        statement
        for statement in source.methods["__init__"].body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Name)
        and read is not None
        and (names := _own_attributes(statement, ast.Store))
        and not read & set(names)
    ]


def _own_attributes(node: ast.AST, context: type) -> list[str]:
    return [
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, context)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    ]


def _builds_something(value: ast.expr) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(value))


def unused_modules(source: Source) -> list[Any]:
    """Attributes that `__init__` gives a module or a parameter and that nothing that `forward` reaches reads."""
    start, read = source.methods.get("__init__"), _read_attributes(source)
    if start is None or read is None:
        return []
    made = [
        name
        for node in ast.walk(start)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _builds_something(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in _own_attributes(target, ast.Store)
    ]
    made += [
        node.args[0].value
        for node in ast.walk(start)
        if isinstance(node, ast.Call)
        and dotted(node.func, {}) in REGISTER
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    return [name for name in dict.fromkeys(made) if name not in read]


REGISTER = ("self.register_buffer", "self.register_parameter", "self.add_module")


def _read_attributes(source: Source) -> set[str] | None:
    """Attributes of `self` that `forward`, the methods that it calls, or a value in `__init__` read; None where they
    may be read by name. A statement of `__init__` that only initialises an attribute is no use of it."""
    if any(
        isinstance(node, ast.Call) and dotted(node.func, {}) in ("getattr", "self.children", "self.modules")
        for node in ast.walk(source.model)
    ):
        return None
    reached = _reached_methods(source)
    nodes = [source.methods[name] for name in reached if name != "__init__"]
    nodes += [node for node in source.model.body if not isinstance(node, ast.FunctionDef)]
    if "__init__" in source.methods:
        values = (ast.Assign, ast.AnnAssign, ast.AugAssign)
        inner = ast.walk(source.methods["__init__"])
        nodes += [node.value for node in inner if isinstance(node, values) and node.value is not None]
    return {name for node in nodes for name in _own_attributes(node, ast.Load)}


def _reached_methods(source: Source) -> set[str]:
    """Methods of Model that `forward` calls or names, and `forward`. All of them where there is no forward."""
    if "forward" not in source.methods:
        return set(source.methods)
    reached, waiting = set(), ["forward"]
    while waiting:
        name = waiting.pop()
        if name in source.methods and name not in reached:
            reached.add(name)
            waiting += _own_attributes(source.methods[name], ast.Load)
    return reached


def dead_values(source: Source) -> list[str]:
    """Local variables of `forward` that are assigned and never read, or assigned anew before anybody read them: their
    computation is dead. So is a call whose result is thrown away."""
    node = source.methods.get("forward")
    if node is None:
        return []
    read = _read_names(node)
    # A tuple must be taken apart whole, even where one part is of use.
    stored = [
        target.id
        for statement in ast.walk(node)
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.NamedExpr))
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    ]
    unread = [name for name in stored if name not in read]
    bare = [
        ast.unparse(statement)[:60]
        for statement in ast.walk(node)
        if isinstance(statement, ast.Expr) and _is_pure_call(statement.value, source.imports)
    ]
    return list(dict.fromkeys([*unread, *_overwritten(node.body), *bare]))


def _overwritten(statements: list[ast.stmt]) -> list[Any]:
    """Variables that a straight line of statements assigns and does not read before it assigns them again or ends."""
    waiting, found = set(), []
    for statement in statements:
        waiting -= _read_names(statement)
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if isinstance(target, ast.Name):
            found += [target.id] if target.id in waiting else []
            waiting.add(target.id)
            continue
        # What a branch, a loop or a tuple assigns may be assigned or not.
        waiting -= {inner.id for inner in ast.walk(statement) if isinstance(inner, ast.Name)}
    return found + sorted(waiting)


def _is_pure_call(node: ast.expr, imports: dict[str, str]) -> bool:
    """A call as a statement of its own whose result is thrown away, of a function that writes into nothing."""
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func, imports)
    return (
        bool(name)
        and name.startswith("torch.")
        and not name.endswith("_")
        and "out" not in {keyword.arg for keyword in node.keywords}
    )


def read_globals(source: Source) -> list[Any]:
    """Constants of the module that Model reads: they should be arguments of `__init__`."""
    local = {
        argument.arg
        for node in ast.walk(source.model)
        if isinstance(node, ast.arguments)
        for argument in [*node.posonlyargs, *node.args, *node.kwonlyargs]
    }
    local |= {
        node.id for node in ast.walk(source.model) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return sorted((_read_names(source.model) & source.constants) - local)


TENSOR_MAKERS = {
    f"torch.{name}"
    for name in (
        "tensor as_tensor ones zeros full empty eye arange range linspace logspace rand randn randint randperm normal "
        "hann_window hamming_window tril_indices triu_indices".split()
    )
}


def constant_tensors(source: Source) -> list[str]:
    """Tensors that a method other than `__init__` makes from constants and attributes alone: they are the same in
    every call and belong into a buffer. Sizes taken from an input are fine."""
    return [
        ast.unparse(call)[:60]
        for method in _methods_of_all_classes(source)
        for call in ast.walk(method)
        if isinstance(call, ast.Call)
        and dotted(call.func, source.imports) in TENSOR_MAKERS
        and not _takes_a_local(call, method)
    ]


def _methods_of_all_classes(source: Source) -> list[ast.FunctionDef]:
    return [
        method
        for body in source.tree.body
        if isinstance(body, ast.ClassDef)
        for method in body.body
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
    ]


def _takes_a_local(call: ast.Call, method: ast.FunctionDef) -> bool:
    """Whether what a call makes depends on an argument or a variable of the method, its device and type aside."""
    local = {argument.arg for argument in ast.walk(method.args) if isinstance(argument, ast.arg)} - {"self"}
    local |= {node.id for node in ast.walk(method) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    values = [*call.args, *(word.value for word in call.keywords if word.arg not in ("device", "dtype"))]
    return any(local & _read_names(value) for value in values)


def literal_sizes(source: Source, limit: float) -> list[str]:
    """Integers above the limit among the arguments of calls in Model: sizes that nobody can set. Defaults of
    arguments are no such thing."""
    return [
        f"{number} in {ast.unparse(call.func)}"
        for method in source.methods.values()
        for call in ast.walk(method)
        if isinstance(call, ast.Call)
        for number in _integers([*call.args, *(word.value for word in call.keywords)])
        if abs(number) > limit
    ]


def _integers(values: list[ast.expr]) -> Iterator[int]:
    """Integers that are values themselves or items of tuples and lists, not those of calls and sums within."""
    for value in values:
        if isinstance(value, (ast.Tuple, ast.List)):
            yield from _integers(value.elts)
        elif isinstance(value, ast.Constant) and isinstance(value.value, int) and not isinstance(value.value, bool):
            yield value.value


def pinned_batch(source: Source) -> list[str]:
    """Where Model fixes the number of samples: an argument of `__init__` for it, or a `view` or `expand` of the first
    dimension to a number."""
    start = source.methods.get("__init__")
    found = [
        name for name in (_arguments(start) if start else []) if name in ("batch", "batch_size", "bsz", "batchsize")
    ]
    for method in (node for name, node in source.methods.items() if name != "__init__"):
        for call in ast.walk(method):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            sizes = call.args[0].elts if isinstance(call.args[0], (ast.Tuple, ast.List)) else call.args
            first = list(_integers(sizes[:1]))
            if call.func.attr in ("view", "reshape", "expand") and len(sizes) > 1 and first and first[0] > 1:
                found.append(ast.unparse(call)[:60])
    return found


def used_operators(source: Source) -> set[str]:
    """The last words of every operator that the file's classes use: functions and classes of torch by their full
    names, methods, classes of the file itself, and what Python's own operators stand for."""
    used = set(source.classes)
    bodies = [node for node in source.tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    bodies = [node for node in bodies if getattr(node, "name", "") not in ("get_inputs", "get_init_inputs")]
    for node in (inner for body in bodies for inner in ast.walk(body)):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Name):
            used.add(source.imports.get(node.id, node.id).rpartition(".")[2])
        elif isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign)):
            used.update(FUNCTIONAL_OPERATORS.get(type(node.op), ()))
        elif isinstance(node, ast.Compare):
            used.update(name for symbol in node.ops for name in FUNCTIONAL_OPERATORS.get(type(symbol), ()))
    return used


def undeclared(source: Source, operators: list[str]) -> list[str]:
    """The declared operators that the code does not use."""
    used = used_operators(source)
    return [name for name in operators if name.rpartition(".")[2] not in used]
