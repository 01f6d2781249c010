"""The float64 twin of a model: the same forward with every floating-point number in double precision.

Converting weights and inputs is not enough, since code that says `.float()` or `dtype=torch.bfloat16` would round in
the middle. So while the twin runs, whatever asks for a smaller float type gets float64.
"""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dispatch_mode import DispatchMode

if TYPE_CHECKING:
    from error_model import Noise

SMALLER = (torch.float16, torch.bfloat16, torch.float32)


def widened(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The named arguments of an operator, with float64 for any smaller float type that they ask for."""
    return {**kwargs, "dtype": torch.float64} if kwargs.get("dtype") in SMALLER else kwargs


class _InFloat64(DispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*args, **widened(kwargs or {}))


def widen(value: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor) and value.dtype in SMALLER:
        return value.double()
    return value


class Twin:
    def __init__(self, model: Any, collect: Callable[..., Any]) -> None:
        self._original = model
        self._model = copy.deepcopy(model).double()
        # A forward may put another tensor in a buffer's place.
        self._homes = [
            (module._buffers, own._buffers, key, own._buffers[key])
            for module, own in zip(model.modules(), self._model.modules(), strict=True)
            for key, buffer in own._buffers.items()
            if buffer is not None
        ]
        self._collect = collect

    def forward(self, values: Sequence[Any], mode: "Noise | None" = None) -> list[torch.Tensor]:
        """The outputs in float64, with the original's present weights and buffers; those that are no floats as they
        are. `mode` is a dispatch mode in place of the one that keeps everything in float64."""
        for own, original in zip(self._model.parameters(), self._original.parameters(), strict=True):
            own.copy_(original)
        for theirs, ours, key, buffer in self._homes:
            ours[key] = buffer.copy_(theirs[key])
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with mode or _InFloat64():
                outputs = self._collect(self._model(*[widen(value) for value in values]))
        finally:
            torch.set_default_dtype(default)
        return outputs
