"""`ops/screen`: rejects tasks for which an answer without the work would pass for right, and those without a profile.

`kernels/profile` tries the answers and records which pass; what that means for a task is decided here, so that another
decision profiles nothing again. With the report of `ops/filter` the funnel here is that of the whole chain.

Why any degenerate answer rejects: a policy that is trained on the task finds it. Of `without:x` and `identity:f#n` some
are honest: a bias before a normalisation cancels out whatever its value, a `relu` of what is positive does nothing. To
leave these out of a kernel is right, yet what is measured then is who notices, not who writes the faster kernel, and
nothing tells them from a scale that happens to be 1. So they reject too; `accept` lets single names pass.
"""

import fnmatch
import json
import os
from typing import Any

import cuda_agent_stage as stage
import report
from rule import Rule

NEEDED = ["task_id", "ops", "data_source", "code", "degenerate", "roofline_ms"]
# The joined table has the columns of the measured tasks too; those of the profile then have a prefix.
TIMES, ERRORS = ("profile_eager_ms", "eager_ms"), ("profile_error_kind", "error_kind")
DETAILS = ("profile_error", "error")


class Columns:
    """Which of a table's columns hold the profile's facts."""

    def __init__(self, names: list[str]) -> None:
        # That there is a column of errors is checked below.
        self.error: Any = _first(names, ERRORS)
        self.detail = _first(names, DETAILS)
        self._times = [name for name in TIMES if name in names]
        missing = [name for name in NEEDED if name not in names]
        missing += [choices[0] for choices in (TIMES, ERRORS) if not any(name in names for name in choices)]
        if missing:
            raise stage.StageError(
                f"the input profiled has no column {', '.join(missing)}",
                kind="input",
                hint="wire it to the output `baselines` of a kernels/profile stage (with screen: true) whose tasks are "
                "those of ops/filter",
            )

    def milliseconds(self, facts: dict[str, Any]) -> float | None:
        """Of an eager forward: the profile's figure, or else that of the measured task; None without one."""
        return next((facts[name] for name in self._times if facts[name] is not None), None)


def _first(names: list[str], choices: tuple[str, str]) -> str | None:
    return next((name for name in choices if name in names), None)


def profiled(facts: dict[str, Any], columns: Columns, _: dict[str, Any]) -> str | None:
    if not facts[columns.error]:
        return None
    return f"{facts[columns.error]}: {(columns.detail and facts[columns.detail]) or 'no figures'}"


def screened(facts: dict[str, Any], columns: Columns, _: dict[str, Any]) -> str | None:
    if facts[columns.error] or facts["degenerate"] is not None:
        return None
    return "no answers were tried"


def degenerate(facts: dict[str, Any], _: Columns, params: dict[str, Any]) -> str | None:
    names = rejecting(facts["degenerate"] or [], params)
    return f"passes for right: {', '.join(names)}" if names else None


def above_roofline(facts: dict[str, Any], columns: Columns, params: dict[str, Any]) -> str | None:
    time, bound = columns.milliseconds(facts), facts["roofline_ms"]
    if time is None or bound is None or time >= params["min_over_roofline"] * bound:
        return None
    return f"{time:.3g} ms, and the device's limits allow no less than {bound:.3g} ms"


RULES = [
    Rule("profiled", "The task could be profiled: it runs where kernels are judged.", profiled),
    Rule("screened", "Degenerate answers were tried on it.", screened),
    Rule(
        "degenerate",
        "No answer that does without the work, or a part of it, is taken for right by the policy of the verdicts.",
        degenerate,
        ("reject", "accept"),
    ),
    Rule(
        "above_roofline",
        "The time is not below what the device can reach at all, which would be an error of measuring or counting.",
        above_roofline,
        ("min_over_roofline",),
    ),
]


def kind_of(name: str) -> str:
    """The kind of a degenerate answer: `copy` of `copy:x`."""
    return name.partition(":")[0]


def rejecting(names: list[str], params: dict[str, Any]) -> list[str]:
    """The answers of a task that reject it."""
    return [
        name
        for name in names
        if kind_of(name) in params["reject"]
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in params["accept"])
    ]


def failures(facts: dict[str, Any], columns: Columns, params: dict[str, Any]) -> list[tuple[Rule, str]]:
    """(rule, detail) for each rule that the row fails, in the order of the rules."""
    found = [
        (rule, rule.check(facts, columns, params)) for rule in RULES if rule.check and rule.name not in params["skip"]
    ]
    return [(rule, detail) for rule, detail in found if detail is not None]


def count_kinds(counts: dict[str, dict[str, int]], facts: dict[str, Any]) -> None:
    for kind in {kind_of(name) for name in facts["degenerate"] or []}:
        by_category = counts.setdefault(kind, {})
        category = facts["data_source"] or "(none)"
        by_category[category] = by_category.get(category, 0) + 1


def not_applied(params: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, str]:
    without = dict.fromkeys(params["skip"], "left out by the parameter skip")
    if rows and all(facts["roofline_ms"] is None for facts in rows):
        without.setdefault("above_roofline", "the limits of the device are not known")
    return without


def read_report(program: stage.Program) -> dict[str, Any] | None:
    """The funnel of the filter before, or None."""
    folder = program.input_path("report")
    if folder is None:
        return None
    path = os.path.join(folder, "funnel.json")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise stage.StageError(
            f"the input report has no readable funnel.json: {error}",
            kind="input",
            hint="wire it to the output `report` of the ops/filter stage whose tasks were profiled",
        ) from error


def check_params(params: dict[str, Any]) -> None:
    strangers = [name for name in params["skip"] if name not in {rule.name for rule in RULES}]
    if strangers:
        raise stage.StageError(f"skip names no rule: {', '.join(strangers)}", kind="params")


def whole_funnel(before: dict[str, Any] | None, summary: dict[str, Any]) -> dict[str, Any]:
    if before is None:
        return summary
    try:
        return report.continued(before, summary, "profiled")
    except ValueError as error:
        raise stage.StageError(
            f"the inputs profiled and report do not belong together: {error}",
            kind="input",
            hint="both must come from the same ops/filter stage",
        ) from error


def work(program: stage.Program) -> None:
    import pyarrow.parquet

    params = program.params
    check_params(params)
    table = pyarrow.parquet.read_table(program.inputs["profiled"]["path"])
    columns = Columns(table.column_names)
    before = read_report(program)
    rows = table.to_pylist()
    funnel, kinds, kept, rejected = report.Funnel(), {}, [], []
    for index, facts in enumerate(rows):
        found = failures(facts, columns, params)
        funnel.add(facts["data_source"] or "(none)", [rule.name for rule, _ in found])
        count_kinds(kinds, facts)
        if found:
            rejected.append(report.rejected_row(facts, found) | {"degenerate": facts["degenerate"]})
        else:
            kept.append(index)
    summary = funnel.as_json(RULES, params, not_applied(params, rows)) | {"degenerate": kinds}
    whole = whole_funnel(before, summary)
    pyarrow.parquet.write_table(table.take(pyarrow.array(kept, pyarrow.int64())), program.output_path("tasks"))
    program.write_table("rejected", rejected)
    report.write(program.output_path("report"), whole)
    program.progress(len(rows), len(rows), "tasks")
    program.log(f"kept {len(kept)} of {len(rows)} tasks")


if __name__ == "__main__":
    stage.main(work)
