"""`ops/crawl`: the operators of the installed torch and transformers, each with how to construct and call it."""

import collections
import json
import warnings

import torch

import cuda_agent_stage as stage
from torch_crawl import crawl_torch
from transformers_crawl import crawl_transformers


def work(program):
    torch.set_num_threads(1)
    # Deprecated names warn when they are probed; whoever uses them is told by torch.
    warnings.simplefilter("ignore")
    kept, left_out = [], []
    if "torch" in program.params["libraries"]:
        rows, refused = crawl_torch()
        kept += [row | {"version": torch.__version__} for row in rows]
        left_out += refused
        program.progress(len(kept), unit="operators")
    if "transformers" in program.params["libraries"]:
        rows, refused = crawl_transformers(program.params["models"], program.params["max_transformers"])
        kept += rows
        left_out += refused
    if not kept:
        raise stage.StageError("no operator was found", kind="params", hint="`libraries` names where to look")
    report(program, kept, left_out)
    program.write_table("operators", [table_row(row) for row in kept])
    program.write_table("left_out", left_out)


def table_row(row):
    return {
        "operator": row["operator"], "qualified": row["qualified"], "library": row["library"],
        "version": row["version"], "family": row["family"], "summary": row["summary"],
        "usages": json.dumps(row["usages"], sort_keys=True), "source": row.get("source"), "path": row.get("path"),
    }


def report(program, kept, left_out):
    """A line for each library; how often each reason occurs is for those who ask for details."""
    program.progress(len(kept), len(kept), "operators")
    reasons = collections.Counter((row["library"], row["reason"]) for row in left_out)
    for library in program.params["libraries"]:
        count = sum(row["library"] == library for row in kept)
        refused = sum(number for (of, _), number in reasons.items() if of == library)
        program.metric(f"kept/{library}", count)
        program.log(f"{count} operators of {library}, {refused} left out; "
                    f"cuda-agent show {program.stage}.left_out lists them")
    for (library, reason), number in sorted(reasons.items()):
        program.log(f"left out of {library}: {number} {reason}", level="debug")


if __name__ == "__main__":
    stage.main(work)
