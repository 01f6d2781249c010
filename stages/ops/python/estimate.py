"""How long a task takes in eager mode, by a roofline: each operator is bound by arithmetic or by memory.

There are two sources of rates. The built-in ones are the sustained rates of ordinary framework kernels on a device of a
kind, not peaks; an estimate from them lands within a factor of a few. `ops/rates` measures a device: its plain rates,
and for each usage of an operator the factor by which it is slower (or faster) than a roofline of these says.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from operator_binding import bind, cost

if TYPE_CHECKING:
    from compose import Extent
    from operator_binding import Bound


TRANSFORMERS_USAGE = 0


@dataclass(frozen=True)
class Device:
    """Sustained rates of a device, and what each operator and each sequential step costs on top.

    What fits `cache_bytes` moves `cache_gain` times as fast. On a CPU that is more than the cache's doing: beyond some
    32 MiB the allocator returns memory after each operator, and every page is faulted in again.
    """

    gflops: float
    gbytes_per_s: float
    operator_us: float
    step_us: float
    cache_bytes: float
    cache_gain: float
    task_bytes: float  # what the tensors of one task may take together, unless a parameter says

    def seconds_to_move(self, moved: float) -> float:
        """Slides from one rate to the other while the traffic goes from one to two times the cache."""
        full = moved / (self.gbytes_per_s * 1e9)
        outside = min(1.0, max(0.0, moved / self.cache_bytes - 1.0))
        return full * (outside + (1.0 - outside) / self.cache_gain)


DEVICES = {
    "cpu": Device(80.0, 7.0, operator_us=10.0, step_us=15.0, cache_bytes=32e6, cache_gain=6.0, task_bytes=2.0**30),
    "cuda": Device(20_000.0, 2_200.0, operator_us=6.0, step_us=25.0, cache_bytes=40e6, cache_gain=2.0, task_bytes=6e9),
}
# The share of a device's memory that one task takes: its outputs exist several times over while it is verified.
TASK_SHARE = 1 / 24
MOST_TASK_BYTES = {"cpu": 2.0**30, "cuda": 16e9}


@dataclass(frozen=True)
class Rates:
    """What estimates are made from: the built-in device of a kind, or one that `ops/rates` measured."""

    builtin: Device
    device: Device
    factors: dict = field(default_factory=dict)  # (operator, usage) -> {rank: factor}

    def milliseconds(self, operator: str, usage: int, rank: int, flops: float, moved: float, steps: float) -> float:
        """The time of one operator; the built-in estimate where its factor is not known."""
        factor = self.factor(operator, usage, rank)
        if factor is None:
            return milliseconds(self.builtin, flops, moved, steps)
        return factor * milliseconds(self.device, flops, moved, steps)

    def factor(self, operator: str, usage: int, rank: int) -> Any:
        """The factor that was measured at the nearest rank, or None."""
        by_rank = self.factors.get((operator, usage))
        if not by_rank:
            return None
        return by_rank[min(by_rank, key=lambda known: (abs(known - rank), known))]

    def whole_module(self, operator: str, operators: int, flops: float, moved: float) -> float:
        """The time of a module of several operators: whether a value stays in the cache depends on one operator's
        traffic, not on the sum."""
        factor = self.factor(operator, TRANSFORMERS_USAGE, 0)
        device = self.builtin if factor is None else self.device
        plain = operators * milliseconds(device, flops / operators, moved / operators, 0)
        return plain if factor is None else factor * plain


def rates_of(params: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> Rates:
    """The rates for a stage's parameters: built-in ones, or from the rows of a table of `ops/rates`. A rate that a
    parameter gives takes the place of either."""
    kind = params["device"]
    device = builtin = DEVICES[kind]
    factors = {}
    if rows:
        figures = {row["name"]: row["value"] for row in rows if row["kind"] == "device"}
        device = measured_device(kind, figures)
        for row in rows:
            if row["kind"] == "operator" and row["value"] is not None:
                factors.setdefault((row["name"], row["usage"]), {})[row["rank"]] = row["value"]
    given = {name: float(params[name]) for name in ("gflops", "gbytes_per_s") if params[name]}
    return Rates(replace(builtin, **given), replace(device, **given), factors)


def measured_device(kind: str, figures: dict[str, float]) -> Device:
    """A device from the figures that `ops/rates` writes."""
    return replace(
        DEVICES[kind],
        gflops=figures["gflops"],
        gbytes_per_s=figures["gbytes_per_s"],
        operator_us=figures["operator_us"],
        task_bytes=min(figures["memory_bytes"] * TASK_SHARE, MOST_TASK_BYTES[kind]),
    )


def milliseconds(device: Device, flops: float, moved: float, steps: float) -> float:
    seconds = max(flops / (device.gflops * 1e9), device.seconds_to_move(moved))
    return seconds * 1e3 + (device.operator_us + steps * device.step_us) / 1e3


def operator_cost(
    bound: "Bound", in_shape: "tuple[Extent | int, ...]", out_shape: tuple[int, ...], weights: int, batch: int
) -> tuple[float, ...]:
    """Cost of a bound operator at another batch size."""
    shape, out = (batch, *in_shape[1:]), (batch, *out_shape[1:])
    return cost(rebound(bound, shape), shape, out, weights)


def rebound(bound: "Bound", shape: "tuple[Extent | int, ...]") -> "Bound":
    """The same operator for another shape of the stream, with every choice as it was."""
    again = bind(bound.usage, shape, lambda _options, symbol: bound.values[symbol], lambda roles: roles[0])
    for operand, settled in zip(again.operands, bound.operands, strict=True):
        operand.role = settled.role
    return again


class TrafficCounter(TorchDispatchMode):
    """Adds up the bytes that each operator reads and writes, how many operators there are, and the most bytes that
    results take at one time; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.operators, self.alive, self.peak = 0, 0, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[torch.Tensor, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        out = func(*args, **(kwargs or {}))
        if not any(result.alias_info for result in func._schema.returns):
            self.operators += 1
            self.bytes += sum(tensor.nbytes for tensor in tensors([*args, out]))
            for tensor in tensors([out]):
                self.alive += tensor.nbytes
                weakref.finalize(tensor.untyped_storage(), self._released, tensor.nbytes)
            self.peak = max(self.peak, self.alive)
        return out

    def _released(self, size: int) -> None:
        self.alive -= size


def tensors(values: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


@dataclass(frozen=True)
class Count:
    """What one call of a module does, and the most bytes of inputs, results and weights at one time."""

    flops: float
    moved: float
    operators: int
    alive: float


def counted(module: Any, inputs: list[torch.Tensor]) -> Count:
    """A call's `Count`, without computing: everything is on the meta device."""
    traffic, flops = TrafficCounter(), FlopCounterMode(display=False)
    with torch.no_grad(), flops, traffic:
        out = module(*inputs)
    held = sum(tensor.nbytes for tensor in [*tensors(inputs), *module.parameters(), *module.buffers()])
    del out
    return Count(flops.get_total_flops(), traffic.bytes, traffic.operators, held + traffic.peak)


def load(code: str, device: str, seed: int = 3) -> tuple[dict[str, Any], Any]:
    """A task's namespace and its module, on a device."""
    namespace: dict[str, Any] = {"__name__": "task"}
    with torch.device(device):
        exec(compile(code, "task.py", "exec"), namespace)
        torch.manual_seed(seed)
        module = namespace["Model"](*namespace["get_init_inputs"]())
    return namespace, module


def counted_by_batch(code: str) -> Callable[..., Any]:
    """A function of the batch size that gives a task's `Count`, a line through what two batch sizes do."""
    namespace, module = load(code, "meta")
    counts = []
    for batch in (2, 4):
        namespace["batch_size"] = batch
        with torch.device("meta"):
            counts.append(counted(module, namespace["get_inputs"]()))
    low, high = counts

    def at(batch: int):
        share = (batch - 2) / 2
        values = (
            getattr(low, name) + share * (getattr(high, name) - getattr(low, name))
            for name in ("flops", "moved", "alive")
        )
        flops, moved, alive = values
        return Count(flops, moved, low.operators, alive)

    return at
