"""Keeps tasks apart from reference programs: by the structure of the class, by the operators, and by what runs.

Three questions, each a rule of its own, since each sees what the others can't:

- `contaminated`: is the class like a reference's, by the paper's measure (`similarity.py`)? The nearest reference and
  its similarity are found for every task, rejected or not, and their distribution is reported.
- `contaminated_signature`: has a reference the same operators, each as often (`signature.py`)? Such a task is the
  reference's problem at other sizes, and the measure of the first rule can be far below its limit.
- `contaminated_graph`: does a reference call the same operators in the same order when it runs, on inputs with as many
  dimensions (a convolution is one operator, be it of images or of volumes)? Sizes don't count, for a reference at other
  sizes is the same problem; in the table `similarity`, `same_graph` says where they agree as well.
"""

import collections
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import rules
import signature
import similarity

if TYPE_CHECKING:
    from references import Reference
    from rule import Rule


BINS = 20


class Contamination:
    """Compares tasks with references. `params` are the stage's, `skipped` the rules to leave out."""

    def __init__(self, references: "list[Reference]", params: dict[str, Any], skipped: set[str]) -> None:
        self.references, self.params, self.skipped = references, params, skipped
        self._comparer = similarity.Comparer()
        self._structures = [(other.name, self._comparer.structure(other.source)) for other in references]
        self._by_signature = _group(references, lambda other: _key(other.signature))
        self._by_run = _group(references, lambda other: other.run)
        self._by_graph = _group(references, lambda other: other.graph)
        self._nearest = {}
        self.table = []

    def judge(self, row: rules.Row) -> "list[tuple[Rule, str]]":
        """(rule, detail) for each of the three rules that the row fails; adds the row to the table."""
        if not self.references or row.source is None:
            return []
        entry = self._entry(row)
        self.table.append(entry)
        details = {
            rules.CONTAMINATED: f"similarity {entry['similarity']:.3f} with {entry['nearest']}"
            if entry["similarity"] > self.params["max_similarity"]
            else None,
            rules.CONTAMINATED_SIGNATURE: f"{entry['signature']}, as {_some(entry['same_signature'])}"
            if entry["same_signature"]
            else None,
            rules.CONTAMINATED_GRAPH: f"runs as {_some(entry['same_operators'])}" if entry["same_operators"] else None,
        }
        return [(rule, detail) for rule, detail in details.items() if detail and rule.name not in self.skipped]

    def _entry(self, row: rules.Row) -> dict[str, Any]:
        structure = self._comparer.structure(row.source)
        if structure.key not in self._nearest:
            self._nearest[structure.key] = self._comparer.most_similar(structure, self._structures)
        nearest, value = self._nearest[structure.key]
        own = signature.signature(row.source)
        # The declared operators too: where they and the code disagree, another rule rejects the task.
        keys = {_key(own), _key(signature.declared(rules.declared_names(row) or []))} - {()}
        run = (*(row.facts["graph_operators"] or ()), rank(row.facts["inputs"]))
        return {
            "task_id": row.facts["task_id"],
            "data_source": row.facts["data_source"],
            "nearest": nearest,
            "similarity": value,
            "signature": signature.text(own),
            "same_signature": sorted({name for key in keys for name in self._by_signature.get(key, ())}),
            "same_operators": self._by_run.get(run, []) if len(run) > 1 else [],
            "same_graph": self._by_graph.get(row.facts["graph"], []),
        }

    def as_json(self) -> dict[str, Any]:
        """What the report says: the distribution of the similarity, and how many tasks agree with a reference."""
        values = sorted(entry["similarity"] for entry in self.table)
        return {
            "tasks": len(values),
            "histogram": histogram(values),
            "deciles": [values[(len(values) - 1) * tenth // 10] for tenth in range(11)] if values else [],
            "by_category": {
                category: _counts([entry for entry in self.table if entry["data_source"] == category], self.params)
                for category in sorted({entry["data_source"] or "(none)" for entry in self.table})
            },
            "all": _counts(self.table, self.params),
            "traced_references": sum(other.run is not None for other in self.references),
            "untraced_references": {other.name: other.problem for other in self.references if other.problem},
        }


def rank(inputs: str) -> int:
    """The most dimensions that an input has, of the fact `inputs`."""
    try:
        return max((len(value["shape"]) for value in json.loads(inputs or "[]") if "shape" in value), default=0)
    except (TypeError, ValueError):
        return 0


def histogram(values: list[float]) -> list[dict[str, float]]:
    """Counts of values from 0 to 1 in equal bins, each with its upper end; 1 itself is in the last."""
    counts = collections.Counter(min(int(value * BINS), BINS - 1) for value in values)
    return [{"to": round((place + 1) / BINS, 2), "tasks": counts.get(place, 0)} for place in range(BINS)]


def _counts(entries: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, int]:
    return {
        "tasks": len(entries),
        "similar": sum(entry["similarity"] > params["max_similarity"] for entry in entries),
        "same_signature": sum(bool(entry["same_signature"]) for entry in entries),
        "same_operators": sum(bool(entry["same_operators"]) for entry in entries),
        "same_graph": sum(bool(entry["same_graph"]) for entry in entries),
    }


def _key(counts: collections.Counter[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(counts.items()))


def _group(
    references: "list[Reference]", key: Callable[..., Any]
) -> collections.defaultdict[str | tuple[Any, ...], list[str]]:
    groups = collections.defaultdict(list)
    for reference in references:
        value = key(reference)
        if value:
            groups[value].append(reference.name)
    return groups


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
