"""Inputs that get_inputs() makes without random numbers: candidates that remember work on them, and honest ones."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from reference_client import Failure, Reference, make_task, model
from variation import LEVELS, Level, Variation


@pytest.fixture(scope="module")
def reference():
    process = Reference()
    yield process
    process.close()


@pytest.fixture
def connection(reference):
    with reference.connect() as connection:
        yield connection


def outcomes(connection, code, answer, policy="strict"):
    """Whether an answer passes, by draw."""
    (arguments,) = connection.begin(make_task(code, policy))
    assert connection.ask("task", **make_task(code, policy))["fixed_inputs"] == []
    return [
        all(output["pass"] for output in arguments.run(lambda a: a["out"].copy_(answer(a)), trial)["outputs"])
        for trial in range(3)
    ]


def remembering(work, use):
    """A candidate that keeps what it worked out from an input in its first run, as a `__device__` variable would."""
    kept = []

    def candidate(a):
        if not kept:
            kept.append(work(a).clone())
        return use(a, kept[0])

    return candidate


# By name: the task, the work on what is the same in each draw, and what is left to do with it.
CASES = {
    "a ramp": (
        "x, t: return x * torch.sin(t)",
        "[torch.randn(40, 300), torch.linspace(0, 9, 300)]",
        lambda a: a["t"].sin(),
        lambda a, k: a["x"] * k,
    ),
    "ones": (
        "x, s: return x * s.exp()",
        "[torch.randn(40, 300), torch.ones(300)]",
        lambda a: a["s"].exp(),
        lambda a, k: a["x"] * k,
    ),
    "an empty state": (
        "x, h: return torch.tanh(x + h)",
        "[torch.randn(40, 300), torch.zeros(300)]",
        lambda a: a["h"],
        lambda a, k: torch.tanh(a["x"] + k),
    ),
    "a single number": (
        "x, s: return x * s.exp()",
        "[torch.randn(40, 300), torch.tensor(0.5)]",
        lambda a: a["s"].exp(),
        lambda a, k: a["x"] * k,
    ),
    "a matrix in half": (
        "x, m: return x + m.sum(0)",
        "[torch.randn(40, 64).half(), torch.ones(64, 64).tril().half()]",
        lambda a: a["m"].sum(0),
        lambda a, k: a["x"] + k,
    ),
    "positions": (
        "x, i: return x[:, i]",
        "[torch.randn(40, 300), torch.arange(300)]",
        lambda a: a["i"],
        lambda a, k: a["x"][:, k],
    ),
    "an order": (
        "x, i: return x.gather(1, i)",
        "[torch.randn(40, 300), torch.arange(300).flip(0).repeat(40, 1)]",
        lambda a: a["i"],
        lambda a, k: a["x"].gather(1, k),
    ),
    "a causal mask": (
        "x, m: return torch.softmax(x.masked_fill(~m, float('-inf')), -1)",
        "[torch.randn(60, 60), torch.ones(60, 60, dtype=torch.bool).tril()]",
        lambda a: a["m"],
        lambda a, k: torch.softmax(a["x"].masked_fill(~k, float("-inf")), -1),
    ),
    "a mask of nothing": (
        "x, m: return x * m",
        "[torch.randn(40, 300), torch.ones(300, dtype=torch.int32)]",
        lambda a: a["m"],
        lambda a, k: a["x"] * k,
    ),
    "all of them": (
        "x: return x.cumsum(0)",
        "[torch.linspace(1, 2, 3000)]",
        lambda a: a["x"].cumsum(0),
        lambda a, k: k,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_remembered_work_is_refused_and_done_work_accepted(connection, name):
    forward, drawn, work, use = CASES[name]
    code = model(forward, drawn)
    assert outcomes(connection, code, lambda a: use(a, work(a))) == [True, True, True]
    assert outcomes(connection, code, remembering(work, use)) == [True, False, False]


@pytest.mark.parametrize(
    "init, work, use",
    [
        ("self.register_buffer('t', torch.linspace(0, 9, 300))", lambda a: a["t"].sin(), lambda a, k: a["x"] * k),
        (
            "self.t = nn.Parameter(torch.randn(300), requires_grad=False)",
            lambda a: a["t"].sin(),
            lambda a, k: a["x"] * k,
        ),
    ],
    ids=["a buffer", "a parameter without gradient"],
)
def test_constants_of_the_model_cannot_be_remembered(connection, init, work, use):
    code = model("x: return x * torch.sin(self.t)", "[torch.randn(40, 300)]", init)
    assert outcomes(connection, code, lambda a: use(a, work(a))) == [True, True, True]
    assert outcomes(connection, code, remembering(work, use)) == [True, False, False]


def test_a_fresh_batch_norm_cannot_be_left_out(connection):
    code = model("x: return self.norm(x)", "[torch.randn(8, 5, 6, 6)]", "self.norm = nn.BatchNorm2d(5, affine=False)")
    assert outcomes(connection, code, lambda a: a["x"] * (1 + 1e-5) ** -0.5) == [False, False, False]


def test_a_task_that_bears_no_other_values_is_refused_with_the_name(connection):
    code = model("x, i: return x + (1 / 0 if i[0] != 9 else 1)", "[torch.randn(9), torch.arange(10).flip(0)]")
    with pytest.raises(Failure, match="gives the same i in each draw") as caught:
        connection.ask("task", **make_task(code))
    assert caught.value.kind == "unsupported" and "at random" in caught.value.hint


def test_few_random_values_are_not_taken_for_fixed_ones(connection):
    """Four booleans are equal in two draws now and then; these must not be another order of what they were at first."""
    for seed in range(8):
        code = model("x, b: return x + b.sum()", f"[torch.randn(9), torch.randint(0, 2, (2,)) * {seed + 1}]")
        (arguments,) = connection.begin(make_task(code))
        seen = set()
        for trial in range(12):
            arguments.draw(trial)
            seen.add(tuple(arguments["b"].tolist()))
        assert len({sum(each) for each in seen}) > 1, seen


def variations(values, level=LEVELS[0], count=4):
    variation = Variation(values)
    found = []
    for seed in range(count):
        found.append(values.clone())
        variation.into(found[-1], seed, level)
    return found


def test_orders_keep_their_values_and_range():
    mask = torch.ones(50, 50, dtype=torch.bool).tril()
    for found in variations(mask):
        assert torch.equal(found.sum(1), mask.sum(1)) and not torch.equal(found, mask)
    columns = torch.arange(40)[:, None].expand(40, 6)
    for found in variations(columns):
        assert torch.equal(found.sort(0).values, columns) and not torch.equal(found, columns)
    offsets = torch.tensor([0, 5, 9, 30, 64])
    for found in variations(offsets):
        assert (found.diff() >= 0).all() and (found[0], found[-1]) == (0, 64)


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(1000, dtype=torch.int32),
        torch.full((10, 100), 7, dtype=torch.uint8),
        torch.full((1000,), -3),
        torch.ones(1000, dtype=torch.bool),
        torch.zeros(1000, dtype=torch.bool),
    ],
)
def test_a_tenth_of_equal_values_changes(values):
    for found in variations(values):
        changed = found != values
        assert 60 <= changed.sum() <= 140 and found.dtype == values.dtype
        assert (found.double().abs() <= values.double().abs().clamp(min=1)).all()
        assert not (values >= 0).all() or (found >= 0).all()


def test_what_cannot_vary():
    for values in (torch.zeros(9, dtype=torch.int64), torch.tensor(5), torch.tensor([float("inf"), 0.0])):
        assert not Variation(values).can_vary
    assert all(torch.equal(found, torch.tensor(5.0)) for found in variations(torch.tensor(5.0), Level()))
    (alike,) = variations(torch.eye(4) * 3, Level(alike=True), 1)
    assert (alike.diagonal() == alike[0, 0]).all() and 2.4 <= alike[0, 0] < 3


# What tasks in the style of KernelBench have that no random number decides: none may be refused, or left as it was.
PATTERNS = {
    "hinge targets": model(
        "x, y: return torch.mean(torch.clamp(1 - x * y, min=0))",
        "[torch.rand(64, 9), torch.randint(0, 2, (64, 1)).float() * 2 - 1]",
    ),
    "class targets": model("x, y: return F.cross_entropy(x, y)", "[torch.rand(64, 10), torch.randint(0, 10, (64,))]"),
    "triangular matrices": model(
        "a, b: return torch.tril(a @ b)", "[torch.tril(torch.rand(32, 32)), torch.tril(torch.rand(32, 32))]"
    ),
    "a scalar": model("a, s: return a * s", "[torch.rand(64, 9), 3.14]"),
    "a causal buffer": model(
        "x: return torch.softmax((x @ x.transpose(1, 2)).masked_fill(self.bias == 0, float('-inf')), -1) @ x",
        "[torch.rand(2, 16, 8)]",
        "self.register_buffer('bias', torch.tril(torch.ones(16, 16)))",
    ),
    "an infinite mask": model(
        "x: return torch.softmax(x + self.mask, -1)",
        "[torch.randn(16, 16)]",
        "self.register_buffer('mask', torch.triu(torch.full((16, 16), float('-inf')), 1))",
    ),
    "places in a table": model(
        "x: return x + self.table[self.index.view(-1)].view(9, 9)",
        "[torch.randn(9, 9)]",
        "self.table = nn.Parameter(torch.zeros(17))\n"
        "        self.register_buffer('index', torch.arange(9)[:, None] - torch.arange(9)[None] + 8)",
    ),
    "batch norm": model(
        "x: return self.net(x)",
        "[torch.rand(4, 3, 8, 8)]",
        "self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())",
    ),
    "a first state": model(
        "x, h, c: return self.lstm(x, (h, c))[0]",
        "[torch.rand(5, 3, 4), torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)]",
        "self.lstm = nn.LSTM(4, 6)",
    ),
    "rotary tables": model(
        "x: return x * self.cos + torch.roll(x, 4, -1) * self.sin",
        "[torch.randn(10, 8)]",
        "angles = torch.arange(10.0)[:, None] * torch.logspace(0, -2, 8)\n"
        "        self.register_buffer('cos', angles.cos())\n        self.register_buffer('sin', angles.sin())",
    ),
    "tokens and positions": model(
        "i, p: return self.words(i) + self.places(p)",
        "[torch.randint(0, 20, (2, 7)), torch.arange(7).unsqueeze(0)]",
        "self.words, self.places = nn.Embedding(20, 8), nn.Embedding(7, 8)",
    ),
    "bags": model(
        "i, o: return self.bag(i, o)",
        "[torch.randint(0, 20, (30,)), torch.tensor([0, 7, 12, 30 - 4])]",
        "self.bag = nn.EmbeddingBag(20, 8)",
    ),
    "an attention mask of ones": model(
        "x, m: return torch.softmax(x.masked_fill(m[:, None] == 0, -1e9), -1)",
        "[torch.randn(4, 16, 16), torch.ones(4, 16, dtype=torch.int64)]",
    ),
    "deep, without norms": model(
        "x: return self.net(x)",
        "[torch.randn(16, 32)]",
        "self.net = nn.Sequential(*[layer for _ in range(30) for layer in (nn.Linear(32, 32), nn.ReLU())])",
    ),
    "kinds of tokens": model(
        "x, i: return x + self.kinds(i)",
        "[torch.randn(4, 7, 8), torch.zeros(4, 7, dtype=torch.int64)]",
        "self.kinds = nn.Embedding(2, 8)",
    ),
}


@pytest.mark.parametrize("protocol", ["cuda-agent", "kernelbench"])
@pytest.mark.parametrize("name", PATTERNS)
def test_usual_tasks_are_not_refused(connection, name, protocol):
    fixed = connection.ask("task", **make_task(PATTERNS[name], protocol=protocol))["fixed_inputs"]
    assert fixed == (["i"] if name == "kinds of tokens" else [])
