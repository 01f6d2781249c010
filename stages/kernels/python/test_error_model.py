"""What the bounds tell apart: for each kind of arithmetic an honest answer, and one that leaves work out or rounds
more."""

import pathlib
import sys

import pytest

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import error_model
from reference_client import Failure, Reference, make_task, model

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def reference():
    process = Reference()
    yield process
    process.close()


@pytest.fixture
def connection(reference):
    with reference.connect() as connection:
        yield connection


def passes(connection, code, answer, policy="strict"):
    """Whether an answer, made of the arguments by name, passes on two draws."""
    (arguments,) = connection.begin(make_task(code, policy))
    verdicts = []
    for trial in range(2):
        outputs = arguments.run(lambda a: a["out"].copy_(answer(a)), trial=trial)["outputs"]
        verdicts.append(outputs[0])
    return all(each["pass"] for each in verdicts), verdicts


def sequential_sum(x):
    """Down the rows, one after another, as a thread with an accumulator does."""
    total = torch.zeros(x.shape[1])
    for row in x:
        total += row
    return total


SUM = model("x: return x.sum(0)", "[torch.rand(40000, 24)]")
GATED = model(
    "x, g: return x * g", "[torch.randn(64, 200), 10.0 ** -torch.linspace(0, 9, 64)[:, None] * torch.rand(64, 1)]"
)
CUMPROD = model("x: return torch.cumprod(x, 1)", "[torch.rand(40, 400) * 0.2 + 0.85]")
PRODUCT = model("a, b: return a @ b", "[torch.randn(96, 256), torch.randn(256, 64)]")
PRODUCT_IN_HALF = model(
    "a, b: return a @ b", "[torch.randn(96, 256, dtype=torch.bfloat16), torch.randn(256, 64, dtype=torch.bfloat16)]"
)
SOFTMAX = model("x: return torch.softmax(x, -1)", "[torch.randn(64, 1000)]")
MEANS = model("x: return x.mean(1)", "[torch.rand(256, 8192).to(torch.bfloat16)]")

PRODUCT_IN_DOUBLE = model("a, b: return a @ b", "[torch.randn(96, 256).double(), torch.randn(256, 64).double()]")
SQUARES_IN_DOUBLE = model("x: return x * x + 1 / 3", "[torch.randn(999, dtype=torch.float64)]")
FLOATS_AS_DOUBLES = model("x: return torch.softmax(x, -1).double()", "[torch.randn(64, 1000)]")


LONG_PRODUCT = model("a, b: return a @ b", "[torch.randn(40, 2053), torch.randn(2053, 30)]")


def in_bits(x, bits):
    """Rounded to so many bits of the mantissa, the first counted."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)


def in_int8(x):
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def tail(x, share):
    """The last part as zeros."""
    x = x.clone()
    x[:, -int(x.shape[1] * share) :] = 0
    return x


HONEST = {
    "a sum in sequence": (SUM, "strict", lambda a: sequential_sum(a["x"])),
    "gates": (GATED, "strict", lambda a: a["x"] * a["g"]),
    "products in sequence": (CUMPROD, "strict", lambda a: torch.exp2(torch.log2(a["x"].double()).cumsum(1)).float()),
    "a product": (PRODUCT, "strict", lambda a: sum(a["a"][:, k, None] * a["b"][k] for k in range(256))),
    "a product in TF32": (PRODUCT, "tf32", lambda a: in_bits(a["a"], 11) @ in_bits(a["b"], 11)),
    "a product in float32 under tf32": (PRODUCT, "tf32", lambda a: a["a"] @ a["b"]),
    "a product of half types": (PRODUCT_IN_HALF, "strict", lambda a: (a["a"].float() @ a["b"].float()).to(BF16)),
    "a product in float64": (
        PRODUCT_IN_DOUBLE,
        "strict",
        lambda a: sum(a["a"][:, k, None] * a["b"][k] for k in range(256)),
    ),
    "elements in float64": (SQUARES_IN_DOUBLE, "strict", lambda a: a["x"].square().add(1 / 3)),
    "floats as doubles": (FLOATS_AS_DOUBLES, "strict", lambda a: (e := torch.exp(a["x"])) / e.sum(-1, keepdim=True)),
    "a softmax in two passes": (SOFTMAX, "strict", lambda a: (e := torch.exp(a["x"])) / e.sum(-1, keepdim=True)),
}

DISHONEST = {
    "a part of a sum": (SUM, "strict", lambda a: a["x"][:39000].sum(0) * (40000 / 39000)),
    "small gates as zeros": (GATED, "strict", lambda a: torch.where(a["g"] > 1e-4, a["x"] * a["g"], 0.0)),
    "the end of a running product": (CUMPROD, "strict", lambda a: tail(a["x"].cumprod(1), 0.2)),
    "a product in TF32 under strict": (PRODUCT, "strict", lambda a: in_bits(a["a"], 11) @ in_bits(a["b"], 11)),
    "a product in bfloat16 under tf32": (PRODUCT, "tf32", lambda a: in_bits(a["a"], 8) @ in_bits(a["b"], 8)),
    "a product in bytes": (PRODUCT_IN_HALF, "strict", lambda a: (in_int8(a["a"]) @ in_int8(a["b"].T).T).to(BF16)),
    "a product of float64 in float32": (PRODUCT_IN_DOUBLE, "strict", lambda a: a["a"].float() @ a["b"].float()),
    "elements of float64 in float32": (SQUARES_IN_DOUBLE, "strict", lambda a: a["x"].float().square().double() + 1 / 3),
    "one wrong row": (
        SOFTMAX,
        "strict",
        lambda a: torch.cat([torch.softmax(a["x"][:-1], -1), torch.full((1, 1000), 1e-3)]),
    ),
    "rows by a cheaper exponential": (SOFTMAX, "strict", lambda a: in_bits(torch.softmax(a["x"], -1), 14)),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_arithmetic_passes(connection, name):
    code, policy, answer = HONEST[name]
    passed, verdicts = passes(connection, code, answer, policy)
    assert passed, verdicts


@pytest.mark.parametrize("name", DISHONEST)
def test_less_work_or_fewer_digits_do_not(connection, name):
    code, policy, answer = DISHONEST[name]
    passed, verdicts = passes(connection, code, answer, policy)
    assert not passed, verdicts


def test_the_part_is_named(connection):
    code, policy, answer = DISHONEST["small gates as zeros"]
    _, (first, _) = passes(connection, code, answer, policy)
    assert first["part"]["dimension"] == 0 and 0 <= first["part"]["index"] < 64 and first["part"]["times"] > 100


@pytest.mark.parametrize(
    "code,policy",
    [
        (MEANS, "strict"),
        (model("x: return x * 1e-4", "[torch.randn(100)]"), "paper"),
        (model("x: return x.mean() + 1", "[torch.randn(30, 500)]"), "paper"),
        (model("x: return torch.relu(x - 9)", "[torch.rand(100)]"), "strict"),
    ],
    ids=["means in bfloat16", "tiny", "a scalar", "dead"],
)
def test_a_task_that_a_constant_answers_is_refused(connection, code, policy):
    with pytest.raises(Failure, match=r"the task is degenerate under the policy .* a constant passes for out"):
        connection.begin(make_task(code, policy))


TOP = model("x: return torch.topk(x, 8, dim=1)", "[torch.randint(0, 40, (60, 200)).float()]")
LARGEST = model("x: return torch.argmax(x, 1)", "[torch.randn(300, 64).mul(4).round()]")


def last_place_of_the_largest(x):
    return x.shape[1] - 1 - x.flip(1).argmax(1)


def other_top(x):
    """Of equal values those further back."""
    values, places = x.flip(1).sort(dim=1, descending=True, stable=True)
    return values[:, :8], x.shape[1] - 1 - places[:, :8]


@pytest.mark.parametrize(
    "code,answer,right",
    [
        (LARGEST, lambda a: last_place_of_the_largest(a["x"]), True),
        (LARGEST, lambda a: a["x"].argmax(1).clamp(max=31), False),
        (LARGEST, lambda a: a["x"].argmax(1) + 64 * (torch.arange(300) == 7), False),
        (TOP, lambda a: other_top(a["x"]), True),
        (TOP, lambda a: (other_top(a["x"])[0], other_top(a["x"])[1][:, :1].expand(-1, 8)), False),
        (TOP, lambda a: (other_top(a["x"])[0], other_top(a["x"])[1] * 0), False),
    ],
    ids=["the last of the equal", "half", "out of range", "another order", "one place eight times", "zeros"],
)
def test_indices_are_judged_by_what_is_there(connection, code, answer, right):
    (arguments,) = connection.begin(make_task(code))

    def candidate(a):
        results = answer(a)
        results = results if isinstance(results, tuple) else (results,)
        for tensor, result in zip(a.spec["outputs"], results, strict=True):
            a[tensor["name"]].copy_(result)

    outputs = arguments.run(candidate)["outputs"]
    assert all(each["pass"] for each in outputs) == right, outputs


def test_a_task_that_half_of_its_values_decide_is_refused(connection):
    ties = model("x: return torch.argmax(x, 1)", "[torch.randint(0, 3, (100, 4096)).float()]")
    with pytest.raises(Failure, match="so many values are equal that half of them hold the answer"):
        connection.begin(make_task(ties))
    few = model("x: return torch.argmax(x)", "[torch.randn(4096)]")
    connection.begin(make_task(few))


def test_the_one_index_of_all_elements_may_have_any_shape(connection):
    code = model("x: return torch.argmax(x, dim=None, keepdim=True)", "[torch.randn(30, 40)]")
    passed, verdicts = passes(connection, code, lambda a: a["x"].argmax().view(1, 1))
    assert passed, verdicts
    passed, verdicts = passes(connection, code, lambda a: a["x"].argmin().view(1, 1))
    assert not passed, verdicts


def test_parts():
    assert error_model.families((4, 100)) == [None, 0], "of a column there are too few elements"
    assert error_model.families((64, 1, 64)) == [None, 0, 2, "block"]
    values = torch.arange(2048.0).view(64, 32)
    rms, largest = error_model.norms(values, (64, 32), 0)
    assert largest.tolist() == values.amax(1).tolist()
    assert rms[3].item() == pytest.approx(values[3].double().square().mean().sqrt().item())
    rms, largest = error_model.norms(values.view(-1), (64, 32), "block")
    assert largest.tolist() == [1023.0, 2047.0]


def passes_all_draws(connection, code, answer):
    (arguments,) = connection.begin(make_task(code))
    return [arguments.run(lambda a: a["out"].copy_(answer(a)), trial=trial)["outputs"][0]["pass"] for trial in range(5)]


def test_a_sparse_draw_shows_two_terms_for_three(connection):
    """Of a long sum, whose rounding hides as much in the other draws. Which of the five it is follows from the
    secret."""
    honest = passes_all_draws(
        connection, LONG_PRODUCT, lambda a: sum(a["a"][:, k, None] * a["b"][k] for k in range(2053))
    )
    assert honest == [True] * 5
    halves = passes_all_draws(connection, LONG_PRODUCT, lambda a: in_bits(a["a"], 17) @ in_bits(a["b"], 17))
    assert halves.count(False) == 1


POSITIVE_SUM = model("x: return x.sum(1)", "[torch.rand(3, 100000)]")


def in_sequence(a):
    """torch adds running sums up in float64, numpy in the type that it is given."""
    return torch.from_numpy(numpy.cumsum(a["x"].numpy(), 1, dtype=numpy.float32)[:, -1])


def test_a_sparse_draw_shows_that_the_last_of_a_hundred_thousand_is_missing(connection):
    assert passes_all_draws(connection, POSITIVE_SUM, in_sequence) == [True] * 5
    short = passes_all_draws(connection, POSITIVE_SUM, lambda a: a["x"][:, :-1].sum(1))
    assert False in short


def test_the_sparse_draw_has_few_elements_and_follows_the_secret(connection):
    places = set()
    for seed in ("1", "2", "3", "4", "5", "6", "7", "8"):
        (arguments,) = connection.begin(make_task(LONG_PRODUCT), seed=seed)
        shares = []
        for trial in range(5):
            arguments.draw(trial)
            shares.append((arguments["a"] != 0).float().mean().item())
        assert sorted(shares)[1] > 0.99 and 0.005 < min(shares) < 0.1
        places.add(shares.index(min(shares)))
    assert len(places) > 1


@pytest.mark.parametrize(
    "forward, drawn",
    [
        ("x: return x / x.abs().sum(1, keepdim=True)", "[torch.rand(400, 8)]"),
        ("x: return torch.log(x)", "[torch.rand(40, 300) + 0.1]"),
        ("x: return x.half() * 2", "[torch.rand(40, 300)]"),
    ],
    ids=["nothing over nothing", "a logarithm", "half"],
)
def test_a_forward_that_bears_no_zeros_gets_none(connection, forward, drawn):
    (arguments,) = connection.begin(make_task(model(forward, drawn)))
    for trial in range(5):
        arguments.draw(trial)
        assert (arguments["x"] == 0).float().mean() < 0.01
