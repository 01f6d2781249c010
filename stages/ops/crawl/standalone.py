"""Turns a class of an installed library into source that needs nothing but torch.

The class and the closure of what it names (helper functions, other classes, constants, also from other files of the
library) are taken over as syntax trees and specialised to the plain case: no cache, no mask, no dropout, eager
attention, a fixed configuration. Decorators, annotations and long docstrings go; conditions that are decided by then
are folded; attributes that nothing reads any more are dropped, so that no unused module is left.
"""

import ast
import builtins
import functools
import pathlib
import re

from tidy import Fold, Tidy
from torch_probe import Rejected

# Arguments that the plain case does not have. They go from signatures and calls, and read as None in the body.
ABSENT = frozenset((
    "past_key_values", "past_key_value", "cache_position", "use_cache", "attention_mask", "head_mask",
    "encoder_attention_mask", "output_attentions", "output_hidden_states", "cross_attn_head_mask", "layer_head_mask",
    "dropout", "output_router_logits", "bool_masked_pos", "interpolate_pos_encoding", "cache_params", "sliding_window",
    "softcap", "s_aux", "inputs_embeds", "past_key_values_length", "position_ids", "encoder_hidden_states", "cu_seqlens",
))
KEPT_DECORATORS = ("staticmethod", "classmethod", "property")
PLAIN_BASES = {"GradientCheckpointingLayer": "nn.Module"}
LIMIT_LINES = 260


@functools.lru_cache(maxsize=None)
def parse_file(path):
    return ast.parse(pathlib.Path(path).read_text(encoding="utf-8"))


class SourceFile:
    """A file of the library: its top-level definitions and what its imports mean."""

    def __init__(self, path, root):
        self.path, self.root = pathlib.Path(path), pathlib.Path(root)
        self.definitions, self.imports = {}, {}
        for node in parse_file(str(path)).body:
            self._register(node)

    def _register(self, node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.definitions[node.name] = node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.definitions[node.targets[0].id] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.imports[alias.asname or alias.name.split(".")[0]] = (alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.imports[alias.asname or alias.name] = (self._absolute(node), alias.name)

    def _absolute(self, node):
        if not node.level:
            return node.module
        package = self.path.relative_to(self.root.parent).with_suffix("").parts[:-node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    def file_of(self, module):
        """The path of a module of the same library."""
        base = self.root.parent.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
        raise Rejected("not standalone", f"no source file for {module}")


class Standalone:
    """The closure of one class."""

    def __init__(self, path, root, config, open_file):
        self.root, self.config, self.open_file = pathlib.Path(root), config, open_file
        self.file = open_file(str(path))
        self.imports, self.nodes, self.order, self.reads = set(), {}, [], {}
        self.activations = None

    def build(self, class_name):
        """The source of the class with its closure; raises Rejected."""
        self._visit(class_name, self.file)
        self._prune()
        body = "\n\n\n".join(ast.unparse(self.nodes[name]) for name in self.order if name in self.nodes)
        if "autograd.Function" in body:
            raise Rejected("not standalone", "has a backward pass of its own")
        # What such memory holds depends on chance, so running the class could not tell for certain.
        if re.search(r"\btorch\.(empty|empty_like|Tensor|FloatTensor)\(|\.new_empty\(", body):
            raise Rejected("uninitialised", "it makes a tensor that only the whole model's initialisation fills")
        if body.count("\n") > LIMIT_LINES:
            raise Rejected("too long", f"its closure has {body.count(chr(10))} lines")
        return body

    def import_lines(self, body):
        """Import statements for the names that are left in the source."""
        used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
        lines = set()
        for name, module, attribute in self.imports:
            if name in used and name not in ("torch", "nn", "F"):
                lines.add(import_line(name, module, attribute))
        return sorted(lines, key=lambda line: (line.startswith("from"), line))

    # -- closure

    def _visit(self, name, file):
        if name in self.nodes:
            return
        node = file.definitions[name]
        copied = ast.parse(ast.unparse(node)).body[0]
        self._check_bases(copied)
        node = Specialise(self, file).visit(copied)
        ast.fix_missing_locations(node)
        self.nodes[name] = node
        for used in sorted(free_names(node)):
            self._resolve(used, file)
        self.order.append(name)

    def _check_bases(self, node):
        if not isinstance(node, ast.ClassDef):
            return
        for base in node.bases:
            if ast.unparse(base).endswith(("PreTrainedModel", "Mixin", "ModelOutput")):
                raise Rejected("not standalone", f"needs the base class {ast.unparse(base)}")

    def _resolve(self, name, file):
        # Task files always import torch and nn.
        if hasattr(builtins, name) or name in self.nodes or name in ("torch", "nn"):
            return
        if name in file.definitions:
            self._visit(name, file)
        elif name in file.imports:
            self._import(name, *file.imports[name], file)
        else:
            raise Rejected("not standalone", f"no definition of `{name}`")

    def _import(self, name, module, attribute, file):
        top = module.split(".")[0]
        if top != self.root.name:
            if top not in ("torch", "math", "functools", "collections", "itertools", "typing", "numbers", "operator"):
                raise Rejected("not standalone", f"needs the package {top}")
            self.imports.add((name, module, attribute))
            return
        if attribute is None or name != attribute:
            raise Rejected("not standalone", f"imports `{name}` as a module or by another name")
        other = self.open_file(str(file.file_of(module)))
        if name in other.definitions:
            self._visit(name, other)
        elif name in other.imports:
            self._import(name, *other.imports[name], other)
        else:
            raise Rejected("not standalone", f"`{name}` is made at import time")

    def activation(self, key):
        """An expression that makes the activation of that name, as the library's table has it."""
        if self.activations is None:
            path = self.root / "activations.py"
            self.activations = self.open_file(str(path))
        table = self.activations.definitions["ACT2CLS"].value
        entries = {ast.literal_eval(k): v for k, v in zip(table.keys, table.values)}
        if key not in entries:
            raise Rejected("not standalone", f"unknown activation {key!r}")
        entry = entries[key]
        arguments = []
        if isinstance(entry, ast.Tuple):
            entry, options = entry.elts
            arguments = [ast.keyword(arg=k, value=ast.Constant(v)) for k, v in ast.literal_eval(options).items()]
        for name in sorted(free_names(entry)):
            self._resolve(name, self.activations)
        return ast.Call(func=entry, args=[], keywords=arguments)

    # -- clean-up

    def _prune(self):
        """Drop attributes that are set and never read, until nothing changes, then definitions without users."""
        tidy, changed = Tidy(self.nodes, self.order[-1]), True
        while changed:
            changed = tidy.step()
            changed |= any([prune_attributes(node, self._attributes_read()) for node in list(self.nodes.values())])
            keywords = {
                keyword.arg for node in self.nodes.values() for call in ast.walk(node) if isinstance(call, ast.Call)
                for keyword in call.keywords
            }
            for node in self.nodes.values():
                prune_parameters(node, keywords)
            self._drop_unreachable()

    def _drop_unreachable(self):
        reachable, todo = set(), [self.order[-1]]
        while todo:
            name = todo.pop()
            if name in reachable:
                continue
            reachable.add(name)
            todo += [used for used in free_names(self.nodes[name]) if used in self.nodes]
        for name in set(self.nodes) - reachable:
            del self.nodes[name]

    def _attributes_read(self):
        read = set()
        for node in self.nodes.values():
            for item in ast.walk(node):
                of_config = isinstance(item, ast.Attribute) and ast.unparse(item.value) in ("config", "self.config")
                if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Load) and not of_config:
                    read.add(item.attr)
                if isinstance(item, ast.Call) and ast.unparse(item.func) == "getattr":
                    read.add(ast.literal_eval(item.args[1]) if isinstance(item.args[1], ast.Constant) else "")
        return read


def import_line(name, module, attribute):
    if attribute is None:
        return f"import {module}" + (f" as {name}" if name != module.split(".")[0] else "")
    return f"from {module} import {attribute}" + (f" as {name}" if name != attribute else "")


def free_names(node):
    """Names that a definition reads and does not itself define."""
    stored, loaded = set(), set()
    for item in ast.walk(node):
        if isinstance(item, ast.Name):
            (loaded if isinstance(item.ctx, ast.Load) else stored).add(item.id)
        elif isinstance(item, ast.arg):
            stored.add(item.arg)
        elif isinstance(item, (ast.FunctionDef, ast.ClassDef)) and item is not node:
            stored.add(item.name)
    loaded -= {"self", "super"}
    return loaded - stored


def prune_attributes(node, read):
    """Remove `self.x = …` where nothing reads `x`; returns whether anything went."""
    changed = False
    for function in [item for item in ast.walk(node) if isinstance(item, ast.FunctionDef)]:
        kept = [statement for statement in function.body if not is_dead_attribute(statement, read)]
        if function.name == "extra_repr":
            kept = []
        if len(kept) != len(function.body):
            changed = True
            function.body = kept or [ast.Pass()]
    if isinstance(node, ast.ClassDef):
        node.body = [item for item in node.body if getattr(item, "name", "") != "extra_repr"]
    return changed


def prune_parameters(node, keywords):
    """Drop optional parameters that the body doesn't read and no call names."""
    for function in [item for item in ast.walk(node) if isinstance(item, ast.FunctionDef)]:
        read = {i.id for i in ast.walk(function) if isinstance(i, ast.Name) and isinstance(i.ctx, ast.Load)}
        arguments = function.args
        while arguments.defaults and not {arguments.args[-1].arg} & (read | keywords):
            arguments.args.pop()
            arguments.defaults.pop()


def is_dead_attribute(statement, read):
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return False
    target = statement.targets[0]
    return (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
            and target.attr not in read)


class Specialise(Fold):
    """Rewrites one definition to the plain case."""

    def __init__(self, closure, file):
        self.closure, self.file, self.absent, self.dropouts = closure, file, set(), set()

    # -- definitions

    def visit_ClassDef(self, node):
        node.decorator_list = []
        node.bases = [ast.parse(PLAIN_BASES.get(ast.unparse(b), ast.unparse(b)), mode="eval").body for b in node.bases]
        self.dropouts = {
            item.targets[0].attr for item in ast.walk(node)
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Attribute) and is_dropout(item.value)
        }
        self.generic_visit(node)
        node.body = shorten_docstring(node.body)
        return node

    def visit_FunctionDef(self, node):
        node.decorator_list = [d for d in node.decorator_list
                               if ast.unparse(d) in KEPT_DECORATORS or ast.unparse(d).startswith("torch.no_grad")]
        node.returns = None
        assigned = {i.id for i in ast.walk(node) if isinstance(i, ast.Name) and isinstance(i.ctx, ast.Store)}
        outer, self.absent = self.absent, (ABSENT & {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)})
        self.absent = {name for name in self.absent if name not in assigned} if node.name != "__init__" else set()
        self._drop_parameters(node.args)
        self.generic_visit(node)
        self.absent = outer
        node.body = shorten_docstring(flat(node.body)) or [ast.Pass()]
        return node

    def _drop_parameters(self, arguments):
        arguments.kwarg = None
        defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
        pairs = [(a, d) for a, d in zip(arguments.args, defaults) if a.arg not in self.absent]
        arguments.args = [argument for argument, _ in pairs]
        arguments.defaults = [default for _, default in pairs if default is not None]
        for argument in [*arguments.args, *arguments.kwonlyargs]:
            argument.annotation = None

    def visit_AnnAssign(self, node):
        if node.value is None:
            return None
        return self.visit(ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node))

    # -- values

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load) and node.id in self.absent:
            return ast.Constant(None)
        return node

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Load) and ast.unparse(node.value) in ("config", "self.config"):
            return self._config_value(node)
        if ast.unparse(node) == "self.training":
            return ast.Constant(False)
        return self.generic_visit(node)

    def _config_value(self, node):
        value = self.closure.config.get(node.attr, MISSING)
        if value is MISSING:
            raise Rejected("not standalone", f"the configuration has no `{node.attr}`")
        if value is None or isinstance(value, (str, bool)):
            return ast.Constant(value)
        # Sizes keep the library's ratios, so what is one size there is one size in every task.
        if node.attr == "num_key_value_heads" and value == self.closure.config.get("num_attention_heads"):
            node.attr = "num_attention_heads"
        self.closure.reads[node.attr] = value
        return node

    def visit_Call(self, node):
        text = ast.unparse(node.func)
        if text == "ALL_ATTENTION_FUNCTIONS.get_interface":
            return self.visit(node.args[1])
        if text == "getattr" and ast.unparse(node.args[0]) in ("config", "self.config"):
            return self._config_getattr(node)
        if text == "hasattr" and ast.unparse(node.args[0]) in ("config", "self.config"):
            return ast.Constant(ast.literal_eval(node.args[1]) in self.closure.config)
        if text.endswith("functional.dropout") or text == "F.dropout":
            return self.visit(node.args[0])
        if text.startswith("self.") and text[5:] in self.dropouts:
            return self.visit(node.args[0])
        if text.startswith("logger.") or text.startswith("warnings."):
            return ast.Constant(None)
        node.args = [a for a in node.args if not (isinstance(a, ast.Name) and a.id in self.absent)]
        node.keywords = [k for k in node.keywords if k.arg is not None and k.arg not in ABSENT]
        node = self.generic_visit(node)
        if text == "isinstance" and isinstance(node.args[0], ast.Constant) and ast.unparse(node.args[1]) == "str":
            return ast.Constant(isinstance(node.args[0].value, str))
        if text == "is_torchdynamo_compiling":
            return ast.Constant(False)
        return node

    def _config_getattr(self, node):
        name = ast.literal_eval(node.args[1])
        value = self.closure.config.get(name, MISSING)
        if value is MISSING:
            if len(node.args) < 3:
                raise Rejected("not standalone", f"the configuration has no `{name}`")
            return self.visit(node.args[2])
        return self._config_value(ast.Attribute(value=node.args[0], attr=name, ctx=ast.Load()))

    def visit_Subscript(self, node):
        if ast.unparse(node.value) == "ACT2FN":
            key = self.visit(node.slice)
            if not isinstance(key, ast.Constant):
                raise Rejected("not standalone", "its activation is not settled by the configuration")
            return self.closure.activation(key.value)
        return self.generic_visit(node)

    # -- folding: `Fold` has the rest

    def visit_Assign(self, node):
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and is_dropout(node.value):
            return None
        return super().visit_Assign(node)


MISSING = object()


def flat(body):
    return [item for item in body if item is not None]


def is_dropout(value):
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("nn.Dropout", "torch.nn.Dropout", "nn.Dropout2d")


def shorten_docstring(body):
    """Keep a docstring's first sentence; reference documentation of arguments that went would be wrong."""
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        lines = [line.strip() for line in str(body[0].value.value).strip().splitlines()]
        first = " ".join(lines[: lines.index("") if "" in lines else len(lines)])
        first = re.split(r"(?<=[.])\s", first)[0]
        first = first if len(first) < 100 else ""
        rest = body[1:]
        return [ast.Expr(ast.Constant(first)), *rest] if first and not first.endswith(":") else rest
    return body
