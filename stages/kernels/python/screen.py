"""What a task would let pass that does not compute it.

Each degenerate answer is compared under the task's own policy with what was expected. The names of those that pass:

| name | the answer |
|---|---|
| `zeros`, `ones`, `mean` | a constant; `mean` is the expected output's |
| `constant` | the constant that is nearest to the answers to several draws |
| `half` | the first half right, zeros after it |
| `stale` | right for other inputs |
| `copy:x` | the input x, where it has the output's shape |
| `without:x` | right, had the input x another draw's values; or the weight x its own mean everywhere (one that is the same everywhere: that plus 1) |
| `identity:mul#3` | one operator left out: here the fourth one counted, a `mul` |
| `float16`, `bfloat16` | the same forward in half precision |
| `tf32` | the same forward with TF32 products (on a GPU) |

`sensitivity` says how much `without:x` changes the outputs: the rms of the difference over the rms of the output.
"""  # noqa: E501 (a table)

import copy
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

import inputs
import judge
from dispatch_mode import DispatchMode
from refusal import first_line
from task import WEIGHTS_SECRET

if TYPE_CHECKING:
    from task import Task

MOST_OPERATORS = 64
MOST_WEIGHTS = 64


def screen(task: "Task") -> dict[str, Any] | None:
    """The whole report."""
    *_, report = parts(task)
    return report


def parts(task: "Task") -> Iterator[None]:
    """The same in steps, of which the last gives the report and the others None: between two of them others may have
    the GPU."""
    with task.running():
        screening = Screening(task)
    steps = [*screening.steps(), screening.report]
    for step in steps:
        yield None
        with task.running():
            report = step()
    yield report


class Screening:
    def __init__(self, task: "Task") -> None:
        self._task = task
        self._values, self._other = [task.draw(inputs.derive(WEIGHTS_SECRET, "screen", trial)) for trial in (0, 1)]
        self._outputs = task.forward(self._values)
        self._expectations = task.expect(self._values)
        self._passes, self._tried, self._failed, self._sensitivity = [], [], {}, {}

    def steps(self) -> list[Callable[..., Any]]:
        return [self._constants, self._copies, self._inputs, self._weights, self._operators, self._precisions]

    def report(self) -> dict[str, Any]:
        # Found out when the task was studied, over more than one draw.
        self._tried.append("constant")
        if self._task.degenerate is not None:
            self._passes.append("constant")
        return {
            "passes": self._passes,
            "tried": self._tried,
            "failed": self._failed,
            "sensitivity": self._sensitivity,
            "outputs": [
                describe(name, output) for name, output in zip(self._task.output_names, self._outputs, strict=True)
            ],
            "fixed_inputs": self._task.fixed_inputs,
        }

    def _try(self, name: str, answers: list[torch.Tensor]) -> None:
        self._tried.append(name)
        converted = [
            answer.to(output.dtype).contiguous() for answer, output in zip(answers, self._outputs, strict=True)
        ]
        if judge.would_pass(self._expectations, converted):
            self._passes.append(name)

    def _try_running(self, name: str, function: Callable[..., Any]) -> list[torch.Tensor] | None:
        """An answer that may not be computable: torch lacks some operators in half precision."""
        try:
            answers = function()
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            self._failed[name] = f"{type(error).__name__}: {first_line(error)}"
            return None
        if [answer.shape for answer in answers] != [output.shape for output in self._outputs]:
            self._failed[name] = "other shapes"
            return None
        self._try(name, answers)
        return answers

    def _constants(self) -> None:
        self._try("zeros", [torch.zeros_like(output) for output in self._outputs])
        self._try("ones", [torch.ones_like(output) for output in self._outputs])
        self._try("mean", [torch.full_like(output, mean(output)) for output in self._outputs])
        self._try("half", [half(output) for output in self._outputs])

    def _copies(self) -> None:
        self._try("stale", self._task.forward(self._other))
        for name, value in self._named_inputs():
            if all(value.shape == output.shape for output in self._outputs):
                self._try(f"copy:{name}", [value] * len(self._outputs))

    def _named_inputs(self) -> Any:
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        return zip(self._task.input_names, tensors, strict=True)

    def _inputs(self) -> None:
        positions = [place for place, value in enumerate(self._values) if isinstance(value, torch.Tensor)]
        for name, position in zip(self._task.input_names, positions, strict=True):
            if name in self._task.fixed_inputs:
                continue
            values = list(self._values)
            values[position] = self._other[position]
            self._try_without(name, lambda values=values: self._task.forward(values))

    def _weights(self) -> None:
        """Parameters, and buffers that the forward leaves alone."""
        tensors = [*self._task.model.named_parameters(), *self._task.model.named_buffers()]
        for name, tensor in tensors[:MOST_WEIGHTS]:
            if tensor.is_floating_point() and tensor.numel() > 0:
                self._try_without(name, lambda tensor=tensor: self._with_another(tensor))

    def _with_another(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        before = tensor.detach().clone()
        try:
            value = before.double().mean().item()
            # What is the same everywhere, as in a fresh norm, is its own mean: that would tell nothing.
            tensor.data.fill_(value + 1 if bool((before == before.reshape(-1)[0]).all()) else value)
            return self._task.forward(self._values)
        finally:
            tensor.data.copy_(before)

    def _try_without(self, name: str, function: Callable[..., Any]) -> None:
        answers = self._try_running(f"without:{name}", function)
        if answers is not None:
            pairs = zip(answers, self._outputs, strict=True)
            changes = [relative_change(answer, output) for answer, output in pairs]
            # One that is not finite is the largest.
            self._sensitivity[name] = (
                None if None in changes else max(change for change in changes if change is not None)
            )

    def _operators(self) -> None:
        watcher = LeaveOut(None)
        with watcher:
            self._task.forward(self._values)
        for position, name in enumerate(watcher.names[:MOST_OPERATORS]):
            self._try_running(f"identity:{name}#{position}", lambda position=position: self._leave_out(position))

    def _leave_out(self, position: int) -> list[torch.Tensor]:
        with LeaveOut(position):
            return self._task.forward(self._values)

    def _precisions(self) -> None:
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
            if any(output.dtype in (torch.float32, torch.float64) for output in self._outputs):
                self._try_running(name, lambda dtype=dtype: self._in_half(dtype))
        if self._task.device.has_tf32 and self._task.policy.name != "tf32":
            self._try_running("tf32", self._in_tf32)

    def _in_half(self, dtype: torch.dtype) -> list[torch.Tensor]:
        model = copy.deepcopy(self._task.model).to(dtype)
        values = [narrow(value, dtype) for value in self._values]
        return self._task.collect(model(*values))

    def _in_tf32(self) -> Any:
        try:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            return self._task.forward(self._values)
        finally:
            self._task.policy.apply()


MOVES = ("clone", "detach", "_to_copy", "copy_", "set_")
"""Operators that compute nothing. What a copy leaves unwritten may hold the values of the forward before."""
IN_UNIT_INTERVAL = ("binary_cross_entropy",)
"""Operators whose first argument lies between 0 and 1. On a GPU any other value ends the process's context."""


class LeaveOut(DispatchMode):
    """Counts the operators that could be left out (output and first argument alike), and leaves out one of them."""

    def __init__(self, position: int | None) -> None:
        super().__init__()
        self._position = position
        self.names = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if function.overloadpacket.__name__ in IN_UNIT_INTERVAL and not bool(((args[0] >= 0) & (args[0] <= 1)).all()):
            raise ValueError(f"{function.overloadpacket.__name__} is given values that are not between 0 and 1")
        result = function(*args, **(kwargs or {})) if not self._is_next_in_place(function, args) else args[0]
        if not (self._could_go(function, args) and alike(args[0], result)):
            return result
        self.names.append(function.overloadpacket.__name__)
        return args[0].clone() if self._position == len(self.names) - 1 else result

    def _is_next_in_place(self, function: Any, args: tuple[Any, ...]) -> bool:
        in_place = function.overloadpacket.__name__.endswith("_") and self._could_go(function, args)
        return in_place and self._position == len(self.names)

    @staticmethod
    def _could_go(function: Any, args: tuple[Any, ...]) -> bool:
        moves = function.overloadpacket.__name__ in MOVES
        return bool(args) and isinstance(args[0], torch.Tensor) and not function.is_view and not moves


def alike(one: torch.Tensor, other: torch.Tensor | tuple[torch.Tensor, ...]) -> bool:
    return isinstance(other, torch.Tensor) and one.shape == other.shape and one.dtype == other.dtype


def narrow(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_wide = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)
    return value.to(dtype) if is_wide else value


def mean(output: torch.Tensor) -> float:
    value = (output.sum(dtype=torch.float64) / output.numel()).item()
    return value if output.is_floating_point() else bool(value >= 0.5) if output.dtype == torch.bool else round(value)


def half(output: torch.Tensor) -> torch.Tensor:
    flat = output.clone(memory_format=torch.contiguous_format).reshape(-1)
    flat[flat.numel() // 2 :] = 0
    return flat.view(output.shape)


def relative_change(answer: torch.Tensor, output: torch.Tensor) -> float | None:
    # Norms are added up in float64 without copies in it: outputs can be gigabytes.
    if output.is_floating_point():
        rms, change = norm(output), norm(answer.to(output.dtype) - output)
    else:
        rms, change = norm(output.double()), norm(answer.double() - output.double())
    return judge.finite(change / rms) if rms else judge.finite(change / math.sqrt(output.numel())) or 0.0


def norm(values: torch.Tensor) -> float:
    return torch.linalg.vector_norm(values, dtype=torch.float64).item()


def describe(name: str, output: torch.Tensor) -> dict[str, Any]:
    wide = output if output.is_floating_point() else output.double()
    low, high = torch.aminmax(wide)
    return {
        "name": name,
        "min": judge.finite(low.item()),
        "max": judge.finite(high.item()),
        "mean": judge.finite(wide.sum(dtype=torch.float64).item() / wide.numel()),
        "rms": judge.finite(norm(wide) / math.sqrt(wide.numel())),
        "zeros": 1 - torch.count_nonzero(wide).item() / wide.numel(),
    }
