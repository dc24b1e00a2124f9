"""Records from archives into a target: nothing gets in that does not prove itself."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmcache_async.errors import ConfigError, LMCacheAsyncError
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.records.archive import SUFFIX, ArchiveHead, End, Frame
from lmcache_async.records.flight import Meter, RateLimit, in_order
from lmcache_async.records.namespaces import EVERYTHING, Selection
from lmcache_async.records.reader import ArchiveReader, Damage
from lmcache_async.records.saving import Coming, Outcome, Saver
from lmcache_async.records.target import Target
from lmcache_async.records.writer import PARTIAL
from lmcache_async.types import ChunkKey

T = TypeVar("T")

MAX_TOLD = 100
_STEP_NS = 1000  # between the stamps of records that come without: as the disk tier's


@dataclass(slots=True)
class Import:
    """What an import came to.

    Attributes:
        records: Records that are new in the target.
        there: Records that it had already, or that came in the archive before.
        encrypted: Of the new ones, how many are encrypted; they stay so.
        refused: Records that were not let in, by cause: `archive` and `truncated` for what the archive's own
            checksums find, `full` and `too_long` for what has no room, `error`, or a word of `ChunkCorruptError`.
        told: Of those refused the first, each with its cause in a sentence.
        damage: Where an archive is not what was written.
        complete: Whether every archive was read to its end, and nothing is missing.
    """

    target: str
    records: int = 0
    bytes: int = 0
    there: int = 0
    encrypted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    told: list[dict[str, str]] = field(default_factory=list)
    passed_over: int = 0
    damage: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    @property
    def right(self) -> bool:
        return self.complete and not self.refused and not self.damage

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "complete": self.complete,
            "records": self.records,
            "bytes": self.bytes,
            "there": self.there,
            "encrypted": self.encrypted,
            "refused": dict(sorted(self.refused.items())),
            "refused_records": list(self.told),
            "passed_over": self.passed_over,
            "damage": list(self.damage),
        }

    def refuse(self, key: ChunkKey, cause: str, message: str) -> None:
        self.refused[cause] += 1
        if len(self.told) < MAX_TOLD:
            self.told.append({"key": key.hex(), "cause": cause, "message": message})


def archives_in(path: Path) -> list[Path]:
    """The file itself, or the parts in a folder, in order.

    Raises:
        ConfigError: There are none.
    """
    if not path.is_dir():
        if not path.exists() and path.with_name(path.name + PARTIAL).exists():
            raise ConfigError(f"{path} is not complete: its export has not ended; run it again, it goes on")
        return [path]
    parts = sorted(path.glob(f"records-*{SUFFIX}"))
    if not parts:
        raise ConfigError(f"{path} has no archive in it: expected files records-00000{SUFFIX} and so on")
    return parts


async def import_records(
    readers: Sequence[ArchiveReader],
    target: Target,
    meter: Meter,
    *,
    selection: Selection = EVERYTHING,
    max_bytes_per_s: int | None = None,
) -> Import:
    """Save every record that the target lacks, after its proof.

    Cancelled or killed, what was saved stays, whole; the same import goes on with what is missing.

    Args:
        readers: All parts of one archive, in order.

    Raises:
        ConfigError: One is no archive, or parts do not belong together; or the target takes nothing.
        TierUnavailableError: The target does not answer.
        LMCacheAsyncError: An archive cannot be read.
    """
    report = Import(target.name)
    await target.begin_saves()
    known = [reader.nbytes for reader in readers]
    meter.begin("bytes", nbytes=sum(each or 0 for each in known) if None not in known else None)
    with contextlib.ExitStack() as undo:
        eye = WorkerPool(1, thread_name_prefix="lmcache-archive")
        undo.callback(eye.shutdown)
        workers = WorkerPool(2, thread_name_prefix="lmcache-prove")
        undo.callback(workers.shutdown)
        saver = Saver(target, selection, workers)
        coming = _records(readers, target, eye, report, meter, saver)
        rate = RateLimit(max_bytes_per_s)
        try:
            async with contextlib.aclosing(
                in_order(coming, saver.save, in_flight=target.in_flight)
            ) as results:
                async for outcome in results:
                    _count(report, outcome)
                    await rate.wait(outcome.nbytes)
        finally:
            await coming.aclose()
            await target.sync()
    return report


async def _records(
    readers: Sequence[ArchiveReader],
    target: Target,
    eye: Executor,
    report: Import,
    meter: Meter,
    saver: Saver,
) -> AsyncGenerator[Coming, None]:
    """Records that the target lacks, in the order of the archive."""
    before: ArchiveHead | None = None
    stamp = time.time_ns()
    more = False
    for number, reader in enumerate(readers):
        head = await _read(eye, reader, reader.head)
        if head.part != number or (before is not None and head.set_id != before.set_id):
            raise ConfigError(
                f"{reader.name} is part {head.part} of another archive, or parts before it are missing"
            )
        before, more, at = head, False, reader.at
        while (found := await _read(eye, reader, reader.next)) is not None:
            if isinstance(found, Frame):
                stamp -= _STEP_NS
                coming = await _take(reader, found, target, eye, report, found.stamp or stamp, saver)
                if coming is not None:
                    yield coming
            elif isinstance(found, End):
                more = found.more
            else:
                _tell(report, reader, found)
            meter.advance(0, reader.at - at)
            at = reader.at
    if more:
        _tell(report, readers[-1], Damage(readers[-1].at, "further parts belong to it, and are not here"))
    report.complete = not report.damage


async def _take(
    reader: ArchiveReader,
    frame: Frame,
    target: Target,
    eye: Executor,
    report: Import,
    stamp: int,
    saver: Saver,
) -> Coming | None:
    """The record in memory; None where it is not wanted, or not what was written."""
    if frame.key in saver.saved or (await target.has([frame.key]))[0]:
        report.there += 1
        await _read(eye, reader, functools.partial(reader.skip, frame))
        return None
    buffer = await target.allocate(frame.nbytes)
    if buffer is None:
        report.refuse(
            frame.key, "too_long", f"it has {frame.nbytes} bytes: more than --max-record-bytes allows"
        )
        await _read(eye, reader, functools.partial(reader.skip, frame))
        return None
    try:
        wrong = await _read(eye, reader, functools.partial(reader.body, frame, buffer.view))
    except BaseException:
        buffer.release()
        raise
    if wrong:
        buffer.release()
        report.refuse(frame.key, wrong, f"at byte {frame.at} of {reader.name} is not what was written there")
        return None
    return Coming(frame, buffer, stamp)


def _count(report: Import, outcome: Outcome) -> None:
    if outcome.there:
        report.there += 1
    elif not outcome.checked.taken:
        report.passed_over += 1
    elif outcome.refused:
        report.refuse(outcome.key, outcome.refused, outcome.message)
    else:
        looked = outcome.checked.looked
        report.records += 1
        report.bytes += outcome.nbytes
        report.encrypted += looked is not None and looked.key_id != ""


def _tell(report: Import, reader: ArchiveReader, damage: Damage) -> None:
    if len(report.damage) < MAX_TOLD:
        report.damage.append({"archive": reader.name, "at": damage.at, "what": damage.what})


async def _read(eye: Executor, reader: ArchiveReader, call: Callable[[], T]) -> T:
    try:
        return await in_thread(eye, call)
    except OSError as error:
        raise LMCacheAsyncError(f"{reader.name} cannot be read: {error}") from error
