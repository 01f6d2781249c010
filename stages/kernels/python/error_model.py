"""How far honest arithmetic may be from the exact answer of a task.

A multiple of eager's own error is a poor bound: eager adds in trees and keeps what others have to round, or happens to
be exact, and where it is far off, anything would pass. So a task's float64 forward is run several times with random
rounding of the size that a kernel of its element type makes (a *noisy twin*), once for the task, and the deviations
from the exact forward give the scale of honest errors: over the whole output, and over its parts (each index of each
dimension, and blocks of 1,024 elements), since an error in a small part hides in the whole.

What is kept of the twins is relative to the size of the answer in a part, so that it holds for other draws. In a part g
of a draw with the exact answer r and eager's error e0 the scale is

    S_g = hypot(max(rms_g(e0), A rms_g(r)), F rms_g(r)),   at least rms_g(r) times the median of S/rms(r)
                                                           and a tenth of S over the whole (not for half types and TF32)

with A the median over the parts of rms(twin)/rms(r), and F the rounding of the answer itself. An answer is accepted if
its error is at most `rms` S_g in root mean square and `largest` M_g in each element, where M_g is the largest of
eager's errors, 4 S_g, and S_g times the twins' own ratio of largest and rms. The constants were found on a CPU with 50
tasks, 474 honest and 636 dishonest answers (docs/kernels.md says what they let through).

Products in TF32 have twins of their own, whose operands lose 13 bits, and constants so near to 1 that bfloat16, which
loses 16, is refused. Eager's error belongs to them then: on a GPU it is that of TF32.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table

from dispatch_mode import DispatchMode
from double_precision import widened

if TYPE_CHECKING:
    from double_precision import Twin


TWINS, TWINS_OF_FEW = 3, 8
FEW = 32
"""Elements: statistics of fewer say little."""
BLOCK = 1024
CARRIED = 0.1
"""Of the scale over the whole: what a part's own is at least, for float32 and float64. A running sum that is near zero
for a while carries the roundings of when it was not."""
SAMPLED = 4096
"""Parts whose median stands for that of all."""
UNIT = 2.0**-24
"""Half a unit in the last place of float32."""
WIDE_UNIT = 2.0**-53
"""The same of float64."""
IN_FLOAT64 = 2.0**-40
"""Where eager's error is smaller than that of the answer, it has computed an output of float64 in float64 from its
inputs on; elsewhere such an output has passed through float32."""
ACCUMULATION = 0.3
"""Of a sum of n terms: this times UNIT times the root of n."""
MOST_TERMS = 1 << 16
OPERANDS_IN_HALF = 0.15
"""Of a product whose operands were rounded to a half type: this times its epsilon."""
HALVES = (torch.float16, torch.bfloat16)

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "mv", "dot", "addmv"}
SUMS = {
    "sum",
    "mean",
    "cumsum",
    "cumprod",
    "prod",
    "linalg_vector_norm",
    "norm",
    "var",
    "logcumsumexp",
    "var_mean",
    "std",
}
RUNNING_PRODUCTS = {"cumprod", "prod"}
ADDED_TO = {"addmm", "baddbmm", "addmv"}
EXACT = {
    "clone", "_to_copy", "copy_", "detach", "index_select", "embedding", "gather", "amax", "amin", "max", "min", "neg",
    "abs", "relu", "cat", "stack", "topk", "sort", "argmax", "argmin", "where", "zeros", "ones", "full", "empty",
    "zeros_like", "ones_like", "full_like", "arange", "scalar_tensor", "constant_pad_nd", "max_pool2d_with_indices",
    "_max_pool2d_with_indices", "clamp", "clamp_min", "clamp_max", "tril", "triu", "flip", "index", "sign",
    "lift_fresh_copy", "fill", "fill_", "zero_", "new_zeros", "masked_fill", "masked_fill_", "empty_like", "maximum",
    "minimum", "select_scatter", "slice_scatter", "scatter", "new_ones", "new_full", "empty_strided", "new_empty",
    "unfold", "roll", "mode", "median", "kthvalue", "cummax", "cummin", "threshold", "hardtanh",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many scales an error may have: over the whole, and in a part."""

    rms: float
    largest: float
    part_rms: float
    part_largest: float


STRICT = Limits(8, 12, 16, 64)
TF32 = Limits(2.0, 2.2, 2.8, 3.2)
HALF = Limits(2.1, 4.5, 4.6, 8)


# Parts of an output.


def families(shape: tuple[int, ...]) -> list[int | str | None]:
    """Ways to divide an output into parts: `None` is the whole, a number a dimension, "block" stretches of elements."""
    count = math.prod(shape)
    found = [None]
    found += [place for place, extent in enumerate(shape) if extent > 1 and count // extent >= FEW]
    return found + (["block"] if count >= 2 * BLOCK else [])


def norms(values: torch.Tensor, shape: tuple[int, ...], family: int | str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The root of the mean square and the largest magnitude of each part, in float64."""
    if family is None:
        values, others = values.reshape(1, -1), [1]
    elif family == "block":
        values, others = values[: values.numel() // BLOCK * BLOCK].view(-1, BLOCK), [1]
    else:
        values, others = values.view(shape), [place for place in range(len(shape)) if place != family]
    size = math.prod(values.shape[place] for place in others)
    rms = torch.linalg.vector_norm(values, dim=others, dtype=torch.float64) / math.sqrt(size)
    return rms, torch.linalg.vector_norm(values, math.inf, dim=others).double()


def part_norms(values: torch.Tensor, shape: tuple[int, ...], order: float) -> dict[int | str | None, Any]:
    """By family the norms of its parts, in float64: of order 2 (not yet divided by the elements) or infinity. The same
    as `norms` for each family, from fewer passes over the elements: one for the blocks and one for the dimensions on
    either side of a split; of these the norms follow as norms of norms."""
    wanted = families(shape)
    found, places = {}, [family for family in wanted if isinstance(family, int)]
    if "block" in wanted:
        found["block"] = _norm(values[: values.numel() // BLOCK * BLOCK].view(-1, BLOCK), order, [1])
    split, from_blocks = _split(tuple(shape), tuple(places), "block" in wanted)
    leading = found["block"].view(*shape[:split], -1) if from_blocks else values.view(*shape[:split], -1)
    found |= _along(leading, [(place, place) for place in places if place < split], list(range(split)), order)
    trailing = values.view(-1, *shape[split:])
    kept = list(range(1, trailing.dim()))
    found |= _along(trailing, [(place, place - split + 1) for place in places if place >= split], kept, order)
    found[None] = _whole(values, found, places, order).reshape(1)
    return found


def _norm(values: torch.Tensor, order: float, dims: list[int]) -> torch.Tensor:
    return torch.linalg.vector_norm(values, order, dim=dims, dtype=torch.float64)


def _along(values: torch.Tensor, places: list[tuple[int, int]], kept: list[int], order: float) -> dict[int, Any]:
    """The norms for each of some dimensions, given as pairs: its name and where it is now. Where there are several, the
    elements are read once for all dimensions in `kept`, which these are of."""
    if len(places) > 1:
        values = _norm(values, order, [dim for dim in range(values.dim()) if dim not in kept])
        places = [(place, kept.index(at)) for place, at in places]
    return {place: _norm(values, order, [dim for dim in range(values.dim()) if dim != at]) for place, at in places}


def _whole(values: torch.Tensor, found: dict[int | str, torch.Tensor], places: list[int], order: float) -> torch.Tensor:
    if places:
        return _norm(min((found[place] for place in places), key=torch.Tensor.numel), order, [0])
    if "block" not in found:
        return _norm(values, order, [0])
    blocks = found["block"]
    rest = values[blocks.numel() * BLOCK :]
    return _norm(torch.cat([blocks, rest.double()]), order, [0])


@functools.lru_cache(maxsize=256)
def _split(shape: tuple[int, ...], places: tuple[int, ...], has_blocks: bool) -> tuple[int, bool]:
    """Before which dimension to split, so that the fewest numbers are read; and whether what stands before it follows
    from the norms of blocks."""
    count = math.prod(shape)

    def cost(split: int):
        before, after = (len([place for place in places if (place < split) == side]) for side in (True, False))
        leading, trailing = math.prod(shape[:split]), math.prod(shape[split:])
        reads = 0
        if before and follows(split):
            reads += count // BLOCK * before
        elif before:
            reads += count + (leading * before if before > 1 else 0)
        if after:
            reads += count + (trailing * after if after > 1 else 0)
        return reads

    def follows(split: int):
        return has_blocks and math.prod(shape[split:]) % BLOCK == 0

    best = min(range(len(shape) + 1), key=cost)
    return best, follows(best)


def _size(shape: tuple[int, ...], family: Any) -> int:
    """The elements of a part."""
    if family is None:
        return math.prod(shape)
    return BLOCK if family == "block" else math.prod(shape) // shape[family]


def _median(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Of those that are valid, at most some thousand of them: sorting all blocks of an output would take longer than
    the forward. 0 without any. A tensor, so that nobody waits for the GPU."""
    step = max(1, values.numel() // SAMPLED)
    values, valid = values[::step], valid[::step]
    return values.masked_fill(~valid, math.nan).nanmedian().nan_to_num(nan=0.0)


# The noisy twin.


class Noise(DispatchMode):
    """Random rounding of what each operator computes, in float64. What is not known as exact, a sum or a product is
    taken apart where torch can do that, and counts as rounded once where it can't."""

    def __init__(self, seed: int, half_epsilon: float, in_tf32: bool, unit: float = UNIT) -> None:
        super().__init__()
        self._unit = unit
        self._seed, self._generators = seed, {}
        self._half_epsilon, self._in_tf32 = half_epsilon, in_tf32
        self.products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = widened(kwargs or {})
        name = function.overloadpacket.__name__
        if name in EXACT or function.is_view:
            return function(*args, **kwargs)
        if name in PRODUCTS or name in SUMS:
            return self._contract(function, name, list(args), kwargs)
        if function in decomposition_table:
            with self:
                result = decomposition_table[function](*args, **kwargs)
            if result is not NotImplemented:
                return result
        elif function._can_decompose():
            with self:
                return function.decompose(*args, **kwargs)
        return self._rounded_once(name, function(*args, **kwargs), args)

    def _contract(
        self, function: Any, name: str, args: list[Any], kwargs: dict[str, int]
    ) -> float | torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        first = 1 if name in ADDED_TO else 0
        if name in PRODUCTS:
            self.products += 1
            if self._in_tf32:
                args[first], args[first + 1] = (_shortened(value) for value in args[first : first + 2])
        if name in RUNNING_PRODUCTS:
            # Its roundings follow from those of its factors.
            args[first] = self._jitter(args[first], self._unit)
            return function(*args, **kwargs)
        scale = ACCUMULATION * self._unit * math.sqrt(min(_terms(name, args, first), MOST_TERMS))
        args[first] = self._jitter(args[first], math.hypot(scale, OPERANDS_IN_HALF * self._half_epsilon))
        return self._all_jittered(function(*args, **kwargs), math.hypot(scale, self._unit))

    def _rounded_once(self, name: str, result: Any, args: tuple[Any, ...]) -> Any:
        if name.endswith("_") and isinstance(result, torch.Tensor) and result.is_floating_point():
            return args[0].copy_(self._jitter(result, self._unit))
        return self._all_jittered(result, self._unit)

    def _all_jittered(
        self, result: float | torch.Tensor | tuple[torch.Tensor, torch.Tensor], scale: float
    ) -> float | torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if isinstance(result, (tuple, list)):
            return type(result)(self._jitter(value, scale) for value in result)
        return self._jitter(result, scale)

    def _jitter(self, value: Any, scale: float) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        generator = self._generators[value.device]
        # In float32: half the memory, and as good as noise.
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32, device=value.device)
        return torch.addcmul(value, value, noise.double(), value=scale)


def _shortened(value: torch.Tensor) -> torch.Tensor:
    """As the tensor cores read an operand in TF32: ten bits after the first, the others cut off."""
    if not value.is_floating_point():
        return value
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp(torch.trunc(mantissa * 2.0**11) / 2.0**11, exponent)


def _terms(name: str, args: list[Any], first: int) -> float:
    """How many terms a sum has that are not zero."""
    value = args[first]
    if not isinstance(value, torch.Tensor) or not value.numel():
        return 1
    if name in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"):
        terms = value.shape[-1]
    elif name == "convolution":
        terms = args[1][0].numel()
    elif name in ("cumsum", "logcumsumexp"):
        terms = value.shape[args[1]] if value.dim() else 1
    else:
        terms = _reduced(value, args)
    share = _nonzero_share(value) * (_nonzero_share(args[first + 1]) if name in PRODUCTS else 1.0)
    return max(1.0, terms * share)


def _reduced(value: torch.Tensor, args: list[Any]) -> int:
    """The elements that go into one of a reduction's results."""
    dims = next((each for each in args[1:] if isinstance(each, (list, tuple))), None)
    if not dims:
        return value.numel()
    return math.prod(value.shape[place] for place in dims) if value.dim() else 1


def _nonzero_share(value: torch.Tensor) -> float:
    return torch.count_nonzero(value).item() / max(1, value.numel())


# What the twins say of one output.


@dataclasses.dataclass
class Kind:
    """One kind of arithmetic: its limits, and by family the twins' error relative to the answer and its peaks."""

    limits: Limits
    has_eager: bool
    """Whether eager's own error is of this kind."""
    relative: dict
    peak: dict
    absolute: float
    """The twins' error over the whole, for answers of few elements, which may be near zero by chance."""


def measure_kind(limits: Limits, has_eager: bool, exact: torch.Tensor | None, twins: list[torch.Tensor]) -> Kind:
    """`exact` and each of the twins as flat tensors of the shape that `exact` has."""
    shape, exact = tuple(exact.shape), exact.reshape(-1)
    known = exact.isfinite()
    answer = torch.where(known, exact, 0.0)
    deviations = [torch.where(known & twin.reshape(-1).isfinite(), twin.reshape(-1) - answer, 0.0) for twin in twins]
    relative, peak, absolute = {}, {}, 0.0
    for family in families(shape):
        size, _ = norms(answer, shape, family)
        found = [norms(deviation, shape, family) for deviation in deviations]
        sizes, peaks = zip(*found, strict=True)
        rms = torch.stack(sizes).square().mean(0).sqrt()
        largest = torch.stack(peaks).amax(0)
        relative[family] = _median(rms / size, size > 0).item()
        peak[family] = _median(largest / rms, rms > 0).item()
        if family is None:
            absolute = rms.item()
    return Kind(limits, has_eager, relative, peak, absolute)


class Bounds:
    """What errors of one output are allowed, for one draw: by family the rms and the largest of each part."""

    def __init__(
        self, kinds: list[Kind], dtype: torch.dtype, shape: tuple[int, ...], error: torch.Tensor, answer: torch.Tensor
    ) -> None:
        """`error` is eager's. What is not finite in it or in `answer` makes `known` not finite."""
        self._shape = tuple(shape)
        half = dtype in HALVES
        # A half type's answer is rounded itself: half a unit in the last place, uniformly.
        floor = (
            0.21 * torch.finfo(dtype).eps
            if half
            else 2 * UNIT
            if dtype == torch.float32
            else 4 * torch.finfo(dtype).eps
        )
        tiny = torch.finfo(dtype).smallest_normal if dtype != torch.float16 else 2.0**-24
        self.by_family: dict[Any, Any] = {}
        self._over_all: list[Any] = [0.0] * len(kinds)
        squares, peaks, sizes = (
            part_norms(*each) for each in ((error, shape, 2), (error, shape, math.inf), (answer, shape, 2))
        )
        for family in families(shape):
            root = math.sqrt(_size(shape, family))
            own, own_largest, size = squares[family] / root, peaks[family], sizes[family] / root
            allowed = [
                self._of_kind(at, kind, family, own, own_largest, size, floor, tiny) for at, kind in enumerate(kinds)
            ]
            self.by_family[family] = tuple(torch.stack(each).amax(0) for each in zip(*allowed, strict=True))
        rms, largest = self.by_family.pop(None)
        self.whole = torch.cat([rms, largest])
        # The largest element of the answer is no smaller than the root of the mean square of any of its blocks.
        at_least = (
            (sizes["block"].amax(0, keepdim=True) / math.sqrt(BLOCK))
            if "block" in sizes
            else sizes[None] / math.sqrt(math.prod(shape))
        )
        self.known = torch.cat([squares[None], peaks[None], sizes[None], at_least])
        """Of eager's error the norm and the largest, of the answer the norm, and a bound from below of its largest
        element."""

    def _of_kind(
        self,
        at: int,
        kind: Kind,
        family: int | str | None,
        own: torch.Tensor,
        own_largest: torch.Tensor,
        size: torch.Tensor,
        floor: float,
        tiny: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = kind.relative[family] * size
        if kind.has_eager:
            scale = torch.maximum(scale, own)
        if family is None and math.prod(self._shape) < FEW:
            scale = scale.clamp_min(kind.absolute)
        scale = torch.hypot(scale, floor * size + tiny)
        scale = torch.maximum(scale, size * _median(scale / size, size > 2.0**24 * tiny))
        limits = kind.limits
        if family is None:
            self._over_all[at] = scale
        elif limits is STRICT:
            scale = torch.maximum(scale, CARRIED * self._over_all[at])
        largest = scale * max(4.0, kind.peak[family])
        if kind.has_eager:
            largest = torch.maximum(largest, own_largest)
        if family is None:
            return scale * limits.rms, largest * limits.largest
        return scale * limits.part_rms, largest * limits.part_largest

    def parts(self, error: torch.Tensor) -> list[torch.Tensor]:
        """How the parts of an error stand: by family the largest ratio to what is allowed, and where that is."""
        return self._parts(part_norms(error, self._shape, 2), part_norms(error, self._shape, math.inf))

    def compare(self, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """An error's norm, where the largest element is, and `parts`."""
        squares, peaks = part_norms(error, self._shape, 2), part_norms(error, self._shape, math.inf)
        return squares[None], _place_of_largest(error, peaks.get("block")), self._parts(squares, peaks)

    def _parts(
        self, squares: dict[int | str | None, torch.Tensor], peaks: dict[int | str | None, torch.Tensor]
    ) -> list[torch.Tensor]:
        found = []
        for family, (allowed_rms, allowed_largest) in self.by_family.items():
            rms = squares[family] / math.sqrt(_size(self._shape, family))
            ratio, where = torch.maximum(rms / allowed_rms, peaks[family] / allowed_largest).max(0)
            found += [ratio.nan_to_num(nan=math.inf), where.double()]
        return found

    def names(self) -> list[int | str]:
        return list(self.by_family)


def _place_of_largest(values: torch.Tensor, peaks: torch.Tensor | None) -> torch.Tensor:
    """Where the largest magnitude is, the first of equals; `peaks` are those of the blocks, which spare reading all."""
    if peaks is None:
        return values.abs().argmax().reshape(1)
    # The elements after the last whole block are one more.
    rest = values[peaks.numel() * BLOCK :]
    block = peaks.argmax().reshape(1)
    inside = values[: peaks.numel() * BLOCK].view(-1, BLOCK).index_select(0, block).abs().argmax().reshape(1)
    place = block * BLOCK + inside
    if not rest.numel():
        return place
    largest, last = rest.abs().max(0, keepdim=True)
    return torch.where(largest > peaks.take(block), last + peaks.numel() * BLOCK, place)


def study(
    twin: "Twin | None",
    values: Sequence[Any],
    eager: list[torch.Tensor],
    exact: Sequence[torch.Tensor | None],
    policy: str,
) -> list[list[Kind] | None] | None:
    """For each output its kinds, or `None` where it is no float. `twin` is a double_precision.Twin."""
    kinds: list[Any] = [None] * len(eager)
    floats = [place for place, output in enumerate(eager) if output.is_floating_point()]
    wide = [place for place in floats if _is_computed_in_float64(eager[place], exact[place])]
    if wide:
        floats = [place for place in floats if place not in wide]
        deviations, _ = _deviations(twin, values, exact, wide, 0.0, in_tf32=False, unit=WIDE_UNIT)
        for place in wide:
            kinds[place] = [measure_kind(STRICT, True, exact[place], deviations[place])]
    if not floats:
        return kinds if wide else None
    half = max((torch.finfo(eager[place].dtype).eps for place in floats if eager[place].dtype in HALVES), default=0.0)
    plain, products = _deviations(twin, values, exact, floats, half, in_tf32=False)
    shortened = {}
    if policy == "tf32" and products:
        shortened, _ = _deviations(twin, values, exact, floats, half, in_tf32=True)
    for place in floats:
        if eager[place].dtype in HALVES:
            kinds[place] = [measure_kind(HALF, True, exact[place], plain[place])]
            continue
        kinds[place] = [measure_kind(STRICT, not shortened, exact[place], plain[place])]
        if shortened:
            kinds[place].append(measure_kind(TF32, True, exact[place], shortened[place]))
    return kinds


def _is_computed_in_float64(eager: torch.Tensor, exact: torch.Tensor | None) -> bool:
    if eager.dtype != torch.float64 or exact is None:
        return False
    error, size = (eager - exact).nan_to_num(0.0, 0.0, 0.0), exact.nan_to_num(0.0, 0.0, 0.0)
    return bool(torch.linalg.vector_norm(error) <= IN_FLOAT64 * torch.linalg.vector_norm(size))


def _deviations(
    twin: "Twin | None",
    values: Sequence[Any],
    exact: Sequence[torch.Tensor | None],
    floats: list[int],
    half: float,
    in_tf32: bool,
    unit: float = UNIT,
) -> tuple[dict[int, list[torch.Tensor]], int]:
    """By output, what each noisy twin gives; and how many products there were."""
    few = any(exact[place].numel() < FEW for place in floats)
    found, products = {place: [] for place in floats}, 0
    for number in range(TWINS_OF_FEW if few else TWINS):
        noise = Noise(number + 1, half, in_tf32, unit)
        outputs = twin.forward(values, noise)
        products = noise.products
        for place in floats:
            if outputs[place].shape != exact[place].shape:
                raise ValueError("a noisy twin has another shape")
            found[place].append(outputs[place])
    return found, products
