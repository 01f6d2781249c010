"""Weights that are other ones in each draw, so that work on them can't be done once and remembered.

Each element of a parameter is made smaller by up to a fifth of itself: never larger, so that nothing grows that a model
keeps below one, and signs, zeros and infinities stay. A parameter that is all zeros, as fresh biases and gates are, gets
small positive numbers: else a candidate could leave it out. One in order (edges, times) keeps it: all of it shrinks alike.

What stays as it was drawn: single numbers, from which there is little to work out ahead and which models read as such;
parameters without gradient, which are constants, as buffers are; those whose elements share memory. And all weights of
a model that does not bear it: `task.py` tries.
"""

import torch

SMALLEST = 0.8


class Weights:
    """The parameters of a model, which change in place."""

    def __init__(self, model):
        self._moving = [_Moving(parameter) for parameter in model.parameters() if _can_move(parameter)]
        self._seed = None

    def become(self, seed):
        """The weights of a seed; of `None`, those that the task's own code drew."""
        if seed == self._seed:
            return
        # Should it break off half-way, the weights are none that anybody can ask for.
        self._seed = object()
        with torch.no_grad():
            for position, moving in enumerate(self._moving):
                moving.become(None if seed is None else seed + position)
        self._seed = seed

    def stay(self):
        """The weights that were drawn, from now on for all seeds."""
        self.become(None)
        self._moving = []


def _can_move(parameter):
    shares_memory = any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True))
    return parameter.requires_grad and parameter.numel() > 1 and not shares_memory


class _Moving:
    def __init__(self, parameter):
        self._parameter = parameter
        self._drawn = parameter.detach().clone()
        self._is_zero = not bool(self._drawn.any())
        self._is_ordered = not self._is_zero and _is_ordered(self._drawn)

    def become(self, seed):
        if seed is None:
            self._parameter.copy_(self._drawn)
            return
        generator = torch.Generator(device=self._drawn.device).manual_seed(seed)
        if self._is_zero:
            self._parameter.uniform_(0, 1 - SMALLEST, generator=generator)
        elif self._is_ordered:
            factor = self._drawn.new_empty(1).uniform_(SMALLEST, 1, generator=generator)
            torch.mul(self._drawn, factor, out=self._parameter)
        else:
            # In place: a large weight must not need as much memory again.
            self._parameter.uniform_(SMALLEST, 1, generator=generator).mul_(self._drawn)


def _is_ordered(values):
    if values.dim() != 1 or bool((values == values[0]).all()):
        return False
    steps = values.diff()
    return bool((steps >= 0).all() | (steps <= 0).all())
