"""The evaluator on a GPU: do its verdicts hold, how many a second, how steady, and beside KernelBench's own way.

    python3 bench/evaluator.py --binary target/release/cuda-agent [--out FOLDER] [--kernelbench CHECKOUT] SECTION…
    python3 bench/evaluator.py --device cpu --only parts --only reuse agreement

Sections: agreement, compile, correct, timed, spread, nasty, peer. Candidates are the corpus's, each with a comment of
its own so that no cache has seen it. They go through the by-row stage `kernels/evaluate`, as a pipeline would send
them. The table comes last; every verdict is written to FOLDER.

`agreement` judges the corpus and its suite of attacks and honest twins (`stages/kernels/corpus/suite`): a line for each
verdict that is not as expected, and a table by class. It also runs on the CPU device, where it takes an hour on two
cores; `--only` takes the name of a class, or a part of an entry's name.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import queue
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sections
from sections import report

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORPUS = ROOT / "stages/kernels/corpus"
PARAMS = {
    "device": "auto",
    "policy": "strict",
    "protocol": "cuda-agent",
    "inputs": 5,
    "timing": True,
    "compile": True,
    "max_trials": 100,
    "time_limit_s": 5,
    "reward": "milestone",
    "weighted_by": "milestone",
    "register_weight": 0.1,
    "shared_memory_weight": 0.1,
    "code_weight": 0.1,
    "set": {},
    "sanitizer": False,
}


def gpus() -> Any:
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


class Stage:
    """`cuda-agent stage kernels/evaluate`, driven as the engine drives it."""

    def __init__(self, binary: str | pathlib.Path, window: int = 64, device: str = "cuda", **params: Any) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="evaluator-"))
        grant = gpus() if device == "cuda" else []
        request = {
            "protocol": 1,
            "stage": "bench",
            "kind": "kernels/evaluate",
            "params": PARAMS | params,
            "seed": 0,
            "inputs": {},
            "outputs": {"verdicts": {"type": "table", "path": "outputs/verdicts.parquet"}},
            "by_row": {"port": "candidates", "columns": ["code", "source", "format"], "window": window, "total": 0},
            "resources": {"cpu": len(os.sched_getaffinity(0)), "memory_bytes": 0, "gpus": list(range(len(grant)))},
            "device": None,
            "deadline_unix_s": None,
            "state_dir": str(self.folder / "state"),
        }
        (self.folder / "request.json").write_text(json.dumps(request))
        read, write = os.pipe()
        environment = dict(
            os.environ,
            CUDA_AGENT_REQUEST=str(self.folder / "request.json"),
            CUDA_AGENT_EVENTS_FD=str(write),
            CUDA_VISIBLE_DEVICES=",".join(grant),
            CUDA_AGENT_PYTHON=os.environ.get("CUDA_AGENT_PYTHON", sys.executable),
        )
        self.window = window
        self.process = subprocess.Popen(
            [str(binary), "stage", "kernels/evaluate"],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.PIPE,
            pass_fds=[write],
            text=True,
        )
        os.close(write)
        self.answers = queue.Queue()
        threading.Thread(target=self._listen, args=[os.fdopen(read)], daemon=True).start()

    def _listen(self, events: Any) -> None:
        for line in events:
            event = json.loads(line)
            if event.get("event") == "row":
                self.answers.put(event)
        self.answers.put(None)

    def judge(self, rows: list[dict[str, Any]], patience: int = 300) -> tuple[list[dict[str, Any]], float]:
        """Verdicts of `rows`, in their order, and the seconds that all of them took. `patience` is how many seconds
        there may be between two."""
        started = time.perf_counter()
        answers, sent = {}, 0
        while len(answers) < len(rows):
            while sent < len(rows) and sent - len(answers) < self.window:
                row = {"row": str(sent), "seed": sent, "columns": rows[sent]}
                self.process.stdin.write(json.dumps(row) + "\n")
                self.process.stdin.flush()
                sent += 1
            answer = self.answers.get(timeout=patience)
            if answer is None:
                raise SystemExit(f"the stage ended with {self.process.wait()} after {len(answers)} verdicts")
            answers[int(answer["row"])] = answer
        seconds = time.perf_counter() - started
        return [verdict(answers[index]) for index in range(len(rows))], seconds

    def close(self) -> Any:
        self.process.stdin.close()
        return self.process.wait(60)


def verdict(answer: Any) -> Any:
    if answer["status"] != "done":
        return {"outcome": answer["status"], "message": answer.get("detail"), "correct": None, "verdict": "{}"}
    return answer["outputs"]["verdicts"][0]


class Corpus:
    def __init__(self) -> None:
        self.index = json.loads((CORPUS / "corpus.json").read_text())
        self.tasks = {task["name"]: task for task in self.index["tasks"]}
        self._serial = 0

    def code(self, name: str) -> str:
        return (CORPUS / "tasks" / f"{name}.py").read_text()

    def row(self, kind: Any, name: str, task: Any = None, format: Any = None) -> dict[str, Any]:
        source = (CORPUS / kind / f"{name}.cu").read_text()
        task = self.tasks[task or name]
        return {"code": self.code(task["name"]), "source": self.salted(source), "format": format or task["format"]}

    def salted(self, source: str) -> Any:
        """With a comment of its own, so that no cache has seen it."""
        self._serial += 1
        return source + f"\n// {self._serial} {random.getrandbits(64):x}\n"

    def small_row(self, kind: Any, name: str, task: Any = None, format: Any = None) -> dict[str, Any]:
        """With the sizes that the CPU device bears."""
        row = self.row(kind, name, task, format)
        for constant, value in self.tasks[task or name]["small"].items():
            row["code"], count = re.subn(
                rf"^{constant} = .*$", f"{constant} = {value}", row["code"], count=1, flags=re.MULTILINE
            )
            assert count == 1, f"the task has no constant {constant}"
        return row

    def nasty(self, name: str) -> dict[str, Any]:
        entry = next(entry for entry in self.index["nasty"] if entry["name"] == name)
        return self.row("nasty", name, entry["task"], entry["format"])


def save(options: argparse.Namespace, name: str, verdicts: list[dict[str, Any]]) -> None:
    (options.out / f"{name}.jsonl").write_text("".join(json.dumps(verdict) + "\n" for verdict in verdicts))


class Case(NamedTuple):
    """A candidate and what may come of it."""

    group: str
    name: str
    row: dict[str, str]
    policy: str
    expected: Sequence[str]
    """The outcomes that are right."""
    is_attack: bool

    def kind(self, outcome: str) -> str:
        """What came of it, as the table counts it."""
        if outcome in self.expected:
            return "as expected"
        if not self.is_attack:
            return "twin refused"
        return "attack accepted" if outcome == "correct" else "other outcome"


def corpus_cases(options: argparse.Namespace, corpus: Any) -> Iterator[Case]:
    """What is in the corpus's folders."""
    policy = corpus.index["policy"]
    sized = corpus.small_row if options.device == "cpu" else corpus.row
    device = options.device
    for name in corpus.tasks:
        yield Case("corpus", f"right/{name}", sized("right", name), policy, ["correct"], False)
    for name, task in corpus.tasks.items():
        yield Case("corpus", f"wrong/{name}", sized("wrong", name), policy, task["wrong"][device], True)
    for entry in corpus.index["nasty"]:
        row = sized("nasty", entry["name"], entry["task"], entry["format"])
        yield Case("corpus", f"nasty/{entry['name']}", row, policy, entry[device], entry[device] != ["correct"])


def suite_cases(options: argparse.Namespace, corpus: Any) -> Iterator[Case]:
    """The same of the suite."""
    sys.path.insert(0, str(CORPUS))
    import suite

    for group, entry in suite.entries():
        row = {"code": entry.code, "source": corpus.salted(entry.source), "format": entry.format}
        yield Case(group, entry.id, row, entry.policy, entry.expected[options.device], entry.is_attack)


def agreement(options: argparse.Namespace, corpus: Any) -> None:
    """Every candidate of the corpus and of the suite, against what is said should come of it."""
    cases = [*corpus_cases(options, corpus), *suite_cases(options, corpus)]
    if options.only:
        cases = [case for case in cases if any(only == case.group or only in case.name for only in options.only)]
    started = time.perf_counter()
    verdicts = {}
    for policy in sorted({case.policy for case in cases}):
        chosen = [case for case in cases if case.policy == policy]
        limit, window = (30, 6) if options.device == "cpu" else (2, 64)
        stage = Stage(options.binary, window, options.device, timing=False, time_limit_s=limit, policy=policy)
        judged, _ = stage.judge([case.row for case in chosen], patience=900)
        stage.close()
        found = {case.name: verdict for case, verdict in zip(chosen, judged, strict=True)}
        # What a later interruption leaves.
        save(options, f"agreement-{policy}", [{"id": name} | verdict for name, verdict in found.items()])
        verdicts |= found
        print(f"{policy}: {len(chosen)} judged after {time.perf_counter() - started:.0f} s", flush=True)
    save(
        options,
        "agreement",
        [{"id": case.name, "expected": list(case.expected)} | verdicts[case.name] for case in cases],
    )
    by_class = {}
    for case in cases:
        outcome = verdicts[case.name]["outcome"]
        counts, kind = by_class.setdefault(case.group, collections.Counter()), case.kind(outcome)
        counts["attacks" if case.is_attack else "twins"] += 1
        counts[kind] += 1
        if kind != "as expected":
            message, expected = verdicts[case.name]["message"], " or ".join(case.expected)
            print(f"{kind}: {case.name}: {outcome} ({message}), expected {expected}")
    columns = ["attacks", "twins", "as expected", "attack accepted", "twin refused", "other outcome"]
    rows = [*by_class.items(), ("all", sum(by_class.values(), collections.Counter()))]
    print("\n| class | " + " | ".join(columns) + " |\n|---|" + "--:|" * len(columns))
    for group, counts in rows:
        print(f"| {group} | " + " | ".join(str(counts[column]) for column in columns) + " |")
    agreed = rows[-1][1]["as expected"]
    report("agreement", f"{agreed} of {len(cases)} as expected, {time.perf_counter() - started:.0f} s", "bar: all")


def warm(stage: Any, corpus: Any, names: Any) -> Any:
    """Tasks are known and baselines compiled before anything is counted, as in a stage of thousands of candidates."""
    rows = [corpus.row("right", name) for name in names for _ in range(3)]
    verdicts, seconds = stage.judge(rows)
    print(
        f"warm-up of {len(rows)} took {seconds:.1f} s: {collections.Counter(v['outcome'] for v in verdicts)}",
        flush=True,
    )
    return verdicts


def compile_failures(options: argparse.Namespace, corpus: Any) -> None:
    stage = Stage(options.binary, timing=False)
    names = list(corpus.tasks)
    # A missing semicolon, an undefined name, an undefined function, a brace too many, a wrong type: what models write.
    breaks = [
        lambda source: source.replace("{", "{ int count = 1 count++;", 1),
        lambda source: source.replace("threadIdx.x", "threadIndex.x"),
        lambda source: source.replace("{", "{ float gate = sigmoid(1.0f);", 1),
        lambda source: source + "}",
        lambda source: source.replace("{", "{ float* wrong = 1.5f;", 1),
    ]
    warm(stage, corpus, [name for name in names if corpus.tasks[name]["format"] == "kernel"])
    rows = []
    for count in range(options.count or 1000):
        name = [name for name in names if corpus.tasks[name]["format"] == "kernel"][count % 16]
        row = corpus.row("right", name)
        rows.append(row | {"source": breaks[count % len(breaks)](row["source"])})
    verdicts, seconds = stage.judge(rows)
    save(options, "compile", verdicts)
    failed = sum(verdict["outcome"] == "compile_error" for verdict in verdicts)
    report("compile failures a second", f"{failed / seconds:.0f} ({failed} of {len(rows)})", "bar 100")
    stage.close()


def correct_only(options: argparse.Namespace, corpus: Any) -> None:
    stage = Stage(options.binary, timing=False)
    names = [name for name in corpus.tasks if corpus.tasks[name]["format"] == "kernel"]
    warm(stage, corpus, names)
    rows = [corpus.row("right", names[count % len(names)]) for count in range(options.count or 400)]
    verdicts, seconds = stage.judge(rows)
    save(options, "correct", verdicts)
    right = sum(verdict["outcome"] == "correct" for verdict in verdicts)
    report("correct, not timed, a second", f"{right / seconds:.1f} ({right} of {len(rows)})", "bar 30")
    launches = [name for name in corpus.tasks if corpus.tasks[name]["format"] == "launch"]
    warm(stage, corpus, launches)
    rows = [corpus.row("right", launches[count % len(launches)]) for count in range((options.count or 400) // 2)]
    verdicts, seconds = stage.judge(rows)
    right = sum(verdict["outcome"] == "correct" for verdict in verdicts)
    report("the same in format launch", f"{right / seconds:.1f} ({right} of {len(rows)})", "bar 25")
    stage.close()


CLOCK_PARTS = {
    "of these, ms": ("fill", "run", "baselines", "draw", "judge", "kernels"),
    "ms of the clock beside others": ("prepare", "ahead", "wait", "after"),
}


def timed(options: argparse.Namespace, corpus: Any) -> None:
    stage = Stage(options.binary)
    names = [name for name in corpus.tasks if corpus.tasks[name]["format"] == "kernel"]
    seen = warm(stage, corpus, names)
    short = [name for name, verdict in zip(names, seen[2::3], strict=True) if (verdict.get("eager_ms") or 1e9) <= 0.2]
    print(f"tasks of at most 200 us eager: {len(short)} of {len(names)}; the others: {sorted(set(names) - set(short))}")
    rows = [corpus.row("right", short[count % len(short)]) for count in range(options.count or 120)]
    verdicts, seconds = stage.judge(rows)
    save(options, "timed", verdicts)
    right = [verdict for verdict in verdicts if verdict["outcome"] == "correct" and verdict["speedup_compile"]]
    report("correct and timed a second", f"{len(right) / seconds:.1f} ({len(right)} of {len(rows)})", "bar 10")
    report("trials of each, median", statistics.median(verdict["trials"] for verdict in right))
    seconds = [json.loads(verdict["verdict"])["seconds"] for verdict in right]
    parts = {
        part: round(statistics.median(each[part] for each in seconds), 3) for part in ("compile", "verify", "profile")
    }
    report("seconds of each, median, waiting included", parts)
    performances = [json.loads(verdict["verdict"])["performance"] for verdict in right]
    report(
        "milliseconds of each with the card to itself, mean",
        f"{1e3 * statistics.mean(each['alone_s'] for each in performances):.1f}",
    )
    clocks = [each["clock_s"] for each in performances]
    for title, parts in CLOCK_PARTS.items():
        report(title, {part: round(1e3 * statistics.mean(clock[part] for clock in clocks), 1) for part in parts})
    launches = [name for name in corpus.tasks if corpus.tasks[name]["format"] == "launch"]
    warm(stage, corpus, launches)
    rows = [corpus.row("right", launches[count % len(launches)]) for count in range((options.count or 120) // 2)]
    verdicts, seconds = stage.judge(rows)
    right = sum(verdict["outcome"] == "correct" and bool(verdict["speedup_compile"]) for verdict in verdicts)
    report("the same in format launch", f"{right / seconds:.1f} ({right} of {len(rows)})", "bar 8")
    stage.close()


def spread(options: argparse.Namespace, corpus: Any) -> None:
    """Ten repeats of the whole verdict, one at a time."""
    stage = Stage(options.binary, window=1)
    names = list(corpus.tasks)
    warm(stage, corpus, names)
    lines, worst, kept = [], {"eager": 0.0, "compile": 0.0}, []
    for name in names:
        verdicts, _ = stage.judge([corpus.row("right", name) for _ in range(10)])
        kept += verdicts
        first = verdicts[0]
        shares = {}
        for side in ("eager", "compile"):
            ratios = [verdict[f"speedup_{side}"] for verdict in verdicts if verdict[f"speedup_{side}"]]
            shares[side] = statistics.stdev(ratios) / statistics.mean(ratios) * 100 if len(ratios) > 1 else math.nan
            if (first["candidate_ms"] or 0) > 0.02:
                worst[side] = max(worst[side], shares[side])
        figures = [first[column] or math.nan for column in ("candidate_ms", "eager_ms", "compile_ms")]
        lines.append(
            f"{name:22} {figures[0] * 1e3:8.1f} us  eager {figures[1] * 1e3:8.1f}  compile {figures[2] * 1e3:8.1f}  "
            f"x {first['speedup_eager'] or math.nan:5.2f} / {first['speedup_compile'] or math.nan:5.2f}  "
            f"sd {shares['eager']:.2f} % / {shares['compile']:.2f} %  reward {first['reward']}  "
            f"roofline {100 * (first['roofline_share'] or math.nan):.0f} %  trials {first['trials']}  "
            f"{first['outcome']}"
        )
    save(options, "spread", kept)
    print("\n".join(lines))
    report(
        "worst sd of a speed-up over 10 repeats, kernels above 20 us",
        f"{worst['eager']:.2f} % eager, {worst['compile']:.2f} % compile",
        "bar 2 %",
    )
    stage.close()


def memory_used() -> Any:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def nasty(options: argparse.Namespace, corpus: Any) -> None:
    """A long run with hangs, crashes and writes out of bounds among right and wrong candidates."""
    before = options.memory_before
    stage = Stage(options.binary, timing=False, time_limit_s=1)
    names = [name for name in corpus.tasks if corpus.tasks[name]["format"] == "kernel"]
    kinds = {"endless_loop": ["timeout"], "trap": ["crash"], "far_out_of_bounds": ["out_of_bounds", "crash"]}
    cases = []
    for count in range(options.count or 1000):
        slot = count % 20
        if slot < 3:
            name = list(kinds)[slot]
            cases.append((corpus.nasty(name), kinds[name]))
        elif slot < 8:
            name = names[count % len(names)]
            cases.append((corpus.row("wrong", name), corpus.tasks[name]["wrong"]["cuda"]))
        else:
            cases.append((corpus.row("right", names[count % len(names)]), ["correct"]))
    random.Random(options.seed).shuffle(cases)
    verdicts, seconds = stage.judge([row for row, _ in cases])
    save(options, "nasty", verdicts)
    wrong = [
        (expected, verdict["outcome"], verdict["message"])
        for (_, expected), verdict in zip(cases, verdicts, strict=True)
        if verdict["outcome"] not in expected
    ]
    for line in collections.Counter(map(str, wrong)).most_common(10):
        print(line)
    counts = collections.Counter(verdict["outcome"] for verdict in verdicts)
    report(
        "verdicts in a row with 15 % hangs, crashes and faults",
        f"{len(verdicts)} in {seconds:.0f} s, {len(wrong)} unexpected; {dict(counts)}",
    )
    status = stage.close()
    time.sleep(3)
    left = subprocess.run(
        ["pgrep", "-fc", "kernels runner|reference.py|compile-worker"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report(
        "after it",
        f"exit status {status}, {left} processes left, GPU memory {memory_used() - before:+d} MiB",
        "bar 0, 0",
    )


def large(options: argparse.Namespace, corpus: Any) -> None:
    """More candidates at once than the card has memory for."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    total = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20
    # Input, its private image, output, eager's and the float64 one: one candidate takes two fifths of the card.
    size = total // 60
    stage = Stage(options.binary, set={"size": size}, max_trials=10)
    rows = [corpus.row("right", "relu") for _ in range(options.count or 6)]
    rows += [corpus.row("wrong", "relu") for _ in range(2)]
    verdicts, seconds = stage.judge(rows)
    save(options, "large", verdicts)
    outcomes = dict(collections.Counter(verdict["outcome"] for verdict in verdicts))
    messages = {verdict["message"] for verdict in verdicts}
    report("candidates of a task that fills the card", f"{len(rows)} in {seconds:.0f} s, {outcomes}", "no failed")
    print(f"{size * 4 / 2**30:.1f} GiB a tensor: {messages}")
    stage.close()


LAUNCH = re.compile(r"TASK_LAUNCH\((\w+),\s*(.*)\);")


def extension(corpus: Any, binary: str | pathlib.Path, name: str) -> str:
    """The same kernels as KernelBench wants them: a Python file that builds them with load_inline."""
    source = (CORPUS / "right" / f"{name}.cu").read_text()
    command = [str(binary), "check", "--header", "--task", str(CORPUS / "tasks" / f"{name}.py")]
    header = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # What a `launch` candidate is called by has no place in an extension.
    header = header.split("// The host function of a launch candidate.")[0] + "#endif\n"
    match = re.search(r"#define TASK_PARAMETERS (.*)", header)
    parameters = [parameter.strip() for parameter in match.group(1).split(",")]
    outputs = [parameter for parameter in parameters if not parameter.startswith("const")]
    assert len(outputs) == 1 and len(parameters) == 2, f"{name}: {parameters}"
    launches = LAUNCH.findall(source)
    kernel, configuration = launches[0]
    assert len(launches) == 1
    source = LAUNCH.sub("", source).replace('#include "task.h"', "")
    kind = re.sub(r"const|\*|\w+$", "", parameters[0]).strip()
    cuda = f"""{header}
#undef TASK_LAUNCH
{source}
torch::Tensor run(torch::Tensor x) {{
    auto out = torch::empty_like(x);
    {kernel}<<<{configuration}>>>(x.data_ptr<{kind}>(), out.data_ptr<{kind}>());
    return out;
}}
"""
    return f"""import torch
from torch.utils.cpp_extension import load_inline
built = load_inline(name="peer_{name}_{random.getrandbits(40):x}", cpp_sources="torch::Tensor run(torch::Tensor x);",
    cuda_sources={cuda!r}, functions=["run"], verbose=False)
class ModelNew(torch.nn.Module):
    def __init__(self, *arguments):
        super().__init__()
    def forward(self, *arguments):
        return built.run(arguments[0])
"""


def peer(options: argparse.Namespace, corpus: Any) -> None:
    """KernelBench's own evaluation of the same kernels: load_inline, 5 trials, 100 timings."""
    sys.path.insert(0, str(options.kernelbench / "src"))
    import torch
    from kernelbench import eval as kernelbench_eval  # pyright: ignore[reportMissingImports] (not from an index)

    os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
    seconds = {}
    for name in ("relu", "gelu_tanh", "softmax", "cumulative_sum")[: options.peers]:
        custom = extension(corpus, options.binary, name)
        started = time.perf_counter()
        result = kernelbench_eval.eval_kernel_against_ref(
            corpus.code(name),
            custom,
            num_correct_trials=5,
            num_perf_trials=100,
            measure_performance=True,
            build_dir=tempfile.mkdtemp(),
            device=torch.device("cuda:0"),
        )
        seconds[name] = time.perf_counter() - started
        print(
            f"KernelBench on {name}: {seconds[name]:.1f} s, compiled {result.compiled}, correct {result.correctness}, "
            f"runtime {result.runtime}, reference {getattr(result, 'ref_runtime', None)}",
            flush=True,
        )
    theirs = statistics.mean(seconds.values())
    report(
        "KernelBench's way, seconds a verdict",
        f"{theirs:.1f}",
        str({name: round(taken, 1) for name, taken in seconds.items()}),
    )
    stage = Stage(options.binary)
    warm(stage, corpus, list(seconds))
    rows = [corpus.row("right", name) for name in seconds for _ in range(10)]
    _, ours = stage.judge(rows)
    stage.close()
    report(
        "this evaluator on the same, seconds a verdict",
        f"{ours / len(rows):.3f}",
        f"{theirs / (ours / len(rows)):.0f} times as many verdicts",
    )
    stage = Stage(options.binary, window=1)
    rows = [corpus.row("right", name) for name in seconds]
    _, ours = stage.judge(rows)
    stage.close()
    report(
        "the same one at a time, from a cold start",
        f"{ours / len(rows):.1f}",
        f"{theirs / (ours / len(rows)):.1f} times as fast",
    )


SECTIONS = {
    "agreement": agreement,
    "compile": compile_failures,
    "correct": correct_only,
    "timed": timed,
    "spread": spread,
    "nasty": nasty,
    "large": large,
    "peer": peer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/cuda-agent")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/evaluator-bench")
    parser.add_argument("--kernelbench", type=pathlib.Path, help="a checkout, for the section peer")
    parser.add_argument("--count", type=int, help="candidates of a section, in place of its own number")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: for agreement alone")
    parser.add_argument("--only", action="append", help="of agreement: a class, or a part of an entry's name")
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    options = parser.parse_args()
    options.binary = options.binary.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda":
        # Whatever ran before may still be giving its memory back.
        time.sleep(3)
        options.memory_before = memory_used()
    elif options.sections != ["agreement"]:
        parser.error("the other sections need a GPU")
    corpus = Corpus()
    sections.run(SECTIONS, options.sections, options, corpus)


if __name__ == "__main__":
    main()
