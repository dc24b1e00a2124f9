"""Archives written so that a killed export goes on: under another name until they are whole. Blocking; run in threads."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

import xxhash

from lmcache_async.errors import ConfigError, TierInUseError
from lmcache_async.records.archive import ID_BYTES, SUFFIX, ArchiveHead, End, Frame
from lmcache_async.records.reader import ArchiveReader
from lmcache_async.types import ChunkKey

PARTIAL = ".partial"
_SCRATCH_BYTES = 1 << 20


class PartWriter:
    """One file of an archive, `NAME.partial` until `finish` has made it durable.

    Args:
        path: Its name at the end.
        head: How it begins where nothing was begun before.
    """

    def __init__(self, path: Path, head: ArchiveHead) -> None:
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL)
        self.head = head
        self.keys: list[ChunkKey] = []
        self.nbytes = 0
        self._fd = -1
        self._frames = xxhash.xxh3_64()

    def open(self) -> None:
        """Begin, or go on behind the last record that is there whole; those are read and proven.

        Raises:
            ConfigError: It was begun by another export.
            TierInUseError: Another export writes it now.
            OSError: It cannot be written.
        """
        self._fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierInUseError(f"{self.partial} is being written by another export") from None
        self._recover()

    def append(self, frame: Frame, record: memoryview) -> None:
        """Raises OSError when it cannot be written; `open` cuts off what is there of it then."""
        packed = frame.pack()
        self._write(packed)
        self._write(record)
        self._frames.update(packed)
        self.keys.append(frame.key)

    def finish(self, *, more: bool) -> None:
        """End it, make it durable, and give it its name. Raises OSError."""
        self._write(End(len(self.keys), self._frames.digest(), more).pack())
        os.fsync(self._fd)
        self.partial.replace(self.path)
        sync_directory(self.path.parent)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _recover(self) -> None:
        size = os.fstat(self._fd).st_size
        end = 0
        if size >= len(self.head.pack()):
            with os.fdopen(os.dup(self._fd), "rb", buffering=0) as file:
                end = self._whole(ArchiveReader(file, str(self.partial)))
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        self.nbytes = end
        if not end:
            self._write(self.head.pack())

    def _whole(self, reader: ArchiveReader) -> int:
        """Where the last whole record ends."""
        found = reader.head()
        if found.about != self.head.about or found.part != self.head.part:
            raise ConfigError(
                f"{self.partial} was begun by an export of something else: remove it, or name another file"
            )
        self.head = found
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        end = reader.at
        while isinstance(frame := reader.next(), Frame) and reader.prove(frame, scratch):
            self._frames.update(frame.pack())
            self.keys.append(frame.key)
            end = reader.at
        return end

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self.nbytes += len(data)


class ArchiveWriter:
    """A file, or a folder of parts that are at most so long.

    Args:
        path: The file; or the folder, where `part_bytes` is given.
        about: 16 bytes that stand for what is exported.
    """

    def __init__(self, path: Path, about: bytes, part_bytes: int | None = None) -> None:
        self.path = path
        self.nbytes = 0
        self.parts = 0
        self._about = about
        self._part_bytes = part_bytes
        self._set_id = secrets.token_bytes(ID_BYTES)
        self._writer: PartWriter | None = None

    def open(self) -> set[ChunkKey]:
        """Begin, or go on; the keys of what is there already.

        Raises:
            ConfigError: It is complete, or of another export.
            TierInUseError: Another export writes it now.
            OSError: It cannot be written.
        """
        if self._part_bytes is not None:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys: set[ChunkKey] = set()
        while (part := self._path(self.parts)).exists():
            keys |= self._finished(part)
            self.parts += 1
        self._begin()
        assert self._writer is not None
        return keys.union(self._writer.keys)

    def append(self, frame: Frame, record: memoryview) -> None:
        """Raises OSError when it cannot be written."""
        assert self._writer is not None
        if (
            self._part_bytes is not None
            and self._writer.keys
            and self._writer.nbytes + len(record) > self._part_bytes
        ):
            self._finish(more=True)
            self._begin()
        self._writer.append(frame, record)

    def finish(self) -> None:
        """All of it is durable and has its name when this returns. Raises OSError."""
        self._finish(more=False)

    def close(self) -> None:
        """Leave what is not finished to a later export."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self) -> None:
        head = ArchiveHead(self.parts, time.time_ns(), self._set_id, self._about)
        self._writer = PartWriter(self._path(self.parts), head)
        self._writer.open()
        self._set_id = self._writer.head.set_id

    def _finish(self, *, more: bool) -> None:
        assert self._writer is not None
        self._writer.finish(more=more)
        self.nbytes += self._writer.nbytes
        self.parts += 1
        self._writer = None

    def _finished(self, part: Path) -> set[ChunkKey]:
        """The keys of a part that has its name already."""
        with part.open("rb", buffering=0) as file:
            reader = ArchiveReader(file, str(part))
            head = reader.head()
            keys = set()
            while isinstance(found := reader.next(), Frame):
                keys.add(found.key)
                reader.skip(found)
        if self._part_bytes is None or (isinstance(found, End) and not found.more):
            raise ConfigError(f"{part} is there already and complete: remove it, or name another place")
        if head.about != self._about or not isinstance(found, End):
            raise ConfigError(f"{part} is of another export, or damaged: remove it, or name another folder")
        self._set_id = head.set_id
        return keys

    def _path(self, part: int) -> Path:
        return self.path if self._part_bytes is None else self.path / f"records-{part:05d}{SUFFIX}"


class StreamWriter:
    """An archive into a pipe; it cannot be gone on with.

    Args:
        fd: Open, and left open.
    """

    def __init__(self, fd: int, about: bytes) -> None:
        self.nbytes = 0
        self.parts = 1
        self._fd = fd
        self._about = about
        self._frames = xxhash.xxh3_64()
        self._records = 0

    def open(self) -> set[ChunkKey]:
        self._write(ArchiveHead(0, time.time_ns(), secrets.token_bytes(ID_BYTES), self._about).pack())
        return set()

    def append(self, frame: Frame, record: memoryview) -> None:
        """Raises OSError when nobody reads any more."""
        packed = frame.pack()
        self._write(packed)
        self._write(record)
        self._frames.update(packed)
        self._records += 1

    def finish(self) -> None:
        self._write(End(self._records, self._frames.digest(), more=False).pack())

    def close(self) -> None:
        """Nothing is left to do."""

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self.nbytes += len(data)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
