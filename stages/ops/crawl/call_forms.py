"""How a class of transformers may be constructed and called, by the names of its arguments.

Nothing here is believed before it ran: `forms` gives every call that is worth a try, the most likely first, and the
validation takes the first that works.
"""

import ast
import re
from typing import Any

from torch_probe import Rejected
from transformers_task import SIDE

WIDTH_NAMES = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "emb_dim")
SCALED = re.compile(
    r"hidden|intermediate|ffn|inner|d_model|d_ff|embd|embed_dim|emb_dim|embedding_size|mlp_dim|width|"
    r"lora_rank|key_size|value_size|attention_dim|proj\w*_dim|_dim$"
)
HEADS = re.compile(r"(num|n)_?(\w+_)?(attention_|key_value_|kv_|encoder_attention_)?heads?$|num_key_value_heads")
INNER = re.compile(r"d_ff|intermediate|ffn|inner|mlp_dim|hidden_features|hidden_channels")
# Constructor arguments that are a width of their own, beside WIDTH_NAMES.
WIDTH_ARGUMENTS = re.compile(
    r"^(normalized_shape|input_dims?|in_(features|channels?|dim|planes)|input_(features|channels|size)|channels?|n|"
    r"num_(features|channels)|out_(features|channels?|dim|planes)|output_(dim|size|channels|features)|dims?|"
    r"embed_dims|d_in|d_out|dim_(in|out)|context_dim|query_dim|feature_size|proj_dim|hidden_channels?|width|"
    r"llm_embed_dim|embedding_(dim|size)|size|features|inplanes|planes|channel|filters|d_inner|model_dim|dimension)$|"
    r"_(dims?|channels?|features|planes|width)$"
)
# Other constructor arguments that have to be given, as text.
GIVEN_ARGUMENTS = (
    (r"^(layer|stage|block|level)?_?(idx|id|index|number|num|i)$|^i$", "0"),
    (r"^kernel_size$|^kernel$", "3"),
    (r"^strides?$|^dilations?$|^groups$|^num_groups$|^repeats?$", "1"),
    (r"^padding$", "1"),
    (r"^window_size$", "7"),
    (r"^patch_size$", "16"),
    (r"eps(ilon)?$", "1e-05"),
    (r"drop|^p$|jitter|noise", "0.0"),
    (r"^shift_size$", "0"),
    (r"^(scale|scale_factor|upscale\w*)$", "2"),
    (r"^(ratio|expand_ratio|expansion\w*|mlp_ratio)$", "4"),
    (r"^depth$|^num_(layers|blocks|hidden_layers)$", "2"),
    (r"resolution$|^(grid|feature|feat)_size$", f"({SIDE}, {SIDE})"),
    (r"^bias$|_bias$", "True"),
    (r"^(is|use|has|with|add|do|causal|downsample|last)(_|$)", "False"),
    (r"^(initializer_range|init_values?|std)$", "0.02"),
)
GIVEN_SIZES = (
    (r"^(num_(positions|embeddings)|max_(len|length|positions|seq_len\w*|position_embeddings)|vocab_size)$", 512),
    (r"^num_(classes|labels|queries|latents|codes)$", 64),
    (r"^(num|n)_\w+$", 16),
)

ABSENT_INPUTS = re.compile(
    r"mask|bias$|cache|past_|_weights?$|alibi|^(device|dtype)$|position_ids|^pos_ids|cu_seqlens|"
    r"max_seqlen|sizes$|lengths?$|indices|level_start"
)
FLAGS = re.compile(r"^(output|return|use|is|do|training|causal|interpolate)(_|$)")
NUMBERS = {
    "height": str(SIDE),
    "width": str(SIDE),
    "h": str(SIDE),
    "w": str(SIDE),
    "layer_idx": "0",
    "layer_index": "0",
    "input_dimensions": f"({SIDE}, {SIDE})",
    "input_resolution": f"({SIDE}, {SIDE})",
    "hw": f"({SIDE}, {SIDE})",
    "resolution": f"({SIDE}, {SIDE})",
    "hw_shape": f"({SIDE}, {SIDE})",
    "spatial_shape": f"({SIDE}, {SIDE})",
    "grid_size": f"({SIDE}, {SIDE})",
    "patch_resolution": f"({SIDE}, {SIDE})",
}
MOST_FORMS = 40


# ---- construction


def constructor(init: ast.FunctionDef | None, reads: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Constructor arguments, and the sizes that they and the configuration are given."""
    sizes = config_sizes(reads)
    arguments = {}
    for argument, required in init_arguments(init):
        text, size = argument_rule(argument, required)
        if argument == "config":
            arguments["config"] = "config"
        elif size is not None:
            arguments[argument] = argument
            sizes[argument] = size
        elif text is not None:
            arguments[argument] = text
        elif required:
            raise Rejected("no recipe", f"no recipe for constructor argument `{argument}`")
    heads = [size for size in sizes.values() if size["kind"] == "heads"]
    largest = max((size["base"] for size in heads), default=1)
    for size in heads:
        size["ratio"] = size.pop("base") / largest
    return {"arguments": arguments, "sizes": sizes}


def config_sizes(reads: dict[str, float]) -> dict[str, Any]:
    """What a task's width scales in the configuration; everything else stays as the library has it."""
    widths = [
        name
        for name, value in reads.items()
        if is_count(value) and value >= 16 and SCALED.search(name) and not HEADS.search(name)
    ]
    base = next((reads[name] for name in (*WIDTH_NAMES, *widths) if is_count(reads.get(name))), None)
    sizes = {}
    for key, value in reads.items():
        if not is_count(value):
            continue
        if HEADS.search(key):
            sizes[key] = {"kind": "heads", "base": value}
        elif key == "head_dim":
            sizes[key] = {"kind": "head_dim"}
        elif key in widths and base:
            sizes[key] = {"kind": "width", "ratio": value / base}
        elif key == "vocab_size":
            sizes[key] = {"kind": "given", "base": value}
        elif key == "image_size":
            # Four patches each way, or a small map: the batch makes the work.
            patch = reads.get("patch_size")
            sizes[key] = {"kind": "given", "base": 4 * patch if patch is not None and is_count(patch) else 64}
    return sizes


def is_count(value: float | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def argument_rule(argument: str, required: bool) -> tuple[str | None, dict[str, Any] | None]:
    """`(text, size)` of a constructor argument; both None where it keeps its default or has no recipe."""
    if argument in WIDTH_NAMES or (
        WIDTH_ARGUMENTS.search(argument) and (required or argument in ("normalized_shape", "input_dim", "in_features"))
    ):
        return None, {"kind": "width", "ratio": 1.0}
    if not required:
        return None, None
    if HEADS.search(argument):
        return None, {"kind": "heads", "base": 8}
    if INNER.search(argument):
        return None, {"kind": "width", "ratio": 4.0}
    if argument == "head_dim":
        return None, {"kind": "head_dim"}
    if re.search(r"^(num|n)_(\w+_)?(layers|blocks|branches|stages|repeats?|convs?|groups)$|^depth$", argument):
        return "2", None
    for pattern, value in GIVEN_SIZES:
        if re.search(pattern, argument):
            return None, {"kind": "given", "base": value}
    return next((text for pattern, text in GIVEN_ARGUMENTS if re.search(pattern, argument)), None), None


def init_arguments(init: ast.FunctionDef | None) -> list[tuple[str, bool]]:
    if init is None:
        return []
    defaults = len(init.args.args) - len(init.args.defaults)
    listed = [(a.arg, index < defaults) for index, a in enumerate(init.args.args)][1:]
    return listed + [
        (a.arg, default is None) for a, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    ]


# ---- calls


def forms(forward: ast.FunctionDef | None, sizes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every way to call the class that is worth a try: dicts with `inputs`, `call` and `rotary`."""
    names = [a.arg for a in forward.args.args][1:]
    if not names:
        raise Rejected("no recipe", "its forward takes nothing")
    required = names[: len(names) - len(forward.args.defaults)]
    fixed, peers, angles = sort_arguments(required[1:])
    optional = "position_embeddings" in names and not angles
    found = [
        form(names[0], shape, fill, fixed, peers, rotary, pooled, angles)
        for shape, fill in streams(names[0], sizes)
        for rotary in rotary_forms(angles, optional)
        for pooled in ((False, True) if peers else (False,))
    ]
    return found[:MOST_FORMS]


def sort_arguments(required: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
    """What a call has to give beside the stream: fixed texts, tensors of the stream's kind, rotary angles."""
    fixed, peers, angles = {}, [], []
    for name in required:
        if name in ("position_embeddings", "rotary_pos_emb", "cos", "sin"):
            angles.append(name)
        elif name in NUMBERS:
            fixed[name] = NUMBERS[name]
        elif FLAGS.search(name):
            fixed[name] = "False"
        elif ABSENT_INPUTS.search(name):
            fixed[name] = "None"
        else:
            peers.append(name)
    if len(peers) > 4:
        raise Rejected("no recipe", f"no recipe for arguments {', '.join(peers)}")
    return fixed, peers, angles


def rotary_forms(angles: list[Any], optional: bool) -> tuple[int | str | None, ...]:
    if angles:
        return (3, 2, "added") if "position_embeddings" in angles else (3, 2)
    return (None, 3, 2, "added") if optional else (None,)


def form(
    first: str,
    shape: list[str],
    fill: str,
    fixed: dict[str, Any],
    peers: list[str],
    rotary: int | str | None,
    pooled: bool,
    angles: list[Any],
) -> dict[str, Any]:
    """One call: its inputs, its text, and the rank of its rotary buffers."""
    inputs = [{"name": first, "shape": shape, "fill": fill}]
    call = [first, *(f"{name}={text}" for name, text in fixed.items())]
    width = next((extent for extent in shape if extent not in EXTENTS), "tokens")
    for name in peers:
        own = ["batch", width] if pooled else shape
        inputs.append({"name": name, "shape": own, "fill": "randn"})
        call.append(f"{name}={name}")
    if rotary == "added":
        inputs.append({"name": "position_embeddings", "shape": shape, "fill": "randn"})
        call.append("position_embeddings=position_embeddings")
    elif rotary:
        pair = [f"{name}=self.{name}" for name in ("cos", "sin") if name in angles]
        joined = next((name for name in angles if name not in ("cos", "sin")), "position_embeddings")
        call += pair or [f"{joined}=(self.cos, self.sin)"]
    return {"inputs": inputs, "call": ", ".join(call), **({"rotary": rotary} if rotary in (2, 3) else {})}


EXTENTS = ("batch", "tokens", "side", "grid", "image", "samples", "bands", "frames", "head", "3", "1")


def streams(name: str, sizes: dict[str, dict[str, Any]]) -> list[tuple[list[str], str]]:
    """Shapes of the first argument, the most likely first: `(shape, fill)`."""
    widths = [key for key, size in sizes.items() if size["kind"] == "width"]
    widths.sort(key=lambda key: (INNER.search(key) is not None, key not in WIDTH_NAMES))
    width = widths[0] if widths else "features"
    found = []
    if re.search(r"input_ids|token|ids$|indices|labels", name):
        found.append((["batch", "tokens"], "index:vocab_size" if "vocab_size" in sizes else "index:sequence_length"))
    if re.search(r"pixel|^(image|img|video|frame)s?$", name):
        found += [
            (shape, "randn")
            for shape in (
                ["batch", "3", "image", "image"],
                ["batch", "frames", "3", "image", "image"],
                ["batch", "3", "frames", "image", "image"],
            )
        ]
    if re.search(r"input_values|wave|audio|speech|feature", name):
        found += [
            (["batch", "samples"], "randn"),
            (["batch", "1", "samples"], "randn"),
            (["batch", "bands", "tokens"], "randn"),
            (["batch", "tokens", "bands"], "randn"),
        ]
    found += [
        (shape, "randn")
        for shape in (
            ["batch", "tokens", width],
            ["batch", width, "side", "side"],
            *(["batch", "tokens", other] for other in widths[1:4]),
            ["batch", "grid", width],
            ["batch", "side", "side", width],
            ["batch", width, "tokens"],
            ["batch", width],
            *(["batch", other, "side", "side"] for other in widths[1:3]),
            *(["batch", other] for other in widths[1:3]),
        )
    ]
    found.append((["batch", "3", "image", "image"], "randn"))
    return found


def combined(make: dict[str, dict[str, Any]], form: dict[str, Any]) -> dict[str, Any]:
    """A usage's construction and call, with a free size where the inputs have one that nothing else sets."""
    sizes = {name: dict(size) for name, size in make["sizes"].items()}
    extents = {extent for item in form["inputs"] for extent in item["shape"]}
    if "features" in extents:
        sizes["features"] = {"kind": "free", "ratio": 1.0}
    return {"arguments": make["arguments"], "sizes": sizes, **form}
