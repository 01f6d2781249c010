"""The figures of a published dataset: functions of rows, without a chart and without a disk."""

import collections
import itertools
import json
import math
from typing import Any

import charts

TRANSFORMERS = "transformers"
# No cap of ops/publish is below this many rows.
LEAST_ROWS = 5
QUANTILES = [
    ("least", 0.0),
    ("5 %", 0.05),
    ("25 %", 0.25),
    ("median", 0.5),
    ("75 %", 0.75),
    ("95 %", 0.95),
    ("most", 1.0),
]


def values(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The finite numbers of a column, in order; none where there is no such column."""
    column = (row.get(name) for row in rows)
    return [float(value) for value in column if value is not None and math.isfinite(value)]


def ratios(rows: list[dict[str, Any]], above: str, below: str) -> list[float]:
    """Of each row that has both, positive."""
    pairs = ((row.get(above), row.get(below)) for row in rows)
    return [a / b for a, b in pairs if a is not None and b is not None and a > 0 and b > 0 and math.isfinite(a / b)]


def quantile(ordered: list[float], part: float) -> float:
    """By linear interpolation between the nearest."""
    place = part * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def quantiles(numbers: list[float]) -> list[float] | None:
    ordered = sorted(numbers)
    return [quantile(ordered, part) for _, part in QUANTILES] if ordered else None


def geometric_mean(numbers: list[float]) -> float | None:
    return math.exp(sum(map(math.log, numbers)) / len(numbers)) if numbers else None


def shares(names: list[str], weights: dict[str, int]) -> list[dict[str, Any]]:
    """Each category's rows and percent, beside the percent that its weight asks for."""
    counts = collections.Counter(names)
    total, all_weights = max(sum(counts.values()), 1), sum(weights.values()) or 1
    return [
        {
            "category": name,
            "rows": counts[name],
            "percent": 100 * counts[name] / total,
            "asked": 100 * weights[name] / all_weights if name in weights else None,
        }
        for name in sorted({*counts, *weights})
    ]


def is_wide(operator: str) -> bool:
    """Whether the wider cap of ops/publish is for it: a linear layer or a convolution."""
    return operator in ("nn.Linear", "F.linear") or operator.startswith(("nn.Conv", "F.conv"))


def limit(share: float, rows: int) -> int | None:
    """The most rows that a cap allows, or None where it is off."""
    return max(math.floor(share * rows + 1e-6), LEAST_ROWS) if share else None


def operators(samples: list[dict[str, str]]) -> dict[str, Any]:
    """Rows by operator and by unordered pair of different ones, most frequent first, torch apart from transformers."""
    torch, classes, pairs, bilinear = (collections.Counter() for _ in range(4))
    for row in samples:
        names = sorted(set(json.loads(row["ops"])))
        (classes if row["data_source"] == TRANSFORMERS else torch).update(names)
        pairs.update(itertools.combinations(names, 2))
        bilinear["rows"] += bool({"nn.Bilinear", "F.bilinear"} & set(names))

    def order(counter: collections.Counter[str | tuple[str, str]]):
        return sorted(counter.items(), key=lambda item: (-item[1], item[0]))

    return {"torch": order(torch), "classes": order(classes), "pairs": order(pairs), "bilinear": bilinear["rows"]}


def families(
    samples: list[dict[str, str]], measurements: list[dict[str, Any]], weights: dict[str, int]
) -> list[dict[str, Any]]:
    """Uses of torch operators by family, in percent, beside what the weights ask for of the families that there are."""
    counts = collections.Counter()
    for sample, row in zip(samples, measurements, strict=True):
        if sample["data_source"] != TRANSFORMERS and row.get("families"):
            counts.update(json.loads(row["families"]))
    total = sum(counts.values())
    all_weights = sum(weights.values()) or 1
    found = [
        {
            "family": name,
            "uses": counts[name],
            "percent": 100 * counts[name] / total,
            "asked": 100 * weights[name] / all_weights if name in weights else None,
        }
        for name in sorted({*counts, *weights} if total else [])
    ]
    return sorted(found, key=lambda entry: (-entry["uses"], entry["family"]))


def by_reason(rows: list[dict[str, Any]], column: str) -> tuple[list[str], list[tuple[str, int, dict[Any, int], str]]]:
    """Counts by reason and by the values of a column: ([values], [(reason, total, {value: count}, a detail)])."""
    table, details = collections.defaultdict(collections.Counter), {}
    for row in rows:
        reason = row["reason"] or "not recorded"
        table[reason][row[column] or "not recorded"] += 1
        details.setdefault(reason, row.get("detail") or "")
    names = sorted({name for counts in table.values() for name in counts})
    entries = [(reason, sum(counts.values()), dict(counts), details[reason]) for reason, counts in table.items()]
    return names, sorted(entries, key=lambda entry: (-entry[1], entry[0]))


def funnel(summary: dict[str, Any], rejected: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The rules of a filter's report with what is left after each, and an example from the rejected rows."""
    examples = {}
    for row in rejected:
        examples.setdefault(row["rule"], row)
    left, steps = summary["total_in"], []
    for rule in summary["rules"]:
        left -= rule["rejected"]
        params = ", ".join(f"{name} {value}" for name, value in sorted((rule.get("params") or {}).items()))
        steps.append(
            {
                "name": rule["name"],
                "reason": rule["reason"],
                "params": params,
                "applied": rule["applied"],
                "because": rule.get("not_applied_because"),
                "rejected": rule["rejected"],
                "left": left,
                "failing": rule.get("failing"),
                "by_category": rule.get("rejected_by_category") or {},
                "example": examples.get(rule["name"]),
            }
        )
    return steps


def time_use(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Seconds by what they went into, over the rows that say it; None where none does.

    What the clock took is reckoned: trials times the median. The rest is what no column names: start, drawing inputs,
    facts.
    """
    timed = [row for row in rows if row.get("total_s") is not None]
    if not timed:
        return None
    total = sum(values(timed, "total_s"))
    clock = sum(
        (row.get(f"{mode}_ms") or 0) * (row.get(f"{mode}_trials") or 0) / 1000
        for row in timed
        for mode in ("eager", "compiled")
    )
    parts = [
        ("compilation (compile_s)", sum(values(timed, "compile_s"))),
        ("waiting for the clock or a turn (waiting_s)", sum(values(timed, "waiting_s"))),
        ("timed forwards (trials × median)", clock),
    ]
    rest = max(total - sum(seconds for _, seconds in parts), 0.0)
    return {"rows": len(timed), "total": total, "parts": [*parts, ("everything else", rest)]}


def similarity(summary: dict[str, Any] | None) -> dict[str, Any] | None:
    """The distribution that ops/filter reports, with its threshold; None where nothing was compared."""
    found = (summary or {}).get("similarity")
    if not found or not found.get("tasks"):
        return None
    rule = next((rule for rule in summary["rules"] if rule["name"] == "contaminated"), {})
    return {**found, "threshold": (rule.get("params") or {}).get("max_similarity"), "references": summary["references"]}


def examples(samples: list[dict[str, str]], measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first row of each category."""
    found = {}
    for sample, row in zip(samples, measurements, strict=True):
        found.setdefault(sample["data_source"], {**row, **sample, "operators": json.loads(sample["ops"])})
    return [found[name] for name in sorted(found)]


def constant(rows: list[dict[str, Any]], name: str) -> list[tuple[str, int]]:
    """The values of a text column, with their counts."""
    counts = collections.Counter(row[name] for row in rows if row.get(name))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{charts.short(value)} ms"
