"""`ops/requests`: the drawing by property and by counting, and the program as the engine starts it."""

import collections
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
OPS = HERE.parent
sys.path[:0] = [str(HERE), str(OPS / "synthesize"), str(OPS / "python"), str(OPS.parent / "protocol" / "python")]

import itertools

import stage_driver
from draw_requests import NO_NEIGHBOURS, Drawer, describe, follows

SHARES = {"torch#1": 3.40, "torch#2": 83.77, "torch#3": 7.62, "torch#4": 2.80, "torch#5": 1.23}


def usage(call="F.op({x})", **changed):
    base = {
        "ranks": [2, 3, 4, 5],
        "input": "float",
        "symbols": {},
        "construct": None,
        "call": call,
        "operands": [],
        "requires": [],
        "domain": "any",
        "bounds": [None, None],
        "smooth": True,
    }
    return {**base, **changed}


def operator(name, family, **changed):
    return {
        "operator": name,
        "library": "torch",
        "family": family,
        "summary": f"Applies {name}.",
        "usages": json.dumps([usage(**{"call": f"{name}({{x}})", **changed})]),
    }


OPERATORS = [
    operator(
        "nn.Linear",
        "linear",
        construct="nn.Linear({in_features}, {out_features})",
        call="{module}({x})",
        symbols={"in_features": {"value": "shape[-1]"}, "out_features": {"choices": "[64, 128]"}},
    ),
    operator("nn.Bilinear", "linear"),
    operator("nn.Conv2d", "convolution", ranks=[4]),
    operator("torch.log", "elementwise", domain="positive"),
    *[operator(f"torch.op{number}", "elementwise") for number in range(6)],
    *[operator(f"F.act{number}", "activation") for number in range(4)],
    operator(
        "F.normalize",
        "normalization",
        call="F.normalize({x}, dim={dim})",
        symbols={"dim": {"choices": "list(range(1, len(shape)))"}},
    ),
    operator("torch.sum", "reduction"),
]


def run(folder, operators=OPERATORS, **params):
    params = {"count": 40, "seed": 7, "max_ops": 5, "shares": SHARES, "families": {}, "operator_weights": {}} | params
    folder.mkdir()
    table = stage_driver.write_table(folder / "operators.parquet", operators)
    path = stage_driver.request(folder, "ops/requests", params, {"operators": table}, ["requests"])
    environment = stage_driver.environment(HERE / "draw_requests.py", path)
    environment["PYTHONPATH"] += f"{os.pathsep}{OPS / 'synthesize'}"
    return subprocess.run(
        [sys.executable, str(HERE / "draw_requests.py")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def rows_of(folder, **params):
    ended = run(folder, **params)
    assert ended.returncode == 0, ended.stderr
    return stage_driver.read_rows(folder, "requests")


def test_more_requests_begin_with_the_fewer_and_the_order_of_the_table_does_not_matter(tmp_path):
    fewer = rows_of(tmp_path / "fewer", count=40)
    more = rows_of(tmp_path / "more", count=60, operators=OPERATORS[::-1])
    assert more[:40] == fewer
    assert [row["index"] for row in more] == list(range(60))
    assert rows_of(tmp_path / "other", seed=8) != fewer


def test_each_request_has_as_many_operators_as_its_category_says(tmp_path):
    rows = rows_of(tmp_path / "a", count=300)
    for row in rows:
        operators, families = json.loads(row["ops"]), json.loads(row["families"])
        assert len(operators) == len(set(operators)) == len(families) == int(row["data_source"][-1])
        assert all(f"`{name}`" in row["operators"] for name in operators)
        for one, next_one in itertools.pairwise(families):
            assert not (one == next_one and one in NO_NEIGHBOURS)
        # Only inputs can be drawn to be positive.
        assert "torch.log" not in operators[1:]
    found = collections.Counter(row["data_source"] for row in rows)
    assert found["torch#2"] == pytest.approx(300 * 83.77 / 98.82, abs=6)


def test_weights_decide_how_often_families_and_operators_come():
    drawer = Drawer(OPERATORS, {"linear": 10, "elementwise": 5, "activation": 0}, {"nn.Bilinear": 0.1})
    drawn = [drawer.draw(random.Random(f"x{number}"), 1)[0][0] for number in range(2000)]
    families = collections.Counter(row["family"] for row in drawn)
    names = collections.Counter(row["operator"] for row in drawn)
    assert families["activation"] == 0
    assert families["linear"] / families["elementwise"] == pytest.approx(2, rel=0.2)
    assert names["nn.Linear"] / names["nn.Bilinear"] == pytest.approx(10, rel=0.5)


def test_operators_share_a_rank():
    drawer = Drawer(OPERATORS, {}, {})
    for number in range(300):
        chain, rank = drawer.draw(random.Random(number), 3)
        assert all(any(rank in usage["ranks"] for usage in row["usages"]) for row in chain)
    convolution = next(row for row in drawer.operators if row["operator"] == "nn.Conv2d")
    assert follows(convolution, 4, []) and not follows(convolution, 3, [])


def test_a_description_says_how_to_construct_and_call():
    drawer = Drawer(OPERATORS, {}, {})
    text = describe(next(row for row in drawer.operators if row["operator"] == "nn.Linear"), 2)
    assert "Constructed as `nn.Linear(in_features, out_features)`, called as `module(x)`" in text
    assert "`out_features` such as 64, 128" in text and "`in_features` is `x.shape[-1]`" in text
    text = describe(next(row for row in drawer.operators if row["operator"] == "F.normalize"), 3)
    assert "Called as `F.normalize(x, dim=dim)`" in text and "`dim` such as 1, 2;" in text


@pytest.mark.parametrize(
    "params, message",
    [
        ({"shares": {"transformers": 1}}, "no category has a share"),
        ({"families": {"linear": -1}}, "families: the weight of linear is -1"),
        ({"operators": OPERATORS[:1], "families": {"linear": 0}}, "operators that can follow one another"),
    ],
)
def test_parameters_that_leave_nothing_are_refused(tmp_path, params, message):
    ended = run(tmp_path / "a", **params)
    assert ended.returncode == 1
    error = json.loads((tmp_path / "a" / "error.json").read_text())
    assert error["kind"] == "params" and message in error["message"]
