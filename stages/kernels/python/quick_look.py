"""A quick look at results of a program that the whole judgement has found right on other inputs.

Under the clock every result is checked again, and the whole judgement would take longer than what is timed: it needs a
float64 forward. Here a result is compared with eager's alone, within twice what the last whole judgement of the task
allowed. What is not clearly right is not called wrong either: the whole judgement then decides.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import chunk_numbers
from element_types import as_words
from policy import TOLERANCE

if TYPE_CHECKING:
    from judge import Expectation

SLACK = 2.0
"""Both eager and the candidate may be off by what is allowed, in opposite directions."""

SAMPLED = 1 << 16
"""Elements: where all of them are zero, the whole judgement tells whether they should be."""


class Limit(NamedTuple):
    """What an output may be off by. `exact` and `elementwise` are as in `judge.Expectation`, which also says where
    there is no limit."""

    name: str
    exact: bool
    elementwise: bool
    allowed_rms: Any
    allowed_max: Any


class Limits:
    """What may be off, by output, as it was for the inputs of a whole judgement."""

    def __init__(self, expectations: "list[Expectation]") -> None:
        # Where eager itself is not finite, only the whole judgement knows what to make of it.
        self.is_usable = not any(expectation.irregular for expectation in expectations)
        self.each = [
            Limit(each.name, each.exact, each.elementwise, each.allowed_rms, each.allowed_max) for each in expectations
        ]


class Expected:
    """Eager's outputs for the inputs of a set."""

    def __init__(self, limits: Limits, outputs: list[torch.Tensor]) -> None:
        self._limits = limits
        self._outputs = outputs

    def rows(self, got: list[torch.Tensor], damage: torch.Tensor) -> list[torch.Tensor]:
        """What `conclude` wants as numbers."""
        each = zip(self._limits.each, self._outputs, got, strict=True)
        return [damage, *[_compare(limit, expected, actual) for limit, expected, actual in each]]

    def conclude(self, fetched: list[list[float]]) -> dict[str, Any] | None:
        """The facts in the form of the whole judgement, or `None` where not everything is clearly right."""
        damaged, *numbers = fetched
        is_right = [_is_right(limit, row) for limit, row in zip(self._limits.each, numbers, strict=True)]
        if any(damaged) or not all(is_right):
            return None
        outputs = [
            _output(limit.name, expected) for limit, expected in zip(self._limits.each, self._outputs, strict=True)
        ]
        return {"outputs": outputs, "inputs_changed": [], "red_zones": []}


def _compare(limit: Limit, expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Three numbers: rms and largest error; for `paper` the largest excess over the tolerance, for exact types whether
    any differs; and whether all may be zero where it should not be, last."""
    expected = expected.contiguous()
    if limit.exact:
        wrong = (as_words(expected) != as_words(actual)).any()
        return chunk_numbers.row(wrong, wrong, wrong.new_zeros(()))
    error = _error(expected.reshape(-1), actual.reshape(-1))
    if limit.elementwise:
        # What the tolerance allows beside the same for all.
        room = expected.reshape(-1).abs().to(error.dtype)
        worst = error.abs_().sub_(room, alpha=TOLERANCE).max() - TOLERANCE
        return chunk_numbers.row(worst, worst, _looks_like_zeros(actual))
    rms = torch.linalg.vector_norm(error) / max(1, error.numel()) ** 0.5
    return chunk_numbers.row(rms, torch.linalg.vector_norm(error, math.inf), _looks_like_zeros(actual))


def _error(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """In float32, or float64 for that."""
    if expected.dtype in (torch.float32, torch.float64):
        return actual - expected
    return actual.float().sub_(expected)


def _looks_like_zeros(actual: torch.Tensor) -> torch.Tensor:
    """Whether there is nothing but zeros in a sample that is spread over all of it."""
    actual = actual.reshape(-1)
    return actual[:: max(1, actual.numel() // SAMPLED)].any().logical_not()


def _is_right(limit: Limit, row: list[float]) -> bool:
    rms, largest, is_zero = row
    # What is all zeros may be an answer to a task whose answers are tiny: the whole judgement knows.
    if is_zero:
        return False
    if limit.exact:
        return rms == 0
    if limit.elementwise:
        return largest <= 0.0
    # A NaN is not within anything.
    return rms <= SLACK * limit.allowed_rms and largest <= SLACK * limit.allowed_max


def _output(name: str, expected: torch.Tensor) -> dict[str, Any]:
    nothing = (
        "reason",
        "worst",
        "unwritten",
        "first_unwritten",
        "error_rms",
        "reference_error_rms",
        "allowed_rms",
        "part",
    )
    facts = dict.fromkeys(nothing)
    return facts | {"name": name, "pass": True, "mismatched": 0, "total": expected.numel(), "nonfinite": 0, "held": 0}
