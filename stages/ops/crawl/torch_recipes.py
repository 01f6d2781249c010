"""Argument recipes: what a constructor or a call of torch is given, by family and by the name of the argument.

The crawl finds the operators in the installed torch; these tables only say how an argument of a given name is filled,
so an operator that a new torch adds is picked up wherever its arguments are of a known kind. Each recipe is a draft
usage (see `operator_binding`); `torch_crawl` runs every draft before it is believed.
"""

import re

RANDOM_NAME = re.compile(r"dropout|rrelu|fractional|gumbel|bernoulli|multinomial|poisson$|^normal$|binomial")

# Families by name, first match wins; the name is without its module (`Conv2d`, `conv2d`).
FAMILIES = [
    ("recurrent", r"^(RNN|LSTM|GRU)(Cell)?$"),
    ("attention", r"MultiheadAttention|scaled_dot_product_attention|^Transformer\w*Layer$"),
    ("convolution", r"conv(_transpose|transpose)?[123]d$|^conv_tbc$"),
    ("embedding", r"embedding(bag|_bag)?$"),
    ("loss", r"loss$|^cross_entropy$|^binary_cross_entropy|^kl_div$"),
    ("pooling", r"pool[123]d$|unpool"),
    ("normalization", r"norm[123]d$|^(Layer|Group|RMS)Norm$|_norm$|^normalize$|response_?norm$|CrossMapLRN2d"),
    ("padding", r"pad[123]d$|^pad$|constant_pad_nd"),
    ("resampling", r"upsampl|interpolate|pixel_?(un)?shuffle|^(Un)?fold$|^unfold$|grid_sample"),
    ("softmax", r"soft(max|min)(2d)?$"),
    ("linear", r"^(bi)?linear$"),
    ("matmul", r"^(matmul|mm|bmm|baddbmm|addbmm|addmm|einsum|inner|tensordot|kron|mv|addmv|dot|outer|chain_matmul|cdist)$"),
    ("scan", r"^(cum\w+|logcumsumexp|cumulative_trapezoid|diff)$"),
    ("ordering", r"^(sort|msort|topk|kthvalue|median|nanmedian|mode|quantile|nanquantile)$"),
    ("reduction", r"^(sum|nansum|mean|nanmean|std|var|prod|amax|amin|max|min|norm|logsumexp|trapezoid|std_mean|var_mean|"
                  r"aminmax|cov|corrcoef|renorm)$"),
    ("similarity", r"cosine_?similarity|pairwise_?distance"),
    ("arrangement", r"^(roll|flip\w*|rot90|tril|triu|cat|stack|hstack|vstack|dstack|column_stack|tile|repeat_interleave|"
                    r"channel_?shuffle|native_channel_shuffle|diag_embed|block_diag)$"),
    ("gating", r"^glu$"),
    ("activation", r"elu\d?$|sigmoid$|tanh|swish|silu|mish|soft|hard|shrink$|threshold"),
]


def family_of(name):
    for family, pattern in FAMILIES:
        if re.search(pattern, name, re.IGNORECASE):
            return family
    return "elementwise"


# Operations of one element relative to a multiply-add: transcendental functions cost more than arithmetic.
ELEMENT_WEIGHTS = [
    (r"digamma|lgamma|igamma|polygamma|mvlgamma|erfinv|i0|zeta|acosh|asinh", 200),
    (r"atanh|xlogy|logit|atan2|pow|tan$|sinh|cosh|hypot|logaddexp|sinc|asin|acos|atan|fmod|remainder|float_power", 30),
    (r"exp|log|sin|cos|tanh|erf|gelu|mish|elu|sig|silu|soft", 12),
    (r".", 1),
]


def element_weight(name):
    return next(weight for pattern, weight in ELEMENT_WEIGHTS if re.search(pattern, name, re.IGNORECASE))


TRAFFIC = "4 * (x + y + o + w)"


def cost_of(family, name):
    """Flops and bytes as functions of the shape; `operator_binding` says what the names mean.

    Flops are counted in multiply-adds at the rate of a matrix product: what runs without vector units, sorts or makes
    decisions per element counts for as many more as it takes longer.
    """
    transposed = {"1d": 4, "2d": 12, "3d": 40}.get(name[-2:], 12)
    pooled = 25 if name.lower().startswith(("maxpool1d", "max_pool1d", "avg")) else 180
    rules = {
        "convolution": {"flops": f"{transposed} * x * w / shape[1]" if "ranspose" in name else "2 * y * w / out[1]"},
        "linear": {"flops": f"{8 if 'ilinear' in name else 2} * x / shape[-1] * w"},
        "matmul": {"flops": "2 * x * (operands[0][-1] if operands else 1)"},
        "recurrent": {"flops": "2 * x / shape[-1] * w", "steps": "shape[1] if len(shape) == 3 else 1"},
        "attention": {"flops": "4 * x * shape[-2] + 2 * x / shape[-1] * w", "bytes": "12 * (x + y + o + w)"},
        "normalization": {"flops": "8 * x", "bytes": "4 * (2 * x + y + w)"},
        "softmax": {"flops": "20 * x", "bytes": "4 * (2 * x + y)"},
        "pooling": {"flops": f"{pooled} * x"},
        "resampling": {"flops": f"{40 if 'huffle' in name else 120} * (x + y)"},
        "ordering": {"flops": "1500 * x", "bytes": "12 * (x + y)"},
        "scan": {"flops": "500 * x"},
        "reduction": {"flops": "500 * x" if re.search("var|std|nan", name) else "50 * x"},
        "loss": {"flops": "12 * x", "bytes": "6 * (x + o)"},
        "similarity": {"flops": "6 * x", "bytes": "5 * (x + o)"},
        "arrangement": {"flops": "2 * y"},
    }
    default = {"flops": f"{element_weight(name)} * y"}
    return {"bytes": TRAFFIC, "steps": 0, **rules.get(family, default)}


def pick(*options, literal=False):
    return {"choices": repr(list(options)), **({"literal": True} if literal else {})}


def computed(expression):
    return {"choices": expression}


DIVISORS = "[n for n in (2, 4, 8, 16) if {extent} % n == 0 and {extent} > n]"
CHANNEL_DIVISORS = computed(DIVISORS.format(extent="shape[1]"))
FEATURE_DIVISORS = computed("[n for n in (2, 4, 8) if shape[-1] % n == 0 and shape[-1] // n >= 8]")
INNER_DIMS = {"choices": "range(1, len(shape))", "literal": True}
LAST_DIMS = {"choices": "[-1] if len(shape) < 4 else [1, -1]", "literal": True}
WIDTHS = pick(16, 24, 32, 48, 64, 96, 128)

# Required constructor arguments of modules, and required plain arguments of functions.
ARGUMENTS = {
    "in_channels": {"value": "shape[1]"}, "num_features": {"value": "shape[1]"}, "num_channels": {"value": "shape[1]"},
    "in_features": {"value": "shape[-1]"}, "normalized_shape": {"value": "shape[-1]"},
    "in1_features": {"value": "shape[-1]"}, "in2_features": pick(8, 16),
    "input_size": {"value": "shape[-1]"}, "embed_dim": {"value": "shape[-1]"}, "d_model": {"value": "shape[-1]"},
    "out_channels": WIDTHS, "out_features": pick(32, 48, 64, 96, 128, 192, 256), "hidden_size": pick(32, 48, 64, 96),
    "num_embeddings": pick(1000, 4096, 8192), "embedding_dim": pick(32, 64, 128),
    "kernel_size": pick(2, 3), "output_size": pick(3, 4, 5, 6), "num_groups": CHANNEL_DIVISORS,
    "groups": CHANNEL_DIVISORS, "num_heads": FEATURE_DIVISORS, "nhead": FEATURE_DIVISORS,
    "padding": pick(1, 2), "value": pick(0.5, 1.0, -0.5), "threshold": pick(0.1, 0.25), "lambd": pick(0.25, 0.5),
    "upscale_factor": pick(2), "downscale_factor": pick(2), "size": pick(3, 5), "norm_type": pick(2.0, 3.0),
    "dim": INNER_DIMS, "exponent": pick(2, 3, 1.5), "min": pick(-0.5, -0.25, 0.1), "max": pick(0.5, 0.75),
    "weight": pick(0.3, 0.7), "other": pick(0.5, 1.5, 2.0), "reduction": {"value": "'none'", "literal": True},
    "shifts": pick(1, 2, 5), "k": computed("[n for n in (4, 8) if shape[-1] >= 2 * n]"), "q": pick(0.25, 0.75),
    "p": pick(1, 2, 3), "delta": pick(0.5, 1.5), "beta": pick(0.5, 2.0), "margin": pick(0.5, 1.5),
    "negative_slope": pick(0.05, 0.1, 0.2), "alpha": pick(0.75, 1.25, 1.5), "eps": pick(1e-6, 1e-5),
    "chunks": pick(2), "n": pick(1, literal=True), "input": None,
}

# Optional arguments that are given anyway: without them the operator reduces the batch away, means something else, or
# is hardly ever used that way. (family or name pattern, argument, recipe.)
EXTRAS = [
    (r"^Conv[123]d$", "padding", {"choices": "[kernel_size // 2]"}),
    (r"^Conv[123]d$", "bias", pick(True, False, literal=True)),
    (r"^ConvTranspose[123]d$", "stride", pick(2)),
    (r"^(Log)?Soft(max|min)$|^(log_)?soft(max|min)$", "dim", LAST_DIMS),
    (r"^glu$", "dim", {"choices": "[d for d in range(1, len(shape)) if shape[d] % 2 == 0]", "literal": True}),
    (r"Loss\w*$|_loss$|^cross_entropy$|^binary_cross_entropy|^kl_div$", "reduction",
     {"value": "'none'", "literal": True}),
    (r"^(RNN|LSTM|GRU)$", "input_size", {"value": "shape[-1]"}),
    (r"^(RNN|LSTM|GRU)$", "hidden_size", pick(32, 48, 64)),
    (r"^(RNN|LSTM|GRU|MultiheadAttention|Transformer\w*Layer)$", "batch_first", {"value": "True", "literal": True}),
    (r"^Transformer\w*Layer$", "dim_feedforward", {"choices": "[2 * d_model, 4 * d_model]"}),
    (r"^Transformer\w*Layer$", "dropout", {"value": "0.0", "literal": True}),
    (r"^Upsample$|^interpolate$|^Upsampling\w+$", "scale_factor", pick(2, literal=False)),
    (r"^(Upsample|interpolate)$", "mode",
     {"choices": "{3: ['nearest', 'linear'], 4: ['nearest', 'bilinear', 'bicubic'], 5: ['nearest', 'trilinear']}"
                 "[len(shape)]", "literal": True}),
    (r"^InstanceNorm[123]d$", "affine", pick(True, False, literal=True)),
    (r"^PReLU$", "num_parameters", {"value": "shape[1]"}),
    (r"^(LeakyReLU|leaky_relu)$", "negative_slope", ARGUMENTS["negative_slope"]),
    (r"^(ELU|CELU|elu|celu)$", "alpha", ARGUMENTS["alpha"]),
    (r"^(Hard|Soft)shrink$|^(hard|soft)shrink$", "lambd", ARGUMENTS["lambd"]),
    (r"^(GELU|gelu)$", "approximate", pick("none", "tanh", literal=True)),
    (r"^(Softplus|softplus)$", "beta", ARGUMENTS["beta"]),
    (r"^(Hardtanh|hardtanh)$", "min_val", pick(-0.75, -1.5)),
    (r"^(Hardtanh|hardtanh)$", "max_val", pick(0.75, 1.5)),
    (r"^Huber|^huber", "delta", ARGUMENTS["delta"]),
    (r"^SmoothL1|^smooth_l1", "beta", ARGUMENTS["beta"]),
    (r"^Cosine(Similarity|Embedding)|^cosine_similarity", "dim", {"value": "-1", "literal": True}),
    (r"^normalize$", "dim", LAST_DIMS),
    (r"^(AvgPool|MaxPool)[123]d$", "stride", pick(2)),
    (r"^clamp$", "min", ARGUMENTS["min"]),
    (r"^clamp$", "max", ARGUMENTS["max"]),
    (r"^(std|var|sum|nansum|mean|nanmean|amax|amin|prod|max|min|norm|logsumexp|median|nanmedian|mode|aminmax|"
     r"kthvalue|quantile|nanquantile|cum\w+|logcumsumexp|sort|topk|std_mean|var_mean|trapezoid|cumulative_trapezoid|"
     r"diff)$", "dim", INNER_DIMS),
    (r"^(amax|amin|sum|mean|logsumexp|norm|var|std)$", "keepdim", pick(True, False, literal=True)),
    (r"^topk$", "k", {"choices": "[n for n in (4, 8, 16) if n < shape[dim]]"}),
    (r"^kthvalue$", "k", {"choices": "[n for n in (2, 3, 4) if n < shape[dim]]"}),
    (r"^roll$", "dims", INNER_DIMS),
    (r"^flip$", "dims", {"choices": "[[d] for d in range(1, len(shape))]", "literal": True}),
    (r"^rot90$", "dims", {"choices": "[[d, d + 1] for d in range(min(2, len(shape) - 2), len(shape) - 1)]", "literal": True}),
    (r"^rot90$", "k", pick(1, literal=True)),
]

SAME = "shape"
BROADCASTS = ["[1] * (len(shape) - 1)", "(shape[-1],)", "(shape[1],) + (1,) * (len(shape) - 2)", "shape"]


def operand(name, shape=SAME, fill="randn", roles=("input",), scale=1.0):
    return {"name": name, "shape": shape, "fill": fill, "roles": list(roles), "scale": scale}


PEER = operand("other", roles=["input"])
CHANNEL_PARAMETER = operand("scale", "(shape[1],) + (1,) * (len(shape) - 2)", roles=["parameter"])
SCALED = "1 / math.sqrt({0})"


def matrix(name, shape, roles=("parameter", "input")):
    """A weight whose product keeps the stream's magnitude."""
    return operand(name, shape, roles=roles, scale="shape[-1] ** -0.5")


def draft(call, construct=None, symbols=None, operands=(), **more):
    return {"call": call, "construct": construct, "symbols": symbols or {}, "operands": list(operands), **more}


ADDMM_OUT = {"out_features": pick(32, 64, 96, 128)}

# Structured operators whose tensors play different roles; a list gives alternatives, each an entry of its own rank.
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
        "F.scaled_dot_product_attention({x}, {key}, {value})", ranks=[3, 4], operands=[operand("key"), operand("value")],
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
    "torch.float_power": [],
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
    "torch.gather": [], "torch.nn.functional.multi_head_attention_forward": [],
    "torch.nn.Unflatten": [], "torch.nn.Flatten": [], "torch.nn.Identity": [],
    "torch.nn.Fold": [],
}

for _digits, _rank in ((1, 3), (2, 4), (3, 5)):
    _kernel = ["kernel_size"] * _digits
    STRUCTURED[f"torch.nn.functional.conv{_digits}d"] = [draft(
        f"F.conv{_digits}d({{x}}, {{weight}}, padding={{padding}})", ranks=[_rank],
        symbols={"kernel_size": pick(1, 3), "out_channels": WIDTHS,
                 "padding": {"choices": "[kernel_size // 2]"}},
        operands=[operand("weight", ["out_channels", "shape[1]", *_kernel], roles=["parameter"],
                          scale=f"(shape[1] * kernel_size ** {_digits}) ** -0.5")])]
    STRUCTURED[f"torch.nn.functional.conv_transpose{_digits}d"] = [draft(
        f"F.conv_transpose{_digits}d({{x}}, {{weight}}, stride={{stride}})", ranks=[_rank],
        symbols={"kernel_size": pick(2, 3), "out_channels": WIDTHS,
                 "stride": pick(2)},
        operands=[operand("weight", ["shape[1]", "out_channels", *_kernel], roles=["parameter"],
                          scale=f"(shape[1] * kernel_size ** {_digits}) ** -0.5")])]

# Target tensors of losses by the name of the argument; `None`: the operator's own recipe decides.
LOSS_TARGETS = [
    (r"CrossEntropy(?!.*binary)|^NLLLoss", [operand("target", "(shape[0],) + shape[2:]", fill="index:shape1")], [2, 3, 4]),
    (r"MultiMargin|multi_margin", [operand("target", ["shape[0]"], fill="index:shape1")], [2]),
    (r"BCE|binary_cross|MultiLabelSoft|multilabel_soft", [operand("target", fill="rand")], None),
    (r"HingeEmbedding|hinge_embedding|^SoftMargin|^soft_margin", [operand("target", fill="sign")], None),
    (r"CosineEmbedding|cosine_embedding", [operand("other"), operand("target", ["shape[0]"], fill="sign")], [2]),
    (r"MarginRanking|margin_ranking", [operand("other"), operand("target", fill="sign")], None),
    (r"Triplet|triplet", [operand("positive"), operand("negative")], [2, 3]),
    (r"Gaussian|gaussian", [operand("target"), operand("variance", fill="positive")], None),
    (r"KLDiv|kl_div|PoissonNLL|poisson_nll", [operand("target", fill="rand")], None),
    (r".", [operand("target")], None),
]

# Functions of torch that take tensors and numbers but have no place in a model's forward.
NOT_FOR_MODELS = [
    (r"^(quantized_|fbgemm_|cudnn_|miopen_|mkldnn_|q_|fake_quantize|choose_qparams|fused_|native_|quantize_|fft|"
     r"sparse|hspmm|smm|sspaddmm|_)", "backend or storage internals"),
    (r"_copy$|_scatter$|_inverse$", "copying twin of a view"),
    (r"_with_indices$|^(aminmax|frexp|fill|diag|kron|angle|nextafter|copysign|heaviside|ldexp|mv)$", "of no use in a model"),
    (r"^(batch_norm|BatchNorm|SyncBatchNorm|instance_norm$)", "keeps statistics of earlier batches"),
    (r"^Lazy", "its parameters have no shape before the first call"),
    (r"^(Container|Module|ModuleList|ModuleDict|Sequential|ParameterList|ParameterDict|DataParallel|RNNBase|"
     r"RNNCellBase|Transformer(Encoder|Decoder)?|NLLLoss2d)$", "a container or base class"),
    (r"^(geqrf|qr|svd|lu|lstsq|cholesky|triangular_solve|inverse|pinverse|det|logdet|slogdet|matrix_exp|matrix_power|"
     r"ormqr|orgqr|nuclear_norm|chain_matmul|pdist|cartesian_prod|combinations|vander|renorm|hash_tensor|"
     r"frobenius_norm|trace|dist|norm_except_dim|stft|istft|gradient)", "dense linear algebra or analysis"),
]
