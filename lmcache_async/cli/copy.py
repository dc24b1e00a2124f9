"""`lmcache-async copy`: copy records from one directory or tier to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, human, number
from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.copy import CopyReport, copy
from lmcache_async.maintenance.stores import MAX_RECORD_BYTES, StoreSpec, open_store
from lmcache_async.tiers.offline import OfflineStore


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
    max_bytes: shared.MaxCopied = None,
    limit_rate: shared.Rate = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be copied.")] = False,
    in_flight: shared.Concurrency = 4,
    max_record_bytes: shared.RecordSize = MAX_RECORD_BYTES,
    as_json: JSONFlag = False,
) -> None:
    """Copy records from one directory or tier to another, each verified on the way.

    Records that DST has are skipped. The most recently used records are copied first. After an interruption the
    same command copies the rest. Exits with 1 if a record was refused, because it is damaged or DST has no room.
    """
    selection = shared.selection_of(namespace)
    spec = StoreSpec(None, config, None, rank, in_flight, max_record_bytes)

    async def work(meter: Meter) -> CopyReport:
        from_spec, to_spec = (
            spec.placed(None, text) if _is_tier(text, config) else spec.placed(Path(text), None)
            for text in (source, destination)
        )
        async with contextlib.AsyncExitStack() as stack:
            opened = await stack.enter_async_context(open_store(from_spec, change=False))
            into: OfflineStore | str = str(to_spec.path)
            if not dry_run or to_spec.path is None or to_spec.path.exists():
                into = await stack.enter_async_context(open_store(to_spec, change=not dry_run, create=True))
            return await copy(
                opened,
                into,
                meter,
                selection=selection,
                max_bytes=max_bytes,
                max_bytes_per_s=limit_rate,
                dry_run=dry_run,
            )

    shared.run(work, _lines, as_json=as_json, passed=lambda done: not done.refused)


def _is_tier(text: str, config: Path | None) -> bool:
    """Whether an argument is a tier: as JSON or, with `--config`, a name without a slash."""
    return text.lstrip().startswith("{") or (config is not None and "/" not in text)


def _lines(done: CopyReport) -> Iterator[str]:
    verb = "to copy" if done.dry_run else "copied"
    yield (
        f"{done.source} to {done.destination}: {verb}: {number(done.records, 'record')},"
        f" {human(done.bytes)}; already there: {done.there}"
    )
    yield from shared.not_copied(done)
