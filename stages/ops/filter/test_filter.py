"""Tests of `ops/filter`: each rule both ways, duplicates, and a funnel that adds up."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PATHS = [HERE, HERE.parent / "measure", HERE.parent.parent / "protocol" / "python"]
sys.path[:0] = [str(path) for path in (*PATHS, HERE.parent / "python")]

from hypothesis import given, settings
from hypothesis import strategies as st

import canonical
import report
import rules
import signature
import source as task_source
import stage_driver


def load_program():
    """The program by its path: its name is also its folder's, which pytest may have imported as a package."""
    specification = importlib.util.spec_from_file_location("filter_program", HERE / "filter.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


filter_program = load_program()

PARAMS = {
    "min_ms": 1,
    "max_ms": 100,
    "determinism_tolerance": 1e-5,
    "min_fresh_rel": 1e-3,
    "min_fresh_abs": 0,
    "min_sensitivity": 1e-4,
    "min_activity": 0.01,
    "compiled_tolerance": 1e-2,
    "max_train_rel": 1e-3,
    "max_top_share": 0.9,
    "max_zero_share": 0.9,
    "min_std": 1e-5,
    "max_seed_std_ratio": 10,
    "max_literal": 16,
    "max_similarity": 0.9,
    "reference_levels": [1, 2, 3],
    "trace_references": True,
    "skip": [],
}

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
        "train_rel": 0.0, "output_std": 0.5, "output_top_share": 0.01, "output_zero_share": 0.0, "seed_std_ratio": 1.1,
        "graph": f"graph of {changes.get('code', CODE)}", "graph_operators": ["addmm", "gelu"],
        "inputs": '[{"shape": [8, 64], "dtype": "float32"}, {"type": "int"}]', **changes,
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
    ("enough_time", {"executes_compiled": None, "error_kind": "slow", "error_stage": "eager_timing"}),
    ("enough_memory", {"executes_compiled": False, "error_kind": "memory", "error_stage": "compile"}),
    ("executes_eager", {"executes_eager": False, "error": "boom"}),
    ("executes_compiled", {"executes_compiled": False}),
    ("executes_compiled", {"executes_compiled": None}),
    ("no_randomness", {"random_ops": ["aten::rand"]}),
    ("no_randomness", {"reseed_abs": 0.5}),
    ("no_randomness", {"random_ops": None}),
    ("deterministic", {"repeat_abs": 0.1, "reseed_abs": 0.1}),
    ("repeatable_inputs", {"inputs_repeatable": False}),
    ("finite", {"finite": False}),
    ("active", {"output_top_share": 0.95}),
    ("active", {"output_zero_share": 0.95}),
    ("active", {"output_std": 1e-6}),
    ("active", {"output_top_share": None}),
    ("stable", {"seed_std_ratio": 11.0}),
    ("stable", {"seed_std_ratio": None}),
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
    ("complete_operators", code("F.gelu(self.linear(x))", "torch.tanh(F.gelu(self.linear(x)))")),
    ("complete_operators", code("F.gelu(self.linear(x))", "F.gelu(self.linear(x)) * 2 + x")),
    ("complete_operators", code("F.gelu(self.linear(x))", "F.gelu(F.gelu(self.linear(x)))")),
    ("right_category", {"data_source": "torch#3"}),
    ("used_modules", code("        self.linear =", "        self.spare = nn.ReLU()\n        self.linear =")),
    (
        "used_modules",
        code("    def forward", "    def spare(self):\n        return self.other\n\n    def forward")
        | {
            "code": CODE.replace(
                "        self.linear =", "        self.other = nn.ReLU()\n        self.linear ="
            ).replace("    def forward", "    def spare(self, x):\n        return self.other(x)\n\n    def forward")
        },
    ),
    (
        "used_modules",
        code("        self.linear =", "        self.register_buffer('h', torch.zeros(2))\n        self.linear ="),
    ),
    (
        "used_modules",
        code(
            "        self.linear =",
            "        self.a = nn.Linear(2, 2)\n        nn.init.zeros_(self.a.weight)\n        self.linear =",
        ),
    ),
    ("used_arguments", code("x: torch.Tensor)", "x: torch.Tensor, mask=None)")),
    ("used_arguments", code("features: int)", "features: int, bias=True)")),
    ("live_computation", code("        return F", "        y = torch.exp(x)\n        return F")),
    (
        "used_arguments",
        code(
            "features: int):\n        super().__init__()",
            "features: int, width: int):\n        super().__init__()\n        self.width = width",
        ),
    ),
    ("live_computation", code("        return F", "        _ = torch.exp(x)\n        return F")),
    (
        "live_computation",
        code("        return F", "        y = torch.exp(x)\n        y = x + 1\n        x = y\n        return F"),
    ),
    ("live_computation", code("        return F", "        torch.exp(x)\n        return F")),
    ("self_contained", code("nn.Linear(features, features)", "nn.Linear(features, size)")),
    ("no_constant_tensors", code("F.gelu(self.linear(x))", "F.gelu(self.linear(x)) + torch.ones(4, device=x.device)")),
    ("no_constant_tensors", code("F.gelu(self.linear(x))", "F.gelu(self.linear(x)) + torch.arange(self.n)")),
    ("no_literal_sizes", code("nn.Linear(features, features)", "nn.Linear(features, 128)")),
    ("no_literal_sizes", code("self.linear(x)", "self.linear(x).reshape((-1, 512))")),
    ("no_pinned_batch", code("features: int", "batch_size, features: int")),
    ("no_pinned_batch", code("self.linear(x)", "self.linear(x).view(8, -1)")),
    ("traced", {"graph": None}),
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
    code("F.gelu(self.linear(x))", "F.gelu(self.linear(x)) @ x.t()")
    | {"ops": '["nn.Linear", "F.gelu", "torch.matmul"]', "data_source": "torch#3"},
    code(
        "        return F",
        "        y = x\n        if x.shape[0] > 1:\n            y = x + x\n        x = y\n        return F",
    )
    | {"ops": '["nn.Linear", "F.gelu", "torch.add"]', "data_source": "torch#3"},
    {"output_top_share": 0.5, "output_zero_share": 0.5},
    {"seed_std_ratio": 3.0},
    {"data_source": "transformers", "ops": '["transformers.models.a.Linear"]'}
    | code("class Model", "class Linear:\n    pass\n\n\nclass Model"),
    code("F.gelu(self.linear(x))", "F.gelu(self.linear(x)).masked_fill(torch.eye(x.shape[0]).bool(), 0)")
    | {"ops": '["nn.Linear", "F.gelu", "torch.masked_fill"]', "data_source": "torch#3"},
    code("self.linear(x)", "self.linear(x).view(-1, 8)"),
    code("nn.Linear(features, features)", "nn.Linear(features, features // 32 * 32)"),
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


def test_signatures_have_one_form_of_each_name():
    counted = signature.signature(
        task_source.parse(
            "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
            "class Block(nn.Module):\n def __init__(self, n):\n  super().__init__()\n  self.act = nn.ReLU()\n"
            "  self.scale = nn.Parameter(torch.ones(n * 2))\n def forward(self, x):\n  return self.act(x).flatten(1)\n"
            "class Model(nn.Module):\n def __init__(self, n):\n  super().__init__()\n"
            "  self.blocks = nn.ModuleList([Block(n)])\n"
            " def forward(self, x):\n  size = x.shape[1] // 2 * 3\n  x = F.relu(x).view(-1, size)\n"
            "  return torch.bmm(x, x) + x.softmax(-1) @ x\n"
        )
    )
    assert counted == {"relu": 2, "matmul": 2, "add": 1, "softmax": 1}
    assert signature.text(counted) == "add matmul×2 relu×2 softmax"
    assert signature.declared(["nn.AdaptiveAvgPool2d", "F.adaptive_avg_pool2d", "torch.mm"]) == {
        "adaptiveavgpool2d": 2,
        "matmul": 1,
    }


def test_what_an_operator_needs_around_it_need_not_be_declared():
    def source(body):
        return task_source.parse(CODE.replace("F.gelu(self.linear(x))", body))

    def undeclared(body, name):
        return dict(signature.undeclared(source(body), ["nn.Linear", name]))

    assert undeclared("torch.fft.rfft(x).abs()", "torch.fft.rfft") == {}
    assert undeclared("torch.where(torch.gt(x, 0), x, 2 * x)", "torch.gt") == {}
    assert undeclared("F.max_unpool1d(*F.max_pool1d(x, 2), 2) + x", "F.max_unpool1d") == {}
    assert undeclared("torch.relu(x).abs()", "torch.relu") == {"abs": 1}
    assert undeclared("torch.sigmoid(torch.relu(x))", "torch.relu") == {"sigmoid": 1}


IDENTIFIERS = st.from_regex(r"[a-z][a-z_]{3,9}[0-9]", fullmatch=True)


@given(st.lists(IDENTIFIERS, min_size=3, max_size=3, unique=True))
@settings(max_examples=40)
def test_renaming_makes_no_other_program(names):
    features, linear, x = names
    renamed = (
        CODE.replace("features", features)
        .replace("self.linear", f"self.{linear}")
        .replace("(x)", f"({x})")
        .replace("x: torch", f"{x}: torch")
    )
    program = canonical.canonical_program
    assert program(task_source.parse(CODE)) == program(task_source.parse(renamed))


def test_forms_of_import_and_annotations_make_no_other_program_and_sizes_do():
    def program(text):
        return canonical.canonical_program(task_source.parse(text))

    changed = (
        CODE.replace("import torch.nn.functional as F", "from torch.nn.functional import gelu")
        .replace("F.gelu", "gelu")
        .replace("super().__init__()", "super(Model, self).__init__()")
        .replace("features: int", "features")
        .replace('    """A linear layer and an activation."""\n', "")
    )
    assert program(changed) == program(CODE)
    assert program(CODE.replace("size = 64", "size = 65")) != program(CODE)


def run(tmp_path, rows, references=None, **params):
    """Run the program as the engine does and return (kept, rejected, funnel)."""
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "outputs").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "measured.parquet")
    inputs = {"measured": {"type": "table", "path": "measured.parquet", "rows": len(rows)}}
    if references is not None:
        inputs["references"] = {"type": "tree", "path": str(references)}
    outputs = {
        name: {"type": "table", "path": f"outputs/{name}.parquet"} for name in ("tasks", "rejected", "similarity")
    }
    outputs["report"] = {"type": "report", "path": "outputs/report"}
    request = {
        "protocol": 1,
        "stage": "kept",
        "kind": "ops/filter",
        "params": {**PARAMS, **params},
        "seed": 0,
        "inputs": inputs,
        "outputs": outputs,
        "by_row": None,
        "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []},
        "device": None,
        "deadline_unix_s": None,
        "state_dir": str(tmp_path),
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        "CUDA_AGENT_REQUEST": str(tmp_path / "request.json"),
        **stage_driver.bytecode(),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "filter.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
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
        facts(task_id="two", eager_ms=0.1, finite=False, data_source="transformers"),
        facts(
            task_id="same graph",
            code=CODE.replace("F.gelu", "torch.nn.functional.gelu") + "\n\nspare = 1\n",
            graph=f"graph of {CODE}",
        ),
        other(task_id="last"),
    ]
    kept, rejected, funnel = run(tmp_path, rows)
    assert kept.column("task_id").to_pylist() == ["first", "last"]
    assert set(kept.column_names) == set(rows[0])
    reasons = {row["task_id"]: (row["rule"], row["rules"]) for row in rejected}
    assert list(reasons) == ["slow", "twin", "renamed", "two", "same graph"]
    assert reasons["same graph"] == ("graph_duplicate", ["graph_duplicate"])
    assert reasons["twin"] == ("duplicate", ["duplicate"])
    assert reasons["renamed"] == ("semantic_duplicate", ["semantic_duplicate"])
    assert reasons["two"] == ("finite", ["finite", "eager_time"])
    assert funnel["total_in"] == funnel["total_kept"] + sum(rule["rejected"] for rule in funnel["rules"]) == 7
    for category, count in funnel["in"].items():
        lost = sum(rule["rejected_by_category"].get(category, 0) for rule in funnel["rules"])
        assert count == funnel["kept"].get(category, 0) + lost
    text = (tmp_path / "outputs" / "report" / "README.md").read_text()
    assert "| kept | 2 | 1 | 1 | 0 |" in text
    two = next(row for row in rejected if row["task_id"] == "two")
    assert len(two["details"]) == 2 and two["detail"] == two["details"][0] and "0.1 ms" in two["details"][1]
    contaminated = next(rule for rule in funnel["rules"] if rule["name"] == "contaminated")
    assert not contaminated["applied"] and contaminated["not_applied_because"] == "no references given"
    assert "not applied: no references given" in text


def other(**changes):
    return facts(
        code=OTHER,
        ops='["nn.Conv2d", "nn.GroupNorm", "torch.softmax", "torch.mean"]',
        data_source="torch#4",
        graph_operators=["convolution", "native_group_norm", "_softmax", "mean"],
        **changes,
    )


def test_a_rejected_row_does_not_take_its_twin_along(tmp_path):
    kept, _, _ = run(tmp_path, [facts(task_id="slow", eager_ms=500.0), facts(task_id="quick")])
    assert kept.column("task_id").to_pylist() == ["quick"]


def test_other_sizes_are_no_duplicate(tmp_path):
    rows = [facts(task_id="a"), facts(task_id="b", code=CODE.replace("size = 64", "size = 128"))]
    kept, _, _ = run(tmp_path, rows)
    assert kept.num_rows == 2


REFERENCE = """import torch
import torch.nn as nn


class Model(nn.Module):
    \"\"\"A benchmark's problem.\"\"\"

    def __init__(self, n):
        super(Model, self).__init__()
        self.layer = nn.Linear(n, n)

    def forward(self, x):
        return torch.relu(self.layer(x))


def get_inputs():
    return [torch.rand(16, 4096)]


def get_init_inputs():
    return [4096]
"""


def checkout(folder):
    """KernelBench's layout, with files that must not count."""
    for path, text in {
        "KernelBench/level1/7_linear.py": REFERENCE,
        "KernelBench/level4/1_other.py": OTHER,
        "KernelBench/changelog/old.py": OTHER,
        "scripts/run.py": OTHER,
        "README.md": "",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def applied(funnel):
    return {rule["name"]: rule["applied"] for rule in funnel["rules"]}


def test_references_decontaminate(tmp_path):
    rows = [facts(task_id="like"), other(task_id="other")]
    kept, rejected, funnel = run(tmp_path / "run", rows, references=checkout(tmp_path / "kb"), trace_references=False)
    assert kept.column("task_id").to_pylist() == ["other"]
    assert rejected[0]["rule"] == "contaminated" and "level1/7_linear.py" in rejected[0]["detail"]
    assert applied(funnel)["contaminated"] and not applied(funnel)["contaminated_graph"]
    assert funnel["references"] == 1 and funnel["similarity"]["all"]["similar"] == 1
    assert sum(place["tasks"] for place in funnel["similarity"]["histogram"]) == 2
    table = [json.loads(line) for line in (tmp_path / "run" / "outputs" / "similarity.jsonl").read_text().splitlines()]
    assert [(row["task_id"], row["nearest"], row["same_signature"]) for row in table] == [
        ("like", "level1/7_linear.py", []),
        ("other", "level1/7_linear.py", []),
    ]
    assert table[0]["similarity"] == 1.0 and table[1]["similarity"] < 0.9
    text = (tmp_path / "run" / "outputs" / "report" / "README.md").read_text()
    assert "## Likeness to the references" in text and "| all | 2 | 1 | 0 | 0 | 0 |" in text
    # ops/screen writes this again, from the funnel as it was read back.
    assert report.markdown(funnel) == text
    kept, _, funnel = run(
        tmp_path / "again", rows, references=tmp_path / "kb", trace_references=False, skip=["contaminated"]
    )
    assert kept.num_rows == 2 and not applied(funnel)["contaminated"]


def test_operators_and_runs_of_a_reference_reject_what_its_tree_does_not_show(tmp_path):
    pytest.importorskip("torch")
    unlike = CODE.replace(
        "return F.gelu(self.linear(x))", "x = self.linear(x)\n        x = x\n        return F.relu(x)"
    )
    written = CODE.replace(
        "return F.gelu(self.linear(x))",
        "x = F.linear(x, self.linear.weight, self.linear.bias)\n        x = x\n        return torch.clamp(x, min=0)",
    )
    rows = [
        facts(task_id="signature", code=unlike, ops='["nn.Linear", "F.relu"]', graph_operators=["something", "else"]),
        facts(task_id="run", code=written, ops='["nn.Linear", "torch.clamp"]', graph_operators=["addmm", "relu"]),
        facts(
            task_id="deeper",
            code=written.replace("size = 64", "size = 65"),
            ops='["nn.Linear", "torch.clamp"]',
            graph_operators=["addmm", "relu"],
            inputs='[{"shape": [2, 8, 64]}]',
        ),
        other(task_id="other"),
    ]
    _, rejected, funnel = run(tmp_path / "run", rows, references=checkout(tmp_path / "kb"))
    assert funnel["similarity"]["traced_references"] == 1
    found = {row["task_id"]: row["rules"] for row in rejected}
    assert found["signature"] == ["contaminated_signature"]
    assert "contaminated_graph" not in found.get("deeper", ())
    assert "contaminated_graph" in found["run"] and "contaminated_signature" not in found["run"]


def test_the_graph_of_a_reference_is_that_of_the_same_task_measured():
    torch = pytest.importorskip("torch")
    import graph_trace
    import reference_graphs

    answer = reference_graphs.traced(REFERENCE)
    names = {}
    exec(REFERENCE.replace("4096", "64"), names)
    for size, agrees in ((4096, True), (64, False)):
        model, inputs = names["Model"](size).eval(), [torch.rand(16, size)]
        with torch.no_grad(), graph_trace.Trace(model, inputs) as trace:
            model(*inputs).detach()
        assert answer["operators"] == trace.operators == ["addmm", "relu"] and answer["rank"] == 2
        assert (answer["graph"] == trace.digest()) == agrees


def test_references_come_as_folders_files_and_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    import references

    whole = checkout(tmp_path / "kb")

    def names(path, levels=(1, 2, 3)):
        return [other.name for other in references.read(str(path), list(levels))[0]]

    assert names(whole) == names(whole / "KernelBench") == ["level1/7_linear.py"]
    assert names(whole, ()) == ["level1/7_linear.py", "level4/1_other.py"]
    assert names(whole / "KernelBench" / "level1") == ["7_linear.py"]
    assert names(whole / "KernelBench" / "level1" / "7_linear.py") == ["7_linear.py"]
    (tmp_path / "hub").mkdir()
    for level in (1, 4):
        rows = [{"code": REFERENCE, "level": level, "name": f"{level}_linear", "problem_id": 7}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "hub" / f"level_{level}.parquet")
    assert names(tmp_path / "hub") == ["level1/1_linear"]
    assert names(tmp_path / "hub", ()) == ["level1/1_linear", "level4/4_linear"]
    assert names(tmp_path / "hub" / "level_4.parquet", [4]) == ["level4/4_linear"]


def test_bad_requests_explain_themselves(tmp_path):
    (tmp_path / "empty").mkdir()
    error = run(tmp_path / "a", [facts()], references=tmp_path / "empty")
    assert error["kind"] == "input" and "class Model" in error["message"]
    error = run(tmp_path / "b", [{"code": CODE}])
    assert error["kind"] == "input" and "task_id" in error["message"] and "ops/measure" in error["hint"]
    pathlib.Path(tmp_path / "bad.parquet").write_bytes(b"no table")
    error = run(tmp_path / "d", [facts()], references=tmp_path / "bad.parquet")
    assert error["kind"] == "input" and "bad.parquet" in error["message"]
    error = run(tmp_path / "e", [{name: value for name, value in facts().items() if name != "seed_std_ratio"}])
    assert error["kind"] == "input" and "seed_std_ratio" in error["message"] and "older" in error["hint"]
    error = run(tmp_path / "c", [facts()], skip=["no_such_rule"])
    assert error["kind"] == "params" and "no_such_rule" in error["message"]


def test_the_manifest_lists_every_rule_and_parameter():
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((HERE / "stage.yaml").read_text())
    assert manifest["params"]["skip"]["choices"] == [rule.name for rule in rules.ALL_RULES]
    assert set(manifest["params"]) == set(PARAMS)
    assert {name: entry["default"] for name, entry in manifest["params"].items()} == PARAMS
    assert set(manifest["sources"]) - {"../measure/graph_trace.py", "../measure/tensors.py"} == {
        path.name for path in HERE.glob("*.py") if not path.name.startswith("test_")
    }
    assert all(set(rule.params) <= set(PARAMS) for rule in rules.ALL_RULES)
