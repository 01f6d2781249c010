"""Comparing a candidate's output with what was expected of it.

Everything is computed where the tensors are, in chunks so that a large output needs no multiple of itself, and ends in
one row of numbers for each chunk; all rows of a set come to the host together. `Expectation` is made at a draw,
`Measurement` starts the comparison, `Verdict` reads its rows.

Most draws have finite numbers only and most answers are right, which few passes over the elements show: an expectation
is first described as if all of it were finite, and described again if it is not; an answer is measured if `glance.py`
does not find it right.
"""

import math
from typing import TYPE_CHECKING, Any

import torch

import chunk_numbers
import error_model
from chunk_numbers import Compared, Described, chunks, fetch, halves, row
from element_types import bits, pattern_word
from policy import TOLERANCE, multiple
from refusal import unsupported

if TYPE_CHECKING:
    from indices import Picked
    from policy import Policy

BEGINNING = 1 << 18
DEGENERATE = 2.0
"""Times the error that is allowed: where the best constant is not further off than that, it passes now and then."""
WRONG_SPECIAL = 1e300
"""The error of an element that should be NaN or infinite and is something else. Larger than any real one."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Integers and booleans, flat. A boolean is shown as its byte: in poison it is none, which torch doesn't expect."""
    return bits(tensor) if tensor.dtype == torch.bool else tensor.reshape(-1)


class Expectation:
    """What one output should be.

    `target` is NaN wherever eager (or the float64 forward) is not finite; there, the answer must be eager's.
    """

    def __init__(
        self,
        policy: "Policy",
        name: str,
        eager: torch.Tensor,
        reference: torch.Tensor | None,
        kinds: list[error_model.Kind] | None = None,
        picked: "Picked | None" = None,
    ) -> None:
        """`kinds` are those of error_model.py; without any, multiples of eager's own error are allowed. `picked` is
        what an output of indices points into: indices.py."""
        self.name = name
        self.picked = picked
        self.allowed_rms: Any
        self.allowed_max: Any
        """None under `paper`, whose tolerance is of each element."""
        self.shape = tuple(eager.shape)
        self.dtype = eager.dtype
        self.exact = not eager.dtype.is_floating_point
        self.total = eager.numel()
        self.eager = whole(eager.contiguous()) if self.exact else eager.contiguous().reshape(-1)
        self.elementwise = policy.name == "paper" and not self.exact
        self._reference: Any = None if self.exact or self.elementwise else reference.contiguous().reshape(-1)
        self._kinds: Any = None if self.exact or self.elementwise else kinds
        self.bounds: error_model.Bounds | None = None
        if self._kinds:
            self._describe_as_finite()
        else:
            self._describe_all()

    def _describe_as_finite(self) -> None:
        """With nothing left out: what is not finite shows in the numbers, and `settle` then wants another
        description."""
        errors = torch.empty(self.total, dtype=torch.float64, device=self.eager.device)
        for start, stop in chunks(self.total):
            # Of two types: computed in float64.
            torch.sub(self.eager[start:stop], self._reference[start:stop], out=errors[start:stop])
        self.bounds = error_model.Bounds(self._kinds, self.dtype, self.shape, errors, self._reference)
        self._is_taken_as_finite = True
        self._rows = [self.bounds.known, self.bounds.whole]

    def _describe_all(self) -> None:
        """With what is not finite counted and left out."""
        self._is_taken_as_finite = False
        if self._kinds:
            # Errors and answers in one piece, for their parts.
            self._errors, self._answers = (self.empty() for _ in range(2))
        self._rows = [self._describe(start, stop) for start, stop in chunks(self.total)]
        if self._kinds:
            self._set_bounds()

    def empty(self) -> torch.Tensor:
        """Room for an error of each element. Errors in float32 have seven digits, which is enough."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.empty(self.total, dtype=wide, device=self.eager.device)

    def _set_bounds(self) -> None:
        self.bounds = error_model.Bounds(self._kinds, self.dtype, self.shape, self._errors, self._answers)
        del self._errors, self._answers
        self._rows.append(self.bounds.whole)

    def target(self, start: int, stop: int | None) -> torch.Tensor:
        if self._reference is not None:
            return self._reference[start:stop]
        target = self.eager[start:stop].double()
        return torch.where(target.isfinite(), target, math.nan) if self.irregular else target

    def _describe(self, start: int, stop: int) -> torch.Tensor:
        """Facts on a chunk; also hides what is not finite from `target`."""
        eager = self.eager[start:stop]
        if self.exact:
            nothing = eager.new_zeros((), dtype=torch.float64)
            return row(nothing, nothing, nothing, nothing, nothing, eager.any())
        wide = eager.double()
        if self._reference is None:
            irregular = wide.isfinite().logical_not_().sum()
            return row(irregular, *[wide.new_zeros(())] * 4, eager.any())
        target = self._reference[start:stop]
        irregular = ((wide - target).isfinite()).logical_not_()
        target.masked_fill_(irregular, math.nan)
        error = (wide - target).masked_fill_(irregular, 0.0)
        known = target.masked_fill(irregular, 0.0)
        if self._kinds:
            self._errors[start:stop], self._answers[start:stop] = error, known
        return row(
            irregular.sum(),
            torch.linalg.vector_norm(error),
            torch.linalg.vector_norm(error, math.inf),
            torch.linalg.vector_norm(known),
            torch.linalg.vector_norm(known, math.inf),
            eager.any(),
        )

    def pending(self) -> list[torch.Tensor]:
        """Rows that `settle` wants as numbers."""
        return self._rows

    def settle(self, rows: list[list[float]]) -> None:
        """Takes the numbers of `pending`; from here on the yardsticks are known, unless there are new ones pending."""
        self._rows = []
        if self._is_taken_as_finite:
            self._settle_as_finite(*rows)
        else:
            self._settle_all(rows)

    def _settle_as_finite(self, known: list[float], whole: list[float]) -> None:
        error, self.error_max, self.norm, self.least_peak = known
        # Where the answer is larger than any error, eager is not zero.
        if not all(map(math.isfinite, [*known, *whole])) or self.error_max >= self.least_peak:
            self._describe_all()
            return
        self.allowed_rms, self.allowed_max = whole
        self.irregular, self.nonzero = 0, True
        self.error_rms, self.rms = error / math.sqrt(self.total), self.norm / math.sqrt(self.total)

    def _settle_all(self, rows: list[list[float]]) -> None:
        if self.bounds is not None:
            *rows, whole = rows
            self.allowed_rms, self.allowed_max = whole
        found = [Described(*row) for row in rows]
        self.irregular = int(sum(chunk.irregular for chunk in found))
        self.nonzero = any(chunk.is_any for chunk in found)
        regular = max(1, self.total - self.irregular)
        self.error_rms = math.hypot(*[chunk.error_norm for chunk in found]) / math.sqrt(regular)
        self.error_max = max(chunk.error_max for chunk in found)
        # The answer's norm is no smaller than its largest element.
        self.norm = math.hypot(*[chunk.norm for chunk in found])
        self.least_peak = max(chunk.peak for chunk in found)
        self.rms = self.norm / math.sqrt(regular)
        self._set_limits()

    def _set_limits(self) -> None:
        if self.bounds is not None:
            return
        if self.exact or self.elementwise:
            self.allowed_rms = self.allowed_max = 0.0 if self.exact else None
            return
        epsilon = torch.finfo(self.dtype).eps
        times = multiple(self.dtype)
        self.allowed_rms = times * max(self.error_rms, epsilon * self.rms)
        self.allowed_max = times * max(self.error_max, epsilon * self.least_peak)

    def check_yardstick(self) -> None:
        """A float64 forward that says something else than eager is no yardstick: anything would pass."""
        limit = 0.5 if multiple(self.dtype) == 4 else 0.1
        if not (self.exact or self.elementwise) and self.error_rms > limit * self.rms:
            share = self.error_rms / self.rms if self.rms else math.inf
            raise unsupported(
                f"its float64 forward differs from eager by {share:.0%} in {self.name}: there is no yardstick",
                "use the policy paper",
            )


def expect(
    policy: "Policy",
    names: list[str],
    eager: list[torch.Tensor],
    references: list[torch.Tensor | None],
    kinds: list[list[error_model.Kind] | None] | None = None,
    picked: "list[Picked | None] | None" = None,
) -> list[Expectation]:
    """Expectations of all outputs, with one wait for the device, and a second where something is not finite. For each
    output: kinds of error_model.py, and what it points into (indices.py)."""
    nothing = [None] * len(names)
    each = zip(names, eager, references, kinds or nothing, picked or nothing, strict=True)
    expectations = [Expectation(policy, *one) for one in each]
    while pending := [expectation for expectation in expectations if expectation.pending()]:
        fetched = fetch([row for expectation in pending for row in expectation.pending()])
        for expectation in pending:
            count = len(expectation.pending())
            expectation.settle(fetched[:count])
            del fetched[:count]
    return expectations


class ConstantAnswer:
    """Whether one number would pass for every element of an output, over several draws of the inputs."""

    def __init__(self, expectation: Expectation) -> None:
        self._name, self._elementwise = expectation.name, expectation.elementwise
        self._exact = expectation.exact
        self._low, self._high = -math.inf, math.inf
        # Moments about a number of the size of the answer: what they are for is a small difference of large numbers.
        self._center: Any = None
        self._allowed = math.inf
        self._count = self._sum = self._squares = 0.0

    def add(self, expectation: Expectation) -> None:
        """Another draw's."""
        if self.is_settled:
            return
        if self._elementwise:
            # Nearly always the beginning is enough, which spares reading gigabytes.
            for ranges in ([(0, min(expectation.total, BEGINNING))], chunks(expectation.total)):
                if not self.is_settled:
                    self._narrow([expectation.target(start, stop) for start, stop in ranges])
            return
        parts = [expectation.target(start, stop) for start, stop in chunks(expectation.total)]
        if self._center is None:
            first = parts[0][:BEGINNING]
            self._center = first[first.isfinite()].mean().nan_to_num(nan=0.0).item()
        self._allowed = min(self._allowed, expectation.allowed_rms)
        for count, total, squares in fetch([self._moments(part) for part in parts]):
            self._count, self._sum, self._squares = self._count + count, self._sum + total, self._squares + squares

    @property
    def is_settled(self) -> bool:
        """Whether no further draw can make a constant pass."""
        if self._exact or self._elementwise:
            return self._exact or self._low > self._high
        # Another draw of as many elements can at most halve the variance.
        return self._count > 0 and self._spread() > 1.5 * DEGENERATE * self._allowed

    def _narrow(self, parts: list[torch.Tensor]) -> None:
        for low, high in fetch([self._interval(part) for part in parts]):
            self._low, self._high = max(self._low, low), min(self._high, high)

    def _spread(self) -> float:
        mean = self._sum / self._count
        return math.sqrt(max(0.0, self._squares / self._count - mean * mean))

    @staticmethod
    def _interval(part: torch.Tensor) -> torch.Tensor:
        """Between which numbers a constant is right for these elements."""
        room = part.abs() * TOLERANCE + TOLERANCE
        low = (part - room).nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=-math.inf).max()
        return row(low, (part + room).nan_to_num(nan=math.inf, neginf=math.inf, posinf=math.inf).min())

    def _moments(self, part: torch.Tensor) -> torch.Tensor:
        known = part.isfinite()
        away = (part - self._center).masked_fill_(~known, 0.0)
        return row(known.sum(), away.sum(), away.square().sum())

    def why(self) -> str | None:
        """What passes, in words, or `None`."""
        if self._elementwise:
            # Nobody needs to know which constant is right everywhere.
            return f"a constant passes for {self._name}" if self._low <= self._high and self._high < math.inf else None
        if not self._count:
            return None
        spread = self._spread()
        if spread > DEGENERATE * self._allowed:
            return None
        return f"a constant passes for {self._name}: it varies by {spread:.2g}, and may be off by {self._allowed:.2g}"


class Measurement:
    """One output under comparison: rows of numbers, and which elements still hold the poison."""

    def __init__(
        self,
        expectation: Expectation,
        got: torch.Tensor,
        pattern_byte: int | None = None,
        earlier: list[torch.Tensor] | None = None,
        ranges: list[tuple[int, int]] | None = None,
    ) -> None:
        self.expectation = expectation
        self.held = None
        self._bits = bits(got)
        self._got = whole(got) if expectation.exact else got.reshape(-1)
        self._word = None if pattern_byte is None else pattern_word(got.dtype, pattern_byte)
        self._earlier = earlier
        bounds = expectation.bounds if ranges is None else None
        self._errors: Any = None if bounds is None else expectation.empty()
        self._excused = self._excuses()
        ranges = chunks(expectation.total) if ranges is None else ranges
        held = [self._compare_poison(start, stop) for start, stop in ranges]
        self.rows = [
            torch.cat([self._compare(start, stop), counts]) for (start, stop), counts in zip(ranges, held, strict=True)
        ]
        if bounds is not None:
            # The last row is of the parts.
            self.rows.append(row(*bounds.parts(self._errors)) if bounds.by_family else self._got.new_zeros(0).double())
            self._errors = None

    @staticmethod
    def conclude(numbers: list[list[float]]) -> list[list[float]]:
        """The numbers of its rows say it all."""
        return numbers

    def _excuses(self) -> torch.Tensor | None:
        """Which indices are right though they are not eager's."""
        picked = self.expectation.picked
        if picked is None:
            return None
        places = (each.view(self.expectation.shape) for each in (self.expectation.eager, self._got))
        return picked.excuses(*places).reshape(-1)

    def _compare(self, start: int, stop: int) -> torch.Tensor:
        """How many are wrong, how many not finite, where the worst is, the norm of the error, and whether anything is
        not zero; then four columns on the worst, by the kind of type."""
        compare = self._compare_exact if self.expectation.exact else self._compare_float
        return compare(self._got[start:stop], start, stop)

    def _compare_exact(self, got: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        expected = self.expectation.eager[start:stop]
        # Up to 2^64 - 1, which wraps around: with the sign bit turned over, the order is that of the distances again.
        distance = torch.maximum(got, expected).long()
        distance -= torch.minimum(got, expected)
        distance ^= torch.iinfo(torch.int64).min
        wrong = got != expected
        if self._excused is not None:
            excused = self._excused[start:stop]
            wrong &= ~excused
            distance.masked_fill_(excused, torch.iinfo(torch.int64).min)
        where = distance.argmax().reshape(1)
        nothing = got.new_zeros((), dtype=torch.float64)
        there = [half for values in (got, expected) for half in halves(values.take(where).long())]
        return row(wrong.sum(), nothing, where, nothing, got.any(), *there)

    def _compare_float(self, got: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        target = self.expectation.target(start, stop)
        error = (got.double() - target).abs_()
        if self.expectation.irregular:
            self._excuse_irregular(error, target, got, start, stop)
        error.nan_to_num_(nan=math.inf, posinf=math.inf)
        if self._errors is not None:
            self._errors[start:stop] = error
        if self.expectation.elementwise:
            excess = error - (target.abs().nan_to_num_(nan=0.0) * TOLERANCE + TOLERANCE)
            wrong = excess > 0
        else:
            excess = error
            wrong = error > self.expectation.allowed_max
        worst, where = excess.max(0)
        where = where.reshape(1)
        return row(
            wrong.sum(),
            error.isinf().sum(),
            where,
            torch.linalg.vector_norm(error),
            got.any(),
            worst,
            error.take(where),
            got.take(where),
            self._expected(target, where, start),
        )

    def _expected(self, target: torch.Tensor, where: torch.Tensor, start: int) -> torch.Tensor:
        """Where the target is not finite, eager's is the answer."""
        target = target.take(where)
        return torch.where(target.isnan(), self.expectation.eager.take(where + start).double(), target)

    def _excuse_irregular(
        self, error: torch.Tensor, target: torch.Tensor, got: torch.Tensor, start: int, stop: int
    ) -> None:
        """Where the target is not finite, the answer is right if it is eager's, or as near as `paper` asks."""
        eager = self.expectation.eager[start:stop]
        right = (got == eager) | (got.isnan() & eager.isnan())
        right |= eager.isfinite() & ((got - eager).abs() <= TOLERANCE + TOLERANCE * eager.abs())
        irregular = target.isnan()
        error.masked_fill_(irregular & right, 0.0)
        error.masked_fill_(irregular & ~right, WRONG_SPECIAL)

    def _compare_poison(self, start: int, stop: int) -> torch.Tensor:
        """How many elements hold the pattern; with an earlier run's mask, how many did so in both, and the first."""
        if self._word is None:
            return self._bits.new_zeros(3, dtype=torch.float64)
        held = self._bits[start:stop] == self._word
        if self.held is None:
            self.held = []
        self.held.append(held)
        if self._earlier is None:
            return row(held.sum(), *[held.new_zeros(())] * 2)
        both = held & self._earlier[len(self.held) - 1]
        return row(held.sum(), both.sum(), both.view(torch.uint8).argmax())


class Verdict:
    """What the rows of a measurement say."""

    def __init__(self, expectation: Expectation, rows: list[list[float]], knows_unwritten: bool) -> None:
        self.expectation = expectation
        self._worst_part = None
        if expectation.bounds is not None:
            *rows, parts = rows
            self._worst_part = worst_part(expectation.bounds.names(), parts)
        found = [Compared(*row) for row in rows]
        self.mismatched = int(sum(chunk.mismatched for chunk in found))
        self.nonfinite = int(sum(chunk.nonfinite for chunk in found))
        regular = max(1, expectation.total - expectation.irregular)
        self.error_rms = math.hypot(*[chunk.error_norm for chunk in found]) / math.sqrt(regular)
        self.zeros = expectation.nonzero and not any(chunk.is_any for chunk in found)
        self.held = int(sum(chunk.held for chunk in found))
        self.unwritten = int(sum(chunk.unwritten for chunk in found)) if knows_unwritten else None
        self._first_unwritten = self._first(found) if self.unwritten else None
        self._worst_chunk = max(range(len(found)), key=lambda place: self._badness(found[place]))
        self._worst = found[self._worst_chunk]

    def _badness(self, chunk: Any) -> float:
        if not self.expectation.exact:
            return chunk.badness_or_got_high
        got, expected = chunk.whole_numbers
        return abs(got - expected)

    @staticmethod
    def _first(found: Any) -> int:
        return next(
            int(chunk.first_unwritten) + chunk_numbers.CHUNK * place
            for place, chunk in enumerate(found)
            if chunk.unwritten
        )

    @property
    def within(self) -> bool:
        """Whether the policy's tolerance would let it pass."""
        limit = self.expectation.allowed_rms
        parts_are_within = self._worst_part is None or self._worst_part["times"] <= 1.0
        rms_is_within = limit is None or self._rms_is_within(limit)
        return self.mismatched == 0 and self.nonfinite == 0 and rms_is_within and parts_are_within

    def _rms_is_within(self, limit: float) -> bool:
        return self.expectation.exact or self.error_rms <= limit

    @property
    def reason(self) -> str | None:
        if self.unwritten:
            return "unwritten"
        if self.nonfinite:
            return "nonfinite"
        if self.zeros:
            return "zeros"
        return None if self.within else "values"

    def worst(self) -> dict[str, Any] | None:
        index = index_of(int(self._worst.worst_at) + chunk_numbers.CHUNK * self._worst_chunk, self.expectation.shape)
        if self.expectation.exact:
            return {"index": index} | self._worst_exact() if self.mismatched else None
        error, got, expected = (
            self._worst.error_or_got_low,
            self._worst.got_or_expected_high,
            self._worst.expected_or_expected_low,
        )
        if error == 0.0 and self.mismatched == 0:
            return None
        allowed = self.expectation.allowed_max
        if self.expectation.elementwise:
            allowed = TOLERANCE + TOLERANCE * abs(expected)
        return {
            "index": index,
            "expected": finite(expected),
            "expected_text": special(expected),
            "got": finite(got),
            "got_text": special(got),
            "error": finite(error),
            "allowed": finite(allowed),
        }

    def _worst_exact(self) -> dict[str, Any]:
        got, expected = self._worst.whole_numbers
        is_boolean = self.expectation.dtype == torch.bool
        return {
            "expected": expected,
            "expected_text": boolean_text(expected) if is_boolean else None,
            "got": got,
            "got_text": boolean_text(got) if is_boolean else None,
            "error": None if is_boolean else abs(got - expected),
            "allowed": None if is_boolean else 0,
        }

    def facts(self) -> dict[str, Any]:
        expectation = self.expectation
        reason = self.reason
        strict = not (expectation.exact or expectation.elementwise)
        first = self._first_unwritten
        return {
            "name": expectation.name,
            "pass": reason is None,
            "reason": reason,
            "mismatched": self.mismatched,
            "total": expectation.total,
            "worst": self.worst(),
            "nonfinite": self.nonfinite,
            "held": self.held,
            "unwritten": self.unwritten,
            "first_unwritten": None if first is None else index_of(first, expectation.shape),
            "error_rms": None if expectation.exact else finite(self.error_rms),
            "reference_error_rms": expectation.error_rms if strict else None,
            "allowed_rms": expectation.allowed_rms if strict else None,
            "part": self._part(),
        }

    def _part(self) -> dict[str, Any] | None:
        """The part of the output that is further off than is allowed, where the whole may be well."""
        part = self._worst_part
        if part is None or part["times"] <= 1.0:
            return None
        return part | {"times": finite(part["times"])}


def worst_part(families: list[int | str], numbers: list[float]) -> dict[str, Any] | None:
    """Which part of an output is furthest from what is allowed, and how many times as far off as that: an index of a
    dimension, or of a block of elements, where `dimension` is `None`."""
    ratios, places = numbers[::2], numbers[1::2]
    if not families:
        return None
    # A dimension says more than a block.
    worst = max(range(len(families)), key=lambda at: (ratios[at] > 1.0 and families[at] != "block", ratios[at]))
    dimension = None if families[worst] == "block" else families[worst]
    return {"dimension": dimension, "index": int(places[worst]), "times": ratios[worst]}


def finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if math.isfinite(number) and abs(number) < WRONG_SPECIAL else None


def special(number: float) -> str | None:
    """What `finite` leaves out, in words."""
    return repr(number) if finite(number) is None else None


def boolean_text(byte: int) -> str:
    return ("false", "true")[byte] if byte < 2 else f"the byte {byte}"


def index_of(flat: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for extent in reversed(shape):
        index.append(flat % extent)
        flat //= extent
    return index[::-1]


def would_pass(expectations: list[Expectation], answers: list[torch.Tensor]) -> bool:
    """Whether the policy's tolerance lets these answers pass, zeros or not. For screening.

    One wrong element is enough, and nearly every answer that fails has many: the beginning is looked at first, which
    spares reading outputs of gigabytes a dozen times."""
    pairs = list(zip(expectations, answers, strict=True))
    beginnings = [Measurement(e, answer, ranges=[(0, min(e.total, BEGINNING))]) for e, answer in pairs]
    if any(
        Compared(*row).mismatched > 0 for row in fetch([row for measurement in beginnings for row in measurement.rows])
    ):
        return False
    measurements = [Measurement(expectation, answer) for expectation, answer in pairs]
    fetched = fetch([row for measurement in measurements for row in measurement.rows])
    for measurement in measurements:
        count = len(measurement.rows)
        if not Verdict(measurement.expectation, fetched[:count], False).within:
            return False
        del fetched[:count]
    return True
