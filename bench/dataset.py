#!/usr/bin/env python3
"""How fast the dataset's stages are on this machine, and whether times taken beside other work are those taken alone.

    python bench/dataset.py --binary target/release/cuda-agent --tasks 600
    python bench/dataset.py --binary target/release/cuda-agent --pipeline pipelines/quickstart.yaml --tasks 24

Runs a pipeline's stages up to `screened`, or to `kept` where it has no such stage; then measures some of the
kept tasks once more, one at a time, which is also what a sequential filter of the same tasks takes. Prints a table. A
second call goes on with what the first one has measured, so rates are of the rows that were executed.

Needs pyarrow, and an interpreter with torch in CUDA_AGENT_PYTHON or .venv, as the stages do.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
DONE = re.compile(r"^(\S+): done in ([0-9.]+) (ms|s|min|h)\b(?: \((\d+) rows executed)?")
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
TIMES = ("eager_ms", "compiled_ms")

ALONE = """\
name: alone
params: {{ rows: {rows} }}
stages:
  few:
    uses: run
    inputs: {{ tasks: {{ path: {tasks} }} }}
    run: |
      {python} - ${{params.rows}} <<'END'
      import sys, pyarrow.parquet as parquet
      table, rows = parquet.read_table("inputs/tasks.parquet"), int(sys.argv[1])
      step = max(1, table.num_rows // rows)
      few = table.select(["task_id", "code"]).take(list(range(0, table.num_rows, step))[:rows])
      parquet.write_table(few, "outputs/tasks.parquet")
      END
    outputs: {{ tasks: {{ type: tasks, columns: {{ task_id: utf8, code: utf8 }} }} }}
  alone:
    uses: ops/measure
    inputs: {{ tasks: few.tasks }}
    with: {{ workers: 1, memory_limit: 6GiB, disk_limit: 1GiB }}
    resources: {{ gpu: {gpu}, cpu: {cpu} }}
"""


def run(arguments: argparse.Namespace, command: list[str], log: Any) -> tuple[float, dict[str, Any]]:
    """Seconds, and for each stage that was executed its seconds and rows; what it prints goes to the log and on."""
    started, stages = time.monotonic(), {}
    process = subprocess.Popen([arguments.binary, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="", file=log)
        print("  " + line, end="", flush=True)
        if match := DONE.match(line):
            stage, number, unit, rows = match.groups()
            stages[stage] = (float(number) * UNITS[unit], int(rows) if rows else None)
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)} failed: see {log.name}")
    return time.monotonic() - started, stages


def table_of(arguments: argparse.Namespace, options: list[str], what: Any, folder: pathlib.Path) -> tuple[Any, Any]:
    """An output of a stage that was made."""
    import pyarrow.parquet

    target = folder / what
    subprocess.run(
        [arguments.binary, "export", what, str(target), *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    (path,) = [target] if target.is_file() else sorted(target.rglob("*.parquet"))
    return path, pyarrow.parquet.read_table(path).to_pylist()


def rate(stages: Any, stage: Any) -> Any:
    seconds, rows = stages.get(stage, (0.0, 0))
    return rows / seconds * 3600 if rows and seconds else None


def differences(beside: Any, alone: Any) -> dict[str, list[Any]]:
    """By kind of time: how far each task's time beside other work is from that taken alone, as a share."""
    by_code = {row["code"]: row for row in beside}
    found = {name: [] for name in TIMES}
    for row in alone:
        for name in TIMES:
            if row[name] and by_code[row["code"]][name]:
                found[name].append(by_code[row["code"]][name] / row[name] - 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--pipeline", default="pipelines/ops.yaml")
    parser.add_argument("--tasks", type=int, default=600)
    parser.add_argument(
        "--alone", type=int, default=30, help="tasks that are measured once more, one at a time; 0: none"
    )
    parser.add_argument("--store", help="a store to go on with; a fresh one where there is none")
    arguments = parser.parse_args()
    arguments.binary = str(pathlib.Path(arguments.binary).resolve())
    os.environ.setdefault("CUDA_AGENT_PYTHON", str(ROOT / ".venv/bin/python"))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dataset-"))
    store = ["--store", arguments.store or (folder / "store").as_uri()]
    chosen = ["-p", f"tasks={arguments.tasks}"]
    text = (ROOT / arguments.pipeline).read_text()
    is_gpu, last = "gpu: 1" in text, "screened" if "\n  screened:" in text else "kept"
    rows = []
    with open(folder / "run.log", "w", encoding="utf-8") as log:
        seconds, stages = run(arguments, ["run", arguments.pipeline, last, *chosen, *store], log)
        rows.append((f"up to {last}", f"{seconds:.0f} s"))
        rows += [(stage, f"{took:.0f} s") for stage, (took, _) in stages.items() if took >= 1]
        both = {stage: rate(stages, stage) for stage in ("measured", "profiled") if stage in stages}
        rows += [(f"{stage} an hour", f"{value:.0f}") for stage, value in both.items() if value]
        if len(both) == 2 and all(both.values()):
            rows.append(("through both an hour", f"{1 / sum(1 / value for value in both.values()):.0f}"))
        if arguments.alone:
            options = ["--pipeline", arguments.pipeline, *chosen, *store]
            tasks, _ = table_of(arguments, options, "kept.tasks", folder)
            _, beside = table_of(arguments, options, "measured.rows", folder)
            second = folder / "alone.yaml"
            second.write_text(
                ALONE.format(
                    rows=arguments.alone,
                    tasks=tasks,
                    python=os.environ["CUDA_AGENT_PYTHON"],
                    gpu=int(is_gpu),
                    cpu="all" if is_gpu else 1,
                )
            )
            # A store of its own: where the tasks were measured, they would be found.
            apart = ["--store", (folder / "apart").as_uri()]
            _, once_more = run(arguments, ["run", str(second), *apart], log)
            rows.append(("one at a time an hour", f"{rate(once_more, 'alone'):.0f}"))
            _, alone = table_of(arguments, ["--pipeline", str(second), *apart], "alone.rows", folder)
            for name, found in differences(beside, alone).items():
                far = sum(abs(value) > 0.03 for value in found)
                text = f"{statistics.median(map(abs, found)):.2%}; {far} of {len(found)} over 3 %" if found else "none"
                rows.append((f"{name} beside against alone, median", text))
    print(f"\n{'':4}{arguments.pipeline}, {arguments.tasks} tasks; log in {folder / 'run.log'}")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{'':4}{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
