"""The published folder is read by the libraries that its users have: `datasets`, DuckDB and Polars; and what is written
for verl as verl reads it.

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

# Nothing here is on a hub: a try to ask one is a fault.
os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("CUDA_AGENT_BIN", ROOT / "target" / "debug" / "cuda-agent"))
CATEGORIES = ["torch#1", "torch#2", "torch#3", "torch#4", "torch#5", "transformers"]
RELEASED = ["ops", "data_source", "code"]
NO_CAPS = {"max_operator_share": 0, "max_wide_share": 0, "max_bilinear_share": 0, "max_pair_share": 0}


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


def publish(folder, rows, left_out=None, **params):
    """Run the program; returns the finished process."""
    (folder / "inputs").mkdir(parents=True)
    (folder / "outputs").mkdir()
    inputs = {}
    for port, content in {"tasks": rows, **({"left_out": left_out} if left_out else {})}.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), folder / "inputs" / f"{port}.parquet")
        inputs[port] = {"type": "table", "path": f"inputs/{port}.parquet", "digest": "0" * 64, "rows": len(content)}
    defaults = {"count": 0, "shares": {}, "refill": True, "min_count": 1, "title": "Ops", "licence": "cc-by-4.0"}
    request = {
        "protocol": 1,
        "stage": "dataset",
        "kind": "ops/publish",
        "params": defaults | NO_CAPS | params,
        "seed": 0,
        "inputs": inputs,
        "outputs": {
            "dataset": {"type": "tree", "path": "outputs/dataset"},
            "samples": {"type": "tasks", "path": "outputs/samples.parquet"},
            "measurements": {"type": "table", "path": "outputs/measurements.parquet"},
            "verl": {"type": "tree", "path": "outputs/verl"},
        },
        "by_row": None,
        "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []},
        "device": None,
        "deadline_unix_s": None,
        "state_dir": str(folder),
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    return subprocess.run(
        [BINARY, "stage", "ops/publish"],
        cwd=folder,
        env={"CUDA_AGENT_REQUEST": "request.json"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publish")
    done = publish(folder, measured_rows(), count=24)
    assert done.returncode == 0, done.stderr
    return folder / "outputs" / "dataset"


def test_datasets_loads_both_configurations(dataset, tmp_path):
    import datasets

    def load(*names):
        return datasets.load_dataset(str(dataset), *names, split="train", cache_dir=str(tmp_path))

    tasks, measurements = load(), load("measurements")
    assert tasks.column_names == RELEASED
    assert {feature.dtype for feature in tasks.features.values()} == {"string"}
    assert len(tasks) == len(measurements) == 24
    assert set(tasks["data_source"]) == set(CATEGORIES)
    assert tasks["data_source"][:] == measurements["data_source"][:]
    by_id = {row["task_id"]: row for row in measured_rows()}
    for task, measurement in zip(tasks, measurements, strict=True):
        source = by_id[measurement["task_id"]]
        assert task == {name: source[name] for name in RELEASED}
        assert measurement["output_shape"] == source["output_shape"]
        assert measurement["compiled_ms"] == source["compiled_ms"]


def test_the_folder_as_it_is_has_the_released_columns_and_one_split(dataset, tmp_path):
    import datasets

    loaded = datasets.load_dataset(str(dataset), cache_dir=str(tmp_path))
    assert list(loaded) == ["train"]
    assert loaded["train"].column_names == RELEASED
    assert datasets.get_dataset_config_names(str(dataset)) == ["default", "measurements"]


@pytest.fixture(scope="module")
def verl(dataset):
    return dataset.parent / "verl" / "train.parquet"


def test_verls_columns_have_verls_types(verl):
    text = pyarrow.string()
    schema = pyarrow.parquet.read_schema(verl)
    assert schema.names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert schema.field("data_source").type == schema.field("ability").type == text
    message = schema.field("prompt").type.value_type
    assert {field.name: field.type for field in message} == {"content": text, "role": text}
    assert {field.name: field.type for field in schema.field("reward_model").type} == {
        "ground_truth": text,
        "style": text,
    }
    extra = {field.name: field.type for field in schema.field("extra_info").type}
    assert extra["index"] == pyarrow.int64() and extra["ops"].value_type == text
    assert {name for name, kind in extra.items() if kind == text} == {"category", "split", "task_id"}


def test_verls_rows_are_the_published_ones(dataset, verl, tmp_path):
    import datasets

    def load(*names, **files):
        return datasets.load_dataset(*names, **files, split="train", cache_dir=str(tmp_path))

    rows, tasks = load("parquet", data_files=str(verl)), load(str(dataset))
    measurements = load(str(dataset), "measurements")
    assert len(rows) == len(tasks) == 24
    for index, (row, task, measurement) in enumerate(zip(rows, tasks, measurements, strict=True)):
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert f"```python\n{task['code'].rstrip()}\n```" in message["content"]
        assert row["reward_model"] == {"ground_truth": task["code"], "style": "rule"}
        assert (row["data_source"], row["ability"]) == (task["data_source"], "cuda")
        assert row["extra_info"] == {
            "category": task["data_source"],
            "index": index,
            "ops": json.loads(task["ops"]),
            "split": "train",
            "task_id": measurement["task_id"],
        }


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
        "README.md",
        "data/train-00000-of-00001.parquet",
        "measurements/train-00000-of-00001.parquet",
    ]
    files += [pathlib.Path("..", "verl", "train.parquet")]
    assert all((dataset / path).read_bytes() == (again / path).read_bytes() for path in files)


def test_a_row_over_a_cap_is_passed_over_and_counted(tmp_path):
    rows = measured_rows() + [
        row | {"ops": json.dumps([f"torch.other{index}"]), "task_id": f"8-{index:05d}"}
        for index, row in enumerate(measured_rows())
    ]
    assert publish(tmp_path / "capped", rows, count=24, max_operator_share=0.03).returncode == 0
    folder = tmp_path / "capped" / "outputs"
    ops = pyarrow.parquet.read_table(folder / "samples.parquet").column("ops").to_pylist()
    assert len(ops) == 24 and sum("nn.ReLU" in value for value in ops) == 5
    card = (folder / "dataset" / "README.md").read_text(encoding="utf-8")
    assert "| one operator | 3 % | 5 | 5: relu |" in card


def test_what_could_not_be_made_is_counted(tmp_path):
    left_out = [{"index": 7, "data_source": "transformers", "reason": "too slow", "detail": "300 ms"}]
    assert publish(tmp_path / "left", measured_rows(), left_out=left_out).returncode == 0
    card = (tmp_path / "left" / "outputs" / "dataset" / "README.md").read_text(encoding="utf-8")
    assert "## What could not be made" in card and "| too slow | 1 | 1 |" in card


def test_too_few_tasks_leave_an_error_with_a_hint(tmp_path):
    done = publish(tmp_path / "few", measured_rows()[:3], min_count=48)
    assert done.returncode == 1
    error = json.loads((tmp_path / "few" / "error.json").read_text(encoding="utf-8"))
    assert error["kind"] == "input"
    assert "3 of 3 tasks" in error["message"]
    assert "short: torch#1 1 of 2, torch#2 1 of 40, torch#3 1 of 4, torch#4 0 of 1" in error["message"]
    assert error["hint"].startswith("make about 57 more tasks, 60 in all")
    assert not list((tmp_path / "few" / "outputs").iterdir())
