"""Tests of `ops/report`: its figures by hand, and the whole page from the program as the engine starts it."""

import csv
import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python"), str(HERE.parent.parent / "protocol" / "python")]

import charts
import figures
import stage_driver

PAPER = {"torch#1": 204, "torch#2": 5026, "torch#3": 457, "torch#4": 168, "torch#5": 74, "transformers": 71}
PARAMS = {
    "title": "Ops & more",
    "shares": PAPER,
    "families": {},
    "max_operator_share": 0.03,
    "max_wide_share": 0.06,
    "max_bilinear_share": 0.01,
    "max_pair_share": 0.005,
    "top": 25,
}
TRAP = "</code></pre><script>alert('x')</script>"


def rows(count=60):
    """Samples and measurements as ops/publish leaves them, with every column that the page uses."""
    samples, measurements = [], []
    for index in range(count):
        category = list(PAPER)[index % 6]
        ops = ["LlamaMLP"] if category == "transformers" else ["nn.Linear", f"torch.op{index}"]
        samples.append(
            {"ops": json.dumps(ops), "data_source": category, "code": f"class Model:  # {index} {TRAP}\n    pass\n"}
        )
        measurements.append(
            {
                "task_id": f"7-{index:05d}",
                "data_source": category,
                "origin": "composer",
                "families": json.dumps(["transformers"] if category == "transformers" else ["linear", "elementwise"]),
                "eager_ms": 1.0 + index,
                "compiled_ms": None if index % 5 == 0 else (1.0 + index) / 2,
                "eager_trials": 10,
                "compiled_trials": 10,
                "compile_s": 2.0,
                "waiting_s": 1.0,
                "total_s": 4.0,
                "roofline_ms": 0.5 + index / 2,
                "roofline_limit": "memory",
                "device": "Card <1>",
                "torch": "2.11.0",
            }
        )
    return samples, measurements


def summary():
    rule = {"applied": True, "failing": 0, "params": {}, "rejected": 0, "rejected_by_category": {}}
    return {
        "in": {"torch#1": 50, "torch#2": 50}, "kept": {"torch#1": 44, "torch#2": 46}, "total_in": 100,
        "total_kept": 90, "references": 250,
        "rules": [
            {**rule, "name": "finite", "reason": "Outputs are finite."},
            {**rule, "name": "eager_time", "reason": "Within <the> range.", "params": {"min_ms": 1}, "rejected": 7,
             "rejected_by_category": {"torch#1": 6, "torch#2": 1}},
            {**rule, "name": "contaminated", "reason": "Unlike.", "params": {"max_similarity": 0.9}, "rejected": 3,
             "rejected_by_category": {"torch#2": 3}},
            {**rule, "name": "modes_agree", "reason": "", "applied": False, "not_applied_because": "left out"},
        ],
        "similarity": {
            "tasks": 100,
            "histogram": [{"to": round((place + 1) / 20, 2), "tasks": 5} for place in range(20)],
            "all": {"tasks": 100, "similar": 3, "same_signature": 4, "same_operators": 2, "same_graph": 1},
        },
    }  # fmt: skip


def run(folder, samples, measurements, report=None, params=None, **tables):
    """Run the program as the engine does; returns the page's folder, or the error that it left."""
    import pyarrow
    import pyarrow.parquet

    (folder / "outputs" / "page").mkdir(parents=True)
    inputs = {}
    for name, content in {"samples": samples, "measurements": measurements, **tables}.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), folder / f"{name}.parquet")
        inputs[name] = {"type": "table", "path": f"{name}.parquet", "rows": len(content)}
    if "rejected" in inputs:
        inputs["rejected"] = {"list": [inputs["rejected"]]}
    if report is not None:
        (folder / "report").mkdir()
        (folder / "report" / "funnel.json").write_text(json.dumps(report), encoding="utf-8")
        inputs["report"] = {"type": "report", "path": "report"}
    request = {
        "protocol": 1,
        "stage": "page",
        "kind": "ops/report",
        "params": PARAMS | (params or {}),
        "seed": 0,
        "inputs": inputs,
        "outputs": {"page": {"type": "tree", "path": "outputs/page"}},
        "by_row": None,
        "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []},
        "device": None,
        "deadline_unix_s": None,
        "state_dir": str(folder),
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "CUDA_AGENT_REQUEST": "request.json",
        **stage_driver.bytecode(),
        "PYTHONPATH": os.pathsep.join(map(str, [HERE, HERE.parent.parent / "protocol" / "python"])),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "page.py")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        assert (folder / "error.json").exists(), done.stderr
        return json.loads((folder / "error.json").read_text(encoding="utf-8"))
    return folder / "outputs" / "page"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    samples, measurements = rows()
    return run(
        tmp_path_factory.mktemp("report"),
        samples,
        measurements,
        summary(),
        {"families": {"linear": 1, "elementwise": 3}},
        rejected=[{"task_id": "7-1", "data_source": "torch#1", "rule": "eager_time", "detail": "0.2 ms"}],
        operators_left_out=[
            {"operator": "torch.rand", "library": "torch", "reason": "random", "detail": "draws"},
            {"operator": "torch.randn", "library": "torch", "reason": "random", "detail": "draws"},
            {"operator": "a.B", "library": "transformers", "reason": "fails", "detail": "no"},
        ],
        tasks_left_out=[{"index": 3, "data_source": "transformers", "reason": "too slow", "detail": "200 ms"}],
    )


class Structure(html.parser.HTMLParser):
    """Elements that must be closed, what the page points at, and what it loads."""

    VOID = frozenset(("meta", "br", "line", "rect", "polygon", "link", "img", "input", "hr"))

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.loaded, self.tags = [], set(), [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        self.ids |= {attrs["id"]} if "id" in attrs else set()
        self.links += [attrs["href"]] if "href" in attrs else []
        self.loaded += [attrs["src"]] if "src" in attrs else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(page):
    text = (page / "index.html").read_text(encoding="utf-8")
    structure = Structure(text)
    assert not structure.open
    assert "script" not in structure.tags and not structure.loaded
    assert "@import" not in text and "url(" not in text
    for link in structure.links:
        assert link[1:] in structure.ids if link.startswith("#") else (page / link).is_file(), link


def test_code_and_names_are_escaped(page):
    text = (page / "index.html").read_text(encoding="utf-8")
    assert "<script" not in text and TRAP not in text
    assert "&lt;/code&gt;&lt;/pre&gt;&lt;script&gt;" in text
    assert "<h1>Ops &amp; more</h1>" in text and "Card &lt;1&gt;" in text and "Within &lt;the&gt; range." in text


def test_every_section_has_its_figures(page):
    text = (page / "index.html").read_text(encoding="utf-8")
    assert "Not recorded" not in text
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))
    assert "90 of 100 measured tasks passed every rule; 60 of them are published" in plain
    assert "Faster than eager in 48 of 48 tasks; geometric mean 2 ×" in plain
    assert "51 distinct torch operators, 50 of them in one task only" in plain
    assert "Over their cap: nn.Linear." in plain
    assert "More than a tenth off: elementwise, linear." in plain
    assert "Median 2 ×, for 60 tasks. Limited by memory: 60." in plain
    assert "3 are above the threshold; 4 have the same operators as one" in plain
    assert "3 candidates of the installed libraries" in plain
    assert "1 attempt came to nothing" in plain
    assert "Not applied: modes_agree (left out)." in plain
    assert plain.count("class Model:") == 6


def test_the_tables_hold_what_the_page_shows(page):
    def table(name):
        with open(page / "tables" / f"{name}.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    funnel = {row["rule"]: row for row in table("funnel")}
    assert (funnel["eager_time"]["left"], funnel["contaminated"]["left"]) == ("93", "90")
    assert funnel["eager_time"]["torch#1"] == "6"
    assert sum(int(row["eager"]) for row in table("times")) == 60
    assert sum(int(row["compiled"]) for row in table("times")) == 48
    assert table("operators")[0] == {"operator": "nn.Linear", "rows": "50", "cap": "5"}
    assert {row["category"]: row["rows"] for row in table("shares")} == dict.fromkeys(PAPER, "10")
    assert table("left_out")[0] == {"reason": "random", "all": "2", "torch": "2", "transformers": "0"}
    assert {row["part"]: float(row["seconds"]) for row in table("time_use")}["compilation (compile_s)"] == 120


def test_equal_inputs_make_equal_bytes(page, tmp_path):
    samples, measurements = rows()
    first, second = (run(tmp_path / name, samples, measurements, summary()) for name in ("a", "b"))
    for path in sorted(first.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()


def test_what_was_not_recorded_is_said(tmp_path):
    samples, _ = rows(3)
    page = run(tmp_path, samples, [{"data_source": row["data_source"]} for row in samples])
    text = (page / "index.html").read_text(encoding="utf-8")
    assert text.count("Not recorded") == 8
    assert not Structure(text).open


def test_tables_of_other_rows_are_refused(tmp_path):
    samples, measurements = rows(6)
    error = run(tmp_path / "a", samples, measurements[::-1])
    assert error["kind"] == "input" and "same rows" in error["message"] and error["hint"]
    error = run(tmp_path / "b", [{"ops": "[]"}], measurements)
    assert error["kind"] == "input" and "data_source" in error["message"]
    error = run(tmp_path / "c", samples, measurements, {"rules": []})
    assert error["kind"] == "input" and "total_in" in error["message"]
    error = run(tmp_path / "d", samples, measurements, params={"families": {"linear": "much"}})
    assert error["kind"] == "params" and "linear" in error["message"]


def test_pairs_and_operators_count_once_a_row():
    found = figures.operators(
        [
            {"ops": '["a", "b", "a"]', "data_source": "torch#3"},
            {"ops": '["b", "a"]', "data_source": "torch#2"},
            {"ops": '["F.bilinear", "nn.Bilinear"]', "data_source": "torch#2"},
            {"ops": '["LlamaMLP"]', "data_source": "transformers"},
        ]
    )
    assert found["torch"] == [("a", 2), ("b", 2), ("F.bilinear", 1), ("nn.Bilinear", 1)]
    assert found["pairs"] == [(("a", "b"), 2), (("F.bilinear", "nn.Bilinear"), 1)]
    assert found["bilinear"] == 1 and found["classes"] == [("LlamaMLP", 1)]


def test_bins_hold_every_value():
    numbers = [0.001, 0.5, 1.0, 1.0, 9.99, 10.0, 123.4]
    edges = charts.log_edges(numbers)
    assert edges[0] <= min(numbers) and edges[-1] > max(numbers)
    assert sum(charts.count(numbers, edges)) == len(numbers)
    for value, place in zip(numbers, [sum(value >= edge for edge in edges) - 1 for value in numbers], strict=True):
        assert edges[place] * (1 - 1e-9) <= value < edges[place + 1] * (1 + 1e-9)


def test_ticks_are_round_and_few():
    assert charts.round_ticks(1685) == [0, 500, 1000, 1500]
    assert charts.round_ticks(7) == [0, 2, 4, 6]
    assert charts.round_ticks(1) == [0, 1]
    assert all(2 <= len(charts.round_ticks(most)) <= 6 for most in range(1, 3000))


def test_quantiles_agree_with_numpy():
    numpy = pytest.importorskip("numpy")
    numbers = [3.0, 1.0, 10.0, 2.5, 7.0]
    expected = [numpy.quantile(numbers, part) for _, part in figures.QUANTILES]
    assert figures.quantiles(numbers) == pytest.approx(expected)


def test_the_caps_are_those_of_the_publishing_stage():
    yaml = pytest.importorskip("yaml")
    own, publish = (
        yaml.safe_load((HERE.parent / name / "stage.yaml").read_text())["params"] for name in ("report", "publish")
    )
    names = [name for name in publish if name.startswith("max_")]
    assert len(names) == 4 and all(own[name]["default"] == publish[name]["default"] for name in names)
    rust = (HERE.parent / "src" / "publish" / "caps.rs").read_text()
    assert f"LEAST_ROWS: usize = {figures.LEAST_ROWS};" in rust


def test_the_families_are_those_of_the_composing_stage():
    yaml = pytest.importorskip("yaml")
    own, other = (
        yaml.safe_load((HERE.parent / name / "stage.yaml").read_text())["params"] for name in ("report", "synthesize")
    )
    assert own["families"]["default"] == other["families"]["default"]


def test_the_manifest_lists_every_file_and_parameter():
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((HERE / "stage.yaml").read_text())
    defaults = {name: entry["default"] for name, entry in manifest["params"].items() if name != "families"}
    given = {name: value for name, value in PARAMS.items() if name != "families"}
    assert defaults == given | {"title": "CUDA-Agent-Ops"} and "families" in manifest["params"]
    files = {
        path.name for path in HERE.iterdir() if path.suffix in (".py", ".html") and not path.name.startswith("test_")
    }
    assert set(manifest["sources"]) == files
