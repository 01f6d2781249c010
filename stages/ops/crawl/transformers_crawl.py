"""Finds model pieces in the installed transformers and turns each into standalone source.

Modeling files are parsed, not imported; only a model's configuration class is imported, for its default values. Each
candidate is made into source by `standalone`, and a `usage` (below) says how a task constructs and calls it. A child
process in which the library can't be imported then runs every candidate; only those that pass are kept.

A usage of a transformers class:

    class       the name of the class in the source
    imports     import lines beside torch
    config      attribute -> value, or null where the class takes no configuration
    sizes       attribute or argument -> {"base": its value at the library's default width, "kind"}
    arguments   constructor arguments as text, by name
    inputs      [{"name", "shape": [expressions over the sizes, `batch`, `tokens`], "fill"}]
    call        the call, over the inputs' names
    result      index into a returned tuple, or null
"""

import ast
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

from standalone import SourceFile, Standalone
from torch_probe import Rejected

WIDTH_NAMES = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "emb_dim")
SCALED = re.compile(r"hidden|intermediate|ffn|inner|d_model|d_ff|embd|embed_dim|emb_dim|mlp_dim|width|lora_rank|key_size|value_size|attention_dim")
HEADS = re.compile(r"(num|n)_?(\w+_)?(attention_|key_value_|kv_|encoder_attention_)?heads?$|num_key_value_heads")
NOT_PIECES = re.compile(r"PreTrainedModel$|For[A-Z]|Model$|Encoder$|Decoder$|Stack$|RotaryEmbedding|Backbone|Cache|Output$"
                        r"(?<!SelfOutput)|DropPath|Loss")
WIDTH = 256
INNER = ("(d_ff|intermediate|ffn|inner|mlp_dim)", "width inside")


def crawl_transformers(models, maximum):
    """Returns `(kept, left_out)`: lists of dicts."""
    import transformers

    root = pathlib.Path(transformers.__file__).parent
    files, candidates, left_out, seen = {}, [], [], {}

    def open_file(path):
        if path not in files:
            files[path] = SourceFile(path, root)
        return files[path]

    for path, name, node in discover(root, models):
        operator = ".".join(path.relative_to(root.parent).with_suffix("").parts) + "." + name
        try:
            candidate = prepare(path, root, name, node, open_file, transformers.__version__)
            shape = anonymous(candidate["variants"][0]["body"], path.parent.name)
            twin = seen.setdefault(shape, operator)
            if twin != operator:
                raise Rejected("same source", twin)
            candidates.append({"operator": operator, **candidate})
        except Rejected as rejection:
            left_out.append(refusal(operator, rejection.reason, rejection.detail))
    kept, failed = validate(candidates)
    left_out += failed
    left_out += [refusal(row["operator"], "over the maximum", f"max_transformers is {maximum}") for row in
                 kept[maximum:]]
    return kept[:maximum], left_out


def refusal(operator, reason, detail):
    return {"operator": operator, "library": "transformers", "reason": reason, "detail": detail}


def discover(root, models):
    """Module classes of the models' modeling files, in the order of the list: `(path, name, node)`."""
    for model in models:
        folder = root / "models" / model
        for path in sorted(folder.glob("modeling_*.py")):
            if path.name.startswith(("modeling_tf_", "modeling_flax_")):
                continue
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and is_piece(node):
                    yield path, node.name, node


def is_piece(node):
    bases = {ast.unparse(base) for base in node.bases}
    return bool(bases & {"nn.Module", "GradientCheckpointingLayer"}) and not NOT_PIECES.search(node.name)


def prepare(path, root, name, node, open_file, version):
    """A candidate: its source and the usages to try."""
    forward, init = method(node, "forward"), method(node, "__init__")
    if forward is None:
        raise Rejected("no recipe", "has no forward of its own")
    config = configuration(path, init)
    closure = Standalone(path, root, config or {}, open_file)
    body = closure.build(name)
    if re.search(r"num_hidden_layers|num_layers\b", body):
        raise Rejected("whole model", "builds a stack of layers")
    reads = {k: v for k, v in closure.reads.items() if re.search(rf"\.{k}\b|'{k}'", body)}
    module = ast.parse(body).body[-1]
    variants = []
    widths = [*reads, *(argument for argument, _ in init_arguments(method(module, "__init__")))]
    width = next((known for known in WIDTH_NAMES if known in widths), "width")
    for inputs, call in call_forms(method(module, "forward"), reads, width):
        usage = {
            "class": name, "imports": closure.import_lines(body), "inputs": inputs, "call": call,
            "config": literal_config(reads) if config is not None else None,
            **constructor(method(module, "__init__"), reads, inputs),
        }
        variants.append({"body": body, "usage": usage})
    return {
        "qualified": f"{'.'.join(path.relative_to(root.parent).with_suffix('').parts)}.{name}",
        "library": "transformers", "family": "transformers", "variants": variants, "version": version,
        "path": str(path.relative_to(root.parent)), "summary": f"{name} of transformers",
    }


def method(node, name):
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def configuration(path, init):
    """Default values of the configuration class that the constructor names, or None where it takes none."""
    if init is None or "config" not in [a.arg for a in init.args.args]:
        return None
    argument = next(a for a in init.args.args if a.arg == "config")
    folder = path.parent
    named = ast.unparse(argument.annotation).strip("'\"") if argument.annotation else None
    for file in sorted(folder.glob("configuration_*.py")):
        classes = [n.name for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
        chosen = named if named in classes else next((n for n in classes if n.endswith("Config")), None)
        if chosen is None:
            continue
        try:
            module = importlib.import_module(f"transformers.models.{folder.name}.{file.stem}")
            config = getattr(module, chosen)()
            values = config.to_dict()
            values |= {alias: getattr(config, alias) for alias in config.attribute_map}
        except Exception as error:
            raise Rejected("no configuration", f"{type(error).__name__}: {error}"[:160]) from error
        values |= {"_attn_implementation": "eager", "head_dim": values.get("head_dim", getattr(config, "head_dim", None))}
        if values["head_dim"] is None:
            del values["head_dim"]
        return {key: without_dropout(key, value) for key, value in values.items()}
    raise Rejected("no configuration", "its model has no configuration class")


def without_dropout(key, value):
    """Rates of everything random are zero in a task."""
    return 0.0 if isinstance(value, float) and re.search(r"drop|pdrop|jitter|noise", key) else value


def literal_config(reads):
    for key, value in reads.items():
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError) as error:
            raise Rejected("no configuration", f"`{key}` is not a plain value") from error
    return dict(reads)


def constructor(init, reads, inputs):
    """Constructor arguments and the sizes that they and the configuration are given."""
    arguments, sizes = {}, {}
    base = next((reads[name] for name in WIDTH_NAMES if isinstance(reads.get(name), int)), None)
    for key, value in reads.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if HEADS.search(key):
            sizes[key] = {"kind": "heads", "ratio": value * 64 / base if base else None, "base": value}
        elif SCALED.search(key) and base and value >= 16:
            sizes[key] = {"kind": "width", "ratio": value / base}
        elif key == "head_dim":
            sizes[key] = {"kind": "head_dim"}
    for argument, required in init_arguments(init):
        if argument == "config":
            arguments["config"] = "config"
        elif argument in WIDTH_NAMES or argument in ("normalized_shape", "input_dim", "in_features"):
            arguments[argument] = argument
            sizes[argument] = {"kind": "width", "ratio": 1.0}
        elif re.search(INNER[0], argument) and required:
            arguments[argument] = argument
            sizes[argument] = {"kind": "width", "ratio": 4.0}
        elif HEADS.search(argument) and required:
            arguments[argument] = argument
            sizes[argument] = {"kind": "heads", "ratio": 1.0, "base": 8}
        elif argument == "layer_idx" and required:
            arguments[argument] = "0"
        elif required:
            raise Rejected("no recipe", f"no recipe for constructor argument `{argument}`")
    if any(size["kind"] == "heads" for size in sizes.values()):
        largest = max(size["base"] for size in sizes.values() if size["kind"] == "heads")
        for size in sizes.values():
            if size["kind"] == "heads":
                size["ratio"] = size.pop("base") / largest
    if not any(size["kind"] == "width" for size in sizes.values()):
        free = {name for item in inputs for extent in item["shape"] for name in re.findall(r"[a-z_]+", extent)}
        if free & {"width", "inner"}:
            sizes["width"] = {"kind": "free", "ratio": 1.0}
    return {"arguments": arguments, "sizes": sizes}


def init_arguments(init):
    if init is None:
        return []
    defaults = len(init.args.args) - len(init.args.defaults)
    return [(a.arg, index < defaults) for index, a in enumerate(init.args.args)][1:]


STREAMS = (
    ["batch", "tokens", "width"], ["batch", "tokens", "inner"], ["batch", "width", "side", "side"],
    ["batch", "3", "image", "image"], ["batch", "width", "tokens"],
)


def call_forms(forward, reads, width):
    """Every way to call the class that is worth a try: `(inputs, call)`."""
    names = [a.arg for a in forward.args.args][1:]
    required = names[: len(names) - len(forward.args.defaults)]
    if not names:
        raise Rejected("no recipe", "its forward takes nothing")
    rotary = "position_embeddings" in names
    inner = next((name for name in reads if re.search(INNER[0], name)), None)
    for stream in STREAMS:
        if ("inner" in stream and inner is None) or ("image" in stream and not re.search("pixel", names[0])):
            continue
        shape = [{"inner": inner, "width": width}.get(extent, extent) for extent in stream]
        inputs = [{"name": names[0], "shape": shape, "fill": "randn"}]
        call = [names[0]]
        for name in required[1:]:
            if name == "position_embeddings":
                continue
            if not re.search(r"input_tensor|residual|key_value_states|hidden_states|gate|shortcut|query|key|value", name):
                raise Rejected("no recipe", f"no recipe for argument `{name}`")
            peer = [width if extent == inner else extent for extent in shape]
            inputs.append({"name": name, "shape": peer, "fill": "randn"})
            call.append(name)
        if rotary:
            angles = ["1", "tokens", "head"]
            inputs += [{"name": name, "shape": angles, "fill": "rand"} for name in ("cos", "sin")]
            call.append("position_embeddings=(cos, sin)")
        yield inputs, ", ".join(call)


def anonymous(body, model):
    """The source without the model's name, so that copies of one class under several names are found."""
    tree = ast.parse(body)
    names = {node.name: f"c{index}" for index, node in enumerate(tree.body) if hasattr(node, "name")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            node.id = names[node.id]
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            node.name = names.get(node.name, node.name)
            if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def validate(candidates):
    """Run every candidate in a child process that can't import the library."""
    child = pathlib.Path(__file__).with_name("validate_standalone.py")
    document = json.dumps([{"operator": c["operator"], "variants": c["variants"], "path": c["path"],
                            "version": c["version"]} for c in candidates])
    # The child finds the helper modules where this process does.
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, str(child)], input=document, capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
    if done.returncode:
        raise RuntimeError(f"the validation of standalone sources failed: {done.stderr[-800:]}")
    kept, left_out = [], []
    for candidate, verdict in zip(candidates, json.loads(done.stdout)):
        if verdict["variant"] is None:
            left_out.append(refusal(candidate["operator"], verdict["reason"], verdict["detail"]))
            continue
        variant = candidate["variants"][verdict["variant"]]
        row = {key: value for key, value in candidate.items() if key != "variants"}
        row["usages"] = [variant["usage"] | {"result": verdict["result"]}]
        row["source"] = variant["body"]
        kept.append(row)
    return kept, left_out
