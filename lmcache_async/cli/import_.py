"""`lmcache-async import`: records out of an archive into a directory or a tier."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from lmcache_async.cli import records as shared
from lmcache_async.cli.export import PIPE
from lmcache_async.cli.output import say
from lmcache_async.records.flight import Meter
from lmcache_async.records.importing import Import, archives_in, import_records
from lmcache_async.records.opening import open_target
from lmcache_async.records.reader import ArchiveReader

_TOLD = 20


def import_command(
    archive: Annotated[str, typer.Argument(help="A file; a folder of parts; or - for stdin.")],
    target: Annotated[
        Path | None, typer.Argument(help="A directory of the disk tier; or none, with --tier.")
    ] = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="Most bytes that a directory may have after it."),
    ] = None,
    limit_rate: shared.RateOption = None,
    in_flight: shared.Concurrency = 4,
    max_record_bytes: shared.RecordSize = shared.DEFAULT_RECORD_SIZE,
    as_json: shared.AsJson = False,
) -> None:
    """Save the records of an archive that are not there yet, each after its proof.

    Repeated, it goes on with what is missing. Ends with 1 when something was refused, damaged or missing.
    """
    spec = shared.spec_of(target, config, tier, rank, in_flight, max_record_bytes, max_bytes)
    selection = shared.selection_of(namespace)
    rate = shared.size_of(limit_rate, "--limit-rate")

    async def work(meter: Meter) -> Import:
        with contextlib.ExitStack() as files:
            readers = _readers(archive, files)
            async with open_target(spec, change=True) as opened:
                return await import_records(readers, opened, meter, selection=selection, max_bytes_per_s=rate)

    done = shared.run(work)
    shared.say_json(done.as_dict()) if as_json else _print(done)
    raise typer.Exit(shared.RIGHT if done.right else shared.WRONG)


def _readers(archive: str, files: contextlib.ExitStack) -> list[ArchiveReader]:
    if archive == PIPE:
        return [ArchiveReader(io.FileIO(sys.stdin.fileno(), closefd=False), "stdin")]
    return [
        ArchiveReader(files.enter_context(path.open("rb", buffering=0)), str(path))
        for path in archives_in(Path(archive))
    ]


def _print(done: Import) -> None:
    told = done.as_dict()
    say(
        f"{done.target}: {shared.number(done.records, 'record')} saved, {shared.human(done.bytes)};"
        f" already there: {done.there}"
    )
    if done.encrypted:
        say(f"encrypted: {shared.number(done.encrypted, 'record')}; loading them needs the same keys")
    if done.passed_over:
        say(f"of other namespaces: {done.passed_over}")
    if done.refused:
        say(f"refused: {shared.counted(told['refused'])}")
    for refused in done.told[:_TOLD]:
        say(f"{refused['key']}: {refused['cause']}: {refused['message']}")
    for damage in done.damage[:_TOLD]:
        say(f"{damage['archive']}, byte {damage['at']}: {damage['what']}")
