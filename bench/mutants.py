#!/usr/bin/env python3
"""Which mistakes in keys, plans, rows, by-row execution and leases would no test notice?

    make mutants                                           30 of each place
    make mutants MUTANTS="--sample 0"                      all of them
    make mutants MUTANTS="--place lease --only is_dead"    those of one place whose names match

cargo-mutants says which mutants there are (`.cargo/mutants.toml`: of which files). Building each of them alone takes
far longer than its tests, so they are built together, in a copy of the sources: the body of a function becomes

    if crate::mutated(7) { <the body with mutant 7> } else { <the body> }

and an environment variable chooses one. What does not compile that way is taken out, as unviable. The few in constants,
and in functions that return `impl Trait` (each branch would be a type of its own), are built one by one.

Then each mutant is tried in rounds, on the tests that are quickest first; the first test that fails ends it:

1. the unit tests, without those that take seconds and concern other modules;
2. the integration tests of by-row stages with fake programs;
3. those of engines, stores and keys, and the model of by-row execution;
4. those that kill engines, share stores and call the program.

The sample of a place follows from `--seed` and the list of its mutants. Results are in `build/mutants/results.json`,
with the test that noticed each one. `--missed` tries again what was missed, after a test was written: `--sample` must
be as it was, and mutants are known by their lines. Standard library only.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "mutants"
ENGINE = "cuda-agent-engine"
VARIABLE = "CUDA_AGENT_MUTANT"
PLACES = {
    "key": "src/key/",
    "plan": "src/plan/",
    "rows": "src/rows/",
    "by_row": "src/execute/by_row/",
    "lease": "src/store/lease.rs",
}
INTEGRATION = "--test=integration"
# Whose each target of tests is: the integration tests run the binary, so they belong to its package.
PACKAGES = {"--lib": ENGINE, INTEGRATION: "cuda-agent"}
ROUNDS = [
    (
        "--lib",
        ["--skip=spec::", "--skip=artifact::", "--skip=store::tier::", "--skip=store::remote::", "--skip=host::"],
        list(PLACES),
    ),
    (INTEGRATION, ["by_row::", "row_programs::"], ["by_row", "rows", "lease", "plan"]),
    (INTEGRATION, ["engine::", "stores::", "keys::", "rows_model::"], list(PLACES)),
    (
        INTEGRATION,
        ["by_row::", "kills::", "shared::", "share_commands::", "rejected::", "gc::", "messages::", "cli::", "fuzz::"],
        list(PLACES),
    ),
]
"""What a round builds, the tests it runs, the places it is for."""
SWITCH = f"""
/// Whether this mutant is the one to try.
pub(crate) fn mutated(number: u32) -> bool {{
    static CHOSEN: std::sync::LazyLock<u32> =
        std::sync::LazyLock::new(|| std::env::var("{VARIABLE}").map_or(0, |text| text.parse().expect("a number")));
    *CHOSEN == number
}}
"""
LEAST_LIMIT_S = 30
"""A mutant that loops must not hold up the others, and a slow machine must not look like a loop."""


class Source:
    """A file, with its mutants built together."""

    def __init__(self, path: str | pathlib.Path, mutants: Any) -> None:
        self.path = path
        self.text = (ROOT / path).read_text()
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.functions = collections.defaultdict(list)
        for mutant in mutants:
            self.functions[self.body(mutant)].append(mutant)

    def place(self, position: Any) -> Any:
        return self.starts[position["line"] - 1] + position["column"] - 1

    def body(self, mutant: Any) -> tuple[int, Any]:
        """Where a mutant's function begins and ends, braces included."""
        function = mutant["function"]
        start, end = self.starts[function["span"]["start"]["line"] - 1], self.place(function["span"]["end"])
        name = function["function_name"].rsplit("::", 1)[-1]
        declared = re.compile(rf"^[^/\n]*\bfn {name}\b", re.MULTILINE).search(self.text, start, end)
        depth, place = 0, declared.end()
        while depth or self.text[place] != "{":
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(self.text[place], 0)
            place += 1
        return place, end

    def edited(self, mutant: Any, start: Any, end: Any) -> Any:
        """A part of the text with one mutant in it."""
        first, last = self.place(mutant["span"]["start"]), self.place(mutant["span"]["end"])
        return self.text[start:first] + mutant["replacement"] + self.text[last:end]

    def with_one(self, mutant: Any) -> Any:
        """The file with one mutant, as cargo-mutants would build it."""
        return self.edited(mutant, 0, len(self.text))

    def with_all(self, left_out: Any) -> tuple[Any, dict[str, Any]]:
        """The file with all mutants but some, and the mutant at each line (by number from 1) that belongs to one."""
        text = self.part(0, len(self.text), left_out)
        lines, current = {}, None
        for number, line in enumerate(text.splitlines(), 1):
            if begun := re.match(r"/\*mutant (\d+)\*/", line):
                current = int(begun[1])
            elif line.startswith("/*end*/"):
                current = None
            if current:
                lines[number] = current
        return text, lines

    def part(self, start: Any, end: Any, left_out: Any) -> Any:
        """A part of the text, where functions that begin and end in it are switched."""
        inside = [span for span in self.functions if start < span[0] and span[1] < end]
        outermost = [one for one in inside if not any(other[0] < one[0] and one[1] < other[1] for other in inside)]
        text, at = "", start
        for first, last in sorted(outermost):
            arms = "".join(
                f"\n/*mutant {mutant['number']}*/ if crate::mutated({mutant['number']}) "
                f"{self.edited(mutant, first, last)}\n/*end*/ else "
                for mutant in self.functions[first, last]
                if mutant["number"] not in left_out
            )
            body = self.part(first, last, left_out)
            text += self.text[at:first] + (f"{{{arms}{body}\n}}" if arms else body)
            at = last
        return text + self.text[at:end]


def is_apart(mutant: Any) -> bool:
    """Whether a mutant has to be built alone."""
    function = mutant["function"]
    return function is None or "impl " in (function["return_type"] or "")


class Build:
    """The copy of the sources, its mutants and its test programs."""

    def __init__(self, tree: Any, target: Any, mutants: Any) -> None:
        self.tree, self.mutants = tree, {mutant["number"]: mutant for mutant in mutants}
        self.environment = {
            "CARGO_PROFILE_DEV_DEBUG": "none",
            "CARGO_PROFILE_TEST_DEBUG": "none",
            "PROPTEST_CASES": "32",
            "INSTA_UPDATE": "no",
            # A function with all its mutants has a frame as large as all of them together.
            "RUST_MIN_STACK": str(256 << 20),
            "CARGO_TARGET_DIR": str(target),
        }
        by_file = collections.defaultdict(list)
        for mutant in mutants:
            by_file[mutant["file"]].append(mutant)
        self.sources = {
            path: Source(path, [mutant for mutant in group if not is_apart(mutant)]) for path, group in by_file.items()
        }
        self.unviable = set()

    def copy(self) -> None:
        """Brings the copy up to date. What is as it should be is not touched, so that cargo builds only what
        changed."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        for name in filter(None, listed.decode().split("\0")):
            source, target = ROOT / name, self.tree / name
            if name in self.sources or name == "src/lib.rs" or not source.is_file() or source.is_symlink():
                continue
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        if (ROOT / ".venv").exists() and not (self.tree / ".venv").exists():
            (self.tree / ".venv").symlink_to((ROOT / ".venv").resolve())
        self.write("src/lib.rs", (ROOT / "src/lib.rs").read_text() + SWITCH)

    def write(self, path: str | pathlib.Path, text: str) -> None:
        target = self.tree / path
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    def write_all(self) -> Any:
        """Writes every file with its mutants; by file and line, whose line it is."""
        lines = {}
        for path, source in self.sources.items():
            text, lines[path] = source.with_all(self.unviable)
            self.write(path, text)
        return lines

    def build_tests(self, target: Any) -> tuple[list[Any], Any]:
        """The messages of building the tests of a target, and whether that ended well."""
        package = f"--package={PACKAGES[target]}"
        command = ["cargo", "test", "--no-run", target, package, "--locked", "--message-format=json"]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, cwd=self.tree, env=environment, capture_output=True, text=True, check=False)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done

    def program_of_all(self, target: Any) -> Any:
        """Builds the tests of a target with all mutants; takes out what does not compile."""
        while True:
            lines = self.write_all()
            messages, done = self.build_tests(target)
            if done.returncode == 0:
                return executable(messages)
            said = [message["message"] for message in messages if message["reason"] == "compiler-message"]
            errors = [message for message in said if message["level"] == "error"]
            wrong = {number for error in errors for number in mutants_of(error, lines)}
            if not wrong - self.unviable:
                shown = "\n".join(error["rendered"] or error["message"] for error in errors)
                raise SystemExit(f"the mutants cannot be built together:\n{shown or done.stderr}")
            self.unviable |= wrong
            print(f"{len(self.unviable)} do not compile", flush=True)

    def program_of_one(self, target: Any, mutant: Any) -> Any:
        """Builds the tests of a target with one mutant; `None` where they do not compile."""
        source = self.sources[mutant["file"]]
        self.write(mutant["file"], source.with_one(mutant))
        messages, done = self.build_tests(target)
        self.write(mutant["file"], source.text)
        return None if done.returncode else executable(messages)


def executable(messages: Any) -> Any:
    """The test program among what cargo made."""
    return [m["executable"] for m in messages if m.get("executable") and m["profile"]["test"]][-1]


def mutants_of(error: Any, lines: Any) -> list[Any]:
    """The mutants that an error of the compiler is about."""
    spans = list(error["spans"])
    for child in error["children"]:
        spans += child["spans"]
    spans.sort(key=lambda span: not span["is_primary"])
    for primary in spans:
        span = primary
        while span:
            if number := lines.get(span["file_name"], {}).get(span["line_start"]):
                return [number]
            span = (span.get("expansion") or {}).get("span")
    return []


def try_one(
    program: str, tree: Any, environment: dict[str, str], filters: Any, number: Any, limit_s: Any
) -> tuple[str, str | None]:
    """Runs tests with a mutant: what came of it, and the test that noticed it."""
    environment = {**os.environ, **environment, VARIABLE: str(number)}
    log = OUT / "logs" / f"{number}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    with open(log, "w") as output:
        process = subprocess.Popen(
            [program, *filters],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        outcome = None
        while outcome is None:
            failed = re.search(r"^test (\S+) \.\.\. FAILED", log.read_text(errors="replace"), re.MULTILINE)
            if failed:
                outcome = ("caught", failed[1])
            elif (status := process.poll()) is not None:
                outcome = ("missed", None) if status == 0 else ("caught", f"the tests ended with status {status}")
            elif time.monotonic() > deadline:
                outcome = ("timeout", None)
            else:
                time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return outcome


def listed() -> Any:
    """All mutants, numbered from 1 in the order of the files."""
    command = ["cargo", "mutants", "--package", ENGINE, "--list", "--json"]
    mutants = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    for number, mutant in enumerate(mutants, 1):
        mutant["number"] = number
        mutant["place"] = next(place for place, prefix in PLACES.items() if mutant["file"].startswith(prefix))
    return mutants


def sample(mutants: Any, count: int, seed: int) -> Iterator[Any]:
    """`count` mutants of each place; all for 0."""
    for place in PLACES:
        names = sorted(mutant["name"] for mutant in mutants if mutant["place"] == place)
        chosen = set(random.Random(f"{seed} {place}").sample(names, min(count or len(names), len(names))))
        yield from (mutant for mutant in mutants if mutant["name"] in chosen)


def report(mutants: Any, results: Any) -> None:
    """A table by place, and what is left."""
    counts = collections.Counter((m["place"], results[m["name"]]["outcome"]) for m in mutants if m["name"] in results)
    outcomes = ["caught", "timeout", "missed"]
    print(f"\n{'place':8} {'viable':>7}" + "".join(f"{outcome:>9}" for outcome in [*outcomes, "unviable"]))
    for place in PLACES:
        found = [counts[place, outcome] for outcome in outcomes]
        print(f"{place:8} {sum(found):7}" + "".join(f"{count:9}" for count in [*found, counts[place, "unviable"]]))
    for outcome in ("missed", "timeout"):
        names = [m["name"] for m in mutants if results.get(m["name"], {}).get("outcome") == outcome]
        print("\n".join([f"{outcome}: {len(names)}", *(f"  {name}" for name in names)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=30, help="mutants of each place; 0 for all")
    parser.add_argument("--seed", default="1", help="of the sample")
    parser.add_argument("--place", action="append", choices=PLACES, help="only this one; may be repeated")
    parser.add_argument("--only", default="", help="only mutants whose names match this regular expression")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3, 4], help="only these")
    parser.add_argument("--keep", action="store_true", help="go on from the results of earlier calls")
    parser.add_argument("--missed", action="store_true", help="only what earlier calls missed, once more")
    parser.add_argument("--tree", type=pathlib.Path, default=OUT / "tree", help="the copy of the sources")
    options = parser.parse_args()
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", OUT / "target"))
    OUT.mkdir(parents=True, exist_ok=True)
    kept = OUT / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() and (options.keep or options.missed) else {}
    missed = {name for name, result in results.items() if result["outcome"] == "missed"} if options.missed else set()
    results = {name: result for name, result in results.items() if name not in missed}
    chosen = [
        mutant
        for mutant in sample(listed(), options.sample, options.seed)
        if mutant["place"] in (options.place or PLACES)
        and re.search(options.only, mutant["name"])
        and (not options.missed or mutant["name"] in missed)
    ]
    print(f"{len(chosen)} mutants", flush=True)
    build = Build(options.tree, target, chosen)
    build.copy()
    build.unviable |= {m["number"] for m in chosen if results.get(m["name"], {}).get("outcome") == "unviable"}
    for number in options.rounds:
        run_round(build, number - 1, chosen, results, kept)
    report(chosen, results)


def run_round(build: Any, index: Any, chosen: Any, results: Any, kept: Any) -> None:
    """Tries what earlier rounds did not notice."""
    target, filters, places = ROUNDS[index]

    def is_left(mutant: Any):
        result = results.get(mutant["name"], {"outcome": "missed", "round": 0})
        return mutant["place"] in places and result["outcome"] == "missed" and result["round"] <= index

    left = [mutant for mutant in chosen if is_left(mutant)]
    if not left:
        return
    program = build.program_of_all(target)
    results.update({build.mutants[number]["name"]: {"outcome": "unviable"} for number in build.unviable})
    left = [mutant for mutant in left if is_left(mutant)]
    begun = time.monotonic()
    outcome, test = try_one(program, build.tree, build.environment, filters, 0, 3600)
    if outcome != "missed":
        raise SystemExit(f"round {index + 1}: without a mutant the tests end as: {outcome}, {test}")
    limit_s = max(LEAST_LIMIT_S, 3 * (time.monotonic() - begun))
    print(f"round {index + 1}: {len(left)} mutants, at most {limit_s:.0f} s each", flush=True)
    for mutant in sorted(left, key=is_apart):
        tested = build.program_of_one(target, mutant) if is_apart(mutant) else program
        outcome, test = "unviable", None
        if tested:
            outcome, test = try_one(tested, build.tree, build.environment, filters, mutant["number"], limit_s)
        results[mutant["name"]] = {"outcome": outcome, "round": index + 1, "test": test}
        print(f"{outcome:8} {mutant['name']}" + (f"  ({test})" if test else ""), flush=True)
        kept.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
