"""What reference programs do when they run: the operators that reach torch's dispatcher, in order, and the digest of
their graph, as `ops/measure` records both of tasks.

Runs on the meta device, where tensors have shapes and no values, so that KernelBench's 250 problems take seconds and no
memory. This needs torch, and runs the references' code: in a process of its own (`python reference_graphs.py`, codes as
JSON on its standard input, answers as JSON on its standard output), each reference in a fork. One that calls more
operators than MOST_OPERATORS (a recurrent layer, step by step) is given up, so that no answer depends on how fast the
machine is; the time limit is for those that never end. What a reference does that depends on values, or that torch does
otherwise on a real device, is not seen.
"""

import json
import os
import signal
import subprocess
import sys
from typing import Any

SECONDS_EACH = 60
MOST_OPERATORS = 3000
SECONDS_TO_START = 120
WARM_UP = """
import torch

class Model(torch.nn.Module):
    def forward(self, x, weight):
        x = torch.nn.functional.conv2d(x, weight)
        return torch.softmax(torch.relu(x) @ x, -1).sum()

def get_inputs():
    return [torch.randn(1, 1, 4, 4), torch.randn(1, 1, 1, 1)]
"""


def trace(codes: list[str], interpreter: str = sys.executable) -> list[dict[str, Any]] | None:
    """For each code a dict with `operators`, `graph` and `rank` (of the input with the most dimensions), or with
    `problem`. Or None where there is no torch."""
    try:
        done = subprocess.run(
            [interpreter, __file__],
            input=json.dumps(codes),
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_TO_START + SECONDS_EACH * len(codes),
        )
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


class TooLong(Exception):
    """More operators than are recorded."""


def limited(trace_class: type) -> type:
    class Limited(trace_class):
        def __torch_dispatch__(self, *arguments: Any, **words: Any) -> Any:
            if len(self.operators) >= MOST_OPERATORS:
                raise TooLong(f"more than {MOST_OPERATORS} operators")
            return super().__torch_dispatch__(*arguments, **words)

    return Limited


def traced(code: str) -> dict[str, Any]:
    import torch

    import tensors
    from graph_trace import Trace

    with torch.device("meta"), torch.no_grad():
        names: dict[str, Any] = {"__name__": "reference"}
        exec(compile(code, "reference", "exec"), names)
        model = names["Model"](*names.get("get_init_inputs", list)()).eval()
        inputs = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in names["get_inputs"]()]
        with limited(Trace)(model, inputs) as recorded:
            # As ops/measure has it, whose trace ends with the outputs cut off from the graph of gradients.
            [output.detach() for output in tensors.flatten(model(*inputs))]
    ranks = [value.dim() for value in inputs if isinstance(value, torch.Tensor)]
    return {"operators": recorded.operators, "graph": recorded.digest(), "rank": max(ranks, default=0)}


def in_a_fork(code: str) -> dict[str, Any]:
    """Answer through a pipe, so that neither an endless loop nor a crash of a reference ends the others."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        signal.alarm(SECONDS_EACH)
        try:
            answer = traced(code)
        except BaseException as error:
            answer = {"problem": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]}
        with os.fdopen(sender, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as file:
        text = file.read()
    os.waitpid(child, 0)
    try:
        return json.loads(text)
    except ValueError:
        return {"problem": f"ended, or took longer than {SECONDS_EACH} s"}


def main() -> None:
    # What references print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    codes = json.load(sys.stdin)
    import torch

    torch.set_num_threads(1)
    # What torch imports at a first forward on the meta device is imported here, once, not in each fork.
    traced(WARM_UP)
    with answers:
        json.dump([in_a_fork(code) for code in codes], answers)


if __name__ == "__main__":
    main()
