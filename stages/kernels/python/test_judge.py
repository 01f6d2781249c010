"""The judge's arithmetic against a second implementation, element by element, in chunks of every kind."""

import math
import pathlib
import random
import sys

import pytest

torch = pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import chunk_numbers
import judge
from element_types import PATTERNS, bits, pattern_word
from policy import Policy, multiple

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CHUNKS = [1, 7, 1 << 24]


def facts(policy, eager, reference, got, pattern=None, earlier=None):
    (expectation,) = judge.expect(Policy(policy), ["out"], [eager.clone()], [reference.clone()])
    measurement = judge.Measurement(expectation, got, pattern, earlier)
    verdict = judge.Verdict(expectation, judge.fetch(measurement.rows), earlier is not None)
    return verdict.facts(), measurement.held


def is_right(policy, eager, reference, got, allowed):
    """One element, by the rules as policy.py has them."""
    if math.isfinite(eager):
        target = eager if policy == "paper" else reference
        limit = 1e-2 + 1e-2 * abs(target) if policy == "paper" else allowed
        return abs(got - target) <= limit
    return got == eager or (math.isnan(got) and math.isnan(eager))


def limits(eager, reference, dtype):
    pairs = [(e, r) for e, r in zip(eager, reference, strict=True) if math.isfinite(e)]
    errors = [abs(e - r) for e, r in pairs]
    rms = math.sqrt(sum(r * r for _, r in pairs) / len(pairs))
    error_rms = math.sqrt(sum(error * error for error in errors) / len(pairs))
    epsilon, times = torch.finfo(dtype).eps, multiple(dtype)
    largest = max(abs(r) for _, r in pairs)
    return times * max(error_rms, epsilon * rms), times * max(*errors, epsilon * largest)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("policy", ["strict", "paper"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(monkeypatch, dtype, policy, chunk):
    monkeypatch.setattr(chunk_numbers, "CHUNK", chunk)
    for seed in range(12):
        torch.manual_seed(seed)
        random.seed(seed)
        reference = torch.randn(5, 6, dtype=torch.float64)
        eager = reference.to(dtype)
        got = eager.clone()
        for special in random.sample([math.nan, math.inf, -math.inf], seed % 4):
            eager.view(-1)[random.randrange(30)] = special
        got = torch.where(eager.isfinite(), got, eager)
        for _ in range(seed % 5):
            damage = random.choice([0.0, 1e-3, 0.5, 1e4, math.inf, math.nan])
            got.view(-1)[random.randrange(30)] += damage
        check(policy, eager, reference, got, dtype)


def check(policy, eager, reference, got, dtype):
    found, _ = facts(policy, eager, reference, got)
    flat = [tensor.double().view(-1).tolist() for tensor in (eager, reference, got)]
    allowed_rms, allowed_max = limits(flat[0], flat[1], dtype)
    right = [is_right(policy, *numbers, allowed_max) for numbers in zip(*flat, strict=True)]
    nonfinite = sum(math.isfinite(e) and not math.isfinite(g) for e, _, g in zip(*flat, strict=True))
    assert (found["mismatched"], found["nonfinite"]) == (right.count(False), nonfinite)
    if policy == "strict":
        assert found["allowed_rms"] == pytest.approx(allowed_rms)
    if False in right:
        assert found["reason"] == ("nonfinite" if nonfinite else "values")
        assert right[judge_index(found["worst"]["index"])] is False
    else:
        assert found["pass"], found


def judge_index(index):
    return index[0] * 6 + index[1]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
def test_unwritten_elements(monkeypatch, dtype, chunk):
    monkeypatch.setattr(chunk_numbers, "CHUNK", chunk)
    eager = torch.randint(0, 2, (3, 5)).to(dtype)
    unwritten = [4, 8, 14]
    earlier = None
    for pattern in PATTERNS:
        got = eager.clone()
        bits(got)[unwritten] = pattern_word(dtype, pattern)
        # Held in this run only, as a value that happens to look like it.
        bits(got)[2] = pattern_word(dtype, PATTERNS[0])
        found, earlier = facts("paper", eager, eager, got, pattern, earlier)
    assert (found["unwritten"], found["first_unwritten"], found["reason"]) == (3, [0, 4], "unwritten")


def told(worst):
    return worst["expected"], worst["got"], worst["error"]


@pytest.mark.parametrize("value", [1 << 60, (1 << 62) - 1, -(1 << 62), (1 << 63) - 2, -(1 << 63)])
def test_integers_are_exact_beyond_what_a_double_holds(value):
    eager = torch.tensor([value, -5, 7])
    found, _ = facts("strict", eager, eager, torch.tensor([value + 1, -5, 7]))
    assert (found["mismatched"], found["worst"]["index"], found["worst"]["allowed"]) == (1, [0], 0)
    assert told(found["worst"]) == (value, value + 1, 1)
    assert facts("strict", eager, eager, eager.clone())[0]["pass"]


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_the_worst_integer_is_the_one_furthest_off(monkeypatch, dtype, chunk):
    monkeypatch.setattr(chunk_numbers, "CHUNK", chunk)
    lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    near = [lowest, lowest + 1, -3, 0, 1, 2, highest - 1, highest]
    values = [value for value in near if value >= lowest]
    random.seed(7)
    for _ in range(50):
        expected, got = ([random.choice(values) for _ in range(20)] for _ in range(2))
        distances = [abs(e - g) for e, g in zip(expected, got, strict=True)]
        where = distances.index(max(distances))
        eager, answer = (torch.tensor(numbers, dtype=dtype) for numbers in (expected, got))
        worst = facts("strict", eager, eager, answer)[0]["worst"]
        assert worst["index"] == [where]
        assert told(worst) == (expected[where], got[where], distances[where])
        assert all(type(number) is int for number in told(worst))


@pytest.mark.parametrize("byte, text", [(1, "true"), (7, "the byte 7")])
def test_booleans_are_told_in_words(byte, text):
    eager = torch.tensor([True, False, False])
    got = eager.clone()
    bits(got)[2] = byte
    worst = facts("strict", eager, eager, got)[0]["worst"]
    assert (worst["index"], worst["expected_text"], worst["got_text"]) == ([2], "false", text)
    assert told(worst) == (0, byte, None)


@pytest.mark.parametrize("policy", ["strict", "paper"])
@pytest.mark.parametrize(
    "expected, got", [("inf", "-inf"), ("nan", "inf"), ("-inf", "nan"), ("inf", 2.0), (2.0, "nan")]
)
def test_what_is_not_finite_is_told_apart(monkeypatch, policy, expected, got):
    monkeypatch.setattr(chunk_numbers, "CHUNK", 3)
    eager, answer = torch.ones(5), torch.ones(5)
    eager[4], answer[4] = float(expected), float(got)
    worst = facts(policy, eager, eager.double(), answer)[0]["worst"]
    assert worst["index"] == [4]
    for side, value in (("expected", expected), ("got", got)):
        number, text = (None, value) if isinstance(value, str) else (value, None)
        assert (worst[side], worst[f"{side}_text"]) == (number, text)


def test_a_float64_forward_that_says_something_else_is_no_yardstick():
    eager = torch.ones(10)
    (expectation,) = judge.expect(Policy("strict"), ["out"], [eager], [eager.double() * 2])
    with pytest.raises(Exception, match="differs from eager by 50%"):
        expectation.check_yardstick()
