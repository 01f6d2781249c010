"""A draw of sparse inputs among the others.

Where many terms are added up, what honest rounding may be off hides fewer digits, and terms left out. In one of the
five draws that a verdict is made of, which one follows from the secret, most elements of one input are zeros, but for
those at the ends of its dimensions: sums have few terms there, so honest arithmetic is nearly exact. The rule of bounds
is the same, with noisy twins of such a draw.

Only where all float outputs are float32, under the policy `strict`: elsewhere the bounds are too near to honest
arithmetic to be asked twice. And only where the forward bears it: what was finite stays so, outputs don't vanish, and
the twins' error relative to the answer is not much larger than with full inputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import error_model
import inputs
from refusal import Refusal

if TYPE_CHECKING:
    from task import Task

DRAWS = 5
"""One of the first so many is sparse."""
TERMS = 32
"""About as many elements stay along the longest dimension."""
LEAST_SHARE, LARGEST_SHARE = 1 / 256, 1 / 4
SMALLEST = 1024
"""Elements of an input that may become sparse."""
MOST_TIMES = 4.0
"""The twins' error relative to the answer, in units of that with full inputs."""
LEAST_SIZE = 1e-4
"""The size of a sparse draw's outputs, in units of that of a full one's."""


@dataclasses.dataclass
class Probe:
    place: int
    """Of the input that becomes sparse."""
    share: float
    kinds: list
    """As `error_model.study` gives them."""

    def sparse(self, values: Sequence[Any], seed: int) -> list[torch.Tensor]:
        return sparse(values, self.place, self.share, seed)


def is_probe(secret: int, trial: int) -> bool:
    """Whether a draw of a verdict is its sparse one."""
    return trial == inputs.derive(secret, "probe", 0) % DRAWS


def sparse(values: Sequence[Any], place: int, share: float, seed: int) -> list[torch.Tensor]:
    values = list(values)
    value = values[place]
    generator = torch.Generator(device=value.device).manual_seed(inputs.derive(seed, "sparse", place))
    kept = torch.rand(value.shape, generator=generator, device=value.device) < share
    for dim, extent in enumerate(value.shape):
        if extent >= TERMS:
            # What is left out is mostly at an end.
            kept.narrow(dim, 0, 1).fill_(True)
            kept.narrow(dim, extent - 1, 1).fill_(True)
    values[place] = torch.where(kept, value, torch.zeros_like(value))
    return values


def find(
    task: "Task",
    values: Sequence[Any],
    eager: list[torch.Tensor],
    kinds: Sequence[list[error_model.Kind] | None] | None,
    seed: int,
) -> Probe | None:
    """The probe of a task, from a draw with what eager gave and the kinds of its outputs; `None` where it bears
    none."""
    is_strict = task.policy.name == "strict"
    floats = [output for output in eager if output.is_floating_point()]
    if kinds is None or not (is_strict and floats and all(output.dtype == torch.float32 for output in floats)):
        return None
    places = [
        place
        for place, value in enumerate(values)
        if isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.numel() >= SMALLEST
        and place not in task.fixed_places
    ]
    for place in sorted(places, key=lambda place: -values[place].numel()):
        share = min(LARGEST_SHARE, max(LEAST_SHARE, TERMS / max(values[place].shape)))
        found = _studied(task, sparse(values, place, share, seed), eager, kinds)
        if found is not None:
            return Probe(place, share, found)
    return None


def _studied(
    task: "Task",
    values: Sequence[Any],
    full: list[torch.Tensor],
    kinds: Sequence[Any],
) -> list[list[error_model.Kind] | None] | None:
    """The kinds of a sparse draw, or `None` where the forward does not bear it."""
    try:
        eager = task.forward(values)
        if not all(_bears(output, other) for output, other in zip(full, eager, strict=True)):
            return None
        exact = task.exact(values, eager)
        found = error_model.study(task.twin, values, eager, exact, task.policy.name)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, KeyError, AttributeError, Refusal):
        task.restore()
        return None
    assert found is not None, "under `strict` an output of floats has kinds"
    # Much less exact than with full inputs: it divides by what nearly vanishes, and no two draws are alike.
    pairs = [
        (one, other)
        for ones, others in zip(kinds, found, strict=True)
        for one, other in zip(ones or (), others or (), strict=True)
    ]
    return found if all(other.relative[None] <= MOST_TIMES * one.relative[None] for one, other in pairs) else None


def _bears(full: torch.Tensor, output: torch.Tensor) -> bool:
    if output.shape != full.shape:
        return False
    if not output.is_floating_point():
        return True
    if bool((full.isfinite() & ~output.isfinite()).any()):
        return False
    before, after = (
        torch.linalg.vector_norm(each.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64).item() for each in (full, output)
    )
    return after >= LEAST_SIZE * before > 0
