"""How alike two `Model` classes are, from 0 to 1, whatever their names and sizes.

Each class becomes the sequence of its syntax nodes in source order, normalised:

- names that the author chose (variables, arguments, attributes of `self`, methods other than `__init__` and `forward`)
  are all the same word, so renaming changes nothing;
- names of the libraries are kept, by their full dotted name: `nn.Linear` and `torch.nn.Linear` are one word;
- numbers become `int` or `float` and text `str`, so that the same model with other sizes is the same model; True,
  False and None are kept, since they choose what is computed;
- docstrings and annotations are left out.

The similarity is 2 * L / (m + n), where L is the length of the longest common subsequence of two sequences of lengths
m and n: 1 for equal sequences, 0 where they have no word in common, symmetric. The paper names a
`PythonASTSimilarity` with a threshold of 0.9 and does not define it; this is our definition.

L is found by a bit-parallel recurrence (Hyyrö 2004) on Python's integers, and only where two cheap upper bounds, by
length and by the multiset of words, leave the threshold possible.
"""

import ast
import collections

import source as task_source

KEPT_METHODS = {"__init__", "forward", "__call__"}


class Fingerprint:
    """A class as a sequence of words, and what the upper bounds need."""

    def __init__(self, words):
        self.words = tuple(words)
        self.counts = collections.Counter(self.words)

    def __len__(self):
        return len(self.words)


def fingerprint(source, *, constants=False):
    """The fingerprint of a task's Model; with `constants` it keeps numbers and text."""
    writer = _Writer(source.imports, constants)
    writer.visit(source.model)
    return Fingerprint(writer.words)


def whole_file(source):
    """The normalised text of a whole file: layout, comments, docstrings and annotations don't count, names and
    constants do. Equal texts are the same program."""
    return ast.dump(_WithoutText().visit(ast.parse(ast.unparse(source.tree))))


def canonical_program(source):
    """Like `whole_file`, but names that the author chose are numbered in the order of their appearance: two programs
    with equal results differ in names alone."""
    tree = _WithoutText().visit(ast.parse(ast.unparse(source.tree)))
    return ast.dump(_Renumber(source.imports).visit(tree))


class _WithoutText(ast.NodeTransformer):
    """Drops docstrings and annotations."""

    def _strip(self, node):
        self.generic_visit(node)
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            if isinstance(node.body[0].value.value, str):
                node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _strip

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if node.value is None:
            return None
        return ast.Assign(targets=[node.target], value=node.value)


class _Renumber(ast.NodeTransformer):
    """Numbers chosen names by first appearance. Attributes of `self`, variables, arguments, classes and functions of
    the file are chosen; names that are only read and never bound in the file are the libraries' or Python's."""

    KEPT = {"self", "Model", "forward", "__init__", "get_inputs", "get_init_inputs", "super"}

    def __init__(self, imports):
        self.imports, self.numbers, self.bound = imports, {}, set()

    def visit_Module(self, node):
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

    def _new(self, name):
        if name not in self.bound:
            return self.imports.get(name, name)
        return f"name{self.numbers.setdefault(name, len(self.numbers))}"

    def visit_Name(self, node):
        node.id = self._new(node.id)
        return node

    def visit_arg(self, node):
        node.arg = self._new(node.arg)
        return node

    def visit_keyword(self, node):
        # A keyword names an argument of a library as often as one of the file; either way both programs use it alike.
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node):
        own = _is_own(node)
        self.generic_visit(node)
        if own and node.attr in self.bound:
            node.attr = self._new(node.attr)
        return node

    def _named(self, node):
        node.name = self._new(node.name)
        self.generic_visit(node)
        return node

    visit_FunctionDef = visit_ClassDef = _named


def _is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id == "self"


class _Writer(ast.NodeVisitor):
    """Writes a class as words."""

    def __init__(self, imports, constants):
        self.imports, self.constants, self.words = imports, constants, []

    def _body(self, statements):
        for index, statement in enumerate(statements):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not (index == 0 and is_text and isinstance(statement.value.value, str)):
                self.visit(statement)

    def visit_ClassDef(self, node):
        self.words.append("class")
        for base in node.bases:
            self.visit(base)
        self._body(node.body)

    def visit_FunctionDef(self, node):
        self.words.append(f"def {node.name}" if node.name in KEPT_METHODS else "def")
        self.visit(node.args)
        self._body(node.body)

    def visit_arguments(self, node):
        for argument in [*node.posonlyargs, *node.args, *node.kwonlyargs]:
            self.words.append("argument")
        for default in [*node.defaults, *(item for item in node.kw_defaults if item)]:
            self.visit(default)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.words.append("Assign")
            self.visit(node.target)
            self.visit(node.value)

    def visit_Name(self, node):
        self.words.append(self.imports.get(node.id, "name"))

    def visit_Attribute(self, node):
        whole = task_source.dotted(node, self.imports)
        root = whole.split(".")[0] if whole else None
        if whole and any(whole.startswith(name) for name in self.imports.values()):
            self.words.append(whole)
        elif root == "self":
            self.words.append("self." + ".".join("name" for _ in whole.split(".")[1:]))
        else:
            self.words.append("." + node.attr)
            self.visit(node.value)

    def visit_Constant(self, node):
        value = node.value
        if self.constants or value is None or isinstance(value, bool) or value is Ellipsis:
            self.words.append(repr(value))
        else:
            self.words.append(type(value).__name__)

    def visit_keyword(self, node):
        self.words.append(f"{node.arg}=")
        self.visit(node.value)

    def visit_Call(self, node):
        self.words.append("call")
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            self.words.append("super")
            return
        self.generic_visit(node)

    def visit_Load(self, node):
        pass

    visit_Store = visit_Del = visit_Load

    def generic_visit(self, node):
        if not isinstance(node, (ast.Expr, ast.Call)):
            self.words.append(type(node).__name__)
        super().generic_visit(node)


def upper_bound(left, right):
    """A number that the similarity can't exceed: of the longest common subsequence no word can occur more often than
    in either sequence."""
    total = len(left) + len(right)
    if total == 0:
        return 1.0
    return 2 * sum((left.counts & right.counts).values()) / total


def similarity(left, right):
    """2 * LCS / (m + n)."""
    total = len(left) + len(right)
    return 2 * longest_common_subsequence(left.words, right.words) / total if total else 1.0


def longest_common_subsequence(left, right):
    """Its length. Bit i of `row` is 0 where the best length grows at left[i]; each word of `right` is one addition."""
    places = {}
    for index, word in enumerate(left):
        places[word] = places.get(word, 0) | (1 << index)
    mask = (1 << len(left)) - 1
    row = mask
    for word in right:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & mask
    return len(left) - row.bit_count()


def most_similar(candidate, references, threshold):
    """The name and similarity of the reference most like the candidate, of those above the threshold, or None.
    `references` is a list of (name, fingerprint)."""
    best = None
    for name, reference in references:
        total = len(candidate) + len(reference)
        floor = best[1] if best else threshold
        shortest = min(len(candidate), len(reference))
        if (total and 2 * shortest <= floor * total) or upper_bound(candidate, reference) <= floor:
            continue
        value = similarity(candidate, reference)
        if value > floor:
            best = (name, value)
    return best
