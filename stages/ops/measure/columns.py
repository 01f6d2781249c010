"""The facts that `ops/measure` records: their names and types, in the order of `stage.yaml`.

The supervisor holds what a worker sends against this table, so that a task which writes into the worker's pipe can at
most lie about itself. `test_measure.py` holds it against the manifest, where each column is explained.
"""

from typing import Any

BOOL, INT, FLOAT, TEXT = "bool", "int64", "float64", "utf8"
BOOLS, FLOATS, TEXTS = "list<bool>", "list<float64>", "list<utf8>"

FACTS = {
    "loads": BOOL,
    "builds": BOOL,
    "executes_eager": BOOL,
    "executes_compiled": BOOL,
    "error_stage": TEXT,
    "error_kind": TEXT,
    "error": TEXT,
    "inputs": TEXT,
    "outputs": TEXT,
    "parameters": INT,
    "inputs_fixed": BOOLS,
    "inputs_repeatable": BOOL,
    "mutates_inputs": BOOL,
    "finite": BOOL,
    "output_mean": FLOAT,
    "output_std": FLOAT,
    "output_min": FLOAT,
    "output_max": FLOAT,
    "output_constant": BOOL,
    "output_zero_share": FLOAT,
    "output_top_share": FLOAT,
    "repeat_abs": FLOAT,
    "reseed_abs": FLOAT,
    "random_ops": TEXTS,
    "graph": TEXT,
    "graph_operators": TEXTS,
    "train_random_ops": TEXTS,
    "shapes_vary": BOOL,
    "fresh_abs": FLOAT,
    "fresh_rel": FLOAT,
    "sensitivity_abs": FLOATS,
    "sensitivity_rel": FLOATS,
    "sensitivity_share": FLOATS,
    "seed_std_ratio": FLOAT,
    "train_abs": FLOAT,
    "train_rel": FLOAT,
    "train_error": TEXT,
    "compiled_abs": FLOAT,
    "compiled_rel": FLOAT,
    "compiled_tolerance": FLOAT,
    "graph_breaks": INT,
    "eager_ms": FLOAT,
    "eager_min_ms": FLOAT,
    "eager_iqr_ms": FLOAT,
    "eager_trials": INT,
    "eager_hidden": BOOL,
    "compiled_ms": FLOAT,
    "compiled_min_ms": FLOAT,
    "compiled_iqr_ms": FLOAT,
    "compiled_trials": INT,
    "compiled_hidden": BOOL,
    "compile_s": FLOAT,
    "peak_memory_bytes": INT,
    "total_s": FLOAT,
    "waiting_s": FLOAT,
    "device": TEXT,
    "torch": TEXT,
    "threads": INT,
}

_PYTHON = {BOOL: (bool,), INT: (int,), FLOAT: (float, int), TEXT: (str,)}


def _is_scalar(value: Any, name: str) -> bool:
    return isinstance(value, _PYTHON[name]) and (name == BOOL or not isinstance(value, bool))


def refuse(facts: dict[str, Any]) -> str | None:
    """Why a worker's facts are not of the declared form, or None where they are."""
    if not isinstance(facts, dict):
        return f"facts of type {type(facts).__name__}"
    for name, value in facts.items():
        expected = FACTS.get(name)
        if expected is None:
            return f"an unknown fact {name!r}"
        if value is None:
            continue
        if expected.startswith("list<"):
            item_type = expected[5:-1]
            fits = isinstance(value, list) and all(item is None or _is_scalar(item, item_type) for item in value)
        else:
            fits = _is_scalar(value, expected)
        if not fits:
            return f"{name} is not of type {expected}"
    return None
