"""`lmcache-async copy`: copy records from one directory or tier to another."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, human, number, say
from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.copy import CopyOptions, CopyReport, copy, plan_copy
from lmcache_async.maintenance.stores import open_store


def copy_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A directory of the disk tier; the id of a tier in --config; or a tier as JSON.",
        ),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="As SRC. A directory is created if it does not exist.")
    ],
    config: shared.Config = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="SIZE", help="Maximum bytes to copy.")
    ] = None,
    limit_rate: shared.RateOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be copied.")] = False,
    in_flight: shared.Concurrency = 4,
    max_record_bytes: shared.RecordSize = shared.DEFAULT_RECORD_SIZE,
    as_json: JSONFlag = False,
) -> None:
    """Copy records from one directory or tier to another, each verified on the way.

    Records that DST has are skipped. The most recently used records are copied first. After an interruption the
    same command copies the rest. Exits with 1 if a record was refused, because it is damaged or DST has no room.
    """
    options = CopyOptions(
        selection=shared.selection_of(namespace),
        max_bytes=shared.size_of(max_bytes, "--max-bytes"),
        max_bytes_per_s=shared.size_of(limit_rate, "--limit-rate"),
    )
    from_spec, to_spec = (
        shared.place_spec(text, config, rank, in_flight, max_record_bytes) for text in (source, destination)
    )

    async def work(meter: Meter) -> CopyReport:
        async with contextlib.AsyncExitStack() as stack:
            opened = await stack.enter_async_context(open_store(from_spec, change=False))
            if dry_run and to_spec.path is not None and not to_spec.path.exists():
                return await plan_copy(opened, None, options, meter, name=str(to_spec.path))
            into = await stack.enter_async_context(open_store(to_spec, change=not dry_run))
            if dry_run:
                return await plan_copy(opened, into, options, meter)
            return await copy(opened, into, options, meter)

    done = shared.run(work)
    shared.finish(done, _print, as_json=as_json, passed=not done.counts.refused)


def _print(done: CopyReport) -> None:
    verb = "to copy" if done.dry_run else "copied"
    say(
        f"{done.source} to {done.destination}: {verb}: {number(done.records, 'record')},"
        f" {human(done.counts.bytes)}; already there: {done.there}"
    )
    shared.say_not_copied(done.counts)
