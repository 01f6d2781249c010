"""The programs that tasks must be kept apart from: KernelBench as a checkout, a folder or Parquet, or any other set.

| given | what is read |
|---|---|
| a checkout of KernelBench, or its folder `KernelBench` | the files in `level1`, `level2`, …, no others |
| Parquet, one file or a folder with several, in the layout of the Hugging Face Hub | the column `code`; `name` and `level` where there are any |
| any other folder or file | every Python file |

A file without a class Model is skipped and counted. `levels` says which levels count: KernelBench's evaluation, and the
paper's, is of the first three.
"""  # noqa: E501 (a table)

import dataclasses
import os
import re
from collections.abc import Iterator

import cuda_agent_stage as stage
import signature
import source as task_source


@dataclasses.dataclass
class Reference:
    """A program: its name, its code, its operators, and what it does where that was traced: the operators that it runs
    with the dimensions of its inputs, and the digest of its graph."""

    name: str
    code: str
    source: object
    signature: object = None
    run: tuple | None = None
    graph: str | None = None
    problem: str | None = None


def read(root: str, levels: list[int]) -> tuple[list[Reference], int]:
    """The references below a path and how many programs were skipped for want of a class Model."""
    found, skipped = [], 0
    for name, code in _programs(root, levels):
        try:
            parsed = task_source.parse(code)
        except task_source.NotATask:
            skipped += 1
        else:
            found.append(Reference(name, code, parsed, signature=signature.signature(parsed)))
    if not found:
        raise stage.StageError(
            "the input references has no program with a class Model",
            kind="input",
            hint="give it a checkout of KernelBench, a folder with Python files, or Parquet with a column code; "
            f"of levels only {levels or 'all'} count (parameter reference_levels)",
        )
    return found, skipped


def _programs(root: str, levels: list[int]) -> list[tuple[str, str]]:
    """(name, code) of every program, in an order that the file system has no say in."""
    tables = _files(root, ".parquet")
    folders = _level_folders(root)
    if folders:
        paths = [path for level, folder in folders if not levels or level in levels for path in _files(folder, ".py")]
        base = os.path.dirname(folders[0][1])
    elif tables:
        return [program for path in tables for program in _rows(path, levels)]
    else:
        paths, base = _files(root, ".py"), root if os.path.isdir(root) else os.path.dirname(root)
    return [(os.path.relpath(path, base), _text(path)) for path in paths]


def _level_folders(root: str) -> list[tuple[int, str]]:
    """(level, path) of the folders `level1`, … of a checkout or of its folder KernelBench; empty elsewhere."""
    for base in (os.path.join(root, "KernelBench"), root):
        names = os.listdir(base) if os.path.isdir(base) else []
        levels = [(int(match[1]), name) for name in names if (match := re.fullmatch(r"level_?(\d+)", name))]
        if levels:
            return [(level, os.path.join(base, name)) for level, name in sorted(levels)]
    return []


def _files(root: str, ending: str) -> list[str]:
    if os.path.isfile(root):
        return [root] if root.endswith(ending) else []
    return sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(ending)
    )


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _rows(path: str, levels: list[int]) -> Iterator[tuple[str, str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise stage.StageError(f"{os.path.basename(path)} of the input references: {error}", kind="input") from error
    if "code" not in table.column_names:
        raise stage.StageError(
            f"{os.path.basename(path)} of the input references has no column code, but {', '.join(table.column_names)}",
            kind="input",
            hint="KernelBench on the Hugging Face Hub has code, level, name and problem_id",
        )
    for index, row in enumerate(table.to_pylist()):
        level = row.get("level")
        if level is not None and levels and int(level) not in levels:
            continue
        name = row.get("name") or str(row.get("problem_id", index))
        yield (f"level{level}/{name}" if level is not None else name), row["code"] or ""
