"""Finds model pieces in the installed transformers and turns each into standalone source.

Modeling files are parsed, not imported; only configuration classes are imported, for their default values. Each
candidate is made into source by `standalone`, and a `usage` (below) says how a task constructs and calls it. Child
processes in which the library can't be imported then run every candidate (`validation`); only those that pass are kept.

A usage of a transformers class:

    class       the name of the class in the source
    imports     import lines beside torch
    config      attribute -> value, or null where the class takes no configuration
    sizes       attribute or argument -> {"kind", "ratio" to the width, or "base", the value of a given one}
    arguments   constructor arguments as text, by name
    inputs      [{"name", "shape": [extents: sizes, `batch`, `tokens`, `side`, …], "fill": randn, rand or index:SIZE}]
    rotary      3 or 2 where the call takes `self.cos` and `self.sin`, buffers of that rank; absent elsewhere
    call        the call, over the inputs' names
    result      index into a returned tuple, or null
"""

import ast
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import call_forms
from standalone import SourceFile, Standalone, parse_file
from torch_probe import Rejected
from validation import validate

# Searched first, so that a short crawl finds well-known models; the other folders follow by name.
PREFERRED = tuple(
    "llama bert gpt2 t5 qwen2 gemma mixtral vit clip convnext phi olmo2 albert dinov2 swin gpt_neox bloom gptj cohere "
    "starcoder2 fnet wav2vec2 siglip mobilevit".split()
)
NOT_PIECES = re.compile(
    r"PreTrainedModel$|For[A-Z]|Model$|Encoder$|Decoder$|Stack$|RotaryEmbedding|Backbone|Cache|Output$"
    r"(?<!SelfOutput)|DropPath|Loss"
)
BASES = {
    "nn.Module",
    "torch.nn.Module",
    "GradientCheckpointingLayer",
    "nn.LayerNorm",
    "nn.Conv1d",
    "nn.Conv2d",
    "nn.Linear",
}
# Sizes that a task keeps small: they would only add weights that hardly any of the work reads.
CAPS = (
    (re.compile(r"vocab_size$"), 4096),
    (
        re.compile(r"max_position_embeddings$|^n_positions$|^n_ctx$|^max_(source|target)_positions$|^max_seq_len\w*$"),
        512,
    ),
    (re.compile(r"^(num|n)_(local_|routed_)?experts$"), 8),
)
FOLDERS_AT_ONCE = 4
# One source may stand for several classes; where it fails with one model's sizes, so many more are tried.
REPRESENTATIVES = 3


def crawl_transformers(
    models: list[Any], maximum: int, processes: int = 1, run: Callable[..., Any] = map
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Returns `(kept, left_out)`: lists of dicts. No models are all of them, and a maximum of 0 is none.

    `run` applies a function to many items in order, like `map`. With a maximum the folders are taken a few at a time,
    until it is reached; the result is the same as if all of them had been searched.
    """
    root = library_root()
    folders = list(models) or all_folders(root)
    groups = (
        [folders[i : i + FOLDERS_AT_ONCE] for i in range(0, len(folders), FOLDERS_AT_ONCE)] if maximum else [folders]
    )
    kept, left_out, seen = [], [], {}
    for group in groups:
        prepared = list(itertools.chain.from_iterable(run(prepare_folder, group)))
        found, refused = keep(prepared, seen, processes)
        kept += found
        left_out += refused
        if maximum and len(kept) >= maximum:
            break
    if not maximum:
        return kept, left_out
    left_out += [
        refusal(row["operator"], "over the maximum", f"max_transformers is {maximum}") for row in kept[maximum:]
    ]
    return kept[:maximum], left_out


def keep(
    prepared: list[dict[str, Any]], seen: dict[str, Any], processes: int
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The candidates of some folders that pass, one for each source, and why the others are left out."""
    left_out = [refusal(item["operator"], *item["refused"]) for item in prepared if "refused" in item]
    twins = {}
    for item in prepared:
        if "refused" not in item:
            twins.setdefault(item["shape"], []).append(item)
    verdicts = {}
    open_shapes = [shape for shape in twins if shape not in seen]
    for attempt in range(REPRESENTATIVES):
        chosen = [(shape, twins[shape][attempt]) for shape in open_shapes if attempt < len(twins[shape])]
        for (shape, item), verdict in zip(chosen, validate([item for _, item in chosen], processes), strict=True):
            verdicts[item["operator"]] = verdict
            if verdict["usage"] is not None:
                seen[shape] = item["operator"]
        open_shapes = [shape for shape in open_shapes if shape not in seen]
    kept = []
    for shape, items in twins.items():
        for item in items:
            verdict = verdicts.get(item["operator"])
            if verdict and verdict["usage"] is not None:
                kept.append(row_of(item, verdict))
            elif verdict:
                left_out.append(refusal(item["operator"], verdict["reason"], verdict["detail"]))
            else:
                left_out.append(refusal(item["operator"], "same source", seen.get(shape, items[0]["operator"])))
    order = {item["operator"]: place for place, item in enumerate(prepared)}
    return (
        sorted(kept, key=lambda row: order[row["operator"]]),
        sorted(left_out, key=lambda row: order[row["operator"]]),
    )


def row_of(item: dict[str, Any], verdict: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "operator": item["operator"],
        "qualified": item["operator"],
        "library": "transformers",
        "family": "transformers",
        "version": item["version"],
        "path": item["path"],
        "summary": f"{item['operator'].rsplit('.', 1)[-1]} of transformers",
        "usages": [verdict["usage"]],
        "source": item["body"],
    }


def refusal(operator: str, reason: str, detail: str) -> dict[str, str]:
    return {"operator": operator, "library": "transformers", "reason": reason, "detail": detail}


# ---- what there is


@functools.cache
def library_root() -> pathlib.Path:
    import transformers

    return pathlib.Path(transformers.__file__).parent


@functools.cache
def library_version() -> str:
    import transformers

    return transformers.__version__


@functools.cache
def open_file(path: str) -> SourceFile:
    return SourceFile(path, library_root())


def all_folders(root: pathlib.Path) -> list[str]:
    found = sorted(path.parent.name for path in root.glob("models/*/__init__.py"))
    return [*(name for name in PREFERRED if name in found), *(name for name in found if name not in PREFERRED)]


def discover(root: pathlib.Path, model: str) -> Iterator[tuple[pathlib.Path, ast.ClassDef]]:
    """Module classes of a model's modeling files: `(path, node)`."""
    for path in sorted((root / "models" / model).glob("modeling_*.py")):
        if path.name.startswith(("modeling_tf_", "modeling_flax_")):
            continue
        for node in parse_file(str(path)).body:
            if isinstance(node, ast.ClassDef) and is_piece(node):
                yield path, node


def is_piece(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base) for base in node.bases}
    return bool(bases & BASES) and not NOT_PIECES.search(node.name)


def prepare_folder(model: str) -> list[dict[str, Any]]:
    """Candidates of one folder, and refusals, as plain values that another process can send."""
    root = library_root()
    found = []
    for path, node in discover(root, model):
        operator = ".".join(path.relative_to(root.parent).with_suffix("").parts) + "." + node.name
        try:
            found.append({"operator": operator, **prepare(path, root, node)})
        except Rejected as rejection:
            found.append({"operator": operator, "refused": (rejection.reason, rejection.detail)})
        # Source of any form comes in here, and one class must not lose the others.
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            found.append({"operator": operator, "refused": ("not standalone", f"can't be rewritten: {message}")})
    # The trees of a folder are of no use to the next one, and there are many.
    parse_file.cache_clear()
    open_file.cache_clear()
    return found


# ---- one candidate


def prepare(path: pathlib.Path, root: pathlib.Path, node: ast.ClassDef) -> dict[str, Any]:
    """A candidate: its source and the usages to try."""
    forward, init = method(node, "forward"), method(node, "__init__")
    if forward is None:
        raise Rejected("no recipe", "has no forward of its own")
    closure = specialised(path, root, node, init)
    body = closure.body
    if re.search(r"num_hidden_layers|num_layers\b", body):
        raise Rejected("whole model", "builds a stack of layers")
    reads = {k: v for k, v in closure.reads.items() if re.search(rf"\.{k}\b|'{k}'", body)}
    module: Any = ast.parse(body).body[-1]
    make = call_forms.constructor(method(module, "__init__"), reads)
    usages = [
        {
            "class": node.name,
            "imports": closure.import_lines(body),
            "config": literal_config(reads) if "config" in make["arguments"] else None,
            **call_forms.combined(make, form),
        }
        for form in call_forms.forms(method(module, "forward"), make["sizes"])
    ]
    return {
        "body": body,
        "usages": usages,
        "version": library_version(),
        "path": str(path.relative_to(root.parent)),
        "shape": anonymous(body),
    }


def method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def specialised(path: pathlib.Path, root: pathlib.Path, node: ast.ClassDef, init: ast.FunctionDef | None) -> Standalone:
    """The closure of a class with the first of its model's configurations that has all that it reads."""
    refusal: Rejected | None = None
    for config in configurations(path, node.name, init):
        closure = Standalone(path, root, config or {}, open_file)
        try:
            closure.body = closure.build(node.name)
            return closure
        except Rejected as rejection:
            refusal = refusal or rejection
            if "the configuration has no" not in rejection.detail:
                break
    assert refusal is not None, "there is at least one configuration"
    raise refusal


def configurations(path: pathlib.Path, class_name: str, init: ast.FunctionDef | None) -> "list[Configuration | None]":
    """Configurations to try: the one that the constructor's annotation names, then those with a name like the class's.

    A single None where the class takes none.
    """
    argument = next((a for a in init.args.args if a.arg == "config"), None) if init else None
    if argument is None:
        return [None]
    names = [(file, name) for file in sorted(path.parent.glob("configuration_*.py")) for name in config_classes(file)]
    annotation = ast.unparse(argument.annotation).strip("'\"") if argument.annotation else ""
    ranked = sorted(
        names,
        key=lambda item: (item[1] not in annotation.split(" | "), -alike(item[1].removesuffix("Config"), class_name)),
    )
    if not ranked:
        raise Rejected("no configuration", "its model has no configuration class")
    found, failure = [], None
    for file, name in ranked[:4]:
        try:
            found.append(configuration(path.parent.name, file.stem, name))
        except Rejected as rejection:
            failure = failure or rejection
    if not found:
        assert failure is not None, "every name that was tried has failed"
        raise failure
    return found


@functools.cache
def config_classes(file: pathlib.Path) -> list[str]:
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return [n.name for n in nodes if isinstance(n, ast.ClassDef) and n.name.endswith("Config")]


def alike(first: str, second: str) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class Configuration:
    """Default values of a configuration class; what is computed is asked of the object itself."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.values = config.to_dict() | {"_attn_implementation": "eager"}

    def get(self, name: str, default: "Configuration | object | None" = None) -> Any:
        value = self.values.get(name, default)
        if name not in self.values and not name.startswith("_"):
            try:
                value = getattr(self.config, name, default)
            # What a configuration computes may fail in any way, and then it doesn't have it.
            except Exception:
                return default
            if callable(value):
                return default
        return plain_value(name, value)

    def __contains__(self, name: str) -> bool:
        return self.get(name, self) is not self


@functools.cache
def configuration(folder: str, stem: str, name: str) -> Configuration:
    import importlib

    try:
        module = importlib.import_module(f"transformers.models.{folder}.{stem}")
        return Configuration(getattr(module, name)())
    # A library's own code may fail with anything.
    except Exception as error:
        raise Rejected("no configuration", f"{type(error).__name__}: {error}".splitlines()[0][:160]) from error


def plain_value(name: str, value: Any) -> Any:
    """Rates of everything random are zero in a task, and tables that only cost memory are small."""
    if isinstance(value, float) and re.search(r"drop|pdrop|jitter|noise", name):
        return 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        return next((min(value, most) for pattern, most in CAPS if pattern.search(name)), value)
    return value


def literal_config(reads: dict[str, float]) -> dict[str, float]:
    for key, value in reads.items():
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError) as error:
            raise Rejected("no configuration", f"`{key}` is not a plain value") from error
    return dict(reads)


def anonymous(body: str) -> str:
    """The source without the model's name, so that copies of one class under several names are found."""
    tree = ast.parse(body)
    statements: list[Any] = tree.body
    names = {node.name: f"c{index}" for index, node in enumerate(statements) if hasattr(node, "name")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            node.id = names[node.id]
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            node.name = names.get(node.name, node.name)
            if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
