"""Chunks as files of a directory that one process owns."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
from typing import TYPE_CHECKING, Self

from lmcache_async.errors import TierClosedError, TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.disk.config import DiskConfig
from lmcache_async.plugins.disk.offline import DiskRecords
from lmcache_async.plugins.disk.scrub import scrub
from lmcache_async.plugins.disk.store import RecordStore
from lmcache_async.tiers.answers import reads, settle
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierStatistics
from lmcache_async.tiers.calls import Calls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from lmcache_async.memory.arena import Arena
    from lmcache_async.tiers.offline import OfflineOptions, OfflineStore
    from lmcache_async.types import ChunkKey

_UNBOUNDED = 1 << 62  # a directory named without its config has no limit


class DiskTier(Tier):
    """One file a record, by direct I/O where the file system can.

    A record is written under a temporary name and renamed when it is whole, so whatever kills the
    process, a file under its final name was written to its end. What is there is found again at the
    next start. A record that is being read is not evicted; removing one does not disturb its readers,
    whose file is open. A record found broken is a miss, counted by cause and told at most twice a
    minute, and is deleted or put aside.

    Cancelled, a call that a thread works on ends when the thread has ended; what it published stays.
    """

    config_type = DiskConfig

    def __init__(self, config: DiskConfig) -> None:
        super().__init__(config)
        self._config = config
        self._opened: RecordStore | None = None
        self._scrubs: set[asyncio.Task[ScrubReport]] = set()
        self._scrubbing: asyncio.Task[None] | None = None
        self._max_record_bytes: int | None = None
        self._numbers = itertools.count()  # of reading calls, in their order
        self._calls = Calls()
        self._statistics = TierStatistics(max_bytes=config.max_bytes)

    @classmethod
    def offline(cls, config: DiskConfig, options: OfflineOptions) -> OfflineStore:
        return DiskRecords(config, options)

    @classmethod
    def directory_config(cls, path: Path) -> DiskConfig:
        return DiskConfig(path=path.absolute(), max_bytes=_UNBOUNDED)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            persistent=True,
            removes=True,
            lists=True,
            local_index=True,
            max_concurrency=self._config.io_threads,
        )

    def bind(self, arena: Arena) -> None:
        """A record fits into a slab: a file that is longer is broken."""
        self._max_record_bytes = arena.slab_bytes

    async def contains(self, key: ChunkKey) -> bool:
        return key in self._store.index

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        index = self._store.index
        index.touch(keys, gapless=False)
        return [key in index for key in keys]

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        index = self._store.index
        index.touch(keys, gapless=False)
        for count, key in enumerate(keys):
            if key not in index:
                return count
        return len(keys)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        with self._call() as store:
            buffer = None
            try:
                async with store.using([key]):
                    buffer = await store.read(key, allocate, next(self._numbers))
            except BaseException:
                if buffer is not None:
                    buffer.release()
                raise
            return buffer

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        """`get` for each key; where there is no memory for one in time, those after it are misses."""
        with self._call() as store, reads(len(keys)) as results:
            left = iter([(index, key) for index, key in enumerate(keys) if key in store.index])
            call = next(self._numbers)

            async def work() -> None:
                for index, key in left:
                    if not await settle(results, index, store.read(key, allocate, call)):
                        collections.deque(left, maxlen=0)

            async with store.using(keys):
                await self._side_by_side(work, len(keys))
        return results

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        with self._call() as store:
            await store.write(key, buffer)
            store.index.touch_each([key])

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        results: list[TierError | None] = [None] * len(items)
        with self._call() as store:
            left = iter(enumerate(items))

            async def work() -> None:
                for index, (key, buffer) in left:
                    try:
                        await store.write(key, buffer)
                    except TierError as error:
                        results[index] = error

            await self._side_by_side(work, len(items))
            store.index.touch_each([key for key, _ in items])
        return results

    async def remove(self, key: ChunkKey) -> bool:
        with self._call() as store:
            return await store.delete([key]) == 1

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """Delete the record, or move it to the quarantine; should neither be possible, it is used no more."""
        with self._call() as store:
            return await store.reject(key, cause)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        """Prove every record in the order of the index; closing the tier ends it with TierClosedError."""
        with self._call() as store:
            task = asyncio.ensure_future(scrub(store, max_bytes_per_s))
            self._scrubs.add(task)
            task.add_done_callback(self._scrubs.discard)
            try:
                return await task
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if self._opened is store or (caller is not None and caller.cancelling()):
                    raise
                raise TierClosedError(f"the disk tier of {self._config.root} was closed") from None

    async def keys(self) -> AsyncIterator[ChunkKey]:
        for key in tuple(self._store.index):
            yield key

    async def clear(self) -> int:
        """Delete our records; other files in the directory stay."""
        with self._call() as store:
            return await store.delete(tuple(store.index))

    def statistics(self) -> TierStatistics:
        """After the end: what there was then."""
        if self._opened is not None:
            index = self._opened.index
            self._statistics = TierStatistics(
                chunks=len(index),
                bytes=index.used_bytes,
                max_bytes=index.max_bytes,
                evictions=index.evictions,
                corrupt=self._opened.corrupt.total(),
                corrupt_by_cause=dict(self._opened.corrupt),
            )
        return self._statistics

    async def __aenter__(self) -> Self:
        """Open: the directory is listed, nothing is read.

        Raises:
            ConfigError: `odirect` is true and the file system refuses it.
            TierUnavailableError: Another process has the directory, or it cannot be used.
        """
        self._opened = await RecordStore.open(self._config)
        self._opened.index.on_evicted = self.on_evicted
        if self._max_record_bytes is not None:
            self._opened.max_record_bytes = self._max_record_bytes
        if self._config.scrub_interval_s:
            self._scrubbing = asyncio.create_task(self._scrub_for_ever(self._config.scrub_interval_s))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, after the calls under way have ended. Content stays.

        Cancelled, it waits no longer; the directory stays ours until the last of them has ended.
        """
        store = self._store
        self.statistics()
        self._opened = None
        if self._scrubbing is not None:
            self._scrubbing.cancel()
        for scrubbing in self._scrubs:
            scrubbing.cancel()
        try:
            await self._calls.wait_ended()
        except BaseException:
            store.abandon()
            raise
        store.close()

    async def _scrub_for_ever(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self.scrub(max_bytes_per_s=self._config.scrub_max_bytes_per_s)

    @property
    def _store(self) -> RecordStore:
        if self._opened is None:
            raise TierClosedError(f"the disk tier of {self._config.root} is not open")
        if not self._opened.held:
            raise TierClosedError(
                f"the disk tier of {self._config.root} was opened before this process was forked:"
                " open one here, with a path or a subdirectory of its own"
            )
        return self._opened

    @contextlib.contextmanager
    def _call(self) -> Iterator[RecordStore]:
        """The store, which is not closed meanwhile."""
        store = self._store
        with self._calls.one():
            yield store

    async def _side_by_side(self, work: Callable[[], Coroutine[None, None, None]], num_chunks: int) -> None:
        """As many of `work` as have all the turns there are, with as many again to take them over."""
        count = min(num_chunks, 4 * self._config.io_threads)
        if count == 1:
            await asyncio.sleep(0)  # as a task would: the reads of calls before this one come first
            await work()
        elif count > 1:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(work())
