"""Weights that are other ones in each draw, so that work on them can't be done once and remembered.

Each element of a parameter is moved by up to a tenth of itself: signs, zeros, and what a model makes of the order of its
weights stay. A parameter that is all zeros, as fresh biases and gates are, gets small numbers: else a candidate could
leave it out. Buffers stay as they are. The forwards of eager and of the float64 twin see the same weights.
"""

import torch

SPREAD = 0.1


class Weights:
    """The floating-point parameters of a model, which change in place."""

    def __init__(self, model):
        self._parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        self._drawn = [parameter.detach().clone() for parameter in self._parameters]
        self._is_zero = [not bool(parameter.any()) for parameter in self._drawn]
        self._seed = None

    def become(self, seed):
        """The weights of a seed; of `None`, those that the task's own code drew."""
        if seed == self._seed:
            return
        with torch.no_grad():
            for position, (parameter, drawn) in enumerate(zip(self._parameters, self._drawn, strict=True)):
                if seed is None:
                    parameter.copy_(drawn)
                else:
                    parameter.copy_(self._moved(drawn, self._is_zero[position], seed + position))
        self._seed = seed

    @staticmethod
    def _moved(drawn, is_zero, seed):
        generator = torch.Generator(device=drawn.device).manual_seed(seed)
        shift = torch.empty_like(drawn).uniform_(-SPREAD, SPREAD, generator=generator)
        return shift if is_zero else drawn + drawn * shift
