"""Offline access to the directory of a disk tier: read it while an engine has it open, or lock and change it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import mmap
import os
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from lmcache_async.errors import (
    ChunkCorruptError,
    ConfigError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.header import MAX_RECORD_BYTES, peek_sizes
from lmcache_async.memory.record import PIECE_BYTES
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.plugins.disk.config import DiskConfig
from lmcache_async.plugins.disk.directory import (
    NO_SPACE,
    QUARANTINE_FOLDER,
    QUARANTINE_NAME,
    TEMPORARY_FOLDER,
    TEMPORARY_NAME,
    RecordDirectory,
    lock_holder,
)
from lmcache_async.plugins.disk.files import RecordFiles, pieces, read_all
from lmcache_async.tiers.offline import LeftoverFile, OfflineOptions, OfflineStore, StoredRecord, Visit
from lmcache_async.types import ChunkKey

T = TypeVar("T")

_HEADER_BYTES = 16 << 10  # enough for nearly every header
_ALLOCATE_S = 600.0  # longest wait for a slab; a disk that takes longer is considered to hang
_RANK_DIRECTORY = re.compile(r"(dp[0-9]+|(dp[0-9]+-)?rank-[0-9]+)")  # the directory of one rank or replica


class DiskRecords(OfflineStore):
    """The records of one directory of the disk tier.

    A record's file is written under a temporary name, renamed when it is complete, and never written to
    again. An open file is therefore a whole record, also when the engine deletes it meanwhile, and reading
    needs no lock.
    """

    knows_use = True
    reads_headers = True

    def __init__(self, config: DiskConfig, options: OfflineOptions) -> None:
        self.name = str(config.root)
        self.in_flight = options.in_flight
        self._root = config.root
        self._options = options
        self._max_bytes = config.max_bytes
        self._sizes: dict[ChunkKey, int] | None = (
            None  # of the records, also those being written; None until needed
        )
        self._used_bytes = 0  # sum of `_sizes`
        self._sizes_lock = asyncio.Lock()  # held while the directory is listed for `_sizes`, and by deletions
        self._directory = RecordDirectory(config.root)
        self._direct_files = RecordFiles(self._directory, direct=True, fsync=True)  # for reading
        # Writes go through the page cache and are synced. Direct I/O would need a trial, which writes a file.
        self._files = RecordFiles(self._directory, direct=False, fsync=True)
        self._changed: set[str] = set()  # folders with names that are not durable yet
        self._arena: Arena | None = None
        self._workers = WorkerPool(self.in_flight, thread_name_prefix="lmcache-records")
        self._scratch: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(self.in_flight):
            self._scratch.put(memoryview(mmap.mmap(-1, PIECE_BYTES)))  # aligned

    async def list(self) -> Sequence[StoredRecord]:
        return await self._run(lambda: list(self._directory.scan()))

    async def examine(self, record: StoredRecord, visit: Visit[T], *, header_only: bool = False) -> T | None:
        return await self._run(self._examine, record.key, visit, header_only)

    async def load(self, record: StoredRecord) -> Buffer | None:
        buffer = await self.allocate(record.nbytes)
        if buffer is None:
            raise TierError(
                f"record {record.key.hex()} has {record.nbytes} bytes, more than the {self._options.max_record_bytes} of"
                " --max-record-bytes"
            )
        with contextlib.ExitStack() as undo:
            undo.callback(buffer.release)
            read = await self._run(self._read, record.key, buffer.padded_view)
            if read is None:
                return None
            buffer.resize(min(read, record.nbytes))
            undo.pop_all()
        return buffer

    async def allocate(self, nbytes: int) -> Buffer | None:
        if nbytes > min(self._options.max_record_bytes, MAX_RECORD_BYTES):
            return None
        if self._arena is None:
            self._arena = self._options.make_arena(self.in_flight + 2)
        return await self._arena.lease(nbytes, timeout_s=_ALLOCATE_S)

    async def has(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        sizes = await self._known_sizes()
        return [key in sizes for key in keys]

    async def prepare_writes(self) -> None:
        unfinished, _ = await self.leftovers()
        await self.delete_files(unfinished)

    async def write(self, key: ChunkKey, record: Buffer, used_ns: int) -> None:
        sizes = await self._known_sizes()
        view = record.padded_view
        replaced_bytes = sizes.get(key, 0)
        if self._used_bytes + len(view) - replaced_bytes > self._max_bytes:
            raise TierFullError(f"{self.name} has {self._used_bytes} bytes of {self._max_bytes}")
        self._set_size(key, len(view))  # before the first await: other records are being written
        try:
            await self._run(self._write, key, view, min(max(used_ns, 0), time.time_ns()))
        except TierError:  # not after a cancellation: the record may be written
            self._set_size(key, replaced_bytes)
            raise

    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        async with self._sizes_lock:
            await self._run(self._unlink, [self._directory.record_name(key) for key in keys])
            for key in keys:
                self._set_size(key, 0)

    async def quarantine(self, key: ChunkKey, cause: str) -> None:
        async with self._sizes_lock:
            await self._run(self._files.quarantine, key, cause)
            self._set_size(key, 0)
        self._changed |= {str(Path(self._directory.record_name(key)).parent), QUARANTINE_FOLDER}

    async def leftovers(self) -> tuple[Sequence[LeftoverFile], Sequence[LeftoverFile]]:
        unfinished = await self._run(self._files_in, TEMPORARY_FOLDER, TEMPORARY_NAME)
        return unfinished, await self._run(self._files_in, QUARANTINE_FOLDER, QUARANTINE_NAME)

    async def delete_files(self, files: Sequence[LeftoverFile]) -> None:
        await self._run(self._unlink, [each.name for each in files])

    async def sync(self) -> None:
        """Sync the directories. A record's bytes were synced before it was renamed."""
        await self._run(self._sync)

    async def __aenter__(self) -> Self:
        """Open the directory. Lock it if it is to be changed.

        Raises:
            ConfigError: It has a directory for each rank or replica, or is not a directory of the disk tier.
            TierUnavailableError: It does not exist, is locked by another process, or cannot be read or
                created.
        """
        try:
            self.holder = await in_thread(self._workers, self._open)
        except BaseException:
            self._workers.shutdown()
            self._directory.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._workers.shutdown()  # no call is running
        self._directory.close()
        if self._arena is not None:
            self._arena.close()

    async def _known_sizes(self) -> dict[ChunkKey, int]:
        async with self._sizes_lock:
            if self._sizes is None:
                self._sizes = {each.key: each.nbytes for each in await self.list()}
                self._used_bytes = sum(self._sizes.values())
            return self._sizes

    def _set_size(self, key: ChunkKey, nbytes: int) -> None:
        """Note the size of a record that is written, or with 0 that it does not exist."""
        if self._sizes is None:
            return
        self._used_bytes += nbytes - self._sizes.pop(key, 0)
        if nbytes:
            self._sizes[key] = nbytes

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread. An OSError of it is raised as a TierError."""
        try:
            return await in_thread(self._workers, functools.partial(call, *args))
        except OSError as error:
            kind = TierFullError if error.errno in NO_SPACE else TierError
            raise kind(f"{self.name}: {error}") from error

    def _open(self) -> str:
        """Open the directory and return the process that has it locked."""
        _check_ranks(self._root)
        try:
            if not self._options.create:
                _check_content(self._root)
            if self._options.change:
                self._directory.prepare()
                return ""
            self._directory.open_shared()
            return lock_holder(self._directory.fd)
        except FileNotFoundError as error:
            if self._options.create and not self._options.change:  # for a dry run, it is empty
                self._sizes = {}
                return ""
            raise TierUnavailableError(
                f"there is no directory {self.name}: name the `path` of a disk tier, and if there are several ranks,"
                " its subdirectory rank-<n>"
            ) from error
        except OSError as error:
            verb = "change" if self._options.change else "read"
            inner = f"{error.filename}: " if str(error.filename or self.name) != self.name else ""
            raise TierUnavailableError(
                f"cannot open {self.name} to {verb} it: {inner}{error.strerror}; name the directory of a disk tier that user"
                f" {os.geteuid()} can {verb}"
            ) from error

    def _examine(self, key: ChunkKey, visit: Visit[T], header_only: bool) -> T | None:
        scratch = self._scratch.get()
        try:
            with self._file(key) as descriptor:
                if descriptor is None:
                    return None
                found = _header(descriptor, scratch) if header_only else pieces(descriptor, scratch)
                return visit(found)
        finally:
            self._scratch.put(scratch)

    def _read(self, key: ChunkKey, view: memoryview) -> int | None:
        with self._file(key) as descriptor:
            return None if descriptor is None else read_all(descriptor, view)

    def _write(self, key: ChunkKey, view: memoryview, stamp: int) -> None:
        error = self._files.write(key, view, stamp)
        if error is not None:
            raise error

    @contextlib.contextmanager
    def _file(self, key: ChunkKey) -> Iterator[int | None]:
        """The descriptor of a record's file, for direct I/O if it is supported; None if it does not exist."""
        try:
            try:
                descriptor = self._direct_files.open(key)
            except OSError as error:
                if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise
                descriptor = self._files.open(key)
        except FileNotFoundError:
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _unlink(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(name, dir_fd=self._directory.fd)
                self._changed.add(str(Path(name).parent))

    def _files_in(self, folder: str, names: re.Pattern[str]) -> Sequence[LeftoverFile]:
        try:
            found = self._directory.list_files(folder, names)
            return [LeftoverFile(f"{folder}/{name}", status.st_size) for name, status in found]
        except FileNotFoundError:
            return []

    def _sync(self) -> None:
        for folder in sorted(self._changed):
            with self._directory.folder(folder) as descriptor:
                os.fsync(descriptor)
        self._changed.clear()
        os.fsync(self._directory.fd)


def _header(descriptor: int, scratch: memoryview) -> Iterator[memoryview]:
    """Yield the beginning of a record, with its whole header."""
    nbytes = _HEADER_BYTES
    while True:
        read = read_all(descriptor, scratch[:nbytes])
        try:
            header_bytes, _ = peek_sizes(scratch[:read])
        except ChunkCorruptError:
            header_bytes = 0
        if read < nbytes or header_bytes <= read:
            yield scratch[:read]
            return
        nbytes = header_bytes


def _check_content(path: Path) -> None:
    """Refuse a directory that no disk tier has used. Nothing is created in it."""
    with contextlib.closing(RecordDirectory(path)) as directory:
        directory.open_shared()
        if not directory.used_by_tier():
            raise ConfigError(
                f"{path} is not a directory of the disk tier: it has no records, and the file `lock` or the"
                " directory `tmp` is missing; name the `path` of a disk tier"
            )


def _check_ranks(path: Path) -> None:
    try:
        ranks = sorted(
            entry.name for entry in path.iterdir() if _RANK_DIRECTORY.fullmatch(entry.name) and entry.is_dir()
        )
        own = any(path.glob("[0-9a-f][0-9a-f]"))
    except OSError:
        return  # opening it reports why
    if ranks and not own:
        raise ConfigError(
            f"{path} has a directory for each rank or replica: name one of them, such as {path / ranks[0]}"
        )
