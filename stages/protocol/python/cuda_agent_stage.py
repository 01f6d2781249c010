"""The program's side of the engine's protocol, for programs written in Python.

The twin of the crate `cuda-agent-protocol`; `ARCHITECTURE.md` has the formats. Standard library only, but for
`read_table`, which needs pyarrow. A program is one call:

    import cuda_agent_stage as stage

    def work(program: stage.Program) -> None:
        seed = program.params["seed"]
        program.write_table("operators", rows)

    if __name__ == "__main__":
        stage.main(work)
"""

import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, TextIO, TypedDict, cast

PROTOCOL_VERSION = 1

Json = Any
"""None, a bool, int, float or str, or a list, tuple or str-keyed mapping of these."""
ErrorKind = Literal["input", "params", "device", "environment", "internal"]


class Input(TypedDict):
    """A table or tree to read."""

    type: Literal["table", "tree"]
    path: str
    digest: NotRequired[str]
    rows: NotRequired[int]


class Output(TypedDict):
    """Where a table or tree goes, and a table's declared columns: pairs of name and type, in order."""

    type: Literal["table", "tree"]
    path: str
    columns: NotRequired[list[list[Json]]]


class ByRow(TypedDict):
    """How rows will come: `window` may be unanswered at a time, `total` are all of the stage, over all its programs."""

    port: str
    columns: list[str]
    window: int
    total: int


class Row(TypedDict):
    """A row to do: `row` is its digest; `seed` follows from the digest, never from the row's place."""

    row: str
    seed: int
    columns: dict[str, Json]


class Resources(TypedDict):
    """What this program may use: cores, bytes (0 where nothing was reserved), indices of whole GPUs."""

    cpu: int
    memory_bytes: int
    gpus: list[int]


class Device(TypedDict):
    """What measurements are filed under. `driver` is of a GPU."""

    type: Literal["cpu", "cuda"]
    model: str
    driver: NotRequired[str]


class StageError(Exception):
    """A failure whose message is for the person who runs the pipeline.

    `kind` is "input" or "params" (another try is useless), "device", "environment" or "internal".
    """

    def __init__(self, message: str, *, kind: ErrorKind = "internal", hint: str | None = None) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message, self.hint = message, hint


class Program:
    """A request, whose fields these are, and the way back to the engine."""

    protocol: int
    stage: str
    kind: str
    params: dict[str, Json]
    seed: int
    inputs: dict[str, Json]
    """By port an `Input`; for a list port `{"list": [Input, …]}`."""
    outputs: dict[str, Output]
    by_row: ByRow | None
    resources: Resources
    device: Device | None
    deadline_unix_s: float | None
    state_dir: str

    def __init__(self, request: Mapping[str, Json], events: TextIO | None) -> None:
        if request["protocol"] != PROTOCOL_VERSION:
            raise StageError(
                f"protocol {request['protocol']}, but this program speaks {PROTOCOL_VERSION}", kind="environment"
            )
        self.__dict__.update(request)
        self._events = events
        self._lock = threading.Lock()

    def send(self, event: Mapping[str, Json]) -> None:
        """Send one event; threads may call it side by side."""
        line = json.dumps(finite(event), ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock:
            if self._events is not None:
                self._events.write(line)
                self._events.flush()

    def progress(self, done: int, total: int | None = None, unit: str = "") -> None:
        self.send({"event": "progress", "done": done, "total": total, "unit": unit})

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self.send({"event": "metric", "name": name, "step": step, "value": value})

    def log(self, message: str, level: Literal["debug", "info", "warning", "error"] = "info") -> None:
        self.send({"event": "log", "level": level, "message": message})

    def checkpoint(self, path: str, order: int) -> None:
        """Tell of a whole checkpoint: a folder in `state_dir`, never written to again. The engine shares it."""
        self.send({"event": "checkpoint", "path": path, "order": order})

    def read_table(self, port: str, columns: Sequence[str] | None = None) -> list[dict[str, Json]]:
        """The rows of a table input as a list of dicts."""
        # pyarrow has no types.
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingTypeStubs]

        read_table = cast("Any", parquet).read_table
        return read_table(self.inputs[port]["path"], columns=columns).to_pylist()

    def input_path(self, port: str) -> str | None:
        """The path of a tree input, or None where an optional one was not given."""
        entry = self.inputs.get(port)
        return entry and entry["path"]

    def output_path(self, port: str) -> str:
        return self.outputs[port]["path"]

    def write_table(self, port: str, rows: Iterable[Mapping[str, Json]]) -> None:
        """Write an output table; the engine checks it against the declared columns and stores Parquet."""
        path = os.path.splitext(self.outputs[port]["path"])[0] + ".jsonl"
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)

    def rows(self) -> Iterator[Row]:
        """Yield the rows to do, as they come: dicts with `row` (the digest), `seed` and `columns`."""
        for line in sys.stdin:
            yield json.loads(line)

    def answer(
        self,
        row: Row,
        outputs: Mapping[str, Iterable[Mapping[str, Json]]] | None = None,
        *,
        status: Literal["done", "rejected", "failed"] = "done",
        reason: str | None = None,
        detail: str | None = None,
    ) -> None:
        """Answer a row. `outputs` maps a port to the rows it gets. "failed" is for causes outside the row: such an
        answer is not kept, the row is tried again by the next run."""
        event = {"event": "row", "row": row["row"], "status": status, "outputs": outputs or {}}
        if reason is not None:
            event["reason"] = reason
        if detail is not None:
            event["detail"] = detail
        self.send(event)


def finite(value: Json) -> Json:
    """JSON has no infinities and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in cast("dict[str, Json]", value).items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in cast("Sequence[Json]", value)]
    return value


def open_program() -> Program:
    path = os.environ.get("CUDA_AGENT_REQUEST")
    if path is None:
        raise StageError("CUDA_AGENT_REQUEST is not set: a stage's program is started by `cuda-agent run`")
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    descriptor = os.environ.get("CUDA_AGENT_EVENTS_FD")
    events = None
    if descriptor is not None:
        # Children must not keep the engine waiting for the end of the events.
        os.set_inheritable(int(descriptor), False)
        events = os.fdopen(int(descriptor), "w", encoding="utf-8")
    return Program(request, events)


def main(work: Callable[[Program], object]) -> None:
    """Run a program's body; a StageError becomes error.json, anything else a traceback in the log as well."""
    try:
        work(open_program())
    except StageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        _write_error(error.kind, error.message, error.hint)
    except Exception as error:
        traceback.print_exc()
        _write_error("internal", f"{type(error).__name__}: {error}", None)
    else:
        return
    sys.stdout.flush()
    sys.exit(1)


def _write_error(kind: ErrorKind, message: str, hint: str | None) -> None:
    with open("error.json", "w", encoding="utf-8") as file:
        json.dump({"kind": kind, "message": message, "hint": hint}, file)
