"""How large a task is made: the batch size at which its estimate is near a target and its tensors fit the budget."""

import bisect
import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from estimate import operator_cost, rebound

if TYPE_CHECKING:
    from compose import Chain
    from estimate import Rates

NICE_BATCHES = sorted({base * 2**power for base in (1, 3, 5) for power in range(22) if 2 <= base * 2**power <= 1 << 22})
# The window of targets, by the range asked for: its lower part, since a device's time is spent on every task again
# and again. Estimates count as good a little outside of it.
LEAST_TARGET, TARGET_SLOPE = 1.5, 0.45
SLACK_BELOW, SLACK_ABOVE = 1.2, 1.25
MOST_ELEMENTS = 2**31 - 1
FLOAT_BYTES, INDEX_BYTES = 4, 8
# By how much more a task with such an operator aims at: on an H200 half of 150 transposed convolutions took less than
# 0.6 of their estimate, so that one in eight fell below the range.
LATITUDE = {"convolution": 1.6}
# Values that an operator makes beside its output, in outputs.
TEMPORARIES = {"attention": 3, "recurrent": 2, "similarity": 1, "normalization": 1, "loss": 1, "ordering": 2}


class Window:
    """The targets in milliseconds, and the estimates that will do."""

    def __init__(self, params: dict[str, Any]) -> None:
        low, high = params["target_ms_min"], params["target_ms_max"]
        first, last = LEAST_TARGET * low, low ** (1 - TARGET_SLOPE) * high**TARGET_SLOPE
        if first > last:  # a narrow range: its middle half, on a logarithmic scale
            first, last = low**0.75 * high**0.25, low**0.25 * high**0.75
        self.first, self.last = first, last
        self.least = max(low, first / SLACK_BELOW) if first <= high else low
        self.most = min(high, last * SLACK_ABOVE)

    def target(self, rng: random.Random, families: Sequence[str] = ()) -> float:
        """Drawn on a logarithmic scale; higher for families whose estimates are often too high."""
        drawn = math.exp(rng.uniform(math.log(self.first), math.log(self.last)))
        return min(self.last, drawn * max((LATITUDE.get(family, 1.0) for family in families), default=1.0))


def batch_for(target: float, window: Window, milliseconds: Callable[..., Any], most: float) -> str | tuple[int, float]:
    """`(batch, estimate)` for the nice batch size below `most` whose estimate is nearest to the target on a
    logarithmic scale, or the reason why there is none. The estimate grows with the batch."""
    fitting = NICE_BATCHES[: bisect.bisect_right(NICE_BATCHES, most)]
    if not fitting:
        return "too large"
    place = bisect.bisect_left(fitting, target, key=milliseconds)
    near = [(batch, milliseconds(batch)) for batch in fitting[max(0, place - 1) : place + 1]]
    batch, estimate = min(near, key=lambda pair: abs(math.log(pair[1] / target)))
    if estimate < window.least:
        return "too fast"
    return "too slow" if estimate > window.most else (batch, estimate)


def chain_milliseconds(rates: "Rates", chain: "Chain") -> Callable[..., Any]:
    """The estimate as a function of the batch size."""

    def total(batch: int):
        return sum(
            rates.milliseconds(
                step.operator,
                step.usage,
                len(step.in_shape),
                *operator_cost(step.bound, step.in_shape, step.out_shape, step.weights, batch),
            )
            for step in chain.steps
        )

    return total


def most_batch(chain: "Chain", limit_bytes: float) -> float:
    """The largest batch whose tensors fit: the inputs are alive all the time, of values in between the last two are."""
    stays, fixed = tensor_bytes(chain)
    steps, largest = [], 1
    for place, step in enumerate(chain.steps):
        before, after = (math.prod(shape[1:]) for shape in (step.in_shape, step.out_shape))
        largest = max(largest, before, after)
        held = (before if place else 0) + after * (1 + TEMPORARIES.get(step.family, 0))
        steps.append(held * FLOAT_BYTES)
    return min((limit_bytes - fixed) / (stays + max(steps)), MOST_ELEMENTS / largest)


def tensor_bytes(chain: "Chain") -> tuple[float, int]:
    """`(bytes per sample of the batch, bytes that are the same for any batch)` of a chain's inputs and weights."""
    first = chain.steps[0]
    size = INDEX_BYTES if first.bound.usage["input"] == "index" else FLOAT_BYTES
    stays = math.prod(first.in_shape[1:]) * size
    fixed = sum(step.weights for step in chain.steps) * FLOAT_BYTES
    for step in chain.steps:
        # Operands at two batch sizes: what grows between them belongs to the samples.
        small, large = (rebound(step.bound, (batch, *step.in_shape[1:])).operands for batch in (2, 4))
        for one, other in zip(small, large, strict=True):
            if one.role != "input":
                continue
            size = INDEX_BYTES if one.fill.startswith("index") else FLOAT_BYTES
            growth = math.prod(other.shape) - math.prod(one.shape)
            stays += size * growth / 2
            fixed += size * (math.prod(one.shape) - growth)
    return stays, fixed
