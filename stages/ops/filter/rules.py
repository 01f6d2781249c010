"""The rules that decide whether a task is kept: each a pure function of one row with its reason.

A rule returns None where the row passes, else a detail for people. Rules are applied in the order of `RULES`, the
cheap and fundamental ones first; the first that a row fails is the reason for which it is rejected. A fact that was
not measured fails the rule that needs it: what is not known to be good is not kept.
"""

import dataclasses
import json
from typing import Any

import signature as operators
import source as task_source
from rule import Rule


@dataclasses.dataclass
class Row:
    """What rules see of a row: the measured facts and the parsed source (None where it does not parse)."""

    facts: dict[str, Any]
    source: Any = None
    problem: str | None = None


def _failure(facts: Any, fallback: Any) -> str:
    where = f" ({facts['error_stage']}, {facts['error_kind']})" if facts.get("error_stage") else ""
    return f"{facts.get('error') or fallback}{where}"


def enough_memory(row: Row, _: dict[str, Any]) -> str | None:
    return _failure(row.facts, "out of memory") if row.facts["error_kind"] == "memory" else None


def enough_time(row: Row, _: dict[str, Any]) -> str | None:
    # Measuring ended there, so nothing else is known of it.
    return _failure(row.facts, "too slow") if row.facts["error_kind"] == "slow" else None


def executes_eager(row: Row, _: dict[str, Any]) -> str | None:
    return None if row.facts["executes_eager"] else _failure(row.facts, "forward does not run")


def executes_compiled(row: Row, _: dict[str, Any]) -> str | None:
    return None if row.facts["executes_compiled"] else _failure(row.facts, "does not run under torch.compile")


def readable(row: Row, _: dict[str, Any]) -> str | None:
    return row.problem


def no_randomness(row: Row, _: dict[str, Any]) -> str | None:
    facts = row.facts
    if facts["random_ops"] is None or facts["reseed_abs"] is None or facts["repeat_abs"] is None:
        return "not measured"
    if facts["random_ops"]:
        return f"forward draws random numbers: {', '.join(facts['random_ops'])}"
    # Where two runs of one seed differ too it is nondeterminism, which the next rule judges.
    if facts["reseed_abs"] > 0 and facts["repeat_abs"] == 0:
        return f"another seed moves the output by {facts['reseed_abs']:.3g}"
    return None


def deterministic(row: Row, params: dict[str, Any]) -> str | None:
    facts = row.facts
    if facts["repeat_abs"] is None or facts["output_max"] is None or facts["output_min"] is None:
        return "not measured, or not finite"
    scale = 1 + max(abs(facts["output_max"]), abs(facts["output_min"]))
    allowed = params["determinism_tolerance"] * scale
    if facts["repeat_abs"] <= allowed:
        return None
    return f"two runs differ by {facts['repeat_abs']:.3g}, allowed is {allowed:.3g}"


def repeatable_inputs(row: Row, _: dict[str, Any]) -> str | None:
    return None if row.facts["inputs_repeatable"] else "the same seed draws other inputs"


def finite(row: Row, _: dict[str, Any]) -> str | None:
    return None if row.facts["finite"] else "an output has NaN or infinities"


def active(row: Row, params: dict[str, Any]) -> str | None:
    top, zero, deviation = row.facts["output_top_share"], row.facts["output_zero_share"], row.facts["output_std"]
    if top is None or zero is None or deviation is None:
        return "not measured, or not finite"
    if top > params["max_top_share"]:
        return f"{top:.1%} of the output's elements are one value"
    if zero > params["max_zero_share"]:
        return f"{zero:.1%} of the output's elements are 0"
    if deviation < params["min_std"]:
        return f"the output's standard deviation is {deviation:.3g}"
    return None


def stable(row: Row, params: dict[str, Any]) -> str | None:
    ratio = row.facts["seed_std_ratio"]
    if ratio is None:
        return "not measured, or a draw's output is constant or not finite"
    if ratio <= params["max_seed_std_ratio"]:
        return None
    return f"the output's standard deviation differs {ratio:.3g} times between draws"


def static_shapes(row: Row, _: dict[str, Any]) -> str | None:
    return "shapes of the outputs depend on values of the inputs" if row.facts["shapes_vary"] is not False else None


def not_constant(row: Row, _: dict[str, Any]) -> str | None:
    return None if row.facts["output_constant"] is False else "each output holds one value only"


def distinguishable(row: Row, params: dict[str, Any]) -> str | None:
    relative, absolute = row.facts["fresh_rel"], row.facts["fresh_abs"]
    if relative is None or absolute is None:
        return "not measured, or not finite"
    if relative < params["min_fresh_rel"]:
        return f"outputs for different inputs differ by {relative:.3g} standard deviations"
    if absolute < params["min_fresh_abs"]:
        return f"outputs for different inputs differ by {absolute:.3g}"
    return None


def varied_inputs(row: Row, _: dict[str, Any]) -> str | None:
    fixed = row.facts["inputs_fixed"]
    if not fixed:
        return "no tensor input" if fixed is not None else "not measured"
    numbers = [str(index) for index, value in enumerate(fixed) if value]
    return f"the same whatever the seed: tensor input {', '.join(numbers)}" if numbers else None


def sensitive(row: Row, params: dict[str, Any]) -> str | None:
    facts = row.facts
    fixed, relative, share = facts["inputs_fixed"], facts["sensitivity_rel"], facts["sensitivity_share"]
    if fixed is None or relative is None or share is None:
        return "not measured"
    for index, is_fixed in enumerate(fixed):
        # Of a fixed input nothing is known, and another rule speaks of it. An infinite difference is null.
        if is_fixed:
            continue
        if relative[index] is not None and relative[index] < params["min_sensitivity"]:
            return f"tensor input {index} moves the output by {relative[index]:.3g} standard deviations"
        if share[index] is not None and share[index] < params["min_activity"]:
            return f"tensor input {index} moves {share[index]:.3%} of the output's elements"
    return None


def eager_time(row: Row, params: dict[str, Any]) -> str | None:
    milliseconds, low, high = row.facts["eager_ms"], params["min_ms"], params["max_ms"]
    if milliseconds is None:
        return "not measured"
    if low <= milliseconds <= high:
        return None
    return f"{milliseconds:.3g} ms is outside {low:g} to {high:g} ms"


def compiled_agrees(row: Row, params: dict[str, Any]) -> str | None:
    difference = row.facts["compiled_tolerance"]
    if difference is None:
        return "not measured, or not finite"
    if difference <= params["compiled_tolerance"]:
        return None
    return f"eager and compiled differ by {difference:.3g}, allowed is {params['compiled_tolerance']:g}"


def modes_agree(row: Row, params: dict[str, Any]) -> str | None:
    facts = row.facts
    if facts["train_error"]:
        return f"fails in train mode: {facts['train_error']}"
    if facts["train_abs"] is None:
        return "not measured, or not finite"
    # A relative difference is null where it is infinite.
    if facts["train_abs"] == 0 or (facts["train_rel"] is not None and facts["train_rel"] <= params["max_train_rel"]):
        return None
    return f"train and eval mode differ by {facts['train_abs']:.3g}"


def declared_names(row: Row) -> list[str] | None:
    """The declared operators, or None where they are no list of names."""
    try:
        names = json.loads(row.facts["ops"])
    except (TypeError, ValueError):
        return None
    fits = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return names if fits else None


def declared_operators(row: Row, _: dict[str, Any]) -> str | None:
    names = declared_names(row)
    if names is None:
        return "ops is not a JSON list of names"
    missing = task_source.undeclared(row.source, names)
    return f"declared and not used: {', '.join(missing)}" if missing else None


def complete_operators(row: Row, _: dict[str, Any]) -> str | None:
    names = declared_names(row)
    if names is None:
        return "ops is not a JSON list of names"
    # A class that was taken out of a library is declared as one operator, whatever it uses.
    if any(name.startswith("transformers.") for name in names):
        return None
    extra = operators.undeclared(row.source, names)
    return f"used and not declared: {operators.text(extra)}" if extra else None


def right_category(row: Row, _: dict[str, Any]) -> str | None:
    category, names = row.facts["data_source"], declared_names(row)
    library, _hash, count = (category or "").partition("#")
    if names is None or library != "torch":
        return None
    return None if count == str(len(names)) else f"{category} with {len(names)} declared operators"


def used_modules(row: Row, _: dict[str, Any]) -> str | None:
    names = task_source.unused_modules(row.source)
    return f"made in __init__ and never used: {', '.join(names)}" if names else None


def used_arguments(row: Row, _: dict[str, Any]) -> str | None:
    for method in ("__init__", "forward"):
        names = task_source.unused_arguments(row.source, method)
        if names:
            return f"arguments that {method} never reads: {', '.join(names)}"
    return None


def live_computation(row: Row, _: dict[str, Any]) -> str | None:
    names = task_source.dead_values(row.source)
    return f"computed in forward and never used: {', '.join(names)}" if names else None


def self_contained(row: Row, _: dict[str, Any]) -> str | None:
    names = task_source.read_globals(row.source)
    return f"Model reads the module's {', '.join(names)} where an argument was meant" if names else None


def no_constant_tensors(row: Row, _: dict[str, Any]) -> str | None:
    made = task_source.constant_tensors(row.source)
    return f"made anew from constants in each call: {', '.join(made)}" if made else None


def no_literal_sizes(row: Row, params: dict[str, Any]) -> str | None:
    sizes = task_source.literal_sizes(row.source, params["max_literal"])
    return f"sizes that are no arguments: {', '.join(sizes)}" if sizes else None


def no_pinned_batch(row: Row, _: dict[str, Any]) -> str | None:
    places = task_source.pinned_batch(row.source)
    return f"the batch size is fixed by {', '.join(places)}" if places else None


def traced(row: Row, _: dict[str, Any]) -> str | None:
    return None if row.facts["graph"] else "not traced"


RULES = [
    Rule("readable", "The code parses and defines a class Model.", readable),
    Rule("enough_memory", "The task fits into the memory that it is given.", enough_memory),
    Rule("enough_time", "The task was not too slow to be measured.", enough_time),
    Rule("executes_eager", "The task runs in eager mode (paper, a).", executes_eager),
    Rule("executes_compiled", "The task runs under torch.compile (paper, a).", executes_compiled),
    Rule("no_randomness", "No inherent randomness: forward draws no random number (paper, b).", no_randomness),
    Rule("finite", "Outputs are finite: NaN equals anything or nothing, depending on who compares.", finite),
    Rule(
        "deterministic",
        "The same inputs give the same outputs, else no verdict on a candidate is stable.",
        deterministic,
        ("determinism_tolerance",),
    ),
    Rule("repeatable_inputs", "Inputs follow the seed, else nobody can check a result.", repeatable_inputs),
    Rule(
        "active",
        "Outputs are spread out: of one that is mostly one value, most can be answered without computing it.",
        active,
        ("max_top_share", "max_zero_share", "min_std"),
    ),
    Rule(
        "stable",
        "Outputs keep their magnitude from draw to draw and for other weights, else no tolerance fits them.",
        stable,
        ("max_seed_std_ratio",),
    ),
    Rule("static_shapes", "The outputs' shapes are fixed, as a kernel's launch needs them.", static_shapes),
    Rule("not_constant", "Outputs are not constant (paper, c).", not_constant),
    Rule(
        "distinguishable",
        "Outputs for different inputs can be told apart numerically (paper, c).",
        distinguishable,
        ("min_fresh_rel", "min_fresh_abs"),
    ),
    Rule("varied_inputs", "Every tensor input is drawn, none is always the same.", varied_inputs),
    Rule(
        "sensitive",
        "Every input matters, else a candidate that ignores one passes.",
        sensitive,
        ("min_sensitivity", "min_activity"),
    ),
    Rule("eager_time", "Eager time is within the range (paper, d).", eager_time, ("min_ms", "max_ms")),
    Rule(
        "compiled_agrees",
        "Eager and compiled results agree, else the baseline computes something else.",
        compiled_agrees,
        ("compiled_tolerance",),
    ),
    Rule(
        "modes_agree",
        "Train and eval mode agree, since protocols differ in the mode that they judge in (not in the paper).",
        modes_agree,
        ("max_train_rel",),
    ),
    Rule("declared_operators", "The code uses every operator that the row declares.", declared_operators),
    Rule(
        "complete_operators",
        "The row declares every operator that the code uses, but for what those that it declares can't do without.",
        complete_operators,
    ),
    Rule("right_category", "The category says how many operators the row declares.", right_category),
    Rule("used_modules", "Every module that __init__ makes is used.", used_modules),
    Rule("used_arguments", "Every argument of __init__ and forward is read.", used_arguments),
    Rule("live_computation", "Nothing is computed in forward and thrown away.", live_computation),
    Rule("self_contained", "Model takes its sizes as arguments and reads no constant of the module.", self_contained),
    Rule(
        "no_constant_tensors",
        "forward makes no tensor from constants alone: a hidden constant that a candidate can precompute.",
        no_constant_tensors,
    ),
    Rule(
        "no_literal_sizes",
        "Sizes are arguments of __init__ or come from inputs, and are no numbers in the code of Model.",
        no_literal_sizes,
        ("max_literal",),
    ),
    Rule("no_pinned_batch", "Neither __init__ nor a buffer nor a view fixes the batch size.", no_pinned_batch),
    Rule("traced", "The graph was traced, else a duplicate in other words can't be seen.", traced),
]

# These look at more than one row and are applied by `filter`, in this order, after the rules above.
CONTAMINATED = Rule(
    "contaminated",
    "The Model class is not like one of the reference programs that are used for evaluation (paper, e).",
    None,
    ("max_similarity",),
)
CONTAMINATED_SIGNATURE = Rule(
    "contaminated_signature",
    "No reference has the same operators, each as often: it would be that problem at other sizes, whatever its tree.",
    None,
)
CONTAMINATED_GRAPH = Rule(
    "contaminated_graph",
    "No reference calls the same operators in the same order when it runs, on inputs with as many dimensions.",
    None,
)
DUPLICATE = Rule(
    "duplicate", "The code is not byte-identical to that of an earlier kept task.", None, detail="the same code as"
)
SEMANTIC_DUPLICATE = Rule(
    "semantic_duplicate",
    "The code is not an earlier kept task's but for names, layout, comments, annotations and forms of import.",
    None,
    detail="the same program as",
)
GRAPH_DUPLICATE = Rule(
    "graph_duplicate",
    "The traced graph is not an earlier kept task's: the same operators, constants, wiring, shapes and types.",
    None,
    detail="the same graph as",
)
AGAINST_REFERENCES = [CONTAMINATED, CONTAMINATED_SIGNATURE, CONTAMINATED_GRAPH]
DUPLICATES = [DUPLICATE, SEMANTIC_DUPLICATE, GRAPH_DUPLICATE]
ALL_RULES = [*RULES, *AGAINST_REFERENCES, *DUPLICATES]

NEED_SOURCE = {
    "declared_operators",
    "complete_operators",
    "used_modules",
    "used_arguments",
    "live_computation",
    "self_contained",
    "no_constant_tensors",
    "no_literal_sizes",
    "no_pinned_batch",
}


def failures(row: Row, params: dict[str, Any], skipped: set[str]) -> list[tuple[Rule, str]]:
    """Every rule of `RULES` that the row fails, as (rule, detail), in order."""
    found = []
    for rule in RULES:
        if rule.name in skipped or (row.source is None and rule.name in NEED_SOURCE):
            continue
        detail = rule.check(row, params) if rule.check else None
        if detail is not None:
            found.append((rule, detail))
    return found
