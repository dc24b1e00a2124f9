"""`lmcache-async copy`: copy records from one directory or tier to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, human, number
from lmcache_async.maintenance.concurrency import Progress
from lmcache_async.maintenance.copy import CopyReport, copy
from lmcache_async.maintenance.namespaces import Selection
from lmcache_async.maintenance.stores import MAX_RECORD_BYTES, Stores


def copy_command(
    source: Annotated[
        str,
        Argument(
            metavar="SRC",
            help="A directory of the disk tier; the id of a tier in --config; or a tier as JSON.",
        ),
    ],
    destination: Annotated[
        str, Argument(metavar="DST", help="Destination, given like SRC. A missing directory is created.")
    ],
    config: shared.Config = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    max_bytes: shared.MaxCopied = None,
    limit_rate: shared.Rate = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only report what would be copied.")] = False,
    in_flight: shared.Concurrency = 4,
    max_record_bytes: shared.RecordSize = MAX_RECORD_BYTES,
    as_json: JSONFlag = False,
) -> None:
    """Copy records from one directory or tier to another, each verified on the way.

    Records that DST has are skipped. The most recently used records are copied first. After an interruption the
    same command copies the rest. Exits with 1 if a record was refused, for example because it is damaged or DST is full.
    """
    stores = Stores(config, rank, in_flight, max_record_bytes)
    from_, (path, tier) = _place(source, config), _place(destination, config)

    async def work(show: Progress) -> CopyReport:
        selection = Selection(tuple(namespace or ()))
        async with contextlib.AsyncExitStack() as stack:
            opened = await stack.enter_async_context(stores.open(*from_, argument="SRC"))
            into = await stack.enter_async_context(
                stores.open(path, tier, change=not dry_run, create=True, argument="DST")
            )
            return await copy(
                opened,
                into,
                show,
                selection=selection,
                max_bytes=max_bytes,
                max_bytes_per_s=limit_rate,
                dry_run=dry_run,
            )

    shared.run(work, _lines, as_json=as_json, passed=lambda done: not done.refused)


def _place(text: str, config: Path | None) -> tuple[str | None, str | None]:
    """Return (directory, None) or (None, tier). A tier is JSON or, with `--config`, a name without a slash."""
    is_tier = text.lstrip().startswith("{") or (config is not None and "/" not in text)
    return (None, text) if is_tier else (text, None)


def _lines(done: CopyReport) -> Iterator[str]:
    verb = "to copy" if done.dry_run else "copied"
    # A dry run without a limit reads no records of a tier, whose listing has no sizes.
    size = human(done.bytes) if done.bytes or not done.records else "of unknown size"
    yield (
        f"{done.source} to {done.destination}: {verb}: {number(done.records, 'record')}, {size};"
        f" already there: {done.there}"
    )
    yield from shared.not_copied(done)
