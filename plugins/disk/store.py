"""Index, files and threads as one: what is counted is what lies on disk, at every moment."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
from typing import TYPE_CHECKING

from lmcache_async.errors import ChunkCorruptError, TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.header import MAX_RECORD_BYTES
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.plugins.disk.changing import ChangingKeys
from lmcache_async.plugins.disk.io import Proven, too_long
from lmcache_async.plugins.disk.opening import open_directory
from lmcache_async.plugins.disk.reading import SharedReads
from lmcache_async.plugins.disk.turns import Turns
from lmcache_async.plugins.disk.workers import Workers, end
from lmcache_async.plugins.disk.writing import RecordWrites

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from concurrent.futures import Future

    from lmcache_async.memory.buffer import Buffer
    from lmcache_async.plugins.disk.config import DiskConfig
    from lmcache_async.plugins.disk.io import ReadResult
    from lmcache_async.plugins.disk.opening import OpenDirectory
    from lmcache_async.tiers.base import Allocate
    from lmcache_async.types import ChunkKey

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_DELETE_BATCH = 256  # records deleted by a thread in one call


class RecordStore:
    """The records of one directory, opened. Used on one loop's thread.

    Cancelled, a call that a thread works on ends when that has ended, and what it did is in the index.

    Attributes:
        corrupt: Records found broken, by cause.
        max_record_bytes: What a file may have at most; one that is longer was not written by us.
    """

    def __init__(self, config: DiskConfig, workers: Workers, opened: OpenDirectory) -> None:
        self.max_record_bytes = MAX_RECORD_BYTES
        self.index = opened.index
        self.corrupt: collections.Counter[str] = collections.Counter(opened.corrupt)
        self._root = config.root
        self._workers = workers
        self._directory = opened.directory
        self._files = opened.files
        self._logger = LimitedLogger(logging.getLogger(__name__))
        self._changing = ChangingKeys()
        self._writes = RecordWrites(opened.index, opened.files, workers, self._changing)
        self._turns = Turns(2 * config.io_threads)  # while one each is read, one each waits for its thread

    @classmethod
    async def open(cls, config: DiskConfig) -> RecordStore:
        """Take the directory over: sweep, list, and drop what is too much or broken.

        Raises:
            ConfigError: Direct I/O is wanted and refused.
            TierUnavailableError: Another process has the directory, or it cannot be used.
        """
        workers = Workers(config.io_threads, "lmcache-disk")
        reads = SharedReads(threads=config.io_threads, ask=workers.ask)
        future = workers.start(open_directory, config, reads)
        try:
            await end(future, abandon=True)
        except BaseException:
            workers.abandon(lambda: _close_opened(future))
            raise
        try:
            return cls(config, workers, future.result())
        except OSError as error:
            workers.close()
            raise TierUnavailableError(f"cannot open {config.root}: {error}") from error
        except BaseException:
            workers.close()
            raise

    @property
    def held(self) -> bool:
        """Whether the directory is ours; not so in a forked child."""
        return self._directory.held

    def close(self) -> None:
        self._workers.close()
        self._directory.close()

    def abandon(self) -> None:
        """Close as soon as the calls that threads work on have ended, without waiting for that.

        Until then the directory is ours: what they still write goes to no other owner's.
        """
        self._workers.abandon(self._directory.close)

    async def read(self, key: ChunkKey, allocate: Allocate, call: int) -> Buffer | None:
        """The record in a buffer of `allocate`'s; None when it is not there or not whole.

        Reads of lower calls come first.

        Raises:
            TierUnavailableError: The file cannot be read.
        """
        entry = self.index.entry(key)
        if entry is None:
            return None
        if entry.nbytes > self.max_record_bytes:  # no memory will ever hold it
            await self._not_read(key, too_long(key, entry.nbytes, self.max_record_bytes), is_indexed=True)
            return None
        with self.index.reading(key):
            buffer = await allocate(entry.nbytes)
            try:
                async with self._turns.turn(call):
                    future = self._workers.start(self._files.read, key, buffer.padded_view)
                    await end(future)
                result = future.result()
                if result.error is None:
                    buffer.resize(result.nbytes)
                    return buffer
            except BaseException:
                buffer.release()
                raise
            buffer.release()
        await self._not_read(key, result, entry is self.index.entry(key))
        return None

    async def prove(self, key: ChunkKey, scratch: memoryview) -> Proven | None:
        """Whether the record is whole and unchanged, read in pieces into `scratch`; None if it is not there."""
        entry = self.index.entry(key)
        if entry is None or key in self._changing:
            return None
        with self.index.reading(key):
            future = self._workers.start(self._files.prove, key, entry.nbytes, scratch)
            await end(future)
        result = future.result()
        if result.error is None:
            return Proven(entry.nbytes, "")
        try:
            await self._not_read(key, result, entry is self.index.entry(key))
        except TierUnavailableError as error:
            self._logger.report("scrub", "scrub: %s; it is tried again the next time", error)
            return Proven(0, "error")
        return (
            Proven(entry.nbytes, result.error.cause) if isinstance(result.error, ChunkCorruptError) else None
        )

    async def write(self, key: ChunkKey, buffer: Buffer) -> None:
        """Publish the record, unless it is there already; a write of it under way is waited for.

        Raises:
            TierFullError: There is no room for it.
            TierUnavailableError: The file cannot be written.
            ChunkCorruptError: The bytes are no record of that length.
        """
        async with self._changing.alone_with(key):
            if not await self._is_there(key):
                await self._write(key, buffer)

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """Set a record aside whose content was proven wrong; whether it was there. It is given no more."""
        async with self._changing.alone_with(key):
            return await self._set_aside(key, cause)

    async def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Delete the records; how many there were.

        Raises:
            TierUnavailableError: Some could not be deleted; those are still in the index.
        """
        deleted = 0
        left = collections.deque(keys)
        while left:
            batch: list[ChunkKey] = []
            while left and len(batch) < _DELETE_BATCH and left[0] not in self._changing:
                batch.append(left.popleft())
            if batch:
                with self._changing.change(batch):
                    deleted += await self._delete(batch)
            else:
                await self._changing.ended(left[0])
        return deleted

    @contextlib.asynccontextmanager
    async def using(self, keys: Sequence[ChunkKey]) -> AsyncIterator[None]:
        """These chunks of one prompt are read: noted here, and on disk while a first one is read."""
        self.index.touch(keys, gapless=True)
        stamps = self.index.restamp(keys)
        noted = self._workers.start(self._files.set_stamps, stamps) if stamps else None
        try:
            yield
        finally:
            if noted is not None:
                await end(noted)

    async def _not_read(self, key: ChunkKey, result: ReadResult, is_indexed: bool) -> None:
        """A record is not there, or it is broken: no hit any more. Anything else is an error."""
        error = result.error
        if isinstance(error, ChunkCorruptError):
            self.corrupt[error.cause] += 1
            line = "%s is broken (%s: %s); a miss, and no hit any more"
            self._logger.report(f"corrupt.{error.cause}", line, self._path(key), error.cause, error)
            if is_indexed and key not in self._changing:
                with self._changing.change([key]):
                    await self._set_aside(key, error.cause)
        elif isinstance(error, FileNotFoundError):
            if is_indexed and key not in self._changing and (entry := self.index.take(key)) is not None:
                self.index.forget(entry)
        else:
            raise TierUnavailableError(f"cannot read {self._path(key)}: {error}") from error

    async def _is_there(self, key: ChunkKey) -> bool:
        """Whether the index has it and it lies there: somebody may have emptied the directory."""
        entry = self.index.entry(key)
        if entry is None:
            return False
        if await self._workers.run(self._files.has, key, entry.nbytes):
            return True
        await self._delete([key])
        return False

    async def _write(self, key: ChunkKey, buffer: Buffer) -> None:
        view = buffer.padded_view
        error = await self._writes.attempt(key, view)
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            # The file system has less room than we were told: give some up, once.
            with contextlib.suppress(TierFullError):  # nothing to give up
                error = await self._writes.attempt(key, view, evict_bytes=len(view))
        if error is None:
            return
        if isinstance(error, TierError):
            raise error
        kind = TierFullError if error.errno in _NO_SPACE else TierUnavailableError
        raise kind(f"cannot write {self._path(key)}: {error}") from error

    async def _delete(self, keys: Sequence[ChunkKey]) -> int:
        entries = {key: entry for key in keys if (entry := self.index.take(key)) is not None}
        if not entries:
            return 0
        future = self._workers.start(self._files.unlink, tuple(entries))
        try:
            await end(future)
        finally:
            left, error = (frozenset(entries), None) if future.cancelled() else future.result()
            for key, entry in entries.items():
                if key in left:
                    self.index.restore(key, entry)
                else:
                    self.index.forget(entry)
        if error is not None:
            raise TierUnavailableError(f"cannot delete records of {self._root}: {error}") from error
        return len(entries)

    async def _set_aside(self, key: ChunkKey, cause: str) -> bool:
        entry = self.index.take(key)
        if entry is None:
            return False
        future = self._workers.start(self._files.reject, key, cause)
        try:
            await end(future)
        finally:
            if future.cancelled() or (error := future.result()) is not None:
                self.index.condemn(key, entry)
            else:
                self.index.forget(entry)
        if error is not None:
            self._logger.report(
                "condemned", "cannot delete %s: %s; it is used no more", self._path(key), error
            )
        return True

    def _path(self, key: ChunkKey) -> str:
        return str(self._directory.record_path(key))


def _close_opened(future: Future[OpenDirectory]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().directory.close()
