"""`lmcache-async gc`: delete records by namespace, age, size and readability."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, human, number, say
from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.gc import Collection, GcOptions, collect, plan
from lmcache_async.maintenance.stores import open_store

WHY = {
    "unreadable": "header not readable",
    "age": "unused for longer than --older-than",
    "namespace": "selected by --namespace",
    "room": "total size above --max-bytes, least recently used",
    "half_written": "unfinished files of interrupted writes",
    "quarantine": "quarantined",
}
"""The reasons for a deletion, in words."""


def gc_command(
    target: shared.Directory = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="TIME", help="Delete records unused for this time, such as 12h or 7d."
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes", metavar="SIZE", help="Delete least recently used records until this size remains."
        ),
    ] = None,
    unreadable: Annotated[
        bool, typer.Option(help="Delete records of other versions, and files that are not records.")
    ] = True,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Delete quarantined files.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be deleted.")] = False,
    in_flight: shared.Concurrency = 8,
    max_record_bytes: shared.RecordSize = shared.DEFAULT_RECORD_SIZE,
    as_json: JSONFlag = False,
) -> None:
    """Delete records by namespace, age or size, and unreadable ones.

    Conditions are combined: --namespace with --older-than deletes the old records of that namespace. Suffixes of
    prompts are deleted before their prefixes.
    """
    age_s = shared.seconds_of(older_than, "--older-than")
    options = GcOptions(
        selection=shared.selection_of(namespace),
        used_before=None if age_s is None else time.time_ns() - int(age_s * 1e9),
        max_bytes=shared.size_of(max_bytes, "--max-bytes"),
        unreadable=unreadable,
        quarantine=quarantine,
    )
    spec = shared.spec_of(target, config, tier, rank, in_flight, max_record_bytes)

    async def work(meter: Meter) -> Collection:
        async with open_store(spec, change=not dry_run) as opened:
            collection = await plan(opened, options, meter)
            collection.dry_run = dry_run
            if not dry_run:
                await collect(opened, collection, meter)
            return collection

    found = shared.run(work)
    shared.finish(found, _print, as_json=as_json, passed=not found.errors)


def _print(found: Collection) -> None:
    summary = found.as_dict()
    verb = "would remove" if found.dry_run else "removed"
    for noun, parts in (("record", summary["records"]), ("file", summary["files"])):
        for why, sums in parts.items():
            if sums["count"]:
                what = f"{number(sums['count'], noun)}, {human(sums['bytes'])}"
                say(f"{verb} {what}: {WHY[why]}")
    if found.dry_run:
        say(f"{found.store}: {human(found.bytes)} would be freed")
    else:
        removed = number(found.freed_records, "record")
        say(f"{found.store}: {removed} removed, {human(found.freed_bytes)} freed")
    say(f"kept: {number(found.kept_records, 'record')}, {human(found.kept_bytes)}")
    if found.errors:
        say(f"kept because not readable: {number(found.errors, 'record')}")
