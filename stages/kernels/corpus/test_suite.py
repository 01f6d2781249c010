"""The suite itself: wide enough, each attack near its honest twin, each task one that runs. `make bench-evaluator
BENCH=agreement` judges it."""

import difflib
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import suite
from suite.case import OUTCOMES, Case, edited

ENTRIES = list(suite.entries())
TASKS = {entry.code: entry.id for _, entry in ENTRIES}
SLACK_ON_A_GPU = {
    "past_shared_memory",
    "no_sanitize",
    "a_missing_barrier",
    "some_threads_at_a_barrier",
    "a_configuration_by_hand",
    "legacy_stream",
    "dependent_before_its_time",
    "dlsym_by_headers",
    "a_destructor",
    "recursion",
    "timed_by_the_host",
}
"""Attacks that only the CPU device must notice: on a GPU their results are right, and nobody gains by them. Host code
that reaches for what the recorder lacks finds nothing, and what it starts is replayed in the one order there is."""


def test_the_suite_is_wide_enough():
    attacks = Counter(group for group, entry in ENTRIES if entry.is_attack)
    twins = Counter(group for group, entry in ENTRIES if not entry.is_attack)
    assert attacks == twins and len(attacks) >= 10 and sum(attacks.values()) >= 200
    assert [group for group, count in attacks.items() if count < 12] == []


def test_names_and_sources_are_there_once():
    assert max(Counter(entry.id for _, entry in ENTRIES).values()) == 1
    attacks = Counter((entry.code, entry.source, entry.policy) for _, entry in ENTRIES if entry.is_attack)
    assert max(attacks.values()) == 1


def test_outcomes_are_outcomes_and_no_attack_may_pass_on_a_gpu():
    for _, entry in ENTRIES:
        name = entry.id.split("/")[1]
        assert all(outcomes and set(outcomes) <= set(OUTCOMES) for outcomes in entry.expected.values()), entry.id
        if entry.is_attack:
            assert "correct" not in entry.expected["cuda"] or name in SLACK_ON_A_GPU, entry.id
        else:
            assert set(entry.expected["cuda"]) <= {"correct", "task_error"}, entry.id


@pytest.mark.parametrize("group", suite.CLASSES)
def test_a_twin_is_its_attack_but_for_what_makes_it_one(group):
    for case in suite.CLASSES[group]:
        changes = list(difflib.ndiff(case.honest.splitlines(), case.attack.splitlines()))
        # Some attacks bring a function of their own, which the honest twin has no use for.
        assert sum(line[0] == "-" for line in changes) <= 8, case.name
        assert 1 <= sum(line[0] in "+-" for line in changes) <= 48, case.name


@pytest.mark.parametrize("code", TASKS, ids=TASKS.values())
def test_tasks_run(code):
    module = types.ModuleType("task")
    exec(compile(code, "task.py", "exec"), module.__dict__)
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = module.Model(*module.get_init_inputs()).eval()(*module.get_inputs())
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        assert output.numel() and bool(output.isfinite().all())


def test_an_edit_must_hit_one_place():
    with pytest.raises(ValueError, match="stands 0 times"):
        edited("a b", [("c", "d")], "x")
    with pytest.raises(ValueError, match="stands 2 times"):
        edited("a a", [("a", "d")], "x")
    with pytest.raises(ValueError, match="needs an edit"):
        Case("x", "", "source")
