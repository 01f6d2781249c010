"""What a rule is, for the stages that judge tasks."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: its name, why it is there, the function, the parameters that it reads, and how the detail of one that
    looks at several rows begins."""

    name: str
    reason: str
    check: Callable[..., Any] | None
    params: tuple[str, ...] = ()
    detail: str = ""
