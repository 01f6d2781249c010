"""Runs standalone sources where the library they came from can't be imported.

Reads candidates as JSON from standard input and writes one verdict for each to standard output. A candidate passes
with the first of its usages whose task file runs, gives finite outputs that are the same twice and in both modes, and
depends on each of its inputs.
"""

import json
import signal
import sys
import types


class Blocked:
    """Refuses the library and all that is inside it."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "huggingface_hub", "tokenizers", "safetensors"):
            raise ImportError(f"{name} must not be imported by a task")


sys.meta_path.insert(0, Blocked())

import torch  # noqa: E402  (the block must be there before anything else is imported)

import transformers_task as task  # noqa: E402

# Far above what any piece takes at these sizes, so that a busy machine keeps the same classes as an idle one.
SECONDS = 60
WIDTH, BATCH, TOKENS = 256, 2, 16
# A vocabulary or a table of positions would dwarf the work that the class is about.
MOST_WEIGHTS = 6_000_000


class Unfit(Exception):
    """Why a candidate does not pass."""


def judge(candidate):
    refusal = ("no recipe", "no way to call it")
    for index, variant in enumerate(candidate["variants"]):
        signal.alarm(SECONDS)
        try:
            return {"variant": index, "result": attempt(candidate, variant)}
        except Unfit as unfit:
            refusal = unfit.args
        except Exception as error:
            if index == 0:
                refusal = ("fails", f"{type(error).__name__}: {error}".splitlines()[0][:200])
        finally:
            signal.alarm(0)
    return {"variant": None, "reason": refusal[0], "detail": refusal[1]}


def attempt(candidate, variant):
    usage = variant["usage"] | {"result": None}
    header = task.header_lines({"qualified": usage["class"], "path": candidate["path"],
                                "version": candidate["version"]})
    sizes = task.sizes_at(usage, WIDTH)
    outcome, module = run(task.task_code(usage, variant["body"], header, sizes, BATCH, TOKENS))
    if isinstance(outcome, tuple):
        usage["result"] = first_tensor(outcome)
    namespace, module = load(task.task_code(usage, variant["body"], header, sizes, BATCH, TOKENS))
    check(namespace, module)
    weights = sum(p.numel() for p in module.parameters())
    if weights > MOST_WEIGHTS:
        raise Unfit("too large", f"{weights} parameters at width {WIDTH}")
    return usage["result"]


def load(code):
    namespace = {"__name__": "task"}
    exec(compile(code, "task.py", "exec"), namespace)
    torch.manual_seed(0)
    return namespace, namespace["Model"](*namespace["get_init_inputs"]())


def run(code):
    namespace, module = load(code)
    with torch.no_grad():
        return module(*namespace["get_inputs"]()), module


def first_tensor(outcome):
    for index, item in enumerate(outcome):
        if isinstance(item, torch.Tensor):
            return index
    raise Unfit("returns no tensor", "a tuple without tensors")


def check(namespace, module):
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
        if not torch.equal(out, module(*inputs)):
            raise Unfit("random", "two runs differ")
        if not torch.allclose(out, module.eval()(*inputs), rtol=1e-5, atol=1e-6):
            raise Unfit("mode-dependent", "training and evaluation mode differ")
        for index in range(len(inputs)):
            mixed = [*inputs[:index], others[index], *inputs[index + 1:]]
            if close(out, module(*mixed)):
                raise Unfit("insensitive", f"its output does not depend on input {index}")
        partial = [inputs[0].clone(), *inputs[1:]]
        partial[0][..., inputs[0].shape[1] // 2:, :] = others[0][..., inputs[0].shape[1] // 2:, :]
        if torch.equal(out, module(*partial)):
            raise Unfit("insensitive", "its output depends on a part of its input alone")
        if any(close(out, x) for x in inputs if x.shape == out.shape):
            raise Unfit("identity", "its output is its input")


def close(first, second):
    """Whether nearly all elements agree to the tolerance that verdicts use."""
    far = (first - second).abs() > 1e-2 + 1e-2 * second.abs()
    return float(far.float().mean()) < 0.2


def give_up(_signal, _frame):
    raise Unfit("too slow", f"took more than {SECONDS} s")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, give_up)
    torch.set_num_threads(1)
    verdicts = [judge(candidate) for candidate in json.load(sys.stdin)]
    assert isinstance(sys.modules.get("transformers"), (types.NoneType,))
    json.dump(verdicts, sys.stdout)
