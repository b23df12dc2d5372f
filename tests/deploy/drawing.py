"""Draw a dashboard as one HTML page from its JSON and the responses of a Prometheus.

This replaces Grafana for pictures, because Grafana's server is in no package registry. This module supports the
five kinds of panels of these dashboards, and their units, mappings, thresholds, overrides, transformations and
repeats.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.deploy.promql import filled

ROW = 30
GAP = 8
COLUMNS = 24
# Grafana's breakpoint `md`: on a narrower screen all panels are below each other, as wide as the screen.
GRID_FROM_PIXELS = 769
DEFAULT_COLUMN_PIXELS = 150
COLOURS = {
    "green": "#73bf69",
    "light-green": "#96d98d",
    "red": "#f2495c",
    "orange": "#ff9830",
    "yellow": "#fade2a",
    "light-yellow": "#ffee52",
    "blue": "#5794f2",
    "light-blue": "#8ab8ff",
}
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#fade2a", "#56a64b", "#3274d9")
STYLE = """
body { margin: 0; background: #111217; color: #ccccdc; font: 12px "DejaVu Sans", sans-serif }
h1 { font-size: 18px; font-weight: normal; margin: 12px 8px 4px } h1 small { color: #8e8e99; font-size: 12px; margin-left: 16px }
.panel { position: absolute; background: #181b1f; border: 1px solid #2b2d33; border-radius: 2px; overflow: hidden; box-sizing: border-box }
.title { padding: 6px 8px; font-weight: bold; white-space: nowrap } .row { font-weight: bold; font-size: 14px; position: absolute; padding: 6px 8px }
.stat { display: flex; align-items: center; justify-content: center; font-size: 26px; height: calc(100% - 30px); margin: 0 4px; border-radius: 2px; white-space: nowrap }
.scroll { overflow: auto; height: calc(100% - 28px) }
table { border-collapse: collapse; table-layout: fixed } th { text-align: left; overflow: hidden; box-sizing: border-box; color: #8ab8ff; font-weight: normal; padding: 3px 8px }
td { padding: 3px 8px; border-top: 1px solid #24262b; overflow-wrap: anywhere; font-size: 11px; vertical-align: top } .empty { color: #8e8e99; text-align: center; padding-top: 24px }
.legend { padding: 0 8px; font-size: 10px } .legend i { display: inline-block; width: 12px; height: 3px; margin: 0 5px 3px 8px }
text { fill: #9a9aa8; font-size: 10px } text.in { fill: #111217; font-weight: bold }
"""


class Source(NamedTuple):
    """A source of data: an instant query of an expression, and a range query of (expression, seconds, step)."""

    query: Callable[[str], list[dict[str, Any]]]
    query_range: Callable[[str, float, float], list[dict[str, Any]]]


class View(NamedTuple):
    """Values of a dashboard's variables, the last `seconds`, the time at the right edge, and the width in pixels."""

    source: Source
    variables: dict[str, str]
    seconds: float
    now: float
    pixels: int

    def filled(self, expr: str) -> str:
        """Return the query `expr` with the values of its variables."""
        return filled(expr, self.variables)


def draw(
    board: dict[str, Any], source: Source, variables: Mapping[str, str], seconds: float, pixels: int
) -> tuple[str, int]:
    """Return the dashboard as an HTML page for a screen `pixels` wide, and the page's height in pixels."""
    view = View(source, dict(variables), seconds, time.time(), pixels)
    panels = list(_placed(board["panels"], view))
    if pixels < GRID_FROM_PIXELS:
        panels = _below_each_other(panels)
    bottom = max(place["y"] + place["h"] for _, place, _ in panels)
    body = "".join(_panel(panel, place, one, board) for panel, place, one in panels)
    shown = ", ".join(f"{name} = {value}" for name, value in variables.items() if value != ".*")
    title = f"<h1>{html.escape(board['title'])}<small>{html.escape(shown)}</small></h1>"
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{title}{body}", 50 + bottom * (ROW + GAP)


def _placed(panels: list[dict[str, Any]], view: View) -> Iterator[tuple[dict[str, Any], dict[str, int], View]]:
    """Yield each panel, and each repetition of one over a variable, with its position and view."""
    pushed = 0
    for panel in panels:
        place = {**panel["gridPos"], "y": panel["gridPos"]["y"] + pushed}
        if not panel.get("repeat"):
            yield panel, place, view
            continue
        name = panel["repeat"]
        expr = view.filled(panel["targets"][0]["expr"])
        values = sorted({series["metric"][name] for series in view.source.query(expr)}, key=lambda v: (len(v), v))
        per_row = 24 // place["w"]
        for index, value in enumerate(values):
            line, column = divmod(index, per_row)
            at = {**place, "x": column * place["w"], "y": place["y"] + line * place["h"]}
            yield (
                {**panel, "title": panel["title"].replace(f"${name}", value)},
                at,
                view._replace(variables={**view.variables, name: value}),
            )
        pushed += (max(0, len(values) - 1) // per_row) * place["h"]


def _below_each_other(
    panels: list[tuple[dict[str, Any], dict[str, int], View]],
) -> list[tuple[dict[str, Any], dict[str, int], View]]:
    """Return the panels in one column. Each keeps its height."""
    column = []
    top = 0
    for panel, place, view in sorted(panels, key=lambda placed: (placed[1]["y"], placed[1]["x"])):
        column.append((panel, {**place, "x": 0, "y": top, "w": COLUMNS}, view))
        top += place["h"]
    return column


def _panel(panel: dict[str, Any], place: dict[str, int], view: View, board: dict[str, Any]) -> str:
    unit = view.pixels / COLUMNS
    left, top = place["x"] * unit + GAP / 2, 46 + place["y"] * (ROW + GAP)
    width, height = place["w"] * unit - GAP, place["h"] * (ROW + GAP) - GAP
    box = f"left:{left:.0f}px;top:{top}px;width:{width:.0f}px;height:{height}px"
    title = html.escape(panel["title"])
    if panel["type"] == "row":
        return f'<div class=row style="{box}">{title}</div>'
    if panel["type"] in ("timeseries", "state-timeline"):
        expr = next((one["expr"] for one in board["annotations"]["list"] if "expr" in one), None)
        marks = [float(s["values"][-1][1]) / 1000 for s in _range(expr, view)] if expr else []
        inner = _DRAW[panel["type"]](panel, view, int(width), height - 30, marks)
    else:
        inner = _DRAW[panel["type"]](panel, view, int(width) - 2)
    return f'<div class=panel style="{box}"><div class=title>{title}</div>{inner}</div>'


def _range(expr: str, view: View) -> list[dict[str, Any]]:
    return view.source.query_range(view.filled(expr), view.seconds, max(1.0, view.seconds / 300))


def _colour(name: str) -> str:
    return COLOURS.get(name, name)


def _mapped(config: dict[str, Any], value: str) -> tuple[str, str] | None:
    """Return the text and the color that the field's mappings give a value. Return None if no mapping matches."""
    for mapping in config.get("mappings") or ():
        found = mapping["options"].get(value)
        if found:
            return found["text"], _colour(found["color"])
    return None


def _formatted(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"
    scales = {
        "watt": (1e3, ("W", "kW", "MW")),
        "bytes": (1024, ("B", "KiB", "MiB", "GiB")),
        "hertz": (1e3, ("Hz", "kHz", "MHz", "GHz")),
    }
    if unit in scales:
        step, words = scales[unit]
        power = 0
        while abs(value) >= step and power + 1 < len(words):
            value, power = value / step, power + 1
        return f"{value:.3g} {words[power]}"
    return f"{value:.3g} °C" if unit == "celsius" else f"{value:.4g}"


def _stat(panel: dict[str, Any], view: View, _width: int) -> str:
    config, target = panel["fieldConfig"]["defaults"], panel["targets"][0]
    found = view.source.query(view.filled(target["expr"]))
    if not found:
        return f'<div class=stat style="color:#8e8e99">{config.get("noValue", "")}</div>'
    raw = found[0]["value"][1]
    steps = config["thresholds"]["steps"]
    colour = _colour([s["color"] for s in steps if s["value"] is None or float(raw) >= s["value"]][-1])
    mapped = _mapped(config, f"{float(raw):g}")
    text = mapped[0] if mapped else _formatted(float(raw), config["unit"])
    if panel["options"]["textMode"] == "name":
        text = _legend(target["legendFormat"], found[0]["metric"])
    solid = panel["options"]["colorMode"] == "background_solid"
    style = f"background:{colour};color:#111217" if solid else f"color:{colour}"
    return f'<div class=stat style="{style}">{html.escape(text)}</div>'


def _legend(template: str, metric: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: metric.get(found.group(1), ""), template)


def _lines(panel: dict[str, Any], view: View, width: int, height: int, marks: list[float]) -> str:
    config = panel["fieldConfig"]["defaults"]
    series = [
        (_legend(target["legendFormat"], one["metric"]), [(at, float(v)) for at, v in one["values"] if v != "NaN"])
        for target in panel["targets"]
        for one in _range(target["expr"], view)
    ]
    if not series:
        return f"<div class=empty>{config['noValue']}</div>"
    series.sort(key=lambda one: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", one[0])])
    fixed = {
        override["matcher"]["options"]: next(
            p["value"]["fixedColor"] for p in override["properties"] if p["id"] == "color"
        )
        for override in panel["fieldConfig"]["overrides"]
    }
    if config["custom"]["stacking"]["mode"] == "normal":
        series = _stacked(series)
    values = [value for _, points in series for _, value in points] or [0.0]
    top = config.get("max") or max(values) * 1.1 or 1.0
    bottom = config.get("min", min(values))
    legend_height = 16 * (1 + sum(len(name) + 5 for name, _ in series) * 7 // max(1, width - 20))
    plot = height - legend_height - 32
    left = 58

    def x(at: float) -> float:
        return left + (at - (view.now - view.seconds)) / view.seconds * (width - left - 12)

    def y(value: float) -> float:
        return 10 + plot - (value - bottom) / ((top - bottom) or 1) * plot

    parts = []
    for step in range(5):
        value = bottom + (top - bottom) * step / 4
        parts.append(f'<line x1={left} x2={width - 12} y1={y(value):.1f} y2={y(value):.1f} stroke="#24262b"/>')
        parts.append(
            f"<text x={left - 6} y={y(value) + 3:.1f} text-anchor=end>{_formatted(value, config['unit'])}</text>"
        )
    parts += _times(view, x, plot + 25)
    key = []
    for index, (name, points) in enumerate(series):
        colour = _colour(fixed.get(name, PALETTE[index % len(PALETTE)]))
        dash = ' stroke-dasharray="6 4"' if name in fixed else ""
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        parts.append(f'<polyline points="{path}" fill=none stroke="{colour}" stroke-width="1.3"{dash}/>')
        key.append(f'<i style="background:{colour}"></i>{html.escape(name)}')
    parts += [
        f'<line x1={x(m):.1f} x2={x(m):.1f} y1=4 y2={4 + plot} stroke="#f2495c" stroke-dasharray="3 3"/>' for m in marks
    ]
    svg = f"<svg width={width - 2} height={height - legend_height}>{''.join(parts)}</svg>"
    return f"{svg}<div class=legend>{' '.join(key)}</div>"


def _stacked(series: list[tuple[str, list[tuple[float, float]]]]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the lines, each added to the sum of the lines before it."""
    below: dict[float, float] = {}
    done = []
    for name, points in series:
        for at, value in points:
            below[at] = below.get(at, 0.0) + value
        done.append((name, [(at, below[at]) for at, _ in points]))
    return done


def _times(view: View, x: Callable[[float], float], at_y: int) -> list[str]:
    return [
        f"<text x={x(at):.0f} y={at_y} text-anchor=middle>{time.strftime('%H:%M:%S', time.localtime(at))}</text>"
        for at in (view.now - view.seconds * share for share in (0.9, 0.6, 0.3, 0.05))
    ]


def _timeline(panel: dict[str, Any], view: View, width: int, height: int, marks: list[float]) -> str:
    config, target = panel["fieldConfig"]["defaults"], panel["targets"][0]
    series = sorted(
        (_legend(target["legendFormat"], one["metric"]), one["values"]) for one in _range(target["expr"], view)
    )
    left, plot = 130, height - 44
    band = plot / max(1, len(series))

    def x(at: float) -> float:
        return left + max(0.0, at - (view.now - view.seconds)) / view.seconds * (width - left - 12)

    parts, used = [], {}
    for index, (name, points) in enumerate(series):
        y = 4 + index * band
        parts.append(f"<text x={left - 8} y={y + band / 2 + 3:.1f} text-anchor=end>{html.escape(name[:18])}</text>")
        for began, ended, value in _stretches(points, view.now):
            text, colour = _mapped(config, f"{float(value):g}") or (value, "#6e7078")
            used[text] = colour
            size = x(ended) - x(began)
            parts.append(f'<rect x={x(began):.1f} y={y:.1f} width={size:.1f} height={band * 0.8:.1f} fill="{colour}"/>')
            if size > 7 * len(text) and band > 14:
                parts.append(f"<text class=in x={x(began) + 5:.1f} y={y + band * 0.4 + 4:.1f}>{text}</text>")
    parts += _times(view, x, plot + 18)
    parts += [
        f'<line x1={x(m):.1f} x2={x(m):.1f} y1=4 y2={4 + plot} stroke="#f2495c" stroke-dasharray="3 3"/>' for m in marks
    ]
    key = " ".join(f'<i style="background:{colour}"></i>{text}' for text, colour in used.items())
    return f"<svg width={width - 2} height={height - 20}>{''.join(parts)}</svg><div class=legend>{key}</div>"


def _stretches(points: list[list[Any]], now: float) -> Iterator[tuple[float, float, str]]:
    """Yield the periods of equal value as (begin, end, value)."""
    began, value = points[0]
    for at, new in points[1:]:
        if new != value:
            yield began, at, value
            began, value = at, new
    yield began, min(now, points[-1][0] + 2), value


def _table(panel: dict[str, Any], view: View, width: int) -> str:
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    names, columns = steps["organize"]["renameByName"], steps["filterFieldsByName"]["include"]["names"]
    overrides = {
        one["matcher"]["options"]: {prop["id"]: prop["value"] for prop in one["properties"]}
        for one in panel["fieldConfig"]["overrides"]
    }
    rows = _merged(panel["targets"], view, columns)
    if not rows:
        return f"<div class=empty>{panel['fieldConfig']['defaults'].get('noValue', '')}</div>"
    pixels = column_pixels(panel, width)
    head = "".join(
        f'<th style="width:{pixels[names[column]]:.0f}px">{html.escape(names[column])}</th>' for column in columns
    )
    body = "".join(
        "<tr>"
        + "".join(_cell(row.get(c, ""), overrides.get(names[c], {}), c.startswith("Value")) for c in columns)
        + "</tr>"
        for row in rows
    )
    return f'<div class=scroll><table style="width:{sum(pixels.values()):.0f}px"><tr>{head}</tr>{body}</table></div>'


def column_pixels(panel: dict[str, Any], width: int) -> dict[str, float]:
    """Return the width of each column, by heading, as Grafana computes it.

    Columns without a width share the rest equally. None is narrower than the panel's minimum, so that a table may be
    wider than its panel, in which it scrolls.
    """
    headings = next(step["options"] for step in panel["transformations"] if step["id"] == "organize")["renameByName"]
    fixed = {
        override["matcher"]["options"]: prop["value"]
        for override in panel["fieldConfig"]["overrides"]
        for prop in override["properties"]
        if prop["id"] == "custom.width"
    }
    narrowest = panel["fieldConfig"]["defaults"]["custom"].get("minWidth", DEFAULT_COLUMN_PIXELS)
    shared = (width - sum(fixed.values())) / max(1, len(headings) - len(fixed))
    return {heading: fixed.get(heading, max(narrowest, shared)) for heading in headings.values()}


def _merged(targets: list[dict[str, Any]], view: View, columns: list[str]) -> list[dict[str, str]]:
    """Return the rows of all targets. Rows with the same labels become one row."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    labels = [column for column in columns if not column.startswith("Value")]
    shared = labels[:1] if len(targets) > 1 else labels
    for target in targets:
        for series in view.source.query(view.filled(target["expr"])):
            value = series["value"][1]
            key = tuple(series["metric"].get(label, "") for label in shared) or (str(len(rows)),)
            row = rows.setdefault(key, {})
            row.update({label: text for label, text in series["metric"].items() if label in labels})
            row["Value" if len(targets) == 1 else f"Value #{target['refId']}"] = value
    return [
        rows[key]
        for key in sorted(rows, key=lambda key: [(len(part), part) if part.isdigit() else (99, part) for part in key])
    ]


def _cell(text: str, override: dict[str, Any], is_value: bool) -> str:
    mapped = _mapped(override, f"{float(text):g}" if is_value and text else text)
    colour = f"color:{mapped[1]}" if mapped else "color:#8ab8ff" if "links" in override else ""
    if mapped:
        text = mapped[0]
    elif is_value and text:
        text = _formatted(float(text), override.get("unit", "none"))
    return f'<td style="{colour}">{html.escape(text)}</td>'


_DRAW: dict[str, Callable[..., str]] = {
    "stat": _stat,
    "table": _table,
    "timeseries": _lines,
    "state-timeline": _timeline,
}
