"""The audit finds every defect that is planted, and none in a set without.

With a dataset of the quickstart at hand (`cuda-agent export dataset.dataset build/quickstart`, or another folder that
CUDA_AGENT_DATASET names) that one is audited too, with rows run.
"""

import json
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import audit_dataset

SMOOTH = ["tanh", "sigmoid", "sin", "atan"]


def code(*, body="torch.tanh(self.linear(x))", made="", arguments="x", inputs="torch.randn(8, features)", extra=""):
    return f'''import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """A layer and more."""

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
{made}
    def forward(self, {arguments}):
{extra}        return {body}


features = 32


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return [features]
'''


def row(index, operators, **parts):
    text = code(**parts).replace("features = 32", f"features = {32 + index}")
    return {"ops": json.dumps(operators), "data_source": f"torch#{len(operators)}", "code": text}


def applied(names):
    """Code that applies functions one after another to a layer's output."""
    text = "self.linear(x)"
    for name in names:
        text = f"torch.{name}({text})"
    return text


def clean():
    """Thirty-one rows in the paper's shares, all different."""
    lengths = [2] * 25 + [1, 3, 3, 4, 5]
    rows = []
    for index, length in enumerate(lengths):
        if length == 1:
            rows.append(row(index, ["nn.Linear"], body="self.linear(x)"))
            continue
        names = [SMOOTH[(index + step) % len(SMOOTH)] for step in range(length - 1)]
        rows.append(row(index, ["nn.Linear", *(f"torch.{name}" for name in names)], body=applied(names)))
    taken = code(body="self.block(x)").replace("class Model", "class Block(nn.Linear):\n    pass\n\n\nclass Model")
    taken = taken.replace("self.linear = nn.Linear(", "self.block = Block(")
    rows.append({"ops": '["transformers.models.a.modeling_a.Block"]', "data_source": "transformers", "code": taken})
    return rows


def found(rows, **options):
    return {name for name, places in audit_dataset.audit(rows, **options).items() if places}


def test_a_clean_set_has_no_defect(tmp_path, capsys):
    rows = clean()
    write(tmp_path, rows)
    assert audit_dataset.main([str(tmp_path)]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "31 rows" in out and out.rstrip().endswith("0 defects")


def write(folder, rows):
    import pyarrow
    import pyarrow.parquet

    (folder / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data" / "train-00000-of-00001.parquet")


LINE = "        self.{} = nn.ReLU()\n"
STATIC = {
    "unreadable": {"code": "def broken(:"},
    "declares an operator that it does not use": {"ops": '["nn.Linear", "nn.Conv3d"]'},
    "uses an operator that it does not declare": {"code": code(body="F.relu(torch.tanh(self.linear(x)))")},
    "category and number of operators differ": {"ops": '["nn.Linear"]'},
    "unused module, parameter or buffer": {"code": code(made=LINE.format("spare"))},
    "unused argument of forward": {"code": code(arguments="x, mask=None")},
    "unused argument of __init__": {"code": code().replace("(self, features)", "(self, features, bias=True)")},
    "dead computation": {"code": code(extra="        y = x + 1\n        z = y * 2\n")},
    "global in place of an argument": {
        "code": code().replace("nn.Linear(features, features)", "nn.Linear(features, width)") + "\n\nwidth = 32\n"
    },
    "random forward (by its code)": {"code": code(body="torch.tanh(self.linear(x)) + torch.rand_like(x)")},
    "constant tensor made in forward": {"code": code(body="torch.tanh(self.linear(x)) + torch.ones(1)")},
}


@pytest.mark.parametrize("defect", [*STATIC, "byte", "registered", "overwritten", "thrown away"])
def test_a_planted_defect_of_the_code_is_found(defect):
    rows = clean()
    assert rows[0]["ops"] == '["nn.Linear", "torch.tanh"]'
    others = {
        "byte": ("byte-identical duplicate", {"code": rows[4]["code"], "ops": rows[4]["ops"]}),
        "registered": (
            "unused module, parameter or buffer",
            {"code": code(made="        self.register_buffer('h', torch.zeros(3))\n")},
        ),
        "overwritten": (
            "dead computation",
            {"code": code(extra="        y = x * 2\n        y = x + 1\n        x = y\n")},
        ),
        "thrown away": ("dead computation", {"code": code(extra="        torch.exp(x)\n")}),
    }
    name, change = others.get(defect, (defect, STATIC.get(defect)))
    rows[0] |= change
    assert name in found(rows)


def test_names_layout_imports_and_comments_hide_no_duplicate_and_sizes_make_none():
    rows = clean()
    text = rows[4]["code"]
    renamed = (
        text.replace("self.linear", "self.inner")
        .replace("import torch.nn as nn", "from torch import nn  # plain")
        .replace('    """A layer and more."""\n', "")
        .replace("(self, x)", "(self, image: torch.Tensor)")
        .replace("(x)", "(image)")
    )
    rows[0] |= {"code": renamed, "ops": rows[4]["ops"]}
    names = found(rows)
    assert "normalised duplicate" in names and "byte-identical duplicate" not in names
    rows[0]["code"] = renamed.replace("features = 36", "features = 99")
    assert "normalised duplicate" not in found(rows)


def test_a_duplicate_in_other_words_is_found_by_its_graph():
    pytest.importorskip("torch")
    plain = row(0, ["nn.Linear", "torch.tanh"])
    words = row(0, ["F.linear", "torch.tanh"], body="F.linear(x, self.linear.weight, self.linear.bias).tanh()")
    other = row(0, ["nn.Linear", "torch.sin"], body="torch.sin(self.linear(x))")
    larger = row(1, ["nn.Linear", "torch.tanh"])
    swapped = row(0, ["nn.Linear", "torch.sub"], body="torch.sub(x, self.linear(x))")
    back = row(0, ["nn.Linear", "torch.sub"], body="torch.sub(self.linear(x), x)")
    places = audit_dataset.audit([plain, words, other, larger, swapped, back], graphs=True)
    assert places["semantic duplicate"] == {1: "as row 0"} and not places["normalised duplicate"]


def test_shares_are_held_against_the_papers():
    categories = [row["data_source"] for row in clean()]
    assert audit_dataset.shares_off(categories) == []
    assert audit_dataset.shares_off(categories + ["torch#1"] * 5)
    assert any("no category" in text for text in audit_dataset.shares_off([*categories, "torch#6"]))
    exact = [name for name, share in audit_dataset.SHARES.items() for _ in range(round(100 * share))]
    assert audit_dataset.shares_off(exact) == []
    assert len(audit_dataset.shares_off(exact[:-118] + ["torch#4"] * 118)) == 2


def spread(count=1000, distinct=250):
    """Lists of two operators with none above a cap."""
    pairs = [(left, right) for left in range(distinct) for right in range(left + 1, distinct)]
    step = len(pairs) // count
    return [[f"torch.op{left}", f"torch.op{right}"] for left, right in pairs[::step][:count]]


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda lists: [[*names, "nn.ReLU"] for names in lists[:31]] + lists[31:], "relu in"),
        (lambda lists: [[*names, "nn.Linear"] for names in lists[:61]] + lists[61:], "linear in"),
        (lambda lists: [[*names, "nn.Conv2d"] for names in lists[:61]] + lists[61:], "conv2d in"),
        (
            lambda lists: (
                [[*names, ("nn.Bilinear", "F.bilinear")[len(names[0]) % 2]] for names in lists[:11]] + lists[11:]
            ),
            "bilinear in",
        ),
        (lambda lists: [["torch.a", "torch.b"] for _ in range(6)] + lists[6:], "a + b in"),
        (lambda lists: [[f"torch.op{index % 150}"] for index in range(1000)], "150 distinct operators"),
    ],
)
def test_caps(change, text):
    assert any(text in line for line in audit_dataset.over_the_caps(change(spread())))


def test_caps_hold_from_a_thousand_rows_on():
    lists = spread()
    assert audit_dataset.over_the_caps(lists) == []
    # At the cap, and with no partner twice.
    below = [[*names, "nn.ReLU"] if index % 37 == 0 else names for index, names in enumerate(lists)]
    assert sum("nn.ReLU" in names for names in below) == 28
    assert audit_dataset.over_the_caps(below) == []
    name = "operator or pair in too many rows"
    assert audit_dataset.counts(name, 1000) and not audit_dataset.counts(name, 999)


RUNNING = {
    "fails": {"body": "self.linear(x, x)"},
    "out of memory": {"body": "torch.tanh(self.linear(x)) + x.new_ones(2**60)[:1]"},
    "not finite": {"body": "torch.log(self.linear(x))"},
    "independent of its inputs": {"body": "torch.tanh(self.linear(x * 0))"},
    "random forward (as it runs)": {"body": "torch.tanh(self.linear(x)) + torch.rand_like(x)"},
    "low activity": {"body": "torch.relu(self.linear(x) - 1.2)"},
    "unstable across seeds": {"body": "torch.exp(20 * self.linear(x)).clamp(max=1e30)"},
    "inputs don't follow the seed": {
        "inputs": "torch.randn(8, features, "
        "generator=torch.Generator().manual_seed(__import__('time').time_ns() % 2**31))"
    },
    "fixed input": {"inputs": "torch.ones(8, features) * 0.5"},
    "insensitive to an input": {
        "arguments": "x, y",
        "body": "torch.tanh(self.linear(x)) + y * 1e-9",
        "inputs": "torch.randn(8, features), torch.randn(8, features)",
    },
    "train and eval mode differ": {"body": "F.dropout(torch.tanh(self.linear(x)), 0.5, self.training)"},
}


def test_planted_defects_are_seen_when_rows_run():
    pytest.importorskip("torch")
    rows = [row(0, ["nn.Linear", "torch.tanh"], **parts) for parts in RUNNING.values()]
    rows += [row(1, ["nn.Linear", "torch.tanh"]), row(2, ["nn.Linear"], body="self.linear(x)")]
    places = audit_dataset.audit(rows, run=len(rows))
    for index, defect in enumerate(RUNNING):
        assert index in places[defect], (
            defect,
            {name: found[index] for name, found in places.items() if index in found},
        )
    for name in audit_dataset.RUNNING:
        assert not {len(rows) - 1, len(rows) - 2} & set(places[name]), (name, places[name])
    assert list(RUNNING) == audit_dataset.RUNNING


def test_a_row_that_never_ends_or_dies_is_told(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("AUDIT_SECONDS_A_ROW", "3")
    endless = row(0, ["nn.Linear", "torch.tanh"], extra="        while x is x:\n            pass\n")
    dying = row(1, ["nn.Linear", "torch.tanh"], extra="        __import__('os').kill(__import__('os').getpid(), 9)\n")
    places = audit_dataset.audit([endless, dying, row(2, ["nn.Linear", "torch.tanh"])], run=3)
    assert set(places["fails"]) == {0, 1}


def test_the_exit_status_says_what_was_found(tmp_path, capsys):
    rows = clean()
    rows[0]["code"] = rows[4]["code"]
    write(tmp_path / "bad", rows)
    assert audit_dataset.main([str(tmp_path / "bad")]) == 1
    assert "byte-identical duplicate" in capsys.readouterr().out
    assert audit_dataset.main([str(tmp_path / "none")]) == 2
    (tmp_path / "other").mkdir()
    assert audit_dataset.main([str(tmp_path / "other")]) == 2
    assert "data/*.parquet" in capsys.readouterr().err


DATASET = pathlib.Path(os.environ.get("CUDA_AGENT_DATASET", ROOT / "build" / "quickstart"))


@pytest.mark.skipif(
    not DATASET.exists(), reason=f"no dataset at {DATASET}: cuda-agent export dataset.dataset build/quickstart"
)
def test_the_published_dataset_is_clean(capsys):
    assert audit_dataset.main([str(DATASET), "--run", "8"]) == 0, capsys.readouterr().out
