"""For tests: starts a reference, talks to it, and plays the candidate by writing into the arena as a runner does."""

import contextlib
import ctypes
import json
import mmap
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import cuda_device
import element_types

HERE = pathlib.Path(__file__).resolve().parent
TYPES = {name: dtype for dtype, name in element_types.NAMES.items()}


class Failure(Exception):
    """An error reply."""

    def __init__(self, error: Any) -> None:
        super().__init__(error["message"])
        self.kind, self.hint, self.line = error["kind"], error["hint"], error["line"]


class Reference:
    """The process. Its end is that of the `with` block."""

    def __init__(self, device: str = "cpu", *options: Any) -> None:
        self._control, theirs = socket.socketpair()
        command = [sys.executable, str(HERE / "reference.py"), "--device", device]
        command += ["--parent-pid", str(os.getpid()), *options]
        with theirs:
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.PIPE)
        self.ready = json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self._control.close()
        self.process.wait(20)
        self.process.stdout.close()

    def connect(self) -> Any:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        return contextlib.closing(Connection(ours))


class Connection:
    """One worker."""

    def __init__(self, connected: Any) -> None:
        self._socket = connected
        self._stream = self._socket.makefile("rwb")
        self.pid = self._read()["hello"]["pid"]

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def _read(self) -> Any:
        line = self._stream.readline()
        if not line:
            raise EOFError("the worker has ended")
        return json.loads(line)

    def send_line(self, line: Any) -> Any:
        self._stream.write(line + b"\n")
        self._stream.flush()
        return self._read()

    def ask(self, do: Any, **fields: Any) -> Any:
        reply = self.send_line(json.dumps({"do": do, **fields}).encode())
        if "error" in reply:
            raise Failure(reply["error"])
        return reply["ok"]

    def begin(self, task: Any, seed: str = "0123456789abcdef", **fields: Any) -> "list[CandidateSet]":
        """Learns a task and begins: the sets as a runner sees them."""
        spec = self.ask("task", **task)["spec"]
        reply = self.ask("begin", task=task, seed=seed, **fields)
        memory = open_arena(reply["arena"])
        return [CandidateSet(self, number, spec, memory, each) for number, each in enumerate(reply["sets"])]


# What the fixtures `reference` and `connection` are made of.


def started(device: str = "cpu") -> Iterator[Reference]:
    process = Reference(device)
    yield process
    process.close()


def connected(reference: Reference) -> Iterator[Connection]:
    with reference.connect() as connection:
        yield connection


class CandidateSet:
    """A set of arguments, as the candidate has it."""

    def __init__(self, connection: Any, number: Any, spec: Any, memory: Any, described: Any) -> None:
        self._connection = connection
        self.number = number
        self.spec = spec
        self.memory = memory
        self.arguments = described["arguments"]
        self.scratch = described["scratch"]
        tensors = spec["inputs"] + spec["parameters"] + spec["buffers"] + spec["outputs"]
        self.tensors = {
            tensor["name"]: self._view(tensor, *place) for tensor, place in zip(tensors, self.arguments, strict=True)
        }

    def _view(self, tensor: Any, offset: Any, size: Any) -> Any:
        return self.memory[offset : offset + size].view(TYPES[tensor["dtype"]]).view(tensor["shape"])

    def __getitem__(self, name: Any) -> Any:
        return self.tensors[name]

    def place(self, name: Any) -> Any:
        return self.arguments[list(self.tensors).index(name)]

    def draw(self, trial: int = 0, pattern: int = 0, again: bool = False, quick: bool = False) -> None:
        self._connection.ask("draw", set=self.number, trial=trial, pattern=pattern, again=again, quick=quick)

    def judge(self) -> Any:
        if self.memory.is_cuda:
            torch.cuda.synchronize()
        return self._connection.ask("judge", set=self.number)

    def run(self, candidate: Any, trial: int = 0) -> Any:
        """Both patterns on one trial's inputs, as the evaluator does; the facts after the second."""
        self.draw(trial, 0)
        candidate(self)
        self.judge()
        self.draw(trial, 1, again=True)
        candidate(self)
        return self.judge()


def open_arena(described: Any) -> torch.Tensor:
    if "path" in described:
        descriptor = os.open(described["path"], os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(descriptor, described["bytes"]), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    return open_on_gpu(described)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


def open_on_gpu(described: Any) -> torch.Tensor:
    torch.cuda.init()
    library = ctypes.CDLL(cuda_device.CudaRuntime._loaded_path())
    handle = _Handle.from_buffer_copy(bytes.fromhex(described["ipc_handle"]))
    address = ctypes.c_void_p()
    lazily_enable_peer_access = 1
    status = library.cudaIpcOpenMemHandle(ctypes.byref(address), handle, lazily_enable_peer_access)
    assert status == 0, f"cudaIpcOpenMemHandle: {status}"
    return torch.as_tensor(cuda_device._RawMemory(address.value, described["bytes"]), device="cuda")


def make_task(code: Any, policy: str = "strict", protocol: str = "cuda-agent", overrides: Any = None) -> dict[str, Any]:
    return {"code": code, "name": "task.py", "set": overrides or {}, "protocol": protocol, "policy": policy}


def model(
    forward: Any,
    inputs: Any,
    init: str = "pass",
    init_inputs: str = "[]",
    init_arguments: str = "",
    constants: str = "",
) -> str:
    """A task's file, from its parts."""
    return f"""\
import torch
import torch.nn as nn
import torch.nn.functional as F
{constants}
class Model(nn.Module):
    def __init__(self{", " + init_arguments if init_arguments else ""}):
        super().__init__()
        {init}
    def forward(self, {forward.split(":", 1)[0]}):
        {forward.split(":", 1)[1].strip()}
def get_inputs():
    return {inputs}
def get_init_inputs():
    return {init_inputs}
"""


# Tasks of a few operators.

RELU = model("x: return torch.relu(x)", "[torch.randn(rows, columns)]", constants="rows = 64\ncolumns = 1000")
NORM = model("x: return self.norm(x)", "[torch.randn(32, 96)]", "self.norm = nn.LayerNorm(96)")
MATMUL = model("a, b: return a @ b", "[torch.rand(64, 128), torch.rand(128, 32)]")
TUPLE = model("x: return x.exp(), x > 0", "[torch.randn(5, 7)]")
SCALAR = model(
    "x, alpha: return x * alpha + self.beta", "[torch.randn(9), 0.5]", "self.beta = beta", "[3]", "beta", "beta = 2"
)


BATCH_NORM = model("x: return self.norm(x)", "[torch.randn(8, 5, 6, 6)]", "self.norm = nn.BatchNorm2d(5)")


def writes(function: Callable[["CandidateSet"], Any]) -> Callable[["CandidateSet"], None]:
    """A candidate that computes its outputs by a function of all that it may read."""

    def candidate(arguments: "CandidateSet") -> None:
        results = function(arguments)
        results = results if isinstance(results, tuple) else (results,)
        outputs = [arguments[tensor["name"]] for tensor in arguments.spec["outputs"]]
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)
        if any(output.is_cuda for output in outputs):
            torch.cuda.synchronize()

    return candidate


# Candidates for a task of one softmax: the right one, and some that are not.


def softmax(arguments: Any) -> None:
    arguments["out"].copy_(torch.softmax(arguments["x"], -1))


def spoil_one(arguments: Any) -> None:
    softmax(arguments)
    arguments["out"].view(-1)[777] += 0.1


def keep_the_last(arguments: Any) -> None:
    """Nothing is written: what lies there is poison."""


def write_input(arguments: Any) -> None:
    softmax(arguments)
    arguments["x"].view(-1)[3] = 0.0


def write_beside(arguments: Any) -> None:
    softmax(arguments)
    offset, size = arguments.place("out")
    arguments.memory[offset + size] ^= 1
