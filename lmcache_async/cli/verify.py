"""`lmcache-async verify`: verify every record of a directory or a tier."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import typer
from typer import Option

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, human, number
from lmcache_async.maintenance.concurrency import Progress
from lmcache_async.maintenance.namespaces import Selection
from lmcache_async.maintenance.stores import MAX_RECORD_BYTES, Stores
from lmcache_async.maintenance.verification import Remedy, Verification, verify


def verify_command(
    target: shared.Directory = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    remove: Annotated[bool, Option("--remove", help="Delete damaged records.")] = False,
    quarantine: Annotated[
        bool, Option("--quarantine", help="Move damaged records to the quarantine.")
    ] = False,
    limit_rate: shared.Rate = None,
    in_flight: shared.Concurrency = 8,
    max_record_bytes: shared.RecordSize = MAX_RECORD_BYTES,
    as_json: JSONFlag = False,
) -> None:
    """Read every record and verify its checksums, lengths and key.

    Exits with 1 if a record is damaged or unreadable. With --config, its keys decrypt encrypted records.
    """
    if remove and quarantine:
        raise typer.BadParameter("--remove and --quarantine exclude each other")
    remedy: Remedy | None = "remove" if remove else "quarantine" if quarantine else None
    stores = Stores(config, rank, in_flight, max_record_bytes)

    async def work(show: Progress) -> Verification:
        selection = Selection(tuple(namespace or ()))
        async with stores.open(target, tier, change=remedy is not None) as store:
            cipher, _ = stores.keys()
            return await verify(
                store, show, selection=selection, remedy=remedy, max_bytes_per_s=limit_rate, cipher=cipher
            )

    shared.run(
        work,
        partial(_lines, remedy),
        as_json=as_json,
        passed=lambda found: not (found.wrong or found.errors),
    )


def _lines(remedy: Remedy | None, found: Verification) -> Iterator[str]:
    yield (
        f"{found.target}: correct: {number(found.records, 'record')}, corrupt: {found.wrong.total()},"
        f" not readable: {found.errors}; {human(found.bytes)} read"
    )
    if found.encrypted:
        yield f"encrypted, verified by their outer checksum only: {number(found.encrypted, 'record')}"
    if found.gone or found.passed_over:
        yield f"evicted meanwhile: {found.gone}; of other namespaces: {found.passed_over}"
    yield from shared.listed(found.wrong_records)
    if found.remedied:
        done = "deleted" if remedy == "remove" else "moved to quarantine, or deleted by a tier without one"
        yield f"{done}: {number(found.remedied, 'record')}"
