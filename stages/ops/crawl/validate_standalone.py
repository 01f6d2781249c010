"""Runs standalone sources where the library they came from can't be imported.

Reads candidates from standard input, one JSON document a line, and writes one verdict for each to standard output. A
candidate passes with the first of its usages whose task file runs, gives finite outputs that are the same twice and in
both modes, depends on each of its inputs, and has the same shapes on the meta device.
"""

import json
import re
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any


class Blocked:
    """Refuses the library and all that is inside it."""

    def find_spec(self, name: str, path: list[str] | None = None, target: Any = None) -> None:
        if name.split(".")[0] in ("transformers", "huggingface_hub", "tokenizers", "safetensors"):
            raise ImportError(f"{name} must not be imported by a task")


sys.meta_path.insert(0, Blocked())  # pyright: ignore[reportArgumentType] (all that is called is there)

import torch  # noqa: E402  (the block must be there before anything else is imported)

import transformers_task as task  # noqa: E402

# Far above what any piece takes at these sizes, so that a busy machine keeps the same classes as an idle one.
SECONDS = 60
MEMORY = 6 << 30
WIDTH, OTHER_WIDTHS, BATCH, TOKENS = 256, (128, 512), 2, 16
# A vocabulary or a table of positions would dwarf the work that the class is about.
MOST_WEIGHTS = 6_000_000
MOST_CORRECTIONS = 3
VALUES_NEEDED = re.compile(r"meta tensor|on meta|unimplemented|data-dependent|register_meta")


class Unfit(Exception):
    """Why a candidate does not pass."""


def judge(candidate: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one candidate: the first usage that passes, or why the most promising one did not."""
    refusal = None
    signal.alarm(SECONDS)
    try:
        for usage in candidate["usages"]:
            try:
                return {"usage": corrected(candidate, usage)}
            except Unfit as unfit:
                # A call that ran says more than one that did not.
                if refusal is None or refusal[0] == "fails":
                    refusal = unfit.args
    except TooSlow:
        refusal = ("too slow", f"took more than {SECONDS} s")
    finally:
        signal.alarm(0)
    refusal = refusal or ("no recipe", "no way to call it")
    return {"usage": None, "reason": refusal[0], "detail": refusal[1]}


class TooSlow(BaseException):
    """Raised by the alarm; no handler of ordinary exceptions takes it."""


def corrected(candidate: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    """The usage that passes, after setting extents of the inputs that torch's messages ask for; raises Unfit."""
    for _ in range(MOST_CORRECTIONS + 1):
        try:
            return attempt(candidate, usage)
        except Unfit:
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            better = next(iter(corrections(candidate, usage, str(error))), None)
            if better is None:
                raise Unfit("fails", message) from error
            usage = better
    raise Unfit("fails", message)


def corrections(candidate: dict[str, Any], usage: dict[str, Any], message: str) -> Iterator[dict[str, Any]]:
    """Usages with another extent, where the message names the one that was expected."""
    found = expected_extent(usage, message)
    if found is None:
        return
    axis, value = found
    name = "in_channels" if axis == 1 else "in_features"
    if name in usage["sizes"]:
        name = f"input_{name[3:]}"
    for size in ({"kind": "free", "ratio": value / WIDTH}, {"kind": "given", "base": value}):
        shape = list(usage["inputs"][0]["shape"])
        shape[axis] = name
        inputs = [{**usage["inputs"][0], "shape": shape}, *usage["inputs"][1:]]
        extents = {extent for item in inputs for extent in item["shape"]}
        kept = {key: value for key, value in usage["sizes"].items() if value["kind"] != "free" or key in extents}
        changed = {**usage, "inputs": inputs, "sizes": {**kept, name: size}}
        if size["kind"] == "given" or fits_other_width(candidate, changed):
            yield changed


def expected_extent(usage: dict[str, Any], message: str) -> tuple[int, int] | None:
    """`(axis, extent)` of the stream that an error message asks for, or None."""
    rank = len(usage["inputs"][0]["shape"])
    match = re.search(r"expected input\[[\d, ]+\] to have (\d+) channels", message)
    if match and rank >= 3:
        return 1, int(match.group(1))
    match = re.search(r"same reduction dim, but got \[\d+, \d+\] X \[(\d+), \d+\]", message)
    if match:
        return rank - 1, int(match.group(1))
    match = re.search(r"normalized_shape=\[(\d+)\]", message)
    return (rank - 1, int(match.group(1))) if match else None


def fits_other_width(candidate: dict[str, Any], usage: dict[str, Any]) -> bool:
    """Whether the message that asked for an extent is gone at another width too, so that the extent scales."""
    try:
        run(code_of(candidate, usage, OTHER_WIDTHS[0]), "meta")
    except Exception as error:
        return expected_extent(usage, str(error)) is None
    return True


def attempt(candidate: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    usage = usage | {"result": None}
    outcome = shadow(code_of(candidate, usage, WIDTH))
    if isinstance(outcome, (tuple, list)):
        usage["result"] = first_tensor(outcome)
    elif not isinstance(outcome, torch.Tensor):
        raise Unfit("returns no tensor", f"returns {type(outcome).__name__}")
    namespace, module = load(code_of(candidate, usage, WIDTH))
    weights = sum(tensor.numel() for tensor in [*module.parameters(), *module.buffers()])
    if weights > MOST_WEIGHTS:
        raise Unfit("too large", f"{weights} parameters at width {WIDTH}")
    check(namespace, module)
    return usage if all(fits(candidate, usage, width) for width in OTHER_WIDTHS) else fixed(usage)


def fits(candidate: dict[str, Any], usage: dict[str, Any], width: int) -> bool:
    try:
        run(code_of(candidate, usage, width), "meta")
    except Exception:
        return False
    return True


def fixed(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage with its sizes as they are at the width where it runs, for a class whose sizes hang together."""
    values = task.sizes_at(usage, WIDTH)
    return {**usage, "sizes": {name: {"kind": "given", "base": value} for name, value in values.items()}}


def shadow(code: str) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """What a task returns on the meta device, which costs little where a call doesn't fit.

    Tasks are sized there, so what needs values to know its shapes is no use.
    """
    try:
        return run(code, "meta")
    except Exception as error:
        if VALUES_NEEDED.search(f"{type(error).__name__}: {error}"):
            raise Unfit("data-dependent", f"not on the meta device: {error}".splitlines()[0][:200]) from error
        if "Invalid channel dimensions" in str(error):
            # The CPU says which number of channels it wants.
            return run(code)
        raise


def code_of(candidate: dict[str, Any], usage: dict[str, Any], width: int) -> str:
    header = task.header_lines(
        {"qualified": usage["class"], "path": candidate["path"], "version": candidate["version"]}
    )
    return task.task_code(usage, candidate["body"], header, task.sizes_at(usage, width), BATCH, TOKENS)


def load(code: str) -> tuple[dict[str, Any], Any]:
    namespace: dict[str, Any] = {"__name__": "task"}
    exec(compile(code, "task.py", "exec"), namespace)
    torch.manual_seed(0)
    return namespace, namespace["Model"](*namespace["get_init_inputs"]())


def run(code: str, device: str = "cpu") -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    with torch.device(device), torch.no_grad():
        namespace, module = load(code)
        return module(*namespace["get_inputs"]())


def first_tensor(outcome: tuple[torch.Tensor | None, ...]) -> int:
    for index, item in enumerate(outcome):
        if isinstance(item, torch.Tensor):
            return index
    raise Unfit("returns no tensor", "a tuple without tensors")


def check(namespace: dict[str, Any], module: Any) -> None:
    with torch.no_grad():
        torch.manual_seed(1)
        inputs, others = namespace["get_inputs"](), namespace["get_inputs"]()
        out = module(*inputs)
        if not isinstance(out, torch.Tensor) or out.dtype != torch.float32:
            raise Unfit("returns no tensor", f"returns {type(out).__name__}")
        if not torch.isfinite(out).all():
            raise Unfit("not finite", "its output is not finite")
        if out.shape[0] != BATCH:
            raise Unfit("mixes the batch", f"returns {tuple(out.shape)}")
        if any(out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in inputs):
            raise Unfit("view", "its output is a view of its input")
        if not torch.equal(out, module(*inputs)):
            raise Unfit("random", "two runs differ")
        if not torch.allclose(out, module.eval()(*inputs), rtol=1e-5, atol=1e-6):
            raise Unfit("mode-dependent", "training and evaluation mode differ")
        for index in range(len(inputs)):
            mixed = [*inputs[:index], others[index], *inputs[index + 1 :]]
            if close(out, module(*mixed)):
                raise Unfit("insensitive", f"its output does not depend on input {index}")
        for axis in {1, inputs[0].dim() - 1}:
            if torch.equal(out, module(half_replaced(inputs[0], others[0], axis), *inputs[1:])):
                raise Unfit("insensitive", "its output depends on a part of its input alone")
        if any(close(out, x) for x in inputs if x.shape == out.shape):
            raise Unfit("identity", "its output is its input")


def half_replaced(values: torch.Tensor, others: torch.Tensor, axis: int) -> torch.Tensor:
    """The values with the second half of an axis from others."""
    half = values.shape[axis] // 2
    return torch.cat([values.narrow(axis, 0, half), others.narrow(axis, half, values.shape[axis] - half)], axis)


def close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether nearly all elements agree to the tolerance that verdicts use."""
    far = (first - second).abs() > 1e-2 + 1e-2 * second.abs()
    return float(far.float().mean()) < 0.2


def give_up(_signal: Any, _frame: Any) -> None:
    raise TooSlow


def main() -> None:
    """Answer each line of standard input with a line; what a class prints goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    signal.signal(signal.SIGALRM, give_up)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        verdict = judge(json.loads(line))
        assert "transformers" not in sys.modules
        answers.write(json.dumps(verdict) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
