"""What transformers makes of small random models, for tests/transformers.rs.

usage: reference.py write FOLDER        a folder for each of CASES: a model, ids.json, expected.safetensors
       reference.py check MODEL...      loads each folder and prints, one line each, its class, what was wrong with
                                        it, and its largest difference from own.safetensors.out on ids.json
       reference.py adapter BASE FOLDER loads the adapter FOLDER on BASE with PEFT, and prints the largest difference
                                        likewise
       reference.py real MODEL OUT      a real model in fp32: OUT gets logits of a few texts and 256 tokens taken
                                        greedily
       reference.py blocks FILE OUT     a GGUF file: OUT gets rows of some tensors as the package gguf dequantises them
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

CASES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2-tied": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **SIZES,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        )
    ),
    "qwen2-sharded": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=4)),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)
    ),
    "qwen3-biased": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, attention_bias=True)
    ),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=LLAMA_3_ROPE)),
    "llama-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=LINEAR_ROPE)
    ),
    "qwen2-value": lambda: Qwen2ForTokenClassification(
        Qwen2Config(**{**SIZES, "num_key_value_heads": 2, "num_labels": 1})
    ),
}


def randomize(model: PreTrainedModel) -> None:
    """Draws every parameter: new biases are zero and new norms one, which would hide that they are swapped or left
    out."""
    for name, parameter in model.named_parameters():
        center = 1.0 if "norm" in name else 0.0
        parameter.data = center + 0.2 * torch.randn(parameter.shape)


def outputs(model: PreTrainedModel, sequences: list[list[int]]) -> torch.Tensor:
    """Logits [T, vocab] or values [T] of all sequences, each alone, one after another."""
    parts = [model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0] for sequence in sequences]
    joined = torch.cat(parts)
    return joined.squeeze(-1) if joined.shape[-1] == 1 else joined


def write(folder: Path) -> None:
    for number, (name, make) in enumerate(CASES.items()):
        torch.manual_seed(number)
        model = make().eval()
        randomize(model)
        model.save_pretrained(folder / name, max_shard_size="20KB" if name.endswith("sharded") else "1GB")
        sequences = [torch.randint(0, 97, (length,)).tolist() for length in (7, 1, 12, 40)]
        (folder / name / "ids.json").write_text(json.dumps(sequences))
        output = outputs(model, sequences)
        weights = torch.randn(output.shape)
        loss = (output if output.dim() == 1 else output.log_softmax(-1)).mul(weights).sum()
        loss.backward()
        tensors = {"output": output.detach(), "weights": weights}
        tensors |= {f"gradient.{name}": parameter.grad for name, parameter in model.named_parameters()}
        save_file(tensors, folder / name / "expected.safetensors.out")


def check(folder: Path) -> None:
    architecture = AutoConfig.from_pretrained(folder).architectures[0]
    auto = AutoModelForTokenClassification if "Token" in architecture else AutoModelForCausalLM
    # A pair, because of `output_loading_info`, which its type does not know.
    loaded: Any = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    model, loading = loaded
    problems = {name: sorted(found) for name, found in loading.items() if found}
    with torch.no_grad():
        output = outputs(model.eval(), json.loads((folder / "ids.json").read_text()))
    own = load_file(folder / "own.safetensors.out")["output"]
    print(
        json.dumps(
            {"class": type(model).__name__, "problems": problems, "difference": (output - own).abs().max().item()}
        )
    )


def adapter(base: Path, folder: Path) -> None:
    from peft import PeftModel  # pyright: ignore[reportMissingImports]

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder).eval()
    with torch.no_grad():
        output = outputs(model, json.loads((base / "ids.json").read_text()))
    own = load_file(folder / "own.safetensors.out")["output"]
    print(json.dumps({"class": type(model).__name__, "problems": {}, "difference": (output - own).abs().max().item()}))


TEXTS = [
    (
        "__global__ void add(const float* a, const float* b, float* c, int n) {\n"
        "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    ),
    "import torch\n\ndef softmax(x: torch.Tensor) -> torch.Tensor:\n    return",
    "Die Größe eines Blocks ist",
]
CHAT = [{"role": "user", "content": "Write a CUDA kernel that computes a row-wise softmax in float32."}]


def real(folder: Path, out: Path) -> None:
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = {}
    with torch.no_grad():
        for number, text in enumerate(TEXTS):
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            tensors[f"ids.{number}"] = ids[0].to(torch.float32)
            tensors[f"logits.{number}"] = model(input_ids=ids, use_cache=False).logits[0]
        prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        # Never the end: 256 tokens are compared.
        output = model.generate(
            prompt,
            do_sample=False,
            min_new_tokens=256,
            max_new_tokens=256,
            eos_token_id=[],
            attention_mask=torch.ones_like(prompt),
        )
    tensors["prompt"] = prompt[0].to(torch.float32)
    tensors["greedy"] = output[0, prompt.shape[1] :].to(torch.float32)
    save_file(tensors, out)


def blocks(file: Path, out: Path) -> None:
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]
    from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]

    reader = GGUFReader(file)
    chosen: dict[tuple[str, bool], str] = {}
    tensors = {}
    for tensor in reader.tensors:
        # The first and the last of each type.
        chosen.setdefault((tensor.tensor_type.name, True), tensor.name)
        chosen[tensor.tensor_type.name, False] = tensor.name
    for tensor in reader.tensors:
        if tensor.name in chosen.values():
            rows = tensor.data if tensor.data.ndim == 1 else tensor.data[:256]
            values = dequantize(rows, tensor.tensor_type).reshape(-1)
            tensors[f"{tensor.tensor_type.name}/{tensor.name}"] = torch.from_numpy(values.copy())
    save_file(tensors, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["write", folder]:
            write(Path(folder))
        case ["check", *folders]:
            for folder in folders:
                check(Path(folder))
        case ["adapter", base, folder]:
            adapter(Path(base), Path(folder))
        case ["real", folder, out]:
            real(Path(folder), Path(out))
        case ["blocks", file, out]:
            blocks(Path(file), Path(out))
        case _:
            sys.exit(__doc__)
