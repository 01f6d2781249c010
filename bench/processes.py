"""Training on several GPUs beside one: the same losses, and tokens a second. `make bench-processes` on a machine with
two GPUs.

    python3 bench/processes.py --binary target/release/cuda-agent-train [--processes 2] [--size 0.5b]
        [--updates 12] [--cpu]

Runs the stage train/rft on made-up episodes (prompts with four answers each), once by one process and once by several,
in float32 and in bfloat16, and compares every update's loss. Weights are random: neither speed nor agreement depends on
what they are. With --cpu a tiny model shows that the script works. Exit status 1 where losses are further apart than
the bar.

Needs torch, transformers, pyarrow and the GPUs.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import training
from sections import report, run

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The largest difference of an update's loss from that of one process, relative to it. float32 is a matter of the order
# of additions; in bfloat16 a row is rounded by what it shares a product with.
BARS = {"fp32": 1e-4, "bf16": 2e-2}
SPEED_UP = 1.7
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny_model(folder: pathlib.Path) -> pathlib.Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=1000, max_position_embeddings=2048, tie_word_embeddings=True, **TINY)
    ).save_pretrained(folder)
    return folder


def episodes(path: str | pathlib.Path, tasks: Any, prompt_tokens: Any, answer_tokens: Any, vocabulary: Any) -> int:
    """A table of trajectories in the columns of agent/rollout; answers have from half to all of `answer_tokens`."""
    import pyarrow
    import pyarrow.parquet

    draw = random.Random(7)
    rows = []
    for task in range(tasks):
        prompt = [draw.randrange(vocabulary) for _ in range(prompt_tokens)]
        for sample in range(4):
            answer = [draw.randrange(vocabulary) for _ in range(draw.randint(answer_tokens // 2, answer_tokens))]
            ids, start = prompt + answer, len(prompt)
            turn = {
                "source": None,
                "outcome": None,
                "message": None,
                "speedup_eager": None,
                "speedup_compile": None,
                "tool": None,
                "arguments": None,
            }
            rows.append(
                {
                    "code": f"task {task}",
                    "task_digest": f"{task:064x}",
                    "sample": sample,
                    "form": "single",
                    "messages": json.dumps(
                        [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{task} {sample}"}]
                    ),
                    "token_ids": ids,
                    "mask": [False] * start + [True] * len(answer),
                    "log_probs": [None] * start + [-1.0] * len(answer),
                    "turns": [
                        {"role": "user", "start": 0, "end": start, "text": "?", "reward": None} | turn,
                        {
                            "role": "assistant",
                            "start": start,
                            "end": len(ids),
                            "text": f"{task} {sample}",
                            "reward": 1.0,
                        }
                        | turn,
                    ],
                    "reward": 1.0,
                    "reward_at": len(ids) - 1,
                    "finish_reason": "complete",
                    "policy_digest": None,
                    "policy_model": "none",
                    "prompt_digest": "none",
                    "temperature": 1.0,
                    "sampling_s": 0.0,
                    "judging_s": 0.0,
                }
            )
    turn_type = pyarrow.struct(
        [("role", pyarrow.string()), ("start", pyarrow.int64()), ("end", pyarrow.int64()), ("text", pyarrow.string())]
        + [(name, pyarrow.string()) for name in ("source", "outcome", "message")]
        + [(name, pyarrow.float64()) for name in ("reward", "speedup_eager", "speedup_compile")]
        + [(name, pyarrow.string()) for name in ("tool", "arguments")]
    )
    types = {"turns": pyarrow.list_(turn_type), "policy_digest": pyarrow.string()}
    columns = {name: pyarrow.array([row[name] for row in rows], types.get(name)) for name in rows[0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return sum(len(row["token_ids"]) for row in rows)


def parameters() -> Any:
    """The defaults of train/rft."""
    import yaml

    manifest = yaml.safe_load((ROOT / "stages/train/rft/stage.yaml").read_text())

    # YAML 1.1 takes `3e-6` for a text, which the engine's reader doesn't.
    def number(value: Any, kind: Any):
        return float(value) if kind == "number" else value

    return {name: number(about["default"], about["type"]) for name, about in manifest["params"].items()}


def train(
    options: argparse.Namespace, folder: pathlib.Path, model: Any, table: Any, processes: Any, precision: str
) -> tuple[Any, Any]:
    """Losses and seconds of each update of a run of the stage."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "outputs").mkdir(parents=True)
    (folder / "state").mkdir()
    cards = [] if options.cpu else options.gpus[:processes]
    params = parameters() | {
        "processes": processes,
        "precision": precision,
        "learning_rate": 1e-5,
        "batch": options.batch,
        "epochs": max(1, options.updates * options.batch // (options.tasks * 4)),
        "micro_batch_tokens": options.micro_batch_tokens,
        "checkpointing": False,
        "drop_truncated": False,
        "reward_above": 0.0,
        "checkpoint_every": 1000000,
        "per_task": 0,
        "final_learning_rate": 1.0,
    }
    tree = {"type": "tree"}
    outputs = {
        "model": {"type": "model"},
        "adapter": tree,
        "funnel": {"type": "table"},
        "kept": {"type": "table"},
        "metrics": {"type": "table"},
        "report": {"type": "report"},
    }
    request = {
        "protocol": 1,
        "stage": "tuned",
        "kind": "train/rft",
        "params": params,
        "seed": 7,
        "by_row": None,
        "device": None,
        "inputs": {
            "model": {"type": "model", "path": str(model), "digest": "none"},
            "trajectories": {"type": "trajectories", "path": str(table), "digest": "none"},
        },
        "outputs": {name: about | {"path": f"outputs/{name}"} for name, about in outputs.items()},
        "resources": {"cpu": os.cpu_count(), "memory_bytes": 0, "gpus": list(range(len(cards)))},
        "deadline_unix_s": None,
        "state_dir": str(folder / "state"),
    }
    (folder / "request.json").write_text(json.dumps(request))
    environment = training.with_libtorch()
    environment |= {"CUDA_AGENT_REQUEST": "request.json", "CUDA_VISIBLE_DEVICES": ",".join(cards)}
    done = subprocess.run(
        [options.binary, "stage", "train/rft"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{processes} processes: exit status {done.returncode}: {done.stderr[-2000:]}")
    found = {}
    for line in (folder / "outputs/metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["name"], []).append(row["value"])
    return found["actor/loss"], found["perf/time_per_step"]


def compare(options: argparse.Namespace) -> None:
    folder = pathlib.Path(tempfile.gettempdir()) / "bench-processes"
    folder.mkdir(exist_ok=True)
    model = tiny_model(folder / "model") if options.cpu else training.model(options, options.size)
    table = folder / "episodes.parquet"
    tokens = episodes(
        table, options.tasks, options.prompt_tokens, options.answer_tokens, 1000 if options.cpu else 150000
    )
    tokens_of_update = tokens * options.batch / (options.tasks * 4)
    failed = False
    for precision in options.precision:
        ends = {
            count: train(options, folder / f"run-{count}", model, table, count, precision)
            for count in (1, options.processes)
        }
        (one, one_s), (several, several_s) = ends[1], ends[options.processes]
        apart = max(abs(a - b) / abs(a) for a, b in zip(one, several, strict=True))
        failed |= not apart <= BARS[precision]
        report(
            f"{precision}: {len(one)} losses of {options.processes} processes beside one",
            f"{apart:.1e} apart",
            f"bar {BARS[precision]:.0e}; first {one[0]:.6f} and {several[0]:.6f}, "
            f"last {one[-1]:.6f} and {several[-1]:.6f}",
        )
        # The first updates allocate memory.
        speed = [tokens_of_update / statistics.median(seconds[2:]) for seconds in (one_s, several_s)]
        report(
            f"{precision}: tokens/s by one process and by {options.processes}",
            f"{speed[0]:.0f}, {speed[1]:.0f}",
            f"{speed[1] / speed[0]:.2f} times, bar {SPEED_UP}",
        )
    options.failed = failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/cuda-agent-train")
    parser.add_argument("--model", type=pathlib.Path, help="a Hugging Face folder, in place of random weights")
    parser.add_argument("--size", default="0.5b", choices=training.SHAPES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpus", default="0,1,2,3,4,5,6,7", help="which, as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=BARS)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=512)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--cpu", action="store_true", help="a tiny model, without a GPU")
    options = parser.parse_args()
    # Until it has come to its end without.
    options.binary, options.failed = options.binary.resolve(), True
    options.gpus = options.gpus.split(",")
    if options.cpu:
        options.prompt_tokens, options.answer_tokens, options.precision = 32, 32, ["fp32"]
    run({"compare": compare}, ["compare"], options)
    sys.exit(int(options.failed))


if __name__ == "__main__":
    main()
