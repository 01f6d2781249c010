"""Audits a published dataset: counts the defects that audits of CUDA-Agent-Ops-6K counted, and those that we add.

    python tests/python/audit_dataset.py FOLDER                       what the code and the columns show, in seconds
    python tests/python/audit_dataset.py FOLDER --run 60              and 60 rows executed on the CPU
    python tests/python/audit_dataset.py FOLDER --run all --device cuda
    python tests/python/audit_dataset.py FOLDER --graphs              and every row traced without values, for doubles

FOLDER is what `ops/publish` writes (the Parquet below its `data` counts), or one Parquet file. Prints a table, one line
a defect, with the first rows that have it; exits with 1 where there is any, with 2 where the folder can't be read.

It shares no code and no form of analysis with `ops/filter` where another would do: globals are found by Python's own
symbol tables, dead computation by a walk backwards from `return`, duplicates on text without names; what runs, runs
here, one process a row with a limit of time. Where the definitions need a number, it is among the constants below. The
caps on operators are declared for sets of thousands, and below MIN_ROWS_FOR_CAPS rows they are shown and don't count.
"""

import argparse
import ast
import collections
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import symtable
import sys
import tokenize
from typing import Any

SHARES = {"torch#1": 3.40, "torch#2": 83.77, "torch#3": 7.62, "torch#4": 2.80, "torch#5": 1.23, "transformers": 1.18}
SHARE_TOLERANCE = 1.0  # percentage points, or one row where that is more
MIN_ROWS_FOR_CAPS = 1000
CAP, CAP_OF_LINEAR_AND_CONVOLUTIONS, CAP_OF_BILINEAR, CAP_OF_A_PAIR = 0.03, 0.06, 0.01, 0.005
DISTINCT_OPERATORS = {1000: 200, 6000: 300}  # rows: operators that there must be
SECONDS_A_ROW = int(os.environ.get("AUDIT_SECONDS_A_ROW", "180"))
SENSITIVITY, FRESHNESS, MODE, RANDOMNESS = 1e-4, 1e-3, 1e-3, 1e-5  # in standard deviations, or parts of the largest
MOST_OF_ONE_VALUE, STD_RATIO = 0.9, 10.0
SEED = 20


# Reading ---------------------------------------------------------------------------------------------------------


def read_rows(path: Any) -> Any:
    """The rows of a dataset folder or a Parquet file. Raises ValueError with what is wrong."""
    import pyarrow.parquet

    path = pathlib.Path(path)
    files = [path] if path.is_file() else sorted((path / "data").glob("*.parquet")) or sorted(path.glob("*.parquet"))
    if not files:
        raise ValueError(f"{path} has no data/*.parquet: export a dataset with `cuda-agent export dataset {path}`")
    rows = []
    for file in files:
        table = pyarrow.parquet.read_table(file)
        missing = {"ops", "data_source", "code"} - set(table.column_names)
        if missing:
            raise ValueError(f"{file} has no column {', '.join(sorted(missing))}")
        rows += table.select(["ops", "data_source", "code"]).to_pylist()
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


class Program:
    """A row's code, parsed."""

    def __init__(self, row: Any) -> None:
        self.code, self.category = row["code"], row["data_source"]
        self.operators = json.loads(row["ops"])
        if not isinstance(self.operators, list) or not all(isinstance(name, str) for name in self.operators):
            raise ValueError("ops is no list of names")
        self.tree = ast.parse(self.code)
        self.modules = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                self.modules |= {
                    alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
                    for alias in node.names
                }
            if isinstance(node, ast.ImportFrom):
                self.modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        functions = {node.name for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        if "Model" not in classes or not {"get_inputs", "get_init_inputs"} <= functions:
            raise ValueError("no Model, get_inputs or get_init_inputs")
        self.classes, self.model = classes, classes["Model"]
        self.methods = {node.name: node for node in self.model.body if isinstance(node, ast.FunctionDef)}
        if "forward" not in self.methods:
            raise ValueError("Model has no forward")

    def full_name(self, node: Any) -> str | None:
        """`torch.nn.functional.relu` of `F.relu`; None for what does not begin with an imported name."""
        text = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        head, _, rest = text.partition(".")
        if not re.fullmatch(r"[\w.]+", text) or head not in self.modules:
            return None
        return ".".join(filter(None, [self.modules[head], rest]))

    def calls(self, node: Any) -> list[str]:
        """The full names of what a tree calls."""
        names = (self.full_name(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call))
        return [name for name in names if name]


def last(name: str) -> Any:
    return name.rpartition(".")[2]


def plain(name: str) -> Any:
    return last(name).lower().replace("_", "")


# What the code shows: each function returns a text where the program has the defect -------------------------------

SYMBOLS = {
    ast.Add: "add",
    ast.Sub: "sub subtract",
    ast.Mult: "mul multiply",
    ast.Div: "div divide truedivide",
    ast.Pow: "pow floatpower",
    ast.MatMult: "matmul mm bmm mv dot",
    ast.USub: "neg negative",
    ast.FloorDiv: "floordivide",
    ast.Mod: "remainder fmod",
    ast.Gt: "gt greater",
    ast.Lt: "lt less",
    ast.GtE: "ge greaterequal",
    ast.LtE: "le lessequal",
    ast.Eq: "eq",
    ast.NotEq: "ne notequal",
    ast.BitAnd: "bitwiseand logicaland",
    ast.BitOr: "bitwiseor logicalor",
    ast.BitXor: "bitwisexor logicalxor",
    ast.Invert: "bitwisenot logicalnot",
}


def declared_unused(program: "Program") -> str:
    bodies = [node for node in program.tree.body if getattr(node, "name", "get_inputs") not in INPUTS]
    used = {plain(name) for name in program.classes if name != "Model"}
    for node in (inner for body in bodies for inner in ast.walk(body)):
        if isinstance(node, ast.Attribute):
            used.add(plain(node.attr))
        elif isinstance(node, ast.Name):
            used.add(plain(program.modules.get(node.id, node.id)))
        operators = [*node.ops] if isinstance(node, ast.Compare) else [getattr(node, "op", None)]
        for operator in operators:
            used.update(SYMBOLS.get(type(operator), "").split())
    return ", ".join(name for name in program.operators if plain(name) not in used)


INPUTS = ("get_inputs", "get_init_inputs")
# Calls of torch that compute nothing: they hold parameters, make them, or look at a tensor another way.
NO_COMPUTATION = set(
    "module parameter parameterlist buffer sequential modulelist moduledict randn rand zeros ones full empty tensor "
    "arange finfo iinfo isinstance tensor nograd size flatten reshape permute transpose unsqueeze squeeze stack "
    "device init uniform normal kaiminguniform xavieruniform zeroslike oneslike randint eye linspace float32 "
    "identity".split()
)


# What may come along with an operator: a sigmoid before a loss of probabilities, pooling before unpooling, a choice by
# what a comparison says, a complex number made real, layers of an encoder.
COMES_ALONG = [
    (r"bceloss|binarycrossentropy|ndtri", "sigmoid"),
    (r"maxunpool(\d)d", "maxpool1d maxpool2d maxpool3d"),
    (r"affinegrid", "gridsample"),
    (r"transformer(en|de)coder", "transformerencoderlayer transformerdecoderlayer"),
    (r"g[et]|l[et]|eq|ne|isclose|logical\w+", "where"),
    (r"polar|complex|viewascomplex|\w*fft\w*", "viewasreal viewascomplex abs"),
]


def used_undeclared(program: "Program") -> str:
    if program.category == "transformers":
        return ""
    declared = {plain(name) for name in program.operators}
    for pattern, names in COMES_ALONG:
        declared |= set(names.split()) if any(re.fullmatch(pattern, name) for name in declared) else set()
    called = [name for name in program.calls(program.model) if name.startswith("torch.")]
    return ", ".join(name for name in called if plain(name) not in declared | NO_COMPUTATION)


def wrong_category(program: "Program") -> str:
    expected = "transformers" if program.category == "transformers" else f"torch#{len(program.operators)}"
    is_class = any(name.startswith("transformers.") for name in program.operators)
    if program.category != expected or is_class != (program.category == "transformers"):
        return f"{program.category} with {len(program.operators)} operators"
    return ""


def loads(node: Any) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}


def own(node: Any, context: Any) -> list[str]:
    """Names of `self.…` in a tree."""
    return [
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, context) and ast.unparse(inner.value) == "self"
    ]


def unused_modules(program: "Program") -> str:
    start = program.methods.get("__init__")
    if start is None:
        return ""
    made, used = [], set()
    for statement in ast.walk(start):
        if isinstance(statement, ast.Assign):
            is_made = any(isinstance(inner, ast.Call) for inner in ast.walk(statement.value))
            made += [name for target in statement.targets for name in own(target, ast.Store) if is_made]
            used.update(own(statement.value, ast.Load))
        if isinstance(statement, ast.Call) and ast.unparse(statement.func).startswith("self.register_"):
            made.append(ast.literal_eval(statement.args[0]))
    for name, method in program.methods.items():
        used.update(own(method, ast.Load) if name != "__init__" else [])
    return ", ".join(name for name in made if name not in used)


def unread_arguments(program: "Program", method: Any) -> str:
    node = program.methods.get(method)
    if node is None:
        return ""
    names = [inner.arg for inner in ast.walk(node.args) if isinstance(inner, ast.arg)][1:]
    read = set().union(*map(loads, node.body))
    return ", ".join(name for name in names if name not in read)


def unused_forward_arguments(program: "Program") -> str:
    return unread_arguments(program, "forward")


def unused_init_arguments(program: "Program") -> str:
    return unread_arguments(program, "__init__")


def dead_computation(program: "Program") -> str:
    """Statements of forward without which its results are the same: backwards from its end, a variable is live where
    something later reads it."""
    live, dead = set(), []
    for statement in reversed(program.methods["forward"].body):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if len(targets) == 1 and isinstance(targets[0], ast.Name):
            if targets[0].id not in live:
                dead.append(ast.unparse(statement)[:50])
                continue
            live.discard(targets[0].id)
        elif isinstance(statement, ast.Expr) and program.full_name(getattr(statement.value, "func", None)):
            name = program.full_name(getattr(statement.value, "func", None))
            if name.startswith("torch.") and not name.endswith("_"):
                dead.append(ast.unparse(statement)[:50])
        live |= loads(statement)
    return "; ".join(dead)


def globals_in_model(program: "Program") -> str:
    """Names that a method of Model takes from the module and that the module assigns, by Python's symbol tables."""
    module = symtable.symtable(program.code, "row", "exec")
    assigned = {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() and not symbol.is_imported() and not symbol.is_namespace()
    }
    found, waiting = set(), [table for table in module.get_children() if table.get_name() == "Model"]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()} & assigned
    return ", ".join(sorted(found))


RANDOM = re.compile(
    r"torch\.(rand|randn|randint|randperm|bernoulli|multinomial|normal|poisson)(_like)?$|.*\.r?relu_?rand$"
)


def random_calls(program: "Program") -> str:
    found = []
    for body in program.classes.values():
        for method in (node for node in body.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"):
            found += [name for name in program.calls(method) if RANDOM.match(name)]
    return ", ".join(found)


MADE = {"tensor", "ones", "zeros", "full", "arange", "linspace", "eye", "rand", "randn", "empty"}


def constant_tensors(program: "Program") -> str:
    """Tensors that forward makes without looking at its inputs or at anything made from them."""
    forward = program.methods["forward"]
    known = {inner.arg for inner in ast.walk(forward.args) if isinstance(inner, ast.arg)} - {"self"}
    known |= {
        inner.id for inner in ast.walk(forward) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    found = []
    for node in ast.walk(forward):
        if not isinstance(node, ast.Call):
            continue
        name = program.full_name(node.func)
        makes = name and name.startswith("torch.") and name.count(".") == 1 and last(name) in MADE
        if makes and not known & set().union(*map(loads, node.args), set()):
            found.append(ast.unparse(node)[:50])
    return ", ".join(found)


STATIC = {
    "declares an operator that it does not use": declared_unused,
    "uses an operator that it does not declare": used_undeclared,
    "category and number of operators differ": wrong_category,
    "unused module, parameter or buffer": unused_modules,
    "unused argument of forward": unused_forward_arguments,
    "unused argument of __init__": unused_init_arguments,
    "dead computation": dead_computation,
    "global in place of an argument": globals_in_model,
    "random forward (by its code)": random_calls,
    "constant tensor made in forward": constant_tensors,
}


# What several rows show ---------------------------------------------------------------------------------------------


def byte_duplicates(rows: list[dict[str, str]]) -> dict[str, Any]:
    return _repeated([row["code"] for row in rows])


def normalised_duplicates(programs: Any) -> dict[str, Any]:
    """Rows whose text is an earlier one's once comments, layout and docstrings are gone and names are numbered."""
    return _repeated([program and normalised(program) for program in programs])


def _repeated(keys: Any) -> dict[str, Any]:
    first, found = {}, {}
    for index, key in enumerate(keys):
        if key is not None and first.setdefault(key, index) != index:
            found[index] = f"as row {first[key]}"
    return found


def normalised(program: "Program") -> str:
    """The code as words, with each name that the file itself introduces as a number."""
    bound = {inner.arg for inner in ast.walk(program.tree) if isinstance(inner, ast.arg)}
    bound |= {
        inner.id for inner in ast.walk(program.tree) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    bound |= set(own(program.tree, ast.Store)) | (set(program.classes) - {"Model"})
    numbers, words = {}, []
    text = ast.unparse(_without_texts(ast.parse(program.code)))
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in bound and token.string != "self":
            words.append(f"name{numbers.setdefault(token.string, len(numbers))}")
        elif token.type not in skipped:
            words.append(
                program.modules.get(token.string, token.string) if token.type == tokenize.NAME else token.string
            )
    return " ".join(words)


def _without_texts(tree: Any) -> Any:
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Module)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    return ast.fix_missing_locations(tree)


def shares_off(categories: Any) -> list[str]:
    """Categories whose share is further from the paper's than the tolerance."""
    total, counts = len(categories), collections.Counter(categories)
    tolerance = max(SHARE_TOLERANCE, 100 / total)
    found = [
        f"{name} {100 * counts[name] / total:.2f} %, the paper has {share} %"
        for name, share in SHARES.items()
        if abs(100 * counts[name] / total - share) > tolerance
    ]
    return found + [f"{name} is no category" for name in counts if name not in SHARES]


def is_linear_or_convolution(name: str) -> Any:
    return plain(name) == "linear" or plain(name).startswith("conv")


def over_the_caps(lists: Any) -> list[Any]:
    """Operators and pairs that are in too many rows, and too few distinct operators. `lists`: the operators by row."""
    total, found = len(lists), []
    by_name, by_pair = collections.Counter(), collections.Counter()
    for names in lists:
        distinct = sorted({plain(name) for name in names})
        by_name.update(distinct)
        by_pair.update(itertools.combinations(distinct, 2))
    for name, count in by_name.most_common():
        cap = CAP_OF_LINEAR_AND_CONVOLUTIONS if is_linear_or_convolution(name) else CAP
        cap = CAP_OF_BILINEAR if name == "bilinear" else cap
        if count > cap * total:
            found.append(f"{name} in {100 * count / total:.2f} % of the rows, at most {100 * cap:g} %")
    for pair, count in by_pair.most_common():
        if count > CAP_OF_A_PAIR * total:
            found.append(f"{' + '.join(pair)} in {100 * count / total:.2f} %, at most {100 * CAP_OF_A_PAIR:g} %")
    distinct = len({name for names in lists for name in names if not name.startswith("transformers.")})
    for rows, least in DISTINCT_OPERATORS.items():
        if total >= rows and distinct < least:
            found.append(f"{distinct} distinct operators in {total} rows, at least {least}")
    return found


# What running shows --------------------------------------------------------------------------------------------------
# One process imports torch and forks once a row; a row's process answers with one line of JSON.


def run_rows(codes: Any, device: str, what: str = "run") -> list[Any]:
    """What each row does: for "run" a dict of defect to detail, for "graph" a list with its graph as text or None."""
    command = [sys.executable, __file__, "--serve", device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        answers = []
        for number, code in enumerate(codes):
            server.stdin.write(json.dumps([what, code]) + "\n")
            server.stdin.flush()
            line = server.stdout.readline()
            if not line:
                raise RuntimeError("the process that runs the rows has ended")
            answers.append(json.loads(line))
            print(f"\r{number + 1} of {len(codes)} rows: {what}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        server.stdin.close()
    return answers


def serve(device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        what, code = json.loads(line)
        if what == "graph":
            # What torch imports for a first run on the meta device is imported here, once, not in each fork.
            graph(
                "import torch\nget_init_inputs = list\nModel = torch.nn.ReLU\ndef get_inputs(): return [torch.ones(2)]"
            )
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receiver)
            signal.alarm(SECONDS_A_ROW)
            answer = observed(code, device) if what == "run" else [graph(code)]
            with os.fdopen(sender, "w") as file:
                json.dump(answer, file)
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver) as file:
            text = file.read()
        _, status = os.waitpid(child, 0)
        killed = {"fails": f"ended by signal {os.waitstatus_to_exitcode(status)}, or after {SECONDS_A_ROW} s"}
        killed = killed if what == "run" else [None]
        answers.write((text if status == 0 and text else json.dumps(killed)) + "\n")
        answers.flush()


def graph(code: str) -> str | None:
    """What a row computes as text without names: each operator with its numbers, and its tensors by shape, type and
    the order of their appearance. On the meta device, where nothing has values; None where the row needs them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen, lines = {}, []

    def words(value: Any):
        if isinstance(value, torch.Tensor):
            # The tensor is kept, so that its id stays its own.
            number = seen.setdefault(id(value), (len(seen), value))[0]
            return f"t{number}:{value.dtype}{tuple(value.shape)}"
        if isinstance(value, (list, tuple)):
            return "(" + ",".join(map(words, value)) + ")"
        return (
            "{" + ",".join(f"{key}={words(value[key])}" for key in sorted(value)) + "}"
            if isinstance(value, dict)
            else repr(value)
        )

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            lines.append(f"{function} {words(args)} {words(kwargs or {})} {words(result)}")
            return result

    try:
        with torch.device("meta"), torch.no_grad():
            names: dict[str, Any] = {"__name__": "row"}
            exec(compile(code, "row", "exec"), names)
            model, inputs = names["Model"](*names["get_init_inputs"]()).eval(), names["get_inputs"]()
            words([value for value in inputs if isinstance(value, torch.Tensor)])
            with Recorder():
                model(*inputs)
    except Exception:
        return None
    return "\n".join(lines)


def observed(code: str, device: str) -> Any:
    """The defects of one row, or that it fails."""
    import torch

    try:
        with torch.no_grad():
            return Observation(code, torch.device(device)).defects()
    except (MemoryError, torch.OutOfMemoryError) as error:
        return {"out of memory": str(error)[:100]}
    except BaseException as error:
        kind = "out of memory" if "alloc" in str(error) and "memory" in str(error) else "fails"
        return {kind: f"{type(error).__name__}: {error}"[:150]}


class Observation:
    """A row that runs: its model, three draws of inputs, and what they lead to."""

    def __init__(self, code: str, device: Any) -> None:
        import torch

        self.torch, self.device = torch, device
        self.names: dict[str, Any] = {"__name__": "row"}
        exec(compile(code, "row", "exec"), self.names)
        self.model = self.build(0)
        self.first, self.second, self.third = (self.draw(seed) for seed in (1, 2, 3))
        self.tensors = [index for index, value in enumerate(self.first) if isinstance(value, torch.Tensor)]

    def build(self, seed: int) -> Any:
        self.torch.manual_seed(seed)
        return self.names["Model"](*self.names["get_init_inputs"]()).to(self.device).eval()

    def draw(self, seed: int) -> list[Any]:
        """Made on the device where the row bears that: a CPU takes seconds for the gigabytes that a GPU draws at
        once."""
        try:
            with self.device:
                values = self.seeded(seed)
        except (RuntimeError, TypeError):
            values = self.seeded(seed)
        return [value.to(self.device) if isinstance(value, self.torch.Tensor) else value for value in values]

    def seeded(self, seed: int) -> list[Any]:
        self.torch.manual_seed(seed)
        return list(self.names["get_inputs"]())

    def outputs(self, model: Any, inputs: Any, seed: int = 9) -> Any:
        """All output elements in one row of numbers, as float64 on the CPU is too large: float32 on the device."""
        self.torch.manual_seed(seed)
        copies = [value.clone() if isinstance(value, self.torch.Tensor) else value for value in inputs]
        found, waiting = [], [model(*copies)]
        while waiting:
            value = waiting.pop(0)
            if isinstance(value, self.torch.Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                waiting = [*value, *waiting]
            elif isinstance(value, dict):
                waiting = [*value.values(), *waiting]
        return self.torch.cat([value.float().reshape(-1) for value in found])

    def apart(self, one: Any, other: Any) -> Any:
        """The largest difference of two outputs in standard deviations of the first."""
        if one.shape != other.shape:
            return math.inf
        deviation = one.std().item() if one.numel() > 1 else abs(one[0].item())
        difference = (one - other).abs().max().item()
        return difference / deviation if deviation > 0 else (math.inf if difference > 0 else 0.0)

    def defects(self) -> Any:
        first = self.outputs(self.model, self.first)
        second = self.outputs(self.model, self.second)
        third = self.outputs(self.build(4), self.third)
        found = {}
        if not all(bool(self.torch.isfinite(one).all()) for one in (first, second, third)):
            return {"not finite": "NaN or infinity in one of three draws"}
        if self.apart(first, second) < FRESHNESS or bool((first == first[0]).all()):
            found["independent of its inputs"] = f"two draws differ by {self.apart(first, second):.2g} deviations"
        again = self.outputs(self.model, self.first, seed=10)
        if (first - again).abs().max() > RANDOMNESS * (1 + first.abs().max()):
            found["random forward (as it runs)"] = "another seed, another output"
        found |= self.activity(first) | self.stability(first, second, third) | self.inputs(first) | self.modes(first)
        return found

    def activity(self, first: Any) -> dict[str, str]:
        # Odd, so that a period of a row's length doesn't meet the same column always.
        step = max(1, first.numel() // 65536) | 1
        counts = first[::step].unique(return_counts=True)[1]
        share = counts.max().item() / counts.sum().item()
        return {"low activity": f"{share:.0%} of the output is one value"} if share > MOST_OF_ONE_VALUE else {}

    def stability(self, *draws: Any) -> dict[str, Any]:
        deviations = [draw.std().item() if draw.numel() > 1 else 0.0 for draw in draws]
        if min(deviations) > 0 and max(deviations) / min(deviations) <= STD_RATIO:
            return {}
        return {"unstable across seeds": f"standard deviations {', '.join(f'{value:.2g}' for value in deviations)}"}

    def inputs(self, first: Any) -> dict[str, Any]:
        found, repeated = {}, self.draw(1)
        for index in self.tensors:
            if not self.torch.equal(self.first[index], repeated[index]):
                found["inputs don't follow the seed"] = f"input {index}"
            if self.torch.equal(self.first[index], self.second[index]):
                found["fixed input"] = f"input {index}"
                continue
            mixed = list(self.first)
            mixed[index] = self.second[index]
            moved = self.apart(first, self.outputs(self.model, mixed))
            if moved < SENSITIVITY:
                found["insensitive to an input"] = f"input {index} moves the output by {moved:.2g} deviations"
        if not self.tensors:
            found["fixed input"] = "no tensor among the inputs"
        return found

    def modes(self, first: Any) -> dict[str, str]:
        """Last, since a forward in train mode may change the model."""
        try:
            moved = self.apart(first, self.outputs(self.model.train(), self.first))
        except Exception as error:
            return {"train and eval mode differ": f"train mode fails: {error}"[:100]}
        return {"train and eval mode differ": f"by {moved:.2g} deviations"} if moved > MODE else {}


RUNNING = [
    "fails",
    "out of memory",
    "not finite",
    "independent of its inputs",
    "random forward (as it runs)",
    "low activity",
    "unstable across seeds",
    "inputs don't follow the seed",
    "fixed input",
    "insensitive to an input",
    "train and eval mode differ",
]


# All of it -----------------------------------------------------------------------------------------------------------


def audit(
    rows: list[dict[str, str]], run: int = 0, device: str = "cpu", graphs: bool = False
) -> dict[str, dict[str, Any]]:
    """Defect to {row: detail}; a defect of the whole set has row -1, -2, …. In the order of the table."""
    programs, unreadable = [], {}
    for index, row in enumerate(rows):
        try:
            programs.append(Program(row))
        except (ValueError, SyntaxError, TypeError) as error:
            programs.append(None)
            unreadable[index] = str(error)
    found = {"unreadable": unreadable, "byte-identical duplicate": byte_duplicates(rows)}
    found["normalised duplicate"] = normalised_duplicates(programs)
    for name, check in STATIC.items():
        details = {index: check(program) for index, program in enumerate(programs) if program}
        found[name] = {index: detail for index, detail in details.items() if detail}
    found["share off the paper's"] = _of_the_set(shares_off([row["data_source"] for row in rows]))
    found["operator or pair in too many rows"] = _of_the_set(over_the_caps([one.operators for one in programs if one]))
    if graphs:
        traced = run_rows([row["code"] for row in rows], "cpu", "graph")
        found["semantic duplicate"] = _repeated([answer[0] for answer in traced])
        print(f"{sum(answer[0] is None for answer in traced)} rows can't be traced without values", file=sys.stderr)
    if run:
        chosen = sorted(random.Random(SEED).sample(range(len(rows)), min(run, len(rows))))
        answers = run_rows([rows[index]["code"] for index in chosen], device)
        for name in RUNNING:
            found[name] = {index: answer[name] for index, answer in zip(chosen, answers, strict=True) if name in answer}
    return found


def _of_the_set(details: Any) -> dict[int, Any]:
    return {-1 - place: detail for place, detail in enumerate(details)}


def counts(name: str, total: Any) -> Any:
    """Whether a defect fails the audit of so many rows."""
    return name != "operator or pair in too many rows" or total >= MIN_ROWS_FOR_CAPS


def table(found: Any, rows: list[dict[str, str]], ran: Any) -> tuple[str, int]:
    """The table, and how many defects count."""
    operators = {name for row in rows for name in json.loads(row["ops"])}
    lines = [
        f"{len(rows)} rows, {len(operators)} distinct operators, {ran} rows run",
        "",
        f"{'defect':44} {'found':>6}",
    ]
    failing = 0
    for name, places in found.items():
        does_count = counts(name, len(rows))
        failing += len(places) if does_count else 0
        note = "" if does_count else f"  (shown only, below {MIN_ROWS_FOR_CAPS} rows)"
        lines.append(f"{name:44} {len(places):6}{note}")
        lines += [
            f"    {f'row {index}: ' if index >= 0 else ''}{places[index]}"[:160]
            for index in sorted(places, key=lambda index: (index < 0, abs(index)))[:3]
        ]
    return "\n".join(lines) + f"\n\n{failing} defects", failing


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--run", default="0", help="how many rows to execute: a number, or all")
    parser.add_argument("--graphs", action="store_true", help="trace every row for semantic duplicates")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.folder)
        run = len(rows) if options.run == "all" else int(options.run)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text, failing = table(audit(rows, run, options.device, options.graphs), rows, min(run, len(rows)))
    print(text)
    return 1 if failing else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
