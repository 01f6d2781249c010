"""The similarity is that of the package continuous-eval, bounded, symmetric, and its shortcuts never change it."""

import itertools
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from hypothesis import given, settings
from hypothesis import strategies as st

import similarity
import source as task_source

CLASSES = {
    "linear": """
class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a = nn.Linear(n, n)

    def forward(self, x):
        return self.a(x)
""",
    "two": """
class Model(nn.Module):
    def __init__(self, n, k=3):
        super().__init__()
        self.conv = nn.Conv2d(n, 2 * n, k)
        self.bias = nn.Parameter(torch.randn(n, 1, 1))

    def forward(self, x):
        x = self.conv(x)
        x = torch.relu(x + self.bias)
        return x
""",
    "three": """
class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.GroupNorm(4, n)
        self.scale = nn.Parameter(torch.ones(n, 1, 1))

    def forward(self, x):
        x = self.norm(x)
        x = torch.tanh(self.scale * x)
        return x
""",
    "loop": """
class Model(nn.Module):
    def __init__(self, n, depth):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n, n) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            if x.shape[0] > 1:
                x = layer(x)
        return x.sum(dim=1)
""",
    "bare": """
class Model(nn.Module):
    def forward(self, x, y):
        return torch.cat([x, y], dim=1)
""",
}
# What PythonASTSimilarity of continuous-eval 0.3.14.post2 gives for these texts.
PACKAGE = {
    ("linear", "linear"): 1.0,
    ("linear", "two"): 0.0418,
    ("linear", "three"): 0.0445,
    ("linear", "loop"): 0.2456,
    ("linear", "bare"): 0.0438,
    ("two", "two"): 1.0,
    ("two", "three"): 0.8087,
    ("two", "loop"): 0.0285,
    ("two", "bare"): 0.0079,
    ("three", "three"): 1.0,
    ("three", "loop"): 0.0298,
    ("three", "bare"): 0.0085,
    ("loop", "loop"): 1.0,
    ("loop", "bare"): 0.0069,
    ("bare", "bare"): 1.0,
}


def structures(*texts):
    comparer = similarity.Comparer()
    return comparer, [comparer.structure(task_source.parse(text)) for text in texts]


@pytest.mark.parametrize("left, right", PACKAGE)
def test_values_are_those_of_the_package(left, right):
    comparer, (one, other) = structures(CLASSES[left], CLASSES[right])
    assert comparer.similarity(one, other) == PACKAGE[left, right]
    assert comparer.similarity(other, one) == PACKAGE[left, right]
    assert PACKAGE[left, right] <= similarity.upper_bound(one, other) <= 1


def test_what_changes_nothing_in_the_program_changes_nothing():
    changed = (
        CLASSES["two"]
        .replace("super()", "super(Model, self)")
        .replace("x):", "x: torch.Tensor) -> torch.Tensor:")
        .replace("def __init__(self, n, k=3):", 'def __init__(self, n: int, k: int = 3):\n        """Text."""')
    )
    comparer, (one, other) = structures(CLASSES["two"], changed)
    assert comparer.similarity(one, other) == 1.0 and one.key == other.key


NAMES = st.sampled_from(["x", "torch.relu(x)", "x + x", "self.a(x)", "torch.cat([x, x], 1)", "x[0]", "-x", "(x, x)"])


@st.composite
def classes(draw):
    lines = draw(st.lists(NAMES, min_size=0, max_size=5))
    body = "".join(f"        x = {line}\n" for line in lines) + f"        return {draw(NAMES)}\n"
    return "class Model(nn.Module):\n    def forward(self, x):\n" + body


def plain(left, right):
    """The best assignment by trying all of them, without memory, bounds, groups or pairs of equals."""
    if left.kind != right.kind or len(left.children) != len(right.children):
        return 0
    return 1 + all_assignments(left.children, right.children)


def all_assignments(left, right):
    if len(left) > len(right):
        left, right = right, left
    orders = itertools.permutations(right, len(left))
    return (
        max(sum(plain(one, other) for one, other in zip(left, order, strict=True)) for order in orders) if left else 0
    )


@given(classes(), classes())
@settings(max_examples=60, deadline=None)
def test_shortcuts_never_change_the_match(left, right):
    comparer, (one, other) = structures(left, right)
    for form, group in one.groups.items():
        for shape in group:
            for second in other.groups.get(form, ()):
                assert comparer._match(shape, second) == plain(shape, second)
    value = comparer.similarity(one, other)
    assert value == comparer.similarity(other, one)
    assert 0 <= value <= similarity.upper_bound(one, other) <= 1


@given(classes(), st.lists(classes(), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_the_nearest_is_the_nearest(candidate, others):
    comparer, (one, *rest) = structures(candidate, *others)
    references = [(f"r{place}", other) for place, other in enumerate(rest)]
    name, value = comparer.most_similar(one, references)
    values = {name: comparer.similarity(one, other) for name, other in references}
    assert value == max(values.values())
    assert name == min(other for other, found in values.items() if found == value)


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=5))
@settings(max_examples=80)
def test_the_greatest_sum_is_the_greatest(matrix):
    rows, columns = len(matrix), 4
    if rows <= columns:
        best = max(
            sum(matrix[r][c] for r, c in enumerate(order)) for order in itertools.permutations(range(columns), rows)
        )
    else:
        best = max(
            sum(matrix[r][c] for c, r in enumerate(order)) for order in itertools.permutations(range(rows), columns)
        )
    assert similarity.greatest_sum(matrix) == best
