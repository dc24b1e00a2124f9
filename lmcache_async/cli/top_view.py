"""View of `lmcache-async top`: header, tiers or tenants, charts and recent requests.

The view fits the width of the terminal. A table that is too wide is split into several tables with the same first
column. Names are shortened; figures are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmcache_async.cli.output import plain

Status: TypeAlias = Mapping[str, Any]

COLOURS = ("dodger_blue2", "dark_orange", "cyan3", "medium_orchid", "gold3", "sky_blue2", "pink3", "green3")
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_REQUESTS = 12
SPARK_WIDTH = 60
LEAST_WIDTH = 40
"""Minimum width of the view. In a narrower terminal it is cut."""
_ID_WIDTH = 28
_SHORT_ID_WIDTH = 16
_LEAST_ID_WIDTH = 12
_LEAST_SPARK_WIDTH = 20
_LEFT = frozenset({"tier", "tenant", "age", "request", "comes from", "decision", "breaker", "holds"})
"""Columns of text. Numbers are right-aligned."""

_DECIDED = {
    "load": ("load", "green"),
    "partial": ("part", "yellow"),
    "recompute": ("recompute", "yellow"),
    "local": ("vLLM's own", "dim"),
    "miss": ("miss", "dim"),
    "late": ("late", "red"),
    "off": ("off", "dim"),
}


def render(status: Status, *, width: int, notice: Text | None = None) -> RenderableType:
    """Return the view of a status.

    Args:
        status: The status.
        width: Columns of the terminal.
        notice: Warning to show below the header.
    """
    width = max(width, LEAST_WIDTH)
    parts: list[RenderableType] = [_header(status, width)]
    if notice is not None:
        parts.append(notice)
    if status["kind"] == "daemon":
        parts += [*_tenants(status["tenants"], width), _charts(status["charts"], status["tenants"], width)]
    else:
        parts += [
            *_tiers(status["tiers"], width),
            _charts(status["charts"], status["tiers"], width),
            _requests(status["recent"], status["time"], width),
        ]
    return Group(*parts)


def speed(nbytes: float, seconds: float) -> str:
    if not (nbytes and seconds):
        return "-"
    value = nbytes / seconds
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if value >= size:
            return f"{value / size:.{0 if value >= 100 * size else 2 if value < 10 * size else 1}f} {unit}"
    return f"{value / 1e3:.0f} kB/s"


def spark(values: Sequence[float | None], most: float, width: int = SPARK_WIDTH) -> str:
    """Return the last values as one block character each; a space where there is no value."""
    last = values[-width:]
    top = len(BLOCKS) - 1
    bars = [" " if v is None else BLOCKS[min(top, round(v / most * top)) if most > 0 else 0] for v in last]
    return "".join(bars)


def shortened(text: str, width: int) -> str:
    """Shorten a name to a width by leaving out its middle, because names often differ at the end only."""
    if cell_len(text) <= width:
        return text
    if len(text) > 4 * width:
        text = text[: 2 * width] + text[-2 * width :]
    for kept in range(len(text) - 1, -1, -1):
        head = kept // 3
        short = f"{text[:head]}…{text[len(text) - kept + head :]}"
        if cell_len(short) <= width:
            return short
    return "…"


def _header(status: Status, width: int) -> Panel:
    line = Text(overflow="fold")
    for name, value in (*status["facts"], ("up", f"{status['uptime_s']:.0f} s")):
        line.append(f"{plain(name)} ", style="dim").append(f"{plain(value)}   ")
    words = _pool(status) if status["kind"] == "daemon" else _engine(status)
    title = Text(f" {plain(status['title'] or status['kind'])} ", style="bold")
    figures = _figures([(name, plain(value)) for name, value in words], width - 4)
    return Panel(Group(line, Text(), figures), title=title, title_align="left", box=box.ROUNDED, width=width)


def _figures(words: Sequence[tuple[str, str]], width: int) -> Table:
    """Return names above their values, as many per row as fit."""
    gap = 3
    for across in range(len(words), 0, -1):
        rows = [words[start : start + across] for start in range(0, len(words), across)]
        widths = [
            max(cell_len(text) for row in rows if column < len(row) for text in row[column])
            for column in range(across)
        ]
        if sum(widths) + gap * (across - 1) <= width:
            break
    grid = Table.grid(padding=(0, gap, 0, 0), pad_edge=False)
    for row in rows:
        grid.add_row(*(Text(name, style="dim") for name, _ in row))
        grid.add_row(*(Text(value, style="bold") for _, value in row))
    return grid


def _engine(status: Status) -> list[tuple[str, str]]:
    totals, memory, work = status["totals"], status["memory"], status["work"]
    prompts = totals["prompt_tokens"]
    share = f"{min(1.0, totals['hit_tokens'] / prompts):.1%}" if prompts else "-"
    return [
        ("from the cache", f"{share} of {prompts:,} tokens"),
        ("loads", speed(totals["loaded_bytes"], totals["load_seconds"])),
        ("stores", speed(totals["stored_bytes"], totals["store_copy_seconds"])),
        ("running", f"{work['running']}, {work['late_calls']} late"),
        ("pinned", f"{work['pinned_chunks']} chunks"),
        ("host memory", f"{_size(memory['leased_bytes'])} of {_size(memory['bytes'])}"),
    ]


def _pool(status: Status) -> list[tuple[str, str]]:
    pool = status["pool"]
    return [
        ("pool", f"{_size(pool['bytes'])} of {_size(pool['max_bytes'])}"),
        ("clients", str(pool["clients"])),
    ]


def _tiers(tiers: Iterable[Status], width: int) -> list[Table]:
    columns = ("holds", "chunks", "hits", "stored", "read", "write", "queue", "errors", "dropped", "evicted")
    rows: list[list[Text]] = []
    for index, tier in enumerate(tiers):
        queue = tier["queue"]
        rows.append(
            [
                _name(tier["id"], index),
                Text(_room(tier)),
                Text(f"{tier['chunks']:,}"),
                Text(f"{tier['hit_chunks']:,}"),
                Text(f"{tier['stored_chunks']:,}"),
                Text("in place" if tier["in_place"] else _calls(tier["calls"], "get", "get_many")),
                Text("-" if tier["in_place"] else _calls(tier["calls"], "put", "put_many")),
                Text(_size(queue["bytes"]) if queue else "-"),
                _failures(tier["errors"], tier["corrupt"]),
                _failures(tier["dropped"]),
                Text(f"{tier['evictions']:,}"),
                _breaker(tier["breaker"]),
            ]
        )
    return _tables(("tier", *columns, "breaker"), rows, width)


def _tenants(tenants: Iterable[Status], width: int) -> list[Table]:
    names = ("chunks", "readers", "writers", "evictions")
    rows = [
        [_name(tenant["id"], index), Text(_room(tenant)), *(Text(f"{tenant[name]:,}") for name in names)]
        for index, tenant in enumerate(tenants)
    ]
    return _tables(("tenant", "holds", "records", "readers", "writers", "evicted"), rows, width)


def _name(text: str, index: int) -> Text:
    return Text(shortened(plain(text), _ID_WIDTH), style=f"bold {_colour(index)}")


def _charts(charts: Status, owners: Iterable[Status], width: int) -> Padding:
    """Return the charts as lines of block characters.

    Args:
        charts: The charts.
        owners: Tiers or tenants, which have the same colours as in their table.
        width: Available columns.
    """
    places = {owner["id"]: index for index, owner in enumerate(owners)}
    rows: list[tuple[str, str, str, Sequence[float | None], float, str]] = []
    for chart in charts["list"]:
        values = [value or 0.0 for series in chart["series"] for value in series["values"]]
        most = 1.0 if chart["unit"] == "share" else max(values, default=0.0)
        for index, series in enumerate(chart["series"]):
            last = series["values"][-1] if series["values"] else None
            title = plain(chart["title"]) if index == 0 else ""
            name = shortened(plain(series["name"]), _ID_WIDTH)
            style = _colour(places.get(series["name"], index + 5))
            rows.append((title, name, _value(last, chart["unit"]), series["values"], most, style))
    gap = 2
    titles = max((cell_len(title) for title, *_ in rows), default=0)
    names = max((cell_len(name) for _, name, *_ in rows), default=0)
    lasts = max((cell_len(value) for _, _, value, *_ in rows), default=0)
    left = width - 1 - names - gap - lasts - gap
    beside = left - titles - gap >= _LEAST_SPARK_WIDTH
    bars = max(1, min(SPARK_WIDTH, left - gap - (titles if beside else 0)))
    lines: list[Text] = []
    for title, name, value, series_values, most, style in rows:
        if title and not beside:
            lines.append(Text(title, style="dim"))
        start = title + " " * (titles - cell_len(title) + gap) if beside else " " * gap
        line = (
            Text(no_wrap=True).append(start, style="dim").append(name + " " * (names - cell_len(name) + gap))
        )
        line.append(" " * (lasts - cell_len(value)) + value + " " * gap, style="bold")
        lines.append(line.append(spark(series_values, most, bars), style=style))
    return Padding(Group(*lines), (0, 0, 0, 1))


def _requests(recent: Sequence[Status], now: float, width: int) -> Table:
    names = ["age", "request", "prompt", "comes from", "decision", "load", "speed", "stored"]
    rows: list[list[Text]] = []
    for request in recent[:MAX_REQUESTS]:
        plan, loaded, stored = request["plan"], request["loaded"], request["stored"]
        asked = plan["prompt_tokens"] if plan else loaded["asked_tokens"] if loaded else 0
        rows.append(
            [
                Text(f"{max(0.0, now - request['time']):.0f} s"),
                Text(shortened(plain(request["request"]), _ID_WIDTH) or "-"),
                Text(f"{asked:,}" if asked else "-"),
                _origin(plan, loaded, asked),
                _decision(plan, loaded),
                Text(f"{loaded['seconds'] * 1e3:.1f} ms" if loaded else "-"),
                Text(speed(loaded["bytes"], loaded["seconds"]) if loaded else "-"),
                Text(f"{stored['tokens']:,}" if stored else "-"),
            ]
        )
    for least in ("", "speed", "stored"):
        if least in names and _total(_widths(names, rows)) > width:
            place = names.index(least)
            del names[place]
            rows = [[*row[:place], *row[place + 1 :]] for row in rows]
    excess = _total(_widths(names, rows)) - width
    if excess > 0:
        place = names.index("request")
        left = max(_LEAST_ID_WIDTH, _widths(names, rows)[place] - excess)
        rows = [[*row[:place], _cut(row[place], left), *row[place + 1 :]] for row in rows]
    return _table(names, rows, wrapped="comes from")


def _origin(plan: Status | None, loaded: Status | None, asked: int) -> Text:
    parts = [(plain(tier), tokens) for tier, tokens in (loaded["by_tier"] if loaded else ())]
    if plan and plan["local_tokens"]:
        parts.insert(0, ("vLLM", plan["local_tokens"]))
    if plan and plan["load_tokens"] and not loaded:
        parts.append(("loading", plan["load_tokens"]))
    rest = asked - sum(tokens for _, tokens in parts)
    if rest > 0:
        parts.append(("computed" if plan else "not stored", rest))
    return Text(", ".join(f"{name} {tokens:,}" for name, tokens in parts) or "-")


def _decision(plan: Status | None, loaded: Status | None) -> Text:
    if plan:
        text, style = _DECIDED.get(plan["decided"], (plain(plan["decided"]), ""))
        return Text(text, style=style)
    if loaded:
        return Text("loaded", style="green") if loaded["tokens"] else Text("miss", style="dim")
    return Text("store only", style="dim")


def _tables(names: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> list[Table]:
    """Return one table, or several with the same first column if it is too wide."""
    widths = _widths(names, rows)
    if _total(widths) > width:
        rows = [[_cut(row[0], _SHORT_ID_WIDTH), *row[1:]] for row in rows]
        widths = _widths(names, rows)
    parts: list[list[int]] = [[0]]
    for column in range(1, len(names)):
        if len(parts[-1]) > 1 and _total([widths[one] for one in (*parts[-1], column)]) > width:
            parts.append([0])
        parts[-1].append(column)
    return [
        _table([names[one] for one in part], [[row[one] for one in part] for row in rows]) for part in parts
    ]


def _cut(text: Text, width: int) -> Text:
    return Text(shortened(text.plain, width), style=text.style)


def _table(names: Sequence[str], rows: Sequence[Sequence[Text]], wrapped: str = "") -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=name != wrapped)
    for row in rows:
        table.add_row(*row)
    return table


def _widths(names: Sequence[str], rows: Sequence[Sequence[Text]]) -> list[int]:
    return [max([cell_len(name), *(row[place].cell_len for row in rows)]) for place, name in enumerate(names)]


def _total(widths: Sequence[int]) -> int:
    """Return the width of a table with a space at each edge and two spaces between columns."""
    return sum(widths) + 2 * len(widths)


def _room(holder: Status) -> str:
    most = holder["max_bytes"]
    return f"{holder['bytes'] / most:4.0%} of {_size(most)}" if most else _size(holder["bytes"])


def _calls(calls: Status, *verbs: str) -> str:
    found = [calls[verb] for verb in verbs if verb in calls]
    return speed(sum(one["bytes"] for one in found), sum(one["seconds"] for one in found))


def _failures(causes: Status, corrupt: int = 0) -> Text:
    total = sum(causes.values())
    text = Text(f"{total:,}", style="red" if total else "")
    return text.append(f" + {corrupt:,} corrupt", style="bold red") if corrupt else text


def _breaker(states: Mapping[str, str] | None) -> Text:
    if states is None:
        return Text("-", style="dim")
    away = [f"{plain(name)}s {plain(state)}" for name, state in states.items() if state != "closed"]
    return Text(", ".join(away), style="bold red") if away else Text("closed", style="green")


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "bytes/s":
        return speed(value, 1.0)
    return _size(value) if unit == "bytes" else f"{value:.0f}"


def _size(nbytes: float) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
