"""The short ways of judging against the long ones: the same decisions and the same facts, and which of them was
taken."""

import itertools
import math
import pathlib
import random
import sys

import pytest

torch = pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import argument_sets
import chunk_numbers
import error_model
import glance
import judge
from element_types import PATTERNS, as_words, bits, pattern_number, pattern_word
from policy import Policy
from reference_client import make_task, model

SHAPES = [
    (),
    (1,),
    (7,),
    (2048,),
    (5000,),
    (4, 100),
    (64, 64),
    (40, 2048),
    (3, 1000, 5),
    (64, 1, 64),
    (2, 3, 32, 32),
    (33, 2, 4, 40),
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


# Norms of parts.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", [2, math.inf])
@pytest.mark.parametrize("special", [None, math.nan, math.inf])
def test_norms_of_parts_are_those_of_each_family(shape, order, special):
    torch.manual_seed(len(shape))
    values = torch.randn(math.prod(shape), dtype=torch.float64)
    if special is not None:
        values[random.Random(str(shape)).randrange(values.numel())] = special
    found = error_model.part_norms(values, shape, order)
    assert sorted(found, key=str) == sorted(error_model.families(shape), key=str)
    for family, norms in found.items():
        rms, largest = error_model.norms(values, shape, family)
        expected = largest if order == math.inf else rms * math.sqrt(error_model._size(shape, family))
        torch.testing.assert_close(norms, expected, rtol=1e-14, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 5, 1024, 2048, 5000, 6144])
def test_the_place_of_the_largest_is_the_first_of_equals(size):
    random.seed(size)
    for _ in range(40):
        values = torch.zeros(size, dtype=torch.float64)
        places = [random.randrange(size) for _ in range(3)]
        values[places] = torch.tensor([-2.0, 2.0, 2.0], dtype=torch.float64)
        values[random.choice([0, size - 1])] += random.choice([0.0, 1.0])
        peaks = error_model.part_norms(values, (size,), math.inf).get("block")
        assert error_model._place_of_largest(values, peaks).item() == values.abs().max(0).indices.item()


# Expectations and answers.


class Case:
    """An output with bounds: eager's answer, the float64 one, and what honest arithmetic does to it."""

    def __init__(self, dtype, shape, seed, special=None):
        torch.manual_seed(seed)
        self.dtype, self.shape = dtype, shape
        self.exact = torch.randn(shape, dtype=torch.float64) * 10.0 ** random.Random(seed).randrange(-2, 3)
        self.unit = max(torch.finfo(dtype).eps, error_model.UNIT if dtype != torch.float64 else 0.0)
        twins = [self.exact * (1 + self.unit * torch.randn(shape, dtype=torch.float64)) for _ in range(3)]
        limits = error_model.HALF if dtype in error_model.HALVES else error_model.STRICT
        self.kinds = [error_model.measure_kind(limits, True, self.exact, twins)]
        self.eager = twins[0].to(dtype)
        if special is not None:
            side, value = special
            getattr(self, side).view(-1)[seed % self.exact.numel()] = value

    def expectation(self):
        (expectation,) = judge.expect(
            Policy("strict"), ["out"], [self.eager.clone()], [self.exact.clone()], [self.kinds]
        )
        return expectation

    def answer(self, times):
        """One whose errors are so many units of honest arithmetic."""
        noise = torch.randn(self.shape, dtype=torch.float64)
        return (self.exact * (1 + times * self.unit * noise)).to(self.dtype)


def whole_facts(expectation, got, byte, earlier=None):
    measurement = judge.Measurement(expectation, got, byte, earlier)
    return judge.Verdict(expectation, judge.fetch(measurement.rows), earlier is not None).facts()


def glance_facts(expectation, got, byte):
    """As a glance tells them, or `None` where it finds nothing."""
    looked = glance.at(expectation, got, byte)
    rows = looked and looked.conclude(judge.fetch(looked.rows))
    return rows and judge.Verdict(expectation, rows, False).facts()


def assert_same_facts(short, long):
    assert short.keys() == long.keys()
    for name in short.keys() - {"error_rms"}:
        assert short[name] == long[name], name
    assert short["error_rms"] == pytest.approx(long["error_rms"], rel=1e-12, abs=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("chunk", [3000, 1 << 24])
def test_a_glance_finds_right_what_is_right_with_the_same_facts(monkeypatch, dtype, chunk):
    monkeypatch.setattr(chunk_numbers, "CHUNK", chunk)
    found = {True: 0, False: 0}
    for number, (shape, times) in enumerate(itertools.product(SHAPES, [0, 1, 6, 14, 40, 1e3])):
        case = Case(dtype, shape, number)
        expectation, got = case.expectation(), case.answer(times)
        long, short = whole_facts(expectation, got, PATTERNS[0]), glance_facts(expectation, got, PATTERNS[0])
        assert long["pass"] or short is None
        if short is not None:
            assert_same_facts(short, long)
        found[short is not None] += 1
        # Nothing but what is right and close to its bounds takes both ways.
        assert (short is not None) == long["pass"] or shape == () or case.exact.numel() < 10
    assert min(found.values()) > 10, "both happen"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_what_is_special_in_an_answer_is_measured(dtype, value):
    for seed, shape in enumerate(SHAPES[3:]):
        case = Case(dtype, shape, seed)
        expectation, got = case.expectation(), case.answer(0.5)
        got.view(-1)[case.exact.abs().argmax()] = value
        assert glance_facts(expectation, got, PATTERNS[0]) is None
        assert not whole_facts(expectation, got, PATTERNS[0])["pass"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_element_just_within_its_bound_and_just_beyond(dtype):
    """A single error, of half types too, where the expected answer is moved instead of what can't lie so near."""
    for seed, shape in enumerate([(7,), (5000,), (40, 2048), (3, 1000, 5)]):
        case = Case(dtype, shape, seed)
        expectation = case.expectation()
        got, place = case.answer(0).view(-1), case.exact.abs().argmin()
        for away in (-1e-3, 1e-3) if dtype == torch.float64 else (-1e-9, -1e-3, 1e-9, 1e-3):
            times, passes = 1 + away, away < 0
            # The bounds are those of the draw before: only the answer moves.
            expectation._reference[place] = got[place].double() - times * expectation.allowed_max
            long, short = whole_facts(expectation, got, PATTERNS[0]), glance_facts(expectation, got, PATTERNS[0])
            assert (long["mismatched"] == 0) == passes
            assert short is None or passes
            if short is not None:
                assert_same_facts(short, long)
            elif passes and times < 1 - 1e-6:
                assert not long["pass"], "the part's own bound is passed"


SPECIAL = [("eager", math.nan), ("eager", math.inf), ("exact", math.nan), ("exact", -math.inf)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("special", [None, *SPECIAL], ids=str)
def test_both_descriptions_of_a_draw_agree(monkeypatch, dtype, special):
    for seed, shape in enumerate(SHAPES[1:]):
        case = Case(dtype, shape, seed, special)
        short = case.expectation()
        with monkeypatch.context() as patch:
            patch.setattr(judge.Expectation, "_describe_as_finite", judge.Expectation._describe_all)
            long = case.expectation()
        assert not long._is_taken_as_finite
        assert short._is_taken_as_finite == (special is None)
        assert (
            (short.irregular, short.nonzero)
            == (long.irregular, long.nonzero)
            == (int(special is not None), long.nonzero)
        )
        for name in ("allowed_rms", "allowed_max", "error_rms", "rms", "norm"):
            assert getattr(short, name) == pytest.approx(getattr(long, name), rel=1e-6, abs=0), name
        assert short.least_peak <= long.least_peak * (1 + 1e-12), "a bound from below"
        for (one, _), (other, _) in zip(short.bounds.by_family.values(), long.bounds.by_family.values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
        # Where something is not finite, the target hides it, whichever way was tried first.
        assert short.target(0, None).isnan().equal(long.target(0, None).isnan())
        got = case.answer(1)
        got = torch.where(case.eager.isfinite(), got, case.eager)
        facts = [whole_facts(each, got, PATTERNS[0]) for each in (short, long)]
        assert facts[0]["pass"] == facts[1]["pass"]
        assert (glance.at(short, got, PATTERNS[0]) is None) == (special is not None)


def test_an_answer_of_zeros_is_described_as_such():
    zeros = torch.zeros(100, 40)
    kinds = [error_model.measure_kind(error_model.STRICT, True, zeros.double(), [zeros.double()] * 3)]
    (expectation,) = judge.expect(Policy("strict"), ["out"], [zeros], [zeros.double()], [kinds])
    assert (expectation._is_taken_as_finite, expectation.nonzero) == (False, False)
    assert glance_facts(expectation, zeros.clone(), PATTERNS[0])["pass"]


def test_all_zeros_are_never_right_at_a_glance():
    case = Case(torch.float32, (100, 40), 1)
    case.kinds[0].relative = dict.fromkeys(case.kinds[0].relative, 10.0)
    expectation, zeros = case.expectation(), torch.zeros(100, 40)
    assert glance_facts(expectation, zeros, PATTERNS[0]) is None
    assert whole_facts(expectation, zeros, PATTERNS[0])["reason"] == "zeros"


# Poison.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_where_the_poison_might_be_right_it_is_looked_for(dtype):
    case = Case(dtype, (5000,), 3)
    assert math.isnan(pattern_number(dtype, PATTERNS[0]))
    number = pattern_number(dtype, PATTERNS[1])
    case.exact[17] = number
    case.eager[17] = number
    expectation, got = case.expectation(), case.answer(0)
    assert glance.at(expectation, got, PATTERNS[0]) is not None
    assert glance.at(expectation, got, PATTERNS[1]) is None
    assert whole_facts(expectation, got, PATTERNS[1])["held"] == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("chunk", [7, 1 << 24])
def test_integers_that_are_equal_are_right_at_a_glance(monkeypatch, dtype, chunk):
    monkeypatch.setattr(chunk_numbers, "CHUNK", chunk)
    eager = torch.randint(0, 2, (5, 6)).to(dtype)
    if dtype != torch.bool:
        bits(eager)[11] = pattern_word(dtype, PATTERNS[1])
    (expectation,) = judge.expect(Policy("strict"), ["out"], [eager], [None])
    for pattern in PATTERNS:
        short, long = (look(expectation, eager.clone(), pattern) for look in (glance_facts, whole_facts))
        assert short == long and long["pass"]
    got = eager.clone()
    bits(got)[8] ^= 1
    assert glance_facts(expectation, got, PATTERNS[0]) is None
    assert not whole_facts(expectation, got, PATTERNS[0])["pass"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [1, 3, 8, 1000, 1001])
def test_words_show_every_bit(dtype, size):
    one = torch.randint(0, 2, (size,)).to(dtype)
    assert as_words(one).equal(as_words(one.clone()))
    for place in (0, size - 1):
        other = one.clone()
        other.view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert (as_words(one) != as_words(other)).any()


# Which way was taken, by an evaluation's own path.


CASES = {
    "softmax": (
        model("x: return torch.softmax(x, -1)", "[torch.randn(64, 1000)]"),
        lambda a: torch.softmax(a["x"], -1),
    ),
    "a logarithm of negative numbers": (
        model("x: return torch.log(x)", "[torch.randn(50, 60)]"),
        lambda a: a["x"].log(),
    ),
    "an index": (model("x: return torch.argmax(x, 1)", "[torch.randn(50, 30)]"), lambda a: a["x"].argmax(1)),
    "two outputs": (model("x: return x * 2, x > 0", "[torch.randn(50, 30)]"), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("damage", [None, "answer", "input", "beside"])
def test_which_way_was_taken(monkeypatch, name, damage):
    """In this process, as the worker does it: `Task`, `ArgumentSets`, and what they call."""
    import arena
    import device as devices
    import task as tasks

    code, _ = CASES[name]
    device = devices.of("cpu")
    memory = arena.Arena(device, None)
    fields = {**make_task(code), "seed": 0}
    task = tasks.Task(fields, device, memory)
    counts = {"glance": 0, "measured": 0, "described again": 0}

    def counted(owner, name, key):
        original = getattr(owner, name)

        def wrapper(*arguments, **named):
            counts[key] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapper)

    counted(glance.FloatGlance, "conclude", "glance")
    counted(glance.ExactGlance, "conclude", "glance")
    counted(judge.Measurement, "_compare_poison", "measured")
    counted(judge.Expectation, "_describe_all", "described again")
    (chosen,) = argument_sets.ArgumentSets(task, memory, 0, 1, 1 << 40).sets
    with task.running():
        chosen.take_inputs(task, task.draw(5), 1, 7)
        described_again = counts["described again"]
        chosen.fill(0)
        outputs = [slot.view(chosen.memory) for slot in chosen.layout.written]
        for output, expected in zip(outputs, task.forward(chosen.values), strict=True):
            output.copy_(expected)
        spoil(chosen, outputs, damage)
        facts = chosen.judge()
    memory.close()
    assert [output["pass"] for output in facts["outputs"]] == [damage != "answer", *[True] * (len(outputs) - 1)]
    assert bool(facts["inputs_changed"]) == (damage == "input") and bool(facts["red_zones"]) == (damage == "beside")
    is_index, is_log = name == "an index", name.startswith("a logarithm")
    exact = sum(not output.is_floating_point() for output in outputs)
    floats = len(outputs) - exact
    assert described_again == (floats if is_log else 0) + exact
    assert counts["glance"] == (0 if is_log else len(outputs))
    # A glance at integers looks for the poison itself.
    again = damage == "answer" and not is_log
    assert counts["measured"] == exact + (1 if again or is_log else 0), (is_index, counts)


def spoil(chosen, outputs, damage):
    if damage == "answer":
        flat = outputs[0].view(-1)
        place = int(flat.isfinite().nonzero()[3])
        flat[place] = flat[place] + 1
    elif damage == "input":
        chosen.memory[chosen.layout.read[0].offset + 2] ^= 1
    elif damage == "beside":
        chosen.memory[chosen.layout.written[0].end + 1] ^= 1


def test_what_may_only_be_read_is_compared_after_every_run_though_it_is_not_copied_again(monkeypatch):
    import arena
    import device as devices
    import task as tasks

    monkeypatch.setattr(argument_sets, "LARGE_BYTES", 1)
    device = devices.of("cpu")
    memory = arena.Arena(device, None)
    task = tasks.Task({**make_task(CASES["softmax"][0]), "seed": 0}, device, memory)
    (chosen,) = argument_sets.ArgumentSets(task, memory, 0, 1, 1 << 40).sets
    with task.running():
        chosen.take_inputs(task, task.draw(5), 1, 7)
        (answer,) = task.forward(chosen.values)
        (slot,) = chosen.layout.written
        for run in range(8):
            chosen.fill(run % 2)
            slot.view(chosen.memory).copy_(answer)
            if run in (2, 5):
                chosen.memory[chosen.layout.read[0].offset] ^= 1
            facts = chosen.judge()
            assert facts["inputs_changed"] == (["x"] if run in (2, 5) else [])
            assert facts["outputs"][0]["pass"] and not facts["red_zones"]
        # Between a judgement that found all well and the next run.
        chosen.fill(0)
        slot.view(chosen.memory).copy_(answer)
        assert not chosen.judge()["inputs_changed"]
        chosen.memory[chosen.layout.read[0].offset] ^= 1
        chosen.fill(1)
        slot.view(chosen.memory).copy_(answer)
        assert chosen.judge()["inputs_changed"] == ["x"]
    memory.close()
