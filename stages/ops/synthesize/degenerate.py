"""Whether a finished task would let an answer pass that does not compute it, at the tolerance of verdicts.

The task runs on a small batch. An answer counts as passing where next to no element is told apart; a verdict asks for
all of them, so this is the stricter rule. On a device the whole batch counts, which has more elements to tell apart.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compose import TRIAL_BATCH, far_share, varies
from estimate import load

LEAST_CONSTANT = 0.1  # of the elements must differ from a constant answer, an input, and the output less an operator
LEAST_PART = 0.02  # … where it is one operator inside that is left out, or a weight that is replaced
LEAST_STALE = 0.5
LEAST_INPUT = 0.2
GUARD = 1e-4  # what changes the result by no more does nothing for these inputs, such as a norm's epsilon
MOST_OPERATORS, MOST_WEIGHTS = 24, 24
COPIES = ("clone", "detach", "_to_copy")


def fault(code: str, guards: bool) -> str | None:
    """What is wrong with a task, in a few words, or None. With `guards`, operators inside of the framework's own that
    do nothing for ordinary inputs are no fault: an answer without them is right."""
    namespace, module = load(code, "cpu")
    namespace["batch_size"] = TRIAL_BATCH
    with torch.no_grad():
        inputs, others = namespace["get_inputs"](), namespace["get_inputs"]()
        out = module(*inputs)
        if not torch.isfinite(out).all() or not varies(out):
            return "hardly varies"
        if not torch.equal(out, module(*inputs)):
            return "differs from run to run"
        return (
            constant_fault(out)
            or input_fault(module, inputs, others, out)
            or weight_fault(module, inputs, out)
            or operator_fault(module, inputs, out, guards)
        )


def constant_fault(out: torch.Tensor) -> str | None:
    half = out.clone(memory_format=torch.contiguous_format).flatten()
    half[half.numel() // 2 :] = 0
    answers = {
        "zeros": torch.zeros_like(out),
        "ones": torch.ones_like(out),
        "the mean": torch.full_like(out, out.mean().item()),
    }
    for name, answer in answers.items():
        if far_share(answer, out) < LEAST_CONSTANT:
            return f"{name} would pass"
    return "half of it would pass" if far_share(half.view(out.shape), out) < LEAST_CONSTANT / 2 else None


def input_fault(module: Any, inputs: list[torch.Tensor], others: list[torch.Tensor], out: torch.Tensor) -> str | None:
    if far_share(module(*others), out) < LEAST_STALE:
        return "the answer to other inputs would pass"
    for place, value in enumerate(inputs):
        mixed = [*inputs[:place], others[place], *inputs[place + 1 :]]
        if far_share(module(*mixed), out) < LEAST_INPUT:
            return f"input {place} hardly matters"
        if value.shape == out.shape and far_share(value.to(out.dtype), out) < LEAST_CONSTANT:
            return f"input {place} would pass"
    return None


def weight_fault(module: Any, inputs: list[torch.Tensor], out: torch.Tensor) -> str | None:
    """A weight that may as well be its own mean everywhere, or one more where it is the same everywhere already."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in [pair for pair in tensors if pair[1].is_floating_point()][:MOST_WEIGHTS]:
        before = tensor.detach().clone()
        mean = float(before.mean())
        same = bool((before == before.reshape(-1)[0]).all())
        tensor.data.fill_(mean + 1 if same else mean)
        share = far_share(module(*inputs), out)
        tensor.data.copy_(before)
        if share < LEAST_PART:
            return f"the weight {name} hardly matters"
    return None


def operator_fault(module: Any, inputs: list[torch.Tensor], out: torch.Tensor, guards: bool) -> str | None:
    """An operator below the modules that may as well be left out, by its name."""
    watcher = LeaveOut(None)
    with watcher:
        module(*inputs)
    for place, name in enumerate(watcher.names[:MOST_OPERATORS]):
        try:
            with LeaveOut(place):
                answer = module(*inputs)
        except (RuntimeError, TypeError, ValueError):
            continue
        hardly_matters = answer.shape == out.shape and far_share(answer, out) < LEAST_PART
        if hardly_matters and not (guards and far_share(answer, out, GUARD) == 0):
            return f"{name} may be left out"
    return None


class LeaveOut(TorchDispatchMode):
    """Lists the operators whose result looks like their first argument, and leaves out one of them."""

    def __init__(self, place: int | None) -> None:
        super().__init__()
        self.place, self.names = place, []

    def __torch_dispatch__(
        self, function: Any, types: tuple[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[torch.Tensor] | torch.Tensor | tuple[torch.Tensor, ...]:
        name = function.overloadpacket.__name__
        candidate = bool(args) and isinstance(args[0], torch.Tensor) and not function.is_view and name not in COPIES
        if candidate and name.endswith("_") and self.place == len(self.names):
            result = args[0]
        else:
            result = function(*args, **(kwargs or {}))
        alike = (
            isinstance(result, torch.Tensor)
            and candidate
            and ((result.shape, result.dtype) == (args[0].shape, args[0].dtype))
        )
        if not alike:
            return result
        self.names.append(name)
        return args[0].clone() if self.place == len(self.names) - 1 else result
