"""Folds what is decided in a closure of definitions: what a class of a library keeps open, a task has settled.

`Fold` evaluates constant conditions. `Tidy` looks across the definitions of a closure: arguments that every call gives
alike or that nobody reads, second names, attributes that are constants, functions that return what they are given,
statements that nothing follows from. Each step leaves the values alone that the closure computes; where a step can't
see every use of a name, it does nothing.
"""

import ast
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Who subclasses a module may mean torch to call these.
MODULE_NAMES = frozenset(dir(torch.nn.Module))
ACTIVATION = re.compile(r"^(hidden_)?act(ivation)?(_fn|_function|_name|_type)?$")
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)


def walk(tree: ast.AST) -> Iterator[Any]:
    """All nodes below and with one, as `ast.walk` gives them but for contexts, in another order and in half the
    time."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                todo += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                todo.append(value)


def listed(result: Any) -> Any:
    if result is None:
        return []
    return result if isinstance(result, list) else [result]


class Fold(ast.NodeTransformer):
    """Evaluates conditions over constants, and drops the branches that they rule out."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        sides: list[Any] = [node.left, *node.comparators]
        if len(sides) == 2 and all(isinstance(side, ast.Constant) for side in sides):
            left, right = (side.value for side in sides)
            folds = {
                ast.Is: left is right,
                ast.IsNot: left is not right,
                ast.Eq: left == right,
                ast.NotEq: left != right,
            }
            if type(node.ops[0]) in folds:
                return ast.Constant(folds[type(node.ops[0])])
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant):
            return ast.Constant(not node.operand.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        same = isinstance(node.op, ast.FloorDiv) and ast.unparse(node.left) == ast.unparse(node.right)
        return ast.Constant(1) if same and ast.unparse(node.left).startswith(("config.", "self.config.")) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        decisive = isinstance(node.op, ast.Or)
        values = []
        for value in node.values:
            if isinstance(value, ast.Constant):
                if bool(value.value) == decisive:
                    values.append(value)
                    break
                # The last value is the result, unless the one before it is a boolean already.
                neutral = value.value is (not decisive) and values and is_boolean(values[-1])
                if value is not node.values[-1] or neutral:
                    continue
            values.append(value)
        return values[0] if len(values) == 1 else ast.BoolOp(op=node.op, values=values)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = decided(self.visit(node.test))
        if isinstance(node.test, ast.Constant):
            return self.visit(node.body if node.test.value else node.orelse)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.If | list[ast.stmt] | None:
        node.test = decided(self.visit(node.test))
        if isinstance(node.test, ast.Constant):
            chosen = node.body if node.test.value else node.orelse
            return [item for statement in chosen for item in listed(self.visit(statement))] or None
        node.body = [i for s in node.body for i in listed(self.visit(s))] or [ast.Pass()]
        node.orelse = [i for s in node.orelse for i in listed(self.visit(s))]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        self.generic_visit(node)
        if isinstance(node.value, ast.Constant) and not isinstance(node.value.value, str):
            return None
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        self.generic_visit(node)
        # `x = x` is what is left of a dropout.
        if len(node.targets) == 1 and ast.unparse(node.targets[0]) == ast.unparse(node.value):
            return None
        return node


def decided(test: ast.expr) -> ast.expr:
    """A condition's constant where one of its parts settles it, whatever the others are; else the condition."""
    if isinstance(test, ast.BoolOp) and all(is_pure(value) for value in test.values):
        decisive = isinstance(test.op, ast.Or)
        if any(isinstance(value, ast.Constant) and bool(value.value) == decisive for value in test.values):
            return ast.Constant(decisive)
    return test


def is_boolean(node: ast.Compare) -> bool:
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


class Replace(ast.NodeTransformer):
    """Puts expressions in place of names that are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        chosen = self.values.get(node.id) if isinstance(node.ctx, ast.Load) else None
        return node if chosen is None else copy.deepcopy(chosen)


class ReplaceAttribute(ast.NodeTransformer):
    """Puts constants in place of attributes of one name."""

    def __init__(self, base: str, values: dict[str, int]) -> None:
        self.base, self.values = base, values

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        own = isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name) and node.value.id == self.base
        return ast.Constant(self.values[node.attr]) if own and node.attr in self.values else node


class Tidy:
    """One closure: definitions by name, and the class that they are there for."""

    def __init__(self, nodes: dict[str, Any], root: str) -> None:
        self.nodes, self.root = nodes, root

    def step(self) -> bool:
        """Every rewriting once; returns whether anything changed. Callers repeat it until nothing does."""
        before = self._text()
        self._inline_constant_attributes()
        for name in list(self.nodes):
            self._settle_parameters(name)
        self._inline_identities()
        for node in self.nodes.values():
            for function in functions(node):
                inline_second_names(function)
                drop_dead_statements(function)
        self._drop_unread_methods()
        for name, node in self.nodes.items():
            self.nodes[name] = ast.fix_missing_locations(Fold().visit(node))
            fill_empty_bodies(self.nodes[name])
        return self._text() != before

    def _text(self) -> str:
        return "\n".join(ast.unparse(node) for node in self.nodes.values())

    # -- attributes

    def _constants_of(self, node: ast.ClassDef | ast.FunctionDef) -> dict[str, Any]:
        """Attributes that a class sets once, to a flag, to None or to one."""
        if not isinstance(node, ast.ClassDef) or self._has_relatives(node):
            return {}
        stores = {}
        for item in walk(node):
            if isinstance(item, ast.Attribute) and not isinstance(item.ctx, ast.Load):
                stores.setdefault(item.attr, []).append(item)
        found = {}
        for item in walk(node):
            if not (isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Attribute)):
                continue
            target = item.targets[0]
            is_own = ast.unparse(target.value) == "self" and len(item.targets) == 1 and len(stores[target.attr]) == 1
            if is_own and isinstance(item.value, ast.Constant) and is_settled(item.value):
                found[target.attr] = item.value.value
        return found

    def _has_relatives(self, node: ast.ClassDef) -> bool:
        bases = {ast.unparse(base) for base in node.bases}
        children = [
            other
            for other in self.nodes.values()
            if isinstance(other, ast.ClassDef) and node.name in {ast.unparse(base) for base in other.bases}
        ]
        return bool(bases & set(self.nodes)) or bool(children)

    def _inline_constant_attributes(self) -> None:
        constants = {name: self._constants_of(node) for name, node in self.nodes.items()}
        for name, node in list(self.nodes.items()):
            if constants[name]:
                ReplaceAttribute("self", constants[name]).visit(node)
        for name, node in self.nodes.items():
            sites = self._sites(name) if isinstance(node, ast.FunctionDef) else None
            if not sites or not node.args.args:
                continue
            first = node.args.args[0].arg
            owners = self._owners(sites)
            if owners is None or first in stored_names(node):
                continue
            shared = {
                attribute: value
                for attribute, value in constants[owners[0]].items()
                if all(same(constants[owner].get(attribute, ...), value) for owner in owners)
            }
            ReplaceAttribute(first, shared).visit(node)

    def _owners(self, sites: list[ast.Call]) -> list[str] | None:
        """The classes whose `self` is the first argument of every call, or None where a call gives something else."""
        owners = []
        for site in sites:
            owner = next(
                (
                    name
                    for name, node in self.nodes.items()
                    if isinstance(node, ast.ClassDef) and any(item is site for item in walk(node))
                ),
                None,
            )
            if owner is None or not site.args or ast.unparse(site.args[0]) != "self":
                return None
            owners.append(owner)
        return owners

    # -- parameters

    def _sites(self, name: str) -> list[ast.Call] | None:
        """Every call of a definition, or None where it is used in another way or called with unpacked arguments."""
        calls, reads = [], 0
        for node in self.nodes.values():
            for item in walk(node):
                if isinstance(item, ast.arg) and item.arg == name:
                    return None
                if isinstance(item, ast.Name) and item.id == name:
                    if not isinstance(item.ctx, ast.Load):
                        return None
                    reads += 1
                elif isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == name:
                    calls.append(item)
        unpacked = any(isinstance(a, ast.Starred) for c in calls for a in c.args) or any(
            keyword.arg is None for call in calls for keyword in call.keywords
        )
        return None if unpacked or reads != len(calls) else calls

    def _settle_parameters(self, name: str) -> None:
        node = self.nodes[name]
        function, first = node, 0
        if isinstance(node, ast.ClassDef):
            function, first = next((f for f in functions(node) if f.name == "__init__"), None), 1
            forward = next((f for f in functions(node) if f.name == "forward"), None)
            if forward is not None and name == self.root:
                settle_defaults(forward, keep=2)
                settle_given(forward)
                remove_unread(forward, 2, only_optional=True)
            elif forward is not None:
                self._settle_forward(name, forward)
        if not isinstance(function, ast.FunctionDef) or function.args.vararg:
            return
        if name == self.root:
            # How the task calls it is decided later, and by name: numbers are given, flags are not.
            settle_flags(function, keep=1)
            settle_activation(function)
            remove_unread(function, first, only_optional=False)
            return
        sites = self._sites(name)
        if not sites:
            return
        self._settle_common(function, first, sites)
        self._drop_none_checks(function, first, sites)
        remove_parameters(function, first, sites, lambda argument: True)

    def _settle_forward(self, name: str, forward: ast.FunctionDef) -> None:
        """What every call of the modules of one class gives alike, where each is an attribute that is only called."""
        sites = self._module_calls(name)
        if sites and not forward.args.vararg:
            self._settle_common(forward, 1, sites)
            remove_parameters(forward, 1, sites, lambda argument: True)

    def _module_calls(self, name: str) -> list[ast.Call] | None:
        """Calls of `self.x` for all `x` that are modules of this class; None where one may be called elsewhere."""
        if self._has_relatives(self.nodes[name]):
            return None
        made, uses, calls = 0, 0, []
        for owner in self.nodes.values():
            items = list(walk(owner))
            uses += sum(isinstance(item, ast.Name) and item.id == name for item in items)
            stores: list[Any] = [item for item in items if is_attribute_of(item, name)]
            if not stores:
                continue
            made += len(stores)
            attributes = {item.targets[0].attr for item in stores}
            touched = [item for item in items if own_attribute(item) in attributes]
            called = [item for item in items if isinstance(item, ast.Call) and own_attribute(item.func) in attributes]
            # Each is stored where the class is made, and else only called.
            if len(touched) != len(stores) + len(called):
                return None
            calls += called
        unpacked = any(isinstance(a, ast.Starred) for c in calls for a in c.args) or any(
            keyword.arg is None for call in calls for keyword in call.keywords
        )
        return None if uses != made or unpacked else calls

    def _settle_common(self, function: ast.FunctionDef, first: int, sites: list[ast.Call]) -> None:
        """Replace a parameter that every call gives the same constant."""
        for argument in [*function.args.args[first:], *function.args.kwonlyargs]:
            values = [value_at(site, function, first, argument.arg) for site in sites]
            constants = [value for value in values if isinstance(value, ast.Constant) and is_settled(value)]
            settled = len(constants) == len(values)
            if settled and all(same(value.value, constants[0].value) for value in constants):
                replace_until_stored(function, argument.arg, values[0])

    def _drop_none_checks(self, function: ast.FunctionDef, first: int, sites: list[ast.Call]) -> None:
        """Drop `if p is None: p = …` where every call gives an attribute that holds a product."""
        for argument in function.args.args[first:]:
            values = [value_at(site, function, first, argument.arg) for site in sites]
            if not all(self._is_product(site, value) for site, value in zip(sites, values, strict=True)):
                continue
            checks = [
                s
                for s in function.body
                if isinstance(s, ast.If) and not s.orelse and ast.unparse(s.test) == f"{argument.arg} is None"
            ]
            inside = sum(stored_names(check).count(argument.arg) for check in checks)
            if checks and inside == stored_names(function).count(argument.arg):
                function.body = [s for s in function.body if s not in checks]
                if len(function.args.defaults) and first_default(function) == argument.arg:
                    function.args.defaults.pop(0)

    def _is_product(self, site: ast.Call, value: ast.expr | None) -> bool:
        if not (isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self"):
            return False
        owner = next(node for node in self.nodes.values() if any(item is site for item in walk(node)))
        stores = [
            item
            for item in walk(owner)
            if isinstance(item, ast.Assign)
            and any(ast.unparse(target) == ast.unparse(value) for target in item.targets)
        ]
        return bool(stores) and all(
            isinstance(item.value, ast.BinOp) and isinstance(item.value.op, ARITHMETIC) for item in stores
        )

    # -- functions and methods

    def _inline_identities(self) -> None:
        """Put the argument in place of a call of a function that only returns it."""
        for name, node in self.nodes.items():
            if not (isinstance(node, ast.FunctionDef) and len(node.args.args) == 1 and self._sites(name)):
                continue
            body = without_docstring(node.body)
            argument = node.args.args[0].arg
            if len(body) == 1 and isinstance(body[0], ast.Return) and ast.unparse(body[0]) == f"return {argument}":
                for other in self.nodes.values():
                    InlineIdentity(name).visit(other)

    def _drop_unread_methods(self) -> None:
        items = [item for node in self.nodes.values() for item in walk(node)]
        read = {item.attr for item in items if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Load)}
        if any(isinstance(item, ast.Name) and item.id == "getattr" for item in items):
            return
        for node in self.nodes.values():
            if isinstance(node, ast.ClassDef):
                node.body = [
                    item
                    for item in node.body
                    if not isinstance(item, ast.FunctionDef)
                    or item.name in MODULE_NAMES | read | {"forward"}
                    or item.name.startswith("__")
                ]


class InlineIdentity(ast.NodeTransformer):
    """Replaces the calls of one function by their argument."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        own = isinstance(node.func, ast.Name) and node.func.id == self.name
        return node.args[0] if own and len(node.args) == 1 and not node.keywords else node


def same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and first == second


def is_settled(node: ast.expr) -> bool:
    """Flags, names, None and one: what selects a case. Other numbers are better read under their names."""
    return isinstance(node, ast.Constant) and (
        node.value is None or isinstance(node.value, (bool, str)) or same(node.value, 1)
    )


def functions(node: ast.ClassDef | ast.FunctionDef) -> list[ast.FunctionDef]:
    """The function itself, or the methods of a class."""
    if isinstance(node, ast.FunctionDef):
        return [node]
    return [item for item in node.body if isinstance(item, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []


def stored_names(node: ast.stmt) -> list[str]:
    return [item.id for item in walk(node) if isinstance(item, ast.Name) and not isinstance(item.ctx, ast.Load)]


def read_names(node: ast.FunctionDef) -> set[str]:
    return {item.id for item in walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)}


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    is_text = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] if is_text else body


def replace_in_body(function: ast.FunctionDef, values: dict[str, Any]) -> None:
    function.body = [Replace(values).visit(statement) for statement in function.body]


def defaults_of(function: ast.FunctionDef) -> dict[str, ast.expr]:
    arguments = function.args
    pairs = dict(
        zip(
            [a.arg for a in arguments.args[len(arguments.args) - len(arguments.defaults) :]],
            arguments.defaults,
            strict=True,
        )
    )
    return pairs | {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}


def first_default(function: ast.FunctionDef) -> str:
    return function.args.args[-len(function.args.defaults)].arg


def value_at(site: ast.Call, function: ast.FunctionDef, first: int, name: str) -> ast.expr | None:
    """The expression that a call gives a parameter, or its default."""
    names = [argument.arg for argument in function.args.args[first:]]
    given = dict(zip(names, site.args, strict=False)) | {keyword.arg: keyword.value for keyword in site.keywords}
    return given.get(name, defaults_of(function).get(name))


def own_attribute(node: Any) -> str | None:
    """The name of an attribute of self, or None."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if own else None


def is_attribute_of(node: Any, class_name: str) -> bool:
    """Whether it is `self.x = Name(...)`."""
    return (
        isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and own_attribute(node.targets[0]) is not None
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == class_name
    )


def replace_until_stored(function: ast.FunctionDef, name: str, value: ast.expr | None) -> None:
    """Put a value in place of a parameter up to the statement that first assigns it."""
    for index, statement in enumerate(function.body):
        if name not in stored_names(statement):
            function.body[index] = Replace({name: value}).visit(statement)
            continue
        # What an assignment reads, and a condition, still see the parameter.
        for field in ("value", "test"):
            inner = getattr(statement, field, None)
            if isinstance(inner, ast.expr) and not isinstance(statement, (ast.While, ast.AugAssign)):
                setattr(statement, field, Replace({name: value}).visit(inner))
        break


def settle_defaults(function: ast.FunctionDef, keep: int) -> None:
    """Put the default in place of what the task's call doesn't give: all optional arguments but rotary angles."""
    kept = {argument.arg for argument in function.args.args[:keep]} | {"position_embeddings"}
    for name, value in defaults_of(function).items():
        if name not in kept and isinstance(value, ast.Constant):
            replace_until_stored(function, name, value)


def settle_given(forward: ast.FunctionDef) -> None:
    """The first argument is always given, so it is never None."""
    name = forward.args.args[1].arg if len(forward.args.args) > 1 else None
    if name and name not in stored_names(forward):
        forward.body = [NeverNone(name).visit(statement) for statement in forward.body]


class NeverNone(ast.NodeTransformer):
    """Decides comparisons of one name with None."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        own = isinstance(node.left, ast.Name) and node.left.id == self.name and len(node.ops) == 1
        none = own and isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        return ast.Constant(isinstance(node.ops[0], ast.IsNot)) if none else node


def settle_flags(function: ast.FunctionDef, keep: int) -> None:
    """Put a flag's default in place of a parameter of the class that a task makes, which never gives flags."""
    kept = {argument.arg for argument in function.args.args[:keep]} | {"position_embeddings"}
    stored = stored_names(function)
    defaults = {
        name: value
        for name, value in defaults_of(function).items()
        if name not in kept
        and isinstance(value, ast.Constant)
        and isinstance(value.value, (bool, str))
        and name not in stored
    }
    replace_in_body(function, defaults)


def settle_activation(function: ast.FunctionDef) -> None:
    """Name the activation of the class that a task makes: its default, or GELU where it has to be given."""
    defaults = defaults_of(function)
    for argument in function.args.args:
        if ACTIVATION.search(argument.arg) and argument.arg not in stored_names(function):
            replace_in_body(function, {argument.arg: defaults.get(argument.arg, ast.Constant("gelu"))})


def remove_parameters(
    function: ast.FunctionDef, first: int, sites: list[ast.Call], allowed: Callable[..., Any]
) -> None:
    """Drop parameters that the body does not name, with what calls give them where that is only a value."""
    named = read_names(function) | set(stored_names(function))
    for argument in list(function.args.args[first:]):
        index = [a.arg for a in function.args.args].index(argument.arg)
        values = [value_at(site, function, first, argument.arg) for site in sites]
        if argument.arg in named or not allowed(argument.arg) or not all(v is None or is_pure(v) for v in values):
            continue
        defaults = [None] * (len(function.args.args) - len(function.args.defaults)) + function.args.defaults
        del function.args.args[index], defaults[index]
        function.args.defaults = [default for default in defaults if default is not None]
        for site in sites:
            site.keywords = [keyword for keyword in site.keywords if keyword.arg != argument.arg]
            del site.args[index - first : index - first + 1]


def remove_unread(function: ast.FunctionDef, first: int, only_optional: bool) -> None:
    """Drop parameters of the class that a task makes which its body does not name: the task reads this signature."""
    named = read_names(function) | set(stored_names(function))
    arguments, optional = function.args, defaults_of(function)
    gone = {
        a.arg
        for a in [*arguments.args[first:], *arguments.kwonlyargs]
        if a.arg not in named and (a.arg in optional or not only_optional)
    }
    arguments.args = [a for a in arguments.args if a.arg not in gone]
    arguments.defaults = [optional[a.arg] for a in arguments.args if a.arg in optional]
    pairs = [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if a.arg not in gone]
    arguments.kwonlyargs, arguments.kw_defaults = [a for a, _ in pairs], [d for _, d in pairs]


def is_pure(node: ast.expr) -> bool:
    """Whether evaluating it does nothing but give a value."""
    allowed = (
        ast.Constant,
        ast.Name,
        ast.Attribute,
        ast.Tuple,
        ast.BinOp,
        ast.UnaryOp,
        ast.Compare,
        ast.operator,
        ast.unaryop,
        ast.cmpop,
        ast.expr_context,
        ast.Subscript,
        ast.Slice,
    )
    return all(isinstance(item, allowed) for item in walk(node))


def inline_second_names(function: ast.FunctionDef) -> None:
    """`a = b` where neither is ever assigned again: `b` is read in place of `a`; `b` may be a flag or None."""
    parameters = {item.arg for item in walk(function) if isinstance(item, ast.arg)}
    nested = any(isinstance(item, (ast.FunctionDef, ast.Lambda)) and item is not function for item in walk(function))
    for statement in [] if nested else list(function.body):
        if not (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
            and (isinstance(statement.value, ast.Name) or is_settled(statement.value))
        ):
            continue
        stored = stored_names(function)
        second, name = statement.targets[0].id, getattr(statement.value, "id", None)
        if stored.count(second) == 1 and second not in parameters and name not in stored:
            function.body.remove(statement)
            replace_in_body(function, {second: statement.value})


def drop_dead_statements(function: ast.FunctionDef) -> None:
    """Drop what follows a return, and assignments of mere values to names that nobody reads."""
    read = read_names(function)
    for item in walk(function):
        for field in ("body", "orelse"):
            block = getattr(item, field, None)
            if not isinstance(block, list):
                continue
            end = next((i for i, s in enumerate(block) if isinstance(s, (ast.Return, ast.Raise))), len(block))
            kept = [statement for statement in block[: end + 1] if not is_unread(statement, read)]
            setattr(item, field, kept)
    fill_empty_bodies(function)


def is_unread(statement: ast.stmt, read: set[str]) -> bool:
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1 and is_pure(statement.value)):
        return False
    target = statement.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(name, ast.Name) and name.id not in read for name in names)


def fill_empty_bodies(node: ast.ClassDef | ast.FunctionDef) -> None:
    for item in walk(node):
        if isinstance(getattr(item, "body", None), list) and not item.body:
            item.body = [ast.Pass()]
