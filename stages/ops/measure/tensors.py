"""Looking at a model's inputs and outputs: flattening, comparing, summarising.

Comparisons run in float64 over slices, so that a large output never costs a second large buffer.
"""

import math

import torch

SLICE = 1 << 22


def flatten(value):
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


def describe(values):
    """What people and filters read of a list of values: shape and dtype of tensors, the type of anything else."""
    return [
        {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, torch.Tensor)
        else {"type": type(value).__name__}
        for value in values
    ]


def _slices(tensor):
    """The values of a tensor as float64, a slice at a time."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), SLICE):
        yield flat[start : start + SLICE].double()


class Summary:
    """Statistics of outputs: over all of them together, and whether each of them holds a single value."""

    def __init__(self, tensors):
        self.finite, self.constant = True, bool(tensors)
        self.count, self.sum, self.squares = 0, 0.0, 0.0
        self.min, self.max = math.inf, -math.inf
        self.deviations = []
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor):
        count, total, squares, low, high = 0, 0.0, 0.0, math.inf, -math.inf
        for part in _slices(tensor):
            self.finite = self.finite and bool(torch.isfinite(part).all())
            count += part.numel()
            total += part.sum().item()
            squares += part.square().sum().item()
            low, high = min(low, part.min().item()), max(high, part.max().item())
        if low != high and count:
            self.constant = False
        self.deviations.append(_deviation(count, total, squares))
        self.count, self.sum, self.squares = self.count + count, self.sum + total, self.squares + squares
        self.min, self.max = min(self.min, low), max(self.max, high)

    def facts(self):
        return {
            "finite": self.finite,
            "output_mean": self.sum / self.count if self.count else None,
            "output_std": _deviation(self.count, self.sum, self.squares) if self.count else None,
            "output_min": self.min,
            "output_max": self.max,
            "output_constant": self.constant,
        }


def _deviation(count, total, squares):
    if not count:
        return 0.0
    variance = squares / count - (total / count) ** 2
    return math.sqrt(variance) if variance > 0 else (0.0 if variance <= 0 else math.nan)


def all_finite(tensors):
    return all(bool(torch.isfinite(part).all()) for tensor in tensors for part in _slices(tensor))


def same_shapes(left, right):
    return [tensor.shape for tensor in left] == [tensor.shape for tensor in right]


def equal(left, right):
    """Whether two inputs are the same value, bit for bit where they are tensors."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(equal(*pair) for pair in zip(left, right))
    try:
        return bool(left == right)
    except Exception:
        return False


def clone(values):
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


class Difference:
    """How far two lists of outputs are apart.

    `absolute` is the largest difference of two elements; `relative` the same in units of the first output's standard
    deviation; `share` the part of elements that differ at all; `tolerance` the smallest t for which every element
    passes |left - right| <= t + t * |left|. NaN equals NaN; a difference in shape or in finiteness is infinite.
    """

    def __init__(self, left, right, deviations):
        self.absolute = self.relative = self.tolerance = 0.0
        self.changed = self.count = 0
        self.shapes_differ = not same_shapes(left, right)
        if self.shapes_differ:
            self.absolute = self.relative = self.tolerance = math.inf
            self.changed = self.count = 1
            return
        for first, second, deviation in zip(left, right, deviations):
            self._add(first, second, deviation)

    def _add(self, first, second, deviation):
        largest = 0.0
        for a, b in zip(_slices(first), _slices(second)):
            same = (a == b) | (a.isnan() & b.isnan())
            gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
            largest = max(largest, gap.max().item())
            scaled = (gap / (1 + a.abs())).nan_to_num(nan=math.inf, posinf=math.inf)
            self.tolerance = max(self.tolerance, scaled.max().item())
            self.changed += int((~same).sum().item())
            self.count += a.numel()
        self.absolute = max(self.absolute, largest)
        if largest > 0:
            self.relative = max(self.relative, largest / deviation if deviation > 0 else math.inf)

    @property
    def share(self):
        return self.changed / self.count if self.count else 0.0
