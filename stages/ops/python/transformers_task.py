"""The task file of a transformers class: its standalone source, and a Model that makes and calls it."""

import re
from typing import Any

HEAD = 64
SIDE = 14  # height and width of a feature map


def sizes_at(usage: dict[str, Any], width: int) -> dict[str, int]:
    """Every size for a width: the ratios of the library's defaults are kept, heads are 64 wide."""
    heads = max(1, width // HEAD)
    kinds = {
        "width": lambda size: max(16, round(width * size["ratio"] / 16) * 16),
        "free": lambda size: max(1, round(width * size.get("ratio", 1.0))),
        "given": lambda size: size["base"],
        "heads": lambda size: max(1, int(heads * size["ratio"])),
        "head_dim": lambda size: width // heads,
    }
    return {name: kinds[size["kind"]](size) for name, size in usage["sizes"].items()}


def constants(usage: dict[str, Any], sizes: dict[str, int], batch: int, tokens: int) -> dict[str, int]:
    """Module constants in order: the shape's, then the sizes."""
    values = {"batch_size": batch}
    used = {extent for item in usage["inputs"] for extent in item["shape"]}
    used |= {"tokens", "head"} if usage.get("rotary") else set()
    used |= {"side"} if "grid" in used else set()
    given = (
        ("tokens", "sequence_length", tokens),
        ("side", "side", SIDE),
        ("image", "image_size", 64),
        ("samples", "samples", 4096),
        ("bands", "num_bands", 80),
        ("frames", "num_frames", 4),
        ("head", head_name(usage), HEAD),
    )
    return values | {name: value for extent, name, value in given if extent in used} | sizes


def init_names(usage: dict[str, Any]) -> list[str]:
    """The sizes that the constructor of the task's Model takes; the others only shape the inputs."""
    taken = {*(usage["config"] or {}), *usage["arguments"]}
    names = [name for name, size in usage["sizes"].items() if size["kind"] not in ("free", "given") or name in taken]
    if not usage.get("rotary"):
        return names
    return [*names, "sequence_length", *([] if head_name(usage) in names else [head_name(usage)])]


def rotary_lines(usage: dict[str, Any]) -> list[str]:
    """Buffers with the cosines and sines of rotary position embeddings, as the library computes them by default."""
    if not usage.get("rotary"):
        return []
    head = head_name(usage)
    table = "angles" if usage["rotary"] == 2 else "angles[None]"
    return [
        f"        frequencies = 10000.0 ** (-torch.arange(0, {head}, 2).float() / {head})",
        "        angles = torch.outer(torch.arange(sequence_length).float(), frequencies).repeat(1, 2)",
        f'        self.register_buffer("cos", {table}.cos())',
        f'        self.register_buffer("sin", {table}.sin())',
    ]


def head_name(usage: dict[str, Any]) -> str:
    """The constant for a head's width: the size that the class itself takes, where it takes one."""
    return next((name for name, size in usage["sizes"].items() if size["kind"] == "head_dim"), "head_size")


def input_lines(usage: dict[str, Any]) -> list[str]:
    """The items of the list that get_inputs returns."""
    names: dict[Any, str] = {
        "batch": "batch_size",
        "tokens": "sequence_length",
        "image": "image_size",
        "head": head_name(usage),
        "bands": "num_bands",
        "frames": "num_frames",
        "grid": "side * side",
    }
    lines = []
    for item in usage["inputs"]:
        extents = ", ".join(str(names.get(extent, extent)) for extent in item["shape"])
        # Indices are below the size that the fill names: `index:vocab_size`.
        kind, _, high = item["fill"].partition(":")
        lines.append(f"torch.randint(0, {high}, ({extents}))" if kind == "index" else f"torch.{kind}({extents})")
    return lines


def task_code(
    usage: dict[str, Any], source: str, header: list[str], sizes: dict[str, int], batch: int, tokens: int
) -> str:
    """The whole file."""
    init = init_names(usage)
    attribute = attribute_name(usage["class"])
    standard = [line for line in usage["imports"] if "torch" not in line]
    if usage["config"] is not None:
        standard.append("from types import SimpleNamespace")
    lines = [*(f"# {line}" for line in header), *standard, *([""] if standard else [])]
    lines += ["import torch", "import torch.nn as nn"]
    if re.search(r"\bF\.", source):
        lines.append("import torch.nn.functional as F")
    lines += [line for line in usage["imports"] if "torch" in line]
    lines += [
        "",
        "",
        source,
        "",
        "",
        "class Model(nn.Module):",
        f'    """{usage["class"]} of the transformers library, on its own."""',
        "",
    ]
    lines.append(f"    def __init__({', '.join(['self', *init])}):")
    lines.append("        super().__init__()")
    arguments = ", ".join(f"{name}={text}" for name, text in usage["arguments"].items())
    if usage["config"] is not None:
        options = [f"{key}={key if key in usage['sizes'] else repr(value)}" for key, value in usage["config"].items()]
        lines += wrapped("        config = SimpleNamespace(", options, ")")
    lines.append(f"        self.{attribute} = {usage['class']}({arguments})")
    lines += rotary_lines(usage)
    names = [item["name"] for item in usage["inputs"]]
    result = "" if usage["result"] is None else f"[{usage['result']}]"
    lines += [
        "",
        f"    def forward({', '.join(['self', *names])}):",
        f"        return self.{attribute}({usage['call']}){result}",
        "",
        "",
    ]
    lines += [f"{name} = {value}" for name, value in constants(usage, sizes, batch, tokens).items()]
    lines += task_functions(input_lines(usage), init)
    return "\n".join(lines)


def task_functions(inputs: list[str], init: list[str]) -> list[str]:
    """The end of a task file: what its inputs are, and what its model is made with."""
    return [
        "",
        "",
        "def get_inputs():",
        *wrapped("    return [", inputs, "]"),
        "",
        "",
        "def get_init_inputs():",
        f"    return [{', '.join(init)}]",
        "",
    ]


def wrapped(opening: str, items: list[str], closing: str) -> list[str]:
    """One line where it fits, else one item a line."""
    line = opening + ", ".join(items) + closing
    if len(line) <= 110:
        return [line]
    indent = " " * (len(opening) - len(opening.lstrip()) + 4)
    return [opening, *(f"{indent}{item}," for item in items), indent[4:] + closing]


def attribute_name(class_name: str) -> str:
    words = {"MLP": "mlp", "Attention": "attention", "Norm": "norm", "Layer": "layer", "Block": "block"}
    return next((name for word, name in words.items() if word in class_name), "module")


def header_lines(row: dict[str, Any]) -> list[str]:
    return [
        (
            f"{row['qualified'].rsplit('.', 1)[-1]} and what it needs, taken from {row['path']} of transformers "
            f"{row['version']}."
        ),
        "Copyright the HuggingFace team and the authors named there; licensed under the Apache License, Version 2.0",
        (
            "(https://www.apache.org/licenses/LICENSE-2.0). "
            "Changed: reduced to the plain case, with a plain configuration."
        ),
    ]
