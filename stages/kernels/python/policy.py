"""Which answers count as right.

| policy | floating-point outputs | TF32 in the eager forward |
|---|---|---|
| `paper` | each element within 1e-2 + 1e-2 |expected| of eager | torch's defaults: convolutions yes, products no |
| `strict` | against a float64 forward: errors within the bounds of error_model.py | no |
| `tf32` | as `strict`, or as products in TF32 | yes |

Where there are no bounds, rms and largest error may be m times eager's own: m is 32 for float32 and float64 and 4 for
half types. Eager's own error counts as at least one rounding: the element type's epsilon times the rms (or the largest
magnitude) of the float64 answer. Integers and booleans must be equal.
"""

import torch

from refusal import Refusal

TOLERANCE = 1e-2
NAMES = ("strict", "tf32", "paper")


class Policy:
    def __init__(self, name: str) -> None:
        if name not in NAMES:
            raise Refusal("internal", f"there is no policy {name!r}: use one of {', '.join(NAMES)}")
        self.name = name
        self.needs_float64 = name != "paper"

    def apply(self) -> None:
        """Sets torch's switches. They belong to the process, so every request that runs the task sets them anew."""
        torch.backends.cuda.matmul.allow_tf32 = self.name == "tf32"
        torch.backends.cudnn.allow_tf32 = self.name != "strict"


def multiple(dtype: torch.dtype) -> int:
    """How many times eager's own error a candidate may have."""
    return 4 if dtype in (torch.float16, torch.bfloat16) else 32
