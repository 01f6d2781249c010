"""`ops/filter`: applies the paper's rules, and those that audits of the released set suggest, to measured tasks.

No task's code runs here, and torch is not needed. `rules` says what is kept and why, `source` reads syntax trees,
`similarity` compares them, `report` counts.
"""

import os

import cuda_agent_stage as stage
import report
import rules
import similarity
import source as task_source

NEEDED = [
    "task_id", "ops", "data_source", "code", "executes_eager", "executes_compiled", "random_ops", "reseed_abs",
    "repeat_abs", "output_min", "output_max", "inputs_repeatable", "finite", "shapes_vary", "output_constant",
    "fresh_rel", "fresh_abs", "inputs_fixed", "sensitivity_rel", "sensitivity_share", "eager_ms", "compiled_ms",
    "compiled_tolerance", "train_error", "train_abs", "train_rel", "error", "error_stage", "error_kind",
]  # fmt: skip


def read_measured(program):
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(program.inputs["measured"]["path"])
    missing = [name for name in NEEDED if name not in table.column_names]
    if missing:
        raise stage.StageError(
            f"the input measured has no column {', '.join(missing)}",
            kind="input",
            hint="wire it to the output `rows` of an ops/measure stage whose tasks have task_id, ops and data_source",
        )
    return table


def read_references(program):
    """(path, fingerprint) of every Python file with a class Model below the input `references`."""
    root = program.input_path("references")
    if root is None:
        return []
    found, skipped = [], 0
    for path in python_files(root):
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        try:
            found.append((os.path.relpath(path, root), similarity.fingerprint(task_source.parse(text))))
        except task_source.NotATask:
            skipped += 1
    if not found:
        raise stage.StageError("no file below the input references defines a class Model", kind="input")
    program.log(f"{len(found)} reference programs, {skipped} other Python files")
    return found


def python_files(root):
    if os.path.isfile(root):
        return [root]
    return sorted(
        os.path.join(folder, name)
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(".py")
    )


def as_row(facts):
    """What the rules see of a table's row."""
    try:
        return rules.Row(facts, task_source.parse(facts["code"] or ""))
    except task_source.NotATask as error:
        return rules.Row(facts, None, str(error))


class Judge:
    """Applies every rule, row by row; remembers what was kept, for duplicates."""

    def __init__(self, params, references):
        self.params, self.references = params, references
        self.skipped = set(params["skip"])
        self.codes, self.programs = {}, {}

    def not_applied(self):
        """Rules that were not applied, each with the reason."""
        without = dict.fromkeys(self.skipped, "left out by the parameter skip")
        if not self.references:
            without.setdefault(rules.CONTAMINATED.name, "no references given")
        return without

    def judge(self, facts):
        """(rule, detail) for each rule that the row fails, in the order of the rules."""
        row = as_row(facts)
        found = rules.failures(row, self.params, self.skipped)
        if row.source is not None:
            found += self.contamination(row)
        # Only a task that is kept can have duplicates, so that a rejected one never takes its twin along.
        if not found and row.source is not None:
            found = self.duplication(row)
        return found

    def contamination(self, row):
        if not self.references or rules.CONTAMINATED.name in self.skipped:
            return []
        limit = self.params["max_similarity"]
        match = similarity.most_similar(similarity.fingerprint(row.source), self.references, limit)
        return [(rules.CONTAMINATED, f"similarity {match[1]:.3f} with {match[0]}")] if match else []

    def duplication(self, row):
        code, name = row.facts["code"], row.facts["task_id"]
        if rules.DUPLICATE.name not in self.skipped and code in self.codes:
            return [(rules.DUPLICATE, f"the same code as {self.codes[code]}")]
        program = similarity.canonical_program(row.source)
        if rules.SEMANTIC_DUPLICATE.name not in self.skipped and program in self.programs:
            return [(rules.SEMANTIC_DUPLICATE, f"the same program as {self.programs[program]}")]
        self.codes.setdefault(code, name)
        self.programs.setdefault(program, name)
        return []


def rejected_row(facts, found):
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
    }


def check_params(params):
    names = {rule.name for rule in rules.ALL_RULES}
    strangers = [name for name in params["skip"] if name not in names]
    if strangers:
        raise stage.StageError(f"skip names no rule: {', '.join(strangers)}", kind="params")
    if params["min_ms"] > params["max_ms"]:
        raise stage.StageError(f"min_ms {params['min_ms']} is above max_ms {params['max_ms']}", kind="params")


def work(program):
    import pyarrow.parquet

    check_params(program.params)
    table = read_measured(program)
    references = read_references(program)
    judge = Judge(program.params, references)
    funnel, kept, rejected = report.Funnel(), [], []
    for index, facts in enumerate(table.to_pylist()):
        found = judge.judge(facts)
        funnel.add(facts["data_source"] or "(none)", [rule.name for rule, _ in found])
        if found:
            rejected.append(rejected_row(facts, found))
        else:
            kept.append(index)
        if index % 100 == 0:
            program.progress(index, table.num_rows, "tasks")
    path = program.output_path("tasks")
    pyarrow.parquet.write_table(table.take(pyarrow.array(kept, pyarrow.int64())), path)
    program.write_table("rejected", rejected)
    summary = funnel.as_json(rules.ALL_RULES, program.params, judge.not_applied(), len(references))
    report.write(program.output_path("report"), summary)
    program.progress(table.num_rows, table.num_rows, "tasks")
    program.log(f"kept {len(kept)} of {table.num_rows} tasks")


if __name__ == "__main__":
    stage.main(work)
