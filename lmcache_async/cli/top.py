"""`lmcache-async top`: show the status page of an engine or a daemon in the terminal.

Names are shortened to fit the width of the terminal; figures are not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import quote, urljoin

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from lmcache_async.cli.output import PROBLEM, ended_like_ctrl_c, human, plain, refuse, say
from lmcache_async.config.files import read_secret_file
from lmcache_async.config.sources import PREFIX, TOKEN
from lmcache_async.config.validation import without_user
from lmcache_async.errors import ConfigError, TierUnavailableError
from lmcache_async.maintenance.http import open_client, parse_address, request_json

TIMEOUT_S = 5.0

Status: TypeAlias = Mapping[str, Any]

COLOURS = ("dodger_blue2", "dark_orange", "cyan3", "medium_orchid", "gold3", "sky_blue2", "pink3", "green3")
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_REQUESTS = 12
SPARK_WIDTH = 60
LEAST_WIDTH = 72
"""Minimum width of the view. In a narrower terminal it is cut."""
WIDE = 110
"""Width from which the table of requests has all columns."""
_NAME_WIDTH = 28
_SHORT_NAME_WIDTH = 12

_DECIDED = {
    "load": ("load", "green"),
    "partial": ("part", "yellow"),
    "recompute": ("recompute", "yellow"),
    "local": ("vLLM's own", "dim"),
    "miss": ("miss", "dim"),
    "late": ("late", "red"),
    "off": ("off", "dim"),
    "other": ("other", "dim"),
}


class StatusClient:
    """Reads `status.json` of one endpoint."""

    def __init__(
        self, url: str, *, token: str = "", token_file: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        parts = parse_address(url, f"{without_user(url)}: expected an address such as http://127.0.0.1:7421")
        self.url = without_user(parts.geturl())
        path = urljoin(parts.path or "/", "status.json")
        self.path = quote(path, safe="/%:@!$&'()*+,;=~", errors="surrogateescape")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._token = token.strip() if token_file is None else _from_file(token_file)
        self._timeout_s = timeout_s

    def read(self) -> dict[str, Any]:
        """Return the current status.

        Raises:
            TierUnavailableError: The server does not answer, or answers with a 5xx status.
            ConfigError: The token is wrong, or the address is not that of a status page.
        """

        async def get() -> tuple[int, Any]:
            url, hint = self._origin + self.path, "check that http.listen is set there"
            async with open_client(self._token, "the token") as client:
                return await request_json(client, "GET", url, timeout_s=self._timeout_s, hint=hint)

        code, status = asyncio.run(get())
        if code in {401, 403}:
            wanted = "another token" if self._token else "a token"
            raise ConfigError(f"{self.url} requires {wanted}: set LMCACHE_ASYNC_TOKEN or --token-file")
        if code != 200:
            kind = ConfigError if code < 500 else TierUnavailableError
            raise kind(f"{self.url} answered {code}; it is not a status page")
        if not isinstance(status, dict) or status.get("kind") not in ["engine", "daemon"]:
            raise ConfigError(f"{self.url} is not a status page of lmcache-async")
        return status


def _from_file(file: Path) -> str:
    text = read_secret_file(file, "--token-file").decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines()]
    token = next((line for line in lines if line and not line.startswith("#")), "")
    if not token:
        raise ConfigError(f"--token-file: {file} contains no token")
    return token


def top_command(
    url: Annotated[
        str,
        Argument(metavar="URL", help="Address of the status page as logged, such as http://127.0.0.1:7421."),
    ],
    interval: Annotated[float, Option(min=0.2, max=86400, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Print the status once and exit.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, one line per update.")] = False,
    token_file: Annotated[
        Path | None, Option(help="File with the access token, if one is required.", dir_okay=False)
    ] = None,
    token: Annotated[
        str, Option(envvar=PREFIX + TOKEN, help="The access token; prefer the variable or a file.")
    ] = "",
) -> None:
    """Show hits by tier, transfer rates, queues, leases, breakers and recent requests, until Ctrl-C.

    Exits with 1 if the endpoint does not answer the first request (with --json or without a terminal any request),
    with 2 if it rejects the request or an option is invalid. docs/status.md describes how to enable the endpoint.
    """
    console = Console(highlight=False)
    try:
        with ended_like_ctrl_c():
            client = StatusClient(url, token=token, token_file=token_file)
            status = client.read()
            if console.is_terminal and not (console.is_dumb_terminal or once or as_json):
                watch(client, status, console, lambda: time.sleep(interval))
            while True:
                if as_json:
                    say(json.dumps(status, separators=(",", ":")))
                else:
                    console.print(_drawn(client, status, console.width))
                if once:
                    break
                time.sleep(interval)
                status = client.read()
    except TierUnavailableError as error:
        refuse(error, PROBLEM)
    except KeyboardInterrupt:
        pass


def _drawn(
    client: StatusClient, status: dict[str, Any], width: int, *, notice: Text | None = None
) -> RenderableType:
    try:
        return render(status, width=width, notice=notice)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise ConfigError(
            f"{client.url} has the format of another version: use the lmcache-async top of that version, or --json"
        ) from None


def watch(client: StatusClient, status: dict[str, Any], console: Console, pause: Callable[[], None]) -> None:
    """Show the status until interrupted. While the endpoint does not answer, the last status is shown with a notice."""
    with Live(
        _drawn(client, status, console.width), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            pause()
            notice = None
            try:
                status = client.read()
            except TierUnavailableError as error:
                notice = Text(f"{error}; the status shown is old", style="bold red")
            live.update(_drawn(client, status, console.width, notice=notice), refresh=True)


def render(status: Status, *, width: int, notice: Text | None = None) -> RenderableType:
    """Return the view of a status, with a notice below the header, for a terminal with `width` columns."""
    width = max(width, LEAST_WIDTH)
    parts: list[RenderableType] = [_header(status, width)]
    if notice is not None:
        parts.append(notice)
    if status["kind"] == "daemon":
        parts += [_tenants(status["tenants"], width), _charts(status["charts"], status["tenants"], width)]
    else:
        parts += [
            _tiers(status["tiers"]),
            _charts(status["charts"], status["tiers"], width),
            _requests(status["recent"], status["time"], width),
        ]
    return Group(*parts)


def speed(nbytes: float, seconds: float) -> str:
    return f"{decimal(int(nbytes / seconds))}/s" if nbytes and seconds else "-"


def spark(values: Sequence[float | None], most: float, width: int = SPARK_WIDTH) -> str:
    """Return the last values as one block character each; a space where there is no value."""
    top = len(BLOCKS) - 1
    bars = (
        " " if value is None else BLOCKS[min(top, round(value / most * top)) if most > 0 else 0]
        for value in values[-width:]
    )
    return "".join(bars)


def _header(status: Status, width: int) -> Panel:
    line = Text(overflow="fold")
    for name, value in (*status["facts"], ("up", f"{status['uptime_s']:.0f} s")):
        line.append(f"{plain(name)} ", style="dim").append(f"{plain(value)}   ")
    figures = _figures(status)
    cells = [Text.assemble((name, "dim"), "\n", (plain(value), "bold")) for name, value in figures.items()]
    title = Text(f" {plain(status['title'] or status['kind'])} ", style="bold")
    content = Group(line, Text(), Columns(cells, padding=(0, 3)))
    return Panel(content, title=title, title_align="left", box=box.ROUNDED, width=width)


def _figures(status: Status) -> dict[str, str]:
    if status["kind"] == "daemon":
        pool = status["pool"]
        return {
            "pool": f"{human(pool['bytes'])} of {human(pool['max_bytes'])}",
            "clients": str(pool["clients"]),
        }
    totals, memory, work = status["totals"], status["memory"], status["work"]
    prompts = totals["prompt_tokens"]
    share = f"{min(1.0, totals['hit_tokens'] / prompts):.1%}" if prompts else "-"
    return {
        "from the cache": f"{share} of {prompts:,} tokens",
        "loads": speed(totals["loaded_bytes"], totals["load_seconds"]),
        "stores": speed(totals["stored_bytes"], totals["store_copy_seconds"]),
        "running": f"{work['running']}, {work['late_calls']} late",
        "pinned": f"{work['pinned_chunks']} chunks",
        "host memory": f"{human(memory['leased_bytes'])} of {human(memory['bytes'])}",
    }


def _tiers(tiers: Sequence[Status]) -> Table:
    """Return a table with a column for each tier."""
    cells = [_tier(tier) for tier in tiers]
    table = _table("tier")
    for index, tier in enumerate(tiers):
        table.add_column(
            _name(tier["id"], _NAME_WIDTH, f"bold {_colour(index)}"), justify="right", overflow="fold"
        )
    for name in cells[0] if cells else ():
        table.add_row(Text(name, style="dim"), *(part[name] for part in cells))
    return table


def _tier(tier: Status) -> dict[str, str | Text]:
    queue, calls = tier["queue"], tier["calls"]
    return {
        "holds": _room(tier),
        "chunks": f"{tier['chunks']:,}",
        "hits": f"{tier['hit_chunks']:,}",
        "stored": f"{tier['stored_chunks']:,}",
        "read": "in place" if tier["in_place"] else _calls(calls, "get", "get_many"),
        "write": "-" if tier["in_place"] else _calls(calls, "put", "put_many"),
        "queue": human(queue["bytes"]) if queue else "-",
        "errors": _failures(tier["errors"], tier["corrupt"]),
        "dropped": _failures(tier["dropped"]),
        "evicted": f"{tier['evictions']:,}",
        "breaker": _breaker(tier["breaker"]),
    }


def _tenants(tenants: Sequence[Status], width: int) -> Table:
    table = _table("tenant")
    for name in ("holds", "records", "readers", "writers", "evicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, tenant in enumerate(tenants):
        counts = (f"{tenant[name]:,}" for name in ("chunks", "readers", "writers", "evictions"))
        table.add_row(
            _name(tenant["id"], _name_width(width), f"bold {_colour(index)}"),
            _room(tenant),
            *counts,
        )
    return table


def _charts(charts: Status, owners: Iterable[Status], width: int) -> Padding:
    """Return the charts as lines of block characters. Tiers or tenants have the same colours as in their table."""
    places = {owner["id"]: index for index, owner in enumerate(owners)}
    bars = min(SPARK_WIDTH, width - _NAME_WIDTH - 20)
    grid = Table.grid("", Column(justify="right", style="bold"), "", padding=(0, 2, 0, 0))
    for chart in charts["list"]:
        values = [value or 0.0 for series in chart["series"] for value in series["values"]]
        most = 1.0 if chart["unit"] == "share" else max(values, default=0.0)
        grid.add_row(Text(plain(chart["title"]), style="dim"))
        for index, series in enumerate(chart["series"]):
            last = series["values"][-1] if series["values"] else None
            style = _colour(places.get(series["name"], index + 5))
            grid.add_row(
                _name(series["name"], _NAME_WIDTH),
                _value(last, chart["unit"]),
                Text(spark(series["values"], most, bars), style=style),
            )
    return Padding(grid, (0, 0, 0, 1))


def _requests(recent: Sequence[Status], now: float, width: int) -> Table:
    table = _table("age")
    names = ["request", "prompt", "comes from", "decision", "load", "speed", "stored"]
    for name in names[: None if width >= WIDE else -2]:
        justify: Literal["left", "right"] = (
            "left" if name in {"request", "comes from", "decision"} else "right"
        )
        table.add_column(name, justify=justify, no_wrap=name != "comes from")
    for request in recent[:MAX_REQUESTS]:
        plan, loaded, stored = request["plan"], request["loaded"], request["stored"]
        asked = plan["prompt_tokens"] if plan else loaded["asked_tokens"] if loaded else 0
        row: list[str | Text] = [
            f"{max(0.0, now - request['time']):.0f} s",
            _name(request["request"] or "-", _name_width(width)),
            f"{asked:,}" if asked else "-",
            Text(_origin(plan, loaded, asked)),
            _decision(plan, loaded),
            f"{loaded['seconds'] * 1e3:.1f} ms" if loaded else "-",
            speed(loaded["bytes"], loaded["seconds"]) if loaded else "-",
            f"{stored['tokens']:,}" if stored else "-",
        ]
        table.add_row(*row[: len(table.columns)])
    return table


def _origin(plan: Status | None, loaded: Status | None, asked: int) -> str:
    parts = [(plain(tier), tokens) for tier, tokens in (loaded["by_tier"] if loaded else ())]
    if plan and plan["local_tokens"]:
        parts.insert(0, ("vLLM", plan["local_tokens"]))
    if plan and plan["load_tokens"] and not loaded:
        parts.append(("loading", plan["load_tokens"]))
    rest = asked - sum(tokens for _, tokens in parts)
    if rest > 0:
        parts.append(("computed" if plan else "not stored", rest))
    return ", ".join(f"{name} {tokens:,}" for name, tokens in parts) or "-"


def _decision(plan: Status | None, loaded: Status | None) -> Text:
    if plan:
        text, style = _DECIDED.get(plan["decided"], (plain(plan["decided"]), ""))
        return Text(text, style=style)
    if loaded:
        return Text("loaded", style="green") if loaded["tokens"] else Text("miss", style="dim")
    return Text("store only", style="dim")


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    return table


def _name(text: str, width: int, style: str = "") -> Text:
    """Return a name, shortened in the middle to the width: names often differ at their end."""
    name = plain(text)
    if cell_len(name) > width:
        tail = (width - 1) // 2
        end = set_cell_size(name[::-1], tail)[::-1].lstrip()
        name = f"{set_cell_size(name, width - 1 - tail).rstrip()}…{end}"
    return Text(name, style=style)


def _name_width(width: int) -> int:
    return _NAME_WIDTH if width >= WIDE else _SHORT_NAME_WIDTH


def _room(holder: Status) -> str:
    most = holder["max_bytes"]
    return f"{holder['bytes'] / most:4.0%} of {human(most)}" if most else human(holder["bytes"])


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
    return human(value) if unit == "bytes" else f"{value:.0f}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
