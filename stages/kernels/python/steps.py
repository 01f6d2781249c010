"""A task's forward as elementary steps: what each operator computes, element by element, in CUDA's notation.

    t1[i] = maximum over k < 64 of x[i * 64 + k];  // i < 2048
    t2[i] = expf(x[i] - t1[i / 64]);  // i < 131072

Every tensor is indexed by its place in row-major order. What only lays elements out anew (broadcasting, transposing,
reshaping) is in the indices. A step is one operator, or several that work element by element where each result has one
use. Torch traces the forward, on fake tensors, and decomposes it to its primitives.

A forward that holds anything else (a product of matrices, a convolution, a sort, a branch on data) has no steps: they
are help for who writes a candidate, and half of them would be none.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import loops
from elements import (
    BINARY,
    INFIX,
    LONGEST,
    LONGEST_PART,
    OTHERS,
    REDUCTIONS,
    TYPES,
    UNARY,
    Elementwise,
    Expressions,
    Factor,
    Layout,
    NoSteps,
    Operand,
    Reduction,
    Source,
    View,
    divided,
    index,
    number,
    others,
    place_of,
    whole,
)

MOST_STEPS = 24
"""Beyond it there are none."""

SAME = {"clone", "view_of", "alias", "detach", "lift_fresh", "lift_fresh_copy", "device_put", "contiguous"}


def steps(
    model: torch.nn.Module, names: Sequence[str], values: Sequence[Any], outputs: Sequence[str], prefix: str = "t"
) -> list[str]:
    """The steps of `model(*values)`, whose tensors and state `names` names in order; none where it has no such form.
    What is between is called `prefix` and a number."""
    try:
        return _Reader(names, outputs, prefix).read(_trace(model, values))
    except torch.AcceleratorError:
        raise
    except Exception:
        # Tracing runs the task's code in a way that it was not written for: whatever happens there, it has no steps.
        return []


def _trace(model: torch.nn.Module, values: Sequence[Any]) -> torch.fx.GraphModule:
    """The forward as a graph whose first inputs are the tensors of `values`, and then parameters and buffers."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fake = FakeTensorMode()
    count = sum(isinstance(value, torch.Tensor) for value in values)

    def forward(*tensors: torch.Tensor) -> Any:
        given = iter(tensors[:count])
        arguments = [next(given) if isinstance(value, torch.Tensor) else value for value in values]
        return torch.func.functional_call(model, dict(zip(state, tensors[count:], strict=True)), tuple(arguments))

    tensors = [value for value in values if isinstance(value, torch.Tensor)] + list(state.values())
    with torch.no_grad(), fake:
        fakes = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
        return make_fx(forward, decomposition_table=decomposition_table, tracing_mode="real")(*fakes)


class _Reader(Expressions):
    """Makes sources of a graph's nodes, and lines of these."""

    def __init__(self, names: Sequence[str], outputs: Sequence[str], prefix: str = "t") -> None:
        self._prefix = prefix
        self._names = iter(names)
        self._outputs = outputs
        self._values: dict[Any, Any] = {}
        self._lines: list[str] = []
        self._made: dict[Any, Source] = {}

    def read(self, graph: torch.fx.GraphModule) -> list[str]:
        results: list[View] = []
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                if value.dtype not in TYPES:
                    raise NoSteps("a type")
                self._values[node] = whole(Source(tuple(value.shape), value.dtype, name=next(self._names)))
            elif node.op == "call_function":
                self._values[node] = self._call(node)
            elif node.op == "output":
                found = node.args[0]
                found = list(found) if isinstance(found, (tuple, list)) else [found]
                results = [self._named_copy(self._values[each]) for each in found]
            else:
                raise NoSteps(node.op)
        if len(results) != len(self._outputs):
            raise NoSteps("outputs")
        for result in results:
            self._count(result.source)
        sources = [(name, result.source) for name, result in zip(self._outputs, results, strict=True)]
        try:
            return loops.lines(sources, self._prefix)
        except NoSteps:
            pass
        for result, name in zip(results, self._outputs, strict=True):
            self._write(result.source, name)
        if len(self._lines) > MOST_STEPS or any(len(line) > LONGEST for line in self._lines):
            raise NoSteps("too many")
        return self._lines

    def _named_copy(self, value: Any) -> View:
        """An output is a step of its own, in its own order."""
        view = self._view(value)
        if isinstance(view.source, (Elementwise, Reduction)) and view.is_whole():
            view.source.needs_name = True
            return view
        return whole(Elementwise(view.shape, view.source.dtype, needs_name=True, what="same", operands=[view]))

    def _view(self, value: Any) -> View:
        if not isinstance(value, View):
            raise NoSteps("a number")
        return value

    # From nodes to sources.

    def _call(self, node: Any) -> Any:
        if node.target is operator.getitem:
            return self._values[node.args[0]][node.args[1]]
        name = _name(node)
        arguments = [self._argument(each) for each in node.args]
        named = {key: self._argument(value) for key, value in node.kwargs.items()}
        value = node.meta.get("val")
        if name in SAME:
            return arguments[0]
        if name == "copy_":
            return self._copied(node, arguments)
        if name == "as_strided" and not node.args[0].meta["val"].is_contiguous():
            raise NoSteps(name)
        if (change := VIEWS.get(name)) is not None:
            return change(self._view(arguments[0]), *arguments[1:], **named)
        if name in ("full", "full_like", "scalar_tensor", "fill"):
            return arguments[0] if name == "scalar_tensor" else arguments[1]
        if name in ("empty", "empty_strided", "empty_like"):
            return None
        if name in REDUCTIONS or name in ("var", "max", "min"):
            return self._reduced(name, self._view(arguments[0]), arguments[1:], named, value)
        return self._elementwise(name, arguments, tuple(value.shape), value.dtype)

    def _argument(self, value: Any) -> Any:
        return self._values[value] if isinstance(value, torch.fx.Node) else value

    def _copied(self, node: Any, arguments: list[Any]) -> View:
        """A value in the place of another, which must be the trace's own and seen by nobody else: an input that changes
        is no step."""
        place = node.args[0]
        if place.op == "placeholder" or any(map(_is_view, [place, *place.users])):
            raise NoSteps("copy_")
        if place.meta["val"].dtype != node.args[1].meta["val"].dtype:
            raise NoSteps("copy_ to another type")
        self._values[node.args[0]] = arguments[1]
        return arguments[1]

    def _reduced(self, name: str, operand: View, arguments: list[Any], named: dict[str, Any], value: Any) -> Any:
        rank = len(operand.layout)
        over = arguments[0] if arguments else named.get("dim")
        all_of = range(rank) if over is None else over if isinstance(over, (list, tuple)) else [over]
        dimensions = tuple(sorted(each % max(rank, 1) for each in all_of))
        keeps = named.get("keepdim", name in ("argmax", "argmin", "max", "min") and len(arguments) > 1 and arguments[1])
        shape = tuple(size for place, size in enumerate(operand.shape) if place not in dimensions)

        def reduction(what: str, of: View, dtype: torch.dtype) -> View:
            source = Reduction(shape, dtype, needs_name=True, what=what, operand=of, over=dimensions)
            kept, lost = divided(of, dimensions)
            made = self._once((what, id(of.source), tuple(kept), tuple(lost)), source)
            if not keeps:
                return made
            return _broadcast_in_dim(made, _kept_shape(operand.shape, dimensions), others(rank, dimensions))

        dtype = (value[0] if isinstance(value, (tuple, list)) else value).dtype
        if name in ("max", "min"):
            if not isinstance(value, (tuple, list)):
                return reduction(f"a{name}", operand, dtype)
            return reduction(f"a{name}", operand, dtype), reduction(f"arg{name}", operand, torch.int64)
        if name != "var":
            return reduction(name, operand, dtype)
        correction = arguments[1] if len(arguments) > 1 else named.get("correction", 1)
        count = math.prod(operand.shape[each] for each in dimensions)
        sums = reduction("sum", operand, dtype)
        mean = self._elementwise("div", [sums, float(count)], shape, dtype)
        mean.source.needs_name = True
        spread = _broadcast_in_dim(mean, operand.shape, others(rank, dimensions))
        away = self._elementwise("sub", [operand, spread], operand.shape, dtype)
        squares = self._elementwise("square", [away], operand.shape, dtype)
        return self._elementwise("div", [reduction("sum", squares, dtype), count - float(correction)], shape, dtype)

    def _elementwise(self, name: str, operands: list[Any], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        if name == "convert_element_type":
            source = self._view(operands[0])
            if source.source.dtype == dtype:
                return source
            if dtype not in TYPES or (dtype.is_floating_point and source.source.dtype.is_floating_point):
                raise NoSteps("rounded to another type")
            operands = [source]
        operands = [self._as_element(each, shape) for each in operands if not isinstance(each, torch.dtype)]
        name, operands = _simplified(name, operands)
        if name == "same":
            return operands[0]
        if (name.startswith("bitwise_") and dtype != torch.bool) or (name == "add" and dtype == torch.bool):
            raise NoSteps("whole numbers as bits, or a sum of truth values")
        if not any(name in each for each in (UNARY, BINARY, INFIX, OTHERS)):
            raise NoSteps(name)
        numbers = [each for each in operands if not isinstance(each, View)]
        if len(numbers) == len(operands):
            return _of_numbers(name, numbers)
        source = Elementwise(shape, dtype, what=name, operands=operands)
        return self._once((name, tuple(map(_identity, operands)), math.prod(shape), dtype), source)

    def _once(self, key: Any, source: Source) -> View:
        """What was computed before, in whatever shape, is not computed again."""
        return whole(self._made.setdefault(key, source), source.shape)

    def _as_element(self, value: Any, shape: tuple[int, ...]) -> Operand:
        if isinstance(value, (bool, int, float)):
            return value
        view = self._view(value)
        if view.shape != shape:
            if view.shape:
                raise NoSteps("shapes")
            view = View(view.source, [[Factor(size, 0)] for size in shape])
        return view

    # From sources to lines.

    def _count(self, source: Source, seen: set[Source] | None = None) -> None:
        """How often each is used, and which need a name since they are used in another order than their own."""
        seen = set() if seen is None else seen
        if source in seen:
            return
        seen.add(source)
        match source:
            case Elementwise():
                for operand in source.operands:
                    if isinstance(operand, View):
                        operand.source.uses += 2 if source.what == "square" else 1
                        operand.source.needs_name |= not operand.is_whole()
                        self._count(operand.source, seen)
            case Reduction(operand=View() as operand):
                operand.source.uses += 1
                self._count(operand.source, seen)

    def _write(self, source: Source, name: str = "") -> None:
        """The line of a source that has none yet, after those of what it uses."""
        if source.name:
            if name:
                # Two outputs alike.
                self._lines.append(f"{name}[i] = {source.name}[i];  // i < {source.size}")
            return
        match source:
            case Elementwise():
                right, _ = self._expression(source, "i")
            case Reduction():
                right = self._reduction(source)
            case _:
                raise NoSteps("a source without a name")
        source.name = name or f"{self._prefix}{len(self._lines) + 1}"
        self._lines.append(f"{source.name}[i] = {right};  // i < {source.size}")

    def _reduction(self, source: Reduction) -> str:
        operand = source.operand
        if operand is None:
            raise NoSteps("a reduction of nothing")
        kept, over = divided(operand, source.over)
        count = math.prod(factor.size for factor in over)
        body, where = self._element(operand.source, place_of(kept, over))
        return f"{REDUCTIONS[source.what]} over k < {count} of {body}{where}"

    def _element(self, source: Source, place: str) -> tuple[str, str]:
        """What a reduction adds up: an element of a tensor, or an expression of the place j."""
        if isinstance(source, Elementwise) and source.uses == 1 and not source.needs_name:
            is_one = place in ("i", "k")
            text, binds = self._expression(source, place if is_one else "j")
            return text if binds > 0 else f"({text})", "" if is_one else f", j = {place}"
        self._write(source)
        return f"{source.name}[{place}]", ""

    def _operand(self, operand: Operand, place: str, dtype: torch.dtype) -> tuple[str, int]:
        if not isinstance(operand, View):
            return number(operand, dtype)
        source = operand.source
        if isinstance(source, Elementwise) and source.uses == 1 and not source.needs_name:
            text, binds = self._expression(source, place)
            if len(text) <= LONGEST_PART:
                return text, binds
        self._write(source)
        where = index(operand.factors, place)
        return f"{source.name}[{where}]", 9


def _is_view(node: Any) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem and _name(node) in VIEWS


def _name(node: Any) -> str:
    """An operator's name: `add` of `aten::add.Tensor`."""
    return node.target.name().split("::")[1].split(".")[0]


def _kept_shape(shape: Sequence[int], over: Sequence[int]) -> list[int]:
    """A shape with those dimensions of one element."""
    return [1 if place in over else size for place, size in enumerate(shape)]


def _simplified(name: str, operands: list[Operand]) -> tuple[str, list[Operand]]:
    """An operator as a reader would write it: `x != x` asks for NaN, a choice by a comparison is a limit."""
    if name == "ne" and _is_same(operands[0], operands[1]):
        return "isnan", operands[:1]
    if name == "where" and isinstance(operands[0], View):
        limit = _limit(operands[0].source, operands[1], operands[2])
        if limit is not None:
            return _simplified(limit, operands[1:])
    if name == "where" and not isinstance(operands[0], View):
        return "same", [operands[1] if operands[0] else operands[2]]
    if name in ("maximum", "minimum") and not isinstance(operands[0], View):
        return name, operands[::-1]
    if name == "mul" and isinstance(operands[0], View) and _is_same(operands[0], operands[1]):
        return "square", operands[:1]
    if name in ("mul", "div") and not isinstance(operands[1], View) and operands[1] == 1:
        return "same", operands[:1]
    if name == "pow" and not isinstance(operands[1], View):
        if operands[1] == 2:
            return "square", operands[:1]
        if operands[1] == 1:
            return "same", operands[:1]
    return name, operands


def _of_numbers(name: str, numbers: list[float]) -> float:
    """An operator on numbers alone, which some decompositions leave."""
    compute: Any = {
        "abs": abs, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
        "neg": operator.neg, "ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt,
        "eq": operator.eq, "ne": operator.ne, "where": lambda condition, yes, no: yes if condition else no,
    }.get(name)  # fmt: skip
    if compute is None:
        raise NoSteps(name)
    return compute(*numbers)


def _limit(condition: Source, yes: Operand, no: Operand) -> str | None:
    """`maximum` or `minimum`, where the condition compares the two, or asks whether the first is NaN as well."""
    if not isinstance(condition, Elementwise):
        return None
    either = [condition]
    if condition.what == "bitwise_or":
        either = [each.source for each in condition.operands if isinstance(each, View)]
    words = set()
    for each in either:
        if not isinstance(each, Elementwise):
            return None
        if each.what == "isnan" and _is_same(each.operands[0], yes):
            continue
        if each.what not in ("ge", "gt", "le", "lt"):
            return None
        sides = [_identity(side) for side in each.operands]
        if sides not in ([_identity(yes), _identity(no)], [_identity(no), _identity(yes)]):
            return None
        is_larger = (each.what[0] == "g") == (sides[0] == _identity(yes))
        words.add("maximum" if is_larger else "minimum")
    return words.pop() if len(words) == 1 else None


def _is_same(one: Operand, other: Operand) -> bool:
    return _identity(one) == _identity(other)


def _identity(operand: Operand) -> Any:
    """Equal for what has the same elements in the same places."""
    if not isinstance(operand, View):
        return (type(operand), operand)
    return id(operand.source), index(operand.factors, "i")


# Operators that lay elements out anew.


def _broadcast_in_dim(view: View, shape: Sequence[int], dimensions: Sequence[int]) -> View:
    layout: Layout = [[Factor(size, 0)] for size in shape]
    for place, dimension in enumerate(dimensions):
        if view.shape[place] == shape[dimension]:
            layout[dimension] = view.layout[place]
    return View(view.source, layout)


def _expand(view: View, shape: Sequence[int], **_: Any) -> View:
    new = len(shape) - len(view.layout)
    sizes = [view.shape[place - new] if size == -1 else size for place, size in enumerate(shape)]
    return _broadcast_in_dim(view, sizes, list(range(new, len(shape))))


def _transpose(view: View, order: Sequence[int]) -> View:
    return View(view.source, [view.layout[place] for place in order])


def _squeeze(view: View, dimensions: Sequence[int] | int) -> View:
    dropped = [dimensions] if isinstance(dimensions, int) else dimensions
    return View(view.source, [view.layout[place] for place in others(len(view.layout), dropped)])


def _unsqueeze(view: View, dimension: int) -> View:
    layout = list(view.layout)
    layout.insert(dimension % (len(layout) + 1), [])
    return View(view.source, layout)


def _split_dim(view: View, dimension: int, outer: int) -> View:
    parts = _parts(view.layout[dimension], [outer, view.shape[dimension] // outer])
    return View(view.source, [*view.layout[:dimension], *parts, *view.layout[dimension + 1 :]])


def _collapse(view: View, first: int, last: int) -> View:
    joined = [factor for factors in view.layout[first : last + 1] for factor in factors]
    return View(view.source, [*view.layout[:first], joined, *view.layout[last + 1 :]])


def _reshape(view: View, shape: Sequence[int], *_: Any) -> View:
    count = math.prod(view.shape)
    known = math.prod(size for size in shape if size != -1)
    sizes = [count // known if size == -1 else size for size in shape]
    return View(view.source, _parts(view.factors, sizes))


def _as_strided(view: View, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> View:
    """Where it is another shape of the same elements in a row."""
    in_a_row = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    if list(strides) != in_a_row or math.prod(view.shape) != math.prod(shape) or offset:
        raise NoSteps("as_strided")
    return _reshape(view, shape)


def _parts(factors: Sequence[Factor], sizes: Sequence[int]) -> Layout:
    """The same factors, divided among dimensions of these sizes."""
    left = [factor for factor in factors if factor.size != 1][::-1]
    layout: Layout = []
    for size in sizes:
        taken: list[Factor] = []
        rest = size
        while rest > 1:
            if not left:
                raise NoSteps("reshape")
            factor = left.pop()
            if rest % factor.size == 0:
                taken.append(factor)
                rest //= factor.size
            elif factor.size % rest == 0:
                inner = factor.size // rest
                taken.append(Factor(rest, factor.stride * inner))
                left.append(Factor(inner, factor.stride))
                rest = 1
            else:
                raise NoSteps("reshape")
        layout.append(taken)
    return layout


VIEWS: dict[str, Callable[..., View]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "expand": _expand,
    "transpose": _transpose,
    "permute": _transpose,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "split_dim": _split_dim,
    "collapse_view": _collapse,
    "collapse": _collapse,
    "reshape": _reshape,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "as_strided": _as_strided,
}
