"""`ops/report`: one HTML page of a published dataset, with its figures as CSV beside it.

`figures` counts, `charts` draws, `page.html` is the page; here tables are read, and figures put into charts. Nothing on
the page comes from anywhere else, and equal inputs make equal bytes.
"""

import csv
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2

import charts
import cuda_agent_stage as stage
import figures

HERE = os.path.dirname(os.path.abspath(__file__))


def read(path: str, needed: list[str], port: str) -> list[dict[str, Any]]:
    """The rows of a Parquet file that must have some columns."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise stage.StageError(
            f"the input {port} has no column {', '.join(missing)}",
            kind="input",
            hint=f"there are: {', '.join(table.column_names)}",
        )
    return table.to_pylist()


def optional(program: stage.Program, port: str, needed: list[str]) -> list[dict[str, Any]] | None:
    """The rows of an optional table, of all of them where the port takes several; None where none is given."""
    entry = program.inputs.get(port)
    if not entry:
        return None
    return [row for each in entry.get("list", [entry]) for row in read(each["path"], needed, port)]


def read_funnel(program: stage.Program) -> dict[str, Any] | None:
    folder = program.input_path("report")
    path = os.path.join(folder, "funnel.json") if folder else None
    if path is None or not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        summary = json.load(file)
    missing = [name for name in ("in", "kept", "total_in", "total_kept", "rules", "references") if name not in summary]
    if missing:
        raise stage.StageError(
            f"funnel.json of the input report has no {', '.join(missing)}",
            kind="input",
            hint="wire it to the output report of ops/filter or of a filter after it",
        )
    return summary


def check_params(params: dict[str, Any]) -> None:
    for name in ("shares", "families"):
        for key, weight in params[name].items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight < 0:
                raise stage.StageError(f"{name}: the weight of {key} must be a number, 0 or more", kind="params")


class Tables:
    """CSV files of the page's figures."""

    def __init__(self, folder: str) -> None:
        self.folder, self.written = folder, []
        os.makedirs(folder, exist_ok=True)

    def write(self, name: str, header: list[str], rows: Iterable[Sequence[object]]) -> None:
        rows = list(rows)
        if not rows:
            return
        with open(os.path.join(self.folder, f"{name}.csv"), "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(rows)
        self.written.append((name, len(rows), header))


def funnel_section(
    summary: dict[str, Any] | None, rejected: list[dict[str, str]] | None, published: int, tables: Tables
) -> dict[str, Any] | None:
    if summary is None:
        return None
    steps = figures.funnel(summary, rejected or [])
    categories = sorted(summary["in"])
    tables.write(
        "funnel",
        ["rule", "applied", "rejected", "left", *categories, "reason"],
        (
            [
                step["name"],
                step["applied"],
                step["rejected"],
                step["left"],
                *(step["by_category"].get(name, 0) for name in categories),
                step["reason"],
            ]
            for step in steps
        ),
    )
    total = summary["total_in"]
    rows = [{"label": "measured", "value": total, "text": f"{total:,}"}]
    for step in steps:
        if step["rejected"]:
            text = f"{step['left']:,} left, −{step['rejected']:,}"
            rows.append(
                {
                    "label": f"after {step['name']}",
                    "value": step["left"],
                    "text": text,
                    "tooltip": f"{step['name']}: {step['reason']} {text}",
                }
            )
    rows.append({"label": "published", "value": published, "text": f"{published:,}", "kind": "second"})
    return {
        "steps": [step for step in steps if step["applied"]],
        "not_applied": [step for step in steps if not step["applied"]],
        "categories": categories,
        "in": summary["in"],
        "kept": summary["kept"],
        "total_in": total,
        "total_kept": summary["total_kept"],
        "chart": charts.bars("Tasks left after each rule that rejected any", rows),
    }


def signed(value: float) -> str:
    """With a sign, and a minus that is as wide as the plus."""
    return f"{value:+.2f}".replace("-", "−")


def shares_section(samples: list[dict[str, str]], params: dict[str, Any], tables: Tables) -> dict[str, Any]:
    found = figures.shares([row["data_source"] for row in samples], params["shares"])
    rows = [
        {
            "label": entry["category"],
            "value": entry["percent"],
            "mark": entry["asked"],
            "text": f"{entry['percent']:.2f} %"
            + (f" ({signed(entry['percent'] - entry['asked'])})" if entry["asked"] is not None else ""),
        }
        for entry in found
    ]
    tables.write(
        "shares",
        ["category", "rows", "percent", "asked_percent"],
        ([entry[name] for name in ("category", "rows", "percent", "asked")] for entry in found),
    )
    asked = [entry for entry in found if entry["asked"] is not None]
    furthest = max(asked, key=lambda entry: abs(entry["percent"] - entry["asked"]), default=None)
    return {"rows": found, "furthest": furthest, "chart": charts.bars("Shares of the categories", rows)}


def times_section(measurements: list[dict[str, Any]], tables: Tables) -> dict[str, Any] | None:
    eager, compiled = (figures.values(measurements, name) for name in ("eager_ms", "compiled_ms"))
    eager, compiled = ([value for value in values if value > 0] for values in (eager, compiled))
    if not eager:
        return None
    edges = charts.log_edges(eager + compiled)
    series = [("eager", charts.count(eager, edges))] + (
        [("compiled", charts.count(compiled, edges))] if compiled else []
    )
    tables.write(
        "times",
        ["from_ms", "to_ms", *(name for name, _ in series)],
        zip(edges, edges[1:], *(counts for _, counts in series), strict=False),
    )
    speedups = figures.ratios(measurements, "eager_ms", "compiled_ms")
    return {
        "quantiles": [
            (name, figures.quantiles(values)) for name, values in (("eager", eager), ("compiled", compiled)) if values
        ],
        "names": [name for name, _ in figures.QUANTILES],
        "two": bool(compiled),
        "chart": charts.histogram("Times of a forward", edges, series, "ms", charts.decades(edges)),
        "speedup": ratio_chart(
            "Speed-up of torch.compile", speedups, "speed-up", "speedup", tables, [(1.0, "as fast as eager")]
        ),
    }


def ratio_chart(
    title: str, numbers: list[float], unit: str, table: str, tables: Tables, lines: Sequence[tuple[float, str]] = ()
) -> dict[str, Any] | None:
    """A histogram of positive ratios with its quantiles, or None."""
    if not numbers:
        return None
    edges = charts.log_edges([*numbers, 0.99, 1.01])
    counts = charts.count(numbers, edges)
    tables.write(table, ["from", "to", "tasks"], zip(edges, edges[1:], counts, strict=False))
    return {
        "chart": charts.histogram(title, edges, [(title, counts)], unit, charts.decades(edges), lines),
        "quantiles": figures.quantiles(numbers),
        "mean": figures.geometric_mean(numbers),
        "count": len(numbers),
        "above": sum(number > 1 for number in numbers),
    }


def operators_section(samples: list[dict[str, str]], params: dict[str, Any], tables: Tables) -> dict[str, Any]:
    found, rows = figures.operators(samples), len(samples)
    caps = {name: figures.limit(params[f"max_{name}_share"], rows) for name in ("operator", "wide", "bilinear", "pair")}

    def cap_of(name: str):
        return caps["wide"] if figures.is_wide(name) else caps["operator"]

    def bar(name: str, count: int, cap: int | None, kind: str):
        text = f"{count:,} · {100 * count / rows:.2f} %"
        return {"label": name, "value": count, "text": text, "mark": cap, "kind": kind}

    pairs = [(" + ".join(names), count) for names, count in found["pairs"]]
    tables.write(
        "operators", ["operator", "rows", "cap"], ((name, count, cap_of(name)) for name, count in found["torch"])
    )
    tables.write("transformers", ["class", "rows"], found["classes"])
    tables.write("pairs", ["pair", "rows"], pairs)
    top = params["top"]
    over = [name for name, count in found["torch"] if cap_of(name) is not None and count > cap_of(name)]
    return {
        "torch": len(found["torch"]),
        "classes": len(found["classes"]),
        "pairs": len(pairs),
        "bilinear": found["bilinear"],
        "caps": caps,
        "over": over,
        "once": sum(count == 1 for _, count in found["torch"]),
        "pairs_over": [name for name, count in pairs if caps["pair"] is not None and count > caps["pair"]],
        "ranks": charts.ranks(
            "Rows by operator",
            [count for _, count in found["torch"]],
            [
                (caps[name], text)
                for name, text in (("operator", "cap of an operator"), ("wide", "cap of a linear layer or convolution"))
                if caps[name]
            ],
        ),
        "chart": charts.bars(
            "The most frequent operators",
            [
                bar(name, count, cap_of(name), "second" if figures.is_wide(name) else "first")
                for name, count in found["torch"][:top]
            ],
        ),
        "pairs_chart": charts.bars(
            "The most frequent pairs", [bar(name, count, caps["pair"], "first") for name, count in pairs[:top]]
        ),
    }


def families_section(
    samples: list[dict[str, str]], measurements: list[dict[str, Any]], params: dict[str, Any], tables: Tables
) -> dict[str, Any] | None:
    found = figures.families(samples, measurements, params["families"])
    if not found:
        return None
    tables.write(
        "families",
        ["family", "uses", "percent", "asked_percent"],
        ([entry[name] for name in ("family", "uses", "percent", "asked")] for entry in found),
    )

    def bar(entry: dict[str, Any]):
        text, asked = f"{entry['percent']:.1f} %", entry["asked"]
        if asked:
            text += f" · {entry['percent'] / asked:.2f} × weight"
        return {"label": entry["family"], "value": entry["percent"], "mark": asked, "text": text}

    off = [entry for entry in found if entry["asked"] and abs(entry["percent"] / entry["asked"] - 1) > 0.1]
    return {
        "rows": found,
        "off": off,
        "declared": bool(params["families"]),
        "chart": charts.bars("Shares of the families", [bar(entry) for entry in found]),
    }


def roofline_section(measurements: list[dict[str, Any]], tables: Tables) -> dict[str, Any] | None:
    headroom = figures.ratios(measurements, "eager_ms", "roofline_ms")
    chart = ratio_chart(
        "Eager time over the roofline", headroom, "times the roofline", "headroom", tables, [(1.0, "the roofline")]
    )
    limits = figures.constant(measurements, "roofline_limit")
    return chart and {**chart, "limits": limits}


def similarity_section(summary: dict[str, Any] | None, tables: Tables) -> dict[str, Any] | None:
    found = figures.similarity(summary)
    if found is None:
        return None
    histogram = found["histogram"]
    tables.write("similarity", ["to", "tasks"], ((entry["to"], entry["tasks"]) for entry in histogram))
    edges = [0.0, *(entry["to"] for entry in histogram)]
    ticks = [(tenth / 10, f"{tenth / 10:g}") for tenth in range(0, 11, 2)]
    lines = [] if found["threshold"] is None else [(found["threshold"], f"threshold {found['threshold']:g}")]
    chart = charts.histogram(
        "Similarity to the nearest reference",
        edges,
        [("tasks", [entry["tasks"] for entry in histogram])],
        "similarity to the nearest reference",
        ticks,
        lines,
        log=False,
    )
    return {**found, "chart": chart}


def left_out_section(
    rows: list[dict[str, Any]] | None, column: str, table: str, title: str, tables: Tables
) -> dict[str, Any] | None:
    if rows is None:
        return None
    names, entries = figures.by_reason(rows, column)
    tables.write(
        table,
        ["reason", "all", *names],
        ([reason, total, *(counts.get(name, 0) for name in names)] for reason, total, counts, _ in entries),
    )
    chart = charts.bars(
        title, [{"label": reason, "value": total, "text": f"{total:,}"} for reason, total, _, _ in entries]
    )
    return {"names": names, "entries": entries, "total": len(rows), "chart": chart}


def time_use_section(measurements: list[dict[str, Any]], tables: Tables) -> dict[str, Any] | None:
    found = figures.time_use(measurements)
    if found is None:
        return None
    tables.write("time_use", ["part", "seconds"], found["parts"])
    total = max(found["total"], 1e-9)
    rows = [
        {
            "label": name,
            "value": seconds,
            "text": f"{100 * seconds / total:.0f} % · {seconds / found['rows']:.2f} s a task",
        }
        for name, seconds in found["parts"]
    ]
    return {
        **found,
        "each": found["total"] / found["rows"],
        "chart": charts.bars("Where the time of a task goes", rows),
    }


def sections(program: stage.Program, tables: Tables) -> dict[str, Any]:
    """All that the page shows, by name; a section without figures is None."""
    params = program.params
    check_params(params)
    samples = read(program.inputs["samples"]["path"], ["ops", "data_source", "code"], "samples")
    measurements = read(program.inputs["measurements"]["path"], ["data_source"], "measurements")
    if [row["data_source"] for row in samples] != [row["data_source"] for row in measurements]:
        raise stage.StageError(
            "the inputs samples and measurements don't belong to the same rows",
            kind="input",
            hint="take both from one ops/publish stage",
        )
    summary = read_funnel(program)
    rejected = optional(program, "rejected", ["rule", "detail"])
    left_out = optional(program, "operators_left_out", ["library", "reason"])
    not_made = optional(program, "tasks_left_out", ["data_source", "reason"])
    return {
        "title": params["title"],
        "rows": len(samples),
        "devices": figures.constant(measurements, "device"),
        "torch": figures.constant(measurements, "torch"),
        "origins": figures.constant(measurements, "origin"),
        "funnel": funnel_section(summary, rejected, len(samples), tables),
        "shares": shares_section(samples, params, tables),
        "times": times_section(measurements, tables),
        "operators": operators_section(samples, params, tables),
        "families": families_section(samples, measurements, params, tables),
        "roofline": roofline_section(measurements, tables),
        "similarity": similarity_section(summary, tables),
        "left_out": left_out_section(left_out, "library", "left_out", "Why the crawl left operators out", tables),
        "not_made": left_out_section(not_made, "data_source", "not_made", "Why tasks could not be composed", tables),
        "time_use": time_use_section(measurements, tables),
        "examples": figures.examples(samples, measurements),
        "tables": tables.written,
    }


def render(content: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"short": charts.short, "ms": figures.milliseconds, "number": lambda value: f"{value:,}"}
    return environment.get_template("page.html").render(**content)


def work(program: stage.Program) -> None:
    folder = program.output_path("page")
    content = sections(program, Tables(os.path.join(folder, "tables")))
    with open(os.path.join(folder, "index.html"), "w", encoding="utf-8", newline="\n") as file:
        file.write(render(content))
    program.log(f"{content['rows']} tasks on one page, {len(content['tables'])} tables")


if __name__ == "__main__":
    stage.main(work)
