"""`lmcache-async verify`: every record of a directory or a tier, read and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import say
from lmcache_async.records.flight import Meter
from lmcache_async.records.opening import open_keys, open_target
from lmcache_async.records.state import StateFile
from lmcache_async.records.verifying import Remedy, Verification, VerifyOptions, about, verify

_TOLD = 20


def verify_command(
    target: Annotated[
        Path | None, typer.Argument(help="A directory of the disk tier; or none, with --tier.")
    ] = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete what is wrong.")] = False,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move what is wrong to where it can be looked at.")
    ] = False,
    limit_rate: shared.RateOption = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="Note here how far it came; go on from there.", dir_okay=False),
    ] = None,
    in_flight: shared.Concurrency = 8,
    max_record_bytes: shared.RecordSize = shared.DEFAULT_RECORD_SIZE,
    as_json: shared.AsJson = False,
) -> None:
    """Read every record and prove it: its bytes, its lengths, its key against its tokens.

    Ends with 1 when something was wrong. With --config, its keys open encrypted records and prove keyed hashes.
    """
    if remove and quarantine:
        raise typer.BadParameter("--remove and --quarantine exclude each other")
    remedy = Remedy.REMOVE if remove else Remedy.QUARANTINE if quarantine else Remedy.KEEP
    spec = shared.spec_of(target, config, tier, rank, in_flight, max_record_bytes)
    selection = shared.selection_of(namespace)
    rate = shared.size_of(limit_rate, "--limit-rate")

    async def work(meter: Meter) -> Verification:
        cipher, hash_key = open_keys(spec.read_config())
        async with open_target(spec, change=remedy is not Remedy.KEEP) as opened:
            noted = None if state is None else StateFile(state, about(opened.name, selection, remedy))
            options = VerifyOptions(
                selection=selection,
                remedy=remedy,
                max_bytes_per_s=rate,
                hash_key=hash_key,
                cipher=cipher,
                state=noted,
            )
            return await verify(opened, options, meter)

    found = shared.run(work)
    shared.say_json(found.as_dict()) if as_json else _print(found, remedy)
    raise typer.Exit(shared.RIGHT if found.right else shared.WRONG)


def _print(found: Verification, remedy: Remedy) -> None:
    told = found.as_dict()
    say(
        f"{found.target}: correct: {shared.number(found.records, 'record')}, corrupt: {found.wrong.total()},"
        f" not readable: {found.errors}; {shared.human(found.bytes)} read"
    )
    say(f"keys: {shared.counted(told['keys'])}")
    if found.resumed:
        say(f"read by an earlier run: {shared.number(found.resumed, 'record')}")
    if found.gone or found.passed_over:
        say(f"evicted meanwhile: {found.gone}; of other namespaces: {found.passed_over}")
    for wrong in found.told[:_TOLD]:
        say(f"{wrong['key']}: {wrong['cause']}: {wrong['message']}")
    if len(found.told) > _TOLD:
        say(f"... --json lists {len(found.told)} of them")
    if found.remedied:
        done = "deleted" if remedy is Remedy.REMOVE else "moved to quarantine"
        say(f"{done}: {shared.number(found.remedied, 'record')}")
