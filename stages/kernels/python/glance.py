"""The short way of a whole judgement. Most answers are plainly right, which a few passes over their elements show;
finding out what is wrong with an answer takes some twenty (`judge.Measurement`).

A glance gives the numbers that a measurement would give, or says that it can't: then the answer is measured. So nothing
is called wrong here, and what is called right has the same facts. It takes as given, and checks afterwards by what it
found, that no element is excused, none is wrong, none is not finite, not all are zero, and none holds the poison.
"""

import math

import torch

import judge
from element_types import pattern_number

CLOSE = 1e-6
"""An error that is within its bounds by less, relatively, is measured: norms are added up in another order here."""


def at(expectation, got, pattern_byte):
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

    def __init__(self, expectation, got):
        self.expectation = expectation
        got = got.reshape(-1)
        errors = torch.empty(expectation.total, dtype=torch.float64, device=got.device)
        for start, stop in judge.chunks(expectation.total):
            torch.sub(got[start:stop], expectation.target(start, stop), out=errors[start:stop])
        norm, where, parts = expectation.bounds.compare(errors)
        values = errors.take(where).abs(), got.take(where), expectation.target(0, None).take(where)
        self.rows = [judge.row(norm, where, *values), judge.row(*parts) if parts else norm.new_zeros(0)]

    def conclude(self, numbers):
        """The rows that a measurement would have given, or `None`."""
        (norm, where, worst, got, expected), parts = numbers
        if not self._is_right(norm, worst, parts[::2]):
            return None
        return [[0.0, 0.0, where, norm, 1.0, worst, worst, got, expected, 0.0, 0.0, 0.0], parts]

    def _is_right(self, norm, worst, ratios):
        expectation, within = self.expectation, 1 - CLOSE
        is_close = worst <= within * expectation.allowed_max
        is_close &= norm <= within * expectation.allowed_rms * math.sqrt(expectation.total)
        # Where the answer is larger than any error, something is not zero.
        is_something = worst < expectation.least_peak or not expectation.nonzero
        # A NaN is not within anything.
        return is_close and is_something and all(ratio <= within for ratio in ratios)


class ExactGlance(judge.Measurement):
    """One output of integers or booleans: whether all are equal, and the poison as it is measured."""

    def _excuses(self):
        return None

    def _compare_exact(self, got, start, stop):
        numbers = torch.zeros(9, dtype=torch.float64, device=got.device)
        numbers[0] = (got != self.expectation.eager[start:stop]).any()
        # Not all zero, or as they should be.
        numbers[4] = 1.0
        return numbers

    def conclude(self, numbers):
        return None if any(row[0] for row in numbers) else numbers
