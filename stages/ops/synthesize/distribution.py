"""Shows how the operators of composed tasks are spread: `python distribution.py OPERATORS.jsonl [COUNT [RATES.jsonl]]`.

OPERATORS.jsonl is the table of `ops/crawl` as JSON lines. The tasks are those that the stage would make for a GPU.
"""

import argparse
import collections
import itertools
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python"), str(HERE.parent.parent / "protocol" / "python")]

import torch  # noqa: E402

import synthesize  # noqa: E402
from estimate import load  # noqa: E402
from plan import FAMILY_WEIGHTS  # noqa: E402
from schedule import PAPER_SHARES, usable_shares  # noqa: E402

DEFAULTS = {
    "seed": 1,
    "max_ops": 5,
    "shares": PAPER_SHARES,
    "families": FAMILY_WEIGHTS,
    "operators": [],
    "device": "cuda",
    "target_ms_min": 1.0,
    "target_ms_max": 100.0,
    "gflops": 0,
    "gbytes_per_s": 0,
    "max_bytes": 0,
    "guards": False,
}


def spread(rows: list[dict[str, Any]], weights: dict[str, float]) -> dict[str, Any]:
    """Figures over rows of `tasks`: shares of families against their weights, of operators and of pairs, bilinear."""
    torch_rows = [row for row in rows if row["data_source"] != "transformers"]
    families = collections.Counter(family for row in torch_rows for family in json.loads(row["families"]))
    operators, pairs = collections.Counter(), collections.Counter()
    for row in torch_rows:
        names = sorted(json.loads(row["ops"]))
        operators.update(set(names))
        pairs.update(set(itertools.combinations(names, 2)))
    total, all_weights = sum(families.values()), sum(weights[name] for name in families)
    return {
        "families": {name: (families[name] / total) / (weights[name] / all_weights) for name in sorted(families)},
        "operators": [(name, number / len(rows)) for name, number in operators.most_common()],
        "pairs": [(names, number / len(rows)) for names, number in pairs.most_common()],
        "bilinear": sum('ilinear"' in row["ops"].replace("rsample", "") for row in torch_rows) / len(rows),
    }


def input_bytes(row: dict[str, Any]) -> int:
    namespace, _ = load(row["code"], "meta")
    with torch.device("meta"):
        return sum(value.nbytes for value in namespace["get_inputs"]())


def deciles(values: Iterable[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, math.floor(len(ordered) * tenth / 10))] for tenth in range(11)]


class Console:
    """Stands in for the engine."""

    def __init__(self, params: dict[str, Any], processes: int) -> None:
        self.params, self.resources, self.stage = params, {"cpu": processes}, "composed"

    def log(self, message: str, level: str = "info") -> None:
        print(f"{level}: {message}")

    def progress(self, *_figures: Any) -> None:
        pass


def compose_tasks(
    operators: list[dict[str, Any]],
    params: dict[str, Any],
    rates: list[dict[str, Any]] | None = None,
    processes: int = 1,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`(rows, left_out)`, as the stage makes them."""
    synthesize.start_worker()
    synthesize.SYNTHESIZER = synthesize.Synthesizer(operators, params, rates)
    shares = usable_shares(params["shares"], params["max_ops"], any(o["library"] == "transformers" for o in operators))
    console: Any = Console(params, processes)
    return synthesize.Making(console, shares).run()


def lines_of(path: str) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("operators")
    arguments.add_argument("count", type=int, nargs="?", default=300)
    arguments.add_argument("rates", nargs="?")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--write", help="a file for the tasks as JSON lines")
    given = arguments.parse_args()
    operators = lines_of(given.operators)
    rates = given.rates and lines_of(given.rates)
    start = time.monotonic()
    rows, left_out = compose_tasks(operators, {**DEFAULTS, "count": given.count}, rates, given.processes)
    print(f"{len(rows)} tasks in {time.monotonic() - start:.1f} s, {len(left_out)} left out")
    found = spread(rows, FAMILY_WEIGHTS)
    print("families, share over weight:", {name: round(value, 2) for name, value in found["families"].items()})
    print(len(found["operators"]), "operators; most frequent:", [(n, round(s, 4)) for n, s in found["operators"][:12]])
    print("pairs, most frequent:", [(" ".join(n), round(s, 4)) for n, s in found["pairs"][:5]])
    print(f"bilinear layers in {found['bilinear']:.2%} of the tasks")
    print("estimate_ms:", [round(value, 2) for value in deciles([row["estimate_ms"] for row in rows])])
    print("batch_size:", deciles([row["batch_size"] for row in rows]))
    print("bytes of inputs, GB:", [round(value / 1e9, 2) for value in deciles([input_bytes(row) for row in rows])])
    if given.write:
        with open(given.write, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
