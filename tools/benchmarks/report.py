"""Report of the figures as HTML: report.html and a plot per benchmark."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache_async.errors import MissingDependencyError

_STYLE = """
body { font: 14px/1.5 sans-serif; margin: 2em auto; max-width: 72em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100% }
"""


def check_matplotlib() -> None:
    """Check that plots can be drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "--report needs the package matplotlib, which is not installed: pip install matplotlib"
        )


def write_report(directory: Path, whole: Mapping[str, Any], *, newest: str) -> None:
    """Write `report.html` and the plot of the newest result. The plots of the others exist already.

    Args:
        directory: Created if it does not exist.
        whole: The content of the JSON file.
        newest: Name of the benchmark.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if rows := whole["benchmarks"][newest]["rows"]:
        _plot(directory / f"{newest}.png", newest, rows)
    (directory / "report.html").write_text(_page(whole), encoding="utf-8")


def _page(whole: Mapping[str, Any]) -> str:
    facts = "".join(_line((name, str(value))) for name, value in whole["machine"].items())
    kind = "Quick run: the figures mean nothing. " if whole["quick"] else ""
    parts = [_section(name, result) for name, result in whole["benchmarks"].items()]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>lmcache-async benchmarks</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>lmcache-async benchmarks</h1>\n"
        f"<p>{kind}Medians of {whole['rounds']} rounds. Each figure was measured in turn with its limit; the ratio, "
        "figure to limit, is the median of the rounds' own ratios.</p>\n"
        f"<table>{facts}</table>\n{''.join(parts)}</body></html>\n"
    )


def _section(name: str, result: Mapping[str, Any]) -> str:
    title = html.escape(name)
    head = "".join(
        f"<th>{cell}</th>"
        for cell in ("", "value", "unit", "better", "limit", "its value", "ratio", "range", "with")
    )
    body = "".join(_row(row) for row in result["rows"])
    figures = (
        f'<img src="{title}.png" alt="ratios of {title} to its limits">\n'
        f"<table><tr>{head}</tr>{body}</table>\n"
    )
    left_out = "".join(f"<li>left out: {html.escape(text)}</li>" for text in result["left_out"])
    return (
        f"<h2>{title}</h2>\n<p>{html.escape(result['summary'])}; {result['seconds']:.1f} s.</p>\n"
        f"{figures if body else ''}{f'<ul>{left_out}</ul>' if left_out else ''}\n"
    )


def _row(row: Mapping[str, Any]) -> str:
    spread = f"{min(row['ratios']):.3g} to {max(row['ratios']):.3g}" if row["ratios"] else ""
    also = {**row["parameters"], **{name: f"{value:.4g}" for name, value in row["more"].items()}}
    cells = (
        row["name"],
        row["value"],
        row["unit"],
        row["better"],
        row["limit_name"],
        row["limit_value"],
        row["ratio"],
        spread,
        ", ".join(f"{name} {value}" for name, value in also.items()),
    )
    return _line(cells)


def _line(cells: Sequence[str | float]) -> str:
    made = "".join(
        f"<td>{html.escape(cell)}</td>" if isinstance(cell, str) else f'<td class="number">{cell:.4g}</td>'
        for cell in cells
    )
    return f"<tr>{made}</tr>\n"


def _plot(path: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a bar for each ratio, a thin line from its smallest to its largest round, and the limit at 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 0.28 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and without pyplot's global state
    axes = figure.subplots()
    places = range(len(rows))
    ratios = [row["ratio"] for row in rows]
    below = [row["ratio"] - min(row["ratios"], default=row["ratio"]) for row in rows]
    above = [max(row["ratios"], default=row["ratio"]) - row["ratio"] for row in rows]
    colours = ["#4878a8" if row["better"] == "more" else "#b07040" for row in rows]
    axes.barh(places, ratios, xerr=(below, above), color=colours, height=0.6)
    axes.set_yticks(places, [f"{row['name']} : {row['limit_name']}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#222222", linewidth=0.8)
    if max(ratios) > 20 * min(ratios):
        axes.set_xscale("log")
    axes.set_title(f"{name}: ratio to the limit (blue: more is better; brown: less)", fontsize=9)
    figure.savefig(path, dpi=110)
