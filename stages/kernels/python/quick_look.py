"""A quick look at results of a program that the whole judgement has found right on other inputs.

Under the clock every result is checked again, and the whole judgement would take longer than what is timed: it needs a
float64 forward. Here a result is compared with eager's alone, within twice what the last whole judgement of the task
allowed. What is not clearly right is not called wrong either: the whole judgement then decides.
"""

import judge
import torch
from policy import TOLERANCE

SLACK = 2.0
"""Both eager and the candidate may be off by what is allowed, in opposite directions."""


class Limits:
    """What may be off, by output, as it was for the inputs of a whole judgement."""

    def __init__(self, expectations):
        # Where eager itself is not finite, only the whole judgement knows what to make of it.
        self.is_usable = not any(expectation.irregular for expectation in expectations)
        self.each = [(each.name, each.exact, each.elementwise, each.allowed_rms, each.allowed_max) for each in expectations]


class Expected:
    """Eager's outputs for the inputs of a set."""

    def __init__(self, limits, outputs):
        self._limits = limits
        self._outputs = outputs

    def facts(self, got, damage):
        """The facts in the form of the whole judgement, or `None` where not everything is clearly right."""
        rows = [damage]
        for limit, expected, actual in zip(self._limits.each, self._outputs, got, strict=True):
            rows.append(_compare(limit, expected, actual))
        damaged, *numbers = judge.fetch(rows)
        is_right = [_is_right(limit, row) for limit, row in zip(self._limits.each, numbers, strict=True)]
        if any(damaged) or not all(is_right):
            return None
        outputs = [
            _output(limit[0], expected) for limit, expected in zip(self._limits.each, self._outputs, strict=True)
        ]
        return {"outputs": outputs, "inputs_changed": [], "red_zones": []}


def _compare(limit, expected, actual):
    """Three numbers: whether all is zero where it should not be, last; rms and largest error; for `paper` the largest excess over the tolerance, for exact types a count."""
    _, exact, elementwise, _, _ = limit
    expected = expected.contiguous()
    if exact:
        wrong = (judge.bits(expected) != judge.bits(actual)).sum()
        return judge.row(wrong, wrong, wrong.new_zeros(()))
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    error = (actual.to(wide) - expected.to(wide)).abs_()
    is_zero = expected.any() & ~actual.any()
    if elementwise:
        error = error - (expected.to(wide).abs() * TOLERANCE + TOLERANCE)
        return judge.row(error.max(), error.max(), is_zero)
    return judge.row(torch.linalg.vector_norm(error) / max(1, error.numel()) ** 0.5, error.max(), is_zero)


def _is_right(limit, row):
    _, exact, elementwise, allowed_rms, allowed_max = limit
    rms, largest, is_zero = row
    # What is all zeros may be an answer to a task whose answers are tiny: the whole judgement knows.
    if is_zero:
        return False
    if exact:
        return rms == 0
    if elementwise:
        return largest <= 0.0
    # A NaN is not within anything.
    return rms <= SLACK * allowed_rms and largest <= SLACK * allowed_max


def _output(name, expected):
    nothing = ("reason", "worst", "unwritten", "first_unwritten", "error_rms", "reference_error_rms", "allowed_rms", "part")
    facts = dict.fromkeys(nothing)
    return facts | {"name": name, "pass": True, "mismatched": 0, "total": expected.numel(), "nonfinite": 0, "held": 0}
