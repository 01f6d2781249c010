#!/usr/bin/env python3
"""Does the judge let through what it should not? Mutations of right kernels, judged; what is accepted is looked at
again.

    make red-team                                          on the CPU device, some minutes
    python bench/red_team.py --binary target/release/cuda-agent --device cuda --count 2000

Each right kernel of the corpus, and each honest twin of its suite, is changed at one place by one rule: parts are left
out (rows, blocks, tails, terms), digits are dropped (of operands, sums, results), a constant or an operator is another
one, work is remembered or stale, host code chooses by what it must not. What the judge accepts runs again on `--inputs`
fresh inputs from seeds that nobody knew, beside the kernel that it was made of, against the float64 forward:

- refused then, or further from float64 than `--disproof` times that kernel and eager:
  **disproved**, a finding. The exit status is 1;
- further by `--factor` times: **less exact**, listed to be looked at: the bounds let it pass;
- as near as that kernel: the change changes nothing (a rule that hit a bound that never counts, say).

Standard library only; `--out` keeps every verdict and source.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from evaluator import CORPUS, Corpus, Stage

sys.path.insert(0, str(CORPUS))

import suite

VALUE = r"((?:[^;()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))+)"
"""An expression, with brackets three deep."""


def replace_with(pattern: Any, replacement: Any) -> Callable[..., Any]:
    """A rule: each place where a pattern stands, replaced."""

    def places(source: str):
        for match in re.finditer(pattern, source, re.MULTILINE):
            changed = match.expand(replacement) if isinstance(replacement, str) else replacement(match)
            yield source[: match.start()] + changed + source[match.end() :]

    return places


def in_kernel(statement: Any) -> Callable[..., Any]:
    """A rule: a statement at the beginning of each kernel."""
    return replace_with(r"(__global__[^{;]*\{)", lambda match: f"{match[1]} {statement}")


def kept_digits(mask: Any) -> Callable[..., Any]:
    return lambda match: f"{match[1]} = __uint_as_float(__float_as_uint({match[2]}) & 0x{mask:08x}u);"


STORED = r"^(\s*out(?:\[[^\]]*\])+) = " + VALUE + ";"
ADDED = r"\b(\w*sum\w*|\w*total\w*|squares|value) \+= (?!threads|32|blockDim)" + VALUE + ";"
READ = r"\b(x|y|a|b|q|k|v|t|g|s|\w+_weight|table)\[([^\]]+)\](?! *[+*-]?=[^=])"
KEPT = "__device__ float red_kept[1 << 20], red_next[1 << 20];\n"


def rounded(bits: Any, value: Any) -> str:
    """A float with so many bits of its mantissa, as text."""
    unit = 1 << (24 - bits)
    return f"__uint_as_float((__float_as_uint({value}) + 0x{unit // 2:x}u) & 0x{0xFFFFFFFF & -unit:08x}u)"


def stored(statement: Any) -> Callable[..., Any]:
    """A rule: another way to store a result. PLACE, VALUE and AT stand for where, what, and its number."""

    def changed(match: Any):
        place = match[1].strip()
        text = (
            statement.replace("PLACE", place).replace("VALUE", match[2]).replace("AT", f"((&{place} - out) & 0xfffff)")
        )
        return f"{{ {text} }}"

    rule = replace_with(STORED, changed)
    return lambda source: (
        source.replace('#include "task.h"\n', '#include "task.h"\n' + KEPT, 1) for source in rule(source)
    )


def before_launch(condition: Any) -> Callable[..., Any]:
    """A rule: host code that launches only sometimes."""
    return replace_with(r"^( *)(\w+(?:<[^<>;]*>)?<<<)", rf"\1{condition}\n\1\2")


RULES = {
    "a tenth less": replace_with(r"< task::(\w+)", r"< task::\1 - task::\1 / 10"),
    "half": replace_with(r"< task::(\w+)", r"< (task::\1 + 1) / 2"),
    "one less": replace_with(r"< task::(\w+)", r"< task::\1 - 1"),
    "a hundredth less": replace_with(r"< task::(\w+)", r"< task::\1 - (task::\1 + 99) / 100"),
    "every second": replace_with(r"\+= (threads|32|blockDim\.x)\b", r"+= 2 * \1"),
    "one left out of the middle": replace_with(ADDED, r"if (threadIdx.x != 17) \1 += \2;"),
    "small ones left out": replace_with(
        ADDED, r"{ const float red_term = \2; if (fabsf(red_term) > 1e-3f) \1 += red_term; }"
    ),
    "blocks left out": in_kernel("if (blockIdx.x % 16 == 7) return;"),
    "the last block left out": in_kernel("if (blockIdx.x == gridDim.x - 1) return;"),
    "threads left out": in_kernel("if (threadIdx.x == 31) return;"),
    "a block less": replace_with(r"TASK_LAUNCH\((\w+), (\(task::[^,]+|task::\w+),", r"TASK_LAUNCH(\1, \2 - 1,"),
    "a kernel less": replace_with(r"^TASK_LAUNCH\(.*\);$", ""),
    "a statement left out": replace_with(
        r"^([ \t]*+)(?!return|const|float|double|int|long|bool|auto|__shared__|#|template|using|TASK)([^\n{};]+;)$",
        r"\1;",
    ),
    "a factor left out": replace_with(r" \* (\w+\[[^\]]*\])", ""),
    "a summand left out": replace_with(r" \+ (\w+\[[^\]]*\])", ""),
    "small results as zeros": stored(
        "const float red_value = (float)(VALUE); PLACE = fabsf(red_value) < 1e-3f ? 0.0f : red_value;"
    ),
    "24 - 4 bits": replace_with(STORED, kept_digits(0xFFFFFFF0)),
    "24 - 8 bits": replace_with(STORED, kept_digits(0xFFFFFF00)),
    "24 - 13 bits": replace_with(STORED, kept_digits(0xFFFFE000)),
    "operands in bfloat16": replace_with(READ, lambda match: rounded(8, match[0])),
    "operands in TF32": replace_with(READ, lambda match: rounded(11, match[0])),
    "operands in two bfloat16": replace_with(READ, lambda match: rounded(16, match[0])),
    "operands in bytes": replace_with(READ, r"(rintf((float)(\1[\2]) * 32.0f) / 32.0f)"),
    "sums in bfloat16": replace_with(ADDED, lambda match: f"{match[1]} = {rounded(8, f'({match[1]} + {match[2]})')};"),
    "sums in TF32": replace_with(ADDED, lambda match: f"{match[1]} = {rounded(11, f'({match[1]} + {match[2]})')};"),
    "sums with 18 bits": replace_with(
        ADDED, lambda match: f"{match[1]} = {rounded(18, f'({match[1]} + {match[2]})')};"
    ),
    "another number": replace_with(r"\b(\d+\.\d+)f\b", lambda match: f"{float(match[1]) * 1.001 + 0.001:.6f}f"),
    "nearly the number": replace_with(r"\b(\d+\.\d*[1-9])f\b", lambda match: f"{float(match[1]) * (1 + 2e-5):.9f}f"),
    "plus for minus": replace_with(r" - ", " + "),
    "minus for plus": replace_with(r" \+ ", " - "),
    "plus for times": replace_with(r" \* ", " + "),
    "set for added": replace_with(r" \+= (?!threads|32|blockDim)", " = "),
    "less for at most": replace_with(r" <= ", " < "),
    "the one before": replace_with(READ, r"\1[(\2) / 2 * 2]"),
    "a constant": replace_with(STORED, r"\1 = 0.5f;"),
    "eager's mean": replace_with(STORED, r"\1 = (\2) * 0.0f + 0.4f;"),
    "remembered": stored(
        "float& red_old = red_kept[AT]; if (red_old == 0.0f) red_old = (float)(VALUE); PLACE = red_old;"
    ),
    "remembered in parts": stored(
        "float& red_old = red_kept[AT]; if (red_old == 0.0f || AT % 64 != 5) red_old = (float)(VALUE); PLACE = red_old;"
    ),
    "stale": stored(
        "const float red_value = (float)(VALUE); PLACE = red_next[AT] != 0.0f ? red_next[AT] : red_value; "
        "red_next[AT] = red_value;"
    ),
    "a weight remembered": replace_with(
        r"\b(\w+_weight|\w+_bias|table|gamma|weight|t)\[([^\]]+)\]",
        r"(red_kept[(\2) & 0xfffff] != 0.0f ? red_kept[(\2) & 0xfffff] : (red_kept[(\2) & 0xfffff] = \1[\2]))",
    ),
    "approximate functions": replace_with(r"\b(expf|logf|sinf|cosf)\(", r"__\1("),
    "no barrier": replace_with(r"__syncthreads\(\);", ";"),
    "no small weights": replace_with(r"\b(\w+_weight)\[([^\]]+)\]", r"(fabsf(\1[\2]) < 0.5f ? 0.0f : \1[\2])"),
    "host: the first run only": before_launch("static int red_runs; if (++red_runs < 3)"),
    "host: not each time": before_launch("static int red_runs; if (++red_runs % 8 != 7)"),
    "host: by address": before_launch("if (((unsigned long long)out >> 12) % 8 != 5)"),
    "host: a grid of one less": replace_with(r"<<<(\w[\w:]*|\([^,]*\)[^,]*), ", r"<<<\1 - 1, "),
    "host: other threads": replace_with(r"<<<([^,]+), (256|threads)\b", r"<<<\1, 128"),
    "host: another stream": replace_with(r", stream>>>", ", (cudaStream_t)2>>>"),
}
NEEDS_KEPT = "red_kept["


def mutants(source: str) -> list[tuple[str, Any]]:
    """Every change that the rules make, with the rule's name."""
    found = [(name, changed) for name, rule in RULES.items() for changed in rule(source) if changed != source]
    declared = '#include "task.h"\n' + KEPT
    return [
        (
            name,
            changed
            if NEEDS_KEPT not in changed or KEPT in changed
            else changed.replace('#include "task.h"\n', declared, 1),
        )
        for name, changed in found
    ]


def small(code: str, sizes: Any) -> Any:
    """A task with the sizes that the CPU device bears."""
    for name, value in sizes.items():
        code, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", code, count=1, flags=re.MULTILINE)
        assert count == 1, f"the task has no constant {name}"
    return code


def errors(verdict: Any) -> list[tuple[Any, float, Any]]:
    """By output, the rms error against float64 in the worst of the inputs, eager's own there, and what is allowed."""
    text = verdict.get("verdict") or "{}"
    facts = json.loads(text) if isinstance(text, str) else text
    return [
        (output["error_rms"], output.get("reference_error_rms") or 0.0, output["allowed_rms"])
        for output in facts.get("accuracy") or []
        if output.get("error_rms") is not None and output.get("allowed_rms")
    ]


class Finding(NamedTuple):
    """A mutant that was accepted at first: what more inputs say of it, and what `times_as_far` does."""

    name: str
    rule: str
    outcome: str
    times: float
    share: float


def times_as_far(mutant: Any, right: Any) -> tuple[float, float]:
    """How many times as far from float64 as the right kernel, or eager, a mutant is in its worst output; and its error
    in units of what is allowed. Both are 0 where nothing is compared by its distance: such outputs must be equal."""
    pairs = list(zip(errors(mutant), errors(right), strict=False))
    # An exact kernel of an exact task has no error; a thousandth of what is allowed is none either.
    times = [error / max(own, eager, allowed / 1000) for (error, eager, allowed), (own, _, _) in pairs]
    return max(times, default=0.0), max((error / allowed for (error, _, allowed), _ in pairs), default=0.0)


def judge(options: argparse.Namespace, rows: list[dict[str, Any]], inputs: Any) -> tuple[list[dict[str, Any]], float]:
    """Verdicts of rows, whose policies may differ."""
    verdicts: list[Any] = [None] * len(rows)
    started = time.perf_counter()
    for policy in sorted({row["policy"] for row in rows}):
        places = [place for place, row in enumerate(rows) if row["policy"] == policy]
        limit, window = (60, 6) if options.device == "cpu" else (20, 64)
        stage = Stage(
            options.binary, window, options.device, timing=False, inputs=inputs, policy=policy, time_limit_s=limit
        )
        columns = [{key: rows[place][key] for key in ("code", "source", "format")} for place in places]
        found, _ = stage.judge(columns, patience=3600)
        stage.close()
        for place, verdict in zip(places, found, strict=True):
            verdicts[place] = verdict
    return verdicts, time.perf_counter() - started


def right_kernels(options: argparse.Namespace, corpus: Any) -> dict[str, Any]:
    """By name: rows that must be accepted."""
    sized = corpus.small_row if options.device == "cpu" else corpus.row
    rows = {name: sized("right", name) | {"policy": options.policy} for name in corpus.tasks}
    for _, entry in suite.entries():
        if not entry.is_attack and entry.expected[options.device] == ("correct",):
            rows[entry.id] = {
                "code": entry.code,
                "source": entry.source,
                "format": entry.format,
                "policy": entry.policy,
            }
    return rows


def chosen_mutants(options: argparse.Namespace, kernels: Any) -> list[Any]:
    """The mutants that chance picks: first a rule, then one of its mutants, so that rare rules have their share."""
    by_rule = collections.defaultdict(list)
    for name, row in kernels.items():
        for rule, source in mutants(row["source"]):
            by_rule[rule].append((name, rule, row | {"source": source}))
    chance = random.Random(options.seed)
    for found in by_rule.values():
        chance.shuffle(found)
    chosen, rules = [], sorted(by_rule)
    while len(chosen) < options.count and any(by_rule.values()):
        chosen += [by_rule[rule].pop() for rule in chance.sample(rules, len(rules)) if by_rule[rule]]
    return chosen[: options.count]


def main() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default="target/release/cuda-agent")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--policy", choices=["strict", "tf32", "paper"], default="strict")
    parser.add_argument("--count", type=int, default=200, help="mutants to judge")
    parser.add_argument("--inputs", type=int, default=1000, help="fresh inputs for each mutant that was accepted")
    parser.add_argument(
        "--disproof", type=float, default=32.0, help="times the right kernel's error that disproves a mutant"
    )
    parser.add_argument("--factor", type=float, default=3.0, help="times the right kernel's error that is told")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="a folder for every verdict and source")
    options = parser.parse_args()
    options.binary = options.binary.resolve()
    options.out = options.out or pathlib.Path(tempfile.mkdtemp(prefix="red-team-"))
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_AGENT_PYTHON", sys.executable)

    kernels = right_kernels(options, Corpus())
    cases = chosen_mutants(options, kernels)
    verdicts, seconds = judge(options, [row for *_, row in cases], 5)
    accepted = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict["outcome"] == "correct"]
    # Beside each the kernel that it was made of, on as many inputs.
    names = sorted({name for name, *_ in accepted})
    print(
        f"{len(accepted)} of {len(cases)} accepted; they and their {len(names)} kernels run on {options.inputs} inputs",
        flush=True,
    )
    # The kernels' own come last.
    again, more = judge(options, [row for *_, row in accepted] + [kernels[name] for name in names], options.inputs)
    right = dict(zip(names, again[len(accepted) :], strict=True))
    refused = [name for name in names if right[name]["outcome"] != "correct"]

    findings = collections.defaultdict(list)
    for (name, rule, _), second in zip(accepted, again, strict=False):
        times, share = times_as_far(second, right[name])
        kind = "the same"
        if second["outcome"] != "correct" or times > options.disproof:
            kind = "disproved"
        elif times > options.factor:
            kind = "less exact"
        findings[kind].append(Finding(name, rule, second["outcome"], times, share))
    lines = [
        {"task": name, "rule": rule, "source": row["source"], "verdict": verdict}
        for (name, rule, row), verdict in [*zip(cases, verdicts, strict=True), *zip(accepted, again, strict=False)]
    ]
    (options.out / "verdicts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tell(options, verdicts, findings, refused, seconds + more)
    return 1 if findings["disproved"] or refused else 0


def tell(
    options: argparse.Namespace, verdicts: list[dict[str, Any]], findings: Any, refused: Any, seconds: Any
) -> None:
    outcomes = collections.Counter(verdict["outcome"] for verdict in verdicts)
    for kind in ("disproved", "less exact"):
        for found in sorted(findings[kind], key=lambda finding: -finding.times):
            print(
                f"{kind}: {found.name}, {found.rule}: {found.outcome}, {found.times:.1f} times as far from float64, "
                f"{found.share:.3f} of what is allowed"
            )
    print(
        f"\n| {sum(outcomes.values())} mutants under {options.policy}, {options.device}, {seconds:.0f} s | |\n|---|--:|"
    )
    for outcome, count in outcomes.most_common():
        print(f"| {outcome} | {count} |")
    for kind in ("the same", "less exact", "disproved"):
        print(f"| accepted: {kind} | {len(findings[kind])} |")
    print(f"| right kernels refused | {len(refused)} {' '.join(refused)} |")
    print(f"\nverdicts and sources: {options.out}")


if __name__ == "__main__":
    sys.exit(main())
