"""`lmcache-async export`: records of a directory or a tier into an archive."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import say
from lmcache_async.records.exporting import Export, Writer, about, export
from lmcache_async.records.flight import Meter
from lmcache_async.records.opening import open_target
from lmcache_async.records.writer import ArchiveWriter, StreamWriter

PIPE = "-"
DEFAULT_PART_BYTES = "16GiB"
_TOLD = 20


def export_command(
    target: Annotated[str, typer.Argument(help="A directory of the disk tier; with --tier the archive.")],
    archive: Annotated[
        str | None, typer.Argument(help="A file; a folder, for parts; or - for stdout.")
    ] = None,
    config: shared.Config = None,
    tier: shared.Tier = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    part_bytes: Annotated[
        str | None,
        typer.Option("--part-bytes", help=f"In a folder, most bytes of each part; {DEFAULT_PART_BYTES}."),
    ] = None,
    limit_rate: shared.RateOption = None,
    in_flight: shared.Concurrency = 4,
    max_record_bytes: shared.RecordSize = shared.DEFAULT_RECORD_SIZE,
    as_json: shared.AsJson = False,
) -> None:
    """Write records into an archive, each proven on its way, what was used last first.

    It has its name when it is whole and on the disk; until then it is NAME.partial, and the same command goes on
    with it. Ends with 1 when records were wrong: those are not in it.
    """
    path, place = _places(target, archive, tier)
    spec = shared.spec_of(path, config, tier, rank, in_flight, max_record_bytes)
    selection = shared.selection_of(namespace)
    rate, most = shared.size_of(limit_rate, "--limit-rate"), shared.size_of(part_bytes, "--part-bytes")
    if most is None and place != PIPE and Path(place).is_dir():
        most = shared.size_of(DEFAULT_PART_BYTES, "--part-bytes")

    async def work(meter: Meter) -> Export:
        async with open_target(spec, change=False) as opened:
            of = about(opened.name, selection)
            writer: Writer = (
                StreamWriter(sys.stdout.fileno(), of)
                if place == PIPE
                else ArchiveWriter(Path(place), of, most)
            )
            return await export(opened, writer, meter, selection=selection, max_bytes_per_s=rate)

    made = shared.run(work)
    in_pipe = place == PIPE
    if as_json:
        shared.say_json(made.as_dict(), to_stderr=in_pipe)
    else:
        _print(made, place, to_stderr=in_pipe)
    raise typer.Exit(shared.RIGHT if made.right else shared.WRONG)


def _places(target: str, archive: str | None, tier: str | None) -> tuple[Path | None, str]:
    """The target's directory, None where a tier is named; and where the archive goes."""
    if tier is not None:
        if archive is not None:
            raise typer.BadParameter(f"{target}: with --tier the archive is all that is named beside it")
        return None, target
    if archive is None:
        raise typer.BadParameter("name the archive behind the directory: a file, a folder, or - for stdout")
    return Path(target), archive


def _print(made: Export, place: str, *, to_stderr: bool) -> None:
    lines = [
        f"{place}: {shared.number(made.records, 'record')}, {shared.human(made.archive_bytes)}"
        f" in {shared.number(made.parts, 'file')}"
        + (f"; written by an earlier run: {shared.number(made.resumed, 'record')}" if made.resumed else "")
    ]
    if made.encrypted:
        lines.append(
            f"encrypted: {shared.number(made.encrypted, 'record')}; loading them needs the same keys"
        )
    if made.passed_over or made.gone:
        lines.append(f"of other namespaces: {made.passed_over}; evicted meanwhile: {made.gone}")
    if not made.right:
        refused = shared.counted(made.as_dict()["refused"])
        lines.append(f"left out: corrupt: {refused}; not readable: {made.errors}")
        lines += [f"{one['key']}: {one['cause']}: {one['message']}" for one in made.told[:_TOLD]]
    for line in lines:
        say(line, to_stderr=to_stderr)
