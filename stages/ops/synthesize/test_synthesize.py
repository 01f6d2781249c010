"""`ops/synthesize`: the schedule by property, the files by their syntax trees, and tasks by running them."""

import ast
import collections
import json
import pathlib
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = pathlib.Path(__file__).resolve().parent
OPS = HERE.parent
sys.path[:0] = [str(HERE), str(OPS / "crawl"), str(OPS / "python"), str(OPS.parent / "protocol" / "python")]

import stage_driver  # noqa: E402
from compose import far_share, varies  # noqa: E402
from schedule import CATEGORIES, PAPER_SHARES, schedule, usable_shares  # noqa: E402
from synthesize import Synthesizer, work  # noqa: E402
from torch_crawl import crawl_torch  # noqa: E402
from transformers_crawl import crawl_transformers  # noqa: E402

PARAMS = {"count": 18, "seed": 7, "max_ops": 5, "shares": PAPER_SHARES, "device": "cpu", "target_ms_min": 1.0,
          "target_ms_max": 100.0, "gflops": 0, "gbytes_per_s": 0, "max_bytes": 2**30}
WEIGHTS = st.dictionaries(st.sampled_from(CATEGORIES), st.floats(0.01, 100), min_size=1)


@pytest.fixture(scope="session")
def operators():
    torch.set_num_threads(1)
    rows = crawl_torch()[0] + crawl_transformers(["llama", "bert", "vit"], 12)[0]
    return [{**row, "version": row.get("version", torch.__version__), "source": row.get("source"),
             "path": row.get("path"), "usages": json.dumps(row["usages"])} for row in rows]


@pytest.fixture(scope="session")
def synthesizer(operators):
    return Synthesizer([dict(row) for row in operators], PARAMS)


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


# ---- the tasks

@settings(max_examples=8, deadline=None)
@given(index=st.integers(0, 10**6), category=st.sampled_from(CATEGORIES), ordinal=st.integers(0, 40))
def test_a_task_depends_on_its_index_alone_and_uses_all_it_declares(synthesizer, operators, index, category, ordinal):
    row = synthesizer.task(index, category, ordinal)
    other = Synthesizer([dict(item) for item in operators], {**PARAMS, "count": 999})
    other.task(0, "torch#1", 0)
    assert other.task(index, category, ordinal) == row
    if category != "transformers":
        assert len(json.loads(row["ops"])) == int(category[-1])
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
    sizes = [size for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("torch.randn", "torch.rand")
             for size in n.args if isinstance(size, ast.Constant) and size.value > 1]
    assert not sizes, f"a size without a name:\n{row['code']}"
    if "import torch.nn.functional as F" in row["code"]:
        assert loads["F"]
    for operator in json.loads(row["ops"]):
        assert f"{operator}(" in row["code"]


def test_tasks_run_and_are_good(synthesizer):
    plan = schedule(usable_shares(dict.fromkeys(CATEGORIES, 1), 5, True), 12)
    rows = [synthesizer.task(index, category, ordinal) for index, (category, ordinal) in enumerate(plan)]
    assert len({row["code"] for row in rows}) == len(rows)
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
            for index in range(len(inputs)):
                mixed = [*inputs[:index], others[index], *inputs[index + 1:]]
                assert far_share(out, model(*mixed)) > 0.1, row["code"]
        assert 1.0 <= row["estimate_ms"] <= 100.0


def test_the_program_writes_its_table_and_says_what_is_wrong(operators, tmp_path):
    entry = stage_driver.write_table(tmp_path / "operators.parquet", operators)
    request = stage_driver.request(tmp_path, "ops/synthesize", PARAMS, {"operators": entry}, ("tasks",))
    done = stage_driver.run_program(HERE / "synthesize.py", request)
    assert done.returncode == 0, done.stderr
    rows = stage_driver.read_rows(tmp_path, "tasks")
    assert len(rows) == PARAMS["count"] and {row["data_source"] for row in rows} == set(CATEGORIES)
    first = types.SimpleNamespace(rows=rows)
    request = stage_driver.request(tmp_path, "ops/synthesize", {**PARAMS, "count": 7}, {"operators": entry}, ("tasks",))
    assert stage_driver.run_program(HERE / "synthesize.py", request).returncode == 0
    assert stage_driver.read_rows(tmp_path, "tasks") == first.rows[:7]
    request = stage_driver.request(tmp_path, "ops/synthesize", {**PARAMS, "shares": {}}, {"operators": entry}, ("tasks",))
    assert stage_driver.run_program(HERE / "synthesize.py", request).returncode == 1
    assert json.loads((tmp_path / "error.json").read_text())["kind"] == "params"
    assert work.__module__ == "synthesize"
