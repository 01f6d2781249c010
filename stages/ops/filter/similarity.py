"""How alike two classes are by the structure of their syntax trees alone, from 0 to 1: the paper's measure.

The paper names `PythonASTSimilarity` and a threshold of 0.9. That is a metric of the package continuous-eval (after
python-ast-comparison by P. Salazar Paredes), and this is the same measure, written anew so that 9,000 tasks can be
compared with 250 references in a minute:

- the *significant* subtrees of a class are those of its definitions, `for`, `while`, `if`, comprehensions and
  `return` statements, so what lies within several of them counts several times;
- two trees match in their root where its type and the number of its children are equal, and then in the best
  assignment of children to children, whatever the order;
- the similarity is 2 * M / (A + B), where M is the weight of the best assignment of subtrees to subtrees, A and B are
  what the trees would weigh if each matched itself, and a node weighs 1.2 in a function and 0.5 in an `if`.

Names, numbers and text don't count, so `nn.ReLU()` and `nn.Tanh()` are one structure: the measure says little of a
class with one operator, and says nothing where a problem is written in another form. `signature.py` compares the
operators. Differences from the package: docstrings, annotations and the arguments of `super` are left out first, since
each of them alone makes the number of children differ, and with it the whole class not match. On classes without these
the values are equal to its four digits (`test_similarity.py` has pairs with the package's values).
"""

import ast
import collections
from collections.abc import Sequence
from typing import Any

import source as task_source

SIGNIFICANT = (ast.Import, ast.FunctionDef, ast.If, ast.ClassDef, ast.While, ast.For, ast.comprehension, ast.Return)
WEIGHTS = {"Import": 0.3, "FunctionDef": 1.2, "If": 0.5}


class Shape:
    """A tree of node types; equal trees, whatever the order of their children, are one object."""

    __slots__ = ("children", "form", "key", "kind", "size")

    def __init__(self, kind: str, children: "list[Shape]", key: int) -> None:
        self.kind, self.children, self.key = kind, children, key
        self.form = (kind, len(children))
        self.size = 1 + sum(child.size for child in children)


class Structure:
    """A class as its significant subtrees, by form: no two of different forms match at all."""

    def __init__(self, shapes: list[Shape]) -> None:
        shapes = sorted(shapes, key=lambda shape: shape.key)
        self.groups = by_form(shapes)
        self.sizes = {
            form: sorted((shape.size for shape in group), reverse=True) for form, group in self.groups.items()
        }
        self.weight = sum(WEIGHTS.get(shape.kind, 1.0) * shape.size for shape in shapes)
        self.key = tuple(shape.key for shape in shapes)


class Comparer:
    """Makes structures and compares them. What was found out about two shapes is remembered, and most classes share
    most of their shapes."""

    def __init__(self) -> None:
        self._shapes, self._matches = {}, {}

    def structure(self, source: Any) -> Structure:
        significant = []
        self._shape(source.model, significant)
        return Structure(significant)

    def _shape(self, node: ast.AST, significant: list[Shape]) -> Shape:
        children = [self._shape(child, significant) for child in children_that_count(node)]
        children.sort(key=lambda shape: shape.key)
        name = "Assign" if isinstance(node, ast.AnnAssign) else type(node).__name__
        identity = (name, *(child.key for child in children))
        shape = self._shapes.get(identity)
        if shape is None:
            shape = self._shapes[identity] = Shape(name, children, len(self._shapes))
        if isinstance(node, SIGNIFICANT):
            significant.append(shape)
        return shape

    def similarity(self, left: Structure, right: Structure) -> float:
        matched = sum(
            WEIGHTS.get(form[0], 1.0) * self._assign(group, right.groups[form])
            for form, group in left.groups.items()
            if form in right.groups
        )
        return ratio(matched, left, right)

    def most_similar(self, candidate: Structure, references: list[tuple[str, Structure]]) -> tuple[str, float]:
        """The name of the first reference of the greatest similarity, and that similarity. `references` is a list of
        (name, structure) and not empty."""
        bounds = [upper_bound(candidate, reference) for _, reference in references]
        best = ("", -1.0)
        for place in sorted(range(len(references)), key=lambda place: -bounds[place]):
            if bounds[place] < best[1]:
                break
            name, reference = references[place]
            value = self.similarity(candidate, reference)
            if value > best[1] or (value == best[1] and name < best[0]):
                best = (name, value)
        return best

    def _match(self, left: Shape, right: Shape) -> int:
        """How many nodes of two shapes match."""
        if left is right:
            return left.size
        if left.form != right.form:
            return 0
        key = (left.key, right.key) if left.key < right.key else (right.key, left.key)
        if key not in self._matches:
            self._matches[key] = 1 + self._assign(left.children, right.children)
        return self._matches[key]

    def _assign(self, left: list[Shape], right: list[Shape]) -> int:
        """The most nodes that match when each tree of one list is assigned to at most one of the other. Both lists
        are ordered by key."""
        # Equal trees may always go to one another: a match through a third tree is never better.
        total, left, right = _pair_equals(left, right)
        if len(left) == 1 and len(right) == 1:
            return total + self._match(left[0], right[0])
        if left and right:
            groups = by_form(right)
            for form, group in by_form(left).items():
                if form in groups:
                    total += greatest_sum([[self._match(one, other) for other in groups[form]] for one in group])
        return total


def by_form(shapes: list[Shape]) -> dict[tuple[str, int], list[Shape]]:
    groups = collections.defaultdict(list)
    for shape in shapes:
        groups[shape.form].append(shape)
    return dict(groups)


def _pair_equals(left: list[Shape], right: list[Shape]) -> tuple[int, list[Shape], list[Shape]]:
    """The size of the trees that both lists have, and what is left of each list."""
    total, place, rest, other_rest = 0, 0, [], []
    for shape in left:
        while place < len(right) and right[place].key < shape.key:
            other_rest.append(right[place])
            place += 1
        if place < len(right) and right[place] is shape:
            total += shape.size
            place += 1
        else:
            rest.append(shape)
    return total, rest, other_rest + right[place:]


def children_that_count(node: ast.AST) -> Sequence[ast.AST]:
    """The children of a node but for docstrings, annotations and the arguments of `super`."""
    if isinstance(node, ast.arg):
        return ()
    if isinstance(node, ast.AnnAssign):
        return [node.target, node.value] if node.value is not None else [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return (node.func,)
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        left_out = {id(getattr(node, "returns", None)), id(task_source.docstring(node))}
        children = [child for child in children if id(child) not in left_out]
    return children


def ratio(matched: float, left: Structure, right: Structure) -> float:
    total = left.weight + right.weight
    return round(2 * matched / total, 4) if total else 1.0


def upper_bound(left: Structure, right: Structure) -> float:
    """A number that the similarity can't exceed: no tree matches in more nodes than the smaller of two has."""
    matched = 0
    for form, sizes in left.sizes.items():
        if form in right.sizes:
            matched += WEIGHTS.get(form[0], 1.0) * sum(map(min, sizes, right.sizes[form]))
    return ratio(matched, left, right)


def greatest_sum(matrix: list[list[int]]) -> int:
    """The greatest sum of entries of which no two share a row or a column (Hungarian method with potentials)."""
    if len(matrix) > len(matrix[0]):
        matrix = [list(column) for column in zip(*matrix, strict=True)]
    if len(matrix) == 1:
        return max(matrix[0])
    rows, columns = len(matrix), len(matrix[0])
    row_potential, column_potential = [0] * (rows + 1), [0] * (columns + 1)
    owner, previous = [0] * (columns + 1), [0] * (columns + 1)
    for row in range(1, rows + 1):
        owner[0] = row
        _augment(matrix, row_potential, column_potential, owner, previous)
    return sum(matrix[owner[column] - 1][column - 1] for column in range(1, columns + 1) if owner[column])


def _augment(matrix: list[list[int]], row_potential: Any, column_potential: Any, owner: Any, previous: Any) -> None:
    """Find a column for the row that waits at column 0, moving others along the cheapest path."""
    columns = len(matrix[0])
    least, used, column = [float("inf")] * (columns + 1), [False] * (columns + 1), 0
    while owner[column]:
        used[column] = True
        row, nearest, step = owner[column], 0, float("inf")
        for other in range(1, columns + 1):
            if used[other]:
                continue
            cost = -matrix[row - 1][other - 1] - row_potential[row] - column_potential[other]
            if cost < least[other]:
                least[other], previous[other] = cost, column
            if least[other] < step:
                step, nearest = least[other], other
        for other in range(columns + 1):
            if used[other]:
                row_potential[owner[other]] += step
                column_potential[other] -= step
            else:
                least[other] -= step
        column = nearest
    while column:
        owner[column] = owner[previous[column]]
        column = previous[column]
