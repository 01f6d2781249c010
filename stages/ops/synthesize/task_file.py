"""Writes a chain as a task file in KernelBench's format."""

import ast
import re
from typing import TYPE_CHECKING, Any

from transformers_task import task_functions

if TYPE_CHECKING:
    from compose import Chain

RENAMED = {
    "in_channels": ("channels",),
    "in_features": ("features", "length"),
    "input_size": ("features", "length"),
    "num_channels": ("channels",),
    "num_features": ("channels",),
    "embed_dim": ("length", "features"),
    "d_model": ("length", "features"),
    "normalized_shape": ("features", "length"),
}


def task_code(chain: "Chain", batch: int) -> str:
    """The whole file for a batch size."""
    init = [line for step in chain.steps for line in step.init]
    renames = constant_renames(chain)
    init = [rename_attributes(rename(line, renames), renames) for line in init]
    inputs = [rename(text, renames) for _, text in chain.inputs]
    constants = {renames.get(name, name): value for name, value in chain.constants.items()}
    constants["batch_size"] = batch
    arguments = names_in(init, constants)
    used = [name for name in constants if name in set(names_in(init + inputs, constants))]
    lines = ["import torch", "import torch.nn as nn"]
    calls = [rename_attributes(step.call, renames) for step in chain.steps]
    if any(re.search(r"\bF\.", line) for line in [*calls, *init]):
        lines.append("import torch.nn.functional as F")
    lines += ["", "", "class Model(nn.Module):", f'    """{document(chain)}"""', ""]
    if init:
        lines += [f"    def __init__({', '.join(['self', *arguments])}):", "        super().__init__()"]
        lines += [f"        {line}" for line in init] + [""]
    lines.append(f"    def forward({', '.join(['self', *(name for name, _ in chain.inputs)])}):")
    lines += [f"        x = {call}" for call in calls[:-1]] + [f"        return {calls[-1]}", "", ""]
    lines += [f"{name} = {constants[name]!r}" for name in used]
    lines += task_functions(inputs, arguments)
    return "\n".join(lines)


def document(chain: "Chain") -> str:
    """One sentence on what the module does."""
    names = [step.operator for step in chain.steps]
    if len(names) == 1:
        return f"Applies {names[0]}."
    return f"Applies {', '.join(names[:-1])} and then {names[-1]}."


def constant_renames(chain: "Chain") -> dict[str, Any]:
    """Name the first stream's extents after the argument that they are, as people do: `in_channels`."""
    renames = {}
    first = chain.steps[0].bound
    for symbol, name in first.names.items():
        if name in RENAMED.get(symbol, ()) and symbol not in chain.constants and name not in renames:
            renames[name] = symbol
    return renames


def rename(line: str, renames: dict[str, str]) -> str:
    for old, new in renames.items():
        line = re.sub(rf"(?<![\w.=]){old}\b(?!=)|(?<==){old}\b", new, line)
    return line


def rename_attributes(call: str, renames: dict[str, str]) -> str:
    for old, new in renames.items():
        call = re.sub(rf"\bself\.{old}\b", f"self.{new}", call)
    return call


def names_in(lines: list[str], constants: dict[str, int | tuple[int, int]]) -> list[str]:
    """The constants that lines read, in the order of their first use."""
    found = []
    for line in lines:
        loads = [node for node in ast.walk(ast.parse(line.strip())) if isinstance(node, ast.Name)]
        for node in sorted(loads, key=lambda node: (node.lineno, node.col_offset)):
            if node.id in constants and node.id not in found:
                found.append(node.id)
    return found
