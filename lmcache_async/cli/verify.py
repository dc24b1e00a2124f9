"""`lmcache-async verify`: verify every record of a directory or a tier."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, human, number, say
from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.stores import open_keys, open_store
from lmcache_async.maintenance.verification import Remedy, Verification, VerifyOptions, verify


def verify_command(
    target: shared.Directory = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete damaged records.")] = False,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move damaged records to the quarantine.")
    ] = False,
    limit_rate: shared.RateOption = None,
    in_flight: shared.Concurrency = 8,
    max_record_bytes: shared.RecordSize = shared.DEFAULT_RECORD_SIZE,
    as_json: JSONFlag = False,
) -> None:
    """Read every record and verify its checksums, lengths and key.

    Exits with 1 if a record is damaged or unreadable. With --config, its keys decrypt encrypted records.
    """
    if remove and quarantine:
        raise typer.BadParameter("--remove and --quarantine exclude each other")
    remedy = Remedy.REMOVE if remove else Remedy.QUARANTINE if quarantine else Remedy.KEEP
    spec = shared.spec_of(target, config, tier, rank, in_flight, max_record_bytes)
    selection = shared.selection_of(namespace)
    rate = shared.size_of(limit_rate, "--limit-rate")

    async def work(meter: Meter) -> Verification:
        cipher, _ = open_keys(spec.read_config())
        options = VerifyOptions(selection=selection, remedy=remedy, max_bytes_per_s=rate, cipher=cipher)
        async with open_store(spec, change=remedy is not Remedy.KEEP) as store:
            return await verify(store, options, meter)

    found = shared.run(work)
    shared.finish(found, partial(_print, remedy), as_json=as_json, passed=found.passed)


def _print(remedy: Remedy, found: Verification) -> None:
    say(
        f"{found.store}: correct: {number(found.records, 'record')}, corrupt: {found.damaged.total()},"
        f" not readable: {found.errors}; {human(found.bytes)} read"
    )
    if found.encrypted:
        say(f"encrypted, verified by their outer checksum only: {number(found.encrypted, 'record')}")
    if found.gone or found.passed_over:
        say(f"evicted meanwhile: {found.gone}; of other namespaces: {found.passed_over}")
    shared.say_listed(found.listed)
    if found.remedied:
        done = "deleted" if remedy is Remedy.REMOVE else "moved to quarantine"
        say(f"{done}: {number(found.remedied, 'record')}")
