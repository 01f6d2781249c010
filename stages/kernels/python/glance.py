"""The short way of a whole judgement. Most answers are plainly right, which a few passes over their elements show;
finding out what is wrong with an answer takes some twenty (`judge.Measurement`).

A glance gives the numbers that a measurement would give, or says that it can't: then the answer is measured. So nothing
is called wrong here, and what is called right has the same facts. It takes as given, and checks afterwards by what it
found, that no element is excused, none is wrong, none is not finite, not all are zero, and none holds the poison.
"""

import math
from typing import Any

import torch

import chunk_numbers
import judge
from element_types import pattern_number

CLOSE = 1e-6
"""An error that is within its bounds by less, relatively, is measured: norms are added up in another order here."""


def at(expectation: judge.Expectation, got: torch.Tensor, pattern_byte: int) -> "ExactGlance | FloatGlance | None":
    """A glance at an output, or `None` where it could say nothing."""
    if expectation.exact:
        return ExactGlance(expectation, got, pattern_byte)
    if expectation.bounds is None or expectation.irregular:
        return None
    # Of what is right, nothing is larger, and nothing is NaN: where the poison is, there is no need to look for it.
    largest = (expectation.norm + expectation.allowed_max) * (1 + CLOSE)
    if abs(pattern_number(expectation.dtype, pattern_byte)) <= largest:
        return None
    return FloatGlance(expectation, got)


class FloatGlance:
    """One output of floats, where there are bounds and everything is finite."""

    held = None

    def __init__(self, expectation: judge.Expectation, got: torch.Tensor) -> None:
        self.expectation = expectation
        got = got.reshape(-1)
        errors = torch.empty(expectation.total, dtype=torch.float64, device=got.device)
        for start, stop in chunk_numbers.chunks(expectation.total):
            torch.sub(got[start:stop], expectation.target(start, stop), out=errors[start:stop])
        norm, where, parts = expectation.bounds.compare(errors)
        values = errors.take(where).abs(), got.take(where), expectation.target(0, None).take(where)
        self.rows = [chunk_numbers.row(norm, where, *values), chunk_numbers.row(*parts) if parts else norm.new_zeros(0)]

    def conclude(self, numbers: list[list[float]]) -> list[list[float]] | None:
        """The rows that a measurement would have given, or `None`."""
        (norm, where, worst, got, expected), parts = numbers
        if not self._is_right(norm, worst, parts[::2]):
            return None
        right = chunk_numbers.Compared(
            mismatched=0.0,
            nonfinite=0.0,
            worst_at=where,
            error_norm=norm,
            is_any=1.0,
            badness_or_got_high=worst,
            error_or_got_low=worst,
            got_or_expected_high=got,
            expected_or_expected_low=expected,
            held=0.0,
            unwritten=0.0,
            first_unwritten=0.0,
        )
        return [[*right], parts]

    def _is_right(self, norm: float, worst: float, ratios: list[float]) -> bool:
        expectation, within = self.expectation, 1 - CLOSE
        is_close = worst <= within * expectation.allowed_max
        is_close &= norm <= within * expectation.allowed_rms * math.sqrt(expectation.total)
        # Where the answer is larger than any error, something is not zero.
        is_something = worst < expectation.least_peak or not expectation.nonzero
        # A NaN is not within anything.
        return is_close and is_something and all(ratio <= within for ratio in ratios)


class ExactGlance(judge.Measurement):
    """One output of integers or booleans: whether all are equal, and the poison as it is measured."""

    def _excuses(self) -> Any:
        return None

    def _compare_exact(self, got: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=got.device)
        is_wrong = (got != self.expectation.eager[start:stop]).any()
        # Not all zero, or as they should be.
        is_any = zero + 1.0
        return chunk_numbers.row(is_wrong, zero, zero, zero, is_any, zero, zero, zero, zero)

    def conclude(self, numbers: list[list[float]]) -> list[list[float]] | None:
        return None if any(chunk_numbers.Compared(*row).mismatched for row in numbers) else numbers
