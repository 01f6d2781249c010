"""`ops/rates`: what is rounded and ordered by property, the worker by operators that misbehave, and a run on the
CPU."""

import json
import math
import pathlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

HERE = pathlib.Path(__file__).resolve().parent
OPS = HERE.parent
sys.path[:0] = [str(HERE), str(OPS / "python"), str(OPS.parent / "protocol" / "python")]

import stage_driver
from estimate import DEVICES, measured_device, milliseconds, rates_of
from rates import FACTOR_STEP, FIGURE_STEP, coarse, factor_of, jobs_of

PARAMS = {"device": "auto", "budget_s": 30, "time_limit_s": 3}


def usage(call, **more):
    """An elementwise usage, as the crawl would store it."""
    return {
        "call": call,
        "construct": None,
        "symbols": {},
        "operands": [],
        "ranks": [2, 3],
        "input": "float",
        "domain": "any",
        "bounds": [None, None],
        "smooth": True,
        "requires": [],
        "cost": {"flops": "y", "bytes": "4 * (x + y)", "steps": 0},
        **more,
    }


def operator(name, *usages):
    return {
        "operator": name,
        "qualified": name,
        "library": "torch",
        "version": "0",
        "family": "elementwise",
        "usages": json.dumps(usages),
        "source": None,
        "path": None,
    }


@given(st.floats(1e-3, 1e15), st.sampled_from([FACTOR_STEP, FIGURE_STEP]))
def test_rounding_is_within_half_a_step_and_settles(value, step):
    rounded = coarse(value, step)
    assert abs(math.log(rounded / value)) <= math.log(step) / 2 + 0.006
    assert coarse(rounded, step) == rounded


def test_each_usage_is_measured_once_before_any_is_measured_twice():
    rows = [operator("torch.abs", usage("torch.abs({x})")), operator("torch.exp", usage("torch.exp({x})", ranks=[5]))]
    assert [(name, rank) for name, _, rank, _ in jobs_of(rows, "cpu")] == [
        ("torch.abs", 2),
        ("torch.exp", 5),
        ("torch.abs", 3),
    ]


def test_a_factor_brings_the_estimate_to_what_was_measured():
    figures = {"memory_bytes": 48e9, "gflops": 20_000.0, "gbytes_per_s": 2000.0, "operator_us": 5.0}
    device = measured_device("cuda", figures)
    assert device.task_bytes == 2e9
    answer = {"seconds": 0.003, "flops": 1e9, "moved": 2e9, "steps": 0}
    rows = [{"kind": "device", "name": name, "value": value} for name, value in figures.items()]
    rows += [
        {"kind": "operator", "name": "torch.exp", "usage": 0, "rank": 2, "value": factor_of(device, answer)},
        {"kind": "operator", "name": "torch.mode", "usage": 0, "rank": 2, "value": None},
    ]
    rates = rates_of({"device": "cuda", "gflops": 0, "gbytes_per_s": 0}, rows)
    assert rates.milliseconds("torch.exp", 0, 4, 1e9, 2e9, 0) == pytest.approx(3.0)
    assert rates.milliseconds("torch.mode", 0, 2, 1e9, 2e9, 0) == milliseconds(DEVICES["cuda"], 1e9, 2e9, 0)


def test_operators_that_misbehave_cost_their_own_row(tmp_path):
    rows = [
        operator("torch.abs", usage("torch.abs({x})")),
        operator("torch.fails", usage("torch.fails({x})")),
        operator("torch.hangs", usage("torch.sys.modules['time'].sleep(60 + 0 * {x}.numel())", ranks=[2])),
        operator("torch.leaves", usage("torch.os._exit({x}.dim())", ranks=[2])),
        operator("torch.exp", usage("torch.exp({x})", ranks=[4])),
        operator("torch.talks", usage("[torch.abs({x}), torch.sys.modules['builtins'].print('x')][0]", ranks=[2])),
    ]
    entry = stage_driver.write_table(tmp_path / "operators.parquet", rows)
    request = stage_driver.request(tmp_path, "ops/rates", PARAMS, {"operators": entry}, ("rates",))
    done = stage_driver.run_program(HERE / "rates.py", request)
    assert done.returncode == 0, done.stderr
    found = stage_driver.read_rows(tmp_path, "rates")
    figures = {item["name"]: item["value"] for item in found if item["kind"] == "device"}
    assert set(figures) == {"memory_bytes", "gflops", "gbytes_per_s", "operator_us"} and min(figures.values()) > 0
    values = {
        (item["name"], item["rank"]): (item["value"], item["reason"]) for item in found if item["kind"] != "device"
    }
    for key in (("torch.abs", 2), ("torch.abs", 3), ("torch.exp", 4), ("torch.talks", 2)):
        assert values[key][1] is None and 1e-3 < values[key][0] < 1e3, values
    assert "AttributeError" in values["torch.fails", 2][1]
    assert values["torch.hangs", 2] == (None, "timeout") and values["torch.leaves", 2] == (None, "the process ended")


def test_a_device_that_was_not_given_is_an_error(tmp_path):
    entry = stage_driver.write_table(tmp_path / "operators.parquet", [operator("torch.abs", usage("torch.abs({x})"))])
    request = stage_driver.request(
        tmp_path, "ops/rates", {**PARAMS, "device": "cuda"}, {"operators": entry}, ("rates",)
    )
    assert stage_driver.run_program(HERE / "rates.py", request).returncode == 1
    assert json.loads((tmp_path / "error.json").read_text())["kind"] == "device"
