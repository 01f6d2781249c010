"""How one crawled operator becomes lines of Python.

A *usage* is the JSON document that `ops/crawl` stores for an operator and `ops/synthesize` composes:

    ranks      tensor ranks that the operator takes; dimension 0 is always the batch
    input      "float", or "index" for operators that take integer indices (embeddings)
    symbols    name -> {"value": expression} or {"choices": expression}, with "literal": true where the value is
               written into the code in place of being an init argument
    construct  template of the module's constructor, or null for a function
    call       template of the call; `{x}` is the stream, `{module}` the constructed module
    operands   further tensors: {"name", "shape": [expressions], "fill", "roles": ["input", "parameter"]}
    requires   expressions that must hold
    domain     the values that the stream must have: "any", "positive", "unit", "above_one"
    bounds     [low, high] of the output over a wide range of inputs, null where there is none
    smooth     whether a tiny change of the input makes a tiny change of the output
    cost       {"flops", "bytes", "steps"}: expressions

Expressions are Python over `shape` (the stream's), the symbols bound so far, and in costs also `x`, `y`, `w`, `o`
(elements of input, output, parameters and operands) and `operands` (their shapes).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compose import Extent


SAFE_NAMES = {
    "len": len,
    "min": min,
    "max": max,
    "range": range,
    "list": list,
    "tuple": tuple,
    "sum": sum,
    "math": math,
    "int": int,
    "prod": math.prod,
}


# Options that a usage varies are not written out where they have torch's own default.
DEFAULT_OPTIONS = re.compile(r", (keepdim=False|approximate='none'|bias=True|affine=False)(?=[,)])")


def without_defaults(text: str) -> str:
    return DEFAULT_OPTIONS.sub("", text)


class NotApplicable(Exception):
    """The operator can't follow a stream of this shape."""


def evaluate(expression: float | str, names: dict[str, Any]) -> Any:
    """The value of an expression of a usage; anything that is not text stands for itself."""
    if not isinstance(expression, str):
        return expression
    # One dictionary for both scopes: a comprehension inside an expression sees globals alone.
    return eval(expression, {"__builtins__": {}, **SAFE_NAMES, **names})


@dataclass
class Operand:
    """A tensor that an operator takes beside the stream."""

    name: str
    shape: tuple
    fill: str
    role: str
    scale: float = 1.0


@dataclass
class Bound:
    """An operator with every symbol settled for one shape of the stream."""

    usage: dict
    values: dict
    operands: list
    names: dict = field(default_factory=dict)

    def is_literal(self, symbol: str) -> bool:
        return bool(self.usage["symbols"][symbol].get("literal"))

    def arguments(self) -> list[str]:
        """The symbols that are init arguments, in order."""
        return [name for name in self.values if not self.is_literal(name)]

    def construct_line(self, module: str) -> str | None:
        """The statement that makes the module, or None for a function."""
        template = self.usage.get("construct")
        if template is None:
            return None
        return f"self.{module} = " + without_defaults(template.format_map(self._substitutions("")))

    def call_text(self, stream: str, module: str | None = None) -> str:
        names = self._substitutions("self.")
        names |= {"x": stream, "module": f"self.{module}"}
        for operand in self.operands:
            prefix = "self." if operand.role == "parameter" else ""
            names[operand.name] = prefix + self.names.get(operand.name, operand.name)
        return without_defaults(self.usage["call"].format_map(names))

    def attributes(self) -> list[str]:
        """Init arguments that the call itself reads, which the constructor therefore keeps."""
        call = self.usage["call"]
        return [name for name in self.arguments() if "{" + name + "}" in call]

    def _substitutions(self, prefix: str) -> dict[str, Any]:
        return {
            name: repr(value) if self.is_literal(name) else prefix + self.names.get(name, name)
            for name, value in self.values.items()
        }


def first_choice(options: list[Any], _symbol: str) -> Any:
    return options[0]


def bind(
    usage: dict[str, Any],
    shape: "tuple[Extent | int, ...]",
    choose: Callable[..., Any] = first_choice,
    role: Callable[..., Any] = lambda roles: roles[0],
) -> Bound:
    """Settle an operator's symbols and operands for a stream of `shape`; raises NotApplicable."""
    if len(shape) not in usage["ranks"]:
        raise NotApplicable("rank")
    names = {"shape": tuple(shape)}
    values = {}
    waiting = list(usage["symbols"].items())
    while waiting:
        # A symbol may need one that comes after it, since JSON text may have its keys sorted.
        early = []
        for symbol, rule in waiting:
            try:
                values[symbol] = names[symbol] = _settle(symbol, rule, names, choose)
            except NameError:
                early.append((symbol, rule))
        if len(early) == len(waiting):
            raise NotApplicable(f"no value for {early[0][0]}")
        waiting = early
    for condition in usage.get("requires", ()):
        if not evaluate(condition, names):
            raise NotApplicable(condition)
    operands = [
        Operand(
            operand["name"],
            tuple(evaluate(extent, names) for extent in _extents(operand["shape"], names)),
            str(operand["fill"]).format_map(values),
            role(operand.get("roles", ["input"])),
            float(evaluate(operand.get("scale", 1.0), names)),
        )
        for operand in usage.get("operands", ())
    ]
    return Bound(usage, values, operands)


def _settle(symbol: str, rule: dict[str, Any], names: dict[str, Any], choose: Callable[..., Any]) -> Any:
    if "value" in rule:
        return choose([evaluate(rule["value"], names)], symbol)
    options = list(evaluate(rule["choices"], names))
    if not options:
        raise NotApplicable(f"no choice for {symbol}")
    return choose(options, symbol)


def _extents(shape: list[str] | str, names: dict[str, Any]) -> Any:
    """A shape is a list of expressions, or one expression that gives a tuple."""
    return evaluate(shape, names) if isinstance(shape, str) else shape


def cost(
    bound: Bound,
    shape: "tuple[Extent | int, ...]",
    out_shape: "tuple[Extent | int, ...]",
    weights: int,
    batch_ratio: float = 1.0,
) -> tuple[float, ...]:
    """`(flops, bytes, steps)` of one call. `batch_ratio` scales operands that carry the batch."""
    operand_shapes = [operand.shape for operand in bound.operands]
    names = {
        "shape": tuple(shape),
        "out": tuple(out_shape),
        **bound.values,
        "x": math.prod(shape),
        "y": math.prod(out_shape),
        "w": weights,
        "operands": operand_shapes,
        "o": sum(
            math.prod(operand.shape) * (batch_ratio if operand.role == "input" else 1.0) for operand in bound.operands
        ),
    }
    rules = bound.usage["cost"]
    return tuple(float(evaluate(rules.get(name, 0), names)) for name in ("flops", "bytes", "steps"))
