"""The corpus itself: every file is listed, every task runs at its small sizes, and no lazy answer passes."""

import difflib
import json
import re
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

CORPUS = Path(__file__).parent
LISTED = json.loads((CORPUS / "corpus.json").read_text())
TASKS = {task["name"]: task for task in LISTED["tasks"]}
NASTY = {candidate["name"]: candidate for candidate in LISTED["nasty"]}

DEVICES = ("cpu", "cuda")
OUTCOMES = set(
    "correct compile_error wrong unwritten nonfinite input_changed out_of_bounds race misaligned crash deadlock "
    "timeout launch_error unsupported task_error".split()
)
# Mistakes, and how many twins must make them.
MISTAKES = {
    "off_by_one": 3,
    "missing_barrier": 3,
    "missing_tail": 3,
    "race": 3,
    "wrong_axis": 3,
    "partial_output": 3,
    "out_of_bounds_write": 1,
    "uninitialised_accumulator": 1,
}
# At the loosest policy's tolerance.
TOLERANCE = 1e-2

every_task = pytest.mark.parametrize("name", TASKS)


def source(folder, name):
    return (CORPUS / folder / f"{name}.cu").read_text()


def load(name, constants):
    text = (CORPUS / "tasks" / f"{name}.py").read_text()
    for constant, value in constants.items():
        text, replaced = re.subn(rf"(?m)^{constant} = .*$", f"{constant} = {value!r}", text)
        assert replaced == 1, f"{name} has no constant {constant}"
    module = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def model_of(module, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return module.Model(*module.get_init_inputs()).eval()


def draw(module, seed, device="cpu"):
    torch.manual_seed(seed)
    with torch.device(device):
        return module.get_inputs()


def small(name, seed):
    """The model at its small sizes, and a draw of inputs."""
    module = load(name, TASKS[name]["small"])
    return model_of(module), draw(module, seed)


def forward(model, inputs):
    with torch.no_grad():
        return model(*inputs)


def passes(got, expected):
    """Whether the loosest policy lets an answer pass; integers are compared exactly."""
    if not expected.is_floating_point():
        return torch.equal(got.to(expected.dtype), expected)
    return torch.allclose(got.float(), expected.float(), rtol=TOLERANCE, atol=TOLERANCE)


def names_in(folder, suffix):
    return sorted(path.name.removesuffix(suffix) for path in (CORPUS / folder).iterdir() if path.name.endswith(suffix))


def changed_lines(before, after):
    changes = difflib.ndiff(before.splitlines(), after.splitlines())
    return Counter(line[0] for line in changes if line[0] in "+-")


@pytest.mark.parametrize(
    ("folder", "suffix", "listed"),
    [("tasks", ".py", TASKS), ("right", ".cu", TASKS), ("wrong", ".cu", TASKS), ("nasty", ".cu", NASTY)],
)
def test_the_list_names_the_files_that_exist(folder, suffix, listed):
    assert names_in(folder, suffix) == sorted(listed)


def test_names_are_listed_once():
    assert (len(TASKS), len(NASTY)) == (len(LISTED["tasks"]), len(LISTED["nasty"]))


def test_every_mistake_is_made_often_enough():
    made = Counter(task["wrong"]["mistake"] for task in LISTED["tasks"])
    assert set(made) == set(MISTAKES)
    assert [mistake for mistake, least in MISTAKES.items() if made[mistake] < least] == []


def test_outcomes_are_outcomes():
    expected = [entry[device] for entry in LISTED["nasty"] for device in DEVICES]
    expected += [task["wrong"][device] for task in LISTED["tasks"] for device in DEVICES]
    assert all(outcomes and set(outcomes) <= OUTCOMES for outcomes in expected)


def test_no_wrong_twin_may_pass():
    assert not any("correct" in task["wrong"][device] for task in LISTED["tasks"] for device in DEVICES)


def test_nasty_candidates_belong_to_a_task():
    assert {candidate["task"] for candidate in LISTED["nasty"]} <= set(TASKS)


def test_formats_are_what_the_sources_declare():
    listed = [("right", task) for task in LISTED["tasks"]] + [("wrong", task) for task in LISTED["tasks"]]
    listed += [("nasty", candidate) for candidate in LISTED["nasty"]]
    for folder, entry in listed:
        hosted = "cudaError_t launch(" in source(folder, entry["name"])
        assert entry["format"] == ("launch" if hosted else "kernel"), entry["name"]


@every_task
def test_a_wrong_twin_is_its_honest_twin_but_for_one_mistake(name):
    changed = changed_lines(source("right", name), source("wrong", name))
    assert 1 <= max(changed["+"], changed["-"]) <= 6


@every_task
def test_runs_at_small_sizes(name):
    model, inputs = small(name, 1)
    elements = sum(value.numel() for value in inputs if isinstance(value, torch.Tensor))
    out = forward(model, inputs)
    assert 3_000 <= elements <= 200_000
    assert torch.isfinite(out.float()).all()


@every_task
def test_large_sizes_are_large(name):
    module = load(name, {})
    inputs = draw(module, 1, device="meta")
    moved = [value for value in inputs if isinstance(value, torch.Tensor)] + [forward(model_of(module, "meta"), inputs)]
    moved_bytes = sum(tensor.numel() * tensor.element_size() for tensor in moved)
    # A product is large by its arithmetic; everything else moves for 20 to 100 microseconds on an H200.
    least = 4e6 if name in ("matmul", "linear_relu") else 100e6
    assert least <= moved_bytes <= 400e6


@every_task
def test_no_size_suits_a_block(name):
    for constants in ({}, TASKS[name]["small"]):
        out = forward(model_of(load(name, constants), "meta"), draw(load(name, constants), 1, "meta"))
        assert out.numel() % 32 != 0 and out.shape[-1:].numel() % 4 != 0


@every_task
def test_same_inputs_same_outputs(name):
    assert torch.equal(forward(*small(name, 1)), forward(*small(name, 1)))


@every_task
@pytest.mark.parametrize("seed", range(3))
def test_lazy_answers_do_not_pass(name, seed):
    expected = forward(*small(name, seed))
    constant = expected.double().mean() if expected.dim() else forward(*small(name, seed + 100))
    lazy = {
        "zeros": torch.zeros_like(expected),
        "ones": torch.ones_like(expected),
        "constant": torch.full_like(expected, constant.item()),
        "stale": forward(*small(name, seed + 1)),
    }
    assert [answer for answer, got in lazy.items() if passes(got, expected)] == []


@every_task
def test_every_tensor_counts(name):
    model, inputs = small(name, 1)
    expected = forward(model, inputs)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)] + list(model.parameters())
    tensors += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for tensor in tensors:
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(kept.flip(0) * 2 + 1)
            assert not passes(forward(model, inputs), expected)
            tensor.copy_(kept)
