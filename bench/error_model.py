"""What the error model costs: draws and judgements of a verdict with it and without it, side by side.

    python3 bench/error_model.py [--device cuda] [--verdicts 52.8]

For each task of the corpus in format `kernel`: five draws of inputs, each judged with both patterns of poison, on
answers that are eager's own. Without the model (`error_model.py`) an output is judged by multiples of eager's error,
which needs the same float64 forward. `--verdicts` is how many correct verdicts a second `bench/evaluator.py correct`
gave on that machine: then the last line is the model's share of one. Needs torch.
"""

import argparse
import statistics
import sys
import time
from typing import Any

from evaluator import ROOT, Corpus

sys.path[:0] = [str(ROOT / "stages/kernels/python"), str(ROOT / "stages/torch_runtime")]
TRIALS = 5


def verdict(worker: Any, first: int) -> float:
    """Draws and judgements of one verdict, in seconds."""
    chosen = worker._sets[0]
    spent = 0.0
    for trial in range(first, first + TRIALS):
        for pattern in (0, 1):
            started = time.perf_counter()
            worker.handle({"do": "draw", "set": 0, "trial": trial, "pattern": pattern, "again": pattern == 1})
            spent += time.perf_counter() - started
            with worker._sets.task.running():
                answers = worker._sets.task.forward(chosen.values)
            for slot, answer in zip(chosen.layout.written, answers, strict=True):
                slot.view(chosen.memory).copy_(answer)
            worker.device.synchronize()
            started = time.perf_counter()
            facts = worker.handle({"do": "judge", "set": 0})
            spent += time.perf_counter() - started
            assert not facts["red_zones"] and not facts["inputs_changed"], facts
    return spent


def measure(worker: Any, name: str, code: str, repeats: int) -> Any:
    request = {"code": code, "name": name, "policy": "strict", "seed": 0}
    worker.handle({"do": "begin", "task": request, "seed": "0123456789abcdef", "sets": 1})
    held = worker._sets.task
    model, times = (held.error_kinds, held.probe), {True: [], False: []}
    for repeat in range(repeats + 1):
        for is_there in (True, False) if repeat % 2 else (False, True):
            held.error_kinds, held.probe = model if is_there else (None, None)
            held.limits = None
            times[is_there].append(verdict(worker, repeat * TRIALS))
    held.error_kinds, held.probe = model
    return {is_there: statistics.median(seconds[1:]) * 1e3 for is_there, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--verdicts", type=float, help="correct verdicts a second on this machine")
    options = parser.parse_args()
    import device as devices
    from reference import Worker

    worker = Worker(devices.of("cuda:0" if options.device == "cuda" else "cpu"), None)
    worker.start_device()
    corpus = Corpus()
    row = corpus.small_row if options.device == "cpu" else corpus.row
    names = [name for name, task in corpus.tasks.items() if task["format"] == "kernel"]
    found = {name: measure(worker, name, row("right", name)["code"], options.repeats) for name in names}
    print("| five draws, ten judgements | with the model, ms | without, ms |\n|---|--:|--:|")
    for name, each in found.items():
        print(f"| {name} | {each[True]:.1f} | {each[False]:.1f} |")
    means = {is_there: statistics.mean(each[is_there] for each in found.values()) for is_there in (True, False)}
    extra = means[True] - means[False]
    print(f"| mean | {means[True]:.1f} | {means[False]:.1f} |")
    print(f"the model adds {extra:.1f} ms to a verdict, {extra / means[True]:.0%} of its draws and judgements")
    if options.verdicts:
        whole = 1e3 / options.verdicts
        print(f"{extra / whole:.0%} of a verdict's {whole:.1f} ms (bar 20 %)")
    worker.handle({"do": "end"})


if __name__ == "__main__":
    main()
