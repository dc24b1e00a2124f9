"""What `lmcache-async top` shows of a status: a header, tiers or tenants, the last minutes, the last requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmcache_async.cli.output import plain

Told: TypeAlias = Mapping[str, Any]

COLOURS = ("dodger_blue2", "dark_orange", "cyan3", "medium_orchid", "gold3", "sky_blue2", "pink3", "green3")
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_REQUESTS = 12
SPARK_WIDTH = 60

_DECIDED = {
    "load": ("load", "green"),
    "partial": ("part", "yellow"),
    "recompute": ("recompute", "yellow"),
    "local": ("vLLM's own", "dim"),
    "miss": ("miss", "dim"),
    "late": ("late", "red"),
    "off": ("off", "dim"),
}


def render(told: Told, *, notice: Text | None = None) -> RenderableType:
    """Args: notice: Above all else, where something is wrong."""
    parts: list[RenderableType] = [_header(told)]
    if notice is not None:
        parts.append(notice)
    if told["kind"] == "daemon":
        parts += [_tenants(told["tenants"]), _charts(told["charts"], told["tenants"])]
    else:
        parts += [
            _tiers(told["tiers"]),
            _charts(told["charts"], told["tiers"]),
            _requests(told["recent"], told["time"]),
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


def spark(values: Sequence[float | None], most: float) -> str:
    """The last values as bars; a gap where there is none."""
    last = values[-SPARK_WIDTH:]
    top = len(BLOCKS) - 1
    bars = [" " if v is None else BLOCKS[min(top, round(v / most * top)) if most > 0 else 0] for v in last]
    return "".join(bars)


def _header(told: Told) -> Panel:
    line = Text(overflow="fold")
    for name, value in (*told["facts"], ("up", f"{told['uptime_s']:.0f} s")):
        line.append(f"{plain(name)} ", style="dim").append(f"{plain(value)}   ")
    figures = Table.grid(padding=(0, 3))
    words = _pool(told) if told["kind"] == "daemon" else _engine(told)
    for _ in words:
        figures.add_column()
    figures.add_row(*(Text(name, style="dim") for name, _ in words))
    figures.add_row(*(Text(plain(value), style="bold") for _, value in words))
    title = Text(f" {plain(told['title'] or told['kind'])} ", style="bold")
    return Panel(Group(line, Text(), figures), title=title, title_align="left", box=box.ROUNDED)


def _engine(told: Told) -> list[tuple[str, str]]:
    totals, memory, work = told["totals"], told["memory"], told["work"]
    prompts = totals["prompt_tokens"]
    share = f"{min(1.0, totals['hit_tokens'] / prompts):.1%}" if prompts else "-"
    return [
        ("from the cache", f"{share} of {prompts:,} tokens"),
        ("loads", speed(totals["loaded_bytes"], totals["load_seconds"])),
        ("stores", speed(totals["stored_bytes"], totals["store_copy_seconds"])),
        ("under way", f"{work['running']}, {work['late_calls']} late"),
        ("held for requests", f"{work['pinned_chunks']} chunks"),
        ("host memory", f"{_size(memory['leased_bytes'])} of {_size(memory['bytes'])}"),
    ]


def _pool(told: Told) -> list[tuple[str, str]]:
    pool, peers = told["pool"], told["peers"]
    words = [
        ("pool", f"{_size(pool['bytes'])} of {_size(pool['max_bytes'])}"),
        ("clients", str(pool["clients"])),
    ]
    if peers:
        moved = f"{_size(peers['sent_bytes'])} sent, {_size(peers['received_bytes'])} received"
        words += [("peers", f"{peers['connections']} of {peers['max_connections']}"), ("with peers", moved)]
    return words


def _tiers(tiers: Iterable[Told]) -> Table:
    columns = ("holds", "chunks", "hits", "stored", "read", "write", "queue", "errors", "dropped", "evicted")
    table = _table("tier", *columns, "breaker")
    for index, tier in enumerate(tiers):
        queue = tier["queue"]
        table.add_row(
            Text(plain(tier["id"]), style=f"bold {_colour(index)}"),
            _room(tier),
            f"{tier['chunks']:,}",
            f"{tier['hit_chunks']:,}",
            f"{tier['stored_chunks']:,}",
            "in place" if tier["in_place"] else _calls(tier["calls"], "get", "get_many"),
            "-" if tier["in_place"] else _calls(tier["calls"], "put", "put_many"),
            _size(queue["bytes"]) if queue else "-",
            _trouble(tier["errors"], tier["corrupt"]),
            _trouble(tier["dropped"]),
            f"{tier['evictions']:,}",
            _breaker(tier["breaker"]),
        )
    return table


def _tenants(tenants: Iterable[Told]) -> Table:
    table = _table("tenant", "holds", "records", "readers", "writers", "evicted")
    for index, tenant in enumerate(tenants):
        table.add_row(
            Text(plain(tenant["id"]), style=f"bold {_colour(index)}"),
            _room(tenant),
            *(f"{tenant[name]:,}" for name in ("chunks", "readers", "writers", "evictions")),
        )
    return table


def _charts(charts: Told, owners: Iterable[Told]) -> Padding:
    """Args: owners: Tiers or tenants; each has the colour that it has in its table."""
    places = {owner["id"]: index for index, owner in enumerate(owners)}
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    for chart in charts["list"]:
        values = [value or 0.0 for series in chart["series"] for value in series["values"]]
        most = 1.0 if chart["unit"] == "share" else max(values, default=0.0)
        for index, series in enumerate(chart["series"]):
            last = series["values"][-1] if series["values"] else None
            table.add_row(
                Text(plain(chart["title"]) if index == 0 else "", style="dim"),
                Text(plain(series["name"])),
                Text(_value(last, chart["unit"]), style="bold", justify="right"),
                Text(spark(series["values"], most), style=_colour(places.get(series["name"], index + 5))),
            )
    return Padding(table, (0, 0, 0, 1))


def _requests(recent: Sequence[Told], now: float) -> Table:
    table = _table("age", "request", "prompt", "comes from", "decision", "load", "speed", "stored")
    for request in recent[:MAX_REQUESTS]:
        plan, loaded, stored = request["plan"], request["loaded"], request["stored"]
        asked = plan["prompt_tokens"] if plan else loaded["asked_tokens"] if loaded else 0
        table.add_row(
            f"{max(0.0, now - request['time']):.0f} s",
            Text(plain(request["request"])[:28] or "-", overflow="ellipsis", no_wrap=True),
            f"{asked:,}" if asked else "-",
            _origin(plan, loaded, asked),
            _decision(plan, loaded),
            f"{loaded['seconds'] * 1e3:.1f} ms" if loaded else "-",
            speed(loaded["bytes"], loaded["seconds"]) if loaded else "-",
            f"{stored['tokens']:,}" if stored else "-",
        )
    return table


def _origin(plan: Told | None, loaded: Told | None, asked: int) -> Text:
    parts = [(plain(tier), tokens) for tier, tokens in (loaded["by_tier"] if loaded else ())]
    if plan and plan["local_tokens"]:
        parts.insert(0, ("vLLM", plan["local_tokens"]))
    if plan and plan["load_tokens"] and not loaded:
        parts.append(("loading", plan["load_tokens"]))
    rest = asked - sum(tokens for _, tokens in parts)
    if rest > 0:
        parts.append(("computed" if plan else "not there", rest))
    return Text(", ".join(f"{name} {tokens:,}" for name, tokens in parts) or "-")


def _decision(plan: Told | None, loaded: Told | None) -> Text:
    if plan:
        text, style = _DECIDED.get(plan["decided"], (plain(plan["decided"]), ""))
        return Text(text, style=style)
    if loaded:
        return Text("loaded", style="green") if loaded["tokens"] else Text("miss", style="dim")
    return Text("store only", style="dim")


def _table(first: str, *names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in names:
        left = name in {"request", "comes from", "decision", "breaker", "holds"}
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "comes from")
    return table


def _room(holder: Told) -> str:
    most = holder["max_bytes"]
    return f"{holder['bytes'] / most:4.0%} of {_size(most)}" if most else _size(holder["bytes"])


def _calls(calls: Told, *verbs: str) -> str:
    told = [calls[verb] for verb in verbs if verb in calls]
    return speed(sum(one["bytes"] for one in told), sum(one["seconds"] for one in told))


def _trouble(causes: Told, corrupt: int = 0) -> Text:
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
