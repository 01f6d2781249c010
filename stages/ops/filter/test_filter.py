"""Tests of `ops/filter`: each rule both ways, the similarity's laws, duplicates, and a funnel that adds up."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python"), str(HERE.parent.parent / "protocol" / "python")]

import rules  # noqa: E402
import similarity  # noqa: E402
import source as task_source  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def load_program():
    """The program by its path: its name is also its folder's, which pytest may have imported as a package."""
    specification = importlib.util.spec_from_file_location("filter_program", HERE / "filter.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


filter_program = load_program()

PARAMS = {
    "min_ms": 1, "max_ms": 100, "determinism_tolerance": 1e-5, "min_fresh_rel": 1e-3, "min_fresh_abs": 0,
    "min_sensitivity": 1e-4, "min_activity": 0.01, "compiled_tolerance": 1e-2, "max_train_rel": 1e-3,
    "max_similarity": 0.9, "skip": [],
}  # fmt: skip

CODE = '''import torch
import torch.nn as nn
import torch.nn.functional as F

size = 64


class Model(nn.Module):
    """A linear layer and an activation."""

    def __init__(self, features: int):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


def get_inputs():
    return [torch.randn(8, size)]


def get_init_inputs():
    return [size]
'''

OTHER = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3)
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, image):
        image = self.norm(self.convolution(image))
        return torch.softmax(image.flatten(2), dim=-1).mean(-1)


def get_inputs():
    return [torch.rand(4, 8, 32, 32)]


def get_init_inputs():
    return [8, 2]
"""


def facts(**changes):
    """A row that passes every rule."""
    return {
        "task_id": "a", "ops": '["nn.Linear", "torch.nn.functional.gelu"]', "data_source": "torch#2", "code": CODE,
        "executes_eager": True, "executes_compiled": True, "error": None, "error_stage": None, "error_kind": None,
        "random_ops": [], "reseed_abs": 0.0, "repeat_abs": 0.0, "output_min": -1.0, "output_max": 2.0,
        "inputs_repeatable": True, "finite": True, "shapes_vary": False, "output_constant": False, "fresh_rel": 4.0,
        "fresh_abs": 2.0, "inputs_fixed": [False], "sensitivity_rel": [4.0], "sensitivity_share": [1.0],
        "eager_ms": 5.0, "compiled_ms": 4.0, "compiled_tolerance": 1e-6, "train_error": None, "train_abs": 0.0,
        "train_rel": 0.0, **changes,
    }  # fmt: skip


def failing(changes, **params):
    row = filter_program.as_row(facts(**changes))
    return [rule.name for rule, _ in rules.failures(row, {**PARAMS, **params}, set())]


def code(old, new):
    assert old in CODE
    return {"code": CODE.replace(old, new)}


def test_a_good_row_passes_every_rule():
    assert failing({}) == []


FAILING = [
    ("readable", {"code": "def broken(:"}),
    ("readable", {"code": "x = 1"}),
    ("executes_eager", {"executes_eager": False, "error": "boom"}),
    ("executes_compiled", {"executes_compiled": False}),
    ("executes_compiled", {"executes_compiled": None}),
    ("no_randomness", {"random_ops": ["aten::rand"]}),
    ("no_randomness", {"reseed_abs": 0.5}),
    ("no_randomness", {"random_ops": None}),
    ("deterministic", {"repeat_abs": 0.1, "reseed_abs": 0.1}),
    ("repeatable_inputs", {"inputs_repeatable": False}),
    ("finite", {"finite": False}),
    ("static_shapes", {"shapes_vary": True}),
    ("not_constant", {"output_constant": True}),
    ("distinguishable", {"fresh_rel": 1e-5}),
    ("distinguishable", {"fresh_rel": None}),
    ("varied_inputs", {"inputs_fixed": [True]}),
    ("varied_inputs", {"inputs_fixed": []}),
    ("sensitive", {"sensitivity_rel": [0.0]}),
    ("sensitive", {"sensitivity_share": [0.001]}),
    ("eager_time", {"eager_ms": 0.99}),
    ("eager_time", {"eager_ms": 100.1}),
    ("eager_time", {"eager_ms": None}),
    ("compiled_agrees", {"compiled_tolerance": 0.02}),
    ("compiled_agrees", {"compiled_tolerance": None}),
    ("modes_agree", {"train_rel": 0.5, "train_abs": 0.5}),
    ("modes_agree", {"train_error": "ValueError: one value per channel"}),
    ("declared_operators", {"ops": '["nn.Linear", "nn.Conv3d"]'}),
    ("declared_operators", {"ops": "nn.Linear"}),
    ("used_modules", code("        self.linear =", "        self.spare = nn.ReLU()\n        self.linear =")),
    ("used_arguments", code("x: torch.Tensor)", "x: torch.Tensor, mask=None)")),
    ("used_arguments", code("features: int)", "features: int, bias=True)")),
    ("live_computation", code("        return F", "        y = torch.exp(x)\n        return F")),
    ("live_computation", code("        return F", "        torch.exp(x)\n        return F")),
    ("self_contained", code("nn.Linear(features, features)", "nn.Linear(features, size)")),
]


@pytest.mark.parametrize("name, changes", FAILING)
def test_a_rule_rejects(name, changes):
    assert name in failing(changes)


def test_every_rule_of_one_row_has_a_rejecting_example():
    assert {rule.name for rule in rules.RULES} == {name for name, _ in FAILING}


PASSING = [
    {"eager_ms": 1.0},
    {"eager_ms": 100.0},
    {"repeat_abs": 1e-6, "reseed_abs": 1e-6},
    {"train_rel": 1e-6, "train_abs": 1e-6},
    {"fresh_rel": 2e-3},
    {"sensitivity_rel": [None]},
    {"inputs_fixed": [False, False], "sensitivity_rel": [1.0, 1.0], "sensitivity_share": [1.0, 0.5]},
    {"ops": '["torch.gelu", "nn.Linear"]'},
    code("return F.gelu(self.linear(x))", "y = self.linear(x)\n        return F.gelu(y)"),
    code("F.gelu(self.linear(x))", "F.gelu(self.linear(x)) @ x.t()"),
    code("x: torch.Tensor)", "x: torch.Tensor, _unused=None)"),
    code("super().__init__()", "super(Model, self).__init__()"),
]


@pytest.mark.parametrize("changes", PASSING)
def test_near_misses_pass(changes):
    assert failing(changes) == []


def test_thresholds_are_parameters():
    assert failing({"eager_ms": 0.5}, min_ms=0.1) == []
    assert failing({"fresh_abs": 0.005}, min_fresh_abs=0.02) == ["distinguishable"]
    assert failing({"repeat_abs": 1e-7}, determinism_tolerance=0) == ["deterministic"]


@pytest.mark.parametrize("name, changes", FAILING)
def test_a_rule_can_be_skipped(name, changes):
    row = filter_program.as_row(facts(**changes))
    left = [rule.name for rule, _ in rules.failures(row, PARAMS, {name})]
    assert name not in left


def test_declared_operators_know_aliases_methods_and_symbols():
    text = (
        "import torch as t\nfrom torch.nn import Linear as L, functional as f\n"
        "class Model(t.nn.Module):\n def __init__(self):\n  super().__init__()\n  self.a = L(2, 2)\n"
        " def forward(self, x):\n  return f.relu(self.a(x)).sum(-1) @ x\n"
    )
    source = task_source.parse(text)
    assert task_source.undeclared(source, ["nn.Linear", "F.relu", "torch.sum", "torch.matmul"]) == []
    assert task_source.undeclared(source, ["nn.Linear", "torch.add"]) == ["torch.add"]


def test_an_operator_that_only_the_inputs_use_is_not_used():
    changed = CODE.replace("torch.randn(8, size)", "torch.cumsum(torch.randn(8, size), 0)")
    assert task_source.undeclared(task_source.parse(changed), ["torch.cumsum"]) == ["torch.cumsum"]


def fingerprint(text):
    return similarity.fingerprint(task_source.parse(text))


def likeness(left, right):
    return similarity.similarity(fingerprint(left), fingerprint(right))


IDENTIFIERS = st.from_regex(r"[a-z][a-z_]{3,9}[0-9]", fullmatch=True)


@given(st.lists(IDENTIFIERS, min_size=3, max_size=3, unique=True))
@settings(max_examples=40)
def test_renaming_changes_nothing(names):
    features, linear, x = names
    renamed = (
        CODE.replace("features", features).replace("self.linear", f"self.{linear}")
        .replace("(x)", f"({x})").replace("x: torch", f"{x}: torch")
    )  # fmt: skip
    assert likeness(CODE, renamed) == 1.0
    program = similarity.canonical_program
    assert program(task_source.parse(CODE)) == program(task_source.parse(renamed))


def test_sizes_docstrings_annotations_and_import_styles_change_nothing():
    changed = (
        CODE.replace('    """A linear layer and an activation."""\n', "").replace("features: int", "features")
        .replace("size = 64", "size = 4096").replace("nn.Linear", "torch.nn.Linear")
    )  # fmt: skip
    assert likeness(CODE, changed) == 1.0


def test_another_operator_is_less_alike_and_another_model_far_off():
    assert 0.8 < likeness(CODE, CODE.replace("F.gelu", "F.silu")) < 1.0
    assert likeness(CODE, OTHER) < 0.7


WORDS = st.lists(st.sampled_from("abcde"), max_size=40)


def plain_common_subsequence(left, right):
    """The textbook recurrence, to hold the bit-parallel one against."""
    above = [0] * (len(right) + 1)
    for first in left:
        row = [0]
        for index, second in enumerate(right):
            row.append(above[index] + 1 if first == second else max(above[index + 1], row[index]))
        above = row
    return above[-1]


@given(WORDS, WORDS)
@settings(max_examples=300)
def test_the_similarity_is_symmetric_bounded_and_below_its_upper_bound(left, right):
    a, b = similarity.Fingerprint(left), similarity.Fingerprint(right)
    value = similarity.similarity(a, b)
    assert value == similarity.similarity(b, a)
    assert 0.0 <= value <= similarity.upper_bound(a, b) <= 1.0
    assert (value == 1.0) == (left == right)
    assert similarity.longest_common_subsequence(a.words, b.words) == plain_common_subsequence(left, right)


@given(WORDS, st.lists(WORDS, max_size=8), st.sampled_from([0.0, 0.3, 0.6, 0.9]))
@settings(max_examples=150)
def test_prefilters_never_change_the_answer(candidate, others, threshold):
    whole = similarity.Fingerprint(candidate)
    references = [(str(index), similarity.Fingerprint(words)) for index, words in enumerate(others)]
    found = similarity.most_similar(whole, references, threshold)
    values = [similarity.similarity(whole, reference) for _, reference in references]
    best = max(values, default=0.0)
    assert (found[1] if found else None) == (best if best > threshold else None)


def run(tmp_path, rows, references=None, **params):
    """Run the program as the engine does and return (kept, rejected, funnel)."""
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "outputs").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "measured.parquet")
    inputs = {"measured": {"type": "table", "path": "measured.parquet", "rows": len(rows)}}
    if references is not None:
        inputs["references"] = {"type": "tree", "path": str(references)}
    outputs = {name: {"type": "table", "path": f"outputs/{name}.parquet"} for name in ("tasks", "rejected")}
    outputs["report"] = {"type": "report", "path": "outputs/report"}
    request = {
        "protocol": 1, "stage": "kept", "kind": "ops/filter", "params": {**PARAMS, **params}, "seed": 0,
        "inputs": inputs, "outputs": outputs, "by_row": None,
        "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []}, "device": None, "deadline_unix_s": None,
        "state_dir": str(tmp_path),
    }  # fmt: skip
    (tmp_path / "request.json").write_text(json.dumps(request))
    paths = [HERE, HERE.parent / "python", HERE.parent.parent / "protocol" / "python"]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUDA_AGENT_REQUEST": str(tmp_path / "request.json"),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "filter.py")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        return json.loads((tmp_path / "error.json").read_text())
    kept = pyarrow.parquet.read_table(tmp_path / "outputs" / "tasks.parquet")
    rejected = [json.loads(line) for line in (tmp_path / "outputs" / "rejected.jsonl").read_text().splitlines()]
    return kept, rejected, json.loads((tmp_path / "outputs" / "report" / "funnel.json").read_text())


def test_the_funnel_adds_up_and_the_order_is_kept(tmp_path):
    rows = [
        facts(task_id="slow", eager_ms=500.0),
        facts(task_id="first"),
        facts(task_id="twin"),
        facts(task_id="renamed", code=CODE.replace("features", "width")),
        facts(task_id="two", eager_ms=0.1, finite=False, data_source="torch#1"),
        facts(task_id="last", code=OTHER, ops='["nn.Conv2d"]', data_source="torch#1"),
    ]
    kept, rejected, funnel = run(tmp_path, rows)
    assert kept.column("task_id").to_pylist() == ["first", "last"]
    assert set(kept.column_names) == set(rows[0])
    reasons = {row["task_id"]: (row["rule"], row["rules"]) for row in rejected}
    assert list(reasons) == ["slow", "twin", "renamed", "two"]
    assert reasons["twin"] == ("duplicate", ["duplicate"])
    assert reasons["renamed"] == ("semantic_duplicate", ["semantic_duplicate"])
    assert reasons["two"] == ("finite", ["finite", "eager_time"])
    assert funnel["total_in"] == funnel["total_kept"] + sum(rule["rejected"] for rule in funnel["rules"]) == 6
    for category, count in funnel["in"].items():
        lost = sum(rule["rejected_by_category"].get(category, 0) for rule in funnel["rules"])
        assert count == funnel["kept"].get(category, 0) + lost
    text = (tmp_path / "outputs" / "report" / "README.md").read_text()
    assert "| kept | 2 | 1 | 1 |" in text
    contaminated = next(rule for rule in funnel["rules"] if rule["name"] == "contaminated")
    assert not contaminated["applied"] and contaminated["not_applied_because"] == "no references given"
    assert "not applied: no references given" in text


def test_a_rejected_row_does_not_take_its_twin_along(tmp_path):
    kept, _, _ = run(tmp_path, [facts(task_id="slow", eager_ms=500.0), facts(task_id="quick")])
    assert kept.column("task_id").to_pylist() == ["quick"]


def test_other_sizes_are_no_duplicate(tmp_path):
    rows = [facts(task_id="a"), facts(task_id="b", code=CODE.replace("size = 64", "size = 128"))]
    kept, _, _ = run(tmp_path, rows)
    assert kept.num_rows == 2


def test_references_decontaminate(tmp_path):
    references = tmp_path / "references" / "level1"
    references.mkdir(parents=True)
    (references / "7_linear.py").write_text(CODE.replace("features", "n").replace("64", "1024"))
    (references / "helper.py").write_text("x = 1\n")
    rows = [facts(task_id="copy"), facts(task_id="other", code=OTHER, ops='["nn.Conv2d"]')]
    kept, rejected, funnel = run(tmp_path / "run", rows, references=tmp_path / "references")
    assert next(rule for rule in funnel["rules"] if rule["name"] == "contaminated")["applied"]
    assert kept.column("task_id").to_pylist() == ["other"]
    assert rejected[0]["rule"] == "contaminated" and "level1/7_linear.py" in rejected[0]["detail"]
    kept, _, funnel = run(tmp_path / "again", rows, references=tmp_path / "references", skip=["contaminated"])
    assert not next(rule for rule in funnel["rules"] if rule["name"] == "contaminated")["applied"]
    assert kept.num_rows == 2


def test_bad_requests_explain_themselves(tmp_path):
    (tmp_path / "empty").mkdir()
    error = run(tmp_path / "a", [facts()], references=tmp_path / "empty")
    assert error["kind"] == "input" and "class Model" in error["message"]
    error = run(tmp_path / "b", [{"code": CODE}])
    assert error["kind"] == "input" and "task_id" in error["message"] and "ops/measure" in error["hint"]
    error = run(tmp_path / "c", [facts()], skip=["no_such_rule"])
    assert error["kind"] == "params" and "no_such_rule" in error["message"]


def test_the_manifest_lists_every_rule_and_parameter():
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((HERE / "stage.yaml").read_text())
    assert manifest["params"]["skip"]["choices"] == [rule.name for rule in rules.ALL_RULES]
    assert set(manifest["params"]) == set(PARAMS)
    assert {name: entry["default"] for name, entry in manifest["params"].items()} == PARAMS
    assert set(manifest["sources"]) == {path.name for path in HERE.glob("*.py") if not path.name.startswith("test_")}
    assert all(set(rule.params) <= set(PARAMS) for rule in rules.ALL_RULES)
