"""A model's weights and constants, which are other ones in each draw, so that work on them can't be done once and
remembered: parameters, with gradient or without, and buffers of floating-point numbers. `variation.py` says how.

What stays as it was drawn: integers and booleans, which tell a model's structure (masks, places in a table); tensors
whose elements share memory; and single numbers, where the model bears no others in their place. Which of the levels of
`variation.py` a model bears is tried when the task is loaded (`task.py`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from variation import LEVELS, Variation

if TYPE_CHECKING:
    from variation import Level


class Weights:
    """The tensors of a model that change in place."""

    def __init__(self, parameters: Iterator[Any], buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`buffers` are pairs: a tensor of the model, and a copy of it that changes alike."""
        all_places = [[parameter] for parameter in parameters] + [list(pair) for pair in buffers]
        self._moving = [_Moving(places) for places in all_places if _can_move(places[0])]
        self._homes = [
            (home, number) for number, places in enumerate(all_places) if _can_move(places[0]) for home in places
        ]
        self._seed = None
        self._level = LEVELS[0]

    @property
    def levels(self) -> "tuple[Level, ...]":
        """Those that are worth a try."""
        return LEVELS if any(moving.can_vary for moving in self._moving) else ()

    def use(self, level: "Level") -> None:
        """How far weights move from now on."""
        self.become(None)
        self._level = level

    def become(self, seed: int | None) -> None:
        """The weights of a seed; of `None`, those that the task's own code drew."""
        if seed == self._seed:
            return
        # Should it break off half-way, the weights are none that anybody can ask for.
        self._seed = object()
        with torch.no_grad():
            for position, moving in enumerate(self._moving):
                moving.become(None if seed is None else seed + position, self._level)
        self._seed = seed

    def recall(self, seed: int | None, values: list[torch.Tensor]) -> None:
        """The same from `values`, which are what parameters and buffers were then, in their order: one launch."""
        if seed == self._seed:
            return
        self._seed = object()
        if self._homes:
            with torch.no_grad():
                torch._foreach_copy_([home for home, _ in self._homes], [values[number] for _, number in self._homes])  # pyright: ignore[reportPrivateImportUsage]
        self._seed = seed


def _can_move(tensor: torch.Tensor) -> bool:
    shares_memory = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.is_floating_point() and tensor.numel() > 0 and not shares_memory


class _Moving:
    def __init__(self, places: list[torch.Tensor]) -> None:
        self._places = places
        self._variation = Variation(places[0].detach().clone())

    @property
    def can_vary(self) -> bool:
        return self._variation.can_vary

    def become(self, seed: int | None, level: "Level") -> None:
        first, *others = self._places
        self._variation.into(first, seed, level)
        for other in others:
            other.copy_(first)
