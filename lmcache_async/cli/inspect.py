"""`lmcache-async inspect`: contents of a directory or a tier, from the headers of its records."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, counted, human, number, plain
from lmcache_async.maintenance.concurrency import Progress
from lmcache_async.maintenance.inspection import Inspection, describe_record, inspect
from lmcache_async.maintenance.namespaces import Selection
from lmcache_async.maintenance.stores import MAX_RECORD_BYTES, Stores
from lmcache_async.types import KEY_BYTES, ChunkKey

WIDE = 120
"""Width from which the heads of figures are not wrapped. The figures are not cut in a terminal of any width."""
_LEAST_NAME_WIDTH = 6


def inspect_command(
    target: shared.Directory = None,
    key: Annotated[str | None, Argument(metavar="KEY", help="Key of one record, in hex.")] = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    in_flight: shared.Concurrency = 8,
    max_record_bytes: shared.RecordSize = MAX_RECORD_BYTES,
    as_json: JSONFlag = False,
) -> None:
    """Show the records by namespace, or the header of one record. Read-only.

    A directory can be inspected while an engine uses it; only headers are read. From other tiers, whole records are read.
    """
    if tier is not None and key is None:
        target, key = None, target
    stores = Stores(config, rank, in_flight, max_record_bytes)

    async def all_records(show: Progress) -> Inspection:
        selection = Selection(tuple(namespace or ()))
        async with stores.open(target, tier) as store:
            return await inspect(store, show, selection=selection)

    if key is None:
        shared.run(
            all_records, _lines, as_json=as_json, passed=lambda found: not (found.unreadable or found.errors)
        )
    parsed = _key_of(key)

    async def one_record(_: Progress) -> dict[str, Any]:
        async with stores.open(target, tier) as store:
            return await describe_record(store, parsed)

    shared.run(
        one_record,
        lambda record: (f"{name}: {value}" for name, value in record.items() if value is not None),
        as_json=as_json,
        passed=lambda record: not record["unreadable"],
    )


def _key_of(text: str) -> ChunkKey:
    if not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", text):
        raise typer.BadParameter(f"{text}: expected a key of {2 * KEY_BYTES} hex digits")
    return ChunkKey(bytes.fromhex(text))


def _lines(found: Inspection) -> Iterator[str]:
    yield (
        f"{found.target}: {number(found.records, 'record')}, {human(found.bytes)}, {number(found.tokens, 'token')}"
        + (f"; in use by process {found.held_by_process}" if found.held_by_process else "")
    )
    if found.namespaces:
        yield _table(found.namespaces)
    for group in found.namespaces:
        for shape in group["shapes"]:
            records = number(shape["records"], "record")
            yield f"{group['id']}: {records} of {shape['dtype']}, {shape['layout']}"
    if found.unreadable:
        yield f"unreadable: {counted(found.unreadable)}, {human(found.unreadable_bytes)}"
    if found.errors or found.gone:
        yield f"not readable: {found.errors}; evicted meanwhile: {found.gone}"
    if found.errors:
        yield shared.WHY_NOT_READABLE


def _table(groups: list[dict[str, Any]]) -> str:
    names = ("records", "bytes", "tokens", "chunk tokens", "LoRAs, salts, tags", "oldest", "newest")
    rows = [_figures(group) for group in groups]
    columns = zip(names, *rows, strict=True)
    widths = [max(map(len, (*name.split(), *figures))) for name, *figures in columns]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    least = len(groups[0]["id"]) + _LEAST_NAME_WIDTH + sum(widths) + 2 * (1 + len(names))
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("namespace", overflow="fold")
    for name, own in zip(names, widths, strict=True):
        table.add_column(name, justify="right", width=None if width >= WIDE else own)
    for group, row in zip(groups, rows, strict=True):
        table.add_row(group["id"], Text(plain(group["title"])), *row)
    console = Console(width=max(width, least), color_system=None)
    with console.capture() as shown:
        console.print(table)
    return shown.get().rstrip("\n")


def _figures(group: dict[str, Any]) -> tuple[str, ...]:
    sizes = [int(count) for count in group["chunk_tokens"]]
    return (
        str(group["records"]),
        human(group["bytes"]),
        str(group["tokens"] or "-"),
        "-".join(str(size) for size in sorted({min(sizes), max(sizes)})) if sizes else "-",
        str(group["request_labels"] or "-"),
        _ago(group["oldest_ns"]),
        _ago(group["newest_ns"]),
    )


def _ago(stamp: int | None) -> str:
    if stamp is None:
        return "-"
    seconds = max(0.0, (time.time_ns() - stamp) / 1e9)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
