"""Index, files and threads as one: what is counted is what lies on disk, at every moment."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
from typing import TYPE_CHECKING

import aiofiles.os

from lmcache_async.errors import ChunkCorruptError, TierFullError, TierUnavailableError
from lmcache_async.plugins.disk.directory import RecordDirectory
from lmcache_async.plugins.disk.index import DiskIndex
from lmcache_async.plugins.disk.io import RecordFiles, WriteJob, WriteResult, detect_direct
from lmcache_async.plugins.disk.workers import Workers, end
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from lmcache_async.memory.buffer import Buffer
    from lmcache_async.plugins.disk.config import DiskConfig
    from lmcache_async.plugins.disk.index import Reservation
    from lmcache_async.tiers.base import Allocate

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_DELETE_BATCH = 256  # records deleted by a thread in one call


class RecordStore:
    """The records of one directory, opened. Used on one loop's thread.

    Cancelled, a call that a thread works on ends when that has ended, and what it did is in the index.
    """

    def __init__(self, config: DiskConfig, workers: Workers, directory: RecordDirectory) -> None:
        self.index = DiskIndex(config.max_bytes)
        self.corrupt = 0
        self._root = config.root
        self._workers = workers
        self._directory = directory
        self._files = RecordFiles(directory, direct=False, fsync=config.fsync)
        # Keys whose file is being written or deleted; nobody else does either meanwhile.
        self._changing: dict[ChunkKey, asyncio.Future[None]] = {}

    @classmethod
    async def open(cls, config: DiskConfig) -> RecordStore:
        """Take the directory over: sweep, list, and drop what is too much or broken.

        Raises:
            ConfigError: Direct I/O is wanted and refused.
            TierUnavailableError: Another process has the directory, or it cannot be used.
        """
        workers = Workers(config.io_threads, "lmcache-disk")
        store = cls(config, workers, RecordDirectory(config.root))
        future = workers.start(store._take_over, config)
        try:
            await end(future)
            future.result()
        except OSError as error:
            store.close()
            raise TierUnavailableError(f"cannot open {config.root}: {error}") from error
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        self._workers.close()
        self._directory.close()

    async def read(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        """The record in a buffer of `allocate`'s; None when it is not there or not whole.

        Raises:
            TierUnavailableError: The file cannot be read.
        """
        entry = self.index.entry(key)
        if entry is None:
            return None
        with self.index.reading(key):
            buffer = await allocate(entry.nbytes)
            try:
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
        if isinstance(result.error, FileNotFoundError | ChunkCorruptError):
            self.corrupt += isinstance(result.error, ChunkCorruptError)
            if self.index.entry(key) is entry and key not in self._changing:
                await self._delete([key])
            return None
        raise TierUnavailableError(f"cannot read {self._path(key)}: {result.error}") from result.error

    async def write(self, key: ChunkKey, buffer: Buffer) -> None:
        """Publish the record, unless it is there already; a write of it under way is waited for.

        Raises:
            TierFullError: There is no room for it.
            TierUnavailableError: The file cannot be written.
            ChunkCorruptError: The bytes are no record of that length.
        """
        while (change := self._changing.get(key)) is not None:
            await asyncio.wait([change])
        with self._change([key]):
            if not await self._is_there(key):
                await self._write(key, buffer)

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
                deleted += await self._delete(batch)
            else:
                await asyncio.wait([self._changing[left[0]]])
        return deleted

    async def set_stamps(self, stamps: Sequence[tuple[ChunkKey, int]]) -> None:
        """Note on disk when records were used."""
        await aiofiles.os.wrap(self._files.set_stamps)(stamps, executor=self._workers.executor)

    def _take_over(self, config: DiskConfig) -> None:
        found = self._directory.open()
        trial = self._directory.temporary_path(ChunkKey(bytes(KEY_BYTES)))
        direct = detect_direct(trial, config.odirect)
        self._files = RecordFiles(self._directory, direct=direct, fsync=config.fsync)
        broken = [record.key for record in found if not record.whole_pages]
        self.corrupt += len(broken)
        excess = self.index.load([record for record in found if record.whole_pages])
        _, error = self._files.unlink([*broken, *excess])
        if error is not None:
            raise error

    async def _is_there(self, key: ChunkKey) -> bool:
        """Whether the index has it and it lies there: somebody may have emptied the directory."""
        entry = self.index.entry(key)
        if entry is None:
            return False
        with contextlib.suppress(OSError):
            status = await aiofiles.os.stat(self._path(key), executor=self._workers.executor)
            if status.st_size == entry.nbytes:
                return True
        await self._delete_changing([key])
        return False

    async def _write(self, key: ChunkKey, buffer: Buffer) -> None:
        view = buffer.padded_view
        error = await self._try_write(key, view, evict_bytes=0)
        if error is not None and error.errno in _NO_SPACE:
            # The file system has less room than we were told: give some up, once.
            with contextlib.suppress(TierFullError):  # nothing to give up
                error = await self._try_write(key, view, evict_bytes=len(view))
        if error is None:
            return
        kind = TierFullError if error.errno in _NO_SPACE else TierUnavailableError
        raise kind(f"cannot write {self._path(key)}: {error}") from error

    async def _try_write(self, key: ChunkKey, view: memoryview, *, evict_bytes: int) -> OSError | None:
        reservation = self.index.reserve(key, len(view), busy=self._changing, evict_bytes=evict_bytes)
        with self._change(reservation.victims):
            job = WriteJob(key, view, reservation.entry.stamp, tuple(reservation.victims))
            future = self._workers.start(self._files.write, job)
            try:
                await end(future)
            finally:
                self._settle(reservation, future)
        error = future.result().error
        if isinstance(error, ChunkCorruptError):
            raise error
        return error

    def _settle(self, reservation: Reservation, future: Future[WriteResult]) -> None:
        if future.cancelled() or future.exception() is not None:
            self.index.cancel(reservation, left=reservation.victims)
        elif future.result().error is not None:
            self.index.cancel(reservation, left=future.result().left)
        else:
            self.index.commit(reservation)

    async def _delete(self, keys: Sequence[ChunkKey]) -> int:
        with self._change(keys):
            return await self._delete_changing(keys)

    async def _delete_changing(self, keys: Sequence[ChunkKey]) -> int:
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

    @contextlib.contextmanager
    def _change(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Meanwhile nobody else writes or deletes these."""
        done = asyncio.get_running_loop().create_future()
        keys = tuple(keys)
        self._changing.update(dict.fromkeys(keys, done))
        try:
            yield
        finally:
            for key in keys:
                del self._changing[key]
            done.set_result(None)

    def _path(self, key: ChunkKey) -> str:
        return str(self._directory.record_path(key))
