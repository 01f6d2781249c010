"""`ops/resize`: the arithmetic by property, the change of the file by running it, and the program as a whole."""

import json
import pathlib
import random
import sys

import pytest

pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
OPS = HERE.parent
sys.path[:0] = [str(HERE), str(OPS / "python"), str(OPS.parent / "protocol" / "python")]

import stage_driver
from estimate import DEVICES
from resize import BATCHES, LeftOut, choose_batch, estimate_ms, with_batch

PARAMS = {"device": "cpu", "target_ms_min": 1.0, "target_ms_max": 100.0, "gflops": 0, "gbytes_per_s": 0, "max_bytes": 0}


def work_of(flops, moved, alive, weights=0, operators=2):
    """A call's work at batch sizes 16 and 32; `weights` bytes don't grow with the batch."""
    return {
        "flops": [16 * flops, 32 * flops],
        "moved": [16 * moved + weights, 32 * moved + weights],
        "alive": [16 * alive + weights, 32 * alive + weights],
        "operators": [operators, operators],
    }


def row(number, work, code="batch_size = 16\nrest = 2\n"):
    return {
        "task_id": f"llm-7-{number:06d}",
        "index": number,
        "ops": '["a"]',
        "families": '["x"]',
        "data_source": "torch#1",
        "code": code,
        "batch_size": 16,
        "origin": "llm:m",
        "work": json.dumps(work),
        "attempts": 1,
        "llm_prompt_tokens": 5,
        "llm_completion_tokens": 6,
        "llm_cost_usd": None,
        "operators": "-",
    }


def run(folder, rows, rates=None, **params):
    folder.mkdir()
    inputs = {"tasks": stage_driver.write_table(folder / "tasks.parquet", rows)}
    if rates:
        inputs["rates"] = stage_driver.write_table(folder / "rates.parquet", rates)
    path = stage_driver.request(folder, "ops/resize", {**PARAMS, **params}, inputs, ["tasks", "left_out"])
    return stage_driver.run_program(HERE / "resize.py", path)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("flops, moved", [(1e6, 1e5), (1e8, 1e4), (1e3, 1e6), (2e9, 1e6)])
def test_the_estimate_lands_in_the_range(device, flops, moved):
    rates, work = DEVICES[device], work_of(flops, moved, moved)
    batch, estimate = choose_batch(random.Random(1), rates, work, 16, {**PARAMS, "max_bytes": 2**36})
    assert batch in BATCHES and 1 <= estimate <= 100
    # At the written batch size, a line through its two points is the point itself.
    assert estimate_ms(rates, {name: values[0] for name, values in work.items()}) > 0


def test_tasks_of_one_kind_are_spread_over_the_range():
    times = [
        choose_batch(random.Random(n), DEVICES["cpu"], work_of(1e6, 1e5, 1e5), 16, {**PARAMS, "max_bytes": 2**36})[1]
        for n in range(50)
    ]
    assert min(times) < 8 and max(times) > 12


@pytest.mark.parametrize(
    "work, reason",
    [
        (work_of(10, 10, 1e6), "too little work"),
        (work_of(1e12, 1e6, 1e5), "too much work"),
        (work_of(1e6, 1e6, 1e6, weights=2**40), "too large"),
    ],
)
def test_what_no_batch_size_suits_is_left_out(work, reason):
    with pytest.raises(LeftOut) as raised:
        choose_batch(random.Random(1), DEVICES["cpu"], work, 16, PARAMS)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "line",
    [
        "batch_size = 16",
        "batch_size: int = 16",
        "batch_size = 16  # rows",
        "rows = batch_size = 16",
        "é = 'é'; batch_size = 16",
    ],
)
def test_only_the_constant_changes(line):
    code = f'"""A task."""\n{line}\nother = 16\ntwice = batch_size * 2\n'
    changed, namespace = with_batch(code, 4096), {}
    exec(changed, namespace)
    assert (namespace["batch_size"], namespace["other"], namespace["twice"]) == (4096, 16, 8192)
    assert with_batch(changed, 16) == code


@pytest.mark.parametrize("code", ["x = 1\n", "batch_size = 4 * 4\n", "batch_size = 'a'\n"])
def test_a_file_without_the_constant_is_left_out(code):
    with pytest.raises(LeftOut, match="no top-level constant"):
        with_batch(code, 4)


def test_the_program_keeps_the_order_and_says_what_is_left_out(tmp_path):
    work = work_of(1e6, 1e5, 1e5)
    rows = [row(0, work), row(1, work_of(10, 10, 1e6)), row(2, work), row(3, work, "batch_size = 2 * 8\n")]
    ended = run(tmp_path / "a", rows)
    assert ended.returncode == 0, ended.stderr
    tasks = stage_driver.read_rows(tmp_path / "a", "tasks")
    left_out = stage_driver.read_rows(tmp_path / "a", "left_out")
    assert [task["index"] for task in tasks] == [0, 2]
    assert all(task["code"].startswith(f"batch_size = {task['batch_size']}\n") for task in tasks)
    assert [(item["task_id"], item["reason"]) for item in left_out] == [
        ("llm-7-000001", "too little work"),
        ("llm-7-000003", "no constant"),
    ]
    assert "operators" not in tasks[0] and "work" not in tasks[0] and tasks[0]["llm_cost_usd"] is None


def test_a_faster_device_gets_a_larger_batch(tmp_path):
    rows = [row(number, work_of(1e6, 1e5, 1e5)) for number in range(4)]
    device = DEVICES["cpu"]
    figures = {
        "memory_bytes": 64e9,
        "gflops": 16 * device.gflops,
        "gbytes_per_s": 16 * device.gbytes_per_s,
        "operator_us": device.operator_us,
    }
    rates = [{"kind": "device", "name": name, "usage": 0, "rank": 0, "value": value} for name, value in figures.items()]
    batches = []
    for name, table in (("builtin", None), ("measured", rates)):
        ended = run(tmp_path / name, rows, table)
        assert ended.returncode == 0, ended.stderr
        batches.append([task["batch_size"] for task in stage_driver.read_rows(tmp_path / name, "tasks")])
    assert all(fast > 4 * slow for slow, fast in zip(*batches, strict=True))


def test_an_empty_range_is_refused(tmp_path):
    ended = run(tmp_path / "a", [row(0, work_of(1, 1, 1))], target_ms_min=9, target_ms_max=3)
    assert ended.returncode == 1
    assert "above target_ms_max" in json.loads((tmp_path / "a" / "error.json").read_text())["message"]


def test_tasks_of_another_kind_are_refused(tmp_path):
    composed = row(0, work_of(1, 1, 1))
    del composed["work"]
    assert run(tmp_path / "a", [composed]).returncode == 1
    error = json.loads((tmp_path / "a" / "error.json").read_text())
    assert error["message"] == "the tasks have no column work" and "ops/generate" in error["hint"]
