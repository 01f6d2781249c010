"""Looking at a model's inputs and outputs: flattening, comparing, summarising.

Comparisons run in float64 over slices, so that a large output never costs a second large buffer.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

SLICE, GPU_SLICE = 1 << 22, 1 << 25
SAMPLE = 1 << 16


def flatten(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside an output, in order: tensors, tuples, lists, dicts and objects with `to_tuple`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flatten(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in flatten(item)]
    if hasattr(value, "to_tuple"):
        return flatten(value.to_tuple())
    return []


def describe(values: Any) -> list[dict[str, Any]]:
    """What people and filters read of a list of values: shape and dtype of tensors, the type of anything else."""
    return [
        {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, torch.Tensor)
        else {"type": type(value).__name__}
        for value in values
    ]


def _plain(*tensors: Any) -> bool:
    """Whether these are ordinary tensors of float32, whose slices need no copy in float64."""
    return all(
        tensor.dtype == torch.float32 and tensor.layout is torch.strided and type(tensor) is torch.Tensor
        for tensor in tensors
    )


def _parts(tensor: Any) -> Iterator[Any]:
    """Slices of a plain tensor as they are."""
    flat = tensor.detach().reshape(-1)
    size = GPU_SLICE if flat.is_cuda else SLICE
    return (flat[start : start + size] for start in range(0, flat.numel(), size))


def _slices(tensor: Any) -> Iterator[Any]:
    """The values of a tensor as float64, a slice at a time."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    size = GPU_SLICE if flat.is_cuda else SLICE
    for start in range(0, flat.numel(), size):
        # A copy always: comparisons write into it.
        yield flat[start : start + size].to(torch.float64, copy=True)


class Described(NamedTuple):
    """Numbers on a slice of an output."""

    finite: float
    sum: float
    squares: float
    low: float
    high: float
    zeros: float


class Compared(NamedTuple):
    """Numbers on two slices: the largest gap, the largest in units of 1 + |a|, and how many elements differ."""

    gap: float
    scaled: float
    changed: float


class Summary:
    """Statistics of outputs: over all of them together, and whether each of them holds a single value."""

    def __init__(self, tensors: Any) -> None:
        self.finite, self.constant = True, bool(tensors)
        self.count, self.sum, self.squares, self.zeros = 0, 0.0, 0.0, 0
        self.min, self.max = math.inf, -math.inf
        self.deviations = []
        for tensor in tensors:
            self._add(tensor)
        self.top_share = max(map(_top_share, tensors), default=None)

    def _add(self, tensor: Any) -> None:
        # One transfer for each tensor: on a GPU every single number would wait for all that is queued.
        numbers = (
            [_describe_plain(part) for part in _parts(tensor)]
            if _plain(tensor)
            else [_describe(part) for part in _slices(tensor)]
        )
        found = [Described(*row) for row in torch.stack(numbers).tolist()] if numbers else []
        count, total = tensor.numel(), sum(part.sum for part in found)
        squares = sum(part.squares for part in found)
        if tensor.is_complex():
            count *= 2
        self.finite = self.finite and all(part.finite for part in found)
        low = min((part.low for part in found), default=math.inf)
        high = max((part.high for part in found), default=-math.inf)
        if any(math.isnan(part.low) for part in found):
            low = high = math.nan
        if low != high and count:
            self.constant = False
        self.deviations.append(_deviation(count, total, squares))
        self.count, self.sum, self.squares = self.count + count, self.sum + total, self.squares + squares
        self.zeros += sum(part.zeros for part in found)
        self.min, self.max = min(self.min, low), max(self.max, high)

    @property
    def deviation(self) -> Any:
        """Over all outputs together."""
        return _deviation(self.count, self.sum, self.squares) if self.count else 0.0

    def facts(self) -> Any:
        return {
            "finite": self.finite,
            "output_mean": self.sum / self.count if self.count else None,
            "output_std": self.deviation if self.count else None,
            "output_min": self.min,
            "output_max": self.max,
            "output_constant": self.constant,
            "output_zero_share": self.zeros / self.count if self.count else None,
            "output_top_share": self.top_share,
        }


def _describe_plain(part: Any) -> torch.Tensor:
    """The same of a slice in float32 without copies: sums in float64, and finite is what has finite extremes."""
    low, high = torch.aminmax(part)
    finite = torch.isfinite(low) & torch.isfinite(high)
    norm = torch.linalg.vector_norm(part, dtype=torch.float64)
    zeros = part.numel() - torch.count_nonzero(part)
    numbers = (finite, part.sum(dtype=torch.float64), norm * norm, low, high, zeros)
    return torch.stack([number.double() for number in numbers])


def _describe(part: Any) -> torch.Tensor:
    """Of one slice: finite, sum, sum of squares, smallest, largest, zeros."""
    numbers = (torch.isfinite(part).all(), part.sum(), part.square().sum(), part.min(), part.max(), (part == 0).sum())
    return torch.stack([number.double() for number in numbers])


def _top_share(tensor: Any) -> Any:
    """How much of a sample of the elements has the value that occurs most often."""
    if tensor.is_quantized or tensor.layout is not torch.strided or not tensor.numel():
        return 0.0
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    # Odd steps, so that a period of a row's length doesn't meet the same column always.
    sample = flat[:: max(1, flat.numel() // SAMPLE) | 1][:SAMPLE]
    counts = torch.unique(sample, return_counts=True)[1]
    return counts.max().item() / sample.numel()


def _deviation(count: Any, total: Any, squares: Any) -> float:
    if not count:
        return 0.0
    variance = squares / count - (total / count) ** 2
    return math.sqrt(variance) if variance > 0 else (0.0 if variance <= 0 else math.nan)


def all_finite(tensors: Any) -> bool:
    return all(bool(torch.isfinite(part).all()) for tensor in tensors for part in _slices(tensor))


def same_shapes(left: Any, right: Any) -> bool:
    return [tensor.shape for tensor in left] == [tensor.shape for tensor in right]


def equal(left: Any, right: Any) -> bool:
    """Whether two inputs are the same value, bit for bit where they are tensors."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(equal(*pair) for pair in zip(left, right, strict=True))
    try:
        return bool(left == right)
    except Exception:
        return False


def clone(values: Any) -> list[torch.Tensor]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


class Difference:
    """How far two lists of outputs are apart.

    `absolute` is the largest difference of two elements; `relative` the same in units of the first output's standard
    deviation; `share` the part of elements that differ at all; `tolerance` the smallest t for which every element
    passes |left - right| <= t + t * |left|. NaN equals NaN; a difference in shape or in finiteness is infinite.
    """

    def __init__(self, left: Any, right: Any, deviations: Any) -> None:
        self.absolute = self.relative = self.tolerance = 0.0
        self.changed = self.count = 0
        self.shapes_differ = not same_shapes(left, right)
        if self.shapes_differ:
            self.absolute = self.relative = self.tolerance = math.inf
            self.changed = self.count = 1
            return
        for first, second, deviation in zip(left, right, deviations, strict=False):
            self._add(first, second, deviation)

    def _add(self, first: Any, second: Any, deviation: Any) -> None:
        self.count += first.numel() * (2 if first.is_complex() else 1)
        if first.layout is torch.strided and not first.is_quantized and torch.equal(first, second):
            return
        found = []
        if _plain(first, second):
            found = _compared(_compare_plain, _parts(first), _parts(second))
        # What is not finite makes the quick comparison not finite.
        if not found or not all(math.isfinite(part.gap) and math.isfinite(part.scaled) for part in found):
            found = _compared(_compare, _slices(first), _slices(second))
        largest = max((part.gap for part in found), default=0.0)
        self.tolerance = max([self.tolerance, *(part.scaled for part in found)])
        self.changed += int(sum(part.changed for part in found))
        self.absolute = max(self.absolute, largest)
        if largest > 0:
            self.relative = max(self.relative, largest / deviation if deviation > 0 else math.inf)

    @property
    def share(self) -> Any:
        return self.changed / self.count if self.count else 0.0


def _compared(compare: Any, left: Any, right: Any) -> list[Compared]:
    """What `compare` says of each pair of slices, with one wait for the device."""
    numbers = torch.stack([compare(a, b) for a, b in zip(left, right, strict=True)])
    return [Compared(*row) for row in numbers.tolist()]


def _compare_plain(a: Any, b: Any) -> torch.Tensor:
    """The same of two slices in float32, in fewer steps."""
    gap = (a - b).abs_()
    changed, largest = torch.count_nonzero(gap), gap.max()
    scaled = gap.div_(a.abs().add_(1)).max()
    return torch.stack([largest.double(), scaled.double(), changed.double()])


def _compare(a: Any, b: Any) -> torch.Tensor:
    """Of two slices: the largest gap, the largest in units of 1 + |a|, and how many elements differ."""
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs_().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
    scaled = (gap / a.abs_().add_(1)).nan_to_num_(nan=math.inf, posinf=math.inf)
    return torch.stack([gap.max(), scaled.max(), (~same).sum().double()])
