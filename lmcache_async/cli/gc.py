"""`lmcache-async gc`: delete records by namespace, age, size and readability."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

from typer import Option

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, human, number
from lmcache_async.maintenance.concurrency import Progress
from lmcache_async.maintenance.gc import Collection, collect
from lmcache_async.maintenance.namespaces import Selection
from lmcache_async.maintenance.stores import MAX_RECORD_BYTES, Stores

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
        float | None,
        Option(
            metavar="TIME",
            parser=shared.parse_duration,
            help="Delete records unused for this time, such as 12h or 7d.",
        ),
    ] = None,
    max_bytes: Annotated[
        int | None, shared.size_option("Delete least recently used records until this size remains.")
    ] = None,
    unreadable: Annotated[
        bool, Option(help="Delete records of other versions, and files that are not records.")
    ] = True,
    quarantine: Annotated[bool, Option("--quarantine", help="Delete quarantined files.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only report what would be deleted.")] = False,
    in_flight: shared.Concurrency = 8,
    max_record_bytes: shared.RecordSize = MAX_RECORD_BYTES,
    as_json: JSONFlag = False,
) -> None:
    """Delete records by namespace, age or size, and unreadable ones.

    Conditions are combined: --namespace with --older-than deletes the old records of that namespace. Suffixes of
    prompts are deleted before their prefixes.
    """
    stores = Stores(config, rank, in_flight, max_record_bytes)

    async def work(show: Progress) -> Collection:
        selection = Selection(tuple(namespace or ()))
        async with stores.open(target, tier, change=not dry_run) as store:
            return await collect(
                store,
                show,
                selection=selection,
                used_before=None if older_than is None else time.time_ns() - int(older_than * 1e9),
                max_bytes=max_bytes,
                unreadable=unreadable,
                quarantine=quarantine,
                dry_run=dry_run,
            )

    shared.run(work, _lines, as_json=as_json, passed=lambda found: not found.errors)


def _lines(found: Collection) -> Iterator[str]:
    verb = "would remove" if found.dry_run else "removed"
    for noun, parts in (("record", found.records), ("file", found.files)):
        for why, sums in parts.items():
            if sums["count"]:
                yield f"{verb} {number(sums['count'], noun)}, {human(sums['bytes'])}: {WHY[why]}"
    if found.dry_run:
        yield f"{found.target}: {human(found.to_free_bytes)} would be freed"
    else:
        removed = number(found.freed_records, "record")
        yield f"{found.target}: {removed} removed, {human(found.freed_bytes)} freed"
    yield f"kept: {number(found.kept_records, 'record')}, {human(found.kept_bytes)}"
    if found.errors:
        yield f"kept because not readable: {number(found.errors, 'record')}"
        yield shared.WHY_NOT_READABLE
