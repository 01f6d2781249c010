"""Which names of operators mean one operator.

A module and the functions of its name compute the same: to hold `nn.ReLU` out and train on `F.relu` would hold nothing
out. So names count without their namespace, their capitals and underscores, the number of dimensions of a module, and
the word loss; what is left different by torch's own abbreviations is listed.
"""

import re

ABBREVIATIONS = {
    "bce": "binarycrossentropy",
    "bcewithlogits": "binarycrossentropywithlogits",
    "adaptivelogsoftmaxwith": "logsoftmax",
    "vectornorm": "norm",
    "matrixnorm": "norm",
    "absolute": "abs",
    "clip": "clamp",
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "truedivide": "div",
    "negative": "neg",
    "expit": "sigmoid",
    "greater": "gt",
    "greaterequal": "ge",
    "less": "lt",
    "lessequal": "le",
    "notequal": "ne",
    "fix": "trunc",
    "arctan": "atan",
    "arctan2": "atan2",
    "arcsin": "asin",
    "arccos": "acos",
    "arctanh": "atanh",
    "arcsinh": "asinh",
    "arccosh": "acosh",
}


def operator_of(name: str) -> str:
    """The operator that a name stands for; a class of transformers stands for itself."""
    namespace, _, last = name.rpartition(".")
    if namespace.startswith("transformers"):
        return name
    plain = last.lower().replace("_", "")
    plain = re.sub(r"(?<=[a-z])[1-3]d$", "", plain)
    plain = plain.removesuffix("loss") or plain
    return ABBREVIATIONS.get(plain, plain)
