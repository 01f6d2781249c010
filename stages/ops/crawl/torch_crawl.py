"""Finds torch's operators by introspection and keeps those that run.

Module classes of `torch.nn` are walked, and functions of `torch.nn.functional`, `torch`, `torch.special`,
`torch.linalg` and `torch.fft`. Signatures come from `inspect`, and for functions bound from C++ from the operator
schemas. A draft usage is made from the signature and the recipes; `torch_probe` runs it, and what it learns (ranks,
domain, bounds) is stored.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import torch_recipes as recipes
from torch_probe import Rejected, probe
from torch_structured import STRUCTURED

NAMESPACES = {
    "torch.nn": nn,
    "torch.nn.functional": F,
    "torch": torch,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
INNER = ("torch.special", "torch.linalg", "torch.fft")
SHORT = {"torch.nn": "nn", "torch.nn.functional": "F"}


def crawl_torch(run: Callable[..., Any] = map) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Returns `(kept, left_out)`: lists of dicts. `run` applies a function to many names, like `map`, in order."""
    names, left_out = candidates()
    kept = []
    for (namespace, name), (row, reason, detail) in zip(names, run(try_operator, names), strict=True):
        if row is not None:
            kept.append(row)
        else:
            left_out.append(refusal(f"{namespace}.{name}", reason, detail))
    return kept, left_out


def candidates() -> tuple[list[tuple[str, str]], list[dict[str, str]]]:
    """What is tried, as `(namespace, name)` in the order of the namespaces, and what is another's second name."""
    names, left_out, seen = [], [], {}
    for namespace, module in NAMESPACES.items():
        for name in sorted(dir(module)):
            item = getattr(module, name)
            if not is_candidate(namespace, name, item):
                continue
            operator = f"{namespace}.{name}"
            first = seen.setdefault(id(item), operator)
            if first == operator:
                names.append((namespace, name))
            else:
                left_out.append(refusal(operator, "alias", first))
    return names, left_out


def try_operator(place: tuple[str, str]) -> tuple[dict[str, Any] | None, str | None, str | None]:
    """`(row, None, None)` of one operator, or `(None, reason, detail)`."""
    namespace, name = place
    try:
        return describe(namespace, name, getattr(NAMESPACES[namespace], name)), None, None
    except Rejected as rejection:
        return None, rejection.reason, rejection.detail


def refusal(operator: str, reason: str, detail: str) -> dict[str, str]:
    return {"operator": operator, "library": "torch", "reason": reason, "detail": detail}


def is_candidate(namespace: str, name: str, item: Any) -> bool:
    if name.startswith("_") or name.endswith("_"):
        return False
    if namespace == "torch.nn":
        return inspect.isclass(item) and issubclass(item, nn.Module)
    known = bool(schemas(name, namespace) or namespace.endswith("functional"))
    return callable(item) and not inspect.isclass(item) and known


def schemas(name: str, namespace: str = "torch") -> list[Any]:
    """The operator schemas of a function without output arguments."""
    found = []
    inner = namespace.removeprefix("torch").strip(".")
    prefixes = (f"{inner}_",) if namespace in INNER else ("", "linalg_")
    for qualified in (f"aten::{prefix}{name}" for prefix in prefixes):
        try:
            found += torch._C._jit_get_schemas_for_operator(qualified)
        except RuntimeError:
            continue
        if found:
            break
    return [schema for schema in found if not any(argument.is_out for argument in schema.arguments)]


def describe(namespace: str, name: str, item: Any) -> dict[str, Any]:
    """The table row of one operator; raises Rejected."""
    if f"{namespace}.{name}" not in STRUCTURED:
        refuse_by_name(namespace, name, item)
    family = recipes.family_of(name, namespace)
    refusal = None
    usages = []
    for candidate in drafts(namespace, name, item, family):
        candidate.setdefault("cost", recipes.cost_of(family, name))
        candidate.setdefault("input", "float")
        try:
            usage = probe(candidate)
            if usage not in usages:
                usages.append(usage)
        except Rejected as rejection:
            refusal = refusal or rejection
    if not usages:
        raise refusal or Rejected("no recipe", "no argument recipe fits its signature")
    return {
        "operator": f"{SHORT.get(namespace, namespace)}.{name}",
        "qualified": f"{namespace}.{name}",
        "library": "torch",
        "family": family,
        "usages": usages,
        "summary": summary(item),
    }


def refuse_by_name(namespace: str, name: str, item: Any) -> None:
    document = (getattr(item, "__doc__", None) or "").strip()
    if namespace in INNER:
        refuse_second_name(namespace, name)
    if recipes.RANDOM_NAME.search(name) or "nondeterministic_seeded" in tags(name):
        raise Rejected("random", "draws random numbers")
    if tags(name) & {"data_dependent_output", "dynamic_output_shape"}:
        raise Rejected("data-dependent", "the shape of its output depends on the values of its input")
    # Where the documentation calls a function an alias of its `torch.special` twin, the short name is the usual one.
    alias = re.search(r"\balias (of|for)\b.{0,40}", document[:400], re.IGNORECASE | re.DOTALL)
    if alias and (namespace in INNER or not re.search(r"torch\.(special|nn\.functional)", alias.group(0))):
        raise Rejected("alias", " ".join(document.split())[:120])
    for pattern, reason in recipes.NOT_FOR_MODELS:
        if re.search(pattern, name):
            raise Rejected("view" if reason == "view" else "not for models", reason)
    if namespace == "torch" and recipes.SHADOWED.search(name):
        raise Rejected("alias", f"undocumented twin of torch.nn.functional.{name}")


def refuse_second_name(namespace: str, name: str) -> None:
    """Functions of a sub-namespace that `torch` has as well, under this or another name."""
    if hasattr(torch, name) and callable(getattr(torch, name)):
        raise Rejected("alias", f"torch.{name}")
    for short, document in short_names().items():
        if f"{namespace}.{name}`" in document:
            raise Rejected("alias", f"torch.{short}")


@functools.cache
def short_names() -> dict[str, str]:
    """Functions of `torch` that their documentation calls aliases."""
    documents = {name: str(getattr(getattr(torch, name), "__doc__", None))[:400] for name in dir(torch)}
    return {name: text for name, text in documents.items() if "Alias for :func:`torch." in text}


def tags(name: str) -> set[str]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not schemas(name):
        return set()
    return {tag.name for overload in packet.overloads() for tag in getattr(packet, overload).tags}


def summary(item: Callable[..., Any] | type) -> str:
    """The first sentence of the docstring, as the composer words it."""
    lines = [line.strip() for line in (item.__doc__ or "").splitlines()]
    for index, line in enumerate(lines):
        if line and "->" not in line and not line.startswith(("..", "See ", ":")):
            text = " ".join(lines[index : index + 4])
            text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
            return re.split(r"(?<=[a-z`)])\.(\s|$)", text)[0].strip()[:200]
    return ""


def drafts(namespace: str, name: str, item: Callable[..., Any] | type, family: str) -> list[dict[str, Any]]:
    """Draft usages of an operator, best first."""
    structured = STRUCTURED.get(f"{namespace}.{name}")
    if structured is not None:
        return [dict(candidate) for candidate in structured]
    if namespace == "torch.nn":
        return module_drafts(name, item, family)
    return function_drafts(namespace, name, item, family)


# ---- modules


def module_drafts(name: str, item: Any, family: str) -> list[dict[str, Any]]:
    symbols, positional, keywords = {}, [], []
    for parameter in own_parameters(item.__init__):
        extra = extra_for(name, parameter.name)
        if parameter.default is inspect.Parameter.empty or extra:
            rule = extra or recipes.ARGUMENTS.get(parameter.name)
            if rule is None:
                raise Rejected("no recipe", f"no recipe for argument `{parameter.name}`")
            symbols[parameter.name] = rule
            if keywords or (extra and parameter.default is not inspect.Parameter.empty):
                keywords.append(parameter.name)
            else:
                positional.append(parameter.name)
    for argument, rule in forced_extras(name):
        if argument not in symbols:
            symbols[argument] = rule
            keywords.append(argument)
    arguments = [f"{{{n}}}" for n in positional] + [f"{n}={{{n}}}" for n in keywords]
    construct = f"nn.{name}({', '.join(arguments)})"
    tensors = [p.name for p in own_parameters(item.forward) if p.default is inspect.Parameter.empty]
    operands, ranks = tensor_operands(name, family, tensors[1:])
    call = "{module}(" + ", ".join(["{x}"] + [f"{{{o['name']}}}" for o in operands]) + ")"
    usage = recipes.draft(call, construct, symbols, operands, ranks=ranks or ranks_of(name, family))
    return [usage, {**usage, "call": call + "[0]"}]


def own_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def extra_for(name: str, argument: str) -> dict[str, Any] | None:
    for pattern, extra, rule in recipes.EXTRAS:
        if extra == argument and re.search(pattern, name):
            return rule
    return None


def forced_extras(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Extras of classes that take them through **kwargs, where the signature doesn't show them."""
    if re.search(r"^(RNN|LSTM|GRU)$", name):
        return [(argument, rule) for pattern, argument, rule in recipes.EXTRAS if re.search(pattern, name)]
    return []


def tensor_operands(name: str, family: str, tensors: list[str]) -> tuple[list[dict[str, Any]], list[int] | None]:
    """Operands for the tensors that a call takes beside the stream, and the ranks that they imply."""
    if not tensors:
        return [], None
    if family == "loss":
        for pattern, operands, ranks in recipes.LOSS_TARGETS:
            if re.search(pattern, name):
                return operands, ranks
    if len(tensors) == 1:
        return [recipes.PEER], None
    raise Rejected("no recipe", f"no recipe for tensors {', '.join(tensors)}")


def ranks_of(name: str, family: str) -> list[int]:
    """`…2d` works on rank 4: one batch, one channel and two spatial dimensions."""
    digit = re.search(r"([123])d$", name)
    if digit:
        return [int(digit.group(1)) + 2]
    if family == "recurrent":
        return [2] if name.endswith("Cell") else [3]
    if family == "attention":
        return [3]
    return [2, 3, 4, 5]


# ---- functions


class Argument:
    """An argument of a function, from either kind of signature."""

    def __init__(self, name: str, is_tensor: bool, required: bool) -> None:
        self.name, self.is_tensor, self.required = name, is_tensor, required


def function_drafts(namespace: str, name: str, item: Callable[..., Any], family: str) -> list[dict[str, Any]]:
    found, refusal = [], None
    for arguments in signatures(namespace, name, item):
        try:
            found += draft_of(namespace, name, family, arguments)
        except Rejected as rejection:
            refusal = refusal or rejection
    if not found:
        raise refusal or Rejected("no recipe", "no signature to read")
    return found


def signatures(namespace: str, name: str, item: Callable[..., Any]) -> list[Any]:
    """Argument lists of each overload, those with a `dim` first: a reduction over everything would mix the batch."""
    if inspect.isfunction(item):
        listed = [python_arguments(item)]
        if listed[0] is not None:
            return listed
    overloads = [
        [
            Argument("input" if a.name in ("self", "x") else a.name, str(a.type) == "Tensor", not a.has_default_value())
            for a in schema.arguments
        ]
        for schema in schemas(name, namespace)
        if any(str(result.type) == "Tensor" for result in schema.returns)
    ]
    if not schemas(name, namespace):
        return [[Argument("input", True, True)]]
    if not overloads:
        raise Rejected("returns no tensor", "none of its overloads returns a tensor")
    return sorted(overloads, key=lambda arguments: not any(a.name in ("dim", "dims") for a in arguments))


def python_arguments(item: Callable[..., Any]) -> list[Argument] | None:
    parameters = list(inspect.signature(item).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    required = [p for p in parameters if p.default is p.empty]
    return [
        Argument(
            p.name, "Tensor" in str(p.annotation) or p.name in ("input", "target", "x1", "x2", "mat2"), p in required
        )
        for p in parameters
    ]


def draft_of(namespace: str, name: str, family: str, arguments: list[Argument] | None) -> list[dict[str, Any]]:
    if not arguments or not arguments[0].is_tensor:
        raise Rejected("takes no tensor", "its first argument is not a tensor")
    symbols, texts = {}, ["{x}"]
    tensors = [a.name for a in arguments[1:] if a.is_tensor and a.required]
    operands, ranks = tensor_operands(name, family, tensors)
    texts += [f"{{{operand['name']}}}" for operand in operands]
    keyword = False
    for argument in arguments[1:]:
        extra = extra_for(name, argument.name)
        if argument.is_tensor or not (argument.required or extra):
            keyword = keyword or not argument.required
            continue
        rule = extra or recipes.ARGUMENTS.get(argument.name)
        if rule is None:
            raise Rejected("no recipe", f"no recipe for argument `{argument.name}`")
        keyword = keyword or not argument.required or argument.name in ("dim", "dims")
        symbols[argument.name] = rule
        texts.append(f"{argument.name}={{{argument.name}}}" if keyword else f"{{{argument.name}}}")
    symbols = {n: symbols[n] for n in sorted(symbols, key=lambda n: n == "k")}
    call = f"{SHORT.get(namespace, namespace)}.{name}({', '.join(texts)})"
    usage = recipes.draft(call, None, symbols, operands, ranks=ranks or ranks_of(name, family))
    forms = [usage, {**usage, "call": call + "[0]"}]
    if len(operands) == 1 and operands[0] == recipes.PEER:
        parameter = {**recipes.CHANNEL_PARAMETER, "name": "other"}
        forms.append({**usage, "operands": [parameter]})
    return forms
