"""The operators of a task as a multiset of names, so that tasks can be compared by what they compute with.

Names are brought to one form: `nn.ReLU`, `F.relu`, `torch.relu`, `x.relu()` and `torch.relu_` are `relu`; `@`, `mm` and
`bmm` are `matmul`; `+` is `add`. What only changes a tensor's view or asks for its size is no operator here, and
neither are containers, parameters and what creates tensors. An operator counts as often as the code mentions it: a
loop's body counts once.
"""

import ast
import collections
from typing import Any

import source as task_source

ALIASES = {
    "mm": "matmul",
    "bmm": "matmul",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "truedivide": "div",
    "negative": "neg",
    "absolute": "abs",
    "swish": "silu",
    "multiheadattentionforward": "multiheadattention",
}
BINARY = {
    ast.MatMult: "matmul",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.USub: "neg",
}
NO_OPERATORS = frozenset(
    "view viewas reshape reshapeas permute transpose contiguous size unsqueeze squeeze flatten unflatten expand "
    "expandas to float half double long int bool type typeas chunk split unbind shape dim detach clone t numel item "
    "narrow select swapaxes movedim adjoint cpu cuda requiresgrad train eval parameters modules children buffers "
    "registerbuffer registerparameter append extend items keys values get len range super sequential modulelist "
    "moduledict parameter parameterlist identity flattenlayer tensor zeros ones full empty rand randn arange linspace "
    "zeroslike oneslike fulllike emptylike eye newzeros newones setattr getattr isinstance format join manualseed "
    "nograd".split()
)


# What an operator can't be used without, or hardly: it may stand beside the operator and need not be declared. Complex
# results become real, a truth value chooses, indices come from somewhere, an encoder is made of layers.
COMPANIONS = {
    "fft": "abs viewasreal",
    "stft": "abs viewasreal",
    "complex": "abs viewasreal mul",
    "polar": "viewasreal abs",
    "viewascomplex": "viewasreal viewascomplex mul",
    "adaptivelogsoftmaxwithloss": "logprob",
    "bceloss": "sigmoid",
    "binarycrossentropy": "sigmoid",
    "ndtri": "sigmoid",
    "matrixexp": "mul",
    "maxunpool1d": "maxpool1d add",
    "maxunpool2d": "maxpool2d add",
    "maxunpool3d": "maxpool3d add",
    "affinegrid": "gridsample",
    "bucketize": "sort",
    "searchsorted": "sort",
    "transformerencoder": "transformerencoderlayer",
    "transformerdecoder": "transformerdecoderlayer",
    **dict.fromkeys(("ge", "gt", "le", "lt", "eq", "ne", "isclose"), "where mul neg"),
    **dict.fromkeys(("logicaland", "logicalor", "logicalxor", "logicalnot"), "where mul"),
}


def undeclared(source: task_source.Source, names: list[str]) -> collections.Counter[str]:
    """The operators that the code uses more often than they are declared, without the companions of those declared."""
    given = declared(names)
    allowed = {companion for name in given for companion in COMPANIONS.get(_family(name), "").split()}
    extra = signature(source) - given
    return collections.Counter({name: count for name, count in extra.items() if name not in allowed})


def _family(name: str) -> str:
    """`fft` for all of torch.fft; else the name."""
    return "fft" if name.endswith(("fft", "fft2", "fftn")) else name


def signature(source: Any) -> collections.Counter[str]:
    """The operators that the classes and functions of a task's file mention, as a Counter."""
    found = collections.Counter()
    made = _names_of_modules(source)
    for body in source.tree.body:
        if isinstance(body, ast.ClassDef):
            _count(body, source, found, made, inside_init=False)
        elif isinstance(body, ast.FunctionDef) and body.name not in ("get_inputs", "get_init_inputs"):
            _count(body, source, found, made, inside_init=False)
    return found


def declared(names: list[str]) -> collections.Counter[str]:
    """The same of a list of declared operators."""
    return collections.Counter(name for name in map(canonical, names) if name not in NO_OPERATORS)


def text(signature_counts: collections.Counter[str]) -> str:
    """A signature for people: `add conv2d relu×2`."""
    return " ".join(f"{name}×{count}" if count > 1 else name for name, count in sorted(signature_counts.items()))


def _names_of_modules(source: task_source.Source) -> set[str]:
    """Attributes of `self`: calling one is using a module, which its construction has counted already."""
    return {
        node.attr
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _count(
    node: ast.AST, source: task_source.Source, found: collections.Counter[str], made: set[str], inside_init: bool
) -> None:
    if isinstance(node, ast.FunctionDef):
        inside_init = node.name == "__init__"
    name = None
    if isinstance(node, ast.Call):
        name = _called(node.func, source, made, inside_init)
    elif isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign)) and not inside_init and not _is_arithmetic(node):
        name = BINARY.get(type(node.op))
    if name:
        found[name] += 1
    for child in ast.iter_child_nodes(node):
        # Default values and annotations are no computation.
        if not isinstance(child, ast.arguments):
            _count(child, source, found, made, inside_init)


def _is_arithmetic(node: Any) -> bool:
    """Arithmetic of sizes: every operand a number, or taken from a shape."""
    operands = (
        [node.left, node.right]
        if isinstance(node, ast.BinOp)
        else ([node.operand] if isinstance(node, ast.UnaryOp) else [node.value])
    )
    return all(_is_number(operand) for operand in operands)


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        return _is_arithmetic(node)
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("size", "dim")


def _called(function: ast.expr, source: task_source.Source, made: set[str], inside_init: bool) -> str | None:
    """The operator that a call stands for, or None."""
    whole = task_source.dotted(function, source.imports)
    last = function.attr if isinstance(function, ast.Attribute) else whole
    if last is None:
        return None
    if whole and whole.startswith("torch."):
        last = whole.rpartition(".")[2]
        if inside_init and not last[:1].isupper():
            return None
    elif whole and (whole.split(".")[0] in source.classes or (whole.startswith("self.") and whole.count(".") == 1)):
        return None
    elif not isinstance(function, ast.Attribute) or inside_init or function.attr in made:
        return None
    name = canonical(last)
    return None if name in NO_OPERATORS else name


def canonical(name: str) -> str:
    """An operator's last name in the one form: lower case, without underscores, aliases resolved."""
    plain = name.rpartition(".")[2].replace("_", "").lower()
    return ALIASES.get(plain, plain)
