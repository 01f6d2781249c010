"""What planning has to know of each operator: which ranks it takes and gives. Found by running it."""

from typing import Any

import torch

from operator_binding import NotApplicable, bind
from operator_scope import MODULE, operator_scope
from plan import Member

SHAPES = {2: (4, 64), 3: (4, 16, 64), 4: (4, 16, 24, 24), 5: (4, 8, 12, 12, 12)}


def member_of(row: dict[str, Any]) -> Member:
    """The `Member` of a crawled operator with its usages as lists."""
    usages = row["usages"]
    ranks = {}
    for usage in usages:
        for rank in usage["ranks"]:
            out = rank_after(usage, rank)
            if out is not None:
                ranks.setdefault(rank, set()).add(out)
    return Member(
        row["operator"],
        row["family"],
        {rank: sorted(out) for rank, out in ranks.items()},
        first_only=all(usage["domain"] != "any" or not usage["smooth"] for usage in usages),
        indices=all(usage["input"] == "index" for usage in usages),
    )


def rank_after(usage: dict[str, Any], rank: int) -> int | None:
    """The rank of an operator's output for a stream of a rank, or None where it does not run at the shape tried."""
    shape = SHAPES[rank]
    try:
        bound = bind(usage, shape)
        with torch.no_grad():
            scope = operator_scope(bound, lambda operand: zeros(operand.shape, operand.fill))
            scope["x"] = zeros(shape, usage["input"])
            return eval(bound.call_text("x", MODULE), scope).dim()
    except (NotApplicable, RuntimeError, ValueError, LookupError, TypeError, NameError, AssertionError):
        return None


def zeros(shape: tuple[int, ...], fill: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64 if fill.startswith("index") else torch.float32)
