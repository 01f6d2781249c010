"""`ops/crawl`: the operators of the installed torch and transformers, each with how to construct and call it."""

import collections
import contextlib
import functools
import json
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from typing import Any

# Some configurations ask the hub for another model's, with half a minute of retries where there is no network; and what
# is crawled must not depend on what the hub says today.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

import cuda_agent_stage as stage
from torch_crawl import crawl_torch
from transformers_crawl import crawl_transformers


def work(program: stage.Program) -> None:
    torch.set_num_threads(1)
    # Deprecated names warn when they are probed; whoever uses them is told by torch.
    warnings.simplefilter("ignore")
    kept, left_out = [], []
    params, processes = program.params, program.resources["cpu"]
    with workers(processes, params["libraries"]) as run:
        if "torch" in params["libraries"]:
            rows, refused = crawl_torch(run)
            kept += [row | {"version": torch.__version__} for row in rows]
            left_out += refused
            program.progress(len(kept), unit="operators")
        if "transformers" in params["libraries"]:
            rows, refused = crawl_transformers(params["models"], params["max_transformers"], processes, run)
            kept += rows
            left_out += refused
    if not kept:
        raise stage.StageError("no operator was found", kind="params", hint="`libraries` names where to look")
    report(program, kept, left_out)
    program.write_table("operators", [table_row(row) for row in kept])
    program.write_table("left_out", left_out)


@contextlib.contextmanager
def workers(processes: int, libraries: list[str]) -> Iterator[Any]:
    """A function like `map` over as many processes as were granted; its results come in order."""
    if "transformers" in libraries:
        # Before forking, so that the processes need not import each what all configurations import. The library's
        # remarks on default values are of no use here.
        import transformers.models.llama.configuration_llama

        transformers.logging.set_verbosity_error()
    if processes < 2:
        yield map
        return
    # This process has not run torch yet, so forking it is safe.
    with multiprocessing.get_context("fork").Pool(processes, torch.set_num_threads, (1,)) as pool:
        yield functools.partial(pool.imap, chunksize=1)


def table_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "operator": row["operator"],
        "qualified": row["qualified"],
        "library": row["library"],
        "version": row["version"],
        "family": row["family"],
        "summary": row["summary"],
        "usages": json.dumps(row["usages"], sort_keys=True),
        "source": row.get("source"),
        "path": row.get("path"),
    }


def report(program: stage.Program, kept: list[dict[str, Any]], left_out: list[dict[str, str]]) -> None:
    """One line for each library, with the counts by reason; the counts are metrics too."""
    program.progress(len(kept), len(kept), "operators")
    for library in program.params["libraries"]:
        count = sum(row["library"] == library for row in kept)
        reasons = collections.Counter(row["reason"] for row in left_out if row["library"] == library)
        program.metric(f"kept/{library}", count)
        for reason, number in sorted(reasons.items()):
            program.metric(f"left_out/{library}/{reason.replace(' ', '_')}", number)
        listed = ", ".join(
            f"{number} {reason}" for reason, number in sorted(reasons.items(), key=lambda r: (-r[1], r[0]))
        )
        program.log(
            f"{count} operators of {library}; {reasons.total()} left out: {listed or 'none'}. "
            f"cuda-agent show {program.stage}.left_out lists them"
        )


if __name__ == "__main__":
    stage.main(work)
