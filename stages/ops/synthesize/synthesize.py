"""`ops/synthesize`: composes tasks from crawled operators. Task i depends on the parameters and i, never on the
count."""

import collections
import itertools
import json
import math
import multiprocessing
import random
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import cuda_agent_stage as stage
import transformers_task
from compose import SIZES, Misfit, compose
from degenerate import fault
from estimate import counted_by_batch, load, rates_of
from members import member_of
from plan import FAMILY_WEIGHTS, Planner, orders, start_ranks
from schedule import schedule, usable_shares
from sizing import Window, batch_for, chain_milliseconds, most_batch
from task_file import task_code

if TYPE_CHECKING:
    from compose import Chain
    from plan import Member

ATTEMPTS_PER_OPERATOR = 25
# How many attempts an operator has before another one of its family takes its place.
PATIENCE = 3
WIDTHS = {"cpu": (256, 128, 384, 192, 512), "cuda": (512, 256, 768, 384, 1024)}
TOKENS = {"cpu": (64, 128, 32, 96, 48, 80), "cuda": (128, 256, 64, 192, 96, 384)}
# How many classes of transformers are tried for one task, and at how many sizes each.
CLASSES, CLASS_SIZES = 8, 3
# A category with this many failures in a row is not tried again.
HOPELESS = 30


class NoTask(Exception):
    """No task could be made for an index; `reason` is of few words, for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class Made(NamedTuple):
    """A task before it has its place in the table."""

    operators: list[str]
    families: list[str]
    code: str
    estimate_ms: float
    batch: int


class Synthesizer:
    """Everything that a task is made from; the same in each worker process."""

    def __init__(
        self, operators: list[dict[str, Any]], params: dict[str, Any], rates: list[dict[str, Any]] | None = None
    ) -> None:
        self.params, self.rates = params, rates_of(params, rates)
        self.window = Window(params)
        self.most_bytes = params["max_bytes"] or self.rates.device.task_bytes
        rows = [{**row, "usages": json.loads(row["usages"])} for row in operators]
        self.rows = {row["operator"]: row for row in rows if row["library"] == "torch"}
        only = set(params["operators"])
        members = {name: member_of(row) for name, row in self.rows.items() if not only or name in only}
        self.members = {name: member for name, member in members.items() if member.ranks}
        self.planner = Planner(self.members.values(), params["families"], params["seed"])
        self.classes = [row for row in rows if row["library"] == "transformers"]
        random.Random(f"{params['seed']}/transformers").shuffle(self.classes)

    def job(self, index: int, category: str, ordinal: int) -> tuple[int, str, int, list[str] | None]:
        """What `task` needs to make a task, with the planned operators."""
        planned = None if category == "transformers" else self.planner.operators(int(category[-1]), ordinal)
        return index, category, ordinal, planned

    def task(self, index: int, category: str, ordinal: int, planned: list[str] | None) -> dict[str, Any]:
        """The row of a task; raises NoTask."""
        rng = random.Random(f"{self.params['seed']}/{index}/{category}")
        made = self._composed(rng, planned) if planned is not None else self._transformers(rng, ordinal)
        return {
            "task_id": f"{self.params['seed']}-{index:06d}",
            "index": index,
            "ops": json.dumps(made.operators),
            "families": json.dumps(made.families),
            "data_source": category,
            "code": made.code,
            "estimate_ms": round(made.estimate_ms, 4),
            "batch_size": made.batch,
            "origin": "composer",
        }

    # ---- torch

    def _composed(self, rng: random.Random, planned: list[str]) -> Made:
        """The planned operators in one of the orders that work; what can't be had gives way to one of its family."""
        names, refused, spent, reason = list(planned), collections.Counter(), set(), ""
        for _ in range(ATTEMPTS_PER_OPERATOR * (1 + len(names))):
            order = self._order(rng, names)
            if order is None:
                self._replace(rng, names, rng.randrange(len(names)), spent)
                continue
            try:
                return self._attempt(rng, order)
            except Misfit as misfit:
                name = order[misfit.position].operator
                reason = f"{name}: {misfit.reason}"
                refused[name] += 1
                if refused[name] >= PATIENCE:
                    spent.add(name)
                    self._replace(rng, names, names.index(name), spent)
                    refused.clear()
        raise NoTask("no operators fit", f"{', '.join(planned)}; last: {reason}"[:300])

    def _order(self, rng: random.Random, names: list[str]) -> "list[Member] | None":
        found = list(itertools.islice(orders([self.members[name] for name in names]), 24))
        return rng.choice(found) if found else None

    def _replace(self, rng: random.Random, names: list[str], place: int, spent: set[str]) -> None:
        """Another operator of the same family that was not found wanting here, one with which there is an order if that
        is to be had. A family that has no other gets another chance beside another operator."""
        if not self._others(names, place, spent):
            spent -= {member.operator for member in self.planner.by_family[self.members[names[place]].family]}
            place = rng.choice([other for other in range(len(names)) if other != place] or [place])
        others = self._others(names, place, spent)
        rng.shuffle(others)
        for chosen in others:
            if self._order(rng, [*names[:place], chosen, *names[place + 1 :]]):
                break
        else:
            chosen = others[0] if others else names[place]
        names[place] = chosen

    def _others(self, names: list[str], place: int, spent: set[str]) -> list[str]:
        family = self.planner.by_family[self.members[names[place]].family]
        return [member.operator for member in family if member.operator not in {*names, *spent}]

    def _attempt(self, rng: random.Random, order: "list[Member]") -> Made:
        """One attempt to make a task of operators in an order; raises Misfit."""
        chain = compose(rng, [self.rows[m.operator] for m in order], start_ranks(order), self.params["device"])
        sized = batch_for(
            self.window.target(rng, [m.family for m in order]),
            self.window,
            chain_milliseconds(self.rates, chain),
            most_batch(chain, self.most_bytes),
        )
        if isinstance(sized, str):
            raise Misfit(rng.randrange(len(order)), sized)
        batch, estimate = sized
        code = task_code(chain, batch)
        wrong = defect(code, self.params["guards"])
        if wrong:
            raise Misfit(culprit(rng, chain, wrong), wrong)
        return Made([m.operator for m in order], [m.family for m in order], code, estimate, batch)

    # ---- transformers

    def _transformers(self, rng: random.Random, ordinal: int) -> Made:
        """Classes in a shuffled order; each time round the list they come in another size. A class that fits no size
        gives way to one some way along the list, at a size of its own, so that it does not become its neighbour's
        twin."""
        count = len(self.classes)
        turn = ordinal // count
        reasons = collections.Counter()
        step = max(1, count // CLASSES)
        for attempt in range(CLASSES):
            row = self.classes[(ordinal + attempt * step) % count]
            for size in range(CLASS_SIZES):
                at = turn + size + attempt
                made = self._sized_class(rng, row, at)
                if not isinstance(made, str):
                    return made
                reasons[made] += 1
        raise NoTask("no class fits", ", ".join(f"{reason} {number}" for reason, number in sorted(reasons.items())))

    def _sized_class(self, rng: random.Random, row: dict[str, Any], at: int) -> str | Made:
        """A class at one of its sizes, or the reason why not."""
        widths, tokens = WIDTHS[self.params["device"]], TOKENS[self.params["device"]]
        usage = row["usages"][0]
        sizes = transformers_task.sizes_at(usage, widths[at % len(widths)])
        length = tokens[(at + at // len(widths)) % len(tokens)]

        def code_for(batch: int):
            return transformers_task.task_code(
                usage, row["source"], transformers_task.header_lines(row), sizes, batch, length
            )

        try:
            count_at = counted_by_batch(code_for(2))
        except Exception:  # the class is of a library, and may fail in any way at a size that was not tried before
            return "fails"
        sized = batch_for(
            self.window.target(rng),
            self.window,
            self._class_milliseconds(row, count_at),
            most_class_batch(count_at, self.most_bytes),
        )
        if isinstance(sized, str):
            return sized
        batch, estimate = sized
        code = code_for(batch)
        return defect(code, self.params["guards"]) or Made([row["operator"]], ["transformers"], code, estimate, batch)

    def _class_milliseconds(self, row: dict[str, Any], count_at: Callable[..., Any]) -> Callable[..., Any]:
        def total(batch: int):
            count = count_at(batch)
            return self.rates.whole_module(row["operator"], count.operators, count.flops, count.moved)

        return total


def culprit(rng: random.Random, chain: "Chain", wrong: str) -> int:
    """The position of the operator that a defect lies in: the one whose weight it names, or any."""
    weight = re.match(r"the weight (\w+)", wrong)
    owners = [
        place
        for place, step in enumerate(chain.steps)
        if weight and any(line.startswith(f"self.{weight[1]} =") for line in step.init)
    ]
    return owners[0] if owners else rng.randrange(len(chain.steps))


def most_class_batch(count_at: Callable[..., Any], limit_bytes: float) -> float:
    """The largest batch of a class whose tensors fit; they grow with it on a line."""
    per_sample = (count_at(4).alive - count_at(2).alive) / 2
    return 2 + (limit_bytes - count_at(2).alive) / per_sample if per_sample > 0 else 2


def defect(code: str, guards: bool) -> str | None:
    """What is wrong with a finished file, or None: its values on a small batch, its shapes on the meta device."""
    try:
        return fault(code, guards) or shape_fault(code)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def shape_fault(code: str) -> str | None:
    """The whole task on the meta device, at its full sizes."""
    namespace, module = load(code, "meta")
    with torch.device("meta"), torch.no_grad():
        inputs = namespace["get_inputs"]()
        out = module(*inputs)
    good = out.shape[0] == inputs[0].shape[0] and out.dtype == torch.float32
    return None if good else "its output has no batch"


# ---- the program

SYNTHESIZER = None


def start_worker() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def make(job: tuple[int, str, int, list[str] | None]) -> dict[str, Any]:
    """A row of `tasks`, or of `left_out`."""
    try:
        return SYNTHESIZER.task(*job)
    except NoTask as error:
        return {"index": job[0], "data_source": job[1], "reason": error.reason, "detail": error.detail}
    except Exception as error:  # hundreds of operators at sizes never tried before: one that fails costs its own index
        detail = f"{type(error).__name__}: {error}, planned: {', '.join(job[3] or [])}"
        return {"index": job[0], "data_source": job[1], "reason": "fails", "detail": detail[:300]}


def check(params: dict[str, Any], libraries: set[str]) -> dict[str, float]:
    """The shares of categories that can be made; an error where parameters can't be met."""
    shares = usable_shares(
        params["shares"], params["max_ops"] if "torch" in libraries else 0, "transformers" in libraries
    )
    if not shares:
        raise stage.StageError(
            "no category has a share",
            kind="params",
            hint="`shares` and the libraries that were crawled must have a category in common",
        )
    if params["target_ms_min"] >= params["target_ms_max"]:
        raise stage.StageError("target_ms_min is not below target_ms_max", kind="params")
    if params["device"] not in SIZES:
        raise stage.StageError(f"there are no sizes for {params['device']}", kind="params")
    unknown = set(params["families"]) - set(FAMILY_WEIGHTS)
    negative = [name for name, weight in params["families"].items() if not weight >= 0]
    if unknown or negative:
        raise stage.StageError(
            f"families: {', '.join(sorted(unknown or negative))}",
            kind="params",
            hint=f"weights from 0 for {', '.join(FAMILY_WEIGHTS)}",
        )
    return shares


def work(program: stage.Program) -> None:
    global SYNTHESIZER  # noqa: PLW0603 (the forks of the pool find it there)
    start_worker()
    params = program.params
    operators = program.read_table(
        "operators", ["operator", "qualified", "library", "version", "family", "usages", "source", "path"]
    )
    shares = check(params, {row["library"] for row in operators})
    rates = (
        program.read_table("rates", ["kind", "name", "usage", "rank", "value"]) if program.inputs.get("rates") else None
    )
    missing = sorted(set(params["operators"]) - {row["operator"] for row in operators if row["library"] == "torch"})
    if missing:
        raise stage.StageError(
            f"operators: {', '.join(missing)} not among the crawled ones of torch",
            kind="params",
            hint="names are those of the column `operator`: `cuda-agent show seeds.operators`",
        )
    SYNTHESIZER = Synthesizer(operators, params, rates)
    if shares.keys() - {"transformers"} and not SYNTHESIZER.planner.weights:
        raise stage.StageError(
            "no family with a weight has an operator",
            kind="params",
            hint="`families` has the weights, and `operators` what may be taken of them",
        )
    rows, left_out = Making(program, shares).run()
    for category in shares:
        program.metric(f"tasks/{category}", sum(row["data_source"] == category for row in rows))
    program.metric("left_out", len(left_out))
    program.write_table("tasks", rows)
    program.write_table("left_out", left_out)


class Making:
    """Goes through the indices in order until there are as many tasks as asked for; what can't be made is left out."""

    def __init__(self, program: stage.Program, shares: dict[str, float]) -> None:
        self.program, self.shares, self.count = program, shares, program.params["count"]
        self.rows, self.left_out = [], []
        self.failures = dict.fromkeys(shares, 0)  # in a row

    def run(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        most = math.ceil(self.count * 1.5) + 100
        plan = schedule(self.shares, most)
        at = 0
        with pool_of(self.program.resources["cpu"], self.count) as pool_map:
            while len(self.rows) < self.count and at < most:
                wave = list(range(at, min(most, at + self.count - len(self.rows))))
                self._wave(pool_map, plan, wave)
                at = wave[-1] + 1
        self._report(at)
        return self.rows, self.left_out

    def _wave(self, pool_map: Callable[..., Any] | type, plan: list[tuple[str, int]], indices: list[int]) -> None:
        """The tasks of some indices. A category that became hopeless is left out without another try."""
        hopeless = {category for category, failures in self.failures.items() if failures >= HOPELESS}
        jobs = [SYNTHESIZER.job(index, *plan[index]) for index in indices if plan[index][0] not in hopeless]
        results = iter(pool_map(make, jobs))
        for index in indices:
            category = plan[index][0]
            self._take({"index": index, "data_source": category} if category in hopeless else next(results))

    def _take(self, result: dict[str, Any]) -> None:
        category = result["data_source"]
        if self.failures[category] >= HOPELESS:
            result = {
                "index": result["index"],
                "data_source": category,
                "reason": "exhausted",
                "detail": f"{HOPELESS} tasks in a row could not be made",
            }
        if "reason" in result:
            self.failures[category] += 1
            self._warn(result)
            self.left_out.append(result)
            return
        self.failures[category] = 0
        self.rows.append(result)
        if len(self.rows) % 20 == 0 or len(self.rows) == self.count:
            self.program.progress(len(self.rows), self.count, "tasks")

    def _warn(self, result: dict[str, Any]) -> None:
        """Say so when the first task of a category can't be made, and when it is given up."""
        category = result["data_source"]
        if not any(row["data_source"] == category for row in self.left_out):
            self.program.log(
                f"no task for index {result['index']} ({category}): {result['reason']}, {result['detail']}; "
                "the next index takes its place",
                level="warning",
            )
        elif self.failures[category] == HOPELESS:
            self.program.log(
                f"{category}: {HOPELESS} tasks in a row could not be made; it is given up", level="warning"
            )

    def _report(self, tried: int) -> None:
        if self.left_out:
            counts = collections.Counter((row["data_source"], row["reason"]) for row in self.left_out)
            reasons = ", ".join(
                f"{number} {category} ({reason})" for (category, reason), number in sorted(counts.items())
            )
            self.program.log(
                f"{len(self.rows)} tasks from {tried} indices; left out: {reasons}; "
                f"cuda-agent show {self.program.stage}.left_out lists them"
            )
        if not self.rows:
            raise stage.StageError(
                f"no task fits the limits; the first: {self.left_out[0]['detail']}",
                kind="params",
                hint="widen target_ms_min and target_ms_max, or raise max_bytes",
            )
        if len(self.rows) < self.count:
            self.program.log(f"only {len(self.rows)} of {self.count} tasks could be made", level="warning")


class pool_of:  # noqa: N801 (used as a function)
    """A `map` over as many processes as were granted, results in order."""

    def __init__(self, processes: int, jobs: int) -> None:
        self.processes, self.pool = min(processes, math.ceil(jobs / 8)), None

    def __enter__(self) -> Callable[..., Any] | type:
        if self.processes < 2:
            return map
        # The parent has run torch on one thread alone, so forking it is safe. What the meta device imports when it is
        # first used is imported here, once for all.
        torch.empty(2, device="meta").mul(2.0)
        self.pool = multiprocessing.get_context("fork").Pool(self.processes, start_worker)
        return lambda function, jobs: self.pool.imap(function, jobs, chunksize=2)

    def __exit__(self, *_error: Any) -> None:
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()


if __name__ == "__main__":
    stage.main(work)
