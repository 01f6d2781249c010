"""Times the engine beside ninja, DVC and Snakemake, all in one run on one machine: `make bench`.

What is timed, each the median of several runs:
- a no-op run: every stage is up to date and the tool finds that out (1,000 and 10,000 trivial stages);
- the added cost of a stage that is executed: 200 stages one after another, minus as many bare `sh -c`;
- `--help`, the start of the program alone; peak memory; and the lookup of row results.

A trivial stage writes one small file. Peers live in virtual environments under build/bench; one that can't be installed
is left out with a message. Nothing here passes or fails: a figure over its goal is marked, the exit status stays 0.
Standard library only.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "bench"
EXECUTED = 200
COMMAND = "echo 1 > {}"


class Tool:
    """A tool that runs a graph of trivial stages. `largest` is how many it can be asked to prepare in fair time."""

    name = ""
    largest = 10_000

    def write(self, folder: pathlib.Path, count: int) -> None:
        """Write a project with `count` stages."""

    def command(self) -> list[str]:
        """The command line of a run in the project's folder, one stage at a time."""
        raise NotImplementedError

    def bring_up_to_date(self, folder: pathlib.Path) -> None:
        """Leave nothing to do for the next run."""
        run(self.command(), folder)


class CudaAgent(Tool):
    name = "cuda-agent"

    def __init__(self, binary: str | pathlib.Path) -> None:
        self.binary = str(pathlib.Path(binary).resolve())

    def write(self, folder: pathlib.Path, count: int) -> None:
        stages = "".join(
            f'  s{index}: {{ uses: run, run: "{COMMAND.format("outputs/out")}", outputs: {{ out: tree }} }}\n'
            # Stages of equal command and inputs would be one result: each gets a name of its own to write.
            .replace("echo 1", f"echo {index}")
            for index in range(count)
        )
        (folder / "bench.yaml").write_text(f"name: bench\nstages:\n{stages}", encoding="utf-8")

    def command(self) -> Any:
        return [self.binary, "run", "bench.yaml", "--jobs", "1"]


class Ninja(Tool):
    name = "ninja"

    def __init__(self, binary: str | pathlib.Path) -> None:
        self.binary = binary

    def write(self, folder: pathlib.Path, count: int) -> None:
        builds = "".join(f"build out/s{index}: make\n" for index in range(count))
        rule = f"rule make\n  command = {COMMAND.format('$out')}\n"
        (folder / "build.ninja").write_text(rule + builds, encoding="utf-8")

    def command(self) -> Any:
        return [self.binary, "-j1", "--quiet"]


class Dvc(Tool):
    name = "DVC"
    largest = 1_000

    def __init__(self, binary: str | pathlib.Path) -> None:
        self.binary = binary

    def write(self, folder: pathlib.Path, count: int) -> None:
        stages = "".join(
            f"  s{index}:\n    cmd: {COMMAND.format(f's{index}.out')}\n    outs: [s{index}.out]\n"
            for index in range(count)
        )
        (folder / "dvc.yaml").write_text(f"stages:\n{stages}", encoding="utf-8")
        subprocess.run([self.binary, "init", "--no-scm", "--quiet"], cwd=folder, check=True)
        subprocess.run([self.binary, "config", "core.analytics", "false"], cwd=folder, check=True)

    def command(self) -> Any:
        return [self.binary, "repro", "--quiet"]

    def bring_up_to_date(self, folder: pathlib.Path) -> None:
        # DVC rewrites its lock file after every stage, so running a thousand takes minutes; it can also be told that
        # the outputs at hand are the stages'.
        for stage in range((folder / "dvc.yaml").read_text(encoding="utf-8").count("cmd:")):
            (folder / f"s{stage}.out").write_text("1\n", encoding="utf-8")
        run([self.binary, "commit", "--force", "--quiet"], folder)


class Snakemake(Tool):
    name = "Snakemake"
    largest = 1_000

    def __init__(self, binary: str | pathlib.Path) -> None:
        self.binary = binary

    def write(self, folder: pathlib.Path, count: int) -> None:
        text = (
            f"rule all:\n    input: expand('out/s{{i}}', i=range({count}))\n\n"
            f"rule one:\n    output: 'out/s{{i}}'\n    shell: '{COMMAND.format('{output}')}'\n"
        )
        (folder / "Snakefile").write_text(text, encoding="utf-8")

    def command(self) -> Any:
        return [self.binary, "--cores", "1", "--quiet", "all"]


def run(
    command: Sequence[str | pathlib.Path],
    folder: pathlib.Path,
    may_fail: bool = False,
    environment: dict[str, str] | None = None,
) -> tuple[float, int]:
    """Run to the end; seconds and the peak memory in bytes of the program and its children."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_AGENT_")}
    environment = inherited | (environment or {})
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0 and not may_fail:
            log.seek(0)
            last = "\n".join(log.read().decode(errors="replace").splitlines()[-8:])
            raise SystemExit(f"{' '.join(map(str, command))} failed with {process.returncode}:\n{last}")
    return seconds, usage.ru_maxrss * 1024


def project(folder: pathlib.Path, tool: Any, count: int) -> pathlib.Path:
    path = folder / f"{tool.name}-{count}-{time.monotonic_ns()}"
    path.mkdir()
    tool.write(path, count)
    return path


def no_op(folder: pathlib.Path, tool: Any, count: int, repeats: int) -> tuple[float, int]:
    """Median seconds of a run that executes nothing, and its peak memory."""
    path = project(folder, tool, count)
    tool.bring_up_to_date(path)
    # What was written goes to the disk now, in nobody's time.
    os.sync()
    runs = [run(tool.command(), path) for _ in range(repeats)]
    # The project stays: ext4 places new files slowly for a while after thousands were deleted, which would be charged
    # to whatever is timed next. The temporary folder goes at the end.
    return statistics.median(seconds for seconds, _ in runs), max(memory for _, memory in runs)


def executed(folder: pathlib.Path, tool: Any, repeats: int) -> Any:
    """Median seconds of a run that executes every one of `EXECUTED` stages."""

    def once():
        path = project(folder, tool, EXECUTED)
        seconds, _ = run(tool.command(), path)
        return seconds

    return statistics.median(once() for _ in range(repeats))


def bare_processes(folder: pathlib.Path, repeats: int) -> Any:
    """Median seconds of the same commands with nothing around them."""

    def once():
        start = time.perf_counter()
        for index in range(EXECUTED):
            subprocess.run(["/bin/sh", "-c", COMMAND.format(f"bare{index}")], cwd=folder, check=True)
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(repeats))


def peers(names: Any) -> Iterator[Any]:
    """The peers that are there or can be installed."""
    makers = {"ninja": ("ninja", Ninja), "dvc": ("dvc==3.67.1", Dvc), "snakemake": ("snakemake==9.27.1", Snakemake)}
    for name in names:
        requirement, make = makers[name]
        binary = (name == "ninja" and shutil.which("ninja")) or installed(name, requirement)
        if binary:
            yield make(binary)


def installed(name: str, requirement: str, folder_name: str | None = None) -> str | None:
    """The peer's program out of a virtual environment of its own (by default named like it), or None."""
    folder = BUILD / (folder_name or name)
    binary, stamp = folder / "bin" / name, folder / f".{requirement}"
    if not (binary.exists() and stamp.exists()):
        print(f"installing {requirement} into build/bench/{folder.name}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", requirement]
        if subprocess.run(pip, check=False).returncode != 0:
            print(f"left out: {requirement} could not be installed", file=sys.stderr)
            return None
        stamp.touch()
    return str(binary)


class Table:
    """The figures, and the one table that shows them with the ratio to ours."""

    def __init__(self, tools: Any) -> None:
        self.tools, self.rows = [tool.name for tool in tools], []

    def add(self, label: str, goal: float, values: Any, show: Any = None) -> None:
        """A row; `values` by tool, the figure to be at most `goal`."""
        print(
            f"  {label}: " + ", ".join(f"{name} {(show or seconds_text)(value)}" for name, value in values.items()),
            file=sys.stderr,
        )
        self.rows.append((label, goal, values, show or seconds_text))

    def text(self) -> Any:
        lines = [["", "goal", *self.tools]]
        for label, goal, values, show in self.rows:
            cells = [self.cell(name, goal, values, show) for name in self.tools]
            lines.append([label, "≤ " + show(goal), *cells])
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join(
            "  ".join(
                text.ljust(width) if not column else text.rjust(width)
                for column, (text, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )

    def cell(self, name: str, goal: float, values: Any, show: Any) -> Any:
        if name not in values:
            return "–"
        ours, value = values.get(CudaAgent.name), values[name]
        if name == CudaAgent.name:
            return show(value) + (" over" if value > goal else "")
        return f"{show(value)} ({value / ours:.2g}×)" if ours and ours > 0 else show(value)


def seconds_text(seconds: Any) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def bytes_text(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def measure(table: Any, tools: Any, folder: pathlib.Path, repeats: int) -> None:
    memory = {}
    for count, goal in ((1_000, 0.050), (10_000, 0.200)):
        results = {tool.name: no_op(folder, tool, count, repeats) for tool in tools if count <= tool.largest}
        table.add(f"no-op run of {count:,} stages", goal, {name: seconds for name, (seconds, _) in results.items()})
        memory = {name: size for name, (_, size) in results.items()}
    table.add("peak memory of that run", 200e6, memory, bytes_text)
    bare = bare_processes(folder, repeats)
    costs = {tool.name: max(0.0, executed(folder, tool, repeats) - bare) / EXECUTED for tool in tools}
    table.add(f"cost of an executed stage (over {seconds_text(bare / EXECUTED)} of sh -c)", 0.005, costs)

    # ninja calls a request for help a failure.
    def start(tool: Any):
        return run([tool.command()[0], "--help"], folder, may_fail=True)[0]

    starts = {tool.name: statistics.median(start(tool) for _ in range(repeats)) for tool in tools}
    table.add("--help", 0.010, starts)


def row_lookup() -> Any:
    """What the engine's own example says of a million row results; it times itself, with a warm index."""
    if not (ROOT / "examples" / "row_lookup.rs").exists():
        print("left out: examples/row_lookup.rs is not there", file=sys.stderr)
        return ""
    command = ["cargo", "run", "--release", "--locked", "--quiet", "--example", "row_lookup"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"row lookup failed:\n{done.stderr[-2000:]}", file=sys.stderr)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=ROOT / "target" / "release" / "cuda-agent")
    parser.add_argument("--quick", action="store_true", help="ninja alone")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, of which the median counts")
    parser.add_argument("--peers-only", action="store_true", help="leave cuda-agent out")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    tools = [] if arguments.peers_only else [CudaAgent(arguments.binary)]
    tools += peers(["ninja"] if arguments.quick else ["ninja", "dvc", "snakemake"])
    table = Table(tools)
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        measure(table, tools, pathlib.Path(folder), repeats)
    print(f"Median of {repeats}, {os.cpu_count()} cores; in brackets, how many times cuda-agent's.\n")
    print(table.text())
    if not arguments.peers_only and (text := row_lookup()):
        print("\n" + text)
    results = [{"measure": label, "goal": goal, **values} for label, goal, values, _ in table.rows]
    (BUILD / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
