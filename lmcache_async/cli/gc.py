"""`lmcache-async gc`: less of a directory or a tier, by namespace, age, room and readability."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import say
from lmcache_async.records.collecting import Collection, GcOptions, collect, plan
from lmcache_async.records.flight import Meter
from lmcache_async.records.opening import open_target

WHY = {
    "unreadable": "header not readable",
    "age": "unused for longer than --older-than",
    "namespace": "selected by --namespace",
    "room": "total size above --max-bytes, least recently used",
    "half_written": "unfinished files of interrupted writes",
    "quarantine": "quarantined",
}
"""The reasons of a collection, for people."""


def gc_command(
    target: Annotated[
        Path | None, typer.Argument(help="A directory of the disk tier; or none, with --tier.")
    ] = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Not used for so long: 12h, 7d.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="Down to so much, what was used least first."),
    ] = None,
    unreadable: Annotated[
        bool, typer.Option(help="Records of other versions, and what is no record.")
    ] = True,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="What was put aside as broken, too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    in_flight: shared.Concurrency = 8,
    max_record_bytes: shared.RecordSize = shared.DEFAULT_RECORD_SIZE,
    as_json: shared.AsJson = False,
) -> None:
    """Remove what is not wanted any more: by namespace, age and room; and always what nobody can read.

    The conditions hold together: --namespace with --older-than is of that namespace what is old. The ends
    of prompts go before their beginnings.
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
        async with open_target(spec, change=not dry_run) as opened:
            collection = await plan(opened, options, meter)
            collection.dry_run = dry_run
            if not dry_run:
                await collect(opened, collection, meter)
            return collection

    found = shared.run(work)
    shared.say_json(found.as_dict()) if as_json else _print(found)
    raise typer.Exit(shared.WRONG if found.errors else shared.RIGHT)


def _print(found: Collection) -> None:
    told = found.as_dict()
    verb = "would remove" if found.dry_run else "removed"
    for noun, parts in (("record", told["records"]), ("file", told["files"])):
        for why, sums in parts.items():
            if sums["count"]:
                what = f"{shared.number(sums['count'], noun)}, {shared.human(sums['bytes'])}"
                say(f"{verb} {what}: {WHY[why]}")
    if found.dry_run:
        say(f"{found.target}: {shared.human(found.bytes)} would be freed", to_stderr=False)
    else:
        removed = shared.number(found.freed_records, "record")
        say(f"{found.target}: {removed} removed, {shared.human(found.freed_bytes)} freed")
    say(f"kept: {shared.number(found.kept_records, 'record')}, {shared.human(found.kept_bytes)}")
    if found.errors:
        say(f"kept because not readable: {shared.number(found.errors, 'record')}")
