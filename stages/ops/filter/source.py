"""What a task's source says about itself, read from its syntax tree alone. No code is run.

Everything looks at the class `Model`, the one that a candidate has to replace; helper classes, as the closure of a
transformers class brings them, may have parts that nobody uses.
"""

import ast
import functools

FUNCTIONAL_OPERATORS = {
    ast.MatMult: ("matmul", "mm", "bmm"),
    ast.Add: ("add",),
    ast.Sub: ("sub", "subtract"),
    ast.Mult: ("mul", "multiply"),
    ast.Div: ("div", "divide", "true_divide"),
    ast.Pow: ("pow",),
    ast.USub: ("neg", "negative"),
}


class NotATask(Exception):
    """The source can't be read as a task."""


class Source:
    """A parsed task."""

    def __init__(self, tree, model):
        self.tree, self.model = tree, model
        self.methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)}

    @functools.cached_property
    def imports(self):
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
    def classes(self):
        return {node.name for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @functools.cached_property
    def constants(self):
        """Names that the module's top level assigns."""
        names = set()
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for inner in ast.walk(target) if target is not None else ():
                    if isinstance(inner, ast.Name):
                        names.add(inner.id)
        return names


def parse(code):
    """Read a task's file. Raises NotATask."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise NotATask(f"the code does not parse: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            return Source(tree, node)
    raise NotATask("the code defines no class Model")


def dotted(node, imports):
    """The full name of `nn.Linear` and the like, or None for what is no chain of names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([imports.get(node.id, node.id), *reversed(parts)])


def _arguments(method):
    arguments = method.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in named[1:] if not argument.arg.startswith("_")]


def _read_names(node):
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}


def unused_arguments(source, method):
    """Arguments of a method of Model that its body never reads."""
    node = source.methods.get(method)
    if node is None:
        return []
    read = set().union(*(_read_names(statement) for statement in node.body))
    return [name for name in _arguments(node) if name not in read]


def _own_attributes(node, context):
    return [
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, context)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    ]


def _builds_something(value):
    return any(isinstance(inner, ast.Call) for inner in ast.walk(value))


def unused_modules(source):
    """Attributes that `__init__` gives a module or a parameter and that nothing in Model reads."""
    start = source.methods.get("__init__")
    if start is None:
        return []
    made = [
        name
        for node in ast.walk(start)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _builds_something(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in _own_attributes(target, ast.Store)
    ]
    read = set(_own_attributes(source.model, ast.Load))
    reads_by_name = any(
        isinstance(node, ast.Call) and dotted(node.func, {}) in ("getattr", "self.children", "self.modules")
        for node in ast.walk(source.model)
    )
    return [] if reads_by_name else [name for name in dict.fromkeys(made) if name not in read]


def dead_values(source):
    """Local variables of `forward` that are assigned and never read: their computation is dead."""
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
    unread = [name for name in stored if name not in read and not name.startswith("_")]
    bare = [
        ast.unparse(statement)[:60]
        for statement in ast.walk(node)
        if isinstance(statement, ast.Expr) and _is_pure_call(statement.value, source.imports)
    ]
    return list(dict.fromkeys([*unread, *bare]))


def _is_pure_call(node, imports):
    """A call as a statement of its own whose result is thrown away, of a function that writes into nothing."""
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func, imports)
    return bool(name) and name.startswith("torch.") and not name.endswith("_") and "out" not in {
        keyword.arg for keyword in node.keywords
    }  # fmt: skip


def read_globals(source):
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


def used_operators(source):
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
    return used


def undeclared(source, operators):
    """The declared operators that the code does not use."""
    used = used_operators(source)
    return [name for name in operators if name.rpartition(".")[2] not in used]
