"""Shared options and output of the commands on records."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
import uvloop
from typer import Argument, Option

from lmcache_async.cli.output import (
    IN_USE,
    PASSED,
    PROBLEM,
    STOPPED,
    counted,
    end_process,
    number,
    print_json,
    progress,
    refuse,
    say,
)
from lmcache_async.config import format_size, parse_size
from lmcache_async.errors import TierInUseError
from lmcache_async.maintenance.concurrency import Progress
from lmcache_async.maintenance.copy import CopyCounts
from lmcache_async.maintenance.stores import MAX_RECORD_BYTES

ReportT = TypeVar("ReportT")

LISTED = 20
"""Maximum number of records that the text output lists with their cause."""

WHY_NOT_READABLE = "`lmcache-async verify` lists the records that are not readable, with the causes"
"""A line for the output of commands that only count them."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_duration(text: str) -> float:
    """Parse a duration such as 90s, 30m, 12h, 7d or 2w to seconds."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,3})?)([smhdw])", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text}: expected a number with the unit s, m, h, d or w, such as 7d")
    return float(match[1]) * _UNITS[match[2]]


def size_option(help: str, **options: Any) -> Any:
    """Return an option whose value is a size."""

    def parse(text: Any) -> int:
        try:
            return parse_size(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text}: {error}") from None

    return Option(metavar="SIZE", parser=parse, help=help, **options)


Directory = Annotated[
    str | None, Argument(metavar="TARGET", help="A directory of the disk tier; omit it with --tier.")
]
Config = Annotated[Path | None, Option(help="Config file of the engine.", dir_okay=False, exists=True)]
Tier = Annotated[str | None, Option(help="The id of a tier in --config, or a tier as JSON.")]
Rank = Annotated[int | None, Option(min=0, help="Rank whose directory is used, if there are several.")]
Namespaces = Annotated[
    list[str] | None,
    Option(
        "--namespace",
        help="Only records of this namespace: the start of its id, FIELD=VALUE, or `encrypted`. May be repeated.",
    ),
]
Concurrency = Annotated[int, Option(min=1, max=64, help="Number of concurrent records.")]
RecordSize = Annotated[
    int,
    size_option(
        "Memory for each record that is read as a whole.", show_default=format_size(MAX_RECORD_BYTES)
    ),
]
Rate = Annotated[int | None, size_option("Maximum bytes per second, such as 100MB.")]
MaxCopied = Annotated[int | None, size_option("Maximum bytes to copy.")]


def run(
    work: Callable[[Progress], Coroutine[Any, Any, ReportT]],
    lines: Callable[[ReportT], Iterator[str]],
    *,
    as_json: bool,
    passed: Callable[[ReportT], object],
) -> NoReturn:
    """Run the work of a command, print its report as text or JSON, and exit.

    The exit code is 0 if the report has passed, else 1. After Ctrl-C, running calls are awaited; a second Ctrl-C ends
    the process at once.
    """

    async def main(show: Progress) -> ReportT:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop() -> None:
            loop.add_signal_handler(signal.SIGINT, end_process, STOPPED)
            say("stopping when the running calls end; Ctrl-C again stops at once", to_stderr=True)
            if task is not None:
                task.cancel()

        loop.add_signal_handler(signal.SIGINT, stop)
        loop.add_signal_handler(signal.SIGTERM, end_process, 128 + signal.SIGTERM)  # shows the cursor again
        try:
            return await work(show)
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)  # restores KeyboardInterrupt

    try:
        with progress() as show:
            report = uvloop.run(main(show))
    except (KeyboardInterrupt, asyncio.CancelledError):
        refuse("stopped; completed work is kept, and the same command continues or starts again", STOPPED)
    except TierInUseError as error:
        refuse(f"{error}; it can be read while that process runs, but not changed", IN_USE)
    if as_json:
        print_json(report)
    else:
        for line in lines(report):
            say(line)
    raise typer.Exit(PASSED if passed(report) else PROBLEM)


def not_copied(counts: CopyCounts) -> Iterator[str]:
    if counts.encrypted:
        yield f"encrypted: {number(counts.encrypted, 'record')}; loading them needs the same keys"
    if counts.passed_over:
        yield f"of other namespaces: {counts.passed_over}"
    if counts.gone:
        yield f"deleted from the source meanwhile: {counts.gone}"
    if counts.skipped:
        cause = "a destination is full" if counts.refused["full"] else "--max-bytes is reached"
        yield f"not copied because {cause}: {number(counts.skipped, 'record')}"
    if counts.refused:
        yield f"refused: {counted(counts.refused)}"
    yield from listed(counts.refused_records)


def listed(records: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for one in records[:LISTED]:
        yield f"{one['key']}: {one['cause']}: {one['message']}"
    if len(records) > LISTED:
        yield f"... --json lists {len(records)} of them"
