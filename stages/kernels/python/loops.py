"""A forward with reductions as kernels of one thread a row: what each thread computes, in loops over its elements.

    Each thread has one i < 2048. For each k < 64, j = i * 64 + k.
    t1 = maximum over k of x[j]
    t2 = sum over k of expf(x[j] - t1)
    for each k: out[j] = expf(x[j] - t1) / t2

The places that a reduction goes over for one of its results are a row. Reductions over the same rows, and what is
computed of their results and elements, are one kernel. A reduction over other rows begins the next, which finds what it
needs of the rows before it in scratch memory:

    Each kernel begins with float* s1 = (float*)scratch;
    TASK_SCRATCH(2048 * sizeof(float));
    Kernel 1 of 2: each thread has one i < 2048. For each k < 64, j = i * 64 + k.
    t1 = maximum over k of x[j]
    s1[i] = t1

Elements are computed where they are used. Those that a line uses twice have a name of their own behind it:
`for each k: out[j] = v1 / (1.0f + expf(-v1)), where v1 = x[j] - t1`.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

import elements
from elements import Elementwise, Factor, NoSteps, Operand, Reduction, Source, View

MOST_LINES = 30
WHERE = ", where "
MOST_KERNELS = 3


@dataclasses.dataclass
class Kernel:
    """What threads with one row each compute."""

    rows: int
    kept: list[Factor]
    over: list[Factor]
    reductions: list[Reduction] = dataclasses.field(default_factory=list)
    stored: list[Source] = dataclasses.field(default_factory=list)
    outputs: list[tuple[str, Source]] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return math.prod(factor.size for factor in self.over)

    @property
    def place(self) -> str:
        """Where the element k of row i lies."""
        return elements.place_of(self.kept, self.over)

    def has_each_once(self) -> bool:
        """Whether the rows have each place below `rows * length` once."""
        next_one = 1
        for factor in sorted((each for each in self.kept + self.over if each.size != 1), key=lambda each: each.stride):
            if factor.stride != next_one:
                return False
            next_one *= factor.size
        return True

    def is_row_of_place(self, view: View) -> bool:
        """Whether a view of one element a row has, at the place j, that of j's row."""
        return self._at_place(view) == ("0" if self.rows == 1 else "i", "0")

    def is_place_in_row(self, view: View) -> bool:
        """Whether a view has, at the place j, that of k."""
        return self._at_place(view) == ("0", "0" if self.length == 1 else "k")

    def _at_place(self, view: View) -> tuple[str, str] | None:
        """Which element a view has at the place j: the sum of a term of i and one of k, where it is one."""
        if not self.has_each_once() or math.prod(view.shape) != self.rows * self.length:
            return None
        try:
            of_row, in_row = (elements.composed(View(view.source, [each]), view) for each in (self.kept, self.over))
        except NoSteps:
            return None
        return elements.index(of_row.factors, "i"), elements.index(in_row.factors, "k")


def lines(outputs: Sequence[tuple[str, Source]], prefix: str) -> list[str]:
    """The kernels of these outputs, each with its name. `NoSteps` where there are too many, or none."""
    kernels = _kernels(outputs)
    if not kernels:
        raise NoSteps("no reduction")
    # Storing a value changes the texts of all that use it, which may store others.
    while True:
        writer = _Writer(kernels, prefix)
        text = writer.text()
        if not writer.is_stale:
            break
    if len(text) > MOST_LINES or len(kernels) > MOST_KERNELS or any(len(line) > elements.LONGEST for line in text):
        raise NoSteps("too many")
    return text


def _kernels(outputs: Sequence[tuple[str, Source]]) -> list[Kernel]:
    kernels: list[Kernel] = []
    for reduction in _reductions([source for _, source in outputs]):
        operand = reduction.operand
        if operand is None:
            raise NoSteps("a reduction of nothing")
        kept, over = elements.divided(operand, reduction.over)
        new = Kernel(reduction.size, kept, over, [reduction])
        last = kernels[-1] if kernels else None
        if last is not None and (last.rows, last.length, last.place) == (new.rows, new.length, new.place):
            last.reductions.append(reduction)
            if _is_possible(kernels):
                continue
            last.reductions.pop()
        kernels.append(new)
    if not kernels:
        return []
    for name, source in outputs:
        own = [kernel for kernel in kernels if source in kernel.reductions]
        if own:
            own[0].outputs.append((name, source))
            continue
        last = kernels[-1]
        last.outputs.append((name, source))
        if not _is_possible(kernels):
            last.outputs.pop()
            kernels.append(Kernel(source.size, [Factor(source.size, 1)], [], outputs=[(name, source)]))
    return kernels


def _is_possible(kernels: list[Kernel]) -> bool:
    """Whether what was added last can be computed by the threads that it was given to."""
    try:
        _Writer(kernels, "t", tries=True).text()
    except _OtherRows:
        return False
    return True


def _reductions(sources: Sequence[Source]) -> list[Reduction]:
    """Each after those that it needs."""
    found: list[Reduction] = []
    seen: set[int] = set()

    def visit(source: Source) -> None:
        if id(source) in seen:
            return
        seen.add(id(source))
        for operand in _operands(source):
            visit(operand.source)
        if isinstance(source, Reduction):
            found.append(source)

    for source in sources:
        visit(source)
    return found


def _operands(source: Source) -> list[View]:
    if isinstance(source, Reduction):
        return [] if source.operand is None else [source.operand]
    operands = source.operands if isinstance(source, Elementwise) else []
    return [operand for operand in operands if isinstance(operand, View)]


class _OtherRows(NoSteps):
    """A value of a row is needed where another row is computed."""


class _Writer(elements.Expressions):
    """The lines of kernels."""

    def __init__(self, kernels: list[Kernel], prefix: str, tries: bool = False) -> None:
        self._kernels = kernels
        self._prefix = prefix
        self._tries = tries
        self._kernel = kernels[0]
        self._lines: list[str] = []
        self._rows: dict[Source, str] = {}
        self._numbers = itertools.count(1)
        self._through: View | None = None
        self._elements: dict[tuple[Source, tuple[Factor, ...] | None], str] = {}
        self._needed: list[str] = []
        self._twice: set[Source] = set()
        stored = [source for kernel in kernels for source in kernel.stored]
        # The widest first: each lies where its type may.
        stored.sort(key=lambda source: -source.dtype.itemsize)
        self._direct: dict[Source, frozenset[Reduction]] = {}
        self._of_rows: dict[tuple[Source, int], bool] = {}
        self._stored = {source: f"s{number}" for number, source in enumerate(stored, 1)}
        self.is_stale = False

    def text(self) -> list[str]:
        """All lines, with those that begin a kernel."""
        for number, kernel in enumerate(self._kernels, 1):
            self._kernel, self._rows = kernel, {}
            begins = f"Kernel {number} of {len(self._kernels)}: each" if len(self._kernels) > 1 else "Each"
            over = f" For each k < {kernel.length}, j = {kernel.place}." if kernel.reductions else ""
            self._lines.append(f"{begins} thread has one i < {kernel.rows}.{over}")
            for reduction in kernel.reductions:
                self._row(reduction)
            for source in kernel.stored:
                self._lines.append(f"{self._stored[source]}[i] = {self._row(source)}")
            for name, source in kernel.outputs:
                self._output(name, source)
        self._lines[:0] = self._scratch()
        return self._lines

    def _scratch(self) -> list[str]:
        """How each kernel gets at the arrays in scratch memory, one behind the other, and how large that is."""
        text, sizes, before = [], [], ""
        for source, name in self._stored.items():
            kind, count = elements.TYPES[source.dtype], source.size
            text.append(f"{kind}* {name} = ({kind}*){f'({before})' if before else 'scratch'};")
            sizes.append(f"{count} * sizeof({kind})")
            before = f"{name} + {count}"
        return [f"Each kernel begins with {' '.join(text)}", f"TASK_SCRATCH({' + '.join(sizes)});"] if text else []

    def _output(self, name: str, source: Source) -> None:
        kernel, size = self._kernel, source.size
        if source in self._rows:
            self._lines.append(f"{name}[i] = {self._rows[source]}")
        elif size == kernel.rows and self._is_of_rows(source, kernel):
            self._lines.append(f"{name}[i] = {self._line(source, 'i')}")
        elif kernel.reductions and size == kernel.rows * kernel.length and kernel.has_each_once():
            self._lines.append(f"for each k: {name}[j] = {self._line(source, 'j')}")
        else:
            raise _OtherRows

    def _row(self, source: Source) -> str:
        """The name of a value that each thread has one of, after its line."""
        if source not in self._rows:
            if isinstance(source, Reduction) and source.operand is not None:
                text = self._reduction(source.what, source.operand.source)
            else:
                text = self._line(source, "i")
            self._rows[source] = self._named(text)
        return self._rows[source]

    def _named(self, text: str) -> str:
        name = f"{self._prefix}{next(self._numbers)}"
        self._lines.append(f"{name} = {text}")
        return name

    def _reduction(self, what: str, of: Source) -> str:
        if (better := {"argmax": "maximum", "argmin": "minimum"}.get(what)) is None:
            return f"{elements.REDUCTIONS[what]} over k of {self._line(of, 'j', binds=1)}"
        best = self._named(f"{better} over k of {self._line(of, 'j', binds=1)}")
        # The best goes behind the element and before what the element needs. What is computed in a double, as of a sum,
        # was rounded when it became the best.
        text, *needed = self._line(of, "j", binds=4).split(WHERE, 1)
        if of.dtype == torch.float32 and not of.name:
            text = f"(float)({text})"
        return f"first k with {text} == {best}" + "".join(WHERE + each for each in needed)

    def _line(self, source: Source, place: str, binds: int = 0) -> str:
        """The right side of a line, with the elements that it has twice behind it."""
        before = self._elements, self._needed, self._twice, self._through
        counted: dict[Source, int] = {}
        self._count_elements(source, counted)
        self._elements, self._needed, self._through = {}, [], None
        self._twice = {each for each, uses in counted.items() if uses > 1}
        text, bound = self._value(elements.whole(source), place, is_line=True)
        text = text if bound >= binds else f"({text})"
        text += WHERE + ", ".join(self._needed) if self._needed else ""
        self._elements, self._needed, self._twice, self._through = before
        return text

    def _count_elements(self, source: Source, counted: dict[Source, int]) -> None:
        for operand in _operands(source) if isinstance(source, Elementwise) else []:
            if isinstance(operand.source, Elementwise):
                is_first = operand.source not in counted
                counted[operand.source] = counted.get(operand.source, 0) + (2 if _is_square(source) else 1)
                if is_first:
                    self._count_elements(operand.source, counted)

    def _operand(self, operand: Operand, place: str, dtype: torch.dtype) -> tuple[str, int]:
        if not isinstance(operand, View):
            return elements.number(operand, dtype)
        return self._value(operand if self._through is None else elements.composed(self._through, operand), place)

    def _value(self, view: View, place: str, is_line: bool = False) -> tuple[str, int]:
        """What a view has at a place, and how tightly its text binds."""
        source, kernel = view.source, self._kernel
        is_own = place == "i" and view.is_whole()
        if source.name:
            return f"{source.name}[{self._where(view, place)}]", 9
        if is_own and source in self._rows:
            return self._rows[source], 9
        if self._needs(source, kernel):
            if place == "j" and source.size == kernel.rows and kernel.is_row_of_place(view):
                return self._row(source), 9
            if isinstance(source, Reduction):
                if not is_own:
                    raise _OtherRows
                return self._row(source), 9
        elif (maker := self._maker(source)) is not None:
            if source not in self._stored:
                if not self._tries:
                    maker.stored.append(source)
                    self.is_stale = True
                self._stored[source] = "s0"
            return f"{self._stored[source]}[{self._where(view, place)}]", 9
        if not isinstance(source, Elementwise):
            raise _OtherRows
        return self._element(source, view, place, is_line)

    def _element(self, source: Elementwise, view: View, place: str, is_line: bool) -> tuple[str, int]:
        key = (source, None if view.is_whole() else tuple(view.factors))
        if key in self._elements:
            return self._elements[key], 9
        before, self._through = self._through, None if view.is_whole() else view
        text, binds = self._expression(source, place)
        self._through = before
        if is_line or not (
            (source in self._twice and len(text) > elements.LONGEST_TWICE) or len(text) > elements.LONGEST_PART
        ):
            return text, binds
        if place == "i" and view.is_whole():
            return self._row(source), 9
        name = f"v{len(self._needed) + 1}"
        self._needed.append(f"{name} = {text}")
        self._elements[key] = name
        return name, 9

    def _where(self, view: View, place: str) -> str:
        """The index of a view's element at a place: shorter where it is that of the row, or that in the row."""
        if view.is_whole():
            return place
        if place == "j":
            if self._kernel.is_row_of_place(view):
                return "i"
            if self._kernel.is_place_in_row(view):
                return "k"
        return elements.index(view.factors, place)

    def _reductions_of(self, source: Source) -> frozenset[Reduction]:
        """Those that its elements are computed from, themselves and not by way of others. Each source is asked once: in
        a forward that uses its values twice the ways to one of them are many."""
        if isinstance(source, Reduction):
            return frozenset([source])
        if source not in self._direct:
            of_operands = [self._reductions_of(operand.source) for operand in _operands(source)]
            self._direct[source] = frozenset().union(*of_operands)
        return self._direct[source]

    def _needs(self, source: Source, kernel: Kernel) -> bool:
        """Whether a value is computed from those of a kernel's rows."""
        return not self._reductions_of(source).isdisjoint(kernel.reductions)

    def _is_of_rows(self, source: Source, kernel: Kernel) -> bool:
        """Whether each thread can compute one of a value, from those of its own row."""
        if isinstance(source, Reduction):
            return source in kernel.reductions
        key = (source, id(kernel))
        if key not in self._of_rows:
            needed = [operand for operand in _operands(source) if self._needs(operand.source, kernel)]
            self._of_rows[key] = all(each.is_whole() and self._is_of_rows(each.source, kernel) for each in needed)
        return self._of_rows[key]

    def _maker(self, source: Source) -> Kernel | None:
        """The kernel whose threads have one value of this each."""
        earlier = [
            kernel for kernel in self._kernels[: self._kernels.index(self._kernel)] if self._needs(source, kernel)
        ]
        return (
            earlier[-1]
            if earlier and source.size == earlier[-1].rows and self._is_of_rows(source, earlier[-1])
            else None
        )


def _is_square(source: Source) -> bool:
    return isinstance(source, Elementwise) and source.what == "square"
