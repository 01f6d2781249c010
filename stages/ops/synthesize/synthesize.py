"""`ops/synthesize`: composes tasks from crawled operators. Task i depends on the parameters and i, never on the count."""

import json
import math
import multiprocessing
import random
import warnings

import torch

import cuda_agent_stage as stage
import transformers_task
from compose import TRIAL_BATCH, Unsuitable, compose, far_share, varies
from estimate import counted, device_of, milliseconds, operator_cost
from schedule import schedule, usable_shares
from task_file import task_code

NICE_BATCHES = sorted({base * 2**power for base in (1, 3, 5) for power in range(0, 18)})
ATTEMPTS = 60
WIDTHS, TOKENS = (256, 128, 384, 192, 512), (64, 128, 32, 96, 48, 80)


class Synthesizer:
    """Everything that a task is made from; the same in each worker process."""

    def __init__(self, operators, params):
        self.params, self.device = params, device_of(params)
        for row in operators:
            row["usages"] = json.loads(row["usages"])
        self.torch_rows = [row for row in operators if row["library"] == "torch"]
        self.transformers_rows = [row for row in operators if row["library"] == "transformers"]
        random.Random(f"{params['seed']}/transformers").shuffle(self.transformers_rows)

    def task(self, index, category, ordinal):
        rng = random.Random(f"{self.params['seed']}/{index}/{category}")
        if category == "transformers":
            made = self._transformers(rng, ordinal)
        else:
            made = self._composed(rng, int(category[-1]))
        if made is None:
            raise stage.StageError(
                f"no task of category {category} fits the limits (index {index})", kind="params",
                hint="widen target_ms_min and target_ms_max, or raise max_bytes",
            )
        operators, code, estimate, batch = made
        return {
            "task_id": f"{self.params['seed']}-{index:06d}", "index": index, "ops": json.dumps(operators),
            "data_source": category, "code": code, "estimate_ms": round(estimate, 4), "batch_size": batch,
        }

    # ---- torch

    def _composed(self, rng, length):
        for _ in range(ATTEMPTS):
            chain = compose(rng, self.torch_rows, length)
            sized = chain and self._size(rng, *self._chain_costs(chain))
            if not sized:
                continue
            batch, estimate = sized
            code = task_code(chain, batch)
            if passes(code):
                return [step.operator for step in chain.steps], code, estimate, batch
        return None

    def _chain_costs(self, chain):
        """Functions of the batch size: milliseconds and bytes alive."""
        def total(batch):
            return sum(
                milliseconds(self.device, *operator_cost(s.bound, s.in_shape, s.out_shape, s.weights, batch))
                for s in chain.steps
            )

        per_sample = sum(math.prod(step.in_shape[1:]) + math.prod(step.out_shape[1:]) for step in chain.steps)
        fixed = sum(step.weights for step in chain.steps)
        return total, lambda batch: 4 * (2 * per_sample * batch + fixed)

    def _size(self, rng, total, alive):
        """A batch size whose estimate is near a target from the middle of the range: `(batch, estimate)` or None."""
        low, high = self.params["target_ms_min"], self.params["target_ms_max"]
        middle, half = (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / 2
        target = middle + (rng.random() - 0.5) * half * 0.5
        fitting = [batch for batch in NICE_BATCHES if batch >= 2 and alive(batch) <= self.params["max_bytes"]]
        if not fitting:
            return None
        batch = min(fitting, key=lambda candidate: abs(math.log(total(candidate)) - target))
        estimate = total(batch)
        return (batch, estimate) if abs(math.log(estimate) - middle) <= half * 0.5 else None

    # ---- transformers

    def _transformers(self, rng, ordinal):
        """Classes in a shuffled order; each time round the list they come in another size."""
        count = len(self.transformers_rows)
        turn = ordinal // count
        # A class that fits no size gives way to one half the list away, so that it does not become its neighbour's twin.
        for row in (self.transformers_rows[(ordinal + away) % count] for away in (0, count // 2, count // 3, 1, 2, 3)):
            for size in range(3):
                width = WIDTHS[(turn + size) % len(WIDTHS)]
                tokens = TOKENS[(turn + turn // len(WIDTHS) + size) % len(TOKENS)]
                made = self._sized_transformers(rng, row, width, tokens)
                if made:
                    return made
        return None

    def _sized_transformers(self, rng, row, width, tokens):
        usage = row["usages"][0]
        sizes = transformers_task.sizes_at(usage, width)

        def code_for(batch):
            return transformers_task.task_code(
                usage, row["source"], transformers_task.header_lines(row), sizes, batch, tokens
            )

        try:
            total, alive = counted_costs(self.device, code_for(2))
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return None
        sized = self._size(rng, total, alive)
        if not sized:
            return None
        batch, estimate = sized
        code = code_for(batch)
        return ([row["operator"]], code, estimate, batch) if passes(code) else None


def counted_costs(device, code):
    """Functions of the batch size: milliseconds and bytes alive, from what a call moves at two batch sizes."""
    namespace, module = load(code, "meta")
    counts = []
    for batch in (2, 4):
        namespace["batch_size"] = batch
        with torch.device("meta"):
            counts.append(counted(module, namespace["get_inputs"]()))
    (flops, moved, operators), (more_flops, more_moved, _) = counts

    def total(batch):
        share = (batch - 2) / 2
        at = (flops + share * (more_flops - flops), moved + share * (more_moved - moved))
        # Whether a value stays in the cache depends on one operator's traffic, not on the sum.
        return operators * milliseconds(device, at[0] / operators, at[1] / operators, 0)

    return total, lambda batch: moved + (batch - 2) / 2 * (more_moved - moved)


def passes(code):
    """Whether the finished file makes its shapes on the meta device and behaves on a small batch."""
    try:
        return shapes_agree(code) and behaves(code)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, Unsuitable):
        return False


def load(code, device):
    namespace = {"__name__": "task"}
    with torch.device(device):
        exec(compile(code, "task.py", "exec"), namespace)
        torch.manual_seed(3)
        module = namespace["Model"](*namespace["get_init_inputs"]())
    return namespace, module


def shapes_agree(code):
    """The whole task on the meta device, at its full sizes."""
    namespace, module = load(code, "meta")
    with torch.device("meta"), torch.no_grad():
        inputs = namespace["get_inputs"]()
        out = module(*inputs)
    return out.shape[0] == inputs[0].shape[0] and out.dtype == torch.float32


def behaves(code):
    """The finished file on a small batch: finite, spread, and dependent on every input."""
    namespace, module = load(code, "cpu")
    namespace["batch_size"] = TRIAL_BATCH
    with torch.no_grad():
        inputs, others = namespace["get_inputs"](), namespace["get_inputs"]()
        out = module(*inputs)
        if not torch.isfinite(out).all() or not varies(out) or far_share(out, module(*others)) < 0.5:
            return False
        if not torch.equal(out, module(*inputs)):
            return False
        swapped = ([*inputs[:i], others[i], *inputs[i + 1:]] for i in range(len(inputs)))
        return all(far_share(out, module(*mixed)) > 0.2 for mixed in swapped)


WORKER = None


def start_worker(operators, params):
    global WORKER
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    WORKER = Synthesizer(operators, params)


def make(job):
    try:
        return WORKER.task(*job)
    except stage.StageError as error:
        return error.kind, error.message, error.hint


def work(program):
    params = program.params
    operators = program.read_table("operators", ["operator", "qualified", "library", "version", "family", "usages",
                                                 "source", "path"])
    libraries = {row["library"] for row in operators}
    shares = usable_shares(params["shares"], params["max_ops"] if "torch" in libraries else 0,
                           "transformers" in libraries)
    if not shares:
        raise stage.StageError("no category has a share", kind="params",
                               hint="`shares` and the libraries that were crawled must have a category in common")
    plan = schedule(shares, params["count"])
    jobs = [(index, category, ordinal) for index, (category, ordinal) in enumerate(plan)]
    rows = []
    for row in run_jobs(jobs, operators, params, program.resources["cpu"]):
        if isinstance(row, tuple):
            raise stage.StageError(row[1], kind=row[0], hint=row[2])
        rows.append(row)
        if len(rows) % 10 == 0 or len(rows) == len(jobs):
            program.progress(len(rows), len(jobs), "tasks")
    for category in shares:
        program.metric(f"tasks/{category}", sum(row["data_source"] == category for row in rows))
    program.write_table("tasks", rows)


def run_jobs(jobs, operators, params, processes):
    """The jobs' results in order, over as many processes as were granted."""
    if processes < 2 or len(jobs) < 8:
        start_worker(operators, params)
        yield from map(make, jobs)
        return
    # The parent has not run torch yet, so forking it is safe, and the children need not import it again.
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, start_worker, (operators, params)) as pool:
        yield from pool.imap(make, jobs, chunksize=4)


if __name__ == "__main__":
    stage.main(work)
