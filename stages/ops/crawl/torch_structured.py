"""Recipes for operators of torch whose tensors play different roles, by full name.

Everything else is made from signatures and the tables of `torch_recipes`. A list gives alternatives; each is a usage of
its own and is probed like any other. Some calls go on after the operator, since the stream of a task is float32: the
magnitude of a spectrum, the values of a sort, a mask times what it masks.
"""

from typing import Any

from torch_recipes import (
    ARGUMENTS,
    CHANNEL_PARAMETER,
    FEATURE_DIVISORS,
    INNER_DIMS,
    PEER,
    WIDTHS,
    draft,
    matrix,
    operand,
    pick,
)

ADDMM_OUT = {"out_features": pick(32, 64, 96, 128)}

# Structured operators whose tensors play different roles; a list gives alternatives, each an entry of its own rank.
# These tables are laid out by hand: a formatter gives each argument a line, and no operator fits a screen then.
STRUCTURED = {
    "torch.matmul": [
        draft("torch.matmul({x}, {weight})", symbols=ADDMM_OUT,
              operands=[matrix("weight", ["shape[-1]", "out_features"])]),
    ],
    "torch.mm": [draft("torch.mm({x}, {weight})", symbols=ADDMM_OUT, ranks=[2],
                       operands=[matrix("weight", ["shape[-1]", "out_features"])])],
    "torch.bmm": [draft("torch.bmm({x}, {other})", ranks=[3], symbols=ADDMM_OUT,
                        operands=[matrix("other", ["shape[0]", "shape[-1]", "out_features"], roles=["input"])])],
    "torch.baddbmm": [draft("torch.baddbmm({bias}, {x}, {other})", ranks=[3], symbols=ADDMM_OUT, operands=[
        matrix("other", ["shape[0]", "shape[-1]", "out_features"], roles=["input"]),
        operand("bias", ["1", "1", "out_features"], roles=["parameter"])])],
    "torch.addmm": [draft("torch.addmm({bias}, {x}, {weight})", ranks=[2], symbols=ADDMM_OUT, operands=[
        matrix("weight", ["shape[-1]", "out_features"]), operand("bias", ["out_features"], roles=["parameter"])])],
    "torch.einsum": [
        draft("torch.einsum('bi,ij->bj', {x}, {weight})", ranks=[2], symbols=ADDMM_OUT,
              operands=[matrix("weight", ["shape[-1]", "out_features"])]),
        draft("torch.einsum('bti,ij->btj', {x}, {weight})", ranks=[3], symbols=ADDMM_OUT,
              operands=[matrix("weight", ["shape[-1]", "out_features"])]),
        draft("torch.einsum('bchw,cd->bdhw', {x}, {weight})", ranks=[4], symbols=ADDMM_OUT,
              operands=[operand("weight", ["shape[1]", "out_features"], roles=["parameter", "input"],
                                scale="shape[1] ** -0.5")]),
        draft("torch.einsum('bcdhw,ck->bkdhw', {x}, {weight})", ranks=[5], symbols={"out_channels": pick(8, 16, 32)},
              operands=[operand("weight", ["shape[1]", "out_channels"], roles=["parameter"],
                                scale="shape[1] ** -0.5")]),
    ],
    "torch.inner": [draft("torch.inner({x}, {weight})", symbols=ADDMM_OUT,
                          operands=[matrix("weight", ["out_features", "shape[-1]"])])],
    "torch.tensordot": [draft("torch.tensordot({x}, {weight}, dims=1)", symbols=ADDMM_OUT,
                              operands=[matrix("weight", ["shape[-1]", "out_features"])])],
    "torch.cdist": [draft("torch.cdist({x}, {other})", ranks=[3], symbols={"points": pick(16, 32, 64)},
                          operands=[operand("other", ["shape[0]", "points", "shape[-1]"])])],
    "torch.nn.functional.linear": [draft("F.linear({x}, {weight})", symbols=ADDMM_OUT,
                                         operands=[matrix("weight", ["out_features", "shape[-1]"])])],
    "torch.nn.functional.bilinear": [draft(
        "F.bilinear({x}, {other}, {weight})", ranks=[2],
        symbols={"in2_features": pick(8, 16), "out_features": pick(16, 32)},
        operands=[operand("other", ["shape[0]", "in2_features"]),
                  operand("weight", ["out_features", "shape[-1]", "in2_features"], roles=["parameter"],
                          scale="(in2_features * shape[-1]) ** -0.5")])],
    "torch.nn.Bilinear": [draft(
        "{module}({x}, {other})", "nn.Bilinear({in1_features}, {in2_features}, {out_features})", ranks=[2],
        symbols={"in1_features": ARGUMENTS["in1_features"], "in2_features": pick(8, 16), "out_features": pick(16, 32)},
        operands=[operand("other", ["shape[0]", "in2_features"])])],
    "torch.nn.functional.scaled_dot_product_attention": [draft(
        "F.scaled_dot_product_attention({x}, {key}, {value})", ranks=[3, 4],
        operands=[operand("key"), operand("value")],
        requires=["shape[-2] <= 256"])],
    "torch.nn.MultiheadAttention": [draft(
        "{module}({x}, {x}, {x}, need_weights=False)[0]",
        "nn.MultiheadAttention({embed_dim}, {num_heads}, batch_first=True)", ranks=[3],
        symbols={"embed_dim": ARGUMENTS["embed_dim"], "num_heads": FEATURE_DIVISORS}, requires=["shape[1] <= 256"])],
    "torch.nn.TransformerDecoderLayer": [draft(
        "{module}({x}, {memory})",
        "nn.TransformerDecoderLayer({d_model}, {nhead}, {dim_feedforward}, dropout=0.0, batch_first=True)", ranks=[3],
        symbols={"d_model": ARGUMENTS["d_model"], "nhead": FEATURE_DIVISORS,
                 "dim_feedforward": {"choices": "[2 * d_model]"}},
        operands=[operand("memory")], requires=["shape[1] <= 128"])],
    "torch.nn.Embedding": [draft(
        "{module}({x})", "nn.Embedding({num_embeddings}, {embedding_dim})", ranks=[2], input="index",
        symbols={"num_embeddings": ARGUMENTS["num_embeddings"], "embedding_dim": ARGUMENTS["embedding_dim"]})],
    "torch.nn.EmbeddingBag": [draft(
        "{module}({x})", "nn.EmbeddingBag({num_embeddings}, {embedding_dim}, mode='sum')", ranks=[2], input="index",
        requires=["shape[1] <= 64"],
        symbols={"num_embeddings": ARGUMENTS["num_embeddings"], "embedding_dim": ARGUMENTS["embedding_dim"]})],
    "torch.nn.functional.embedding": [draft(
        "F.embedding({x}, {weight})", ranks=[2], input="index",
        symbols={"num_embeddings": ARGUMENTS["num_embeddings"], "embedding_dim": ARGUMENTS["embedding_dim"]},
        operands=[operand("weight", ["num_embeddings", "embedding_dim"], roles=["parameter", "input"])])],
    "torch.cat": [draft("torch.cat([{x}, {other}], dim={dim})", symbols={"dim": INNER_DIMS}, operands=[PEER])],
    "torch.stack": [draft("torch.stack([{x}, {other}], dim=1)", ranks=[2, 3, 4], operands=[PEER])],
    "torch.hstack": [draft("torch.hstack([{x}, {other}])", operands=[PEER])],
    "torch.addcmul": [draft("torch.addcmul({x}, {tensor1}, {tensor2})",
                            operands=[operand("tensor1"), CHANNEL_PARAMETER | {"name": "tensor2"}])],
    "torch.addcdiv": [draft("torch.addcdiv({x}, {tensor1}, {tensor2})",
                            operands=[operand("tensor1"), operand("tensor2", fill="positive")])],
    "torch.lerp": [draft("torch.lerp({x}, {end}, {weight})", symbols={"weight": pick(0.3, 0.7)},
                         operands=[operand("end")])],
    "torch.pow": [draft("torch.pow({x}, {exponent})", symbols={"exponent": pick(2, 3)})],
    "torch.where": [draft("torch.where({x} > {threshold}, {x}, {other})", symbols={"threshold": pick(-0.5, 0.0, 0.5)},
                          operands=[PEER])],
    "torch.masked_fill": [draft("torch.masked_fill({x}, {x} > {threshold}, {value})",
                                symbols={"threshold": pick(0.5, 0.75), "value": pick(0.25, 0.5)})],
    "torch.nn.functional.pad": [draft("F.pad({x}, {padding})",
                                      symbols={"padding": {"choices": "[(1, 1), (2, 2), (1, 2)]"}})],
    "torch.nn.functional.layer_norm": [draft("F.layer_norm({x}, ({normalized_shape},))",
                                             symbols={"normalized_shape": {"value": "shape[-1]"}})],
    "torch.nn.functional.rms_norm": [draft("F.rms_norm({x}, ({normalized_shape},))",
                                           symbols={"normalized_shape": {"value": "shape[-1]"}})],
    "torch.nn.functional.prelu": [draft("F.prelu({x}, {slope})", operands=[
        operand("slope", ["shape[1]"], fill="rand", roles=["parameter"])])],
    "torch.nn.functional.cross_entropy": [draft(
        "F.cross_entropy({x}, {target}, reduction='none')", ranks=[2, 3, 4],
        operands=[operand("target", "(shape[0],) + shape[2:]", fill="index:shape1")])],
    "torch.nn.functional.nll_loss": [draft(
        "F.nll_loss({x}, {target}, reduction='none')", ranks=[2, 3, 4],
        operands=[operand("target", "(shape[0],) + shape[2:]", fill="index:shape1")])],
}  # fmt: skip

for _digits, _rank in ((1, 3), (2, 4), (3, 5)):
    _kernel = ["kernel_size"] * _digits
    STRUCTURED[f"torch.nn.functional.conv{_digits}d"] = [
        draft(
            f"F.conv{_digits}d({{x}}, {{weight}}, padding={{padding}})",
            ranks=[_rank],
            symbols={"kernel_size": pick(1, 3), "out_channels": WIDTHS, "padding": {"choices": "[kernel_size // 2]"}},
            operands=[
                operand(
                    "weight",
                    ["out_channels", "shape[1]", *_kernel],
                    roles=["parameter"],
                    scale=f"(shape[1] * kernel_size ** {_digits}) ** -0.5",
                )
            ],
        )
    ]
    STRUCTURED[f"torch.nn.functional.conv_transpose{_digits}d"] = [
        draft(
            f"F.conv_transpose{_digits}d({{x}}, {{weight}}, stride={{stride}})",
            ranks=[_rank],
            symbols={"kernel_size": pick(2, 3), "out_channels": WIDTHS, "stride": pick(2)},
            operands=[
                operand(
                    "weight",
                    ["shape[1]", "out_channels", *_kernel],
                    roles=["parameter"],
                    scale=f"(shape[1] * kernel_size ** {_digits}) ** -0.5",
                )
            ],
        )
    ]

# ---- nn modules and F functions with further tensors or with arguments that belong together

LAYER = {"d_model": ARGUMENTS["d_model"], "nhead": FEATURE_DIVISORS, "dim_feedforward": {"choices": "[2 * d_model]"}}
LAYER_ARGUMENTS = "{d_model}, {nhead}, {dim_feedforward}, dropout=0.0, batch_first=True"
TARGET = operand("target", fill="rand")
# Columns of a map that `fold` puts together: one for each place of a 2x2 window in a map one larger each way.
FOLDED = {
    "output_size": {
        "choices": "[(h + 1, shape[2] // h + 1) for h in (2, 3, 4, 6, 8, 12, 16) if shape[2] % h == 0 and shape[2] > h]"
    }
}
GRIDS = {4: ["shape[0]", "shape[2]", "shape[3]", "2"], 5: ["shape[0]", "shape[2]", "shape[3]", "shape[4]", "3"]}

STRUCTURED |= {
    "torch.nn.BCELoss": [draft("{module}(torch.sigmoid({x}), {target})", "nn.BCELoss(reduction='none')",
                               operands=[TARGET])],
    "torch.nn.functional.binary_cross_entropy": [draft(
        "F.binary_cross_entropy(torch.sigmoid({x}), {target}, reduction='none')", operands=[TARGET])],
    "torch.nn.MultiLabelMarginLoss": [draft(
        "{module}({x}, {target})", "nn.MultiLabelMarginLoss(reduction='none')", ranks=[2],
        operands=[operand("target", fill="index:shape1")], cost={"flops": "8 * x * shape[1]", "bytes": "12 * x"})],
    "torch.nn.functional.multilabel_margin_loss": [draft(
        "F.multilabel_margin_loss({x}, {target}, reduction='none')", ranks=[2],
        operands=[operand("target", fill="index:shape1")], cost={"flops": "8 * x * shape[1]", "bytes": "12 * x"})],
    "torch.nn.AdaptiveLogSoftmaxWithLoss": [draft(
        "{module}.log_prob({x})", "nn.AdaptiveLogSoftmaxWithLoss({in_features}, {n_classes}, cutoffs=[{cutoff}])",
        ranks=[2], symbols={"in_features": ARGUMENTS["in_features"], "n_classes": pick(1000, 2000),
                            "cutoff": pick(100, 400)},
        cost={"flops": "2 * x * 400 + 20 * y", "bytes": "4 * (x + 3 * y + w)"})],
    "torch.nn.TransformerEncoder": [draft(
        "{module}({x})",
        f"nn.TransformerEncoder(nn.TransformerEncoderLayer({LAYER_ARGUMENTS}), num_layers={{num_layers}}, "
        "enable_nested_tensor=False)", ranks=[3], symbols={**LAYER, "num_layers": pick(1, 2)},
        requires=["shape[1] <= 128"])],
    "torch.nn.TransformerDecoder": [draft(
        "{module}({x}, {memory})",
        f"nn.TransformerDecoder(nn.TransformerDecoderLayer({LAYER_ARGUMENTS}), num_layers={{num_layers}})", ranks=[3],
        symbols={**LAYER, "num_layers": pick(1, 2)}, operands=[operand("memory")], requires=["shape[1] <= 128"])],
    "torch.nn.Transformer": [draft(
        "{module}({source}, {x})",
        "nn.Transformer({d_model}, {nhead}, num_encoder_layers=1, num_decoder_layers=1, "
        "dim_feedforward={dim_feedforward}, dropout=0.0, batch_first=True)", ranks=[3], symbols=LAYER,
        operands=[operand("source")], requires=["shape[1] <= 128"])],
    "torch.nn.Fold": [draft("{module}({x})", "nn.Fold({output_size}, kernel_size=2)", ranks=[3], symbols=FOLDED,
                            requires=["shape[1] % 4 == 0"])],
    "torch.nn.functional.fold": [draft("F.fold({x}, {output_size}, kernel_size=2)", ranks=[3], symbols=FOLDED,
                                       requires=["shape[1] % 4 == 0"])],
    "torch.nn.functional.grid_sample": [
        draft("F.grid_sample({x}, {grid}, mode={mode}, align_corners=False)", ranks=[rank],
              symbols={"mode": pick("bilinear", "nearest", literal=True)},
               operands=[operand("grid", grid, fill="unit")])
        for rank, grid in GRIDS.items()],
    "torch.nn.functional.affine_grid": [
        draft("F.grid_sample({x}, F.affine_grid({theta}, {x}.shape, align_corners=False), align_corners=False)",
              ranks=[rank], operands=[operand("theta", ["shape[0]", str(rank - 2), str(rank - 1)], fill="unit")])
        for rank in GRIDS],
    "torch.nn.functional.embedding_bag": [draft(
        "F.embedding_bag({x}, {weight}, mode={mode})", ranks=[2], input="index", requires=["shape[1] <= 64"],
        symbols={"num_embeddings": ARGUMENTS["num_embeddings"], "embedding_dim": ARGUMENTS["embedding_dim"],
                 "mode": pick("sum", "mean", literal=True)},
        operands=[operand("weight", ["num_embeddings", "embedding_dim"], roles=["parameter"])])],
    "torch.nn.functional.instance_norm": [draft("F.instance_norm({x})", ranks=[3, 4, 5])],
    "torch.nn.functional.batch_norm": [draft(
        "F.batch_norm({x}, {mean}, {variance})", ranks=[2, 3, 4, 5], operands=[
            operand("mean", ["shape[1]"], roles=["parameter"]),
            operand("variance", ["shape[1]"], fill="positive", roles=["parameter"])])],
    "torch.layer_norm": [draft("torch.layer_norm({x}, ({normalized_shape},))",
                               symbols={"normalized_shape": {"value": "shape[-1]"}})],
    "torch.rms_norm": [draft("torch.rms_norm({x}, ({normalized_shape},))",
                             symbols={"normalized_shape": {"value": "shape[-1]"}})],
    "torch.embedding": [draft(
        "torch.embedding({weight}, {x})", ranks=[2], input="index",
        symbols={"num_embeddings": ARGUMENTS["num_embeddings"], "embedding_dim": ARGUMENTS["embedding_dim"]},
        operands=[operand("weight", ["num_embeddings", "embedding_dim"], roles=["parameter"])])],
}  # fmt: skip

for _digits in (1, 2, 3):
    # Most of what unpooling alone gives is zero; models add it to a skip connection.
    _even = [f"shape[{axis}] % 2 == 0" for axis in range(2, _digits + 2)]
    _pooled = f"*F.max_pool{_digits}d({{x}}, 2, return_indices=True)"
    STRUCTURED[f"torch.nn.MaxUnpool{_digits}d"] = [
        draft(f"{{module}}({_pooled}) + {{x}}", f"nn.MaxUnpool{_digits}d(2)", ranks=[_digits + 2], requires=_even)
    ]
    STRUCTURED[f"torch.nn.functional.max_unpool{_digits}d"] = [
        draft(f"F.max_unpool{_digits}d({_pooled}, 2) + {{x}}", ranks=[_digits + 2], requires=_even)
    ]

# ---- cells of recurrent networks, given their weights

HIDDEN = pick(32, 48, 64, 96)


def cell(
    call: str, gates: int, states: tuple[str, ...] = ("hidden",), biases: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """A step of a recurrent network as a function of its weights."""
    scale, rows, symbols = "hidden_size ** -0.5", "hidden_size", {"hidden_size": HIDDEN}
    if gates > 1:
        # A symbol of its own, so that the task has a name for it.
        rows, symbols = "gate_size", {**symbols, "gate_size": {"choices": f"[{gates} * hidden_size]"}}
    return [
        draft(
            call,
            ranks=[2],
            symbols=symbols,
            operands=[
                *(operand(state, ["shape[0]", "hidden_size"]) for state in states),
                operand("input_weight", [rows, "shape[1]"], roles=["parameter"], scale=scale),
                operand("hidden_weight", [rows, "hidden_size"], roles=["parameter"], scale=scale),
                *(operand(bias, [rows], roles=["parameter"], scale=scale) for bias in biases),
            ],
        )
    ]


STRUCTURED |= {
    f"torch.{name}": cell(f"torch.{name}({{x}}, {{hidden}}, {{input_weight}}, {{hidden_weight}})", gates)
    for name, gates in (("rnn_tanh_cell", 1), ("rnn_relu_cell", 1), ("gru_cell", 3))
}
# Without its biases it does not compile on a GPU.
STRUCTURED["torch.lstm_cell"] = cell(
    "torch.lstm_cell({x}, ({hidden}, {memory}), {input_weight}, {hidden_weight}, {input_bias}, {hidden_bias})[0]",
    4,
    ("hidden", "memory"),
    ("input_bias", "hidden_bias"),
)

# ---- torch: what takes indices along the channels, masks, arrangements, vectors of three

INDEX = operand("index", fill="index:shape1")
PLACES = operand("index", ["shape[1]"], fill="index:shape1")
SOURCE = operand("source")
SORTED = operand("boundaries", ["bins"])
THREES = "{x}.unflatten(-1, (-1, 3)), {other}.unflatten(-1, (-1, 3))"
HALF = operand("index", ["shape[1] // 2"], fill="index:shape1")

STRUCTURED |= {
    "torch.gather": [draft("torch.gather({x}, 1, {index})", operands=[INDEX])],
    "torch.take_along_dim": [draft("torch.take_along_dim({x}, {index}, dim=1)", operands=[INDEX])],
    "torch.index_select": [draft("torch.index_select({x}, 1, {index})", operands=[PLACES])],
    "torch.index_fill": [draft("torch.index_fill({x}, 1, {index}, {value})", symbols={"value": pick(0.25, 0.5)},
                               operands=[HALF])],
    # Sums into the same place have no fixed order on a GPU; the largest of several does not depend on it.
    "torch.scatter_reduce": [draft("torch.scatter_reduce({x}, 1, {index}, {source}, reduce={reduce})",
                                   symbols={"reduce": pick("amax", "amin", literal=True)}, operands=[INDEX, SOURCE])],
    "torch.index_reduce": [draft("torch.index_reduce({x}, 1, {index}, {source}, reduce={reduce})",
                                 symbols={"reduce": pick("amax", "amin", literal=True)}, operands=[PLACES, SOURCE])],
    "torch.bucketize": [draft("torch.bucketize({x}, {boundaries}.sort().values).float()",
                              symbols={"bins": pick(16, 32, 64)}, operands=[SORTED])],
    "torch.searchsorted": [draft("torch.searchsorted({boundaries}.sort().values, {x}).float()",
                                 symbols={"bins": pick(16, 32, 64)}, operands=[SORTED])],
    **{f"torch.{name}": [draft(f"torch.where(torch.{name}({{x}}, {{other}}), {{x}}, {{slope}} * {{other}})",
                               symbols={"slope": pick(0.1, 0.25, 0.5)}, operands=[PEER])]
       for name in ("gt", "ge", "lt", "le")},
    **{f"torch.logical_{name}": [draft(
        f"{{x}} * torch.logical_{name}({{x}} > {{threshold}}, {{other}} > {{threshold}})",
        symbols={"threshold": pick(-0.5, -0.25)}, operands=[PEER])] for name in ("and", "or", "xor")},
    "torch.isclose": [draft("torch.where(torch.isclose({x}, {other}, atol={atol}), {x}, -{other})",
                            symbols={"atol": pick(0.5, 1.0)}, operands=[PEER])],
    **{f"torch.{name}": [draft(f"torch.{name}({{x}}, dim={{dim}}).float()", symbols={"dim": INNER_DIMS})]
       for name in ("argmax", "argmin")},
    "torch.aminmax": [draft("torch.aminmax({x}, dim={dim})[1]", symbols={"dim": INNER_DIMS})],
    "torch.constant_pad_nd": [draft("torch.constant_pad_nd({x}, {padding}, {value})", symbols={
        "padding": {"choices": "[(1, 1), (2, 2), (1, 2)]"}, "value": pick(0.25, 0.5)})],
    "torch.column_stack": [draft("torch.column_stack([{x}, {other}])", operands=[PEER])],
    "torch.dstack": [draft("torch.dstack([{x}, {other}])", ranks=[3, 4, 5], operands=[PEER])],
    "torch.tile": [draft("torch.tile({x}, {repeats})", symbols={"repeats": {
        "choices": "[(1,) * d + (2,) + (1,) * (len(shape) - 1 - d) for d in range(1, len(shape))]", "literal": True}})],
    "torch.repeat_interleave": [draft("torch.repeat_interleave({x}, {repeats}, dim={dim})",
                                      symbols={"repeats": pick(2, 3), "dim": INNER_DIMS})],
    "torch.renorm": [draft("torch.renorm({x}, 2, 0, {maxnorm})", symbols={"maxnorm": pick(1.0, 2.0, 4.0)})],
    "torch.gradient": [draft("torch.gradient({x}, dim={dim})[0]", symbols={"dim": INNER_DIMS})],
    "torch.copysign": [draft("torch.copysign({x}, {other})", operands=[PEER])],
    "torch.ldexp": [draft("torch.ldexp({x}, {other})", operands=[PEER])],
    "torch.logit": [draft("torch.logit({x}, eps={eps})", symbols={"eps": pick(0.01, 0.05)})],
    "torch.polygamma": [draft("torch.polygamma({order}, {x})", symbols={"order": pick(1, 2)})],
    **{f"torch.{name}": [draft(f"torch.{name}({{x}}, {{other}})", operands=[operand("other", fill="positive")])]
       for name in ("igamma", "igammac")},
    "torch.cross": [draft(f"torch.cross({THREES}, dim=-1).flatten(-2)", requires=["shape[-1] % 3 == 0"],
                          operands=[PEER])],
    "torch.complex": [draft("torch.complex({x}, {other}).abs()", operands=[PEER])],
    "torch.polar": [draft("torch.view_as_real(torch.polar({radius}, {x})).flatten(-2)",
                          operands=[operand("radius", fill="positive")])],
    "torch.view_as_complex": [draft(
        "torch.view_as_real(torch.view_as_complex({x}.unflatten(-1, (-1, 2))) * "
        "torch.view_as_complex({rotation}.unflatten(-1, (-1, 2)))).flatten(-2)",
        requires=["shape[-1] % 2 == 0"], operands=[operand("rotation", ["shape[-1]"])])],
    "torch.stft": [draft(
        "torch.stft({x}, {n_fft}, hop_length={hop_length}, window={window}, return_complex=True).abs()", ranks=[2],
        symbols={"n_fft": {"choices": "[n for n in (16, 64, 128, 256) if n <= shape[1] // 2]"},
                 "hop_length": {"choices": "[n_fft // 2, n_fft // 4]"}},
        operands=[operand("window", ["n_fft"], fill="rand", roles=["parameter"])],
        cost={"flops": "5 * y * math.log2(n_fft)", "bytes": "4 * (x + 8 * y)"})],
}  # fmt: skip

# ---- torch.linalg: norms and products

STRUCTURED |= {
    "torch.linalg.vector_norm": [draft("torch.linalg.vector_norm({x}, {ord}, dim={dim})",
                                       symbols={"ord": pick(1, 2, 3), "dim": INNER_DIMS})],
    "torch.linalg.norm": [draft("torch.linalg.norm({x}, dim={dim}, keepdim=True)", symbols={"dim": INNER_DIMS})],
    "torch.linalg.matrix_norm": [draft("torch.linalg.matrix_norm({x}, ord={ord})", ranks=[3, 4, 5],
                                       symbols={"ord": pick("fro", 1, literal=True)})],
    "torch.linalg.vecdot": [draft("torch.linalg.vecdot({x}, {other})", operands=[PEER])],
    "torch.linalg.cross": [draft(f"torch.linalg.cross({THREES}).flatten(-2)", requires=["shape[-1] % 3 == 0"],
                                 operands=[PEER])],
    "torch.linalg.matmul": [draft("torch.linalg.matmul({x}, {weight})", symbols=ADDMM_OUT,
                                  operands=[matrix("weight", ["shape[-1]", "out_features"])])],
    "torch.linalg.multi_dot": [draft(
        "torch.linalg.multi_dot([{x}, {first}, {second}])", ranks=[2],
        symbols={"rank": pick(16, 32), "out_features": pick(64, 128, 256)},
        operands=[matrix("first", ["shape[-1]", "rank"], roles=["parameter"]),
                  operand("second", ["rank", "out_features"], roles=["parameter"], scale="rank ** -0.5")],
        cost={"flops": "2 * x * rank + 2 * y * rank", "bytes": "4 * (x + y + w)"})],
    "torch.linalg.matrix_power": [draft(
        "torch.linalg.matrix_power({x}, {power})", ranks=[3, 4, 5], symbols={"power": pick(2, 3)},
        requires=["shape[-1] == shape[-2]"], cost={"flops": "4 * x * shape[-1]", "bytes": "16 * x"})],
    "torch.linalg.matrix_exp": [draft(
        "torch.linalg.matrix_exp({scale} * {x})", ranks=[3, 4, 5], symbols={"scale": pick(0.05, 0.1)},
        requires=["shape[-1] == shape[-2]", "shape[-1] <= 32"],
        cost={"flops": "40 * x * shape[-1]", "bytes": "120 * x"})],
}  # fmt: skip

# ---- torch.fft: transforms of real signals, seen by their magnitude where they are complex

SPECTRA = {
    "fft": "torch.fft.fft({x}, dim={dim}).abs()",
    "ifft": "torch.fft.ifft({x}, dim={dim}, norm='ortho').abs()",
    "rfft": "torch.fft.rfft({x}, dim={dim}).abs()",
    "irfft": "torch.fft.irfft({x}, dim={dim}, norm='ortho')",
    "hfft": "torch.fft.hfft({x}, dim={dim}, norm='ortho')",
    "ihfft": "torch.fft.ihfft({x}, dim={dim}, norm='ortho').real",
}
for _name, _call in SPECTRA.items():
    STRUCTURED[f"torch.fft.{_name}"] = [draft(_call, symbols={"dim": INNER_DIMS})]
for _name in ("fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2"):
    _tail = "" if _name in ("irfft2", "hfft2") else ".real"
    STRUCTURED[f"torch.fft.{_name}"] = [draft(f"torch.fft.{_name}({{x}}, norm='ortho'){_tail}", ranks=[3, 4, 5])]
for _name in ("fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn"):
    _tail = "" if _name in ("irfftn", "hfftn") else ".real"
    STRUCTURED[f"torch.fft.{_name}"] = [
        draft(
            f"torch.fft.{_name}({{x}}, dim={{dims}}, norm='ortho'){_tail}",
            ranks=[3, 4, 5],
            symbols={"dims": {"choices": "[tuple(range(1, len(shape)))]", "literal": True}},
        )
    ]
for _name in ("fftshift", "ifftshift"):
    STRUCTURED[f"torch.fft.{_name}"] = [draft(f"torch.fft.{_name}({{x}}, dim={{dim}})", symbols={"dim": INNER_DIMS})]

# ---- torch.special: orthogonal polynomials of a fixed degree, and functions of two values

for _name in (
    "chebyshev_polynomial_t",
    "chebyshev_polynomial_u",
    "chebyshev_polynomial_v",
    "chebyshev_polynomial_w",
    "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
):
    STRUCTURED[f"torch.special.{_name}"] = [
        draft(f"torch.special.{_name}({{x}}, {{degree}})", symbols={"degree": pick(2, 3, 4)})
    ]
STRUCTURED |= {
    "torch.special.zeta": [draft("torch.special.zeta({x}, {other})", operands=[operand("other", fill="positive")])],
    "torch.special.xlog1py": [
        draft("torch.special.xlog1py({x}, {other})", operands=[operand("other", fill="positive")])
    ],
    "torch.xlogy": [draft("torch.xlogy({x}, {other})", operands=[operand("other", fill="positive")])],
    "torch.special.ndtri": [draft("torch.special.ndtri(torch.sigmoid({x}))")],
}
