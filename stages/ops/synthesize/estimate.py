"""How long a task takes in eager mode, by a roofline: each operator is bound by arithmetic or by memory.

The constants are the sustained rates of ordinary framework kernels, not peaks. The estimate only has to land within
a factor of a few: targets are taken from the middle of the allowed range on a logarithmic scale.
"""

from dataclasses import dataclass

from operator_binding import bind, cost


@dataclass(frozen=True)
class Device:
    """Sustained rates of a device, and what each operator and each sequential step costs on top."""

    gflops: float
    gbytes_per_s: float
    operator_us: float
    step_us: float


DEVICES = {
    "cpu": Device(gflops=40.0, gbytes_per_s=5.0, operator_us=10.0, step_us=40.0),
    "cuda": Device(gflops=20_000.0, gbytes_per_s=2_200.0, operator_us=6.0, step_us=25.0),
}


def device_of(params):
    """The device's rates with the parameters' own in place of those that they give."""
    base = DEVICES[params["device"]]
    return Device(
        params["gflops"] or base.gflops, params["gbytes_per_s"] or base.gbytes_per_s, base.operator_us, base.step_us
    )


def milliseconds(device, flops, moved, steps):
    seconds = max(flops / (device.gflops * 1e9), moved / (device.gbytes_per_s * 1e9))
    return seconds * 1e3 + (device.operator_us + steps * device.step_us) / 1e3


def operator_cost(bound, in_shape, out_shape, weights, batch):
    """Cost of a bound operator at another batch size."""
    shape, out = (batch, *in_shape[1:]), (batch, *out_shape[1:])
    again = bind(bound.usage, shape, lambda _options, symbol: bound.values[symbol],
                 lambda roles: roles[0])
    for operand, settled in zip(again.operands, bound.operands):
        operand.role = settled.role
    return cost(again, shape, out, weights)
