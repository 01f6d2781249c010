"""The report of `ops/filter` and `ops/screen`: how many tasks came in, which rule took how many, what is left.

`funnel.json` is one for the whole chain: `ops/screen` takes the one that `ops/filter` wrote, puts its own rules behind
and the tasks that it keeps in the place of those kept before it, so that the sums hold however many filters there are.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rule import Rule


class Funnel:
    """Counts per category."""

    def __init__(self) -> None:
        self.rows_in, self.kept, self.first, self.failing = {}, {}, {}, {}

    def add(self, category: str, rules: list[str]) -> None:
        """A row of a category with the names of the rules that it fails, in order."""
        self.rows_in[category] = self.rows_in.get(category, 0) + 1
        if not rules:
            self.kept[category] = self.kept.get(category, 0) + 1
            return
        by_category = self.first.setdefault(rules[0], {})
        by_category[category] = by_category.get(category, 0) + 1
        for rule in rules:
            self.failing[rule] = self.failing.get(rule, 0) + 1

    def as_json(self, rules: "list[Rule]", params: dict[str, Any], without: dict[str, str]) -> dict[str, Any]:
        """The whole summary; `without` says of each rule that was not applied why not."""
        return {
            "in": self.rows_in,
            "kept": self.kept,
            "total_in": sum(self.rows_in.values()),
            "total_kept": sum(self.kept.values()),
            "rules": [
                {
                    "name": rule.name,
                    "reason": rule.reason,
                    "applied": rule.name not in without,
                    "not_applied_because": without.get(rule.name),
                    "params": {name: params[name] for name in rule.params},
                    "rejected": sum(self.first.get(rule.name, {}).values()),
                    "rejected_by_category": self.first.get(rule.name, {}),
                    "failing": self.failing.get(rule.name, 0),
                }
                for rule in rules
            ],
        }


def continued(before: dict[str, Any], summary: dict[str, Any], gone_rule: str) -> dict[str, Any]:
    """One funnel out of that of the filter before and of this one, which took what that kept. Tasks that got lost
    between the two count for the rule `gone_rule` of this one. Raises ValueError where there are more than were
    kept."""
    rules = [dict(rule) for rule in summary["rules"]]
    gone = next(rule for rule in rules if rule["name"] == gone_rule)
    for category in sorted(set(before["kept"]) | set(summary["in"])):
        lost = before["kept"].get(category, 0) - summary["in"].get(category, 0)
        if lost < 0:
            raise ValueError(
                f"{summary['in'][category]} tasks of {category}, {before['kept'].get(category, 0)} were kept"
            )
        if lost:
            by_category = gone["rejected_by_category"]
            gone["rejected_by_category"] = {**by_category, category: by_category.get(category, 0) + lost}
            gone["rejected"], gone["failing"] = gone["rejected"] + lost, gone["failing"] + lost
    return {
        **before,
        **{name: value for name, value in summary.items() if name not in ("in", "total_in")},
        "rules": [*before["rules"], *rules],
    }


def rejected_row(facts: dict[str, Any], found: "list[tuple[Rule, str]]") -> dict[str, Any]:
    """A row of the table of rejected tasks: what it takes to look at the task again, and every rule that it fails with
    what that rule found."""
    rule, detail = found[0]
    return {
        "task_id": facts["task_id"],
        "data_source": facts["data_source"],
        "ops": facts["ops"],
        "code": facts["code"],
        "rule": rule.name,
        "reason": rule.reason,
        "detail": detail,
        "rules": [other.name for other, _ in found],
        "details": [text for _, text in found],
    }


def write(folder: str, summary: dict[str, Any]) -> None:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "funnel.json"), "w", encoding="utf-8") as file:
        json.dump(summary, file, indent=1, sort_keys=True)
        file.write("\n")
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as file:
        file.write(markdown(summary))


def _table(header: list[str], rows: list[list[int | str]]) -> str:
    def line(cells: Sequence[object]):
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *(line(row) for row in rows)])


def markdown(summary: dict[str, Any]) -> str:
    categories = sorted(summary["in"])
    rules = [
        [
            rule["name"],
            rule["reason"] + (f" {json.dumps(rule['params'], sort_keys=True)}" if rule["params"] else ""),
            rule["rejected"] if rule["applied"] else f"not applied: {rule['not_applied_because']}",
            rule["failing"] if rule["applied"] else "",
            *(rule["rejected_by_category"].get(category, 0) if rule["applied"] else "" for category in categories),
        ]
        for rule in summary["rules"]
    ]
    flow = [
        ["in", summary["total_in"], *(summary["in"][category] for category in categories)],
        ["kept", summary["total_kept"], *(summary["kept"].get(category, 0) for category in categories)],
    ]
    return (
        "# Which tasks were kept\n\n"
        + _table(["", "total", *categories], flow)
        + f"\n\nReference programs to keep apart from: {summary.get('references') or 'none given'}."
        + "\n\nRules in the order in which they are applied. A task is *rejected* by the first rule that it fails; "
        "*failing* counts every rule that it fails, of those that look at it alone.\n\n"
        + _table(["rule", "reason", "rejected", "failing", *categories], rules)
        + "\n"
        + _similarity(summary.get("similarity"))
        + _degenerate(summary.get("degenerate"), categories)
    )


def _degenerate(found: dict[str, dict[str, int]] | None, categories: list[str]) -> str:
    """Which degenerate answers would have passed for right ones."""
    if not found:
        return ""
    rows = [
        [kind, sum(counts.values()), *(counts.get(category, 0) for category in categories)]
        for kind, counts in sorted(found.items())
    ]
    return (
        "\n## Degenerate answers that the tolerance takes for right\n\n"
        "Tasks by kind of answer, before the rules on them; one task may have several.\n\n"
        + _table(["kind", "tasks", *categories], rows)
        + "\n"
    )


def _similarity(found: dict[str, Any] | None) -> str:
    """How like the references the tasks are."""
    if not found:
        return ""
    rows = [[f"{place['to'] - 0.05:.2f} to {place['to']:.2f}", place["tasks"]] for place in found["histogram"]]
    # By name: a funnel that another stage has read back has its keys in another order.
    columns = ("tasks", "similar", "same_signature", "same_operators", "same_graph")
    counted = [*sorted(found["by_category"].items()), ("all", found["all"])]
    return (
        "\n## Likeness to the references\n\n"
        "Each task beside the reference that its class is most like, tasks that other rules reject among them.\n\n"
        + _table(["similarity", "tasks"], rows)
        + "\n\nTasks above the limit, and tasks with the operators, the run or the graph of a reference; one task may "
        "be in several columns.\n\n"
        + _table(
            ["category", "tasks", "similar", "same operators", "runs the same operators in order", "same graph"],
            [[name, *(counts[column] for column in columns)] for name, counts in counted],
        )
        + f"\n\nReferences traced: {found['traced_references']}; not traced: {len(found['untraced_references'])}.\n"
    )
