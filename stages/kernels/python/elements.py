"""Elements of tensors in CUDA's notation: what an operator computes of its operands, and where an element lies.

Every tensor is indexed by its place in row-major order. What only lays elements out anew (broadcasting, transposing,
reshaping) is in the indices.
"""

import dataclasses
import math
import struct
from collections.abc import Sequence

import torch

LONGEST = 320
"""Characters of a line. Beyond it a forward has none."""
LONGEST_PART = 100
"""Characters of an expression within another; a longer one has a line or a name of its own."""
LONGEST_TWICE = 16
"""Characters of an expression that is written out wherever it is used."""

UNARY = {
    "abs": "fabs", "acos": "acos", "acosh": "acosh", "asin": "asin", "asinh": "asinh", "atan": "atan", "atanh": "atanh",
    "ceil": "ceil", "cos": "cos", "cosh": "cosh", "erf": "erf", "erfc": "erfc", "exp": "exp", "exp2": "exp2",
    "expm1": "expm1", "floor": "floor", "lgamma": "lgamma", "log": "log", "log10": "log10", "log1p": "log1p",
    "log2": "log2", "round": "rint", "rsqrt": "rsqrt", "sin": "sin", "sinh": "sinh", "sqrt": "sqrt", "tan": "tan",
    "tanh": "tanh", "trunc": "trunc",
}  # fmt: skip
BINARY = {
    "atan2": "atan2", "copysign": "copysign", "fmax": "fmax", "fmin": "fmin", "fmod": "fmod", "hypot": "hypot",
    "maximum": "fmax", "minimum": "fmin", "nextafter": "nextafter", "pow": "pow",
}  # fmt: skip
INFIX = {
    "mul": ("*", 5), "div": ("/", 5), "add": ("+", 4), "sub": ("-", 4), "lt": ("<", 3), "le": ("<=", 3), "gt": (">", 3),
    "ge": (">=", 3), "eq": ("==", 2), "ne": ("!=", 2), "bitwise_and": ("&&", 1), "bitwise_or": ("||", 1),
}  # fmt: skip
"""The operator and how tightly it binds; calls and names bind at 9, a sign at 6, `?:` at 0."""

OTHERS = {
    "bitwise_not", "convert_element_type", "isfinite", "isnan", "neg", "reciprocal", "same", "sign", "signbit",
    "square", "where",
}  # fmt: skip
"""What `_expression` has a form of its own for."""

REDUCTIONS = {
    "sum": "sum", "prod": "product", "amax": "maximum", "amin": "minimum", "argmax": "first place k of the maximum",
    "argmin": "first place k of the minimum",
}  # fmt: skip
TYPES = {
    torch.float64: "double", torch.float32: "float", torch.int64: "long long", torch.int32: "int", torch.bool: "bool",
}  # fmt: skip


class NoSteps(Exception):
    """The forward holds something that has no line of this kind."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """Some of a dimension's places: so many, each so many elements of the tensor behind apart."""

    size: int
    stride: int


Layout = list[list[Factor]]
"""For each dimension the factors that its index is made of, the outermost first."""


@dataclasses.dataclass(eq=False)
class Source:
    """A tensor whose elements a step, or the task, has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""
    uses: int = 0
    needs_name: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(eq=False)
class Elementwise(Source):
    """An operator on elements at the same place."""

    what: str = ""
    operands: "list[View | float | int | bool]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Reduction(Source):
    """An operator over some dimensions of another tensor."""

    what: str = ""
    operand: "View | None" = None
    over: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class View:
    """A source as an operator sees it."""

    source: Source
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(factor.size for factor in factors) for factors in self.layout)

    @property
    def factors(self) -> list[Factor]:
        """Those of all dimensions."""
        return [factor for factors in self.layout for factor in factors]

    def is_whole(self) -> bool:
        """Whether its elements are the source's, in the same order."""
        if math.prod(self.shape) == 1 == self.source.size:
            return True
        return index(self.factors, "i") == "i"


Operand = View | float | int | bool


def whole(source: Source, shape: tuple[int, ...] | None = None) -> View:
    """All of a source as it lies, in this shape or its own."""
    layout, stride = [], math.prod(source.shape)
    for size in source.shape if shape is None else shape:
        stride //= max(size, 1)
        layout.append([Factor(size, stride)])
    return View(source, layout)


def index(factors: Sequence[Factor], place: str) -> str:
    """Where an element lies, by its place among all that the factors count."""
    merged: list[Factor] = []
    for factor in (each for each in factors if each.size != 1):
        last = merged[-1] if merged else None
        if last is not None and last.stride == factor.stride * factor.size:
            merged[-1] = Factor(last.size * factor.size, factor.stride)
        else:
            merged.append(factor)
    terms, inner = [], 1
    for number, factor in reversed(list(enumerate(merged))):
        if factor.stride:
            term = place if inner == 1 else f"{place} / {inner}"
            term += f" % {factor.size}" if number else ""
            terms.append(term if factor.stride == 1 else f"{term} * {factor.stride}")
        inner *= factor.size
    return " + ".join(terms[::-1]) or "0"


def place_of(kept: Sequence[Factor], over: Sequence[Factor]) -> str:
    """Where the element k of a reduction's result i lies."""
    terms = [term for term in (index(kept, "i"), index(over, "k")) if term != "0"]
    return " + ".join(terms) or "0"


def composed(outer: View, inner: View) -> View:
    """`inner`, a view of what `outer`'s source is computed from place by place, as `outer` sees that source."""
    digits, below = [], 1
    for factor in reversed(inner.factors):
        digits.append((factor, below))
        below *= factor.size
    layout: Layout = []
    for size, stride in ((each.size, each.stride) for each in outer.factors):
        if stride == 0 or size == 1:
            layout.append([Factor(size, 0)])
            continue
        found: list[Factor] = []
        for factor, low in digits:
            first, last = max(stride, low), min(stride * size, low * factor.size)
            if first < last:
                if first % low or first % stride or last % first:
                    raise NoSteps("a view of a view")
                found.append(Factor(last // first, factor.stride * (first // low)))
        if math.prod(factor.size for factor in found) != size:
            raise NoSteps("a view of a view")
        layout.append(found[::-1])
    return View(inner.source, layout)


class Expressions:
    """Texts of elements. Where an operand comes from is another's to say."""

    def _operand(self, operand: Operand, place: str, dtype: torch.dtype) -> tuple[str, int]:
        """The text of an operand at a place, and how tightly it binds."""
        raise NotImplementedError

    def _expression(self, source: Elementwise, place: str) -> tuple[str, int]:
        """The text of an element and how tightly it binds."""
        types = [operand.source.dtype for operand in source.operands if isinstance(operand, View)]
        dtype = next((each for each in types if each.is_floating_point), types[0] if types else source.dtype)
        parts = [self._operand(operand, place, dtype) for operand in source.operands]
        texts = [text for text, _ in parts]
        suffix = "" if dtype == torch.float64 else "f"
        if (call := UNARY.get(source.what) or BINARY.get(source.what)) is not None:
            if not dtype.is_floating_point:
                raise NoSteps("a function of whole numbers")
            return f"{call}{suffix}({', '.join(texts)})", 9
        if (infix := INFIX.get(source.what)) is not None:
            sign, binds = infix
            left = bound(*parts[0], binds)
            # The right side of a difference or a quotient, and of comparisons, binds more tightly.
            right = bound(*parts[1], binds if sign in ("+", "*", "&&", "||") else binds + 1)
            return f"{left} {sign} {right}", binds
        match source.what:
            case "same":
                return parts[0]
            case "neg":
                return f"-{bound(*parts[0], 7)}", 6
            case "reciprocal":
                return f"{number(1.0, dtype)[0]} / {bound(*parts[0], 6)}", 5
            case "bitwise_not":
                return f"!{bound(*parts[0], 7)}", 6
            case "where":
                return f"{bound(*parts[0], 1)} ? {bound(*parts[1], 1)} : {bound(*parts[2], 1)}", 0
            case "convert_element_type":
                return f"({TYPES[source.dtype]}){bound(*parts[0], 7)}", 6
            case "sign":
                zero, text = number(0.0, dtype)[0], bound(*parts[0], 4)
                return f"({text} > {zero}) - ({text} < {zero})", 4
            case "isnan" | "isfinite" | "signbit":
                return f"{source.what}({texts[0]})", 9
            case "square":
                text = bound(*parts[0], 6)
                return f"{text} * {text}", 5
        raise NoSteps(source.what)


def divided(view: View, over: Sequence[int]) -> tuple[list[Factor], list[Factor]]:
    """The factors of the dimensions that a reduction keeps, and of those that it is over."""
    kept = [factor for place in others(len(view.layout), over) for factor in view.layout[place]]
    return kept, [factor for place in over for factor in view.layout[place]]


def others(rank: int, over: Sequence[int]) -> list[int]:
    """The dimensions that are left."""
    return [place for place in range(rank) if place not in over]


def bound(text: str, binds: int, wanted: int) -> str:
    return text if binds >= wanted else f"({text})"


def number(value: float, dtype: torch.dtype) -> tuple[str, int]:
    """A number as CUDA's C++ reads it, in the type of what it is used with."""
    if not dtype.is_floating_point or isinstance(value, bool):
        text = str(value).lower()
        return text, 6 if text.startswith("-") else 9
    value = float(value)
    if math.isnan(value):
        return "NAN", 9
    if math.isinf(value):
        return ("INFINITY", 9) if value > 0 else ("-INFINITY", 6)
    if dtype != torch.float64:
        # The shortest text that is the same float.
        shorter = (float(f"{value:.{digits}g}") for digits in range(1, 18))
        value = next(each for each in shorter if _single(each) == _single(value))
    text = repr(value) + ("" if dtype == torch.float64 else "f")
    return text, 6 if value < 0 else 9


def _single(value: float) -> bytes:
    return struct.pack("f", value)
