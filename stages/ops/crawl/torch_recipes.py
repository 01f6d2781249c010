"""Argument recipes: what a constructor or a call of torch is given, by family and by the name of the argument.

The crawl finds the operators in the installed torch; these tables only say how an argument of a given name is filled,
so an operator that a new torch adds is picked up wherever its arguments are of a known kind. Each recipe is a draft
usage (see `operator_binding`); `torch_crawl` runs every draft before it is believed.
"""

import re
from collections.abc import Sequence
from typing import Any

RANDOM_NAME = re.compile(
    r"dropout|rrelu|fractional|gumbel|bernoulli|multinomial|poisson$|^normal$|binomial", re.IGNORECASE
)

# Families by name, first match wins; the name is without its module (`Conv2d`, `conv2d`).
FAMILIES = [
    ("bilinear", r"^bilinear$"),
    ("recurrent", r"^(RNN|LSTM|GRU)(Cell)?$|^(rnn_tanh|rnn_relu|lstm|gru)_cell$"),
    ("attention", r"MultiheadAttention|scaled_dot_product_attention|^Transformer"),
    ("convolution", r"conv(_transpose|transpose)?[123]d$|^conv_tbc$"),
    ("embedding", r"embedding(bag|_bag)?$"),
    ("softmax", r"^AdaptiveLogSoftmax"),
    ("loss", r"loss$|^cross_entropy$|^binary_cross_entropy|^kl_div$"),
    ("pooling", r"pool[123]d$|unpool"),
    ("reduction", r"^(vector_norm|matrix_norm)$"),
    ("normalization", r"norm[123]d$|^(Layer|Group|RMS)Norm$|_norm$|^renorm$|^normalize$|response_?norm$|CrossMapLRN2d"),
    ("padding", r"pad[123]d$|^pad$|constant_pad_nd"),
    ("resampling", r"upsampl|interpolate|pixel_?(un)?shuffle|^(Un)?fold$|^unfold$|grid_sample|affine_grid"),
    ("softmax", r"soft(max|min)(2d)?$"),
    ("linear", r"^linear$"),
    ("spectral", r"^(stft|i?[rh]?fft[2n]?|ihfft[2n]?)$"),
    (
        "matmul",
        r"^(matmul|mm|bmm|baddbmm|addbmm|addmm|einsum|inner|tensordot|kron|mv|addmv|dot|outer|multi_dot|matrix_power|matrix_exp|cdist)$",
    ),
    ("scan", r"^(cum\w+|logcumsumexp|cumulative_trapezoid|diff|gradient)$"),
    ("ordering", r"^(sort|msort|topk|kthvalue|median|nanmedian|mode|quantile|nanquantile)$"),
    (
        "reduction",
        (
            r"^(sum|nansum|mean|nanmean|std|var|prod|amax|amin|max|min|norm|logsumexp|trapezoid|std_mean|var_mean|"
            r"aminmax|argmax|argmin)$"
        ),
    ),
    ("similarity", r"cosine_?similarity|pairwise_?distance|^vecdot$"),
    ("indexing", r"^(gather|take_along_dim|index_\w+|scatter_reduce|bucketize|searchsorted)$"),
    ("masking", r"^(where|masked_fill|gt|ge|lt|le|isclose|logical_\w+)$"),
    (
        "arrangement",
        (
            r"^(roll|flip\w*|rot90|tril|triu|cat|stack|hstack|vstack|dstack|column_stack|tile|repeat_interleave|i?fftshift|"
            r"channel_?shuffle|native_channel_shuffle|diag_embed|block_diag)$"
        ),
    ),
    ("special", r"^(digamma|lgamma|polygamma|mvlgamma|erfinv|igammac?|i0)$"),
    ("activation", r"glu$|elu\d?$|sigmoid$|tanh|swish|silu|mish|soft|hard|shrink$|threshold"),
]


def family_of(name: str, namespace: str = "torch") -> str:
    for family, pattern in FAMILIES:
        if re.search(pattern, name, re.IGNORECASE):
            return family
    return "special" if namespace == "torch.special" else "elementwise"


# Operations of one element relative to a multiply-add: transcendental functions cost more than arithmetic.
ELEMENT_WEIGHTS = [
    (r"digamma|lgamma|igamma|polygamma|mvlgamma|erfinv|erfcx|ndtr|^i[01]|zeta|acosh|asinh|bessel|airy|polynomial", 200),
    (r"atanh|xlogy|logit|atan2|pow|tan$|sinh|cosh|hypot|logaddexp|sinc|asin|acos|atan|fmod|remainder|float_power", 30),
    (r"exp|log|sin|cos|tanh|erf|gelu|mish|elu|sig|silu|soft", 12),
    (r".", 1),
]


def element_weight(name: str) -> int:
    return next(weight for pattern, weight in ELEMENT_WEIGHTS if re.search(pattern, name, re.IGNORECASE))


TRAFFIC = "4 * (x + y + o + w)"


def cost_of(family: str, name: str) -> dict[str, Any]:
    """Flops and bytes as functions of the shape; `operator_binding` says what the names mean.

    Flops are counted in multiply-adds at the rate of a matrix product: what runs without vector units, sorts or makes
    decisions per element counts for as many more as it takes longer.
    """
    transposed = {"1d": 4, "2d": 12, "3d": 40}.get(name[-2:], 12)
    pooled = 25 if name.lower().startswith(("maxpool1d", "max_pool1d", "avg")) else 180
    rules = {
        "convolution": {"flops": f"{transposed} * x * w / shape[1]" if "ranspose" in name else "2 * y * w / out[1]"},
        "linear": {"flops": "2 * x / shape[-1] * w"},
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
        "spectral": {"flops": "5 * x * math.log2(max(2, shape[-1]))", "bytes": "4 * (4 * x + 3 * y)"},
        "indexing": {"flops": "4 * y", "bytes": "4 * (x + y + 3 * o)"},
        "masking": {"flops": "2 * y", "bytes": "4 * (2 * x + 2 * y + o)"},
        "bilinear": {"flops": "8 * x / shape[-1] * w"},
    }
    default = {"flops": f"{element_weight(name)} * y"}
    return {"bytes": TRAFFIC, "steps": 0, **rules.get(family, default)}


def pick(*options: bool | float | str, literal: bool = False) -> dict[str, Any]:
    return {"choices": repr(list(options)), **({"literal": True} if literal else {})}


def computed(expression: str) -> dict[str, str]:
    return {"choices": expression}


DIVISORS = "[n for n in (2, 4, 8, 16) if {extent} % n == 0 and {extent} > n]"
CHANNEL_DIVISORS = computed(DIVISORS.format(extent="shape[1]"))
FEATURE_DIVISORS = computed("[n for n in (2, 4, 8) if shape[-1] % n == 0 and shape[-1] // n >= 8]")
INNER_DIMS = {"choices": "range(1, len(shape))", "literal": True}
LAST_DIMS = {"choices": "[-1] if len(shape) < 4 else [1, -1]", "literal": True}
WIDTHS = pick(16, 24, 32, 48, 64, 96, 128)

# Required constructor arguments of modules, and required plain arguments of functions.
ARGUMENTS = {
    "in_channels": {"value": "shape[1]"},
    "num_features": {"value": "shape[1]"},
    "num_channels": {"value": "shape[1]"},
    "in_features": {"value": "shape[-1]"},
    "normalized_shape": {"value": "shape[-1]"},
    "in1_features": {"value": "shape[-1]"},
    "in2_features": pick(8, 16),
    "input_size": {"value": "shape[-1]"},
    "embed_dim": {"value": "shape[-1]"},
    "d_model": {"value": "shape[-1]"},
    "out_channels": WIDTHS,
    "out_features": pick(32, 48, 64, 96, 128, 192, 256),
    "hidden_size": pick(32, 48, 64, 96),
    "num_embeddings": pick(1000, 4096, 8192),
    "embedding_dim": pick(32, 64, 128),
    "kernel_size": pick(2, 3),
    "output_size": pick(3, 4, 5, 6),
    "num_groups": CHANNEL_DIVISORS,
    "groups": CHANNEL_DIVISORS,
    "num_heads": FEATURE_DIVISORS,
    "nhead": FEATURE_DIVISORS,
    "padding": pick(1, 2),
    "value": pick(0.5, 1.0, -0.5),
    "threshold": pick(0.1, 0.25),
    "lambd": pick(0.25, 0.5),
    "upscale_factor": pick(2),
    "downscale_factor": pick(2),
    "size": pick(3, 5),
    "norm_type": pick(2.0, 3.0),
    "dim": INNER_DIMS,
    "exponent": pick(2, 3, 1.5),
    "min": pick(-0.5, -0.25, 0.1),
    "max": pick(0.5, 0.75),
    "weight": pick(0.3, 0.7),
    "other": pick(0.5, 1.5, 2.0),
    "reduction": {"value": "'none'", "literal": True},
    "shifts": pick(1, 2, 5),
    "k": computed("[n for n in (4, 8) if shape[-1] >= 2 * n]"),
    "q": pick(0.25, 0.75),
    "p": pick(1, 2, 3),
    "delta": pick(0.5, 1.5),
    "beta": pick(0.5, 2.0),
    "margin": pick(0.5, 1.5),
    "negative_slope": pick(0.05, 0.1, 0.2),
    "alpha": pick(0.75, 1.25, 1.5),
    "eps": pick(1e-6, 1e-5),
    "chunks": pick(2),
    "n": pick(1, literal=True),
    "input": None,
}

# Optional arguments that are given anyway: without them the operator reduces the batch away, means something else, or
# is hardly ever used that way. (family or name pattern, argument, recipe.)
EXTRAS = [
    (r"^Conv[123]d$", "padding", {"choices": "[kernel_size // 2]"}),
    (r"^Conv[123]d$", "bias", pick(True, False, literal=True)),
    (r"^ConvTranspose[123]d$", "stride", pick(2)),
    (r"^(Log)?Soft(max|min)$|^(log_)?soft(max|min)$", "dim", LAST_DIMS),
    (r"^glu$", "dim", {"choices": "[d for d in range(1, len(shape)) if shape[d] % 2 == 0]", "literal": True}),
    (
        r"Loss\w*$|_loss$|^cross_entropy$|^binary_cross_entropy|^kl_div$",
        "reduction",
        {"value": "'none'", "literal": True},
    ),
    (r"^(RNN|LSTM|GRU)$", "input_size", {"value": "shape[-1]"}),
    (r"^(RNN|LSTM|GRU)$", "hidden_size", pick(32, 48, 64)),
    (r"^(RNN|LSTM|GRU|MultiheadAttention|Transformer\w*Layer)$", "batch_first", {"value": "True", "literal": True}),
    (r"^Transformer\w*Layer$", "dim_feedforward", {"choices": "[2 * d_model, 4 * d_model]"}),
    (r"^Transformer\w*Layer$", "dropout", {"value": "0.0", "literal": True}),
    (r"^Upsample$|^interpolate$|^Upsampling\w+$", "scale_factor", pick(2, literal=False)),
    (
        r"^(Upsample|interpolate)$",
        "mode",
        {
            "choices": "{3: ['nearest', 'linear'], 4: ['nearest', 'bilinear', 'bicubic'], 5: ['nearest', 'trilinear']}"
            "[len(shape)]",
            "literal": True,
        },
    ),
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
    (
        (
            r"^(std|var|sum|nansum|mean|nanmean|amax|amin|prod|max|min|norm|logsumexp|median|nanmedian|mode|aminmax|"
            r"kthvalue|quantile|nanquantile|cum\w+|logcumsumexp|sort|topk|std_mean|var_mean|trapezoid|cumulative_trapezoid|"
            r"diff)$"
        ),
        "dim",
        INNER_DIMS,
    ),
    (r"^(amax|amin|sum|mean|logsumexp|norm|var|std)$", "keepdim", pick(True, False, literal=True)),
    (r"^topk$", "k", {"choices": "[n for n in (4, 8, 16) if n < shape[dim]]"}),
    (r"^kthvalue$", "k", {"choices": "[n for n in (2, 3, 4) if n < shape[dim]]"}),
    (r"^roll$", "dims", INNER_DIMS),
    (r"^flip$", "dims", {"choices": "[[d] for d in range(1, len(shape))]", "literal": True}),
    (
        r"^rot90$",
        "dims",
        {"choices": "[[d, d + 1] for d in range(min(2, len(shape) - 2), len(shape) - 1)]", "literal": True},
    ),
    (r"^rot90$", "k", pick(1, literal=True)),
]

SAME = "shape"
BROADCASTS = ["[1] * (len(shape) - 1)", "(shape[-1],)", "(shape[1],) + (1,) * (len(shape) - 2)", "shape"]


def operand(
    name: str,
    shape: list[str] | str = SAME,
    fill: str = "randn",
    roles: list[str] | tuple[str, ...] = ("input",),
    scale: float | str = 1.0,
) -> dict[str, Any]:
    return {"name": name, "shape": shape, "fill": fill, "roles": list(roles), "scale": scale}


PEER = operand("other", roles=["input"])
CHANNEL_PARAMETER = operand("scale", "(shape[1],) + (1,) * (len(shape) - 2)", roles=["parameter"])
SCALED = "1 / math.sqrt({0})"


def matrix(name: str, shape: list[str], roles: list[str] | tuple[str, str] = ("parameter", "input")) -> dict[str, Any]:
    """A weight whose product keeps the stream's magnitude."""
    return operand(name, shape, roles=roles, scale="shape[-1] ** -0.5")


def draft(
    call: str,
    construct: str | None = None,
    symbols: dict[str, dict[str, Any]] | None = None,
    operands: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    return {"call": call, "construct": construct, "symbols": symbols or {}, "operands": list(operands), **more}


# Target tensors of losses by the name of the argument; `None`: the operator's own recipe decides.
LOSS_TARGETS = [
    (
        r"CrossEntropy(?!.*binary)|^NLLLoss",
        [operand("target", "(shape[0],) + shape[2:]", fill="index:shape1")],
        [2, 3, 4],
    ),
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

# Callables that have no place in a model's forward, or none in a task, by pattern of the name.
NOT_FOR_MODELS = [
    (
        (
            r"^(quantized_|fbgemm_|cudnn_|miopen_|mkldnn_|q_|fake_quantize|choose_qparams|fused_|native_|quantize_|sparse|"
            r"hspmm|smm|sspaddmm|_)|^(dequantize|int_repr|empty_quantized|scaled_mm|scaled_grouped_mm|grouped_mm)$"
        ),
        "backend, storage or low-precision internals",
    ),
    (r"_copy$|_scatter$|_inverse$", "copying twin of a view"),
    (r"_with_indices$", "the same pooling under another name"),
    (
        (
            r"^(frexp|fill|diag|diagflat|kron|angle|nextafter|heaviside|mv|addmv|addr|dot|vdot|outer|block_diag|float_power|"
            r"count_nonzero|signbit|put|index_put|asarray|histc|histogram(dd)?|segment_reduce|multilabel_margin)$"
        ),
        "takes single vectors or counts, or computes in another precision",
    ),
    (r"^(batch_norm|BatchNorm|SyncBatchNorm|instance_norm$)", "keeps statistics of earlier batches"),
    (r"^Lazy", "its parameters have no shape before the first call"),
    (
        (
            r"^(Container|Module|ModuleList|ModuleDict|Sequential|ParameterList|ParameterDict|DataParallel|RNNBase|"
            r"RNNCellBase|NLLLoss2d)$"
        ),
        "a container, base class or old name",
    ),
    (
        (
            r"^(geqrf|qr|svd|svdvals|lu|lstsq|cholesky|triangular_solve|inverse|inv|pinv|pinverse|det|logdet|slogdet|"
            r"matrix_exp|matrix_power|matrix_rank|ormqr|orgqr|nuclear_norm|chain_matmul|pdist|cartesian_prod|combinations|"
            r"vander|hash_tensor|frobenius_norm|trace|dist|norm_except_dim|istft|eig|solve|ldl|householder|cond$|tensorinv|"
            r"tensorsolve)"
        ),
        "dense linear algebra or analysis",
    ),
    (r"^(scatter|scatter_add|index_add|index_copy)$", "writes to one place in no fixed order on a GPU"),
    (r"^(bitwise_\w+|gcd|lcm)$", "takes integers alone"),
    (
        r"^(eq|ne|isin|isfinite|isinf|isnan|isneginf|isposinf|isreal|logical_not|all|any)$",
        "gives flags that ordinary values leave constant",
    ),
    (
        r"^(ones_like|zeros_like|full_like|empty\w*|clone|nan_to_num|positive|detach|conj_physical)$",
        "its values do not depend on its input, or are its input",
    ),
    (r"^(gaussian_nll_loss|GaussianNLLLoss|ctc_loss|CTCLoss)$", "reads values on the host"),
    (r"^(upsample(_bilinear|_nearest)?)$", "old name of F.interpolate"),
    (
        (
            r"^(assert_int_or_pair|boolean_dispatch|handle_torch_function|has_torch_function\w*|Optional|save|wait|seed|cond|"
            r"manual_seed|initial_seed|from_file|is_\w+|can_cast|get_\w+|result_type|promote_types|numel|sym_\w+|one_hot|"
            r"nonzero_static)$"
        ),
        "a helper, no operation on values",
    ),
    (r"^argsort$", "equal values have no order of their own"),
    (r"^(addbmm|vstack|take|msort|flipud|cov|corrcoef|conv_tbc)$", "works across the batch"),
    (
        (
            r"^(convolution|affine_grid_generator|grid_sampler\w*|"
            r"multi_head_attention_forward)$"
        ),
        "undocumented part of a function of torch.nn.functional",
    ),
    (
        (
            r"^(squeeze|unsqueeze|permute|movedim|transpose|adjoint|t|narrow|select|reshape|ravel|flatten|unflatten|split\w*|"
            r"unsafe_\w+|chunk|[dhv]split|tensor_split|unbind|broadcast_to|broadcast_tensors|align_tensors|meshgrid|"
            r"as_strided|as_tensor|atleast_\dd|diagonal|real|imag|conj|resolve_conj|resolve_neg|view_as_real|Identity|"
            r"Flatten|Unflatten|expand)$"
        ),
        "view",
    ),
    (
        (
            r"^(arange|range|linspace|logspace|eye|full|ones|zeros|tensor|scalar_tensor|tri[lu]_indices|\w+_window|"
            r"(r?fftfreq))$"
        ),
        "makes tensors from nothing",
    ),
]

# Undocumented functions of `torch` that share a name with a documented one of `torch.nn.functional` that is kept.
SHADOWED = re.compile(
    r"^(binary_cross_entropy_with_logits|cosine_embedding_loss|hinge_embedding_loss|kl_div|"
    r"margin_ranking_loss|poisson_nll_loss|triplet_margin_loss|embedding_bag|ctc_loss)$"
)
