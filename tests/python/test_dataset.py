"""The published folder is read by the libraries that its users have: `datasets`, DuckDB and Polars.

The folder comes from the real program of `ops/publish`, started as the engine starts it. `CUDA_AGENT_BIN` names the
binary (default: the debug build).
"""

import json
import os
import pathlib
import subprocess

import pyarrow
import pyarrow.parquet
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("CUDA_AGENT_BIN", ROOT / "target" / "debug" / "cuda-agent"))
CATEGORIES = ["torch#1", "torch#2", "torch#3", "torch#4", "torch#5", "transformers"]
RELEASED = ["ops", "data_source", "code"]


def measured_rows():
    """Forty rows as the stages before leave them: task names, what is released, and what was measured."""
    return [
        {
            "task_id": f"7-{index:05d}",
            "ops": json.dumps(["nn.ReLU", f"torch.op{index}"]),
            "data_source": CATEGORIES[index % len(CATEGORIES)],
            # Quotes, a line end and a character beyond ASCII: what a careless writer or reader would spoil.
            "code": f'class Model:\n    """Say "{index}" – twice."""\n',
            "eager_ms": 1.0 + index,
            "compiled_ms": None if index % 5 == 0 else 0.5 + index,
            "output_shape": [index, 2],
        }
        for index in range(40)
    ]


def publish(folder, rows, **params):
    """Run the program; returns the finished process."""
    (folder / "inputs").mkdir(parents=True)
    (folder / "outputs").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "inputs" / "tasks.parquet")
    defaults = {"count": 0, "shares": {}, "refill": True, "min_count": 1, "title": "Ops", "licence": "cc-by-4.0"}
    request = {
        "protocol": 1, "stage": "dataset", "kind": "ops/publish", "params": defaults | params, "seed": 0,
        "inputs": {"tasks": {"type": "tasks", "path": "inputs/tasks.parquet", "digest": "0" * 64, "rows": len(rows)}},
        "outputs": {
            "dataset": {"type": "tree", "path": "outputs/dataset"},
            "samples": {"type": "tasks", "path": "outputs/samples.parquet"},
            "measurements": {"type": "table", "path": "outputs/measurements.parquet"},
        },
        "by_row": None, "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []}, "device": None,
        "deadline_unix_s": None, "state_dir": str(folder),
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    return subprocess.run(
        [BINARY, "stage", "ops/publish"], cwd=folder, env={"CUDA_AGENT_REQUEST": "request.json"},
        capture_output=True, text=True, check=False,
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publish")
    done = publish(folder, measured_rows(), count=24)
    assert done.returncode == 0, done.stderr
    return folder / "outputs" / "dataset"


def test_datasets_loads_both_configurations(dataset, tmp_path):
    import datasets

    load = lambda *names: datasets.load_dataset(str(dataset), *names, split="train", cache_dir=str(tmp_path))
    tasks, measurements = load(), load("measurements")
    assert tasks.column_names == RELEASED
    assert {feature.dtype for feature in tasks.features.values()} == {"string"}
    assert len(tasks) == len(measurements) == 24
    assert set(tasks["data_source"]) == set(CATEGORIES)
    assert tasks["data_source"][:] == measurements["data_source"][:]
    by_id = {row["task_id"]: row for row in measured_rows()}
    for task, measurement in zip(tasks, measurements):
        source = by_id[measurement["task_id"]]
        assert task == {name: source[name] for name in RELEASED}
        assert measurement["output_shape"] == source["output_shape"]
        assert measurement["compiled_ms"] == source["compiled_ms"]


def test_duckdb_counts_categories(dataset):
    import duckdb

    rows = duckdb.sql(
        f"select data_source, count(*), min(json_array_length(ops)) from '{dataset}/data/*.parquet' group by all"
    ).fetchall()
    assert {name for name, _, _ in rows} == set(CATEGORIES)
    assert sum(count for _, count, _ in rows) == 24
    assert {length for _, _, length in rows} == {2}


def test_polars_reads_the_columns_in_order(dataset):
    import polars

    frame = polars.read_parquet(dataset / "data" / "*.parquet")
    assert frame.schema == dict.fromkeys(RELEASED, polars.String)
    assert frame.height == 24
    assert json.loads(frame["ops"][0])[0] == "nn.ReLU"


def test_the_same_rows_make_the_same_bytes(dataset, tmp_path):
    assert publish(tmp_path / "again", measured_rows(), count=24).returncode == 0
    again = tmp_path / "again" / "outputs" / "dataset"
    files = sorted(path.relative_to(dataset) for path in dataset.rglob("*") if path.is_file())
    assert [str(path) for path in files] == [
        "README.md", "data/train-00000-of-00001.parquet", "measurements/train-00000-of-00001.parquet",
    ]
    assert all((dataset / path).read_bytes() == (again / path).read_bytes() for path in files)


def test_too_few_tasks_leave_an_error_with_a_hint(tmp_path):
    done = publish(tmp_path / "few", measured_rows()[:3], min_count=48)
    assert done.returncode == 1
    error = json.loads((tmp_path / "few" / "error.json").read_text(encoding="utf-8"))
    assert error["kind"] == "input"
    assert "3 of 3 tasks" in error["message"]
    assert error["hint"]
    assert not list((tmp_path / "few" / "outputs").iterdir())
