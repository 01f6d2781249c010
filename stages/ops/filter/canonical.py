"""Programs that are the same but for their names, layout, comments, annotations and way of importing.

`canonical_program` writes a file in one form; equal texts are the same program. Sizes and other constants count, so
the same model at other sizes is another program.
"""

import ast
from typing import Any

import source as task_source


def canonical_program(source: Any) -> str:
    """Text that two programs share where they differ in chosen names, layout, comments, docstrings, annotations and
    forms of import alone."""
    tree = _Plain().visit(ast.parse(ast.unparse(source.tree)))
    return ast.dump(_Renumber(source.imports).visit(tree))


class _Plain(ast.NodeTransformer):
    """Drops docstrings, annotations, imports and the arguments of `super`."""

    def _strip(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        text = task_source.docstring(node)
        kept = [statement for statement in node.body if statement is not text]
        node.body = kept or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _strip

    def visit_Import(self, node: ast.stmt) -> None:
        return None

    visit_ImportFrom = visit_Import

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            node.args = []
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        self.generic_visit(node)
        if node.value is None:
            return None
        return ast.Assign(targets=[node.target], value=node.value)


class _Renumber(ast.NodeTransformer):
    """Numbers chosen names by first appearance. Attributes of `self`, variables, arguments, classes and functions of
    the file are chosen; names that are only read and never bound in the file are the libraries' or Python's."""

    KEPT = frozenset(("self", "Model", "forward", "__init__", "get_inputs", "get_init_inputs", "super"))

    def __init__(self, imports: dict[str, str]) -> None:
        self.imports, self.numbers, self.bound = imports, {}, set()

    def visit_Module(self, node: ast.Module) -> ast.Module:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                self.bound.add(inner.id)
            elif isinstance(inner, ast.arg):
                self.bound.add(inner.arg)
            elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                self.bound.add(inner.name)
            elif isinstance(inner, ast.Attribute) and _is_own(inner):
                self.bound.add(inner.attr)
        self.bound -= self.KEPT | set(self.imports)
        self.generic_visit(node)
        return node

    def _new(self, name: str) -> str:
        if name not in self.bound:
            return self.imports.get(name, name)
        return f"name{self.numbers.setdefault(name, len(self.numbers))}"

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._new(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self._new(node.arg)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        # A keyword names an argument of a library as often as one of the file; either way both programs use it alike.
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute | ast.Name:
        whole = task_source.dotted(node, self.imports)
        if whole and whole.startswith("torch."):
            return ast.Name(id=whole, ctx=node.ctx)
        own = _is_own(node)
        self.generic_visit(node)
        if own and node.attr in self.bound:
            node.attr = self._new(node.attr)
        return node

    def _named(self, node: ast.ClassDef | ast.FunctionDef) -> ast.ClassDef | ast.FunctionDef:
        node.name = self._new(node.name)
        self.generic_visit(node)
        return node

    visit_FunctionDef = visit_ClassDef = _named


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"
