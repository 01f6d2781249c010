"""Drawing a task's inputs from a secret seed.

Every trial has a seed of its own, derived from the secret by keyed BLAKE2, so that nothing of one trial tells of the
next. Inputs come from the task's own `get_inputs()`: on a GPU it runs with the GPU as default device, which draws the
largest tasks in milliseconds instead of seconds; a task that pins devices draws on the CPU and is copied.
"""

import contextlib
import hashlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.random
import torch

from refusal import Refusal, unsupported

if TYPE_CHECKING:
    from device import Device

MASK = (1 << 63) - 1


def derive(secret: int, purpose: str, index: int) -> int:
    """A seed from a secret, what it is for, and a number."""
    message = f"{purpose}:{index}".encode()
    digest = hashlib.blake2b(message, key=secret.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MASK


def seed_everything(seed: int) -> None:
    # Not torch.manual_seed: for devices that are not in use it keeps a growing list of calls, each with a formatted
    # stack.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def seeds_fixed_by_us() -> Any:
    """Some tasks call torch.manual_seed in get_inputs, which would give every trial the same inputs."""
    owners = [(torch, "manual_seed"), (torch.random, "manual_seed"), (torch.cuda, "manual_seed")]
    owners += [(torch.cuda, "manual_seed_all"), (random, "seed"), (numpy.random, "seed")]
    before = [getattr(owner, name) for owner, name in owners]
    try:
        for owner, name in owners:
            setattr(owner, name, lambda *_, **__: torch.default_generator)
        yield
    finally:
        for (owner, name), function in zip(owners, before, strict=True):
            setattr(owner, name, function)


def call_get_inputs(function: Callable[..., Any], seed: int, device: torch.device) -> list[Any]:
    """The task's values for `forward`, as it gives them; `device` is where tensors are made by default."""
    seed_everything(seed)
    with seeds_fixed_by_us(), torch.device(device):
        values = function()
    if not isinstance(values, (list, tuple)):
        raise Refusal("task", f"get_inputs() must return a list, not {type(values).__name__}")
    return list(values)


def place(
    value: float | list[torch.Tensor] | torch.Tensor, device: torch.device
) -> float | list[torch.Tensor] | torch.Tensor:
    """A tensor as a candidate gets it: on the device, contiguous, without history. Other values stay."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided:
        raise unsupported(f"an input has the layout {value.layout}: only dense tensors can be passed on")
    return value.detach().to(device, non_blocking=True).contiguous()


class Drawer:
    """Draws a task's inputs again and again."""

    def __init__(self, function: Callable[..., Any], device: "Device") -> None:
        self.function = function
        self.device = device
        self.draws_on = device.draws_on

    def draw(self, seed: int) -> list[Any]:
        if self.draws_on is not None:
            try:
                return self._draw_on(self.draws_on, seed)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError):
                # It mixes devices or hands a GPU tensor to numpy; it will do so the next time too.
                self.draws_on = None
        return self._draw_on(torch.device("cpu"), seed)

    def _draw_on(self, device: torch.device, seed: int) -> list[Any]:
        return [place(value, self.device.home) for value in call_get_inputs(self.function, seed, device)]
