"""Shared options, progress bar and output of the commands on records."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn, Protocol, Self, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lmcache_async.cli.output import (
    IN_USE,
    PASSED,
    PROBLEM,
    STOPPED,
    counted,
    number,
    print_json,
    refuse,
    say,
)
from lmcache_async.config import format_size, parse_size
from lmcache_async.errors import LMCacheAsyncError, TierInUseError
from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.copy import CopyCounts
from lmcache_async.maintenance.namespaces import Selection
from lmcache_async.maintenance.stores import MAX_RECORD_BYTES, StoreSpec


class Report(Protocol):
    """The result of a command."""

    def as_dict(self) -> dict[str, Any]: ...


T = TypeVar("T")
ReportT = TypeVar("ReportT", bound=Report)

LISTED = 20
"""Records that are listed with their cause, without `--json`."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Directory = Annotated[
    Path | None, typer.Argument(metavar="TARGET", help="A directory of the disk tier; omit it with --tier.")
]
Config = Annotated[
    Path | None, typer.Option("--config", help="Config file of the engine.", dir_okay=False, exists=True)
]
Tier = Annotated[str | None, typer.Option("--tier", help="The id of a tier in --config, or a tier as JSON.")]
Rank = Annotated[
    int | None, typer.Option("--rank", min=0, help="Rank whose directory is used, if there are several.")
]
Namespaces = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        help="Only records of this namespace: the start of its id, FIELD=VALUE, or `encrypted`. May be repeated.",
    ),
]
Concurrency = Annotated[int, typer.Option("--in-flight", min=1, max=64, help="Number of concurrent records.")]
RecordSize = Annotated[
    str, typer.Option("--max-record-bytes", help="Memory for a record that is read as a whole.")
]
RateOption = Annotated[
    str | None, typer.Option("--limit-rate", metavar="SIZE", help="Maximum bytes per second, such as 100MB.")
]
DEFAULT_RECORD_SIZE = format_size(MAX_RECORD_BYTES)


def spec_of(
    path: Path | None,
    config: Path | None,
    tier: str | None,
    rank: int | None,
    in_flight: int,
    max_record_bytes: str,
) -> StoreSpec:
    return StoreSpec(
        path=path,
        config=config,
        tier=tier,
        rank=rank,
        in_flight=in_flight,
        max_record_bytes=size_of(max_record_bytes, "--max-record-bytes") or MAX_RECORD_BYTES,
    )


def place_spec(
    text: str, config: Path | None, rank: int | None, in_flight: int, max_record_bytes: str
) -> StoreSpec:
    """Parse an argument that is a directory or a tier.

    JSON is a tier. With `--config`, a name without a slash is the id of one of its tiers.
    """
    is_tier = text.lstrip().startswith("{") or (config is not None and "/" not in text)
    path, tier = (None, text) if is_tier else (Path(text), None)
    return spec_of(path, config, tier, rank, in_flight, max_record_bytes)


def selection_of(patterns: list[str] | None) -> Selection:
    try:
        return Selection(tuple(patterns or ()))
    except LMCacheAsyncError as error:
        raise typer.BadParameter(str(error)) from None


def size_of(text: str | None, option: str) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text}: {error}") from None


def seconds_of(text: str | None, option: str) -> float | None:
    """Parse a duration such as 90s, 30m, 12h, 7d or 2w."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhdw])", text.strip())
    if match is None:
        raise typer.BadParameter(
            f"{option} {text}: expected a number with the unit s, m, h, d or w, such as 7d"
        )
    return float(match[1]) * _UNITS[match[2]]


class Bar(Meter):
    """Progress bar on stderr, cleared at the end."""

    def __init__(self) -> None:
        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task: TaskID | None = None
        self._in_bytes = False

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, what: str, *, records: int | None = None, nbytes: int | None = None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._in_bytes = nbytes is not None or records is None
        counters = (
            (DownloadColumn(binary_units=True), TransferSpeedColumn())
            if self._in_bytes
            else (MofNCompleteColumn(),)
        )
        self._progress.columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            *counters,
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task(what, total=nbytes if self._in_bytes else records)

    def advance(self, records: int, nbytes: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=nbytes if self._in_bytes else records)


def run(work: Callable[[Meter], Coroutine[Any, Any, T]]) -> T:
    """Run the work and return its result. An expected error ends the command with its message."""
    try:
        with Bar() as meter, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work(meter))
    except KeyboardInterrupt:
        refuse("stopped; completed work is kept, and the same command continues or starts again", STOPPED)
    except TierInUseError as error:
        refuse(f"{error}; it can be read while that process runs, but not changed", IN_USE)
    except (LMCacheAsyncError, OSError) as error:
        refuse(error)


def finish(
    report: ReportT, print_text: Callable[[ReportT], None], *, as_json: bool, passed: bool
) -> NoReturn:
    """Print the report as text or JSON, and exit with 0 if the command passed, else with 1."""
    if as_json:
        print_json(report.as_dict())
    else:
        print_text(report)
    raise typer.Exit(PASSED if passed else PROBLEM)


def say_not_copied(counts: CopyCounts) -> None:
    if counts.encrypted:
        say(f"encrypted: {number(counts.encrypted, 'record')}; loading them needs the same keys")
    if counts.passed_over:
        say(f"of other namespaces: {counts.passed_over}")
    if counts.gone:
        say(f"deleted from the source meanwhile: {counts.gone}")
    if counts.skipped:
        cause = "a destination is full" if counts.refused["full"] else "--max-bytes is reached"
        say(f"not copied because {cause}: {number(counts.skipped, 'record')}")
    if counts.refused:
        say(f"refused: {counted(dict(counts.refused))}")
    say_listed(counts.listed)


def say_listed(records: Sequence[Mapping[str, str]]) -> None:
    for one in records[:LISTED]:
        say(f"{one['key']}: {one['cause']}: {one['message']}")
    if len(records) > LISTED:
        say(f"... --json lists {len(records)} of them")
