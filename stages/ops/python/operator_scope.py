"""An operator that is settled for one shape of the stream, ready to be called: what its texts name, as values."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from operator_binding import Bound, Operand

MODULE = "operator"


def operator_scope(bound: Bound, value: Callable[[Operand], torch.Tensor], device: str = "cpu") -> dict[str, Any]:
    """The names that `bound.call_text("x", MODULE)` reads but for the stream, `x`. Parameters are the module's."""
    scope = {"torch": torch, "nn": nn, "F": F, "self": nn.Module(), **bound.values}
    with torch.device(device):
        for name in bound.attributes():
            setattr(scope["self"], name, bound.values[name])
        line = bound.construct_line(MODULE)
        if line:
            exec(line, scope)
    for operand in bound.operands:
        if operand.role == "parameter":
            setattr(scope["self"], operand.name, nn.Parameter(value(operand)))
        else:
            scope[operand.name] = value(operand)
    return scope
