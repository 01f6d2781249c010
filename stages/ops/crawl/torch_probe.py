"""Runs a draft usage at small sizes and keeps what it learns, or says why the operator is left out.

Every operator runs on the meta device and on the CPU. A model made of the operators that pass computes the same in
training and evaluation mode, twice in a row, and for each sample of the batch on its own.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from operator_binding import NotApplicable, bind

# The second shape of a rank is for operators that want extents in threes.
SHAPES = {2: (4, 32), 3: (4, 8, 32), 4: (4, 8, 12, 12), 5: (4, 8, 6, 6, 6)}
THREES = {2: (4, 48), 3: (4, 8, 48)}
DOMAINS = ("any", "positive", "unit", "above_one")
WIDE = {"any": (-30.0, 30.0), "positive": (0.01, 30.0), "unit": (-0.999, 0.999), "above_one": (1.001, 30.0)}


class Rejected(Exception):
    """Why an operator is left out: a short reason that is counted, and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def probe(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage with what probing found out; raises Rejected."""
    usage = {"requires": [], **usage}
    ranks, domain, refusal, shapes = [], None, None, {}
    for rank in usage.get("ranks", [2, 3, 4, 5]):
        shapes[rank] = shape_of({**usage, "ranks": [rank]}, rank)
        try:
            found = first_domain({**usage, "ranks": [rank]}, shapes[rank])
        except Rejected as rejection:
            refusal = refusal or rejection
            continue
        ranks.append(rank)
        domain = domain or found
    if not ranks:
        assert refusal is not None, "every rank that was tried was refused"
        raise refusal
    usage = {**usage, "ranks": ranks, "domain": domain}
    usage["bounds"] = bounds(usage, shapes[ranks[0]])
    usage["smooth"] = usage["input"] == "index" or is_smooth(usage, shapes[ranks[0]])
    return usage


def shape_of(usage: dict[str, Any], rank: int) -> tuple[int, ...]:
    """The shape of this rank that the usage's conditions allow."""
    try:
        bind(usage, SHAPES[rank])
    except (NotApplicable, IndexError, KeyError):
        return THREES.get(rank, SHAPES[rank])
    return SHAPES[rank]


def first_domain(usage: dict[str, Any], shape: tuple[int, ...]) -> str:
    refusal = None
    for domain in DOMAINS:
        try:
            check(usage, shape, domain)
        except Rejected as rejection:
            refusal = refusal or rejection
            if rejection.reason != "not finite":
                break
            continue
        return domain
    assert refusal is not None, "every domain that was tried was refused"
    raise refusal


class Instance:
    """An operator made at one shape, which can be called."""

    def __init__(self, usage: dict[str, Any], shape: tuple[int, ...], device: str = "cpu") -> None:
        try:
            self.bound = bind(usage, shape)
        except (NotApplicable, IndexError, KeyError) as error:
            raise Rejected("fails", f"does not fit rank {len(shape)}: {error}") from error
        torch.manual_seed(1)
        self.module = nn.Module()
        self.scope = {"torch": torch, "nn": nn, "F": F, "self": self.module, **self.bound.values}
        self.usage = usage
        try:
            with torch.device(device):
                self._construct()
        except Exception as error:
            raise Rejected("fails", f"{type(error).__name__}: {error}".splitlines()[0][:200]) from error

    def _construct(self) -> None:
        for name in self.bound.attributes():
            setattr(self.module, name, self.bound.values[name])
        line = self.bound.construct_line("operator")
        if line:
            exec(line, self.scope)
        for operand in self.bound.operands:
            if operand.role == "parameter":
                setattr(self.module, operand.name, nn.Parameter(fill(operand.fill, operand.shape, 11) * operand.scale))

    def operands(self, shape: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
        return {
            operand.name: fill(operand.fill, operand.shape, seed + index, shape)
            for index, operand in enumerate(self.bound.operands)
            if operand.role == "input"
        }

    def __call__(self, stream: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
        try:
            with torch.no_grad():
                scope = {**self.scope, "x": stream, **operands}
                return eval(self.bound.call_text("x", "operator"), scope)
        except Exception as error:
            raise Rejected("fails", f"{type(error).__name__}: {error}".splitlines()[0][:200]) from error


def fill(kind: str, shape: tuple[int, ...], seed: int, stream_shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor of one of the fills that usages name."""
    generator = torch.Generator().manual_seed(seed)
    if kind.startswith("index"):
        high = stream_shape[1] if kind.endswith("shape1") else 16
        return torch.randint(0, high, shape, generator=generator)
    if kind == "sign":
        return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
    if kind in ("rand", "unit"):
        return torch.rand(shape, generator=generator)
    if kind == "positive":
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator)


def stream(usage: dict[str, Any], shape: tuple[int, ...], domain: str, seed: int) -> torch.Tensor:
    if usage["input"] == "index":
        return fill("index", shape, seed)
    if domain == "unit":
        return fill("rand", shape, seed) * 1.8 - 0.9
    if domain == "positive":
        return fill("positive", shape, seed)
    if domain == "above_one":
        return fill("rand", shape, seed) + 1.1
    return fill("randn", shape, seed)


class Ran(NamedTuple):
    """An operator that ran once at a shape: with what, and what it gave."""

    usage: dict[str, Any]
    shape: tuple[int, ...]
    domain: str
    instance: Instance
    first: torch.Tensor
    operands: dict[str, torch.Tensor]
    out: torch.Tensor

    def by_sample(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The operands, those changed that have a part for each sample of the stream."""
        batch = self.shape[:1]
        return {name: change(value) if value.shape[:1] == batch else value for name, value in self.operands.items()}


def check(usage: dict[str, Any], shape: tuple[int, ...], domain: str) -> None:
    """Everything that one operator has to satisfy at one shape."""
    instance = Instance(usage, shape)
    first = stream(usage, shape, domain, 2)
    operands = instance.operands(shape, 5)
    out = instance(first, operands)
    require_tensor(out, first, shape)
    ran = Ran(usage, shape, domain, instance, first, operands, out)
    for require in (require_meaning, require_repeatable, require_batch, require_order, require_meta):
        require(ran)


def require_tensor(out: Any, first: torch.Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(out, torch.Tensor):
        raise Rejected("returns no tensor", f"returns {type(out).__name__}")
    if out.dtype != torch.float32:
        raise Rejected("not float32", f"its output is {str(out.dtype).removeprefix('torch.')}")
    if out.dim() == 0 or out.shape[0] != shape[0]:
        raise Rejected("mixes the batch", f"from {tuple(shape)} to {tuple(out.shape)}")
    if out.untyped_storage().data_ptr() == first.untyped_storage().data_ptr():
        raise Rejected("view", "its output is a view of its input")
    if not torch.isfinite(out).all():
        raise Rejected("not finite", "its output is not finite for ordinary inputs")


def require_meaning(ran: Ran) -> None:
    if ran.out.shape == ran.first.shape and torch.allclose(ran.out, ran.first.to(ran.out.dtype)):
        raise Rejected("identity", "its output is its input")
    other = ran.instance(stream(ran.usage, ran.shape, ran.domain, 3), ran.operands)
    if other.shape != ran.out.shape:
        raise Rejected("data-dependent", "the shape of its output depends on the values of its input")
    if torch.allclose(ran.out, other):
        raise Rejected("insensitive", "its output does not depend on its input")
    # A second draw, since few signs may come out alike by chance.
    draws = [ran.instance.operands(ran.shape, seed) for seed in (50, 90)]
    for name in ran.operands:
        again = (ran.instance(ran.first, {**ran.operands, name: fresh[name]}) for fresh in draws)
        if all(torch.allclose(ran.out, other) for other in again):
            raise Rejected("insensitive", f"its output does not depend on `{name}`")


def require_repeatable(ran: Ran) -> None:
    torch.manual_seed(77)
    if not torch.equal(ran.out, ran.instance(ran.first, ran.operands)):
        raise Rejected("random", "two runs differ")
    ran.instance.module.eval()
    again = ran.instance(ran.first, ran.operands)
    ran.instance.module.train()
    if not torch.allclose(ran.out, again, rtol=1e-5, atol=1e-6):
        raise Rejected("mode-dependent", "training and evaluation mode differ")


def require_batch(ran: Ran) -> None:
    half = ran.shape[0] // 2
    try:
        part = ran.instance(ran.first[:half], ran.by_sample(lambda value: value[:half]))
    except Rejected:
        return
    if part.shape != (half, *ran.out.shape[1:]) or not torch.allclose(ran.out[:half], part, rtol=1e-4, atol=1e-5):
        raise Rejected("mixes the batch", "a sample's output depends on the other samples")


def require_order(ran: Ran) -> None:
    """A sample's output does not depend on its place in the batch."""
    flipped = ran.by_sample(lambda value: value.flip(0))
    if not torch.allclose(ran.instance(ran.first.flip(0), flipped).flip(0), ran.out, rtol=1e-4, atol=1e-5):
        raise Rejected("mixes the batch", "a sample's output depends on its place in the batch")


def require_meta(ran: Ran) -> None:
    shadow = Instance(ran.usage, ran.shape, "meta")
    shadow.module.to("meta")
    found = shadow(ran.first.to("meta"), {name: value.to("meta") for name, value in ran.operands.items()})
    if found.shape != ran.out.shape or found.dtype != ran.out.dtype:
        raise Rejected("meta differs", f"meta says {tuple(found.shape)}, the CPU {tuple(ran.out.shape)}")


def bounds(usage: dict[str, Any], shape: tuple[int, ...]) -> list[float | None]:
    """The range of the output over a wide range of inputs; null where it grows with the input."""
    if usage["input"] == "index" or usage["operands"] or (usage["construct"] and "weight" in usage["construct"]):
        return [None, None]
    instance = Instance(usage, shape)
    if any(True for _ in instance.module.parameters()):
        return [None, None]
    low, high = WIDE[usage["domain"]]
    wide = torch.linspace(low, high, math.prod(shape)).reshape(shape)
    narrow = wide if usage["domain"] != "any" else wide / 3
    reach = [instance(values, {}) for values in (wide, narrow)]
    limits = []
    for extreme in (torch.amin, torch.amax):
        outer, inner = (float(extreme(torch.nan_to_num(values, nan=0.0))) for values in reach)
        steady = usage["domain"] == "any" and abs(outer - inner) <= 0.02 * max(1.0, abs(outer)) and abs(outer) < 5.0
        limits.append(round(outer, 4) if steady else None)
    return limits


def is_smooth(usage: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether the output is continuous. Steps such as floor, sign or a hard threshold turn a rounding error of an
    earlier operator into a wrong element, so they may only come first."""
    instance = Instance(usage, shape)
    low, high = (-3.0, 3.0) if usage["domain"] == "any" else WIDE[usage["domain"]]
    below = torch.linspace(low, high, math.prod(shape)).reshape(shape)
    above = below + (high - low) / math.prod(shape)
    operands = instance.operands(shape, 5)
    lower, upper = instance(below, operands), instance(above, operands)
    spread = torch.nan_to_num(lower).std().clamp_min(1e-3)
    if not is_elementwise(instance, below, lower, operands):
        near = instance(below + 1e-6, operands)
        return bool(torch.nan_to_num((near - lower).abs()).max() < 0.02 * spread)
    # Halve each element's interval towards its larger change: a jump is what does not shrink with it.
    for _ in range(16):
        middle = (below + above) / 2
        value = instance(middle, operands)
        left = (value - lower).abs() >= (upper - value).abs()
        above, upper = torch.where(left, middle, above), torch.where(left, value, upper)
        below, lower = torch.where(left, below, middle), torch.where(left, lower, value)
    return bool(torch.nan_to_num((upper - lower).abs()).max() < 0.02 * spread)


def is_elementwise(
    instance: Instance, values: torch.Tensor, out: torch.Tensor, operands: dict[str, torch.Tensor]
) -> bool:
    """Whether each element of the output depends on the element of the input at its place alone."""
    if out.shape != values.shape:
        return False
    moved = torch.rand(values.shape, generator=torch.Generator().manual_seed(9)) < 0.5
    other = instance(torch.where(moved, values.flip(-1) * 0.9, values), operands)
    return torch.allclose(other[~moved], out[~moved], rtol=1e-6, atol=1e-7, equal_nan=True)
