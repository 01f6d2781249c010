"""Other values for tensors that would be the same in each draw, so that work on them can't be done once and remembered.

| what a tensor holds | what it becomes |
|---|---|
| floats | each element shrinks by up to a fifth: nothing grows that a model keeps below one; signs, zeros, infinities stay |
| floats, one-dimensional and in order (edges, times) | the same, but all elements by one factor, so that they stay in order |
| nothing but zeros of floats, as fresh biases and states are | numbers from 0 to 0.2: else they could be left out |
| integers or booleans | the same ones in another order along one dimension, each row in its own: no index leaves its range |
| integers, one-dimensional and in order (offsets, positions) | others between the first and the last, in order |
| integers that are all equal | a tenth of them smaller, but not negative where they were not |
| booleans that are all equal | a tenth of them turned over |

Integers that are all zero, and single integers and booleans, stay: there is nothing in them that could be remembered.
`LEVELS` are gentler ways, for models that don't bear the first.
"""  # noqa: E501 (a table)

import dataclasses
from typing import Any

import torch

CHANGED = 0.1
"""The share of equal integers that change."""


@dataclasses.dataclass(frozen=True)
class Level:
    """How far floats move."""

    smallest: float = 0.8
    """The least factor that an element shrinks by."""
    alike: bool = False
    """Whether all elements of a tensor shrink by one factor."""
    singles: bool = False
    """Whether single numbers move, which some models read as sizes or exponents."""


LEVELS = (Level(singles=True), Level(), Level(smallest=0.98), Level(alike=True))


class Variation:
    """One tensor's values as they were drawn, and others by seed."""

    def __init__(self, drawn: torch.Tensor) -> None:
        """`drawn` is kept: pass a copy of what changes."""
        self._drawn = drawn
        self._is_float = drawn.is_floating_point()
        self._is_single = drawn.numel() < 2
        self._dim = None
        if not self._is_float:
            self._dim = _first_uneven_dimension(drawn)
            self._is_constant = self._dim is None
            self._is_ordered = drawn.dim() == 1 and drawn.dtype != torch.bool and bool((drawn.diff() >= 0).all())
        else:
            self._is_zero = not bool(drawn.any())
            self._is_ordered = not self._is_zero and _is_ordered(drawn)

    @property
    def can_vary(self) -> bool:
        """Whether any level changes anything."""
        if self._drawn.numel() == 0:
            return False
        if self._is_float:
            return self._is_zero or bool((self._drawn.isfinite() & (self._drawn != 0)).any())
        return not self._is_single and (self._drawn.dtype == torch.bool or bool(self._drawn.any()))

    def into(self, target: torch.Tensor, seed: int | None, level: Level) -> None:
        """Writes the values of a seed; of `None`, those that were drawn. `target` may be what is kept, if none is."""
        if seed is None:
            target.copy_(self._drawn)
            return
        generator = torch.Generator(device=self._drawn.device).manual_seed(seed)
        if self._is_float:
            self._shrink(target, generator, level)
        elif self._is_single:
            target.copy_(self._drawn)
        elif self._is_constant:
            target.copy_(_partly_changed(self._drawn, generator))
        elif self._is_ordered:
            target.copy_(_between(self._drawn, generator))
        else:
            order = torch.rand(self._drawn.shape, generator=generator, device=self._drawn.device).argsort(self._dim)
            target.copy_(self._drawn.gather(self._dim, order))

    def _shrink(self, target: torch.Tensor, generator: Any, level: Level) -> None:
        if self._is_single and not level.singles:
            target.copy_(self._drawn)
        elif self._is_zero:
            target.uniform_(0, 1 - level.smallest, generator=generator)
        elif self._is_ordered or level.alike:
            factor = self._drawn.new_empty(1).uniform_(level.smallest, 1, generator=generator)
            target.copy_(self._drawn).mul_(factor)
        else:
            # In place: a large weight must not need as much memory again.
            target.uniform_(level.smallest, 1, generator=generator).mul_(self._drawn)


def _is_ordered(values: torch.Tensor) -> bool:
    if values.dim() != 1 or bool((values == values[0]).all()):
        return False
    steps = values.diff()
    return bool((steps >= 0).all() | (steps <= 0).all())


def _first_uneven_dimension(values: torch.Tensor) -> int | None:
    """The last dimension along which values differ; `None` where all are equal."""
    for dim in reversed(range(values.dim())):
        if bool((values != values.narrow(dim, 0, 1)).any()):
            return dim
    return None


def _partly_changed(values: torch.Tensor, generator: Any) -> Any:
    """Values that are all equal, a tenth of them, and at least one, made others that are nearer to zero."""

    def drawn():
        return torch.rand(values.numel(), generator=generator, device=values.device)

    chosen = drawn()
    chosen = (chosen <= chosen.quantile(CHANGED) if chosen.numel() <= 1 << 20 else chosen <= CHANGED).view(values.shape)
    if values.dtype == torch.bool:
        return values ^ chosen
    share = drawn().view(values.shape).double()
    return torch.where(chosen, (values.double() * share).trunc().to(values.dtype), values)


def _between(values: torch.Tensor, generator: Any) -> torch.Tensor:
    """Others in order, from the first to the last."""
    low, high = int(values[0]), int(values[-1])
    others = torch.randint(low, high + 1, values.shape, generator=generator, device=values.device).to(values.dtype)
    others[0], others[-1] = low, high
    return others.sort().values
