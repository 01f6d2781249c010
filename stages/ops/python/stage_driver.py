"""Drives a stage's program by hand, as the engine does, for the tests that sit beside the programs."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

OPS = pathlib.Path(__file__).resolve().parent.parent
TWIN = OPS.parent / "protocol" / "python"


def request(
    folder: str | pathlib.Path,
    kind: str,
    params: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    outputs: Iterable[str] = (),
) -> pathlib.Path:
    """Write `request.json` for a whole-table program and return its path."""
    folder = pathlib.Path(folder)
    (folder / "outputs").mkdir(parents=True, exist_ok=True)
    path = folder / "request.json"
    path.write_text(
        json.dumps(
            {
                "protocol": 1,
                "stage": kind.split("/")[-1],
                "kind": kind,
                "params": params,
                "seed": params.get("seed", 0),
                "inputs": inputs or {},
                "outputs": {
                    port: {"type": "table", "path": str(folder / "outputs" / f"{port}.parquet"), "columns": []}
                    for port in outputs
                },
                "by_row": None,
                "resources": {"cpu": 2, "memory_bytes": 0, "gpus": []},
                "device": {"type": "cpu", "model": "test"},
                "deadline_unix_s": None,
                "state_dir": str(folder),
            }
        ),
        encoding="utf-8",
    )
    return path


def environment(program: str | pathlib.Path, request_path: pathlib.Path) -> dict[str, str]:
    paths = [str(pathlib.Path(program).parent), str(OPS / "python"), str(TWIN)]
    return {
        "PATH": os.environ.get("PATH", ""),
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_AGENT_REQUEST": str(request_path),
        **bytecode(),
    }


def bytecode() -> dict[str, str]:
    """Where a program of a test keeps bytecode: where the test itself does, since torch's takes seconds to make."""
    names = ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
    return {name: os.environ[name] for name in names if name in os.environ}


def run_program(program: str | pathlib.Path, request_path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; returns the finished process."""
    return subprocess.run(
        [sys.executable, str(program)],
        cwd=pathlib.Path(request_path).parent,
        env=environment(program, request_path),
        capture_output=True,
        text=True,
        check=False,
    )


def read_rows(folder: str | pathlib.Path, port: str) -> list[dict[str, Any]]:
    """The rows that a program wrote as JSON lines."""
    path = pathlib.Path(folder) / "outputs" / f"{port}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_table(path: str | pathlib.Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write rows as the Parquet file that the engine hands to the next stage."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    return {"type": "table", "path": str(path), "rows": len(rows)}
