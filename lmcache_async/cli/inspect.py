"""`lmcache-async inspect`: contents of a directory or a tier, from the headers of its records."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import PASSED, PROBLEM, JSONFlag, counted, human, number, plain, print_json, say
from lmcache_async.errors import ConfigError, TierError
from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.inspection import Inspection, describe, inspect
from lmcache_async.maintenance.record import info_of
from lmcache_async.maintenance.stores import StoreSpec, open_store
from lmcache_async.tiers.offline import OfflineStore, StoredRecord
from lmcache_async.types import KEY_BYTES, ChunkKey

_WIDTH = 160  # where the output is not a terminal


def inspect_command(
    target: Annotated[
        str | None, typer.Argument(help="A directory of the disk tier; omit it with --tier.")
    ] = None,
    key: Annotated[str | None, typer.Argument(help="Key of one record, in hex.")] = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    in_flight: shared.Concurrency = 8,
    max_record_bytes: shared.RecordSize = shared.DEFAULT_RECORD_SIZE,
    as_json: JSONFlag = False,
) -> None:
    """Show the records by namespace, or the header of one record. Read-only.

    A directory can be inspected while an engine uses it; only headers are read. From other tiers, whole records are read.
    """
    if tier is not None and key is None:
        target, key = None, target
    path = None if target is None else Path(target)
    spec = shared.spec_of(path, config, tier, rank, in_flight, max_record_bytes)
    selection = shared.selection_of(namespace)
    if key is not None:
        parsed = _key_of(key)
        record = shared.run(lambda _: _one(spec, parsed))
        print_json(record) if as_json else _print_record(record)
        raise typer.Exit(PROBLEM if record["unreadable"] else PASSED)

    async def work(meter: Meter) -> Inspection:
        async with open_store(spec, change=False) as opened:
            return await inspect(opened, selection, meter)

    found = shared.run(work)
    shared.finish(found, _print, as_json=as_json, passed=not (found.unreadable or found.errors))


def _key_of(text: str) -> ChunkKey:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise typer.BadParameter(f"{text}: expected a key of {2 * KEY_BYTES} hex digits")
    return ChunkKey(key)


async def _one(spec: StoreSpec, key: ChunkKey) -> dict[str, Any]:
    async with open_store(spec, change=False) as target:
        info = await info_of(target, await _entry(target, key))
        if info is None:
            raise TierError(f"{target.name} has no record {key.hex()}")
        return describe(info, time.time_ns())


async def _entry(store: OfflineStore, key: ChunkKey) -> StoredRecord:
    """The record's entry in the listing, with size and time of use where the store knows them."""
    try:
        return next((one for one in await store.list() if one.key == key), StoredRecord(key))
    except ConfigError:  # the tier cannot list its records, but may have this one
        return StoredRecord(key)


def _print(found: Inspection) -> None:
    summary = found.as_dict()
    say(
        f"{summary['target']}: {number(summary['records'], 'record')}, {human(summary['bytes'])},"
        f" {number(summary['tokens'], 'token')}"
        + (f"; in use by process {found.holder}" if found.holder else "")
    )
    if summary["namespaces"]:
        width = None if sys.stdout.isatty() else _WIDTH
        Console(highlight=False, width=width).print(_table(summary["namespaces"]))
    for group in summary["namespaces"]:
        for shape in group["shapes"]:
            records = number(shape["records"], "record")
            say(f"{group['id']}: {records} of {shape['dtype']}, {shape['layout']}")
    if found.unreadable:
        say(f"unreadable: {counted(summary['unreadable'])}, {human(found.unreadable_bytes)}")
    if found.errors or found.gone:
        say(f"not readable: {found.errors}; evicted meanwhile: {found.gone}")


def _table(groups: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("namespace", overflow="fold")
    for name in ("records", "bytes", "tokens", "chunk tokens", "LoRAs, salts, tags", "oldest", "newest"):
        table.add_column(name, justify="right")
    for group in groups:
        table.add_row(
            group["id"],
            Text(plain(group["title"])),
            str(group["records"]),
            human(group["bytes"]),
            str(group["tokens"] or "-"),
            _tokens(group["chunk_tokens"]),
            str(group["request_labels"] or "-"),
            _ago(group["oldest_ns"]),
            _ago(group["newest_ns"]),
        )
    return table


def _tokens(counts: dict[str, int]) -> str:
    sizes = [int(count) for count in counts]
    return "-" if not sizes else str(sizes[0]) if len(sizes) == 1 else f"{min(sizes)}-{max(sizes)}"


def _ago(stamp: int | None) -> str:
    if stamp is None:
        return "-"
    seconds = max(0.0, (time.time_ns() - stamp) / 1e9)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _print_record(record: dict[str, Any]) -> None:
    for name, value in record.items():
        if value is not None:
            say(f"{name}: {value}")
