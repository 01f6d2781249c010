"""Inputs that `get_inputs()` makes without random numbers: the same in each draw, unless they are made others.

A mask, positions, a ramp beside inputs that are drawn would let a candidate remember what it worked out from them. So
an input that several draws show to be equal is varied as `variation.py` says, in each draw, for eager, its float64
twin, the baselines and the candidate alike. A task whose forward bears no other values there is refused.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import inputs
from element_types import same_bits
from refusal import unsupported
from variation import LEVELS, Variation

if TYPE_CHECKING:
    from variation import Level


FURTHER_DRAWS = 3
"""Two draws of few values may be equal by chance."""
TRIALS = 2


def find(first: Sequence[Any], second: Sequence[Any], draw: Callable[..., Any]) -> list[int]:
    """The positions of the tensors that every draw gives. `draw` makes a further one, by its number."""
    fixed = [place for place, value in enumerate(first) if hasattr(value, "dtype") and same_bits(value, second[place])]
    for number in range(FURTHER_DRAWS if fixed else 0):
        others = draw(number)
        fixed = [place for place in fixed if same_bits(first[place], others[place])]
    return fixed


class FixedInputs:
    """What becomes of them in each draw."""

    def __init__(self) -> None:
        self._varied = {}

    def settle(
        self,
        values: Sequence[Any],
        fixed: list[int],
        names: list[str],
        bears: Callable[..., Any],
        seeds: list[int],
    ) -> list[int]:
        """Finds out how each can be varied. `bears` says whether the forward does with these values; `seeds` are some
        to try. Gives the positions of those that stay as they are."""
        staying = []
        for place in fixed:
            variation = Variation(values[place])
            if not variation.can_vary:
                staying.append(place)
                continue
            level = next(
                (level for level in LEVELS if self._is_borne(place, variation, level, values, bears, seeds)), None
            )
            if level is not None:
                self._varied[place] = (variation, level)
            elif values[place].numel() > 1:
                raise unsupported(
                    f"get_inputs() gives the same {names[place]} in each draw, "
                    "and the forward bears no other values there",
                    "let get_inputs() draw it at random: what is worked out from it could be remembered",
                )
            else:
                staying.append(place)
        return staying

    def _is_borne(
        self,
        place: int,
        variation: Variation,
        level: "Level",
        values: Sequence[Any],
        bears: Callable[..., Any],
        seeds: list[int],
    ) -> bool:
        """With what was settled before in place already."""
        trial = {**self._varied, place: (variation, level)}
        alone = FixedInputs()
        alone._varied = trial
        return all(bears(alone.vary(values, seed)) for seed in seeds[:TRIALS])

    def vary(self, values: Any, seed: int) -> Any:
        """The values of a draw, with others in place of those that never change."""
        if not self._varied:
            return values
        values = list(values)
        for place, (variation, level) in self._varied.items():
            values[place] = values[place].clone()
            variation.into(values[place], inputs.derive(seed, "fixed input", place), level)
        return values
