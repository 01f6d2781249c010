"""Tests of the reference on a GPU; skipped where there is none. One command runs them:

    python -m pytest -q --import-mode=importlib stages/kernels/python/test_reference_cuda.py

The candidate is this process: it opens the arena by its IPC handle, as a runner does, and computes with torch.
"""

import pathlib
import sys
import time

import pytest

torch = pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import itertools

from reference_client import BATCH_NORM, Failure, connected, make_task, model, started, writes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20
RELU = model("x: return torch.relu(x)", "[torch.randn(rows, 1024)]", constants="rows = 4096")
SOFTMAX = model("x: return torch.softmax(x, -1)", "[torch.randn(4096, 1024)]")
MATMUL = model("a, b: return a @ b", "[torch.randn(256, 2048), torch.randn(2048, 256)]")
BFLOAT16 = model("x: return torch.sigmoid(x)", "[torch.randn(1000, dtype=torch.bfloat16)]")
BOOLEANS = model("x: return x > 0, x.argmax(-1)", "[torch.randn(30, 40)]")
LINEAR = model("x: return torch.relu(self.linear(x))", "[torch.randn(64, 512)]", "self.linear = nn.Linear(512, 512)")
PINNED = model(
    "x, y: return x + y",
    "[torch.randn(99, device='cpu') * numpy.float32(2), torch.from_numpy(numpy.random.randn(99).astype('float32'))]",
    constants="import numpy",
)


@pytest.fixture(scope="module")
def reference():
    yield from started("cuda:0")


connection = pytest.fixture(connected)


RIGHT = {
    "relu": (RELU, lambda a: a["x"].clamp(min=0)),
    "softmax": (SOFTMAX, lambda a: torch.softmax(a["x"], -1)),
    "matmul": (MATMUL, lambda a: a["a"] @ a["b"]),
    "bfloat16": (BFLOAT16, lambda a: torch.sigmoid(a["x"])),
    "booleans": (BOOLEANS, lambda a: (a["x"] > 0, a["x"].argmax(-1))),
    "linear": (LINEAR, lambda a: torch.relu(a["x"] @ a["linear.weight"].t() + a["linear.bias"])),
    "pinned": (PINNED, lambda a: a["x"] + a["y"]),
}


@pytest.mark.parametrize("policy", ["strict", "tf32", "paper"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(connection, name, policy):
    code, function = RIGHT[name]
    (arguments,) = connection.begin(make_task(code, policy))
    for trial in range(2):
        facts = arguments.run(writes(function), trial)
        assert all(output["pass"] and output["unwritten"] == 0 for output in facts["outputs"]), facts
        assert facts["inputs_changed"] == [] and facts["red_zones"] == []


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_written(connection, name):
    (arguments,) = connection.begin(make_task(RIGHT[name][0]))
    for output in arguments.run(lambda a: None)["outputs"]:
        assert (output["reason"], output["unwritten"]) == ("unwritten", output["total"])


def test_batch_norm_in_training(connection):
    def candidate(a):
        return torch.nn.functional.batch_norm(a["x"], None, None, a["norm.weight"], a["norm.bias"], training=True)

    (arguments,) = connection.begin(make_task(BATCH_NORM, protocol="kernelbench"))
    for trial in range(2):
        assert arguments.run(writes(candidate), trial)["outputs"][0]["pass"]
    assert int(arguments["norm.num_batches_tracked"]) == 0


def test_tf32_passes_only_where_it_is_allowed(connection):
    def candidate(a):
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return a["a"] @ a["b"]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    for policy, passes in (("strict", False), ("tf32", True)):
        (arguments,) = connection.begin(make_task(MATMUL, policy))
        (output,) = arguments.run(writes(candidate))["outputs"]
        assert output["pass"] == passes, output


def test_damage_is_found(connection):
    def candidate(a):
        a["out"].copy_(a["x"].clamp(min=0))
        a["out"][7, 9] = 5000.0
        a["x"][4095, 1023] = 1.0
        offset, size = a.place("out")
        a.memory[offset + size + 5] = 1
        torch.cuda.synchronize()

    (arguments,) = connection.begin(make_task(RELU))
    facts = arguments.run(candidate)
    (output,) = facts["outputs"]
    assert (output["reason"], output["mismatched"], output["worst"]["index"]) == ("values", 1, [7, 9])
    assert facts["inputs_changed"] == ["x"]
    assert facts["red_zones"] == [{"near": "out", "side": "after", "offset": 5}]


def test_tensors_are_64_kib_apart(connection):
    first, second = connection.begin(make_task(LINEAR), sets=2, scratch_bytes=3)
    places = sorted([*first.arguments, first.scratch, *second.arguments, second.scratch])
    assert all(offset % 256 == 0 for offset, _ in places)
    assert all(after[0] - sum(before) >= 64 << 10 for before, after in itertools.pairwise(places))


def test_chunks_of_a_large_output(connection):
    """Three chunks and a bit; the errors are in the last two."""
    code = model("x: return x + 1", f"[torch.rand({(3 << 24) + 5})]")

    def candidate(a):
        a["out"].copy_(a["x"] + 1)
        a["out"][[2 << 24, (3 << 24) + 4]] = torch.tensor([3.0, 9.0], device="cuda")

    (arguments,) = connection.begin(make_task(code))
    (output,) = arguments.run(candidate)["outputs"]
    assert (output["mismatched"], output["worst"]["index"]) == (2, [(3 << 24) + 4])
    (output,) = arguments.run(lambda a: a["out"][: 1 << 24].copy_(a["x"][: 1 << 24] + 1))["outputs"]
    assert (output["unwritten"], output["first_unwritten"]) == ((2 << 24) + 5, [1 << 24])


def test_the_arena_grows(connection):
    small = connection.ask("begin", task=make_task(RELU), seed="1")["arena"]
    large = connection.ask("begin", task=make_task(RELU), seed="1", sets=16)
    assert large["arena"]["generation"] == small["generation"] + 1
    assert large["arena"]["ipc_handle"] != small["ipc_handle"] and len(large["sets"]) == 16
    (arguments,) = connection.begin(make_task(RELU))
    assert arguments.run(writes(lambda a: a["x"].clamp(min=0)))["outputs"][0]["pass"]


def test_too_much_memory_is_said_so(connection):
    code = model("x: return x * 2", "[torch.empty(1 << 45)]")
    with pytest.raises(Failure) as caught:
        connection.ask("task", **make_task(code))
    assert caught.value.kind == "memory"
    assert connection.ask("task", **make_task(RELU))["spec"]


def test_random_numbers_are_refused(connection):
    code = model("x: return F.dropout(x, 0.5, True)", "[torch.randn(99)]")
    with pytest.raises(Failure, match="forward draws random numbers"):
        connection.ask("task", **make_task(code))


def test_a_draw_and_a_judgement_are_quick(connection):
    (arguments,) = connection.begin(make_task(SOFTMAX))
    times = []
    for trial in range(20):
        started = time.perf_counter()
        arguments.draw(trial)
        drawn = time.perf_counter()
        arguments.judge()
        times.append((drawn - started, time.perf_counter() - drawn))
    best = [min(column) * 1e3 for column in zip(*times, strict=True)]
    print(f"draw {best[0]:.2f} ms, judge {best[1]:.2f} ms")
    # Some hundred small launches: the model of error looks at an output by its parts.
    assert sum(best) < 6, best


def test_runs_that_are_drawn_ahead_are_judged_by_what_they_left(connection):
    """In one place, with the card to themselves: copies in and out are all that is left to do there."""
    arguments = connection.begin(make_task(SOFTMAX), scratch_bytes=MIB)[0]
    arguments.draw(0)
    trials = list(range(1, 13))
    started = time.perf_counter()
    draws = [{"trial": trial, "pattern": trial % 2, "quick": trial != 5} for trial in trials]
    assert connection.ask("ahead", draws=draws) == {"drawn": len(trials)}
    drawn, times, kept, before = time.perf_counter(), [], None, None
    for trial in trials:
        placed = time.perf_counter()
        connection.ask("place", trial=trial, set=0, keep=kept)
        times.append(time.perf_counter() - placed)
        assert before is None or not torch.equal(before, arguments["x"])
        assert bool((arguments["out"].view(torch.uint8) == (0xFF, 0x5A)[trial % 2]).all())
        before = arguments["x"].clone()
        # One does nothing, and one writes beside its output.
        if trial != 4:
            arguments["out"].copy_(torch.softmax(arguments["x"], -1))
        if trial == 8:
            offset, size = arguments.place("out")
            arguments.memory[offset + size + 7] ^= 1
        torch.cuda.synchronize()
        kept = trial
    connection.ask("keep", trial=kept)
    arguments["out"].zero_()
    torch.cuda.synchronize()
    judging = time.perf_counter()
    judged = connection.ask("judge_kept", trials=trials)["judged"]
    print(
        f"draw {(drawn - started) / 12e-3:.2f} ms, place {min(times) * 1e3:.2f} ms, "
        f"judge {(time.perf_counter() - judging) / 12e-3:.2f} ms"
    )
    assert [facts["outputs"][0]["pass"] for facts in judged] == [trial != 4 for trial in trials]
    assert [bool(facts["red_zones"]) for facts in judged] == [trial == 8 for trial in trials]
    assert min(times) < 2e-3, times


@pytest.mark.parametrize("which", ["eager", "compile", "autotune"])
def test_baselines(connection, which):
    (arguments,) = connection.begin(make_task(RELU))
    arguments.draw()
    prepared = connection.ask("prepare", which=which)
    assert prepared["error"] is None
    assert (prepared["cache"] is None) == (which == "eager")
    times = [connection.ask("time", which=which, set=0) for _ in range(10)]
    assert all(each["hidden"] for each in times), times
    # 32 MiB read and written: between 1 and 20 TB/s.
    median = sorted(each["ms"] for each in times)[5]
    assert 32 * MIB / 20e9 < median < 32 * MIB / 1e9, times
    kernels = connection.ask("kernels", which=which)
    assert kernels["kernels"] == 1 and 0.2 * median < kernels["kernel_ms"] < 1.5 * median
    print(f"{which}: {prepared['seconds']:.2f} s, {median:.4f} ms, kernel {kernels['kernel_ms']:.4f} ms")


def test_a_saved_cache_makes_compiling_quick(reference):
    with reference.connect() as connection:
        cache = connection.ask("prepare", which="compile", task=make_task(LINEAR))["cache"]
    with reference.connect() as connection:
        again = connection.ask("prepare", which="compile", cache=cache, task=make_task(LINEAR))
    assert again["error"] is None
    print(f"with a cache of {len(cache)} characters: {again['seconds']:.2f} s")


def test_an_eager_forward_of_many_kernels_is_hidden(connection):
    code = model("x: return [x := x * 1.01 for _ in range(300)][-1]", "[torch.randn(1000)]")
    (arguments,) = connection.begin(make_task(code, "paper"))
    arguments.draw()
    connection.ask("time", which="eager", set=0)
    times = [connection.ask("time", which="eager", set=0) for _ in range(5)]
    assert all(each["hidden"] for each in times), times
    # Kernels back to back take some 2 microseconds each; a launch from Python, more than 3.
    assert min(each["ms"] for each in times) < 300 * 3e-3, times


def test_screening(connection):
    reply = connection.ask("screen", task=make_task(MATMUL))
    assert "tf32" in reply["tried"] and "tf32" not in reply["passes"], reply
    assert "tf32" in connection.ask("screen", task=make_task(MATMUL, "paper"))["tried"]


def test_workers_start_from_a_process_without_cuda(reference):
    with reference.connect() as one, reference.connect() as other:
        started = time.perf_counter()
        for connection in (one, other):
            assert connection.ask("task", **make_task(RELU))["device"]["l2_bytes"] > MIB
        print(f"two contexts and tasks: {time.perf_counter() - started:.2f} s")
