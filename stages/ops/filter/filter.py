"""`ops/filter`: applies the paper's rules, and those that audits of the released set suggest, to measured tasks.

No task's code runs here, and torch is needed for the graphs of references only. `rules` says what is kept and why,
`source` and `signature` read syntax trees, `references`, `similarity` and `contamination` keep tasks apart from a
benchmark, `report` counts.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

import canonical
import contamination
import cuda_agent_stage as stage
import reference_graphs
import references as reference_programs
import report
import rules
import source as task_source

if TYPE_CHECKING:
    from rule import Rule

NEEDED = [
    "task_id", "ops", "data_source", "code", "executes_eager", "executes_compiled", "random_ops", "reseed_abs",
    "repeat_abs", "output_min", "output_max", "inputs_repeatable", "finite", "shapes_vary", "output_constant",
    "fresh_rel", "fresh_abs", "inputs_fixed", "sensitivity_rel", "sensitivity_share", "eager_ms", "compiled_ms",
    "compiled_tolerance", "train_error", "train_abs", "train_rel", "error", "error_stage", "error_kind",
    "output_std", "output_top_share", "output_zero_share", "seed_std_ratio", "graph", "graph_operators",
    "inputs",
]  # fmt: skip


def read_measured(program: stage.Program) -> Any:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(program.inputs["measured"]["path"])
    missing = [name for name in NEEDED if name not in table.column_names]
    if missing:
        raise stage.StageError(
            f"the input measured has no column {', '.join(missing)}",
            kind="input",
            hint="wire it to the output `rows` of an ops/measure stage whose tasks have task_id, ops and data_source; "
            "a table of an older ops/measure lacks facts, and `cuda-agent run` measures its tasks again",
        )
    return table


def read_references(program: stage.Program) -> tuple[list[reference_programs.Reference], str | None]:
    """The programs below the input `references`, with what they do where that can be traced; and why it can't."""
    root = program.input_path("references")
    if root is None:
        return [], None
    found, skipped = reference_programs.read(root, program.params["reference_levels"])
    program.log(f"{len(found)} reference programs, {skipped} others without a class Model")
    return found, add_graphs(program, found)


def add_graphs(program: stage.Program, found: list[reference_programs.Reference]) -> str | None:
    """Trace references; returns why that was not done, or None."""
    if not program.params["trace_references"]:
        return "trace_references is off"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    program.log(f"tracing {len(found)} references on the meta device")
    answers = reference_graphs.trace([reference.code for reference in found])
    if answers is None:
        return "tracing the references failed"
    for reference, answer in zip(found, answers, strict=True):
        reference.run = (*answer["operators"], answer["rank"]) if "operators" in answer else None
        reference.graph, reference.problem = answer.get("graph"), answer.get("problem")
    return None


def as_row(facts: dict[str, Any]) -> rules.Row:
    """What the rules see of a table's row."""
    try:
        return rules.Row(facts, task_source.parse(facts["code"] or ""))
    except task_source.NotATask as error:
        return rules.Row(facts, None, str(error))


class Judge:
    """Applies every rule, row by row; remembers what was kept, for duplicates."""

    def __init__(
        self, params: dict[str, Any], references: list[reference_programs.Reference], untraced: str | None = None
    ) -> None:
        self.params, self.untraced = params, untraced
        self.skipped = set(params["skip"])
        self.contamination = contamination.Contamination(references, params, self.skipped)
        self.kept = {rule.name: {} for rule in rules.DUPLICATES}

    def not_applied(self) -> dict[str, str]:
        """Rules that were not applied, each with the reason."""
        without = dict.fromkeys(self.skipped, "left out by the parameter skip")
        if not self.contamination.references:
            for rule in rules.AGAINST_REFERENCES:
                without.setdefault(rule.name, "no references given")
        elif self.untraced:
            without.setdefault(rules.CONTAMINATED_GRAPH.name, self.untraced)
        return without

    def judge(self, facts: dict[str, Any]) -> "list[tuple[Rule, str]]":
        """(rule, detail) for each rule that the row fails, in the order of the rules."""
        row = as_row(facts)
        found = rules.failures(row, self.params, self.skipped) + self.contamination.judge(row)
        # Only a task that is kept can have duplicates, so that a rejected one never takes its twin along.
        if not found and row.source is not None:
            found = self.duplication(row)
        return found

    def duplication(self, row: rules.Row) -> "list[tuple[Rule, str]]":
        forms = {
            rules.DUPLICATE: row.facts["code"],
            rules.SEMANTIC_DUPLICATE: canonical.canonical_program(row.source),
            rules.GRAPH_DUPLICATE: row.facts["graph"],
        }
        for rule, form in forms.items():
            if rule.name not in self.skipped and form is not None and form in self.kept[rule.name]:
                return [(rule, f"{rule.detail} {self.kept[rule.name][form]}")]
        for rule, form in forms.items():
            self.kept[rule.name].setdefault(form, row.facts["task_id"])
        return []


def check_params(params: dict[str, Any]) -> None:
    names = {rule.name for rule in rules.ALL_RULES}
    strangers = [name for name in params["skip"] if name not in names]
    if strangers:
        raise stage.StageError(f"skip names no rule: {', '.join(strangers)}", kind="params")
    if params["min_ms"] > params["max_ms"]:
        raise stage.StageError(f"min_ms {params['min_ms']} is above max_ms {params['max_ms']}", kind="params")


def work(program: stage.Program) -> None:
    import pyarrow.parquet

    check_params(program.params)
    table = read_measured(program)
    references, untraced = read_references(program)
    judge = Judge(program.params, references, untraced)
    funnel, kept, rejected = report.Funnel(), [], []
    for index, facts in enumerate(table.to_pylist()):
        found = judge.judge(facts)
        funnel.add(facts["data_source"] or "(none)", [rule.name for rule, _ in found])
        if found:
            rejected.append(report.rejected_row(facts, found))
        else:
            kept.append(index)
        if index % 100 == 0:
            program.progress(index, table.num_rows, "tasks")
    path = program.output_path("tasks")
    pyarrow.parquet.write_table(table.take(pyarrow.array(kept, pyarrow.int64())), path)
    program.write_table("rejected", rejected)
    program.write_table("similarity", judge.contamination.table)
    summary = funnel.as_json(rules.ALL_RULES, program.params, judge.not_applied())
    summary["references"] = len(references)
    summary["similarity"] = judge.contamination.as_json() if references else None
    report.write(program.output_path("report"), summary)
    program.progress(table.num_rows, table.num_rows, "tasks")
    program.log(f"kept {len(kept)} of {table.num_rows} tasks")


if __name__ == "__main__":
    stage.main(work)
