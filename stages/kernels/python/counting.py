"""How much one forward computes and moves, at least.

Matrix products, convolutions and attention count as torch's own formulas have them (2 a multiply-add); any other
operator counts one operation for each element that it writes. Views and uninitialised allocations write nothing.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

from dispatch_mode import DispatchMode

aten = torch.ops.aten
_FORMULAS = {**flop_registry, aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop}
_WRITES_NOTHING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach}


class Counter(DispatchMode):
    """Counts the operations of everything that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.flops += operations(function, args, kwargs, result)
        return result


def operations(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    formula = _FORMULAS.get(function.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if function.is_view or function.overloadpacket in _WRITES_NOTHING:
        return 0
    return sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))


def count(model: Any, forward: Callable[..., Any]) -> int:
    """The operations of one forward."""
    counter = Counter()
    # A fused recurrent layer is one operator without a formula; without the fused libraries it is made of products.
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    with unfused() if recurrent else contextlib.nullcontext(), counter:
        forward()
    return counter.flops


@contextlib.contextmanager
def unfused() -> Any:
    allow_tf32 = torch.backends.cudnn.allow_tf32
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False, allow_tf32=allow_tf32):
        yield
