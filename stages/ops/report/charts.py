"""Charts as inline SVG, without scripts or fonts of their own. Colours are CSS variables of the page.

Every text is escaped, and each mark has its figures as a tooltip. A chart is as wide as the page allows; its numbers
are those of its own coordinates.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import markupsafe

WIDTH = 800
LINE = 22
LABELS = 262
FIGURES = 170


def _svg(height: float, title: str, marks: list[markupsafe.Markup]) -> markupsafe.Markup:
    body = markupsafe.Markup("\n").join(marks)
    return markupsafe.Markup(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" xmlns="http://www.w3.org/2000/svg">\n{}\n</svg>'
    ).format(WIDTH, round(height), title, body)


def _text(x: float, y: float, text: str, kind: str = "label", anchor: str = "start") -> markupsafe.Markup:
    return markupsafe.Markup('<text x="{}" y="{}" class="{}" text-anchor="{}">{}</text>').format(
        round(x, 1), round(y, 1), kind, anchor, text
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> markupsafe.Markup:
    return markupsafe.Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>').format(
        round(x1, 1), round(y1, 1), round(x2, 1), round(y2, 1), kind
    )


def _bar(x: float, y: float, width: float, height: float, kind: str, tooltip: str) -> markupsafe.Markup:
    return markupsafe.Markup(
        '<rect x="{}" y="{}" width="{}" height="{}" rx="2" class="{}"><title>{}</title></rect>'
    ).format(round(x, 1), round(y, 1), round(max(width, 0.0), 1), round(max(height, 0.0), 1), kind, tooltip)


def shorten(text: str, limit: int = 34) -> str:
    """Text that fits beside a bar; the tooltip has all of it."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def bars(title: str, rows: list[dict[str, Any]]) -> Any:
    """Horizontal bars. A row is {label, value, text} and may have `kind` ("first", "second"), `mark` (a value that a
    line is drawn at) and `tooltip`."""
    most = max([row["value"] for row in rows] + [row.get("mark") or 0 for row in rows] + [1e-12])
    scale = (WIDTH - LABELS - FIGURES) / most
    marks = []
    for place, row in enumerate(rows):
        top, width = place * LINE, row["value"] * scale
        tooltip = row.get("tooltip") or f"{row['label']}: {row['text']}"
        marks.append(_text(LABELS - 8, top + 15, shorten(row["label"]), anchor="end"))
        marks.append(
            _bar(LABELS, top + 4, max(width, 1.0 if row["value"] else 0.0), LINE - 8, row.get("kind", "first"), tooltip)
        )
        end = width
        if row.get("mark"):
            x = row["mark"] * scale
            marks.append(_line(LABELS + x, top + 1, LABELS + x, top + LINE - 1, "mark"))
            # The text stands beside the bar, unless the line would go through it.
            end = x if width <= x <= width + FIGURES * 0.8 else width
        marks.append(_text(LABELS + end + 8, top + 15, row["text"], "figure"))
    return _svg(len(rows) * LINE + 4, title, marks)


def log_edges(values: list[float], per_decade: int = 8) -> list[float]:
    """Edges of bins of equal ratio that hold all (positive) values."""
    low = math.floor(math.log10(min(values)) * per_decade + 1e-9)
    high = math.floor(math.log10(max(values)) * per_decade + 1e-9) + 1
    return [10 ** (place / per_decade) for place in range(low, high + 1)]


def count(values: list[float], edges: list[float]) -> list[int]:
    """How many values are in each bin; what is beyond the edges is in the first or the last one."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = sum(value >= edge for edge in edges[1:-1])
        counts[place] += 1
    return counts


HEIGHT, LEFT, BOTTOM, TOP = 240, 46, 40, 28


def round_ticks(most: int, about: int = 5) -> list[int]:
    """Whole numbers at equal, round steps from 0 up to `most`, at most `about` steps."""
    step = 1
    for power in range(12):
        for digit in (1, 2, 5):
            step = digit * 10**power
            if most / step <= about:
                return list(range(0, int(most) + 1, step))
    return [0, most]


def count_axis(most: int) -> tuple[Callable[[float], float], list[Any]]:
    """An axis of counts up to `most`: where a count lies, and the marks of its grid."""
    floor = HEIGHT - BOTTOM

    def y(value: float) -> float:
        return floor - value / most * (floor - TOP)

    marks = []
    for value in round_ticks(most):
        marks.append(_line(LEFT, y(value), WIDTH - 12, y(value), "grid" if value else "axis"))
        marks.append(_text(LEFT - 6, y(value) + 4, f"{value:,}", "tick", "end"))
    return y, marks


def histogram(
    title: str,
    edges: list[float],
    series: list[tuple[str, list[int]]],
    unit: str,
    ticks: list[tuple[float, str]],
    lines: Sequence[tuple[float, str]] = (),
    log: bool = True,
) -> Any:
    """Counts by bin. `series` is [(name, counts)] of one or two: bars side by side in each bin. `ticks` are values on
    the axis as [(value, text)], `lines` the same for limits that are drawn."""
    position = math.log if log else float
    first, last = position(edges[0]), position(edges[-1])
    span = (last - first) or 1.0

    def x(value: float):
        return LEFT + (position(value) - first) / span * (WIDTH - LEFT - 12)

    floor = HEIGHT - BOTTOM
    y, marks = count_axis(max([max(counts, default=0) for _, counts in series] + [1]))
    for value, text in ticks:
        if edges[0] * 0.999 <= value <= edges[-1] * 1.001:
            marks.append(_line(x(value), floor, x(value), floor + 4, "axis"))
            marks.append(_text(x(value), floor + 17, text, "tick", "middle"))
    kinds = ["first", "second"]
    for place in range(len(edges) - 1):
        left, right = x(edges[place]), x(edges[place + 1])
        each = (right - left - 2) / len(series)
        for number, (name, counts) in enumerate(series):
            if counts[place]:
                span_text = f"{short(edges[place])} to {short(edges[place + 1])} {unit}".strip()
                tooltip = f"{name}, {span_text}: {counts[place]:,}"
                marks.append(
                    _bar(
                        left + 1 + number * each,
                        y(counts[place]),
                        each - (len(series) - 1),
                        floor - y(counts[place]),
                        kinds[number],
                        tooltip,
                    )
                )
    for value, text in lines:
        if edges[0] * 0.999 <= value <= edges[-1] * 1.001:
            marks.append(_line(x(value), TOP - 22, x(value), floor, "mark"))
            at_end = x(value) > WIDTH - 140
            marks.append(
                _text(x(value) + (-5 if at_end else 5), TOP - 12, text, "figure", "end" if at_end else "start")
            )
    marks.append(_text((LEFT + WIDTH) / 2, HEIGHT - 6, unit, "tick", "middle"))
    return _svg(HEIGHT, title, marks)


def ranks(title: str, counts: list[int], limits: Sequence[tuple[Any, str]]) -> markupsafe.Markup:
    """Values of sorted counts over their rank, with limits as lines: [(value, text)]."""
    floor, height = HEIGHT - BOTTOM, HEIGHT

    def x(rank: int):
        return LEFT + rank / max(len(counts), 1) * (WIDTH - LEFT - 12)

    y, marks = count_axis(max([counts[0] if counts else 1] + [value for value, _ in limits] + [1]))
    outline: list[tuple[float, float]] = [(LEFT, floor)]
    for rank, value in enumerate(counts):
        outline += [(x(rank), y(value)), (x(rank + 1), y(value))]
    outline.append((x(len(counts)), floor))
    points = " ".join(f"{round(a, 1)},{round(b, 1)}" for a, b in outline)
    marks.append(markupsafe.Markup('<polygon points="{}" class="first"/>').format(points))
    for value in sorted({value for value, _ in limits}):
        marks.append(_line(LEFT, y(value), WIDTH - 12, y(value), "mark"))
        text = ", ".join(text for other, text in limits if other == value)
        marks.append(_text(WIDTH - 14, y(value) - 4, text, "figure", "end"))
    marks.append(_text(LEFT, floor + 17, "1", "tick", "middle"))
    marks.append(_text(x(len(counts)), floor + 17, f"{len(counts):,}", "tick", "end"))
    marks.append(_text((LEFT + WIDTH) / 2, height - 4, "operators, the most frequent first", "tick", "middle"))
    return _svg(height, title, marks)


def decades(edges: list[float]) -> list[tuple[float, str]]:
    """Ticks at 1, 2 and 5 times the powers of ten within the edges, or the powers alone where they are many."""
    low, high = math.floor(math.log10(edges[0])), math.ceil(math.log10(edges[-1]))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    return [(step * 10.0**power, short(step * 10.0**power)) for power in range(low, high + 1) for step in steps]


def short(value: float) -> str:
    """Three significant digits, without needless zeros."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"
