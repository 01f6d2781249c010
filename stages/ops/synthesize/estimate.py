"""How long a task takes in eager mode, by a roofline: each operator is bound by arithmetic or by memory.

The constants are the sustained rates of ordinary framework kernels, not peaks. The estimate only has to land within
a factor of a few: targets are taken from the middle of the allowed range on a logarithmic scale.
"""

from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from operator_binding import bind, cost


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

    def seconds_to_move(self, moved):
        """Slides from one rate to the other while the traffic goes from one to two times the cache."""
        full = moved / (self.gbytes_per_s * 1e9)
        outside = min(1.0, max(0.0, moved / self.cache_bytes - 1.0))
        return full * (outside + (1.0 - outside) / self.cache_gain)


DEVICES = {
    "cpu": Device(80.0, 7.0, operator_us=10.0, step_us=15.0, cache_bytes=32e6, cache_gain=6.0),
    "cuda": Device(20_000.0, 2_200.0, operator_us=6.0, step_us=25.0, cache_bytes=40e6, cache_gain=2.0),
}


def device_of(params):
    """The device's rates with the parameters' own in place of those that they give."""
    base = DEVICES[params["device"]]
    given = {name: float(params[name]) for name in ("gflops", "gbytes_per_s") if params[name]}
    return replace(base, **given)


def milliseconds(device, flops, moved, steps):
    seconds = max(flops / (device.gflops * 1e9), device.seconds_to_move(moved))
    return seconds * 1e3 + (device.operator_us + steps * device.step_us) / 1e3


def operator_cost(bound, in_shape, out_shape, weights, batch):
    """Cost of a bound operator at another batch size."""
    shape, out = (batch, *in_shape[1:]), (batch, *out_shape[1:])
    again = bind(bound.usage, shape, lambda _options, symbol: bound.values[symbol],
                 lambda roles: roles[0])
    for operand, settled in zip(again.operands, bound.operands):
        operand.role = settled.role
    return cost(again, shape, out, weights)


class TrafficCounter(TorchDispatchMode):
    """Adds up the bytes that each operator reads and writes, and how many operators there are; views are free."""

    def __init__(self):
        super().__init__()
        self.bytes, self.operators = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not any(result.alias_info for result in func._schema.returns):
            self.operators += 1
            self.bytes += sum(tensor.nbytes for tensor in tensors([*args, out]))
        return out


def tensors(values):
    """The tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def counted(module, inputs):
    """`(flops, bytes, operators)` of one call, counted without computing: everything is on the meta device."""
    traffic, flops = TrafficCounter(), FlopCounterMode(display=False)
    with torch.no_grad(), flops, traffic:
        module(*inputs)
    return flops.get_total_flops(), traffic.bytes, traffic.operators
