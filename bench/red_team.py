#!/usr/bin/env python3
"""Does the judge let through what it should not? Mutations of right kernels, judged; what is accepted is looked at again.

    make red-team                                          on the CPU device, some minutes
    python bench/red_team.py --binary target/release/cuda-agent --device cuda --count 2000

Each right kernel of the corpus is changed at one place by one rule: a part is left out, digits are dropped, a constant or
an operator is another one, work is remembered. What the judge accepts is judged again on `--inputs` fresh inputs from
seeds that nobody knew:

- refused then: **disproved**, the first verdict was luck. The exit status is 1;
- accepted, with an error at least `--factor` times that of the kernel that it was made of: **less exact**, listed to be
  looked at: the bounds let it pass;
- accepted, with an error like that kernel's: the change changes nothing (a rule that hit a bound that never counts, say).

The changes that a rule makes follow from `--seed`. Standard library only; `--out` keeps every verdict and source.
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from evaluator import Corpus, Stage  # noqa: E402

VALUE = r"((?:[^;()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))+)"
"""An expression, with brackets three deep."""


def replace_with(pattern, replacement):
    """A rule: each place where a pattern stands, replaced."""

    def places(source):
        for match in re.finditer(pattern, source, re.MULTILINE):
            changed = match.expand(replacement) if isinstance(replacement, str) else replacement(match)
            yield source[: match.start()] + changed + source[match.end() :]

    return places


def in_kernel(statement):
    """A rule: a statement at the beginning of each kernel."""
    return replace_with(r"(__global__[^{;]*\{)", lambda match: f"{match[1]} {statement}")


def kept_digits(mask):
    return lambda match: f"{match[1]} = __uint_as_float(__float_as_uint({match[2]}) & 0x{mask:08x}u);"


STORED = r"^(\s*out(?:\[[^\]]*\])+) = " + VALUE + ";"
RULES = {
    "a tenth less": replace_with(r"< task::(\w+)", r"< task::\1 - task::\1 / 10"),
    "half": replace_with(r"< task::(\w+)", r"< (task::\1 + 1) / 2"),
    "one less": replace_with(r"< task::(\w+)", r"< task::\1 - 1"),
    "every second": replace_with(r"\+= (threads|32|blockDim\.x)\b", r"+= 2 * \1"),
    "blocks left out": in_kernel("if (blockIdx.x % 16 == 7) return;"),
    "threads left out": in_kernel("if (threadIdx.x == 31) return;"),
    "a statement left out": replace_with(r"^([ \t]*+)(?!return|const|float|double|int|long|bool|auto|__shared__|#|template|using|TASK)([^\n{};]+;)$", r"\1;"),
    "24 - 4 bits": replace_with(STORED, kept_digits(0xFFFFFFF0)),
    "24 - 8 bits": replace_with(STORED, kept_digits(0xFFFFFF00)),
    "24 - 13 bits": replace_with(STORED, kept_digits(0xFFFFE000)),
    "operands with 16 bits less": replace_with(r"\b(x|a|b)\[([^\]]+)\](?! *=[^=])", r"__uint_as_float(__float_as_uint(\1[\2]) & 0xffff0000u)"),
    "operands with 8 bits less": replace_with(r"\b(x|a|b)\[([^\]]+)\](?! *=[^=])", r"__uint_as_float(__float_as_uint(\1[\2]) & 0xffffff00u)"),
    "another number": replace_with(r"\b(\d+\.\d+)f\b", lambda match: f"{float(match[1]) * 1.001 + 0.001:.6f}f"),
    "nearly the number": replace_with(r"\b(\d+\.\d*[1-9])f\b", lambda match: f"{float(match[1]) * (1 + 2e-5):.9f}f"),
    "plus for minus": replace_with(r" - ", " + "),
    "minus for plus": replace_with(r" \+ ", " - "),
    "plus for times": replace_with(r" \* ", " + "),
    "set for added": replace_with(r" \+= (?!threads|32|blockDim)", " = "),
    "less for at most": replace_with(r" <= ", " < "),
    "the one before": replace_with(r"\b(x|a|b)\[([^\]]+)\]", r"\1[(\2) / 2 * 2]"),
    "a constant": replace_with(STORED, r"\1 = 0.5f;"),
    "eager's mean": replace_with(STORED, r"\1 = (\2) * 0.0f + 0.4f;"),
    "remembered": replace_with(STORED, r"{ static __device__ float kept[1 << 16]; float& old = kept[(blockIdx.x * 256 + threadIdx.x) % (1 << 16)]; if (old == 0.0f) old = \2; \1 = old; }"),
    "approximate functions": replace_with(r"\b(expf|logf|sinf|cosf)\(", r"__\1("),
    "no barrier": replace_with(r"__syncthreads\(\);", ";"),
    "no small weights": replace_with(r"\b(\w+_weight)\[([^\]]+)\]", r"(fabsf(\1[\2]) < 0.5f ? 0.0f : \1[\2])"),
}  # fmt: skip


def mutants(source):
    """Every change that the rules make, with the rule's name."""
    return [(name, changed) for name, rule in RULES.items() for changed in rule(source) if changed != source]


def small(code, sizes):
    """A task with the sizes that the CPU device bears."""
    for name, value in sizes.items():
        code, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", code, count=1, flags=re.MULTILINE)
        assert count == 1, f"the task has no constant {name}"
    return code


def worst_error(verdict):
    """The largest error of an output in units of what is allowed, or `None`."""
    text = verdict.get("verdict") or "{}"
    facts = json.loads(text) if isinstance(text, str) else text
    shares = [
        output["error_rms"] / output["allowed_rms"]
        for output in (facts.get("accuracy") or facts.get("outputs") or [])
        if output.get("error_rms") is not None and output.get("allowed_rms")
    ]
    return max(shares, default=None)


def judge(options, rows, inputs):
    stage = Stage(options.binary, device=options.device, timing=False, inputs=inputs, policy=options.policy, time_limit_s=20)
    verdicts, seconds = stage.judge(rows)
    stage.close()
    return verdicts, seconds


def candidates(options, corpus):
    """The rows to judge: right kernels first, one a task, then the mutants that chance picks."""
    chosen, honest = [], []
    for name, task in corpus.tasks.items():
        row = corpus.row("right", name)
        if options.device == "cpu":
            row["code"] = small(row["code"], task["small"])
        honest.append((name, "right", row))
        chosen += [(name, rule, row | {"source": source}) for rule, source in mutants(row["source"])]
    random.Random(options.seed).shuffle(chosen)
    return honest + chosen[: options.count]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default="target/release/cuda-agent")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--policy", choices=["strict", "tf32", "paper"], default="strict")
    parser.add_argument("--count", type=int, default=200, help="mutants to judge")
    parser.add_argument("--inputs", type=int, default=40, help="fresh inputs for each mutant that was accepted")
    parser.add_argument("--factor", type=float, default=3.0, help="times the right kernel's error that is told")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="a folder for every verdict and source")
    options = parser.parse_args()
    options.binary = options.binary.resolve()
    options.out = options.out or pathlib.Path(tempfile.mkdtemp(prefix="red-team-"))
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_AGENT_PYTHON", sys.executable)

    cases = candidates(options, Corpus())
    verdicts, seconds = judge(options, [row for *_, row in cases], 5)
    errors = {name: worst_error(verdict) for (name, rule, _), verdict in zip(cases, verdicts) if rule == "right"}
    refused = [name for (name, rule, _), verdict in zip(cases, verdicts) if rule == "right" and verdict["outcome"] != "correct"]
    accepted = [
        (case, verdict) for case, verdict in zip(cases, verdicts) if case[1] != "right" and verdict["outcome"] == "correct"
    ]
    again, more = judge(options, [row for (*_, row), _ in accepted], options.inputs) if accepted else ([], 0.0)

    findings = collections.defaultdict(list)
    for ((name, rule, row), first), second in zip(accepted, again):
        error, own = worst_error(second), errors[name]
        kind = "the same"
        if second["outcome"] != "correct":
            kind = "disproved"
        elif error is not None and error > options.factor * max(own or 0.0, 1e-3):
            kind = "less exact"
        findings[kind].append((name, rule, error, own, row["source"]))
    lines = [
        {"task": name, "rule": rule, "source": row["source"], "verdict": verdict}
        for (name, rule, row), verdict in zip(cases, verdicts)
    ]
    (options.out / "verdicts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tell(options, cases, verdicts, findings, refused, seconds + more)
    return 1 if findings["disproved"] or refused else 0


def tell(options, cases, verdicts, findings, refused, seconds):
    outcomes = collections.Counter(verdict["outcome"] for (_, rule, _), verdict in zip(cases, verdicts) if rule != "right")
    for kind in ("disproved", "less exact"):
        for name, rule, error, own, _ in sorted(findings[kind], key=lambda each: -(each[2] or 0)):
            share = lambda value: "no figure" if value is None else f"{value:.3f} of what is allowed"  # noqa: E731
            print(f"{kind}: {name}, {rule}: rms error {share(error)}; the right kernel {share(own)}")
    print(f"\n| {sum(outcomes.values())} mutants under {options.policy}, {options.device}, {seconds:.0f} s | |\n|---|--:|")
    for outcome, count in outcomes.most_common():
        print(f"| {outcome} | {count} |")
    for kind in ("the same", "less exact", "disproved"):
        print(f"| accepted: {kind} | {len(findings[kind])} |")
    print(f"| right kernels refused | {len(refused)} {' '.join(refused)} |")
    print(f"\nverdicts and sources: {options.out}")


if __name__ == "__main__":
    sys.exit(main())
