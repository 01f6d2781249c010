"""The sampler and the trainer on a GPU, beside transformers in the same run.

    python3 bench/training.py --binary target/release/cuda-agent-train [--model FOLDER] [--out FOLDER] SECTION…

Sections: sampler (beside `generate`), plain (the sampler by torch's operators), shared (eight samples a prompt),
trainer (beside a plain loop), lora, groups (answers that share their prompt, as in PPO). Without --model the shapes of
Qwen2.5-Coder-0.5B (sampler) and 1.5B (trainer) with random weights are used: speed does not depend on what the weights
are. The table comes last.

Needs torch, transformers and a GPU; LD_LIBRARY_PATH is set here from torch's own folders.
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any

import sections
from sections import report

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}


def random_model(size: str, folder: pathlib.Path) -> pathlib.Path:
    """A Hugging Face folder of a Qwen2 model with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # Their types know neither these keywords nor what the methods give back.
    make_config: Any = Qwen2Config
    config = make_config(
        vocab_size=151936, max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=True, **SHAPES[size]
    )
    torch.manual_seed(1)
    with torch.device("cuda"):
        made: Any = Qwen2ForCausalLM(config)
        model = made.to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return folder


def model(options: argparse.Namespace, size: str) -> Any:
    if options.model:
        return options.model
    folder = pathlib.Path(tempfile.gettempdir()) / f"bench-{size}"
    return folder if (folder / "config.json").exists() else random_model(size, folder)


def with_libtorch() -> Any:
    """The environment of a program that links the torch of this Python."""
    import torch

    libraries = pathlib.Path(torch.__file__).parent
    folders = [libraries / "lib", *sorted((libraries.parent / "nvidia").glob("*/lib"))]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, folders))}


def ours(options: argparse.Namespace, *arguments: Any) -> Any:
    environment = with_libtorch()
    command = [options.binary, "bench", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.stderr:
        print(done.stderr.strip()[-2000:], flush=True)
    if done.returncode != 0:
        raise SystemExit(f"{command}: exit status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found), flush=True)
    return found


def tell_difference(name: str, found: Any) -> None:
    difference = found["difference"]
    logs, shares = difference["log_probability"], difference["probability"]
    report(
        f"{name}: sampler against a full forward, log-probability",
        f"mean {logs['mean']:.2g}, max {logs['max']:.2g}",
        f"probability mean {shares['mean']:.2g}, max {shares['max']:.2g}; "
        f"{difference['equal']} of {difference['tokens']} equal",
    )


def generate(options: argparse.Namespace, folder: pathlib.Path) -> Any:
    """transformers' own `generate`: tokens a second, its best of the repeats."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    peer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    peer = peer.cuda().eval()
    seconds = []
    for _ in range(options.peer_rounds + 1):
        prompts = torch.randint(0, 150000, (options.batch, options.prompt_tokens), device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = peer.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=options.new_tokens,
            max_new_tokens=options.new_tokens,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        assert out.shape[1] == options.prompt_tokens + options.new_tokens
    del peer
    gc.collect()
    torch.cuda.empty_cache()
    return options.batch * options.new_tokens / min(seconds[1:])


def sampler_arguments(options: argparse.Namespace, folder: pathlib.Path, prompts: Any = None) -> list[Any]:
    return [
        "sampler",
        folder,
        "--prompts",
        prompts or options.batch,
        "--slots",
        options.batch,
        "--prompt-tokens",
        options.prompt_tokens,
        "--new-tokens",
        options.new_tokens,
    ]


def sampler(options: argparse.Namespace) -> None:
    folder = model(options, "0.5b")
    found = ours(options, *sampler_arguments(options, folder))
    theirs = generate(options, folder)
    report(
        f"sampler, batch {options.batch}, tokens/s",
        f"{found['tokens_per_s']:.0f}",
        f"step {found['step_ms']:.2f} ms, prefill {found['prefill_s']:.2f} s, "
        f"{found['fused_steps']} of {found['steps']} fused",
    )
    report("transformers' generate, tokens/s", f"{theirs:.0f}")
    report("ratio", f"{found['tokens_per_s'] / theirs:.1f}", "bar 6, goal 10")
    tell_difference("bfloat16", found)
    exact = ours(
        options,
        *sampler_arguments(options, folder)[:2],
        "--prompts",
        16,
        "--slots",
        16,
        "--prompt-tokens",
        256,
        "--new-tokens",
        128,
        "--rounds",
        1,
        "--float32",
    )
    tell_difference("float32", exact)


def plain(options: argparse.Namespace) -> None:
    found = ours(options, *sampler_arguments(options, model(options, "0.5b")), "--plain", "--rounds", 1)
    report("sampler by torch's operators, tokens/s", f"{found['tokens_per_s']:.0f}", f"step {found['step_ms']:.2f} ms")
    tell_difference("torch's operators", found)


def shared(options: argparse.Namespace) -> None:
    arguments = sampler_arguments(options, model(options, "0.5b"), options.batch // 8)
    found = ours(options, *arguments, "--samples", 8)
    report(
        "sampler, eight samples a prompt, tokens/s",
        f"{found['tokens_per_s']:.0f}",
        f"step {found['step_ms']:.2f} ms, prefill {found['prefill_s']:.2f} s",
    )


def loop(options: argparse.Namespace, folder: pathlib.Path, checkpointing: Any) -> Any:
    """A plain training loop: tokens a second."""
    import torch
    from transformers import AutoModelForCausalLM

    peer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    peer = peer.cuda().train()
    if checkpointing:
        peer.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-6, fused=True)
    seconds = []
    micro = max(1, options.micro_batch_tokens // options.context)
    for _ in range(options.peer_rounds + 2):
        ids = torch.randint(0, 150000, (options.sequences, options.context), device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        for part in ids.split(micro):
            (peer(input_ids=part, labels=part, use_cache=False).loss * len(part) / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    del peer, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return options.sequences * options.context / statistics.median(seconds[2:])


def trainer_arguments(options: argparse.Namespace, folder: pathlib.Path) -> list[Any]:
    return [
        "trainer",
        folder,
        "--context",
        options.context,
        "--sequences",
        options.sequences,
        "--micro-batch-tokens",
        options.micro_batch_tokens,
    ]


def trainer(options: argparse.Namespace) -> None:
    folder = model(options, "1.5b")
    found = ours(options, *trainer_arguments(options, folder))
    theirs = loop(options, folder, False)
    report(
        f"trainer, context {options.context}, tokens/s",
        f"{found['tokens_per_s']:.0f}",
        f"{found['seconds']:.2f} s a step",
    )
    report("share of the GPU's peak (989 TFLOP/s)", f"{found['mfu']:.1%}", "bar 35 %")
    report(
        "a plain transformers loop, tokens/s",
        f"{theirs:.0f}",
        f"{theirs * found['flops_per_token'] / 989e12:.1%} of the peak",
    )
    report("ratio", f"{found['tokens_per_s'] / theirs:.2f}")
    found = ours(options, *trainer_arguments(options, folder), "--checkpointing")
    report("the same with layers computed twice, tokens/s", f"{found['tokens_per_s']:.0f}", f"{found['mfu']:.1%}")


def lora(options: argparse.Namespace) -> None:
    found = ours(options, *trainer_arguments(options, model(options, "1.5b")), "--lora-rank", 16)
    report(
        "trainer with adapters of rank 16, tokens/s", f"{found['tokens_per_s']:.0f}", f"{found['seconds']:.2f} s a step"
    )


def groups(options: argparse.Namespace) -> None:
    arguments = [
        "trainer",
        model(options, "1.5b"),
        "--lora-rank",
        16,
        "--context",
        1280,
        "--prompt-tokens",
        1152,
        "--sequences",
        128,
    ]
    found = [ours(options, *arguments, "--samples", samples)["tokens_per_s"] for samples in (1, 8)]
    report(
        "adapters of rank 16, prompts of 1,152 tokens and answers of 128, tokens/s",
        f"{found[0]:.0f}",
        "a prompt for each answer",
    )
    report("eight answers a prompt, tokens/s", f"{found[1]:.0f}", f"{found[1] / found[0]:.1f} times")


SECTIONS = {"sampler": sampler, "plain": plain, "shared": shared, "trainer": trainer, "lora": lora, "groups": groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/cuda-agent-train")
    parser.add_argument("--model", type=pathlib.Path, help="a Hugging Face folder, in place of random weights")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    options = parser.parse_args()
    options.binary = options.binary.resolve()
    sections.run(SECTIONS, options.sections, options)


if __name__ == "__main__":
    main()
