"""What a forward does, operator by operator: a digest of its graph, and whether it draws random numbers.

The graph is what reaches torch's dispatcher: operators with their constants, and which tensor goes where, with shapes
and types. Names in the code don't show, nor does the way in which it is written, so that two tasks with one digest
compute the same with the same shapes. Weights count by shape and type, in the order in which they are used.
"""

import hashlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NUMBER = "_cuda_agent_number"


class Trace(TorchDispatchMode):
    """Records one forward of a model with these inputs."""

    def __init__(self, model: Any, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.random, self.operators = set(), []
        self._hash, self._count = hashlib.sha256(), 0
        self._run = object()
        for position, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                self._name(value, f"input {position}")
        self._weights = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags and draws(function, args, kwargs):
            self.random.add(str(function.name()))
        text = f"{function.name()} {self._text(args)} {self._text(sorted(kwargs.items()))}"
        result = function(*args, **kwargs)
        if not function.is_view:
            self.operators.append(function.overloadpacket.__name__)
        self._hash.update(f"{text} -> {self._text_of_result(result)}\n".encode())
        return result

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _name(self, tensor: torch.Tensor, name: str) -> None:
        """A number that stays with the tensor as long as it lives; of this run, since a tensor may see several."""
        setattr(tensor, NUMBER, (self._run, name))

    def _fresh(self, tensor: torch.Tensor) -> str:
        self._count += 1
        self._name(tensor, f"t{self._count}")
        return f"t{self._count}{describe(tensor)}"

    def _text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            run, name = getattr(value, NUMBER, (None, None))
            if run is self._run:
                return f"{name}{describe(value)}"
            # A weight, or a constant that came into being outside.
            kind = "weight" if id(value) in self._weights else "constant"
            return f"{kind} {self._fresh(value)}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._text(item) for item in value) + "]"
        return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else str(value)

    def _text_of_result(self, value: torch.Tensor) -> str:
        if isinstance(value, torch.Tensor):
            return self._fresh(value)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._text_of_result(item) for item in value) + "]"
        return repr(value)


def describe(tensor: torch.Tensor) -> str:
    return f":{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def draws(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch tags every operator that *can* draw; one whose arguments switch that off (dropout_p=0, training=False) is
    left out, else every attention would count as random."""
    names = [argument.name for argument in function._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "dropout_p" in names:
        return bool(given.get("dropout_p", 0.0))
    for switch in ("train", "training"):
        if switch in names:
            return bool(given.get(switch, False))
    return True
