"""Records that lie in a directory, read and changed without a tier. Threads of its own do all of the I/O."""

from __future__ import annotations

import errno
import functools
import mmap
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeVar

from lmcache_async.errors import TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import PAGE, Buffer
from lmcache_async.memory.header import MAX_RECORD_BYTES
from lmcache_async.memory.proof import PIECE_BYTES
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.records.look import HEAD_BYTES, Looked, look_at, missing_bytes
from lmcache_async.records.target import Look, Target
from lmcache_async.tiers.rest import AtRest, Kept, Litter
from lmcache_async.types import ChunkKey

T = TypeVar("T")

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_ALLOCATE_S = 600.0  # for a thread to give back a slab; a disk that takes longer is not there


class DirectoryTarget(Target):
    """A directory of records.

    Args:
        rest: What lies there.
        change: Hold it, to change it; else it is read beside whoever has it.
        max_bytes: Most bytes that records may have there after a `save`; None is what the file system has room for.
        max_record_bytes: Memory for one record that is loaded or saved.
    """

    knows_use = True
    reads_heads = True

    def __init__(
        self,
        rest: AtRest,
        *,
        change: bool,
        max_record_bytes: int,
        in_flight: int = 4,
        max_bytes: int | None = None,
    ) -> None:
        self.name = str(rest.place)
        self.in_flight = in_flight
        self._rest = rest
        self._change = change
        self._max_bytes = max_bytes
        self._sizes: dict[ChunkKey, int] | None = None
        self._used_bytes = 0
        self._slab_bytes = max_record_bytes
        self._arena: Arena | None = None
        self._workers = WorkerPool(in_flight, thread_name_prefix="lmcache-records")
        self._scratch: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(in_flight):
            self._scratch.put(memoryview(mmap.mmap(-1, PIECE_BYTES)))  # aligned

    async def list(self) -> Sequence[Kept]:
        kept = await self._run(self._rest.list)
        self._sizes = {each.key: each.nbytes for each in kept}
        self._used_bytes = sum(self._sizes.values())
        return kept

    async def head(self, kept: Kept) -> Looked | None:
        return await self._run(functools.partial(self._head, kept))

    async def examine(self, kept: Kept, look: Look[T]) -> T | None:
        return await self._run(functools.partial(self._examine, kept, look))

    async def load(self, kept: Kept) -> Buffer | None:
        buffer = await self.allocate(kept.nbytes)
        if buffer is None:
            raise TierError(
                f"record {kept.key.hex()} has {kept.nbytes} bytes, more than the {self._slab_bytes} of"
                " --max-record-bytes"
            )
        try:
            read = await self._run(functools.partial(self._rest.read, kept.key, buffer.padded_view))
            if read is not None:
                buffer.resize(min(read, kept.nbytes))
                return buffer
        except BaseException:
            buffer.release()
            raise
        buffer.release()
        return None

    async def allocate(self, nbytes: int) -> Buffer | None:
        if nbytes > min(self._slab_bytes, MAX_RECORD_BYTES):
            return None
        if self._arena is None:
            slab_bytes = -(-self._slab_bytes // PAGE) * PAGE
            slabs = self.in_flight + 2
            self._arena = Arena(slabs * slab_bytes, slab_bytes, huge_pages=False, prefault=False)
        return await self._arena.lease(nbytes, timeout_s=_ALLOCATE_S)

    async def has(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        if self._sizes is None:
            await self.list()
        assert self._sizes is not None
        return [key in self._sizes for key in keys]

    async def begin_saves(self) -> None:
        half_written, _ = await self.litter()
        await self.sweep(half_written)
        await self.list()

    async def save(self, key: ChunkKey, record: Buffer, stamp: int) -> None:
        assert self._sizes is not None, "`begin_saves` comes first"
        view = record.padded_view
        more_bytes = len(view) - self._sizes.get(key, 0)  # than what it takes the place of
        if self._max_bytes is not None and self._used_bytes + more_bytes > self._max_bytes:
            raise TierFullError(f"{self.name} has {self._used_bytes} bytes of {self._max_bytes}")
        view[record.nbytes :] = bytes(len(view) - record.nbytes)  # not what another record left there
        self._used_bytes += more_bytes  # at once: others are being saved beside it
        try:
            stamp = min(max(stamp, 0), time.time_ns())
            await self._run(functools.partial(self._rest.write, key, view, stamp))
        except BaseException:
            self._used_bytes -= more_bytes
            raise
        self._sizes[key] = len(view)

    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        await self._run(functools.partial(self._rest.remove, tuple(keys)))

    async def set_aside(self, key: ChunkKey, cause: str) -> None:
        await self._run(functools.partial(self._rest.set_aside, key, cause))

    async def sync(self) -> None:
        await self._run(self._rest.sync)

    async def litter(self) -> tuple[Sequence[Litter], Sequence[Litter]]:
        """Files half written, and those put aside as broken."""
        return await self._run(self._rest.litter)

    async def sweep(self, litter: Sequence[Litter]) -> None:
        """Delete these."""
        await self._run(functools.partial(self._rest.sweep, litter))

    async def __aenter__(self) -> Self:
        try:
            await in_thread(self._workers, self._rest.hold if self._change else self._rest.look)
            self.holder = await self._run(lambda: self._rest.holder)
        except BaseException:
            self._workers.shutdown()
            self._rest.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._workers.shutdown()  # nothing runs there any more
        self._rest.close()
        if self._arena is not None:
            self._arena.close()

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await in_thread(self._workers, call)
        except OSError as error:
            kind = TierFullError if error.errno in _NO_SPACE else TierError
            raise kind(f"{self.name}: {error}") from error

    def _head(self, kept: Kept) -> Looked | None:
        scratch = self._scratch.get()
        try:
            nbytes = HEAD_BYTES
            while nbytes:
                read = self._rest.read(kept.key, scratch[:nbytes])
                if read is None:
                    return None
                head = scratch[:read]
                nbytes = missing_bytes(head) if read == nbytes else 0
            return look_at(kept, head)
        finally:
            self._scratch.put(scratch)

    def _examine(self, kept: Kept, look: Look[T]) -> T | None:
        scratch = self._scratch.get()
        try:
            first = self._rest.read(kept.key, scratch[: min(len(scratch), _pages(kept.nbytes))])
            return None if first is None else look(self._pieces(kept, scratch, first))
        except _GoneError:
            return None
        finally:
            self._scratch.put(scratch)

    def _pieces(self, kept: Kept, scratch: memoryview, first: int) -> Iterator[memoryview]:
        yield scratch[:first]
        for offset in range(len(scratch), kept.nbytes, len(scratch)):
            piece = scratch[: min(len(scratch), _pages(kept.nbytes - offset))]
            read = self._rest.read(kept.key, piece, offset)
            if read is None:
                raise _GoneError
            yield piece[:read]


class _GoneError(TierUnavailableError):
    """Evicted between two of its pieces."""


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
