"""The device that a reference holds its tasks on. What differs between a GPU and the CPU is in cuda_device.py and in
cpu_device.py, behind what is here; nothing else asks which of the two it is.
"""

import abc
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from timing import Baseline


class Block(Protocol):
    """Memory that a runner, another process, can open: `size` bytes."""

    size: int
    memory: torch.Tensor

    def address(self) -> dict[str, str]:
        """What a runner opens it by."""
        ...

    def free(self) -> None: ...


class Clock(Protocol):
    """Times forwards."""

    def milliseconds(self, forward: Callable[[], Any], baseline: "Baseline") -> dict[str, Any]:
        """`ms`, and `hidden`: whether the work was there before the device could wait for it."""
        ...


class Device(abc.ABC):
    """A GPU, or the CPU."""

    home: torch.device
    """Where tensors lie."""
    draws_on: torch.device | None
    """Where tasks draw inputs and weights if their code bears it, and faster than on the CPU."""
    red_zone: int
    """Bytes on each side of a tensor."""
    arena_bytes: int
    """The most that an arena has unless somebody says otherwise."""
    granularity: int
    """Blocks are a multiple of so many bytes."""
    usual_threads: int
    has_tf32: bool
    """Whether it can multiply in TF32."""

    @abc.abstractmethod
    def start(self, sleeps: bool) -> None:
        """Makes it ready, before the first request comes; with `sleeps` it is waited for without taking a core."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits for its work."""

    @abc.abstractmethod
    def block(self, size: int, generation: int) -> Block:
        """Memory that a runner can open."""

    @abc.abstractmethod
    def clock(self) -> Clock:
        """What times baselines."""

    @abc.abstractmethod
    def kernel_clock(self) -> Callable[[Callable[[], Any]], Sequence[float]]:
        """What tells the microseconds of each kernel that a call launches."""

    # Memory.

    @abc.abstractmethod
    def release_stock(self) -> None:
        """Gives back what torch keeps for later: the runner, or another worker, may need it."""

    @abc.abstractmethod
    def trim_stock(self) -> None:
        """The same where it is much."""

    @abc.abstractmethod
    def limit_memory(self, wanted: int | None) -> None:
        """Torch may have so many bytes, or all."""

    @abc.abstractmethod
    def available_memory(self) -> int:
        """Bytes that tensors may still take."""

    @abc.abstractmethod
    def ahead_bytes(self) -> int:
        """Bytes for what is drawn ahead of the clock."""

    @abc.abstractmethod
    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """What a call takes at most; `None` where nobody has to know."""

    # What it is.

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """For a task's reply."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any] | None:
        """What a GPU's driver says of it."""

    @abc.abstractmethod
    def generators(self) -> list[torch.Tensor]:
        """The states of the random generators that a forward may draw from."""


def of(name: str) -> Device:
    """The device that torch calls so: CudaDevice of cuda_device.py for `cuda:0`. No other device's module is imported:
    verdicts depend on that of theirs alone."""
    named = torch.device(name)
    module = importlib.import_module(f"{named.type}_device")
    return getattr(module, f"{named.type.capitalize()}Device")(named)
