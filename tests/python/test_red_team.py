"""The hacker-fixer loop's own parts: its rules, what chance picks, and when a mutant is disproved."""

import json
import pathlib
import sys
import types

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path[:0] = [str(BENCH)]

import red_team

SOURCE = """\
#include "task.h"
extern "C" __global__ void run(TASK_PARAMETERS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0.0f;
    for (int c = 0; c < task::columns; ++c) sum += x[c] * fc_weight[c];
    out[i] = sum;
}
TASK_LAUNCH(run, task::rows, 256);
"""


def by_rule(source=SOURCE):
    found = {}
    for rule, changed in red_team.mutants(source):
        found.setdefault(rule, []).append(changed)
    return found


def test_rules_change_what_they_say():
    found = by_rule()
    assert "< task::columns - 1;" in found["one less"][0]
    assert "TASK_LAUNCH(run, task::rows - 1, 256);" in found["a block less"][0]
    assert "sum += x[c];" in found["a factor left out"][0]
    assert "if (threadIdx.x != 17) sum += x[c] * fc_weight[c];" in found["one left out of the middle"][0]
    assert [f"{red_team.rounded(8, 'x[c]')} * fc_weight" in each for each in found["operands in bfloat16"]] == [
        True,
        False,
    ]
    assert "PLACE" not in found["remembered"][0] and "red_kept[((&out[i] - out) & 0xfffff)]" in found["remembered"][0]
    using = [each for mutants in found.values() for each in mutants if "red_kept[(" in each or "red_next[(" in each]
    assert len(using) >= 3 and all(each.count(red_team.KEPT) == 1 for each in using)


def test_rules_of_host_code():
    found = by_rule(
        SOURCE.replace("TASK_LAUNCH(run, task::rows, 256);", "    run<<<task::rows, 256, 0, stream>>>(x, out);")
    )
    assert found["host: a grid of one less"] and "<<<task::rows - 1, 256" in found["host: a grid of one less"][0]
    assert "(cudaStream_t)2>>>" in found["host: another stream"][0]
    assert "if (++red_runs < 3)\n    run<<<" in found["host: the first run only"][0]


def test_roundings_keep_the_digits_they_say():
    assert red_team.rounded(8, "v") == "__uint_as_float((__float_as_uint(v) + 0x8000u) & 0xffff0000u)"
    assert red_team.rounded(11, "v") == "__uint_as_float((__float_as_uint(v) + 0x1000u) & 0xffffe000u)"


def verdict(*outputs):
    accuracy = [dict(zip(("error_rms", "reference_error_rms", "allowed_rms"), each, strict=True)) for each in outputs]
    return {"verdict": json.dumps({"accuracy": accuracy})}


def test_a_mutant_is_as_far_as_its_worst_output_beside_the_right_kernel_and_eager():
    right = verdict((1e-7, 1e-8, 1e-6), (1e-9, 1e-6, 1e-5))
    assert red_team.times_as_far(verdict((4e-7, 1e-8, 1e-6), (1e-9, 1e-6, 1e-5)), right)[0] == pytest.approx(4.0)
    assert red_team.times_as_far(verdict((1e-7, 1e-8, 1e-6), (8e-6, 1e-6, 1e-5)), right) == pytest.approx((8.0, 0.8))
    assert red_team.times_as_far(verdict(), verdict()) == (0.0, 0.0)
    exact = verdict((0.0, 0.0, 1e-6))
    assert red_team.times_as_far(verdict((1e-8, 0.0, 1e-6)), exact)[0] == pytest.approx(10.0)


def test_chance_takes_every_rule_in_turn_and_repeats_by_seed():
    options = types.SimpleNamespace(count=12, seed=3)
    kernels = {name: {"source": SOURCE.replace("run", name)} for name in ("one", "two")}
    first = [(name, rule) for name, rule, _ in red_team.chosen_mutants(options, kernels)]
    assert len(first) == len({rule for _, rule in first}) == 12
    assert first == [(name, rule) for name, rule, _ in red_team.chosen_mutants(options, kernels)]
    options.seed = 4
    assert first != [(name, rule) for name, rule, _ in red_team.chosen_mutants(options, kernels)]
