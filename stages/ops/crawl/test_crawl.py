"""`ops/crawl` run whole, and its parts on small cases."""

import ast
import collections
import json
import pathlib
import subprocess
import sys
import types

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python"), str(HERE.parent.parent / "protocol" / "python")]

import call_forms
import crawl
import stage_driver
import tidy
import torch_probe
import torch_recipes as recipes
import transformers_crawl
import transformers_task
import validation
from torch_probe import Rejected, probe

PARAMS = {"libraries": ["torch", "transformers"], "models": [], "max_transformers": 12}


@pytest.fixture(scope="module")
def crawled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crawl")
    request = stage_driver.request(folder, "ops/crawl", PARAMS, outputs=("operators", "left_out"))
    done = stage_driver.run_program(HERE / "crawl.py", request)
    assert done.returncode == 0, done.stderr
    return stage_driver.read_rows(folder, "operators"), stage_driver.read_rows(folder, "left_out")


def test_finds_many_operators_of_every_family(crawled):
    operators, _ = crawled
    families = collections.Counter(row["family"] for row in operators if row["library"] == "torch")
    assert sum(families.values()) >= 430
    for family in (
        "convolution",
        "normalization",
        "pooling",
        "matmul",
        "reduction",
        "softmax",
        "loss",
        "scan",
        "resampling",
        "padding",
        "attention",
        "embedding",
        "recurrent",
        "activation",
        "elementwise",
        "spectral",
        "special",
        "indexing",
        "masking",
    ):
        assert families[family] >= 5, family
    assert families["linear"] == families["bilinear"] == 2
    assert len({row["operator"] for row in operators}) == len(operators)


def test_leaves_out_with_a_reason(crawled):
    _, left_out = crawled
    reasons = {row["operator"]: row["reason"] for row in left_out}
    assert reasons["torch.nn.Dropout"] == "random"
    assert reasons["torch.nn.BatchNorm2d"] == "not for models"
    assert reasons["torch.nonzero"] == "data-dependent"
    assert reasons["torch.nn.Identity"] == "view"
    torch_reasons = {row["reason"] for row in left_out if row["library"] == "torch"}
    assert torch_reasons == {"random", "not for models", "data-dependent", "view", "alias"}, "a recipe is missing"


def test_transformers_classes_run_without_transformers(crawled, tmp_path):
    rows = [row for row in crawled[0] if row["library"] == "transformers"]
    assert len(rows) == 12
    assert len({row["source"] for row in rows}) == 12
    (tmp_path / "transformers.py").write_text("raise ImportError('a task must not import this')\n")
    for row in rows[:4]:
        usage = json.loads(row["usages"])[0]
        code = transformers_task.task_code(
            usage, row["source"], transformers_task.header_lines(row), transformers_task.sizes_at(usage, 128), 2, 8
        )
        assert "Apache License" in code.splitlines()[2] + code.splitlines()[1]
        call = "\nimport sys\nout = Model(*get_init_inputs())(*get_inputs())\nassert out.shape[0] == 2\n"
        call += "assert 'transformers' not in sys.modules\n"
        (tmp_path / "task.py").write_text(code + call)
        done = subprocess.run([sys.executable, "task.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (row["operator"], done.stderr)


def usage_of(call, construct=None, ranks=(2,)):
    return recipes.draft(call, construct, {}, ranks=list(ranks), input="float", cost={"flops": "x", "bytes": "x"})


@pytest.mark.parametrize(
    ("call", "construct", "reason"),
    [
        ("{x} + torch.rand_like({x})", None, "random"),
        ("{module}({x})", "nn.Dropout(0.5)", "random"),
        ("{module}({x})", "nn.BatchNorm1d(32)", "mode-dependent"),
        ("{x} - {x}.mean(0)", None, "mixes the batch"),
        ("{x}.sum()", None, "mixes the batch"),
        ("{x}[:, :3]", None, "view"),
        ("{x} * 1.0", None, "identity"),
        ("torch.zeros_like({x})", None, "insensitive"),
        ("{x}[{x} > 0].reshape({x}.shape[0], -1)", None, "fails"),
        ("{x} > 0", None, "not float32"),
        ("{x} / 0", None, "not finite"),
    ],
)
def test_probe_refuses(call, construct, reason):
    with pytest.raises(Rejected) as refusal:
        probe(usage_of(call, construct))
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    ("call", "smooth"),
    [
        ("torch.tanh({x})", True),
        ("torch.cumsum({x}, dim=1)", True),
        ("torch.softmax({x}, dim=1)", True),
        ("torch.floor({x})", False),
        ("torch.where({x} > 0.5, {x}, -{x})", False),
    ],
)
def test_probe_tells_jumps(call, smooth):
    assert probe(usage_of(call))["smooth"] is smooth


def test_probe_finds_the_domain_and_bounds():
    assert probe(usage_of("torch.log({x})"))["domain"] == "positive"
    assert probe(usage_of("torch.sigmoid({x})"))["bounds"] == [0.0, 1.0]
    assert torch_probe.fill("sign", (8,), 1).abs().eq(1).all()


def test_a_library_takes_one_line_with_counts_by_reason():
    sent, metrics = [], {}
    program = types.SimpleNamespace(
        stage="seeds",
        params={"libraries": ["torch"]},
        progress=lambda *_: None,
        metric=lambda name, value: metrics.update({name: value}),
        log=lambda message, level="info": sent.append((level, message)),
    )
    left_out = [{"library": "torch", "reason": reason} for reason in ("alias", "random", "alias")]
    crawl.report(program, [{"library": "torch"}], left_out)
    assert sent == [
        ("info", "1 operators of torch; 3 left out: 2 alias, 1 random. cuda-agent show seeds.left_out lists them")
    ]
    assert metrics == {"kept/torch": 1, "left_out/torch/alias": 2, "left_out/torch/random": 1}


OPEN = """
def repeat(states, times):
    batch, heads = states.shape
    if times == 1:
        return states
    return states.expand(batch, heads * times)

def attend(module, query, key, scaling=None):
    if scaling is None:
        scaling = 0.5
    key_states = repeat(key, module.groups)
    return query * key_states * scaling

class Piece(nn.Module):
    def __init__(self, config, is_causal=False, layer_idx=None):
        super().__init__()
        self.groups = config.heads // config.heads
        self.scaling = config.width ** -0.5
        if config.width % 2 != 0 and (not False):
            raise ValueError('odd')

    def forward(self, x, mask=None):
        interface = attend
        unused = x.shape
        return interface(self, x, x, scaling=self.scaling)
"""


def test_what_a_task_settles_is_folded():
    nodes = {node.name: node for node in ast.parse(OPEN).body}
    closure = tidy.Tidy(nodes, "Piece")
    while closure.step():
        pass
    text = "\n".join(ast.unparse(node) for node in nodes.values())
    assert "def attend(query, key, scaling):\n    return query * key * scaling" in text
    assert "def __init__(self, config):" in text and "return attend(x, x, scaling=self.scaling)" in text
    assert "if config.width % 2 != 0:" in text, "a check of the sizes stays"
    assert not {"interface", "unused", "layer_idx", "module", "times == 1"} & set(text.split())


def test_calls_that_differ_keep_their_arguments():
    source = (
        "def f(x, flag):\n    return x if flag else -x\n\nclass Piece(nn.Module):\n"
        "    def forward(self, x):\n        return f(x, True) + f(x, False)\n"
    )
    nodes = {node.name: node for node in ast.parse(source).body}
    before = [ast.unparse(node) for node in nodes.values()]
    assert not tidy.Tidy(nodes, "Piece").step()
    assert [ast.unparse(node) for node in nodes.values()] == before


def prepared(source, name="Piece", config=None, forms=None):
    """A candidate as `transformers_crawl` makes it, from a source that stands in for a file of the library."""
    module = ast.parse(source).body[-1]
    init, forward = (transformers_crawl.method(module, method) for method in ("__init__", "forward"))
    make = call_forms.constructor(init, config or {})
    usages = [
        {"class": name, "imports": [], "config": config, **call_forms.combined(make, form)}
        for form in forms or call_forms.forms(forward, make["sizes"])
    ]
    return {"operator": name, "body": source, "usages": usages, "path": "x.py", "version": "0"}


PIECE = """class Piece(nn.Module):
    def __init__(self, in_features):
        super().__init__()
        self.linear = nn.Linear({inside}, 32)

    def forward(self, x):
        {body}"""


CASES = [
    ("in_features", "return self.linear(x)", None),
    ("in_features", "return self.linear(x) + torch.rand(1)", "random"),
    ("in_features", "return self.linear(x)[x.mean() > 5:]", "data-dependent"),
    ("in_features", "return self.linear(torch.ones_like(x))", "insensitive"),
    ("in_features", "return self.linear(x[:, :1])", "insensitive"),
    ("in_features", "import os; os.kill(os.getpid(), 9)", "crashes"),
    ("in_features", "import transformers; return self.linear(x)", "fails"),
    ("in_features", "return self.linear(x) + torch.zeros(40000, 40000).sum()", "fails"),
    ("in_features // 2", "return self.linear(x)", None),
]


def test_validation_keeps_what_runs_alone():
    verdicts = validation.validate([prepared(PIECE.format(inside=inside, body=body)) for inside, body, _ in CASES], 1)
    assert [verdict.get("reason") for verdict in verdicts] == [reason for _, _, reason in CASES], verdicts
    assert verdicts[0]["usage"]["inputs"][0]["shape"] == ["batch", "tokens", "in_features"]
    # An extent that torch's message asked for scales with the width.
    usage = verdicts[-1]["usage"]
    extent = usage["inputs"][0]["shape"][-1]
    assert usage["sizes"][extent] == {"kind": "free", "ratio": 0.5}
    assert transformers_task.sizes_at(usage, 512)[extent] == 256


def test_a_maximum_gives_the_beginning_of_the_whole_crawl():
    kept, left_out = transformers_crawl.crawl_transformers(["nosuchmodel", "vit"], 0)
    assert len(kept) >= 5
    names = [row["operator"] for row in kept]
    few, rest = transformers_crawl.crawl_transformers(["nosuchmodel", "vit"], 3, processes=2)
    assert [row["operator"] for row in few] == names[:3] and few == kept[:3]
    assert {row["operator"] for row in rest if row["reason"] == "over the maximum"} <= set(names)
    assert all(row["reason"] and row["library"] == "transformers" for row in left_out)


def test_well_known_models_come_first_and_none_is_missing():
    folders = transformers_crawl.all_folders(transformers_crawl.library_root())
    assert folders[:3] == ["llama", "bert", "gpt2"] and len(set(folders)) == len(folders) > 300


def test_modules_are_called_with_what_they_use():
    source = (
        "class Inner(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "    def forward(self, x, other=None):\n        if other is not None:\n            x = x + other\n"
        "        return x\n\n"
        "class Piece(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.inner = Inner()\n"
        "    def forward(self, x=None, residual=None):\n        if residual is not None:\n"
        "            x = self.inner(residual)\n        return self.inner(x)\n"
    )
    nodes = {node.name: node for node in ast.parse(source).body}
    closure = tidy.Tidy(nodes, "Piece")
    while closure.step():
        pass
    text = "\n".join(ast.unparse(node) for node in nodes.values())
    assert "is not None" not in text and "def forward(self, x):\n        return x" in text
