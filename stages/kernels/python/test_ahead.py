"""Tests of runs that are drawn before the clock starts and judged after it: each on inputs and poison of its own, and
by what it left itself."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]

import itertools

import arena
import device as devices
import reference as program
from element_types import PATTERNS
from reference_client import (
    Failure,
    Reference,
    keep_the_last,
    make_task,
    model,
    open_arena,
    softmax,
    spoil_one,
    write_beside,
    write_input,
)

SOFTMAX = model("x: return torch.softmax(x, -1)", "[torch.randn(64, 1000)]")
LINEAR = model("x: return self.layer(x)", "[torch.randn(32, 64)]", "self.layer = nn.Linear(64, 48)")
TIMED = 1 << 20


@pytest.fixture(scope="module")
def reference():
    process = Reference()
    yield process
    process.close()


class Clock:
    """A connection with sets for a task that was judged as a whole before, as the evaluator's clock has it."""

    def __init__(self, connection, code=SOFTMAX, sets=2, policy="strict", **fields):
        self._connection = connection
        self.sets = connection.begin(make_task(code, policy), sets=sets, **fields)
        self.sets[0].draw(TIMED)

    def ask(self, *request, **fields):
        return self._connection.ask(*request, **fields)

    def ahead(self, count, quick=True):
        draws = [{"trial": trial, "pattern": trial % 2, "quick": quick} for trial in self.trials(count)]
        assert self.ask("ahead", draws=draws) == {"drawn": count}

    @staticmethod
    def trials(count):
        return list(range(TIMED + 1, TIMED + 1 + count))

    def place(self, trial, keep=None):
        number = trial % len(self.sets)
        self.ask("place", trial=trial, set=number, keep=keep)
        return self.sets[number]

    def run(self, candidate, count, quick=True):
        """As many runs, one after another; the facts on each."""
        self.ahead(count, quick)
        before = None
        for trial in self.trials(count):
            candidate(self.place(trial, before))
            before = trial
        self.ask("keep", trial=before)
        return self.judged(self.trials(count))

    def judged(self, trials):
        return self.ask("judge_kept", trials=trials)["judged"]


def linear(arguments):
    tensors = arguments.tensors
    arguments["out"].copy_(torch.nn.functional.linear(tensors["x"], tensors["layer.weight"], tensors["layer.bias"]))


def is_well(facts):
    return all(output["pass"] for output in facts["outputs"]) and not facts["inputs_changed"] and not facts["red_zones"]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("policy", ["strict", "tf32", "paper"])
@pytest.mark.parametrize("sets", [1, 2, 4])
def test_what_is_right_passes(reference, quick, policy, sets):
    with reference.connect() as connection:
        facts = Clock(connection, sets=sets, policy=policy).run(softmax, 5, quick)
        assert len(facts) == 5 and all(map(is_well, facts))


@pytest.mark.parametrize("quick", [True, False])
def test_each_run_has_weights_of_its_own_and_is_judged_by_them(reference, quick):
    with reference.connect() as connection:
        clock, seen = Clock(connection, LINEAR), []

        def candidate(arguments):
            seen.append(arguments["layer.weight"].clone())
            linear(arguments)

        assert all(map(is_well, clock.run(candidate, 4, quick)))
        assert not any(torch.equal(one, other) for one, other in itertools.pairwise(seen))


def test_a_run_with_the_weights_of_another_is_wrong(reference):
    with reference.connect() as connection:
        clock, kept = Clock(connection, LINEAR), []

        def candidate(arguments):
            kept.append(arguments["layer.weight"].clone())
            arguments["out"].copy_(arguments["x"] @ kept[0].T + arguments["layer.bias"])

        assert [is_well(facts) for facts in clock.run(candidate, 3)] == [True, False, False]


def write_behind_scratch(arguments):
    softmax(arguments)
    offset, size = arguments.scratch
    arguments.memory[offset : offset + size] = 7
    arguments.memory[offset + size + 5] ^= 1


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("policy", ["strict", "paper"])
@pytest.mark.parametrize("candidate", [spoil_one, keep_the_last, write_input, write_beside, write_behind_scratch])
def test_what_is_wrong_is_told_as_it_is_of_a_run_that_was_judged_at_once(reference, quick, policy, candidate):
    with reference.connect() as connection:
        clock = Clock(connection, policy=policy, scratch_bytes=1000)
        later = clock.run(candidate, 3, quick)
        at_once = []
        for trial in clock.trials(3):
            arguments = clock.sets[trial % 2]
            arguments.draw(trial, trial % 2, quick=quick)
            candidate(arguments)
            at_once.append(arguments.judge())
        assert later == at_once and not any(map(is_well, later))


def test_a_run_is_judged_by_what_it_left_and_not_by_what_lies_there_later(reference):
    """In one place: each run overwrites what the one before left."""
    with reference.connect() as connection:
        clock = Clock(connection, sets=1)
        clock.ahead(3)
        first, second, third = clock.trials(3)
        inputs = clock.place(first)["x"].clone()
        # It leaves poison, and a later run does its work.
        arguments = clock.place(second, keep=first)
        softmax(arguments)
        arguments = clock.place(third, keep=second)
        arguments["out"].copy_(torch.softmax(inputs, -1))
        clock.ask("keep", trial=third)
        arguments["out"].fill_(0.0)
        assert [is_well(facts) for facts in clock.judged([first, second, third])] == [False, True, False]


@pytest.mark.parametrize("sets", [1, 3])
def test_inputs_are_in_the_arena_just_before_their_run_and_not_earlier(reference, sets):
    with reference.connect() as connection:
        clock = Clock(connection, sets=sets)
        memory = clock.sets[0].memory
        before = memory.clone()
        clock.ahead(4)
        assert torch.equal(memory, before)
        size = memory.numel() if sets == 1 else clock.sets[1].place("x")[0] - clock.sets[0].place("x")[0]
        kept = None
        for trial in clock.trials(4):
            number = trial % sets
            others = torch.ones(memory.numel(), dtype=torch.bool)
            others[number * size : (number + 1) * size] = False
            before = memory.clone()
            clock.place(trial, kept)
            assert torch.equal(memory[others], before[others])
            kept = trial


def test_inputs_are_drawn_anew_for_each_run_and_as_ever(reference):
    with reference.connect() as connection:
        clock, seen = Clock(connection), []
        clock.run(lambda arguments: seen.append(arguments["x"].clone()), 4)
        drawn = []
        for trial in clock.trials(4):
            clock.sets[0].draw(trial)
            drawn.append(clock.sets[0]["x"].clone())
        assert all(torch.equal(one, other) for one, other in zip(seen, drawn, strict=True))
        assert len({tensor.numpy().tobytes() for tensor in seen}) == 4


def test_every_run_finds_poison_where_it_is_to_write(reference):
    """Even where an earlier one wrote what is right for the next."""
    with reference.connect() as connection:
        clock = Clock(connection, sets=1, scratch_bytes=1000)
        clock.ahead(3)
        arguments, kept = clock.sets[0], None
        for trial in clock.trials(3):
            for start, size in [*arguments.arguments, arguments.scratch]:
                arguments.memory[max(0, start - 9) : start + size + 9] = 3
            clock.place(trial, kept)
            byte, written = PATTERNS[trial % 2], arguments.memory.clone()
            start, size = arguments.place("x")
            written[start : start + size] = byte
            end = sum(arguments.scratch) + arguments.arguments[0][0]
            assert bool((written[:end] == byte).all())
            assert not bool((arguments["x"].view(torch.uint8) == byte).all())
            kept = trial


def test_requests_in_the_wrong_order(reference):
    with reference.connect() as connection:
        clock = Clock(connection, sets=2)
        clock.ahead(3)
        first, second, third = clock.trials(3)

        def refused(message, *request, **fields):
            with pytest.raises(Failure, match=message) as caught:
                clock.ask(*request, **fields)
            assert caught.value.kind == "internal"

        refused("was not drawn ahead", "place", trial=7, set=0)
        refused("is in no set", "keep", trial=first)
        refused("judged once, after it was kept", "judge_kept", trials=[first])
        refused("is drawn already", "ahead", draws=[{"trial": first}])
        refused("the field pattern is 2", "ahead", draws=[{"trial": 9, "pattern": 2}])
        refused("lacks the field trial", "ahead", draws=[{}])
        clock.ask("place", trial=first, set=0)
        refused("was run already", "place", trial=first, set=1)
        # What lies there has not been copied.
        refused("was not kept", "place", trial=second, set=0)
        refused("was not kept", "draw", set=0, trial=5)
        refused("was not kept", "judge", set=0)
        clock.ask("draw", set=1, trial=5)
        clock.ask("keep", trial=first)
        refused("is in no set", "keep", trial=first)
        refused("was run already", "place", trial=first, set=1)
        refused("judged once", "judge_kept", trials=[first, first])
        clock.judged([first])
        refused("is judged", "judge_kept", trials=[first])
        refused("there is no set 2", "place", trial=third, set=2)
        clock.ask("end")
        refused("`begin` comes first", "ahead", draws=[])


@pytest.fixture
def worker():
    made = program.Worker(devices.of("cpu"), None)
    yield made
    made.arena.close()


def ask(worker, do, **fields):
    return worker.handle({"do": do, **fields})


def test_only_as_many_are_drawn_ahead_as_there_is_memory_for(worker, monkeypatch):
    task = make_task(SOFTMAX)
    ask(worker, "begin", task=task, seed="1")
    draws = [{"trial": trial, "quick": trial != 1} for trial in range(1, 9)]
    worker._task(program.Fields(task).task()).limits = None
    (chosen,) = worker._sets.sets
    # One image, one copy, eager's output and, but for the quick ones, the expected one.
    quick = chosen.layout.tail + chosen.layout.size + 64 * 1000 * 4
    needed = 3 * quick + 64 * 1000 * 8
    for room, drawn in ((needed, 3), (needed - 1, 2), (quick - 1, 0)):
        ask(worker, "begin", task=task, seed="1")
        monkeypatch.setattr(worker.device, "ahead_bytes", lambda room=room: room)
        assert ask(worker, "ahead", draws=draws)["drawn"] == drawn
    # The others are drawn as ever.
    ask(worker, "draw", set=0, trial=3, quick=True)


def test_short_of_memory_none_of_a_request_is_drawn_and_it_can_be_asked_again(worker, monkeypatch):
    task = make_task(SOFTMAX)
    ask(worker, "begin", task=task, seed="1")
    held = worker._sets.task
    draw, calls = held.draw, []

    def short(seed):
        calls.append(seed)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return draw(seed)

    monkeypatch.setattr(held, "draw", short)
    draws = [{"trial": trial} for trial in range(3)]
    with pytest.raises(program.Refusal) as caught:
        ask(worker, "ahead", draws=draws)
    assert caught.value.kind == "memory" and not worker._ahead._runs
    room = worker._ahead._left
    assert ask(worker, "ahead", draws=draws)["drawn"] == 3
    assert worker._ahead._left < room
    del worker._ahead._runs
    assert ask(worker, "begin", task=task, seed="1") and worker._ahead is None


def test_baselines_run_with_the_inputs_and_weights_of_the_run_in_the_set(worker):
    begun = ask(worker, "begin", task=make_task(LINEAR), seed="1", sets=2)
    memory = open_arena(begun["arena"])
    ask(worker, "prepare", which="eager")
    ask(worker, "ahead", draws=[{"trial": trial} for trial in range(3)])
    task, kept, seen = worker._sets.task, None, []
    forward = task.forward

    def watched(values, model=None):
        seen.append(
            [values[0].clone(), task.model.layer.weight.detach().clone(), task.model.layer.bias.detach().clone()]
        )
        return forward(values, model)

    task.forward = watched
    for trial in range(3):
        number = trial % 2
        ask(worker, "place", trial=trial, set=number, keep=kept)
        ask(worker, "time", which="eager", set=number)
        places = begun["sets"][number]["arguments"][:3]
        for tensor, (offset, size) in zip(seen.pop(), places, strict=True):
            assert torch.equal(tensor.view(-1), memory[offset : offset + size].view(torch.float32))
        assert not seen
        kept = trial


def test_weights_that_are_recalled_are_those_that_were_drawn(worker):
    code = model(
        "x: return self.norm(self.layer(x) * self.scale) + self.shift",
        "[torch.randn(32, 8, 6)]",
        "self.layer = nn.Linear(6, 6); self.norm = nn.BatchNorm1d(8)"
        "; self.register_buffer('scale', torch.rand(6) + 1); self.register_buffer('shift', torch.tensor(2.5))",
    )
    task = make_task(code, protocol="kernelbench")
    ask(worker, "begin", task=task, seed="1", sets=2)
    held = worker._sets.task
    ask(worker, "draw", set=0, trial=1)
    state = [tensor.clone() for _, tensor in held.state]
    own = [buffer.clone() for buffer in held.model.buffers()]
    ask(worker, "draw", set=1, trial=2)
    assert not all(torch.equal(one, other) for one, (_, other) in zip(state, held.state, strict=True))
    worker._sets[0].use_weights()
    assert all(torch.equal(one, other) for one, (_, other) in zip(state, held.state, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(own, held.model.buffers(), strict=True))


def test_the_arena_is_the_only_memory_that_is_shared(worker):
    ask(worker, "begin", task=make_task(SOFTMAX), seed="1")
    ask(worker, "ahead", draws=[{"trial": 1}])
    (chosen,) = worker._sets.sets
    run = worker._ahead._runs[1]
    block = chosen.memory.untyped_storage().data_ptr()
    for tensor in (run.image, run._copy, *run.values):
        assert tensor.untyped_storage().data_ptr() != block
    assert isinstance(worker.arena, arena.Arena)
