"""`ops/split`: tasks to train on, and held-out ones in up to three groups that are disjoint from them by construction.

The groups are taken in an order in which none undoes another: operators first, since everything with a new operator
leaves the pool; then pairs, all tasks with which leave it; then sizes. What is held out is chosen in the order of a
digest of the seed and its name, until there are enough tasks. What is left in the pool is trained on.

A pair is held out only while both of its operators stay in the pool with others or alone, and of the sizes of one chain
of operators at most half, so that what `new_pairs` and `new_shapes` say holds of the pool at the end. `test_split.py`
checks it on tables at random.
"""

import collections
import hashlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cuda_agent_stage as stage
from operators import operator_of
from sizes import sizes_of

if TYPE_CHECKING:
    import pyarrow

GROUPS = ("new_shapes", "new_pairs", "new_operators")
HERE = os.path.dirname(os.path.abspath(__file__))
PROMPTS = os.path.join(HERE, "..", "..", "agent", "prompts")
EXAMPLE = "example_operator.txt"
ADDED = ("group", "difficulty", "reduces", "headroom")
WHAT_HELPS = {
    "new_shapes": "several tasks for each operator, as with more tasks in all or fewer families",
    "new_pairs": "more tasks of two operators whose operators occur in other tasks too",
    "new_operators": "more tasks; of each family one operator at least stays in training",
}


class Task:
    """A row as the split sees it."""

    def __init__(self, place: int, row: dict[str, Any]) -> None:
        self.place, self.code = place, row["code"]
        self.names, self.families = json.loads(row["ops"]), json.loads(row["families"])
        if not self.names or len(self.names) != len(self.families):
            raise stage.StageError(
                f"row {place} has {len(self.names)} ops and {len(self.families)} families", kind="input"
            )
        self.chain = tuple(operator_of(name) for name in self.names)
        self.operators = frozenset(self.chain)
        self.sizes = sizes_of(self.code)

    def pairs(self) -> set[tuple[str, str]]:
        ordered = sorted(self.operators)
        return {(one, other) for index, one in enumerate(ordered) for other in ordered[index + 1 :]}


class Split:
    """The pool of tasks, and what is taken out of it."""

    def __init__(self, tasks: list[Task], params: dict[str, Any], excluded: set[str]) -> None:
        self.params = params
        self.wanted = [group for group in GROUPS if group in params["groups"]]
        self.groups = {}  # place -> group
        self.left_out = {}  # place -> (reason, detail)
        self.pool = self._usable(tasks, excluded)

    def _usable(self, tasks: list[Task], excluded: set[str]) -> list[Task]:
        codes, pool = set(), []
        for task in tasks:
            if task.operators & excluded:
                self.left_out[task.place] = ("example", ", ".join(sorted(task.operators & excluded)))
            elif task.code in codes:
                self.left_out[task.place] = ("duplicate", "")
            else:
                codes.add(task.code)
                pool.append(task)
        return pool

    def order(self, *names: str) -> str:
        """A number to sort by that depends on the seed and the names alone."""
        return hashlib.blake2b(json.dumps([self.params["seed"], *names]).encode(), digest_size=16).hexdigest()

    def reduces(self, task: Task) -> bool:
        return any(family in self.params["reducing"] for family in task.families)

    def run(self) -> None:
        takes = {
            "new_operators": self._with_new_operators,
            "new_pairs": self._with_new_pairs,
            "new_shapes": self._with_new_shapes,
        }
        for group, take in takes.items():
            if group in self.wanted:
                self._hold_out(group, take())

    def _hold_out(self, group: str, tasks: list[Task]) -> None:
        """`count` of the tasks, by their digests; the others are left out, since nothing of them may be trained on."""
        tasks = sorted(tasks, key=lambda task: self.order("task", task.code))
        for number, task in enumerate(tasks):
            if number < self.params["count"]:
                self.groups[task.place] = group
            else:
                self.left_out[task.place] = ("more than wanted", group)

    def _take(self, wanted: Callable[..., Any]) -> list[Task]:
        """Takes the tasks for which `wanted` holds out of the pool."""
        taken = [task for task in self.pool if wanted(task)]
        self.pool = [task for task in self.pool if not wanted(task)]
        return taken

    def _with_new_operators(self) -> list[Task]:
        families = collections.defaultdict(set)
        for task in self.pool:
            for operator, family in zip(task.chain, task.families, strict=True):
                families[family].add(operator)
        tasks_of = collections.defaultdict(set)
        for task in self.pool:
            for operator in task.operators:
                tasks_of[operator].add(task.place)
        held, places = set(), set()
        for operator in sorted(tasks_of, key=lambda name: self.order("operator", name)):
            if len(places) >= self.params["count"]:
                break
            if all(members - held - {operator} for members in families.values() if operator in members):
                held.add(operator)
                places |= tasks_of[operator]
        return self._take(lambda task: task.operators & held)

    def _with_new_pairs(self) -> list[Task]:
        tasks_of = collections.defaultdict(list)
        for task in self.pool:
            for pair in task.pairs():
                tasks_of[pair].append(task)
        # Tasks that a chain of two operators makes are what the group is made of.
        two = {pair: [task for task in tasks if len(task.chain) == 2] for pair, tasks in tasks_of.items()}
        queues = {True: [], False: []}
        for pair in sorted(
            (pair for pair in two if two[pair]), key=lambda pair: self.order("pair", *pair), reverse=True
        ):
            queues[any(self.reduces(task) for task in two[pair])].append(pair)
        uses = collections.Counter(operator for task in self.pool for operator in task.operators)
        gone, taken, turn = set(), [], True
        while len(taken) < self.params["count"] and (queues[True] or queues[False]):
            turn = (not turn) if queues[not turn] else turn
            pair = queues[turn].pop() if queues[turn] else queues[not turn].pop()
            leaving = [task for task in tasks_of[pair] if task.place not in gone]
            lost = collections.Counter(operator for task in leaving for operator in task.operators)
            # Each operator stays in the pool, those of tasks that leave on account of an earlier pair among them.
            if any(uses[operator] <= count for operator, count in lost.items()):
                continue
            uses -= lost
            gone |= {task.place for task in leaving}
            taken += [task for task in leaving if len(task.chain) == 2]
            for task in leaving:
                if len(task.chain) != 2:
                    self.left_out[task.place] = ("held-out pair", " + ".join(pair))
        self._take(lambda task: task.place in gone)
        return taken

    def _with_new_shapes(self) -> list[Task]:
        sizes = collections.defaultdict(lambda: collections.defaultdict(list))
        for task in self.pool:
            sizes[task.chain][task.sizes].append(task)
        classes = [(chain, size) for chain, of_chain in sizes.items() for size in of_chain]
        classes.sort(key=lambda item: self.order("sizes", *item[0], item[1]))
        taken, held = [], collections.Counter()
        for chain, size in classes:
            if len(taken) >= self.params["count"]:
                break
            if held[chain] < len(sizes[chain]) // 2:
                held[chain] += 1
                taken += sizes[chain][size]
        places = {task.place for task in taken}
        return self._take(lambda task: task.place in places)


def difficulty(families: list[str], params: dict[str, Any]) -> float:
    """Of the hardest operator, and so much more for each further one."""
    scale = params["difficulty"]
    hardest = max(scale.values(), default=0)
    levels = [scale.get(family, hardest) for family in families]
    return float(max(levels) + params["difficulty_per_operator"] * (len(levels) - 1))


def headroom(row: dict[str, Any]) -> float | None:
    """kernels/profile's time of the compiled baseline, without it ops/measure's, over the roofline."""
    compiled, least = row.get("profile_compile_ms") or row.get("compiled_ms"), row.get("roofline_ms")
    return compiled / least if compiled and least else None


def example_operators(folder: str) -> list[str]:
    """The names in the file of the prompt's example: one, or several divided by white space."""
    path = os.path.join(folder, EXAMPLE)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().split()
    except OSError as error:
        raise stage.StageError(f"the prompt's example has no {EXAMPLE}: {error}", kind="input") from error


def excluded(program: stage.Program) -> set[str]:
    folder = program.input_path("prompts")
    # A folder of prompts replaces files of the built-in one by name, this one perhaps not.
    own = folder and os.path.exists(os.path.join(folder, EXAMPLE))
    names = example_operators(folder if folder and own else PROMPTS) + list(program.params["exclude"])
    return {operator_of(name) for name in names}


def with_measurements(table: "pyarrow.Table", path: str) -> "pyarrow.Table":
    """The tasks with the further columns of another table of the same rows."""
    import pyarrow.parquet

    more = pyarrow.parquet.read_table(path)
    if more.num_rows != table.num_rows:
        raise stage.StageError(
            f"{table.num_rows} tasks, and measurements of {more.num_rows}",
            kind="input",
            hint="both must be outputs of the same ops/publish stage",
        )
    for name in more.column_names:
        if name not in table.column_names:
            table = table.append_column(name, more[name])
    return table


def check_groups(groups: list[Any]) -> None:
    unknown = [str(group) for group in groups if group not in GROUPS]
    if unknown or not groups:
        raise stage.StageError(
            f"unknown groups: {', '.join(unknown)}" if unknown else "groups is empty",
            kind="input",
            hint=f"groups is a list of {', '.join(GROUPS)}",
        )


def check_columns(table: "pyarrow.Table") -> None:
    missing = [name for name in ("code", "ops", "families") if name not in table.column_names]
    if missing:
        raise stage.StageError(
            f"the tasks have no column {', '.join(missing)}",
            kind="input",
            hint="wire tasks to ops/synthesize, or to a stage that keeps its columns",
        )
    taken = [name for name in ADDED if name in table.column_names]
    if taken:
        raise stage.StageError(f"the tasks have a column {', '.join(taken)} already", kind="input")


def check_counts(split: Split, params: dict[str, Any]) -> None:
    """Every group that lacks tasks, at once."""
    counts = collections.Counter(split.groups.values())
    short = [group for group in split.wanted if counts[group] < params["count"]]
    lacking = [f"{group}: {counts[group]} of {params['count']}" for group in short]
    hints = [f"{group} needs {WHAT_HELPS[group]}" for group in short]
    if short:
        others = [group for group in split.wanted if group not in short]
        hints.append(
            f"or hold out the others alone: `groups: [{', '.join(others)}]`" if others else "or a smaller count"
        )
    if len(split.pool) < params["train_at_least"]:
        lacking.append(f"train: {len(split.pool)} of {params['train_at_least']}")
        hints.append("train needs more tasks, or a smaller count")
    if lacking:
        raise stage.StageError(f"too few tasks: {'; '.join(lacking)}", kind="input", hint="; ".join(hints))


def with_columns(
    table: Any,
    rows: list[dict[str, Any]],
    places: list[int],
    params: dict[str, Any],
    groups: dict[int, str] | None = None,
) -> Any:
    """The rows at `places`, with what the split adds."""
    import pyarrow

    rows = [rows[place] for place in places]
    families = [json.loads(row["families"]) for row in rows]
    reducing = set(params["reducing"])
    table = table.take(pyarrow.array(places, pyarrow.int64()))
    if groups is not None:
        table = table.append_column("group", pyarrow.array([groups[place] for place in places], pyarrow.string()))
    levels = [difficulty(names, params) for names in families]
    table = table.append_column("difficulty", pyarrow.array(levels, pyarrow.float64()))
    table = table.append_column(
        "reduces", pyarrow.array([bool(reducing & set(names)) for names in families], pyarrow.bool_())
    )
    return table.append_column("headroom", pyarrow.array([headroom(row) for row in rows], pyarrow.float64()))


def work(program: stage.Program) -> None:
    import pyarrow.parquet

    params = program.params
    check_groups(params["groups"])
    table = pyarrow.parquet.read_table(program.inputs["tasks"]["path"])
    if program.inputs.get("measurements"):
        table = with_measurements(table, program.inputs["measurements"]["path"])
    check_columns(table)
    rows = table.to_pylist()
    split = Split([Task(place, row) for place, row in enumerate(rows)], params, excluded(program))
    split.run()
    check_counts(split, params)
    train = [task.place for task in split.pool]
    held_out = sorted(split.groups)
    pyarrow.parquet.write_table(with_columns(table, rows, train, params), program.output_path("train"))
    pyarrow.parquet.write_table(
        with_columns(table, rows, held_out, params, split.groups), program.output_path("held_out")
    )
    program.write_table(
        "left_out",
        [
            {"ops": rows[place]["ops"], "code": rows[place]["code"], "reason": reason, "detail": detail}
            for place, (reason, detail) in sorted(split.left_out.items())
        ],
    )
    report(program, split)


def report(program: stage.Program, split: Split) -> None:
    counts = collections.Counter(split.groups.values())
    reasons = collections.Counter(reason for reason, _ in split.left_out.values())
    operators = {operator for task in split.pool for operator in task.operators}
    for name, count in [("train", len(split.pool)), *sorted(counts.items()), ("left_out", len(split.left_out))]:
        program.metric(f"split/{name}", count)
    program.log(
        f"{len(split.pool)} tasks of {len(operators)} operators to train on; held out: "
        + ", ".join(f"{counts[group]} {group}" for group in split.wanted)
        + f"; left out: {', '.join(f'{count} {reason}' for reason, count in sorted(reasons.items())) or 'none'}"
    )


if __name__ == "__main__":
    stage.main(work)
