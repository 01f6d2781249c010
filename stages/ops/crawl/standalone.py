"""Turns a class of an installed library into source that needs nothing but torch.

The class and the closure of what it names (helper functions, other classes, constants, also from other files of the
library) are taken over as syntax trees and specialised to the plain case: no cache, no mask, no dropout, eager
attention, a fixed configuration. Decorators, annotations and long docstrings go; conditions that are decided by then
are folded; attributes that nothing reads any more are dropped, so that no unused module is left.
"""

import ast
import builtins
import copy
import functools
import pathlib
import re
from typing import TYPE_CHECKING, Any

from tidy import Fold, Tidy, listed, walk
from torch_probe import Rejected

if TYPE_CHECKING:
    from transformers_crawl import Configuration

# Arguments that the plain case does not have. They go from signatures and calls, and read as None in the body.
ABSENT = frozenset(
    "past_key_values past_key_value cache_position use_cache attention_mask head_mask encoder_attention_mask "
    "output_attentions output_hidden_states cross_attn_head_mask layer_head_mask dropout output_router_logits "
    "bool_masked_pos interpolate_pos_encoding cache_params sliding_window softcap s_aux inputs_embeds "
    "past_key_values_length position_ids encoder_hidden_states cu_seqlens".split()
)
ABSENT_NUMBERS = {"past_key_values_length": 0}
# Questions about the surroundings, which a task answers with no.
NO = re.compile(
    r"^is_(torchdynamo_\w+|tracing|deepspeed_\w+|fsdp_\w+|flash_attention_requested|jit_tracing|"
    r"torch_fx_proxy|jax_\w+|(?!torch_available|vision_available)\w+_available)$"
)
CONTEXTS = re.compile(r"maybe_autocast|autocast|torch\.amp|deepspeed|GatheredParameters|torch\.cuda|set_grad_enabled")
KEPT_DECORATORS = ("staticmethod", "classmethod", "property")
PLAIN_BASES = {"GradientCheckpointingLayer": "nn.Module"}
LIMIT_LINES = 260


@functools.cache
def parse_file(path: str) -> ast.Module:
    return ast.parse(pathlib.Path(path).read_text(encoding="utf-8"))


class SourceFile:
    """A file of the library: its top-level definitions and what its imports mean."""

    def __init__(self, path: str, root: pathlib.Path) -> None:
        self.path, self.root = pathlib.Path(path), pathlib.Path(root)
        self.definitions: dict[str, Any] = {}
        self.imports: dict[str, tuple[Any, str | None]] = {}
        for node in parse_file(str(path)).body:
            self._register(node)

    def _register(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.If, ast.Try)):
            # What is imported under a condition is there in a full installation.
            for inner in [*node.body, *node.orelse]:
                self._register(inner)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.definitions[node.name] = node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.definitions[node.targets[0].id] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.imports[alias.asname or alias.name.split(".")[0]] = (alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.imports[alias.asname or alias.name] = (self._absolute(node), alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str | None:
        if not node.level:
            return node.module
        package = self.path.relative_to(self.root.parent).with_suffix("").parts[: -node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    def file_of(self, module: str) -> pathlib.Path:
        """The path of a module of the same library."""
        base = self.root.parent.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
        raise Rejected("not standalone", f"no source file for {module}")


class Standalone:
    """The closure of one class."""

    def __init__(
        self, path: pathlib.Path, root: pathlib.Path, config: "Configuration | dict[str, Any]", open_file: Any
    ) -> None:
        self.root, self.config, self.open_file = pathlib.Path(root), config, open_file
        self.file = open_file(str(path))
        self.imports: set[Any] = set()
        self.nodes: dict[str, Any] = {}
        self.order: list[str] = []
        self.reads: dict[str, Any] = {}
        self.body = ""
        self.activations = None
        # Functions that took any further keyword; what their calls give beyond the parameters goes.
        self.open_ended = set()

    def build(self, class_name: str) -> str:
        """The source of the class with its closure; raises Rejected."""
        self.root_name = class_name
        self._visit(class_name, self.file)
        self._prune()
        if self._settle_activations():
            self._prune()
        # Definitions that activations brought in come before the class that they are for.
        order = [*(name for name in self.order if name != class_name), class_name]
        body = "\n\n\n".join(ast.unparse(self.nodes[name]) for name in order if name in self.nodes)
        if "autograd.Function" in body:
            raise Rejected("not standalone", "has a backward pass of its own")
        # What such memory holds depends on chance, so running the class could not tell for certain.
        if re.search(r"\btorch\.(empty|empty_like|Tensor|FloatTensor)\(|\.new_empty\(", body):
            raise Rejected("uninitialised", "it makes a tensor that only the whole model's initialisation fills")
        if body.count("\n") > LIMIT_LINES:
            raise Rejected("too long", f"its closure has {body.count(chr(10))} lines")
        return body

    def import_lines(self, body: str) -> list[str]:
        """Import statements for the names that are left in the source."""
        used = {node.id for node in walk(ast.parse(body)) if isinstance(node, ast.Name)}
        lines = set()
        for name, module, attribute in self.imports:
            if name in used and name not in ("torch", "nn", "F"):
                lines.add(import_line(name, module, attribute))
        return sorted(lines, key=lambda line: (line.startswith("from"), line))

    # -- closure

    def _visit(self, name: str, file: SourceFile) -> None:
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

    def _check_bases(self, node: ast.stmt) -> None:
        if not isinstance(node, ast.ClassDef):
            return
        for base in node.bases:
            if ast.unparse(base).endswith(("PreTrainedModel", "Mixin", "ModelOutput")):
                raise Rejected("not standalone", f"needs the base class {ast.unparse(base)}")

    def _resolve(self, name: str, file: Any) -> None:
        # Task files always import torch and nn.
        if hasattr(builtins, name) or name in self.nodes or name in ("torch", "nn", "ACT2FN"):
            return
        if name in file.definitions:
            self._visit(name, file)
        elif name in file.imports:
            module, attribute = file.imports[name]
            self._import(name, module, attribute, file)
        else:
            raise Rejected("not standalone", f"no definition of `{name}`")

    def _import(self, name: str, module: str, attribute: str | None, file: SourceFile) -> None:
        top = module.split(".")[0]
        if top != self.root.name:
            if top not in ("torch", "math", "functools", "collections", "itertools", "typing", "numbers", "operator"):
                raise Rejected("not standalone", f"needs the package {top}")
            self.imports.add((name, module, attribute))
            return
        if attribute == "initialization":
            # The library's wrapper skips what a checkout fills; on its own it is torch's module.
            self.imports.add((name, "torch.nn", "init"))
            return
        if attribute is None or name != attribute:
            raise Rejected("not standalone", f"imports `{name}` as a module or by another name")
        other = self.open_file(str(file.file_of(module)))
        if name in other.definitions:
            self._visit(name, other)
        elif name in other.imports:
            module, attribute = other.imports[name]
            self._import(name, module, attribute, other)
        else:
            raise Rejected("not standalone", f"`{name}` is made at import time")

    def _activation_entries(self) -> dict[str, Any]:
        if self.activations is None:
            self.activations = self.open_file(str(self.root / "activations.py"))
        table = self.activations.definitions["ACT2CLS"].value
        return {ast.literal_eval(k): v for k, v in zip(table.keys, table.values, strict=True)}

    def activation(self, key: Any) -> ast.Call:
        """An expression that makes the activation of that name, as the library's table has it."""
        entries = self._activation_entries()
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

    def _settle_activations(self) -> bool:
        """Put activations in place of their names, where only folding told the name; returns whether any was open."""
        settle = SettleActivations(self)
        for name, node in list(self.nodes.items()):
            self.nodes[name] = ast.fix_missing_locations(settle.visit(node))
        if settle.by_name:
            self._add_activation_table()
        return settle.found

    def _add_activation_table(self) -> None:
        """A table of the activations that the closure names, for where an argument chooses between them."""
        texts = {
            item.value
            for node in self.nodes.values()
            for item in walk(node)
            if isinstance(item, ast.Constant) and isinstance(item.value, str)
        }
        known = sorted(texts & set(self._activation_entries()))
        if not known:
            raise Rejected("not standalone", "its activation is not settled by the configuration")
        makers: list[ast.expr] = [
            ast.Lambda(
                args=ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]),
                body=self.activation(name),
            )
            for name in known
        ]
        table = ast.Dict(keys=[ast.Constant(name) for name in known], values=makers)
        self.nodes["ACT2FN"] = ast.fix_missing_locations(
            ast.Assign(targets=[ast.Name(id="ACT2FN", ctx=ast.Store())], value=table)
        )
        self.order.insert(0, "ACT2FN")

    # -- clean-up

    def _prune(self) -> None:
        """Drop attributes that are set and never read, until nothing changes, then definitions without users."""
        tidy, changed = Tidy(self.nodes, self.root_name), True
        while changed:
            changed = tidy.step()
            read = self._attributes_read()
            # All of them, also after one that changed something.
            pruned = [prune_attributes(node, read) for node in list(self.nodes.values())]
            changed |= any(pruned)
            keywords = {
                keyword.arg
                for node in self.nodes.values()
                for call in walk(node)
                if isinstance(call, ast.Call)
                for keyword in call.keywords
            }
            for name, node in self.nodes.items():
                prune_parameters(node, keywords, name == self.root_name)
            self._drop_surplus_keywords()
            self._drop_unreachable()

    def _drop_surplus_keywords(self) -> None:
        """Calls of functions that took any keyword give only those that are still parameters."""
        known = {
            name: {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
            for name, node in self.nodes.items()
            if isinstance(node, ast.FunctionDef) and name in self.open_ended
        }
        for node in self.nodes.values():
            for call in walk(node):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in known:
                    call.keywords = [k for k in call.keywords if k.arg in known[call.func.id]]

    def _drop_unreachable(self) -> None:
        reachable, todo = set(), [self.root_name]
        while todo:
            name = todo.pop()
            if name in reachable:
                continue
            reachable.add(name)
            todo += [used for used in free_names(self.nodes[name]) if used in self.nodes]
        for name in set(self.nodes) - reachable:
            del self.nodes[name]

    def _attributes_read(self) -> set[str]:
        read = set()
        for node in self.nodes.values():
            for item in walk(node):
                if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Load) and not is_config(item.value):
                    read.add(item.attr)
                if isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == "getattr":
                    read.add(ast.literal_eval(item.args[1]) if isinstance(item.args[1], ast.Constant) else "")
        return read


def is_config(node: ast.expr) -> bool:
    """Whether it is `config` or `self.config`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "config" and isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Name) and node.id == "config"


def import_line(name: str, module: str, attribute: Any) -> str:
    if attribute is None:
        return f"import {module}" + (f" as {name}" if name != module.split(".")[0] else "")
    return f"from {module} import {attribute}" + (f" as {name}" if name != attribute else "")


def free_names(node: ast.AST) -> set[str]:
    """Names that a definition reads and does not itself define."""
    stored, loaded = set(), set()
    for item in walk(node):
        if isinstance(item, ast.Name):
            (loaded if isinstance(item.ctx, ast.Load) else stored).add(item.id)
        elif isinstance(item, ast.arg):
            stored.add(item.arg)
        elif isinstance(item, (ast.FunctionDef, ast.ClassDef)) and item is not node:
            stored.add(item.name)
        elif isinstance(item, ast.ExceptHandler) and item.name:
            stored.add(item.name)
        elif isinstance(item, (ast.Import, ast.ImportFrom)):
            stored |= {alias.asname or alias.name.split(".")[0] for alias in item.names}
    loaded -= {"self", "super"}
    return loaded - stored


def prune_attributes(node: ast.ClassDef | ast.FunctionDef, read: set[str]) -> bool:
    """Remove `self.x = …` where nothing reads `x`; returns whether anything went."""
    changed = False
    for function in [item for item in walk(node) if isinstance(item, ast.FunctionDef)]:
        kept = [statement for statement in function.body if not is_dead_attribute(statement, read)]
        if function.name == "extra_repr":
            kept = []
        if len(kept) != len(function.body):
            changed = True
            function.body = kept or [ast.Pass()]
    if isinstance(node, ast.ClassDef):
        node.body = [item for item in node.body if getattr(item, "name", "") != "extra_repr"]
    return changed


def prune_parameters(node: ast.ClassDef | ast.FunctionDef, keywords: set[str | None], is_root: bool) -> None:
    """Drop optional parameters of methods that the body doesn't read and no call names.

    Constructors and functions are left to `Tidy`, which drops what their calls give by position as well.
    """
    for function in [item for item in walk(node) if isinstance(item, ast.FunctionDef)]:
        if function is node or (function.name == "__init__" and not is_root):
            continue
        read = {i.id for i in walk(function) if isinstance(i, ast.Name) and isinstance(i.ctx, ast.Load)}
        arguments = function.args
        while arguments.defaults and not {arguments.args[-1].arg} & (read | keywords):
            arguments.args.pop()
            arguments.defaults.pop()


def is_dead_attribute(statement: ast.stmt, read: set[str]) -> bool:
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return False
    target = statement.targets[0]
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
        and target.attr not in read
    )


class Specialise(Fold):
    """Rewrites one definition to the plain case."""

    def __init__(self, closure: Standalone, file: SourceFile) -> None:
        self.closure, self.file, self.absent, self.dropouts = closure, file, set(), set()

    # -- definitions

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list = []
        node.bases = [ast.parse(PLAIN_BASES.get(ast.unparse(b), ast.unparse(b)), mode="eval").body for b in node.bases]
        self.dropouts = {
            item.targets[0].attr
            for item in walk(node)
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Attribute) and is_dropout(item.value)
        }
        self.generic_visit(node)
        node.body = shorten_docstring(node.body)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = [
            d
            for d in node.decorator_list
            if ast.unparse(d) in KEPT_DECORATORS or ast.unparse(d).startswith("torch.no_grad")
        ]
        node.returns = None
        assigned = {i.id for i in walk(node) if isinstance(i, ast.Name) and isinstance(i.ctx, ast.Store)}
        outer, self.absent = self.absent, (ABSENT & {a.arg for a in walk(node) if isinstance(a, ast.arg)})
        is_method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        self.absent = self.absent - assigned if is_method and node.name != "__init__" else set()
        self._drop_parameters(node.name, node.args)
        self.generic_visit(node)
        self.absent = outer
        node.body = shorten_docstring(flat(node.body)) or [ast.Pass()]
        return node

    def _drop_parameters(self, name: str, arguments: ast.arguments) -> None:
        if arguments.kwarg:
            self.closure.open_ended.add(name)
        arguments.kwarg = None
        defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
        pairs = [(a, d) for a, d in zip(arguments.args, defaults, strict=True) if a.arg not in self.absent]
        arguments.args = [argument for argument, _ in pairs]
        arguments.defaults = [default for _, default in pairs if default is not None]
        for argument in [*arguments.args, *arguments.kwonlyargs]:
            argument.annotation = None

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        if node.value is None:
            return None
        return self.visit(ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node))

    # -- values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id in self.absent:
            return ast.Constant(ABSENT_NUMBERS.get(node.id))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        inner = node.value
        if isinstance(node.ctx, ast.Load) and is_config(inner):
            return self._config_value(node)
        if isinstance(inner, ast.Attribute) and inner.attr.endswith("_config") and is_config(inner.value):
            return self._nested_value(node)
        if node.attr == "training" and isinstance(inner, ast.Name) and inner.id == "self":
            return ast.Constant(False)
        return self.generic_visit(node)

    def _nested_value(self, node: Any) -> ast.expr:
        """`config.text_config.hidden_size` becomes `config.text_hidden_size`: one plain configuration."""
        inner = node.value.attr
        values = self.closure.config.get(inner, MISSING)
        value = values.get(node.attr, MISSING) if isinstance(values, dict) else getattr(values, node.attr, MISSING)
        if value is MISSING:
            raise Rejected("not standalone", f"the configuration has no `{inner}.{node.attr}`")
        if value is None or isinstance(value, (str, bool)):
            return ast.Constant(value)
        name = f"{inner.removesuffix('_config')}_{node.attr}"
        self.closure.reads[name] = value
        return ast.Attribute(value=node.value.value, attr=name, ctx=node.ctx)

    def _config_value(self, node: ast.Attribute) -> ast.expr:
        value = self.closure.config.get(node.attr, MISSING)
        if value is MISSING:
            raise Rejected("not standalone", f"the configuration has no `{node.attr}`")
        if value is None or isinstance(value, (str, bool)):
            return ast.Constant(value)
        if node.attr.endswith("_config"):
            raise Rejected("not standalone", f"takes the nested configuration `{node.attr}` as a whole")
        # Sizes keep the library's ratios, so what is one size there is one size in every task.
        if node.attr == "num_key_value_heads" and value == self.closure.config.get("num_attention_heads"):
            node.attr = "num_attention_heads"
        self.closure.reads[node.attr] = value
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        text = ast.unparse(node.func)
        if text == "ALL_ATTENTION_FUNCTIONS.get_interface":
            return self.visit(node.args[1])
        if text == "getattr" and ast.unparse(node.args[0]) in ("config", "self.config"):
            return self._config_getattr(node)
        if text == "hasattr" and ast.unparse(node.args[0]) in ("config", "self.config"):
            return ast.Constant(ast.literal_eval(node.args[1]) in self.closure.config)
        absent = text == "isinstance" and isinstance(node.args[0], ast.Name) and node.args[0].id in self.absent
        if absent or NO.search(text) or (text == "isinstance" and re.search(r"Cache\b", ast.unparse(node.args[1]))):
            return ast.Constant(False)
        if text in ("kwargs.get", "kwargs.pop"):
            return self.visit(node.args[1]) if len(node.args) > 1 else ast.Constant(None)
        if text == "get_activation":
            return self.visit(
                ast.Subscript(value=ast.Name(id="ACT2FN", ctx=ast.Load()), slice=node.args[0], ctx=ast.Load())
            )
        if text == "apply_chunking_to_forward":
            return self.visit(ast.Call(func=node.args[0], args=node.args[3:], keywords=[]))
        if text.endswith("functional.dropout") or text == "F.dropout":
            return self.visit(node.args[0])
        if text.startswith("self.") and text[5:] in self.dropouts:
            return self.visit(node.args[0])
        if text.startswith(("logger.", "warnings.")) or text in ("torch_compilable_check", "torch._check"):
            return ast.Constant(None)
        node.keywords = [k for k in node.keywords if k.arg is not None]
        # Functions keep their parameters and are given None, which `Tidy` settles where all calls do so.
        if not (isinstance(node.func, ast.Name) and node.func.id[:1].islower()):
            node.args = [a for a in node.args if not (isinstance(a, ast.Name) and a.id in self.absent)]
            node.keywords = [k for k in node.keywords if k.arg not in ABSENT]
        self.generic_visit(node)
        if text == "isinstance" and isinstance(node.args[0], ast.Constant) and ast.unparse(node.args[1]) == "str":
            return ast.Constant(isinstance(node.args[0].value, str))
        if text in ("nn.Parameter", "torch.nn.Parameter", "Parameter") and node.args:
            node.args[0] = filled(node.args[0])
        return node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        """Contexts for other precisions or devices go, their bodies stay."""
        if all(CONTEXTS.search(ast.unparse(item.context_expr)) for item in node.items):
            return [item for statement in node.body for item in listed(self.visit(statement))]
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """A record of named outputs becomes a tuple of those that are given."""
        if isinstance(node.value, ast.Call) and is_record(node.value, self.file):
            values = [keyword.value for keyword in node.value.keywords] + node.value.args
            node = ast.Return(value=ast.Tuple(elts=values, ctx=ast.Load()) if len(values) > 1 else values[0])
        return self.generic_visit(node)

    def _config_getattr(self, node: ast.Call) -> ast.expr:
        name = ast.literal_eval(node.args[1])
        value = self.closure.config.get(name, MISSING)
        if value is MISSING:
            if len(node.args) < 3:
                raise Rejected("not standalone", f"the configuration has no `{name}`")
            return self.visit(node.args[2])
        return self._config_value(ast.Attribute(value=node.args[0], attr=name, ctx=ast.Load()))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        text = ast.unparse(node.value)
        if text == "ACT2FN":
            key = self.visit(node.slice)
            # A name that an argument gives is known when the closure has been folded.
            return (
                self.closure.activation(key.value)
                if isinstance(key, ast.Constant)
                else ast.Subscript(value=node.value, slice=key, ctx=node.ctx)
            )
        if text == "ALL_ATTENTION_FUNCTIONS":
            return ast.Name(id="eager_attention_forward", ctx=ast.Load())
        self.generic_visit(node)
        return self._table_entry(text, node)

    def _table_entry(self, text: str, node: ast.Subscript) -> ast.expr:
        """The entry of a table of the file, such as the attention classes by implementation, where the key is known."""
        table = self.file.definitions.get(text)
        if not (
            isinstance(table, ast.Assign) and isinstance(table.value, ast.Dict) and isinstance(node.slice, ast.Constant)
        ):
            return node
        entries = {
            k.value: v for k, v in zip(table.value.keys, table.value.values, strict=True) if isinstance(k, ast.Constant)
        }
        return copy.deepcopy(entries.get(node.slice.value, node))

    # -- folding: `Fold` has the rest

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and is_dropout(node.value):
            return None
        return super().visit_Assign(node)


class SettleActivations(ast.NodeTransformer):
    """Replaces `ACT2FN[name]` once the name is known, and by an entry of a table where an argument gives it."""

    def __init__(self, closure: Standalone) -> None:
        self.closure, self.found, self.by_name = closure, False, False

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.value) != "ACT2FN":
            return node
        self.found = True
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            return self.closure.activation(node.slice.value)
        self.by_name = True
        return ast.Call(func=node, args=[], keywords=[])


def filled(value: ast.expr) -> ast.expr:
    """Values for a parameter that the library makes empty and its models fill: normal with the usual deviation."""
    made = value
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in ("float", "to"):
        made = made.func.value
    if not (
        isinstance(made, ast.Call) and ast.unparse(made.func) in ("torch.empty", "torch.Tensor", "torch.FloatTensor")
    ):
        return value
    call = ast.Call(
        func=ast.parse("torch.randn", mode="eval").body,
        args=made.args,
        keywords=[k for k in made.keywords if k.arg not in ("dtype", "device")],
    )
    return ast.BinOp(left=ast.Constant(0.02), op=ast.Mult(), right=call)


def is_record(call: ast.Call, file: SourceFile) -> bool:
    """Whether a call makes one of the library's records of outputs, which are dataclasses."""
    name = ast.unparse(call.func)
    definition = file.definitions.get(name)
    own = isinstance(definition, ast.ClassDef) and any(
        ast.unparse(base).endswith(("ModelOutput", "Output", "OutputWithPast")) for base in definition.bases
    )
    return bool(call.keywords or call.args) and (own or bool(re.match(r"(BaseModel|Seq2Seq|Causal)\w*Output", name)))


MISSING = object()


def flat(body: list[ast.stmt]) -> list[ast.stmt]:
    return [item for item in body if item is not None]


def is_dropout(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("nn.Dropout", "torch.nn.Dropout", "nn.Dropout2d")


def shorten_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Keep a docstring's first sentence; reference documentation of arguments that went would be wrong."""
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        lines = [line.strip() for line in str(body[0].value.value).strip().splitlines()]
        first = " ".join(lines[: lines.index("") if "" in lines else len(lines)])
        first = re.split(r"(?<=[.])\s", first)[0]
        first = first if len(first) < 100 else ""
        rest = body[1:]
        return [ast.Expr(ast.Constant(first)), *rest] if first and not first.endswith(":") else rest
    return body
