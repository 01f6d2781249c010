"""Outputs that are indices into values, such as those of argmax, sort and top-k.

Where values are equal, any of their places is a right answer, and kernels that work in parallel find another one than
eager does. So while eager runs, whatever picks places is watched; an output that is one of these results is judged by
the values there: they must equal those that eager's indices lead to, and a sort's places must all differ.

With so many equal values that half of them always holds the answer, half of the work is enough: such a task is
degenerate.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dispatch_mode import DispatchMode

if TYPE_CHECKING:
    from judge import Expectation

ONE_OF = {"argmax": 0, "argmin": 0, "max": 1, "min": 1, "mode": 1, "median": 1, "nanmedian": 1, "kthvalue": 1}
"""Operators that pick one place, and which of their results it is."""
MANY_OF = {"sort": 1, "topk": 1, "argsort": 0}
"""Those that pick places which differ."""
DIM_AT = {"kthvalue": 2, "topk": 2}
"""Where the dimension stands among the arguments, if not second."""


@dataclasses.dataclass
class Picked:
    """What one output of indices points into."""

    values: torch.Tensor
    dim: int
    """Of the values; they are flat where the operator was given none."""
    distinct: bool

    def values_at(self, indices: torch.Tensor) -> torch.Tensor:
        """The values at indices that lie within the dimension."""
        if self.values.dim() == 1:
            # Of all elements, whatever shape the one index was given.
            return self.values.gather(0, indices.reshape(-1))
        at = indices if indices.dim() == self.values.dim() else indices.unsqueeze(self.dim)
        return self.values.gather(self.dim, at)

    def excuses(self, expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Which indices lead to the values that the expected ones do; both of the output's shape."""
        size = self.values.shape[self.dim]
        inside = (got >= 0) & (got < size)
        safe = torch.where(inside, got, expected)
        right = _equal(self.values_at(safe), self.values_at(expected)).view(expected.shape) & inside
        if self.distinct:
            repeated = safe.sort(self.dim).values.diff(dim=self.dim) == 0
            right &= ~repeated.any(self.dim, keepdim=True)
        return right

    def decided_by(self, expected: torch.Tensor) -> list[bool]:
        """Whether the first half of the values has all that the answer leads to, and whether the second half has."""
        size = self.values.shape[self.dim]
        if self.distinct or size < 2:
            return [False, False]
        wanted = self.values_at(expected)
        halves = [self.values.narrow(self.dim, start, size // 2) for start in (0, size - size // 2)]
        return [bool(_equal(half, wanted).any(self.dim).all()) for half in halves]


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """NaN equals itself here."""
    return (one == other) | ((one != one) & (other != other))


FEWEST_PICKS = 20
"""The answer to fewer may lie in one half of the values by chance."""


class HalfAnswer:
    """Whether half of the values decide an output of indices, over several draws of the inputs."""

    def __init__(self) -> None:
        self._decided, self._picks = [True, True], 0

    def add(self, expectation: "Expectation") -> None:
        """Another draw's."""
        picked = expectation.picked
        if picked is None:
            self._decided = [False, False]
            return
        now = picked.decided_by(expectation.eager.view(expectation.shape))
        self._decided = [before and each for before, each in zip(self._decided, now, strict=True)]
        self._picks += expectation.total

    @property
    def is_settled(self) -> bool:
        """Whether no further draw can change that they don't."""
        return not any(self._decided)

    def why(self) -> Any:
        """That they do, in words, or `None`."""
        if self._picks < FEWEST_PICKS or not any(self._decided):
            return None
        return "so many values are equal that half of them hold the answer"


class Watch(DispatchMode):
    """Notes what is picked while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._found = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if name in ONE_OF or name in MANY_OF:
            self._note(name, args, kwargs, result)
        return result

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        place = ONE_OF[name] if name in ONE_OF else MANY_OF[name]
        results = result if isinstance(result, (tuple, list)) else (result,)
        if place >= len(results) or results[place].dtype != torch.int64:
            return
        values, position = args[0], DIM_AT.get(name, 1)
        dim = kwargs.get("dim", args[position] if len(args) > position else None)
        if isinstance(dim, bool) or dim is None:
            # Of all elements for argmax and argmin; the others have the last dimension.
            flat = name in ("argmax", "argmin")
            values, dim = (values.reshape(-1), 0) if flat else (values, -1)
        if values.dim() == 0:
            return
        self._found.append((results[place], Picked(values, dim % values.dim(), name in MANY_OF)))

    def of(self, output: torch.Tensor) -> Picked | None:
        """What an output points into, or `None`."""
        for indices, picked in self._found:
            same_place = indices.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
            if same_place and indices.numel() == output.numel() and indices.stride() == output.stride():
                return picked
        return None
