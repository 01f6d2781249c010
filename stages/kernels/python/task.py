"""A task as the reference holds it: the model with its weights, the inputs' drawer, and what candidates are told.

Loading a task runs its forward several times, to learn what the contract with candidates can't express, and to refuse
that by name: random numbers, shapes that depend on data, outputs that are no tensors or alias an input.
"""

import contextlib
import inspect
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import counting
import error_model
import indices
import inputs
import judge
import probe
import quick_look
import steps
from arena import check_fits
from double_precision import Twin
from element_types import NAMES, bits, is_plain, same_bits
from fixed_inputs import FixedInputs, find
from policy import Policy
from refusal import Refusal, blame, unsupported
from task_source import is_number, load
from weights import Weights

if TYPE_CHECKING:
    from arena import Arena
    from device import Device
    from task_source import TaskSource
    from variation import Level

WEIGHTS_SECRET = 0x5EED
PROTOCOLS = ("cuda-agent", "kernelbench")
FACTOR = 10.0
"""Other weights may change the size of outputs by so much; by more, and the model is too sensitive to them."""


class Task:
    """Made from the fields of a `task` request."""

    def __init__(self, fields: dict[str, Any], device: "Device", arena: "Arena") -> None:
        self.device = device
        self._arena = arena
        # Of the last whole judgement; `None` before the first, and where eager was not finite.
        self.limits = None
        self.twin = None
        self.error_kinds: list[list[error_model.Kind] | None] | None = None
        self.probe = None
        """A sparse draw, where the forward bears one."""
        self.degenerate = None
        """Why nobody can tell a right answer from one without the work, where that is so."""
        self.policy = Policy(fields["policy"])
        self._train = _is_train(fields["protocol"])
        self.source = load(fields["code"], fields["name"], fields["set"])
        with self.running():
            self.model, self.init_constants = self._build(fields["seed"])
            self.drawer = inputs.Drawer(self._get_inputs(), device)
            self._study()

    @contextlib.contextmanager
    def running(self) -> Any:
        """The state of torch that the task's code runs in; its exceptions become refusals."""
        self.policy.apply()
        torch.set_default_dtype(self.source.default_dtype)
        try:
            with torch.no_grad():
                yield
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise blame(error, self.source.filename) from error
        finally:
            torch.set_default_dtype(torch.float32)

    def _get_inputs(self) -> Callable[..., Any]:
        function = self.source.function("get_inputs")
        if function is None:
            raise Refusal("task", "the task defines no function get_inputs()")
        return function

    def _build(self, seed: int) -> tuple[Any, dict[str, int]]:
        model_class = self.source.model_class()
        arguments, named = _init_arguments(self.source)
        model = _construct(model_class, arguments, named, inputs.derive(WEIGHTS_SECRET, "weights", seed), self.device)
        model = model.to(self.device.home).train(self._train)
        _check_state_is_registered(model)
        return model, _argument_constants(model_class.__init__, arguments, named, skip=1)

    # What loading finds out.

    def _study(self) -> None:
        self._fixed = FixedInputs()
        seeds = [inputs.derive(WEIGHTS_SECRET, "study", number) for number in range(2)]
        first, second = (self.draw(seed) for seed in seeds)
        self._study_inputs(first, second)
        self._study_state()
        # Before the first forward, which may take as much again as inputs that are far too large.
        check_fits(self._arena, self.read_tensors(), [])
        outputs = self._study_forward(first)
        check_fits(self._arena, self.read_tensors(), self.written_tensors())
        self._study_randomness(first, outputs)
        if self.fixed_places:
            self._study_fixed_inputs(first, outputs)
            first, second = (
                self._fixed.vary(values, seed) for values, seed in zip((first, second), seeds, strict=True)
            )
            outputs = self.forward(first)
        others = self.forward(second)
        if [output.shape for output in others] != self._output_shapes:
            raise unsupported("the shape of an output depends on the data")
        self._study_cost(first)
        self._study_weights(first, outputs)
        if self.policy.needs_float64:
            self._study_errors(first, outputs)
        self.degenerate = self._answered_without_work(first, second)

    def _study_inputs(self, first: Sequence[Any], second: Sequence[Any]) -> None:
        names = _argument_names(self.model.forward, len(first))
        self.input_names = [name for name, value in zip(names, first, strict=True) if _is_tensor(value)]
        tensors = _tensors(first)
        for name, tensor in zip(self.input_names, tensors, strict=True):
            _check_type(name, tensor)
        self._input_shapes = _shapes(tensors)
        self._fixed_values = {position: value for position, value in enumerate(first) if not _is_tensor(value)}
        self.forward_constants = {}
        for position, value in self._fixed_values.items():
            self._study_fixed_value(names[position], value)
        self.check_draw(second)
        self._argument_names = names
        self.fixed_places = find(first, second, self._another_draw)
        self.fixed_inputs = [names[place] for place in self.fixed_places]

    def _another_draw(self, number: int) -> list[torch.Tensor]:
        values = self.draw(inputs.derive(WEIGHTS_SECRET, "study fixed inputs", number))
        self.check_draw(values)
        return values

    def _study_fixed_inputs(self, values: Sequence[Any], outputs: list[torch.Tensor]) -> None:
        """Inputs that no draw changes are varied, where the forward bears it; `fixed_inputs` are those that stay."""
        seeds = [inputs.derive(WEIGHTS_SECRET, "vary", number) for number in range(2)]
        staying = self._fixed.settle(
            values, self.fixed_places, self._argument_names, lambda others: self._bears(outputs, others), seeds
        )
        self.fixed_inputs = [self._argument_names[place] for place in staying]

    def _study_fixed_value(self, name: str, value: float | list[torch.Tensor]) -> None:
        if is_number(value):
            self.forward_constants[name] = value
        elif value is not None and not isinstance(value, (str, torch.dtype)) and not _is_numbers(value):
            raise unsupported(f"the argument {name} of forward is a {type(value).__name__}: only tensors and numbers")

    def _study_state(self) -> None:
        """Weights and copies of buffers, whose values change with the draws; a forward may change the buffers too."""
        parameters = [(name, value.detach()) for name, value in self.model.named_parameters()]
        self.parameter_names = [name for name, _ in parameters]
        self.buffer_names = [name for name, _ in self.model.named_buffers()]
        self._versions = [(name, value, value._version) for name, value in self.model.named_parameters()]
        self._buffer_homes = [_Buffer(self.model, name) for name in self.buffer_names]
        buffers = [(home.name, home.before) for home in self._buffer_homes]
        self.state = parameters + buffers
        for name, value in self.state:
            _check_type(name, value)

    def _study_forward(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """The first forward: what it changes, and what it gives."""
        self._changed_buffers, self._changes_inputs = [], False
        copies = [value.clone() if _is_tensor(value) else value for value in values]
        outputs = self.collect(self.model(*copies))
        _check_outputs(outputs, copies, self.input_names, self.model)
        self._changes_inputs = any(
            not same_bits(copy, value) for copy, value in zip(copies, values, strict=True) if _is_tensor(value)
        )
        self._changed_buffers = [home for home in self._buffer_homes if home.is_changed()]
        self.restore()
        for name, parameter, version in self._versions:
            if parameter._version != version:
                raise unsupported(f"forward changes the parameter {name}")
        self.output_names = ["out"] if len(outputs) == 1 else [f"out{position}" for position in range(len(outputs))]
        for name, output in zip(self.output_names, outputs, strict=True):
            _check_type(name, output)
        self._output_shapes = [output.shape for output in outputs]
        self._output_types = [output.dtype for output in outputs]
        return outputs

    def _study_randomness(self, values: Sequence[Any], outputs: list[torch.Tensor]) -> None:
        """Other seeds must not change the answer. Atomic additions may, a little, and leave the generators alone."""
        inputs.seed_everything(1)
        before = self.device.generators()
        again = self.forward(values)
        untouched = all(torch.equal(one, other) for one, other in zip(before, self.device.generators(), strict=True))
        for name, one, other in zip(self.output_names, outputs, again, strict=True):
            if not same_bits(one, other) and not (untouched and _nearly_equal(one, other)):
                raise unsupported(
                    f"forward draws random numbers: two runs differ in {name}",
                    "in the protocol kernelbench models train: dropout is active" if self._train else None,
                )

    def _study_weights(self, values: Sequence[Any], outputs: list[torch.Tensor]) -> None:
        """Weights change from draw to draw, as far as the model bears it."""
        buffers = [(home.tensor, home.before) for home in self._buffer_homes]
        self.weights = Weights(self.model.parameters(), buffers)
        levels = self.weights.levels
        if levels and not any(self._bears_weights(level, values, outputs) for level in levels):
            raise unsupported(
                "the forward bears no other weights or buffers than those that the task's code draws",
                "with them smaller by a fiftieth its outputs become infinite, NaN or of another size",
            )
        self.weights.become(None)

    def _bears_weights(self, level: "Level", values: Sequence[Any], outputs: list[torch.Tensor]) -> bool:
        self.weights.use(level)
        self.weights.become(inputs.derive(WEIGHTS_SECRET, "study weights", 0))
        return self._bears(outputs, values)

    def _bears(self, outputs: list[torch.Tensor], values: Sequence[Any]) -> bool:
        """Whether the forward runs with these values, and gives outputs like those."""
        try:
            return _are_alike(outputs, self.forward(values))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception:
            self.restore()
            return False

    def _study_errors(self, first: Sequence[Any], eager: list[torch.Tensor]) -> None:
        """How far honest arithmetic may be off. Without noisy twins, which not every forward bears, eager's own error
        is the only measure."""
        exact = self.exact(first, eager)
        try:
            self.error_kinds = error_model.study(self.twin, first, eager, exact, self.policy.name)
        except torch.AcceleratorError:
            raise
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, KeyError, AttributeError):
            self.error_kinds = None
        self.probe = probe.find(self, first, eager, self.error_kinds, inputs.derive(WEIGHTS_SECRET, "probe", 0))
        # Twins take several times what a forward does.
        self.device.release_stock()

    def _answered_without_work(self, *draws: list[float | torch.Tensor]) -> str | None:
        """Which output can be answered by a constant, or by half of the work, in words."""
        answers: list[Any] = []
        for values in draws:
            expectations = self.expect(values)
            answers = answers or [(judge.ConstantAnswer(each), indices.HalfAnswer()) for each in expectations]
            for tried, expectation in zip(answers, expectations, strict=True):
                for answer in tried:
                    answer.add(expectation)
            if all(answer.is_settled for tried in answers for answer in tried):
                return None
        found = [answer.why() for tried in answers for answer in tried]
        why = next((each for each in found if each is not None), None)
        return None if why is None else f"the task is degenerate under the policy {self.policy.name}: {why}"

    def _study_cost(self, values: Sequence[Any]) -> None:
        self.flops = counting.count(self.model, lambda: self.forward(values))

        self.device.synchronize()
        started = time.perf_counter()
        peak = self.device.peak_bytes(lambda: self.forward(values))
        self.device.synchronize()
        self.eager_ms = (time.perf_counter() - started) * 1e3
        # What a forward takes at most; three times as much when a float64 forward follows.
        self.forward_bytes = 0
        if peak is not None:
            self.forward_bytes = peak * (3 if self.policy.needs_float64 else 1) + (512 << 20)

    def working_bytes(self) -> int:
        """About what screening takes of a GPU's memory: two draws of the inputs, the state and a copy of its largest
        part, four times the outputs (eager's, the expected ones, an answer's, and that as it is compared), a
        forward. 0 where the device has no memory of its own."""
        if self.forward_bytes == 0:
            return 0
        count = len(self.input_names)
        sizes = [_bytes(*tensor) for tensor in self.read_tensors()]
        outputs = sum(_bytes(*tensor) for tensor in self.written_tensors())
        state = sum(sizes[count:]) + max(sizes[count:], default=0)
        return 2 * sum(sizes[:count]) + state + 4 * outputs + self.forward_bytes

    # What everything else uses.

    def draw(self, seed: int) -> list[Any]:
        return self._fixed.vary(self.drawer.draw(seed), seed)

    def draw_sparse(self, seed: int) -> list[torch.Tensor]:
        """A draw for the probe."""
        return self.probe.sparse(self.draw(seed), seed)

    def check_draw(self, values: Sequence[Any]) -> None:
        """Every draw must look like the one that the specification was made of."""
        if _shapes(_tensors(values)) != self._input_shapes:
            raise unsupported("get_inputs() gives tensors of other shapes or types from draw to draw")
        fixed = {position: value for position, value in enumerate(values) if not _is_tensor(value)}
        if fixed != self._fixed_values:
            raise unsupported("get_inputs() gives other numbers from draw to draw: a candidate has them as constants")

    def forward(self, values: Sequence[Any], model: Any = None) -> list[torch.Tensor]:
        """One forward of the model (or of a compiled one); afterwards everything is as before."""
        if self._changes_inputs:
            values = [value.clone() if _is_tensor(value) else value for value in values]
        # Not `or`: a model may have a length, and a compiled one says so without having it.
        outputs = self.collect((self.model if model is None else model)(*values))
        self.restore()
        return outputs

    def restore(self) -> None:
        for home in self._changed_buffers:
            home.restore()

    def expect(self, values: Sequence[Any], is_probe: bool = False) -> list[judge.Expectation]:
        """Expectations of all outputs for these inputs, which are those of the probe or of any other draw."""
        picked = None
        if torch.int64 in self._output_types:
            with indices.Watch() as watch:
                eager = self.forward(values)
            picked = [watch.of(output) if output.dtype == torch.int64 else None for output in eager]
        else:
            eager = self.forward(values)
        if [output.shape for output in eager] != self._output_shapes:
            raise unsupported("the shape of an output depends on the data")
        references = self.exact(values, eager)
        kinds = self.probe.kinds if is_probe else self.error_kinds
        expectations = judge.expect(self.policy, self.output_names, eager, references, kinds, picked)
        for expectation in expectations:
            expectation.check_yardstick()
        if is_probe:
            return expectations
        limits = quick_look.Limits(expectations)
        self.limits = limits if limits.is_usable else None
        return expectations

    def exact(self, values: Sequence[Any], eager: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The float64 forward's outputs; `None` for each where the policy, or an output's type, has no use for them."""
        if not self.policy.needs_float64 or not any(output.is_floating_point() for output in eager):
            return [None] * len(eager)
        try:
            if self.twin is None:
                self.twin = Twin(self.model, self.collect)
            references = self.twin.forward(values)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            refusal = blame(error, self.source.filename)
            raise refusal if refusal.kind == "memory" else _no_float64(refusal.message) from error
        for name, output, reference in zip(self.output_names, eager, references, strict=True):
            if reference.shape != output.shape or reference.is_floating_point() != output.is_floating_point():
                raise _no_float64(f"{name} has another shape or type there")
            if reference.is_floating_point() and reference.dtype != torch.float64:
                raise _no_float64(f"{name} is {NAMES.get(reference.dtype)} there")
        return [*references]

    @staticmethod
    def collect(result: Any) -> list[torch.Tensor]:
        """The outputs as a list of tensors."""
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        for position, output in enumerate(outputs):
            if not _is_tensor(output):
                which = "the output" if len(outputs) == 1 else f"output {position}"
                raise unsupported(f"{which} is no tensor but a {type(output).__name__}")
        return outputs

    def read_tensors(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        inputs = [(name, *shape) for name, shape in zip(self.input_names, self._input_shapes, strict=True)]
        return inputs + [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.state]

    def written_tensors(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        shapes = [tuple(shape) for shape in self._output_shapes]
        return list(zip(self.output_names, shapes, self._output_types, strict=True))

    def constants(self) -> dict[str, float]:
        result = dict(self.source.constants)
        for name, value in self.init_constants.items():
            taken = name in result and not _same_number(result[name], value)
            result.setdefault(f"{name}_init" if taken else name, value)
        for name, value in self.forward_constants.items():
            taken = name in result and not _same_number(result[name], value)
            result.setdefault(f"{name}_forward" if taken else name, value)
        return result

    def steps(self) -> list[str]:
        """The forward as elementary steps (steps.py); `$0`, `$1`, … are the tensors in the order of the arguments."""
        shapes = iter(self._input_shapes)
        values = [
            self._fixed_values[place] if place in self._fixed_values else _without_elements(*next(shapes))
            for place in range(len(self._argument_names))
        ]
        read = len(self.read_tensors())
        names = [f"${place}" for place in range(read + len(self.output_names))]
        called = [name for name, *_ in self.read_tensors() + self.written_tensors()]
        prefix = "step" if any(name[:1] == "t" and name[1:].isdigit() for name in called) else "t"
        if any(re.fullmatch(r"[ijk]|[sv]\d+", name) for name in called):
            # Names that steps have for something else.
            return []
        with self.running():
            return steps.steps(self.model, names[:read], values, names[read:], prefix)

    def spec(self) -> dict[str, int | list[dict[str, Any]]]:
        tensors = [_tensor_spec(*tensor) for tensor in self.read_tensors()]
        inputs_end = len(self.input_names)
        parameters_end = inputs_end + len(self.parameter_names)
        outputs = self.written_tensors()
        return {
            "inputs": tensors[:inputs_end],
            "parameters": tensors[inputs_end:parameters_end],
            "buffers": tensors[parameters_end:],
            "outputs": [_tensor_spec(*tensor) for tensor in outputs],
            "constants": [{"name": name, "value": value} for name, value in self.constants().items()],
            "flops": self.flops,
            "bytes": sum(_bytes(*tensor) for tensor in self.read_tensors() + outputs),
        }


class _Buffer:
    """Where a buffer lives in the model, and what it was."""

    def __init__(self, model: Any, name: str) -> None:
        path, _, self._key = name.rpartition(".")
        self.name = name
        self._home = model.get_submodule(path)._buffers
        self.tensor = self._home[self._key]
        self.before = self.tensor.detach().clone(memory_format=torch.contiguous_format)

    def is_changed(self) -> bool:
        now = self._home[self._key]
        return now is not self.tensor or not same_bits(now, self.before)

    def restore(self) -> None:
        self._home[self._key] = self.tensor
        self.tensor.copy_(self.before)


def _is_train(protocol: str) -> bool:
    if protocol not in PROTOCOLS:
        raise Refusal("internal", f"there is no protocol {protocol!r}: use one of {', '.join(PROTOCOLS)}")
    return protocol == "kernelbench"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if _is_tensor(value)]


def _without_elements(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _shapes(tensors: list[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _is_numbers(value: float | list[torch.Tensor]) -> bool:
    return isinstance(value, (list, tuple)) and all(is_number(element) for element in value)


def _same_number(one: float, other: int) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _tensor_spec(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": NAMES[dtype]}


def _bytes(_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _no_float64(why: str) -> Refusal:
    return unsupported(f"its forward can't run in float64: {why}", "use the policy paper")


def _init_arguments(source: "TaskSource") -> tuple[list[int], dict[str, Any]]:
    """Positional and named arguments for the model."""
    function = source.function("get_init_inputs")
    given = function() if function is not None else []
    if isinstance(given, dict):
        return [], given
    if not isinstance(given, (list, tuple)):
        raise Refusal("task", f"get_init_inputs() must return a list, not {type(given).__name__}")
    return list(given), {}


def _construct(model_class: type, arguments: list[int], named: dict[str, Any], seed: int, device: "Device") -> Any:
    """Weights are drawn on the device where the model's code bears it: for large models that saves seconds."""
    if device.draws_on is not None:
        try:
            inputs.seed_everything(seed)
            with device.draws_on:
                return model_class(*arguments, **named)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError):
            pass
    inputs.seed_everything(seed)
    return model_class(*arguments, **named)


def _argument_names(function: Callable[..., Any], count: int, skip: int = 0) -> list[str]:
    """The names of a function's positional parameters; `*args` are numbered."""
    names, rest = [], "args"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind == parameter.VAR_POSITIONAL:
            rest = parameter.name
    names = names[skip:]
    return names[:count] + [f"{rest}{position}" for position in range(count - len(names))]


def _argument_constants(
    function: Callable[..., Any], arguments: list[int], named: dict[str, Any], skip: int
) -> dict[str, int]:
    """The numbers among a call's arguments."""
    names = _argument_names(function, len(arguments), skip)
    pairs = [*zip(names, arguments, strict=True), *named.items()]
    return {name: value for name, value in pairs if is_number(value)}


def _check_type(name: str, tensor: torch.Tensor) -> None:
    if not is_plain(tensor):
        raise unsupported(f"{name} is a {type(tensor).__name__} with the layout {tensor.layout}: only dense tensors")
    if tensor.dtype not in NAMES:
        raise unsupported(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, which no candidate can be given")


def _check_state_is_registered(model: Any) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if _is_tensor(value):
                raise unsupported(
                    f"{path + '.' if path else ''}{name} is a tensor, but neither a parameter nor a buffer",
                    "a candidate could not be given it: use register_buffer",
                )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_outputs(
    outputs: list[torch.Tensor], values: list[float | torch.Tensor], names: list[str], model: Any
) -> None:
    """Outputs must have elements of their own."""
    tensors = _tensors(values)
    owners = {_storage(tensor): f"the input {name}" for name, tensor in zip(names, tensors, strict=True)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owners.setdefault(_storage(tensor), name)
    for position, output in enumerate(outputs):
        which = "the output" if len(outputs) == 1 else f"output {position}"
        if output.numel() == 0:
            raise unsupported(f"{which} has no elements")
        if is_plain(output) and _storage(output) in owners:
            raise unsupported(f"{which} is {owners[_storage(output)]}, or a view of it")
    if not outputs:
        raise unsupported("forward returns no tensor")


def _are_alike(outputs: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether the others have the same shapes, no new elements that are not finite, and a similar size."""
    if [output.shape for output in outputs] != [other.shape for other in others]:
        return False
    return all(_is_alike(output, other) for output, other in zip(outputs, others, strict=True))


def _is_alike(output: torch.Tensor, other: torch.Tensor) -> bool:
    if not output.is_floating_point():
        return True
    finite = other.isfinite()
    if bool((output.isfinite() & ~finite).any()):
        return False
    before, after = (_size(tensor) for tensor in (output, other))
    return before / FACTOR <= after <= before * FACTOR or before == 0


def _size(tensor: torch.Tensor) -> float:
    size = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()
    if not math.isfinite(size):
        size = torch.linalg.vector_norm(tensor.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64).item()
    return size / math.sqrt(tensor.numel())


def _nearly_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return False
    scale = one.double().square().mean().sqrt()
    return bool(((one.double() - other.double()).abs() <= 1e-3 * scale).all()) or torch.equal(bits(one), bits(other))
