"""Tests of the quick look at timed results: it says of what is right what the whole judgement says, and lets nothing
else pass."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]

from reference_client import (
    Reference,
    keep_the_last,
    make_task,
    model,
    softmax,
    spoil_one,
    write_beside,
    write_input,
)

SOFTMAX = model("x: return torch.softmax(x, -1)", "[torch.randn(64, 1000)]")
ARGMAX = model("x: return torch.argmax(x, 1)", "[torch.randn(50, 30)]")
LOGARITHM = model("x: return torch.log(x)", "[torch.randn(500)]")


TIMED = 1 << 20
"""Where the trials of timed runs begin; one of the first five is another kind of draw."""


@pytest.fixture(scope="module")
def reference():
    process = Reference()
    yield process
    process.close()


def begun(connection, code, policy):
    """A set whose task has been judged as a whole before."""
    arguments = connection.begin(make_task(code, policy))[0]
    arguments.draw()
    return arguments


def draw_quickly(connection, trial):
    connection.ask("draw", set=0, trial=trial, pattern=trial % 2, quick=True)


@pytest.mark.parametrize("policy", ["strict", "tf32", "paper"])
def test_what_is_right_passes(reference, policy):
    with reference.connect() as connection:
        arguments = begun(connection, SOFTMAX, policy)
        for trial in range(TIMED, TIMED + 4):
            draw_quickly(connection, trial)
            softmax(arguments)
            facts = arguments.judge()
            assert [output["pass"] for output in facts["outputs"]] == [True]
            assert facts["outputs"][0]["error_rms"] is None, "a quick look does not know it"


@pytest.mark.parametrize("policy", ["strict", "paper"])
@pytest.mark.parametrize("candidate", [spoil_one, keep_the_last, write_input, write_beside])
def test_what_is_wrong_is_told_as_the_whole_judgement_tells_it(reference, policy, candidate):
    with reference.connect() as connection:
        arguments = begun(connection, SOFTMAX, policy)
        draw_quickly(connection, TIMED + 3)
        candidate(arguments)
        quick = arguments.judge()
        arguments.draw(TIMED + 3, 1)
        candidate(arguments)
        whole = arguments.judge()
        assert quick == whole
        clean = all(output["pass"] for output in whole["outputs"])
        assert not (clean and not whole["inputs_changed"] and not whole["red_zones"])


def test_integers_must_be_equal(reference):
    with reference.connect() as connection:
        arguments = begun(connection, ARGMAX, "strict")
        for error, passes in ((0, True), (1, False)):
            draw_quickly(connection, TIMED + error)
            arguments["out"].copy_(arguments["x"].argmax(1) + error)
            assert arguments.judge()["outputs"][0]["pass"] is passes


def test_where_eager_is_not_finite_the_whole_judgement_is_taken(reference):
    with reference.connect() as connection:
        arguments = begun(connection, LOGARITHM, "strict")
        draw_quickly(connection, TIMED)
        arguments["out"].copy_(arguments["x"].log())
        output = arguments.judge()["outputs"][0]
        assert output["pass"] and output["error_rms"] is not None
