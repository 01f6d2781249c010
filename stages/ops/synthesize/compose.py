"""Composes one torch task: operators in sequence, each tried on a small batch before the next is chosen.

The extents of a task's tensors are as in the finished task except for the batch, which is small while composing, so
what is seen here (spread, sensitivity, conditioning) holds for the task. An operator is taken back where its output is
not finite, hardly varies, hardly depends on one of the inputs, equals an earlier value, or is ill-conditioned.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from operator_binding import NotApplicable, bind, cost

if TYPE_CHECKING:
    from operator_binding import Bound, Operand

TRIAL_BATCH = 3
ABSOLUTE = RELATIVE = 1e-2  # the tolerance of verdicts: what agrees to it counts as equal
MOST_PER_SAMPLE = 300_000
MOST_TRIAL_FLOPS = 4e9
# Operators that take time by the square of their features, which their cost does not say.
QUADRATIC = re.compile(r"multi_?label_?margin", re.IGNORECASE)
MOST_SQUARED = 1024
MOST_WEIGHTS = 3_000_000
STEP_ATTEMPTS = 6

ATTRIBUTES = {
    "convolution": "conv",
    "linear": "linear",
    "normalization": "norm",
    "activation": "activation",
    "pooling": "pool",
    "recurrent": "rnn",
    "attention": "attention",
    "embedding": "embedding",
    "loss": "loss",
    "padding": "pad",
    "softmax": "softmax",
    "resampling": "resample",
    "similarity": "similarity",
    "arrangement": "shuffle",
}
# Where these turn a stream of rank 3, the channels change places with the positions.
AXIS_SWAPS = {"torch.rot90"}
DIMENSIONS = {
    2: ("features",),
    3: ("channels", "length"),
    4: ("channels", "height", "width"),
    5: ("channels", "depth", "height", "width"),
}
# Extents of a stream by the kind of device. A GPU's are larger; what bounds them is that a small batch of them is run
# on the CPU many times here.
SIZES = {
    "cpu": {
        2: ([256, 384, 512, 768, 1024, 2048, 4096],),
        3: ([16, 24, 32, 48, 64, 96, 128], [32, 48, 64, 96, 128, 192, 256, 384]),
        4: ([8, 16, 24, 32, 48, 64], [12, 14, 16, 20, 24, 28, 32, 40], None),
        5: ([4, 8, 12, 16], [6, 8, 10, 12], [8, 10, 12, 16], None),
    },
    "cuda": {
        2: ([384, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 5120, 8192],),
        3: ([16, 24, 32, 48, 64, 96, 128, 192, 256], [48, 64, 96, 128, 160, 192, 256, 320, 384, 512]),
        4: ([8, 12, 16, 24, 32, 40, 48, 64, 96], [14, 16, 20, 24, 28, 32, 40, 48, 56], None),
        5: ([4, 8, 12, 16, 24], [6, 8, 10, 12, 16], [8, 10, 12, 14, 16, 20], None),
    },
}
MOST_IN_SAMPLE = 50_000  # elements of a sample of the stream as it begins
INDEX_LENGTHS = [16, 24, 32, 48, 64]
RANK_WEIGHTS = {2: 3, 3: 4, 4: 5, 5: 1}
SOURCES = {
    "randn": "torch.randn({})",
    "rand": "torch.rand({})",
    "positive": "torch.rand({}) + 0.5",
    "unit": "torch.rand({}) * 1.8 - 0.9",
    "above_one": "torch.rand({}) + 1.1",
    "sign": "torch.randint(0, 2, ({})) * 2.0 - 1.0",
}


# What an operand is called as a parameter, where its usual name is that of a further input.
PARAMETERS = {"other": "other_weight"}


class Extent(int):
    """A size that remembers the name of the constant that holds it."""

    text: str

    def __new__(cls, value: int, text: str) -> "Extent":
        extent = super().__new__(cls, value)
        extent.text = text
        return extent


class Factor(float):
    """A number that remembers the name of the constant that holds it."""

    text: str

    def __new__(cls, value: float, text: str) -> "Factor":
        factor = super().__new__(cls, value)
        factor.text = text
        return factor


class Sizes(tuple):
    """Several sizes under one name."""

    text: str

    def __new__(cls, value: tuple[int, int], text: str) -> "Sizes":
        sizes = super().__new__(cls, value)
        sizes.text = text
        return sizes


def named(value: int | tuple[int, int], text: str) -> Extent | Sizes:
    return {int: Extent, float: Factor, tuple: Sizes, list: Sizes}[type(value)](value, text)


def text_of(value: Extent | int) -> str:
    return getattr(value, "text", None) or repr(value)


class Unsuitable(Exception):
    """This operator does not go here."""


class Misfit(Exception):
    """The operator at a position did not fit, whatever its sizes and options."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position, self.reason = position, reason


@dataclass
class Step:
    """One operator of the chain, settled."""

    operator: str
    family: str
    usage: int
    bound: object
    in_shape: tuple
    out_shape: tuple
    weights: int
    init: list
    call: str


@dataclass
class Chain:
    """A task in the making."""

    shape: tuple
    constants: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    inputs: list = field(default_factory=list)  # (name, text of the tensor's making)
    streams: list = field(default_factory=list)  # per step: values for inputs A, for inputs B, for A slightly moved
    attributes: set = field(default_factory=set)
    known_low: float | None = None
    module: nn.Module = field(default_factory=nn.Module)


def compose(rng: random.Random, rows: list[dict[str, Any]], ranks: list[int], device: str) -> Chain:
    """A chain of the operators in order, or Misfit with the position at which none of the attempts fitted."""
    chain: Any = None
    reason = ""
    for position, row in enumerate(rows):
        for _ in range(STEP_ATTEMPTS):
            try:
                number, usage = draw(rng, row, chain, position)
                if position == 0:
                    chain = begin(rng, usage, ranks, device)
                extend(rng, chain, row, (number, usage), position == len(rows) - 1)
                break
            except (Unsuitable, NotApplicable) as refusal:
                reason = str(refusal)
        else:
            raise Misfit(position, reason)
    return chain


def draw(rng: random.Random, row: dict[str, Any], chain: Any, position: int) -> tuple[int, dict[str, Any]]:
    """One of an operator's usages, with its number, where it fits the stream."""
    numbers = list(range(len(row["usages"])))
    if position:
        if row["family"] == "convolution" and any(step.operator in AXIS_SWAPS for step in chain.steps):
            raise Unsuitable("its channels would be positions")
        numbers = [n for n in numbers if fits(row["usages"][n], chain)]
        if not numbers:
            raise Unsuitable("rank or domain")
    number = rng.choice(numbers)
    return number, row["usages"][number] | {"family": row["family"]}


def fits(usage: dict[str, Any], chain: Chain) -> bool:
    """Whether a usage can follow: it takes such a stream, and no rounding error becomes a wrong element in it."""
    if usage["input"] == "index" or not usage["smooth"] or len(chain.shape) not in usage["ranks"]:
        return False
    least = {"above_one": 1.0}.get(usage["domain"], 0.01)
    return usage["domain"] == "any" or (chain.known_low or 0) > least


def begin(rng: random.Random, usage: dict[str, Any], ranks: list[int], device: str) -> Chain:
    """A stream of a shape that suits the first operator, of one of the ranks where it takes them."""
    possible = [rank for rank in usage["ranks"] if rank in ranks] or usage["ranks"]
    rank = rng.choices(possible, [RANK_WEIGHTS[rank] for rank in possible])[0]
    chain = Chain(())
    if usage["input"] == "index":
        names, sizes = ("length",), [rng.choice(INDEX_LENGTHS)]
    else:
        names, sizes = DIMENSIONS[rank], draw_sizes(rng, SIZES[device][rank])
    chain.constants["batch_size"] = TRIAL_BATCH
    for name, size in zip(names, sizes, strict=True):
        chain.constants[name] = size
    chain.shape = (Extent(TRIAL_BATCH, "batch_size"), *(Extent(s, n) for n, s in zip(names, sizes, strict=True)))
    return chain


def draw_sizes(rng: random.Random, options_by_axis: tuple[list[int] | None, ...]) -> list[int]:
    """Extents whose product is not too large to be tried; None stands for the extent before."""
    while True:
        sizes = []
        for options in options_by_axis:
            sizes.append(rng.choice(options) if options else sizes[-1])
        if math.prod(sizes) <= MOST_IN_SAMPLE:
            return sizes


# ---- one step


def extend(
    rng: random.Random, chain: Chain, row: dict[str, Any], numbered_usage: tuple[int, dict[str, Any]], last: bool
) -> None:
    """Append an operator to the chain after trying it; leaves the chain as it was where it does not fit."""
    number, usage = numbered_usage
    constants = dict(chain.constants)
    # No name stands for two things, not even as an attribute and as an argument.
    taken = chain.attributes | {name for name, _ in chain.inputs}
    bound = bind(usage, chain.shape, chooser(rng, usage, constants, taken), rng.choice)
    bound.names |= {symbol: value.text for symbol, value in bound.values.items() if hasattr(value, "text")}
    inputs = list(chain.inputs)
    if not chain.steps:
        inputs.append(("x", stream_text(rng, usage, bound, chain.shape)))
    name_extents(bound, chain, constants)
    fresh_inputs = name_operands(bound, inputs, chain, chain.attributes | set(constants))
    attribute = None
    attributes = set(chain.attributes)
    init = [f"self.{name} = {name}" for name in kept_arguments(bound, attributes)]
    # What an earlier operator keeps too is there in the task, but not in the trial of this one alone.
    shared = [f"self.{name} = {name}" for name in arguments_read(bound) if name in chain.attributes]
    if usage["construct"]:
        attribute = unique(ATTRIBUTES.get(usage["family"], "layer"), attributes)
        attributes.add(attribute)
        line = bound.construct_line(attribute)
        assert line is not None, "it has a construct"
        init.append(line)
    for operand in bound.operands:
        if operand.role == "parameter":
            parameter = bound.names[operand.name] = unique(
                PARAMETERS.get(operand.name, operand.name), attributes | set(constants) | {name for name, _ in inputs}
            )
            attributes.add(parameter)
            init.append(f"self.{parameter} = nn.Parameter({tensor_text(operand, chain)})")
    call = bound.call_text("x", attribute)
    trial = Trial(chain, constants, [*shared, *init], call, inputs, fresh_inputs, bound)
    out = trial.run(usage, last)
    chain.constants, chain.inputs, chain.attributes = constants, inputs, attributes
    step = Step(row["operator"], row["family"], number, bound, chain.shape, tuple(out.shape), trial.weights, init, call)
    chain.steps.append(step)
    chain.streams.append(trial.outputs)
    chain.known_low = usage["bounds"][0]
    chain.shape = named_shape(out.shape, chain.shape, bound)


def chooser(
    rng: random.Random, usage: dict[str, Any], constants: dict[str, int | tuple[int, int]], attributes: set[str]
) -> Callable[..., Any]:
    """Chooses values of free symbols; those that are no literals become module constants."""

    def choose(options: list[Any], symbol: str):
        value = rng.choice(options)
        if usage["symbols"][symbol].get("literal") or hasattr(value, "text"):
            return value
        name = unique(symbol, attributes | set(constants))
        constants[name] = value
        return named(value, name)

    return choose


def arguments_read(bound: "Bound") -> list[str]:
    """Init arguments that the call reads as attributes."""
    return [bound.names[symbol] for symbol in bound.attributes()]


def kept_arguments(bound: "Bound", attributes: set[str]) -> list[str]:
    """Init arguments that the call reads, which become attributes of the same name."""
    names = [name for name in arguments_read(bound) if name not in attributes]
    attributes.update(names)
    return names


def unique(name: Any, taken: set[str]) -> str:
    number = 2
    chosen = name
    while chosen in taken:
        chosen, number = f"{name}_{number}", number + 1
    return chosen


def stream_text(rng: random.Random, usage: dict[str, Any], bound: "Bound", shape: tuple[Extent, ...]) -> str:
    extents = ", ".join(text_of(extent) for extent in shape)
    if usage["input"] == "index":
        return f"torch.randint(0, {bound.names['num_embeddings']}, ({extents}))"
    source = usage["domain"]
    if source == "any":
        source = "randn" if rng.random() < 0.75 else "rand"
    return SOURCES[source].format(extents)


def name_extents(bound: "Bound", chain: Chain, constants: dict[str, int | tuple[int, int]]) -> None:
    """Name what an operand takes over from the stream, where an operator before has made an extent of its own."""
    named_here = {}
    for operand in bound.operands:
        extents = []
        for extent in operand.shape:
            fresh = not hasattr(extent, "text") and extent > 1 and extent in chain.shape[1:]
            if fresh and extent not in named_here:
                axis = chain.shape.index(extent, 1) - 1
                words = DIMENSIONS.get(len(chain.shape), ())
                name = unique(
                    f"inner_{words[axis] if axis < len(words) else 'size'}", chain.attributes | set(constants)
                )
                constants[name] = int(extent)
                named_here[extent] = Extent(extent, name)
            extents.append(named_here[extent] if fresh else extent)
        operand.shape = tuple(extents)


def name_operands(bound: "Bound", inputs: list[tuple[str, str]], chain: Chain, others: set[str]) -> list[str]:
    """Forward arguments for operands that are inputs; returns the new ones' names."""
    fresh = []
    taken = {name for name, _ in inputs} | {"x"} | others
    for operand in bound.operands:
        if operand.role == "input":
            name = bound.names[operand.name] = unique(operand.name, taken)
            taken.add(name)
            fresh.append(name)
            inputs.append((name, tensor_text(operand, chain)))
    return fresh


def tensor_text(operand: "Operand", chain: Chain) -> str:
    extents = ", ".join(text_of(extent) for extent in operand.shape)
    if operand.fill.startswith("index"):
        classes = text_of(chain.shape[1])
        return f"torch.randint(0, {classes}, ({extents}{',' if len(operand.shape) == 1 else ''}))"
    if operand.fill == "sign" and len(operand.shape) == 1:
        extents += ","
    text = SOURCES[operand.fill].format(extents)
    return text if operand.scale == 1.0 else f"{text} * {operand.scale:.4g}"


def named_shape(out: torch.Size, before: tuple[Extent | int, ...], bound: "Bound") -> tuple[Extent | int, ...]:
    """Names for the extents of an output: kept where nothing changed, or the symbol that set them."""
    widths = {
        int(value): bound.names[symbol]
        for symbol, value in bound.values.items()
        if symbol in ("out_channels", "out_features", "hidden_size", "embedding_dim", "points")
    }
    kept = kept_axes(out, before, bound)
    shape = [before[0]]
    for index, extent in enumerate(out[1:], start=1):
        if index in kept:
            shape.append(before[kept[index]])
        elif extent in widths:
            shape.append(Extent(extent, widths[extent]))
        else:
            shape.append(extent)
    return tuple(shape)


def kept_axes(out: torch.Size, before: tuple[Extent | int, ...], bound: "Bound") -> dict[int, int]:
    """Axis of an output to the axis of the stream that it is: the same one, but for axes that came, went or turned."""
    axes = list(range(len(before)))
    dims = bound.values.get("dims")
    if isinstance(dims, (list, tuple)) and len(dims) == 2 and len(out) == len(before):
        axes[dims[0]], axes[dims[1]] = dims[1], dims[0]
    elif len(out) == len(before) - 1:
        dim = bound.values.get("dim")
        gone = [dim % len(before)] if isinstance(dim, int) else range(1, len(before))
        axes = next(([*axes[:d], *axes[d + 1 :]] for d in gone if (*before[:d], *before[d + 1 :]) == tuple(out)), [])
    elif len(out) == len(before) + 1:
        added = (d for d in range(1, len(out)) if (*out[:d], *out[d + 1 :]) == tuple(before))
        axes = next(([*axes[:d], None, *axes[d:]] for d in added), [])
    elif len(out) != len(before):
        axes = []
    return {index: axis for index, axis in enumerate(axes) if axis is not None and out[index] == before[axis]}


# ---- trying a step


class Trial:
    """Runs one more operator on the chain's small batch."""

    def __init__(
        self,
        chain: Chain,
        constants: dict[str, int | tuple[int, int]],
        init: list[str],
        call: str,
        inputs: list[tuple[str, str]],
        fresh: list[str],
        bound: "Bound",
    ) -> None:
        self.chain, self.call, self.fresh, self.inputs, self.bound = chain, call, fresh, dict(inputs), bound
        self.names = {"torch": torch, "nn": nn, "F": F, **constants, "self": nn.Module()}
        self.init, self.outputs, self.weights = init, (), 0

    def run(self, usage: dict[str, Any], last: bool) -> torch.Tensor:
        try:
            self.weights = self._build("meta")
            # Before real weights are drawn: a Transformer as wide as a flattened image has 400 million.
            self._refuse_slow()
            torch.manual_seed(17)
            self._build("cpu")
            streams = self._streams()
            operands = [{name: eval(self.inputs[name], self.names) for name in self.fresh} for _ in range(2)]
            with torch.no_grad():
                first, other, moved = (self._call(x, operands[0]) for x in streams)
                changed = [self._call(streams[0], {**operands[0], name: operands[1][name]}) for name in self.fresh]
        except (RuntimeError, ValueError, LookupError, TypeError, AssertionError) as error:
            raise Unsuitable(str(error)) from error
        self._judge(first, other, moved, changed, streams, last)
        self.outputs = (first, other, moved)
        return first

    def _build(self, device: str) -> int:
        """Makes what the operator keeps; returns the number of its weights."""
        self.names["self"] = nn.Module()
        with torch.device(device):
            for line in self.init:
                exec(line, self.names)
        return sum(parameter.numel() for parameter in self.names["self"].parameters())

    def _refuse_slow(self) -> None:
        """What takes long on the CPU is not tried; for this much the output may be taken to be like the stream."""
        shape = self.chain.shape
        if self.weights > MOST_WEIGHTS or (QUADRATIC.search(self.call) and shape[-1] > MOST_SQUARED):
            raise Unsuitable("too large to be tried")
        if cost(self.bound, shape, shape, self.weights)[0] > MOST_TRIAL_FLOPS:
            raise Unsuitable("too slow to be tried")

    def _streams(self) -> tuple[torch.Tensor, ...]:
        """Values for two different inputs, and for the first moved by about a rounding error."""
        if self.chain.streams:
            return self.chain.streams[-1]
        first, other = eval(self.inputs["x"], self.names), eval(self.inputs["x"], self.names)
        if not first.is_floating_point():
            return first, other, first
        return first, other, first + 1e-6 * torch.randn_like(first)

    def _call(self, x: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
        return eval(self.call, {**self.names, "x": x, **operands})

    def _judge(
        self,
        out: torch.Tensor,
        other: torch.Tensor,
        moved: torch.Tensor,
        changed: list[torch.Tensor],
        streams: tuple[torch.Tensor, ...],
        last: bool,
    ) -> None:
        if not isinstance(out, torch.Tensor) or out.dtype != torch.float32 or out.shape[0] != TRIAL_BATCH:
            raise Unsuitable("shape")
        if out.numel() // TRIAL_BATCH > MOST_PER_SAMPLE or (out.dim() < 2 and not last):
            raise Unsuitable("size")
        if not out.numel():
            raise Unsuitable("empty")
        if not torch.isfinite(out).all() or not torch.isfinite(other).all() or float(out.abs().max()) > 1e3:
            raise Unsuitable("magnitude")
        if not varies(out) or not varies(other):
            raise Unsuitable("hardly varies")
        if far_share(out, other) < 0.3:
            raise Unsuitable("hardly depends on the input")
        if any(far_share(out, replaced) < 0.3 for replaced in changed):
            raise Unsuitable("hardly depends on an operand")
        if far_share(out, moved, 1e-3) > 0.001:
            raise Unsuitable("ill-conditioned")
        earlier = [streams[0], *(values[0] for values in self.chain.streams)]
        if any(past.shape == out.shape and far_share(out, past) < 0.05 for past in earlier):
            raise Unsuitable("equals an earlier value")


def far_share(first: torch.Tensor, second: torch.Tensor, tolerance: float = ABSOLUTE) -> float:
    """The share of elements that a verdict would tell apart."""
    if first.shape != second.shape:
        return 1.0
    return float(((first - second).abs() > tolerance + tolerance * second.abs()).float().mean())


def varies(values: torch.Tensor) -> bool:
    """Whether the values spread, and no single one of them makes up most."""
    flat = values.flatten()
    if flat.numel() > 20_000:
        flat = flat[:: flat.numel() // 20_000]
    spread, centre = float(flat.std()), float(flat.mean().abs())
    if not math.isfinite(spread) or spread < 0.03 or spread < 0.02 * centre:
        return False
    step = max(spread * 1e-3, 1e-6)
    counts = torch.unique((flat / step).round(), return_counts=True)[1]
    return float(counts.max()) < 0.7 * flat.numel()
