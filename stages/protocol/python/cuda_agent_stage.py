"""The program's side of the engine's protocol, for programs written in Python.

The twin of the crate `cuda-agent-protocol`; `ARCHITECTURE.md` has the formats. Standard library only, but for
`read_table`, which needs pyarrow. A program is one call:

    import cuda_agent_stage as stage

    def work(program):
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

PROTOCOL_VERSION = 1


class StageError(Exception):
    """A failure whose message is for the person who runs the pipeline.

    `kind` is "input" or "params" (another try is useless), "device", "environment" or "internal".
    """

    def __init__(self, message, *, kind="internal", hint=None):
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint


class Program:
    """A request and the way back to the engine. `params`, `seed`, `inputs`, `outputs`, `by_row`, `resources`,
    `device`, `deadline_unix_s` and `state_dir` are the request's fields, as plain JSON values."""

    def __init__(self, request, events):
        if request["protocol"] != PROTOCOL_VERSION:
            raise StageError(
                f"protocol {request['protocol']}, but this program speaks {PROTOCOL_VERSION}", kind="environment"
            )
        self.__dict__.update(request)
        self._events = events
        self._lock = threading.Lock()

    def send(self, event):
        """Send one event; threads may call it side by side."""
        line = json.dumps(finite(event), ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock:
            if self._events is not None:
                self._events.write(line)
                self._events.flush()

    def progress(self, done, total=None, unit=""):
        self.send({"event": "progress", "done": done, "total": total, "unit": unit})

    def metric(self, name, value, step=None):
        self.send({"event": "metric", "name": name, "step": step, "value": value})

    def log(self, message, level="info"):
        self.send({"event": "log", "level": level, "message": message})

    def checkpoint(self, path, order):
        """Tell of a whole checkpoint: a folder in `state_dir`, never written to again. The engine shares it."""
        self.send({"event": "checkpoint", "path": path, "order": order})

    def read_table(self, port, columns=None):
        """The rows of a table input as a list of dicts."""
        import pyarrow.parquet

        entry = self.inputs[port]
        return pyarrow.parquet.read_table(entry["path"], columns=columns).to_pylist()

    def input_path(self, port):
        """The path of a tree input, or None where an optional one was not given."""
        entry = self.inputs.get(port)
        return entry and entry["path"]

    def output_path(self, port):
        return self.outputs[port]["path"]

    def write_table(self, port, rows):
        """Write an output table; the engine checks it against the declared columns and stores Parquet."""
        path = os.path.splitext(self.outputs[port]["path"])[0] + ".jsonl"
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)

    def rows(self):
        """Yield the rows to do, as they come: dicts with `row` (the digest), `seed` and `columns`."""
        for line in sys.stdin:
            yield json.loads(line)

    def answer(self, row, outputs=None, *, status="done", reason=None, detail=None):
        """Answer a row. `outputs` maps a port to the rows it gets. "failed" is for causes outside the row: such an
        answer is not kept, the row is tried again by the next run."""
        event = {"event": "row", "row": row["row"], "status": status, "outputs": outputs or {}}
        if reason is not None:
            event["reason"] = reason
        if detail is not None:
            event["detail"] = detail
        self.send(event)


def finite(value):
    """JSON has no infinities and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def open_program():
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


def main(work):
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


def _write_error(kind, message, hint):
    with open("error.json", "w", encoding="utf-8") as file:
        json.dump({"kind": kind, "message": message, "hint": hint}, file)
