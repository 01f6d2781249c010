"""Tests of `ops/screen`: each rule both ways, and one funnel for the whole chain that adds up."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PATHS = [HERE, HERE.parent / "filter", HERE.parent.parent / "protocol" / "python"]
sys.path[:0] = [str(path) for path in (*PATHS, HERE.parent / "python")]

import stage_driver


def load_program():
    """The program by its path: kernels/python has another module of this name."""
    specification = importlib.util.spec_from_file_location("screen_program", HERE / "screen.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


screen = load_program()

KINDS = ["zeros", "ones", "mean", "half", "stale", "copy", "without", "identity"]
PARAMS = {"reject": KINDS, "accept": [], "min_over_roofline": 0.9, "skip": []}


def facts(**changes):
    """A row that passes every rule."""
    return {
        "task_id": "a",
        "ops": '["nn.Linear"]',
        "data_source": "torch#1",
        "code": "class Model: pass",
        "eager_ms": 9.0,
        "profile_eager_ms": 5.0,
        "error": None,
        "error_kind": None,
        "roofline_ms": 2.0,
        "degenerate": [],
        **changes,
    }


def failing(changes, **params):
    row = facts(**changes)
    return [rule.name for rule, _ in screen.failures(row, screen.Columns(list(row)), {**PARAMS, **params})]


@pytest.mark.parametrize(
    "changes, rules",
    [
        ({}, []),
        ({"error_kind": "memory", "degenerate": None, "profile_eager_ms": None, "roofline_ms": None}, ["profiled"]),
        ({"profile_error_kind": "task"}, ["profiled"]),
        ({"profile_error_kind": None, "error_kind": "exception"}, []),
        ({"degenerate": None}, ["screened"]),
        ({"degenerate": ["zeros"]}, ["degenerate"]),
        ({"degenerate": ["copy:x"]}, ["degenerate"]),
        ({"degenerate": ["without:linear.bias"]}, ["degenerate"]),
        ({"degenerate": ["identity:mul#3"]}, ["degenerate"]),
        ({"degenerate": ["float16", "bfloat16", "tf32"]}, []),
        ({"profile_eager_ms": 1.7}, ["above_roofline"]),
        ({"profile_eager_ms": 1.9}, []),
        ({"profile_eager_ms": None, "eager_ms": 1.7}, ["above_roofline"]),
        ({"profile_eager_ms": None, "eager_ms": 1.9}, []),
        ({"roofline_ms": None, "profile_eager_ms": 0.001}, []),
    ],
)
def test_rules(changes, rules):
    assert failing(changes) == rules


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_rejects_unless_the_parameter_leaves_it_out(kind):
    others = [other for other in KINDS if other != kind]
    assert failing({"degenerate": [f"{kind}:x"]}) == ["degenerate"]
    assert failing({"degenerate": [f"{kind}:x"]}, reject=others) == []


def test_single_names_can_be_accepted():
    both = {"degenerate": ["without:conv.bias", "identity:clamp#2"]}
    assert failing(both, accept=["without:*.bias"]) == ["degenerate"]
    assert failing(both, accept=["without:*.bias", "identity:clamp*"]) == []
    assert failing({"degenerate": ["zeros"]}, skip=["degenerate"]) == []


def funnel(kept):
    """What a filter before reports: two of five torch#1 rows failed."""
    rule = {
        "name": "finite",
        "reason": "Finite.",
        "applied": True,
        "not_applied_because": None,
        "params": {},
        "rejected": 2,
        "rejected_by_category": {"torch#1": 2},
        "failing": 2,
    }
    total = sum(kept.values())
    return {
        "references": 250,
        "similarity": None,
        "in": {**kept, "torch#1": kept.get("torch#1", 0) + 2},
        "kept": kept,
        "total_in": total + 2,
        "total_kept": total,
        "rules": [rule],
    }


def run(tmp_path, rows, before=None, **params):
    """Run the program as the engine does and return (kept, rejected, funnel, README)."""
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "outputs").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "profiled.parquet")
    inputs = {"profiled": {"type": "table", "path": "profiled.parquet", "rows": len(rows)}}
    if before is not None:
        (tmp_path / "before").mkdir()
        (tmp_path / "before" / "funnel.json").write_text(json.dumps(before))
        inputs["report"] = {"type": "report", "path": "before"}
    outputs = {name: {"type": "table", "path": f"outputs/{name}.parquet"} for name in ("tasks", "rejected")}
    outputs["report"] = {"type": "report", "path": "outputs/report"}
    request = {
        "protocol": 1,
        "stage": "screened",
        "kind": "ops/screen",
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
        [sys.executable, str(HERE / "screen.py")],
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
    report = tmp_path / "outputs" / "report"
    return kept, rejected, json.loads((report / "funnel.json").read_text()), (report / "README.md").read_text()


ROWS = [
    facts(task_id="good"),
    facts(task_id="zero", degenerate=["zeros", "mean", "without:a", "without:b"]),
    facts(task_id="fast", profile_eager_ms=0.1, data_source="torch#2"),
    facts(task_id="last", data_source="torch#2"),
]


def adds_up(summary):
    assert summary["total_in"] == summary["total_kept"] + sum(rule["rejected"] for rule in summary["rules"])
    for category, count in summary["in"].items():
        lost = sum(rule["rejected_by_category"].get(category, 0) for rule in summary["rules"])
        assert count == summary["kept"].get(category, 0) + lost, category


def test_the_funnel_goes_on_where_the_filter_before_ended(tmp_path):
    kept, rejected, summary, text = run(tmp_path, ROWS, before=funnel({"torch#1": 3, "torch#2": 2}))
    assert kept.column("task_id").to_pylist() == ["good", "last"]
    assert set(kept.column_names) == set(ROWS[0])
    assert [(row["task_id"], row["rule"]) for row in rejected] == [("zero", "degenerate"), ("fast", "above_roofline")]
    assert rejected[0]["details"] and rejected[0]["degenerate"] == ROWS[1]["degenerate"]
    assert [rule["name"] for rule in summary["rules"]] == ["finite", *(rule.name for rule in screen.RULES)]
    adds_up(summary)
    assert (summary["total_in"], summary["total_kept"], summary["references"]) == (7, 2, 250)
    # One row that the filter kept has no profile at all: it is counted, and nobody wonders where it went.
    profiled = next(rule for rule in summary["rules"] if rule["name"] == "profiled")
    assert profiled["rejected"] == 1 and profiled["rejected_by_category"] == {"torch#1": 1}
    assert summary["degenerate"] == {kind: {"torch#1": 1} for kind in ("zeros", "mean", "without")}
    assert "| finite |" in text and "| degenerate |" in text and "## Degenerate answers" in text
    assert "Reference programs to keep apart from: 250." in text


def test_without_a_report_the_funnel_is_its_own(tmp_path):
    _, _, summary, _ = run(tmp_path, ROWS)
    adds_up(summary)
    assert (summary["total_in"], summary["total_kept"]) == (4, 2)


def test_unknown_limits_are_told(tmp_path):
    _, _, summary, text = run(tmp_path, [facts(roofline_ms=None), facts(task_id="b", roofline_ms=None)])
    assert not next(rule for rule in summary["rules"] if rule["name"] == "above_roofline")["applied"]
    assert "not applied: the limits of the device are not known" in text


def test_bad_requests_explain_themselves(tmp_path):
    error = run(tmp_path / "a", [{"code": "x", "task_id": "a"}])
    assert error["kind"] == "input" and "degenerate" in error["message"] and "kernels/profile" in error["hint"]
    error = run(tmp_path / "b", ROWS, before=funnel({"torch#1": 1}))
    assert error["kind"] == "input" and "do not belong together" in error["message"]
    error = run(tmp_path / "c", ROWS, skip=["no_such_rule"])
    assert error["kind"] == "params" and "no_such_rule" in error["message"]


def test_the_manifest_lists_every_rule_and_parameter():
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((HERE / "stage.yaml").read_text())
    assert manifest["params"]["skip"]["choices"] == [rule.name for rule in screen.RULES]
    assert {name: entry["default"] for name, entry in manifest["params"].items()} == PARAMS
    assert manifest["params"]["reject"]["choices"] == KINDS
    assert all((HERE / path).is_file() for path in manifest["sources"])
