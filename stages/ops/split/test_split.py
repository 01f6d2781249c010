"""`ops/split`: what its groups promise, on tables at random; names and sizes; the program as a whole."""

import itertools
import json
import pathlib
import random
import sys

import pytest

pytest.importorskip("pyarrow")

HERE = pathlib.Path(__file__).resolve().parent
OPS = HERE.parent
sys.path[:0] = [str(HERE), str(OPS / "python"), str(OPS.parent / "protocol" / "python")]

import pyarrow.parquet

import stage_driver
from operators import operator_of
from sizes import sizes_of
from split_tasks import Split, Task, difficulty

FAMILIES = {
    "torch.abs": "elementwise",
    "torch.exp": "elementwise",
    "torch.cos": "elementwise",
    "nn.ReLU": "activation",
    "F.relu": "activation",
    "F.gelu": "activation",
    "torch.sum": "reduction",
    "torch.amax": "reduction",
    "nn.LayerNorm": "normalization",
    "nn.GroupNorm": "normalization",
    "F.softmax": "softmax",
    "torch.cumsum": "scan",
    "nn.Softsign": "activation",
}
DIFFICULTY = {"elementwise": 0, "activation": 0, "reduction": 1, "scan": 1.5, "normalization": 2, "softmax": 2}
PARAMS = {
    "groups": ["new_shapes", "new_pairs", "new_operators"],
    "count": 6,
    "train_at_least": 1,
    "seed": 0,
    "exclude": [],
    "reducing": ["reduction", "normalization", "softmax"],
    "difficulty": DIFFICULTY,
    "difficulty_per_operator": 4,
}


def code_of(operators, size):
    return (
        f'"""{" ".join(operators)}"""\nbatch_size = {size}\nfeatures = 64\n\n\ndef get_inputs():\n'
        "    return [torch.randn(batch_size, features)]\n"
    )


def row(operators, size, **more):
    families = [FAMILIES[name] for name in operators]
    return {"ops": json.dumps(operators), "families": json.dumps(families), "code": code_of(operators, size), **more}


def table(seed, count=160):
    """Tasks at random, of one to three operators, with few sizes so that some are equal."""
    rng = random.Random(seed)
    names = sorted(FAMILIES)
    lengths = rng.choices([1, 2, 3], [6, 5, 1], k=count)
    return [row(rng.sample(names, length), rng.choice([16, 32, 48, 64, 128, 256])) for length in lengths]


def split(rows, excluded=("softsign",), **params):
    made = Split([Task(place, each) for place, each in enumerate(rows)], {**PARAMS, **params}, set(excluded))
    made.run()
    return made


def tasks_in(made, rows, group):
    return [Task(place, rows[place]) for place, name in made.groups.items() if name == group]


@pytest.mark.parametrize("seed", range(40))
def test_what_the_groups_promise(seed):
    rows = table(seed)
    made = split(rows, seed=seed)
    train = made.pool
    places = [task.place for task in train]
    everything = sorted([*places, *made.groups, *made.left_out])
    assert everything == list(range(len(rows))), "each task is in one place"

    operators = {operator for task in train for operator in task.operators}
    pairs = {pair for task in train for pair in task.pairs()}
    codes = {task.code for task in train}
    chains = {(task.chain, task.sizes) for task in train}
    new_operators = tasks_in(made, rows, "new_operators")
    new_pairs = tasks_in(made, rows, "new_pairs")
    new_shapes = tasks_in(made, rows, "new_shapes")
    assert new_operators and new_pairs and new_shapes
    assert all(task.operators - operators for task in new_operators)
    for task in new_pairs:
        assert len(task.chain) == 2 and task.operators <= operators and not task.pairs() & pairs
    for task in new_shapes:
        assert task.chain in {chain for chain, _ in chains} and (task.chain, task.sizes) not in chains
    held_out = [*new_operators, *new_pairs, *new_shapes]
    assert not codes & {task.code for task in held_out}
    assert not any("softsign" in task.operators for task in [*train, *held_out])
    # A family has an operator to train on as long as the table has two of it.
    assert {family for task in train for family in task.families} >= {"elementwise", "activation", "reduction"}


def test_the_split_depends_on_the_tasks_and_the_seed_alone():
    rows = table(3)
    shuffled = list(rows)
    random.Random(5).shuffle(shuffled)

    def by_code(made, rows):
        groups = {rows[place]["code"]: group for place, group in made.groups.items()}
        return groups, {task.code for task in made.pool}

    assert by_code(split(rows), rows) == by_code(split(shuffled), shuffled)
    assert by_code(split(rows, seed=1), rows) != by_code(split(rows), rows)


def test_half_of_the_new_pairs_reduce():
    names = sorted(FAMILIES.keys() - {"nn.Softsign", "F.relu"})
    pairs = [row(list(pair), 16) for pair in itertools.permutations(names, 2)]
    made = split(pairs + [row([name], size) for name in names for size in (16, 32, 48)], count=20)
    found = [made.reduces(task) for task in tasks_in(made, pairs, "new_pairs")]
    assert len(found) == 20 and 8 <= sum(found) <= 12


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("nn.ReLU", "F.relu", True),
        ("nn.ReLU", "torch.relu", True),
        ("nn.LeakyReLU", "F.leaky_relu", True),
        ("nn.BatchNorm2d", "F.batch_norm", True),
        ("nn.MSELoss", "F.mse_loss", True),
        ("nn.Conv1d", "nn.Conv2d", True),
        ("nn.BCEWithLogitsLoss", "F.binary_cross_entropy_with_logits", True),
        ("torch.special.expit", "F.sigmoid", True),
        ("torch.linalg.vector_norm", "torch.norm", True),
        ("nn.ReLU", "nn.ReLU6", False),
        ("torch.exp", "torch.exp2", False),
        ("torch.log", "torch.log1p", False),
        ("torch.cummax", "torch.cummin", False),
        ("torch.std", "torch.var", False),
        ("transformers.models.bert.BertSelfOutput", "transformers.models.vit.BertSelfOutput", False),
    ],
)
def test_names_of_one_operator(one, other, same):
    assert (operator_of(one) == operator_of(other)) is same


def test_sizes_are_those_of_the_inputs():
    base = code_of(["nn.ReLU"], 16)
    assert sizes_of(base) == sizes_of(code_of(["torch.exp"], 16)) == "return [torch.randn(16, 64)]"
    assert sizes_of(base) != sizes_of(code_of(["nn.ReLU"], 32))
    other_name = base.replace("batch_size", "rows")
    assert sizes_of(other_name) == sizes_of(base)
    computed = "n = 4\nm = n * 2\n\n\ndef get_inputs():\n    return [torch.rand(m)]\n"
    assert sizes_of(computed) == "return [torch.rand(4 * 2)]"
    assert sizes_of("no python (") == "no python (" and sizes_of("x = 1\n") == "x = 1\n"


def test_difficulty_rises_from_elementwise_to_pairs():
    def of(*operators):
        return difficulty([FAMILIES[name] for name in operators], PARAMS)

    ladder = [
        of("torch.abs"),
        of("torch.sum"),
        of("F.softmax"),
        of("torch.abs", "nn.ReLU"),
        of("torch.abs", "F.softmax"),
    ]
    assert ladder == [0, 1, 2, 4, 6]
    assert difficulty(["unheard of"], PARAMS) == 2
    assert of("torch.abs", "torch.exp", "torch.cos") == 8


def run(folder, rows, prompts=None, measurements=None, **params):
    folder.mkdir()
    inputs = {"tasks": stage_driver.write_table(folder / "tasks.parquet", rows)}
    if measurements is not None:
        inputs["measurements"] = stage_driver.write_table(folder / "measurements.parquet", measurements)
    if prompts is not None:
        (folder / "prompts").mkdir()
        for name, text in prompts.items():
            (folder / "prompts" / name).write_text(text)
        inputs["prompts"] = {"type": "tree", "path": str(folder / "prompts")}
    request = stage_driver.request(folder, "ops/split", {**PARAMS, **params}, inputs, ["train", "held_out", "left_out"])
    return stage_driver.run_program(HERE / "split_tasks.py", request)


def outputs(folder):
    return [
        pyarrow.parquet.read_table(folder / "outputs" / f"{port}.parquet").to_pylist() for port in ("train", "held_out")
    ]


def test_the_program_keeps_columns_and_adds_its_own(tmp_path):
    rows = [
        {**each, "task_id": str(place), "profile_compile_ms": 3.0, "roofline_ms": 2.0 if place else None}
        for place, each in enumerate(table(1))
    ]
    ended = run(tmp_path / "a", rows)
    assert ended.returncode == 0, ended.stderr
    train, held_out = outputs(tmp_path / "a")
    left_out = stage_driver.read_rows(tmp_path / "a", "left_out")
    assert len(train) + len(held_out) + len(left_out) == len(rows)
    assert "group" not in train[0] and {"task_id", "difficulty", "reduces", "headroom"} <= train[0].keys()
    assert all(each["headroom"] == (None if each["task_id"] == "0" else 1.5) for each in [*train, *held_out])
    assert [each["group"] for each in held_out].count("new_pairs") == PARAMS["count"]
    places = [int(each["task_id"]) for each in held_out]
    assert places == sorted(places)
    for each in held_out:
        assert each["reduces"] == bool({"reduction", "normalization", "softmax"} & set(json.loads(each["families"])))
    assert {each["detail"] for each in left_out if each["reason"] == "example"} == {"softsign"}


def test_published_tasks_take_their_families_from_the_measurements(tmp_path):
    rows = table(1)
    samples = [{"ops": each["ops"], "data_source": "torch#1", "code": each["code"]} for each in rows]
    measurements = [
        {"families": each["families"], "data_source": "x", "compiled_ms": 4.0, "roofline_ms": 2.0} for each in rows
    ]
    ended = run(tmp_path / "a", samples, measurements=measurements)
    assert ended.returncode == 0, ended.stderr
    train, held_out = outputs(tmp_path / "a")
    assert all(each["data_source"] == "torch#1" and each["headroom"] == 2.0 for each in [*train, *held_out])
    assert run(tmp_path / "b", samples, measurements=measurements[1:]).returncode == 1
    assert "tasks, and measurements of" in json.loads((tmp_path / "b" / "error.json").read_text())["message"]


def test_the_prompts_own_example_and_further_operators_are_kept_out(tmp_path):
    rows = table(2, 260)
    ended = run(tmp_path / "a", rows, {"example_operator.txt": "cos\n"}, exclude=["F.gelu"])
    assert ended.returncode == 0, ended.stderr
    used = {operator_of(name) for part in outputs(tmp_path / "a") for each in part for name in json.loads(each["ops"])}
    assert not used & {"cos", "gelu"} and "softsign" in used
    # A folder that replaces other prompts alone leaves the built-in example.
    ended = run(tmp_path / "b", rows, {"system.md": "Write."})
    assert ended.returncode == 0, ended.stderr
    used = {operator_of(name) for part in outputs(tmp_path / "b") for each in part for name in json.loads(each["ops"])}
    assert "softsign" not in used and "cos" in used


@pytest.mark.parametrize(
    "rows, params, told",
    [
        (table(1), {"count": 1000}, ["new_shapes: ", "new_pairs: ", "new_operators: ", " of 1000"]),
        ([row([name], 16) for name in sorted(FAMILIES)], {"count": 1}, ["new_shapes: 0 of 1", "new_pairs: 0 of 1"]),
        (table(1), {"train_at_least": 10_000}, ["train: ", " of 10000"]),
    ],
)
def test_what_is_lacking_is_told_at_once(tmp_path, rows, params, told):
    assert run(tmp_path / "a", rows, **params).returncode == 1
    error = json.loads((tmp_path / "a" / "error.json").read_text())
    assert error["kind"] == "input" and all(text in error["message"] for text in told), error
    assert "needs" in error["hint"]


def test_a_group_that_is_not_wanted_stays_in_training(tmp_path):
    # No chain occurs with two sizes: there are no new shapes.
    names = sorted(set(FAMILIES) - {"nn.Softsign"})
    rows = [row(list(chain), 16) for chain in [*itertools.combinations(names, 1), *itertools.combinations(names, 2)]]
    assert run(tmp_path / "a", rows, count=4).returncode == 1
    error = json.loads((tmp_path / "a" / "error.json").read_text())
    assert (
        error["message"] == "too few tasks: new_shapes: 0 of 4"
        and "`groups: [new_pairs, new_operators]`" in error["hint"]
    )
    assert run(tmp_path / "c", rows, count=4, groups=["new_shapes"]).returncode == 1
    assert json.loads((tmp_path / "c" / "error.json").read_text())["hint"].endswith("or a smaller count")
    ended = run(tmp_path / "b", rows, count=4, groups=["new_pairs", "new_operators"])
    assert ended.returncode == 0, ended.stderr
    train, held_out = outputs(tmp_path / "b")
    assert {each["group"] for each in held_out} == {"new_pairs", "new_operators"}
    assert train and "new_shapes" not in ended.stderr


@pytest.mark.parametrize("groups, told", [(["new_shape"], "unknown groups: new_shape"), ([], "groups is empty")])
def test_groups_have_three_names(tmp_path, groups, told):
    assert run(tmp_path / "a", table(1), groups=groups).returncode == 1
    error = json.loads((tmp_path / "a" / "error.json").read_text())
    assert error["message"] == told and "new_shapes, new_pairs, new_operators" in error["hint"]


def test_tables_that_do_not_fit_are_refused(tmp_path):
    for name, rows, told in [
        ("a", [{"code": "", "ops": "[]"}], "the tasks have no column families"),
        ("b", [row(["torch.abs"], 16, group="x")], "the tasks have a column group already"),
        ("c", [{**row(["torch.abs"], 16), "families": "[]"}], "row 0 has 1 ops and 0 families"),
    ]:
        assert run(tmp_path / name, rows).returncode == 1
        assert json.loads((tmp_path / name / "error.json").read_text())["message"] == told
