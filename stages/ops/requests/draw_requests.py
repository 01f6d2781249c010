"""`ops/requests`: draws the operators of each task that a language model is to write.

Request i depends on the operators, the parameters and i, never on the count. Operators are drawn family by family from
those that take tensors of one rank, so that they can follow one another; how they are put together is the model's part.
"""

import ast
import json
import random
import re
from typing import Any

import cuda_agent_stage as stage
from operator_binding import evaluate
from schedule import schedule, usable_shares

RANK_WEIGHTS = {2: 3, 3: 4, 4: 5, 5: 1}
OTHER_FAMILY = 2
# Two of one of these in a row are redundant.
NO_NEIGHBOURS = {"activation", "arrangement", "ordering", "padding", "pooling", "resampling", "scan", "softmax"}
ATTEMPTS = 200
SUMMARY_CHARACTERS = 200
# A stream for which expressions of a usage are worked out, as examples.
EXTENTS = (16, 32, 48, 48, 48)
SHAPE = re.compile(r"\bshape\b")
DOMAINS = {
    "positive": "takes positive values only",
    "unit": "takes values between -1 and 1 only",
    "above_one": "takes values above 1 only",
}


class Drawer:
    """The operators by family, with the weights that they are drawn by."""

    def __init__(
        self, operators: list[dict[str, str]], families: dict[str, int], operator_weights: dict[str, Any]
    ) -> None:
        self.families, self.operator_weights = families, operator_weights
        self.operators = []
        for row in sorted(operators, key=lambda row: row["operator"]):
            usages = json.loads(row["usages"])
            if self._weight(row) > 0 and usages:
                self.operators.append({**row, "usages": usages})

    def _weight(self, row: dict[str, str]) -> float:
        family = float(self.families.get(row["family"], OTHER_FAMILY))
        return family * float(self.operator_weights.get(row["operator"], 1.0))

    def draw(self, rng: random.Random, length: int) -> tuple[list[dict[str, Any]], int] | None:
        """`length` operators and the rank that all of them take, or None where no attempt found any."""
        for _ in range(ATTEMPTS):
            rank = rng.choices(list(RANK_WEIGHTS), list(RANK_WEIGHTS.values()))[0]
            chain = []
            for _ in range(length):
                pool = [row for row in self.operators if follows(row, rank, chain)]
                if not pool:
                    break
                chain.append(self._pick(rng, pool))
            else:
                return chain, rank
        return None

    def _pick(self, rng: random.Random, pool: list[dict[str, Any]]) -> dict[str, Any]:
        """A family by its weight, then one of its operators by theirs: a large family is drawn no more often."""
        names = sorted({row["family"] for row in pool})
        family = rng.choices(names, [float(self.families.get(name, OTHER_FAMILY)) for name in names])[0]
        members = [row for row in pool if row["family"] == family]
        weights = [float(self.operator_weights.get(row["operator"], 1.0)) for row in members]
        return rng.choices(members, weights)[0]


def follows(row: dict[str, Any], rank: int, chain: list[dict[str, Any]]) -> bool:
    """Whether an operator can stand at the end of `chain`."""
    usages = [usage for usage in row["usages"] if rank in usage["ranks"]]
    if not usages:
        return False
    if not chain:
        return True
    if any(row["operator"] == other["operator"] for other in chain):
        return False
    if row["family"] == chain[-1]["family"] and row["family"] in NO_NEIGHBOURS:
        return False
    # What needs integers or values of a certain sign can only come first, where the inputs are drawn to suit it.
    return any(usage["input"] == "float" and usage["domain"] == "any" for usage in usages)


def literal(expression: str | None) -> list[int] | None:
    """The value of an expression that is a plain Python value, or None."""
    try:
        return ast.literal_eval(expression) if isinstance(expression, str) else expression
    except (ValueError, SyntaxError):
        return None


def choices_of(rule: dict[str, str], rank: int) -> list[int] | None:
    """Values that a symbol may have: those of a plain list, or of an expression for a stream like EXTENTS."""
    choices = literal(rule.get("choices"))
    if choices is not None or "choices" not in rule:
        return choices
    try:
        return list(evaluate(rule["choices"], {"shape": EXTENTS[:rank]}))
    except (NameError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return None  # It depends on other symbols.


def symbol_notes(usage: dict[str, Any], rank: int) -> tuple[dict[str, Any], list[str]]:
    """`(substitutions, notes)`: what stands for each symbol in the templates, and what is said about its values."""
    texts, notes = {}, []
    for name, rule in usage["symbols"].items():
        value, choices = literal(rule.get("value")), choices_of(rule, rank)
        if not rule.get("literal") and value is None and "shape" in str(rule.get("value")):
            notes.append(f"`{name}` is `{re.sub(SHAPE, 'x.shape', rule['value'])}`")
        if rule.get("literal"):
            value = value if choices is None else choices[0]
            texts[name] = repr(value) if value is not None else name
        else:
            texts[name] = name
            if choices:
                notes.append(f"`{name}` such as {', '.join(repr(choice) for choice in choices[:3])}")
    for operand in usage["operands"]:
        texts[operand["name"]] = operand["name"]
        what = "a further input" if operand["roles"][0] == "input" else "an `nn.Parameter` of the model"
        notes.append(f"`{operand['name']}` is {what}")
    return texts, notes


def describe(row: dict[str, Any], rank: int) -> str:
    """One Markdown item: what the operator is, and how it is constructed and called on tensors of this rank."""
    usage = next(usage for usage in row["usages"] if rank in usage["ranks"])
    texts, notes = symbol_notes(usage, rank)
    call = usage["call"].format_map({**texts, "x": "x", "module": "module"})
    parts = [f"- `{row['operator']}`"]
    summary = " ".join((row["summary"] or "").split())[:SUMMARY_CHARACTERS]
    if summary:
        parts.append(f": {summary.rstrip('.')}")
    parts.append(".")
    if usage.get("construct"):
        parts.append(f" Constructed as `{usage['construct'].format_map(texts)}`, called as `{call}`.")
    else:
        parts.append(f" Called as `{call}`.")
    if usage["input"] == "index":
        notes.append("takes integer indices")
    if usage["domain"] in DOMAINS:
        notes.append(DOMAINS[usage["domain"]])
    ranks = sorted({rank for usage in row["usages"] for rank in usage["ranks"]})
    notes.append(f"takes tensors with {', '.join(map(str, ranks))} dimensions, the batch first")
    return "".join(parts) + " " + "; ".join(notes) + "."


def request(drawer: Drawer, seed: int, index: int, category: str) -> dict[str, Any]:
    drawn = drawer.draw(random.Random(f"{seed}/{index}/{category}"), int(category[-1]))
    if drawn is None:
        raise stage.StageError(
            f"no {category[-1]} operators that can follow one another were found (index {index})",
            kind="params",
            hint="`families` and `operator_weights` leave too few operators; the crawled table must hold torch's",
        )
    chain, rank = drawn
    return {
        "task_id": f"llm-{seed}-{index:06d}",
        "index": index,
        "ops": json.dumps([row["operator"] for row in chain]),
        "families": json.dumps([row["family"] for row in chain]),
        "data_source": category,
        "operators": "\n".join(describe(row, rank) for row in chain),
    }


def check_weights(params: dict[str, Any]) -> None:
    for name in ("shares", "families", "operator_weights"):
        for key, value in params[name].items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise stage.StageError(f"{name}: the weight of {key} is {value!r}, not a number from 0", kind="params")


def work(program: stage.Program) -> None:
    params = program.params
    check_weights(params)
    rows = program.read_table("operators", ["operator", "library", "family", "summary", "usages"])
    drawer = Drawer([row for row in rows if row["library"] == "torch"], params["families"], params["operator_weights"])
    shares = usable_shares(params["shares"], params["max_ops"], False)
    if not shares:
        raise stage.StageError(
            "no category has a share",
            kind="params",
            hint=f"`shares` must weigh one of torch#1 … torch#{params['max_ops']}",
        )
    plan = schedule(shares, params["count"])
    requests = [request(drawer, params["seed"], index, category) for index, (category, _) in enumerate(plan)]
    for category in shares:
        program.metric(f"requests/{category}", sum(row["data_source"] == category for row in requests))
    program.write_table("requests", requests)


if __name__ == "__main__":
    stage.main(work)
