"""Rows of numbers on chunks of a tensor: computed where the tensor is, and fetched together.

A large output needs no multiple of itself that way, and the host waits once.
"""

from typing import Any, NamedTuple

import torch

CHUNK = 1 << 24


def chunks(total: Any) -> list[tuple[int, int]]:
    return [(start, min(start + CHUNK, total)) for start in range(0, total, CHUNK)]


def row(*values: Any) -> torch.Tensor:
    return torch.stack([value.reshape(()).to(torch.float64) for value in values])


def fetch(rows: Any) -> list[Any]:
    """Rows of any lengths as lists of numbers: the one wait for the device."""
    lengths = [len(row) for row in rows]
    numbers = torch.cat(rows).tolist() if rows else []
    result = []
    for length in lengths:
        result.append(numbers[:length])
        del numbers[:length]
    return result


def halves(integer: Any) -> tuple[Any, Any]:
    """An int64 as two numbers that a double holds; `joined` is the way back."""
    return integer >> 32, integer & 0xFFFFFFFF


def joined(high: Any, low: Any) -> int:
    return (int(high) << 32) + int(low)


class Described(NamedTuple):
    """Numbers on a chunk of what is expected, with what is not finite left out."""

    irregular: float
    error_norm: float
    error_max: float
    norm: float
    peak: float
    is_any: float


class Compared(NamedTuple):
    """Numbers on a chunk of an answer. Four are on its worst element: for floats by how much it is off as the policy
    sees it, its error, what it is and what it should be; for whole numbers the halves of what it is and of what it
    should be. The last are on the poison: how many elements hold it, how many in an earlier run too, and the first."""

    mismatched: float
    nonfinite: float
    worst_at: float
    error_norm: float
    is_any: float
    badness_or_got_high: float
    error_or_got_low: float
    got_or_expected_high: float
    expected_or_expected_low: float
    held: float
    unwritten: float
    first_unwritten: float

    @property
    def whole_numbers(self) -> tuple[int, int]:
        """What the worst element of integers or booleans is, and what it should be."""
        got = joined(self.badness_or_got_high, self.error_or_got_low)
        return got, joined(self.got_or_expected_high, self.expected_or_expected_low)
