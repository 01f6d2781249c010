"""`ops/synthesize`: the schedule, the plan and the sizes by property, files by their syntax trees, tasks by
running them."""

import ast
import collections
import json
import pathlib
import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = pathlib.Path(__file__).resolve().parent
OPS = HERE.parent
sys.path[:0] = [str(HERE), str(OPS / "crawl"), str(OPS / "python"), str(OPS.parent / "protocol" / "python")]

import itertools

import cuda_agent_stage as stage
import stage_driver
from compose import far_share, varies
from degenerate import constant_fault, fault
from distribution import DEFAULTS, spread
from members import member_of
from plan import BLOCK, FAMILY_WEIGHTS, NO_NEIGHBOURS, Planner, first_order, start_ranks, stratified
from schedule import CATEGORIES, PAPER_SHARES, schedule, usable_shares
from sizing import NICE_BATCHES, Window, batch_for
from synthesize import HOPELESS, NoTask, Synthesizer, check
from torch_crawl import describe

PARAMS = {**DEFAULTS, "count": 14, "seed": 7, "device": "cpu"}
WEIGHTS = st.dictionaries(st.sampled_from(CATEGORIES), st.floats(0.01, 100), min_size=1)
NAMES = {
    "torch.nn": "Linear Conv1d Conv2d LayerNorm GroupNorm ReLU Softplus Softmax MaxPool2d AvgPool1d GRU L1Loss "
    "Embedding ReflectionPad2d Upsample GLU Bilinear CosineSimilarity",
    "torch.nn.functional": "linear gelu layer_norm softmax mse_loss pad scaled_dot_product_attention",
    "torch": "matmul bmm exp sin mul add floor log sum amax cumsum sort roll",
}
CLASS = """class Scale(nn.Module):

    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states):
        return self.weight * torch.tanh(hidden_states)"""


@pytest.fixture(scope="session")
def operators():
    torch.set_num_threads(1)
    modules = {"torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional, "torch": torch}
    rows = [
        describe(space, name, getattr(modules[space], name)) for space, names in NAMES.items() for name in names.split()
    ]
    rows = [{**row, "version": torch.__version__, "source": None, "path": None} for row in rows]
    rows += [transformers_class(f"Scale{number}", CLASS.replace("Scale", f"Scale{number}")) for number in range(3)]
    return [{**row, "usages": json.dumps(row["usages"])} for row in rows]


def transformers_class(name, source):
    usage = {
        "class": name,
        "imports": [],
        "call": "hidden_states",
        "config": None,
        "result": None,
        "inputs": [{"name": "hidden_states", "shape": ["batch", "tokens", "hidden_size"], "fill": "randn"}],
        "arguments": {"hidden_size": "hidden_size"},
        "sizes": {"hidden_size": {"kind": "width", "ratio": 1.0}},
    }
    return {
        "operator": f"transformers.models.{name}",
        "qualified": name,
        "library": "transformers",
        "version": "0",
        "family": "transformers",
        "usages": [usage],
        "source": source,
        "path": "models/none.py",
        "summary": "",
    }


@pytest.fixture(scope="session")
def synthesizer(operators):
    return Synthesizer(operators, PARAMS)


@pytest.fixture(scope="session")
def members(operators):
    rows = [{**row, "usages": json.loads(row["usages"])} for row in operators if row["library"] == "torch"]
    return [member_of(row) for row in rows]


# ---- the schedule


@given(WEIGHTS, st.integers(0, 300), st.integers(0, 300))
def test_a_longer_schedule_begins_with_the_shorter(weights, count, more):
    shares = usable_shares(weights, 5, True)
    assert schedule(shares, count + more)[:count] == schedule(shares, count)


@given(WEIGHTS, st.integers(6, 2000))
def test_categories_are_never_empty_and_follow_their_shares(weights, count):
    shares = usable_shares(weights, 5, True)
    made = collections.Counter(category for category, _ in schedule(shares, count))
    for category, share in shares.items():
        assert made[category] >= 1
        assert abs(made[category] - share * count) <= 6


def test_the_paper_s_shares_give_the_paper_s_rows():
    made = collections.Counter(c for c, _ in schedule(usable_shares(PAPER_SHARES, 5, True), 6000))
    assert [made[c] for c in CATEGORIES] == pytest.approx([204, 5026, 457, 168, 74, 71], abs=2)


def test_max_ops_leaves_out_longer_chains():
    assert set(usable_shares(PAPER_SHARES, 2, False)) == {"torch#1", "torch#2"}


# ---- the plan


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 20), min_size=1), st.integers(0, 99), st.integers(1, 400)
)
def test_a_stratified_sequence_holds_to_its_weights_everywhere(weights, seed, count):
    sequence = stratified(weights, seed)
    drawn = collections.Counter(next(sequence) for _ in range(count))
    # Each name has one occurrence in each interval of its own length, so it is never off by more than a few.
    for name, weight in weights.items():
        assert abs(drawn[name] - count * weight / sum(weights.values())) <= 2 + len(weights)


@settings(max_examples=10, deadline=None)
@given(length=st.integers(1, 4), seed=st.integers(0, 1000))
def test_families_hold_to_their_weights_whatever_fits(members, length, seed):
    planner = Planner(members, FAMILY_WEIGHTS, seed)
    tasks = [planner.operators(length, ordinal) for ordinal in range(BLOCK)]
    families = collections.Counter(planner.members[name].family for task in tasks for name in task)
    for family, weight in planner.weights.items():
        wanted = BLOCK * length * weight / sum(planner.weights.values())
        assert abs(families[family] - wanted) <= 3 + 0.05 * wanted
    uses = collections.Counter(name for task in tasks for name in task)
    for group in planner.by_family.values():
        counts = [uses[member.operator] for member in group]
        assert max(counts) - min(counts) <= 3
    workable = [first_order([planner.members[name] for name in task]) for task in tasks]
    assert sum(order is not None for order in workable) >= 0.9 * BLOCK
    for order in filter(None, workable):
        check_order(order)
    again = Planner(members, FAMILY_WEIGHTS, seed)
    assert again.operators(length, 5) == tasks[5]


def check_order(order):
    assert start_ranks(order)
    assert not any(member.first_only or member.indices for member in order[1:])
    assert not any(member.family == "loss" for member in order[:-1])
    for before, after in itertools.pairwise(order):
        assert before.operator != after.operator
        assert not any({before.family, after.family} <= group for group in NO_NEIGHBOURS)


# ---- sizes


@given(st.floats(1e-7, 10), st.floats(0, 2), st.integers(0, 10**7), st.integers(0, 99))
def test_a_batch_is_within_the_window_and_the_memory(per_sample, fixed, most, seed):
    window = Window(PARAMS)
    target = window.target(random.Random(seed))
    assert target <= window.target(random.Random(seed), ["convolution", "loss"]) <= window.last
    assert 1.0 < window.least <= window.first <= target <= window.last <= window.most < 100

    def estimate(batch):
        return fixed + per_sample * batch

    found = batch_for(target, window, estimate, most)
    good = [batch for batch in NICE_BATCHES if batch <= most and window.least <= estimate(batch) <= window.most]
    if isinstance(found, str):
        assert found == "too large" or not good or estimate(NICE_BATCHES[-1]) < target or target < estimate(2)
    else:
        assert found[0] in good and found[1] == estimate(found[0])


# ---- what would pass


def module(forward, init="", inputs="torch.randn(batch_size, 64)", arguments="x"):
    return (
        f"import torch\nimport torch.nn as nn\nbatch_size = 8\n\n\nclass Model(nn.Module):\n    def __init__(self):\n"
        f"        super().__init__()\n        {init or 'pass'}\n\n    def forward(self, {arguments}):\n"
        f"        return {forward}"
        f"\n\n\ndef get_inputs():\n    return [{inputs}]\n\n\ndef get_init_inputs():\n    return []\n"
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (module("torch.sin(x) * 2"), None),
        (module("x + 0.02 * torch.sin(x)"), "would pass"),
        (module("torch.sin(x) * 2 + 0.004 * torch.cos(9 * x)"), "may be left out"),
        (module("self.layer(x) * 3", "self.layer = nn.LayerNorm(64)"), None),
        (
            module(
                "torch.softmax(self.layer(x) * 4, -1) * 5 + x",
                "self.layer = nn.Linear(64, 64); nn.init.zeros_(self.layer.weight)",
            ),
            "hardly matters",
        ),
        (
            module(
                "torch.sin(x) + 0.001 * y",
                inputs="torch.randn(batch_size, 64), torch.randn(batch_size, 64)",
                arguments="x, y",
            ),
            "input 1 hardly matters",
        ),
        (module("torch.sin(x).mean() + x * 0"), "hardly varies"),
        (module("torch.where(x > 1.0, x, torch.zeros_like(x))"), "hardly varies"),
    ],
)
def test_what_would_pass_is_found(code, said):
    found = fault(code, guards=True)
    assert found is None if said is None else said in (found or ""), found


def test_constants_and_halves_that_would_pass_are_found():
    values = torch.randn(3, 400)
    assert constant_fault(values) is None
    assert constant_fault(0.005 * values) == "zeros would pass"
    assert constant_fault(1 + 0.005 * values) == "ones would pass"
    assert constant_fault(7 + 0.02 * values) == "the mean would pass"
    assert constant_fault(torch.cat([values.flatten(), 0.005 * values.flatten()])) == "half of it would pass"


def test_an_epsilon_is_a_guard_and_no_part_of_the_task():
    code = module("x / (x.abs().amax(-1, keepdim=True) + 1e-6).clamp_min(1e-8)")
    assert fault(code, guards=True) is None
    assert "may be left out" in fault(code, guards=False)


# ---- the tasks


@settings(max_examples=10, deadline=None)
@given(index=st.integers(0, 10**6), category=st.sampled_from(CATEGORIES), ordinal=st.integers(0, 300))
def test_a_task_depends_on_its_index_alone_and_uses_all_it_declares(synthesizer, operators, index, category, ordinal):
    other = Synthesizer(operators, {**PARAMS, "count": 999})
    jobs = synthesizer.job(index, category, ordinal), other.job(index, category, ordinal)
    try:
        row = synthesizer.task(*jobs[0])
    except NoTask:
        with pytest.raises(NoTask):
            other.task(*jobs[1])
        return
    other.task(*other.job(0, "torch#1", 0))
    assert other.task(*jobs[1]) == row
    if category != "transformers":
        assert len(json.loads(row["ops"])) == len(json.loads(row["families"])) == int(category[-1])
        check_every_name_is_used(row)


def check_every_name_is_used(row):
    """No unused init argument, attribute, forward argument, constant or import; each operator occurs in the code."""
    tree = ast.parse(row["code"])
    loads = collections.Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    model = next(n for n in tree.body if isinstance(n, ast.ClassDef))
    constants = {n.targets[0].id for n in tree.body if isinstance(n, ast.Assign)}
    for name in constants:
        assert loads[name], f"constant {name} is not used:\n{row['code']}"
    for function in [n for n in model.body if isinstance(n, ast.FunctionDef)]:
        arguments = {a.arg for a in function.args.args} - {"self"}
        read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        assert arguments <= read
        assert not (constants & read) - arguments, f"{function.name} reads a global:\n{row['code']}"
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert node.attr in attributes
    forward = next(n for n in model.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    assert not {a.arg for a in forward.args.args} & attributes, f"one name for two things:\n{row['code']}"
    sizes = [
        size
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and ast.unparse(n.func) in ("torch.randn", "torch.rand")
        for size in n.args
        if isinstance(size, ast.Constant) and size.value > 1
    ]
    assert not sizes, f"a size without a name:\n{row['code']}"
    if "import torch.nn.functional as F" in row["code"]:
        assert loads["F"]
    for operator in json.loads(row["ops"]):
        assert f"{operator}(" in row["code"]


def test_tasks_run_and_are_good(synthesizer):
    plan = schedule(usable_shares(dict.fromkeys(CATEGORIES, 1), 5, True), 12)
    jobs = [synthesizer.job(index, category, ordinal) for index, (category, ordinal) in enumerate(plan)]
    rows = [row for row in map(attempted, [synthesizer] * len(jobs), jobs) if row]
    assert len(rows) >= 9 and len({row["code"] for row in rows}) == len(rows)
    for row in rows:
        namespace = {"__name__": "task"}
        exec(compile(row["code"], row["task_id"], "exec"), namespace)
        namespace["batch_size"] = min(namespace["batch_size"], 4)
        torch.manual_seed(5)
        model = namespace["Model"](*namespace["get_init_inputs"]())
        inputs, others = namespace["get_inputs"](), namespace["get_inputs"]()
        with torch.no_grad():
            out = model(*inputs)
            assert torch.isfinite(out).all() and varies(out), row["code"]
            assert torch.equal(out, model(*inputs))
            assert torch.allclose(out, model.eval()(*inputs), rtol=1e-5, atol=1e-5)
            assert not torch.allclose(out, torch.zeros_like(out), rtol=1e-2, atol=1e-2)
            for index in range(len(inputs)):
                mixed = [*inputs[:index], others[index], *inputs[index + 1 :]]
                assert far_share(out, model(*mixed)) > 0.1, row["code"]
        assert 1.0 <= row["estimate_ms"] <= 100.0


def attempted(synthesizer, job):
    try:
        return synthesizer.task(*job)
    except NoTask:
        return None


def test_a_faster_device_gets_larger_tasks(operators):
    params = {**PARAMS, "device": "cuda"}
    figures = {"memory_bytes": 141e9, "gflops": 5e4, "gbytes_per_s": 4200.0, "operator_us": 5.0}
    rates = [
        {"kind": "device", "name": name, "usage": None, "rank": None, "value": value} for name, value in figures.items()
    ]
    rates += [{"kind": "operator", "name": "torch.exp", "usage": 0, "rank": 4, "value": 1.0}]
    made = Synthesizer(operators, params, rates)
    assert made.most_bytes == pytest.approx(141e9 / 24)
    # An operator of one flop for each element reaches the range: it moves as much as the memory allows.
    row = made.task(3, "torch#1", 0, ["torch.exp"])
    assert json.loads(row["ops"]) == ["torch.exp"] and row["estimate_ms"] >= 1.25


# ---- the program


def run(tmp_path, crawled, **more):
    entry = stage_driver.write_table(tmp_path / "operators.parquet", crawled)
    request = stage_driver.request(
        tmp_path, "ops/synthesize", {**PARAMS, **more}, {"operators": entry}, ("tasks", "left_out")
    )
    done = stage_driver.run_program(HERE / "synthesize.py", request)
    return done, (lambda port: stage_driver.read_rows(tmp_path, port))


def test_the_program_writes_its_tables_and_says_what_is_wrong(operators, tmp_path):
    done, rows_of = run(tmp_path, operators)
    assert done.returncode == 0, done.stderr
    rows = rows_of("tasks")
    made, missing = ({row["data_source"] for row in rows_of(port)} for port in ("tasks", "left_out"))
    assert len(rows) == PARAMS["count"] and made | missing == set(CATEGORIES) and {"torch#2", "transformers"} <= made
    assert {row["origin"] for row in rows} == {"composer"}
    left_out = {row["index"] for row in rows_of("left_out")}
    assert sorted(left_out | {row["index"] for row in rows}) == list(range(PARAMS["count"] + len(left_out)))
    found = spread(rows, FAMILY_WEIGHTS)
    assert found["operators"] and found["bilinear"] <= 0.2
    done, rows_of = run(tmp_path, operators, count=7)
    assert done.returncode == 0 and rows_of("tasks") == rows[:7]


def test_only_the_operators_of_the_list_are_taken(operators, tmp_path):
    only = ["torch.exp", "torch.sum", "nn.ReLU"]
    done, rows_of = run(tmp_path, operators, operators=only, shares={"torch#1": 1, "torch#2": 1}, count=6)
    assert done.returncode == 0, done.stderr
    rows = rows_of("tasks")
    assert rows and {name for row in rows for name in json.loads(row["ops"])} <= set(only)
    done, _ = run(tmp_path, operators, operators=["torch.exp", "torch.expp"])
    assert done.returncode != 0 and "torch.expp not among" in done.stderr


@pytest.mark.parametrize(
    "wrong", [{"shares": {}}, {"families": {"nonsense": 1}}, {"families": {"linear": -1}}, {"target_ms_max": 0.5}]
)
def test_parameters_that_can_t_be_met_are_errors(wrong):
    with pytest.raises(stage.StageError) as found:
        check({**PARAMS, **wrong}, {"torch", "transformers"})
    assert found.value.kind == "params"


def test_a_category_that_can_t_be_had_costs_only_itself(operators, tmp_path):
    """Its indices are left out, the next ones take their place, and what a shorter run makes stays as it is."""
    broken = [row for row in operators if row["library"] == "torch"]
    broken += [
        {**row, "source": "class Scale0(nn.Module):\n    pass"} for row in operators if row["library"] != "torch"
    ]
    shares = {"torch#1": 1, "transformers": 9}
    done, rows_of = run(tmp_path, broken, shares=shares, count=6)
    assert done.returncode == 0, done.stderr
    rows, left_out = rows_of("tasks"), rows_of("left_out")
    assert len(rows) == 6 and {row["data_source"] for row in rows} == {"torch#1"}
    reasons = collections.Counter(row["reason"] for row in left_out if row["data_source"] == "transformers")
    assert reasons["no class fits"] == HOPELESS and reasons["exhausted"] > 0
    done, rows_of = run(tmp_path, broken, shares=shares, count=4)
    assert rows_of("tasks") == rows[:4]
    shorter = rows_of("left_out")
    assert shorter == left_out[: len(shorter)]
    done, _ = run(tmp_path, broken[-3:], shares={"transformers": 1}, count=4)
    assert done.returncode == 1 and json.loads((tmp_path / "error.json").read_text())["kind"] == "params"
