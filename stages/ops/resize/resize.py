"""`ops/resize`: gives a written task the batch size at which a device takes long enough for it.

A language model does not know how fast a device is. What a call of its task computes and moves was counted when the
answer was checked (column `work`, at two batch sizes), so nothing of a task is run here: the batch size follows by
arithmetic, and another device needs no further call of the model.
"""

import ast
import json
import math
import random
from typing import TYPE_CHECKING, Any

import cuda_agent_stage as stage
from estimate import milliseconds, rates_of

if TYPE_CHECKING:
    from estimate import Device

BATCHES = sorted({base * 2**power for base in (1, 3, 5) for power in range(20)} - {1})
KEPT = (
    "task_id",
    "index",
    "ops",
    "families",
    "data_source",
    "origin",
    "attempts",
    "llm_prompt_tokens",
    "llm_completion_tokens",
    "llm_cost_usd",
)


class LeftOut(Exception):
    """No batch size suits the task. The reason is for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def at_batch(work: dict[str, list[float]], written: int, batch: int) -> dict[str, float]:
    """`work` at another batch size: a line through its values at the written one and at twice that."""
    share = (batch - written) / written
    return {name: max(0.0, low + share * (high - low)) for name, (low, high) in work.items()}


def estimate_ms(device: "Device", work: dict[str, float]) -> float:
    """Eager time. Whether a value stays in the cache depends on one operator's traffic, not on the sum."""
    operators = max(1.0, work["operators"])
    return operators * milliseconds(device, work["flops"] / operators, work["moved"] / operators, 0)


def choose_batch(
    rng: random.Random, device: "Device", work: dict[str, list[float]], written: int, params: dict[str, Any]
) -> tuple[int, float]:
    """`(batch, estimate)` near a target from the middle half of the range on a logarithmic scale. Raises LeftOut."""
    low, high = params["target_ms_min"], params["target_ms_max"]
    middle, half = (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / 2
    target = middle + (rng.random() - 0.5) * half
    most = params["max_bytes"] or device.task_bytes
    fitting = [batch for batch in BATCHES if at_batch(work, written, batch)["alive"] <= most]
    if not fitting:
        raise LeftOut("too large", f"more than {most:.3g} bytes at batch size {BATCHES[0]}")
    times = {batch: estimate_ms(device, at_batch(work, written, batch)) for batch in fitting}
    batch = min(fitting, key=lambda batch: abs(math.log(times[batch]) - target))
    if times[batch] < low:
        raise LeftOut(
            "too little work", f"{times[batch]:.3g} ms at batch size {batch}, and {most:.3g} bytes are the limit"
        )
    if times[batch] > high:
        raise LeftOut("too much work", f"{times[batch]:.3g} ms at batch size {batch}")
    return batch, times[batch]


def with_batch(code: str, batch: int) -> str:
    """The file with another value of its constant `batch_size`. Raises LeftOut."""
    for node in ast.parse(code).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        named = any(isinstance(target, ast.Name) and target.id == "batch_size" for target in targets)
        if named and isinstance(value, ast.Constant) and type(value.value) is int:
            lines = code.splitlines(keepends=True)
            # Columns of the syntax tree count bytes.
            line = lines[value.lineno - 1].encode()
            lines[value.lineno - 1] = (
                line[: value.col_offset] + str(batch).encode() + line[value.end_col_offset :]
            ).decode()
            return "".join(lines)
    raise LeftOut("no constant", "the file has no top-level constant batch_size")


def resized(row: dict[str, Any], device: "Device", params: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(row["task_id"])
    batch, estimate = choose_batch(rng, device, json.loads(row["work"]), row["batch_size"], params)
    return {
        **{name: row[name] for name in KEPT},
        "code": with_batch(row["code"], batch),
        "estimate_ms": round(estimate, 4),
        "batch_size": batch,
    }


def check_columns(row: dict[str, Any]) -> None:
    missing = [name for name in (*KEPT, "code", "batch_size", "work") if name not in row]
    if missing:
        raise stage.StageError(
            f"the tasks have no column {', '.join(missing)}",
            kind="input",
            hint="this kind takes the tasks of ops/generate; ops/synthesize sizes its own",
        )


def work(program: stage.Program) -> None:
    params = program.params
    if params["target_ms_min"] > params["target_ms_max"]:
        raise stage.StageError("target_ms_min is above target_ms_max", kind="params")
    rates = program.read_table("rates") if program.inputs.get("rates") else None
    device = rates_of(params, rates).device
    tasks, left_out = [], []
    for row in program.read_table("tasks"):
        check_columns(row)
        try:
            tasks.append(resized(row, device, params))
        except LeftOut as why:
            left_out.append(
                {
                    "task_id": row["task_id"],
                    "data_source": row["data_source"],
                    "reason": why.reason,
                    "detail": why.detail,
                }
            )
    program.metric("resize/tasks", len(tasks))
    program.metric("resize/left_out", len(left_out))
    program.write_table("tasks", tasks)
    program.write_table("left_out", left_out)


if __name__ == "__main__":
    stage.main(work)
