"""Records from a target into an archive, each proven on its way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import xxhash

from lmcache_async.errors import LMCacheAsyncError, TierError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.records.archive import Frame, record_checksum
from lmcache_async.records.flight import Meter, RateLimit, each, in_order
from lmcache_async.records.namespaces import EVERYTHING, Selection
from lmcache_async.records.proving import Checked, check
from lmcache_async.records.target import Target
from lmcache_async.tiers.rest import Kept
from lmcache_async.types import ChunkKey

T = TypeVar("T")

MAX_TOLD = 100


class Writer(Protocol):
    """Where an archive goes; blocking, one call at a time."""

    nbytes: int
    parts: int

    def open(self) -> set[ChunkKey]: ...
    def append(self, frame: Frame, record: memoryview) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Export:
    """What an export came to.

    Attributes:
        records: Records in the archive, those of an earlier run among them.
        resumed: Of these, how many an earlier run had written.
        bytes: Of the records written now.
        encrypted: Of the records written now, how many are encrypted; they stay so.
        refused: Records that are wrong, by cause; they are not in the archive.
        told: Of those refused and not read the first, each with its cause in a sentence.
        errors: Records that could not be read.
        gone: Records that went meanwhile.
        passed_over: Records of namespaces that were not meant.
        archive_bytes: Of all of the archive's files.
    """

    target: str
    holder: str = ""
    records: int = 0
    resumed: int = 0
    bytes: int = 0
    encrypted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    told: list[dict[str, str]] = field(default_factory=list)
    errors: int = 0
    gone: int = 0
    passed_over: int = 0
    archive_bytes: int = 0
    parts: int = 0
    complete: bool = False

    @property
    def right(self) -> bool:
        return not self.refused and not self.errors

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "held_by_process": self.holder or None,
            "complete": self.complete,
            "records": self.records,
            "resumed": self.resumed,
            "bytes": self.bytes,
            "encrypted": self.encrypted,
            "refused": dict(sorted(self.refused.items())),
            "refused_records": list(self.told),
            "errors": self.errors,
            "gone": self.gone,
            "passed_over": self.passed_over,
            "archive_bytes": self.archive_bytes,
            "parts": self.parts,
        }

    def refuse(self, key: ChunkKey, cause: str, message: str) -> None:
        if cause == "error":
            self.errors += 1
        else:
            self.refused[cause] += 1
        if len(self.told) < MAX_TOLD:
            self.told.append({"key": key.hex(), "cause": cause, "message": message})


@dataclass(frozen=True, slots=True)
class _Ready:
    """A proven record, and the lease that is to be released."""

    frame: Frame
    buffer: Buffer
    encrypted: bool


_Loaded = tuple[Kept, _Ready | Checked | TierError | None]


def about(target: str, selection: Selection) -> bytes:
    """16 bytes that tell one export from another."""
    text = "\0".join((target, *sorted(selection.patterns)))
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))  # the path may be no UTF-8


async def export(
    target: Target,
    writer: Writer,
    meter: Meter,
    *,
    selection: Selection = EVERYTHING,
    max_bytes_per_s: int | None = None,
) -> Export:
    """Write every record of the selection, the most recently used first, prefixes before what follows them.

    So an archive that was cut, or that does not fit into its next place, has what is worth most. Cancelled or
    killed, what is written stays, and the same export goes on behind it.

    Raises:
        ConfigError: The target cannot list what it has; the archive is complete, or of another export.
        TierUnavailableError: The target does not answer.
        LMCacheAsyncError: The archive cannot be written.
    """
    report = Export(target.name, target.holder)
    kept = sorted(await target.list(), key=lambda one: one.rank, reverse=True)
    with contextlib.ExitStack() as undo:
        workers = WorkerPool(2, thread_name_prefix="lmcache-prove")
        undo.callback(workers.shutdown)
        pen = WorkerPool(1, thread_name_prefix="lmcache-archive")
        undo.callback(pen.shutdown)
        undo.callback(writer.close)
        there = await _written(pen, writer.open)
        report.records = report.resumed = len(there)
        left = [one for one in kept if one.key not in there]
        await _export(
            target, writer, meter, left, selection, RateLimit(max_bytes_per_s), report, workers, pen
        )
        await _written(pen, writer.finish)
    report.archive_bytes, report.parts = writer.nbytes, writer.parts
    report.complete = True
    return report


async def _export(
    target: Target,
    writer: Writer,
    meter: Meter,
    left: Sequence[Kept],
    selection: Selection,
    rate: RateLimit,
    report: Export,
    workers: Executor,
    pen: Executor,
) -> None:
    meter.begin("records", records=len(left), nbytes=sum(one.nbytes for one in left) or None)
    load = functools.partial(_load, target, selection, workers)
    loading = in_order(each(left), load, in_flight=target.in_flight, discard=_discard)
    async with contextlib.aclosing(loading) as results:
        async for one, loaded in results:
            nbytes = 0
            if isinstance(loaded, _Ready):
                with loaded.buffer as buffer:
                    nbytes = buffer.nbytes
                    await _written(pen, functools.partial(writer.append, loaded.frame, buffer.view))
                report.records += 1
                report.bytes += nbytes
                report.encrypted += loaded.encrypted
            elif loaded is None:
                report.gone += 1
            elif isinstance(loaded, TierError):
                report.refuse(one.key, "error", str(loaded))
            elif loaded.taken:
                report.refuse(one.key, loaded.cause, loaded.message)
            else:
                report.passed_over += 1
            meter.advance(1, nbytes)
            await rate.wait(nbytes)


async def _load(target: Target, selection: Selection, workers: Executor, kept: Kept) -> _Loaded:
    try:
        if selection.patterns and target.reads_heads:
            looked = await target.head(kept)
            if looked is None or not selection.takes(looked.namespace):
                return kept, None if looked is None else Checked(looked, taken=False)
        buffer = await target.load(kept)
    except TierUnavailableError:
        raise
    except TierError as error:
        return kept, error
    if buffer is None:
        return kept, None
    with buffer:
        proven = await in_thread(workers, functools.partial(_prove, kept, buffer.view, selection))
        if isinstance(proven, Checked):
            return kept, proven
        frame, encrypted = proven
        ready = buffer.retain()
        ready.resize(frame.nbytes)
        return kept, _Ready(frame, ready, encrypted)


def _prove(kept: Kept, record: memoryview, selection: Selection) -> Checked | tuple[Frame, bool]:
    checked = check(kept, iter([record]), selection=selection)
    if not checked.taken or checked.cause or checked.looked is None:
        return checked
    nbytes = checked.looked.record_bytes
    frame = Frame(kept.key, kept.stamp, nbytes, record_checksum(record[:nbytes]))
    return frame, bool(checked.looked.key_id)


def _discard(loaded: _Loaded) -> None:
    if isinstance(ready := loaded[1], _Ready):
        ready.buffer.release()


async def _written(pen: Executor, call: Callable[[], T]) -> T:
    try:
        return await in_thread(pen, call)
    except asyncio.CancelledError:
        raise
    except OSError as error:
        raise LMCacheAsyncError(
            f"the archive cannot be written: {error}; what is there of it stays, and the same command goes on"
        ) from error
