"""The archive: records one behind the other in a file or a stream, each in a frame that proves itself. Pure.

    head     64 bytes: magic, version, number of the part, when, id of the set of parts, of what, checksum
    frames   64 bytes: magic, kind, key, stamp, length, checksum of the record, checksum of these 64 bytes;
             then the record, as a tier keeps it
    end      a frame without a record: how many there were, whether another part follows, checksum of all frames

All numbers are little-endian. docs/records.md describes it for who writes a reader of his own.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from lmcache_async.errors import ConfigError
from lmcache_async.memory.header import MAX_RECORD_BYTES
from lmcache_async.types import ChunkKey

SUFFIX = ".lmcar"
ARCHIVE_VERSION = 1
HEAD_MAGIC = b"LMCARCHV"
FRAME_MAGIC = b"LMCFRAME"
ID_BYTES = 16

_HEAD = struct.Struct("<8sHHIQ16s16s8s")
_FRAME = struct.Struct("<8sB7x16sQQ8s8s")
FRAME_BYTES = _FRAME.size
_CHECKSUM_BYTES = 8
_RECORD, _END, _MORE = 1, 2, 3

assert _HEAD.size == FRAME_BYTES == 64


class ArchiveHead(NamedTuple):
    """How an archive begins.

    Attributes:
        part: Its number in the set, from 0.
        made_ns: When it was begun.
        set_id: The same in all parts of one export.
        about: What was exported; an export goes on only with one that it began itself.
    """

    part: int
    made_ns: int
    set_id: bytes
    about: bytes

    def pack(self) -> bytes:
        packed = _HEAD.pack(
            HEAD_MAGIC, ARCHIVE_VERSION, 0, self.part, self.made_ns, self.set_id, self.about, b""
        )
        return _sealed(packed)


class Frame(NamedTuple):
    """What is in front of a record.

    Attributes:
        stamp: When the record was last used, in ns since the epoch; 0 where that is not known.
        checksum: xxh3_64 of its bytes, envelope and all.
        at: Where the frame begins in the archive; 0 in one that is to be written.
    """

    key: ChunkKey
    stamp: int
    nbytes: int
    checksum: bytes
    at: int = 0

    def pack(self) -> bytes:
        return _sealed(
            _FRAME.pack(FRAME_MAGIC, _RECORD, self.key, self.stamp, self.nbytes, self.checksum, b"")
        )


class End(NamedTuple):
    """What is behind the last record.

    Attributes:
        records: Frames in this part.
        checksum: xxh3_64 of all of them, without the records.
        more: Whether another part follows.
        at: As `Frame`'s.
    """

    records: int
    checksum: bytes
    more: bool
    at: int = 0

    def pack(self) -> bytes:
        kind = _MORE if self.more else _END
        return _sealed(_FRAME.pack(FRAME_MAGIC, kind, bytes(16), self.records, 0, self.checksum, b""))


def unpack_head(data: bytes, name: str) -> ArchiveHead:
    """The head.

    Raises:
        ConfigError: It is none, or of another version.
    """
    if len(data) < FRAME_BYTES or not data.startswith(HEAD_MAGIC) or _sealed(data) != data:
        raise ConfigError(f"{name} is no archive of records: it does not start as one")
    _, version, _, part, made_ns, set_id, about, _ = _HEAD.unpack(data)
    if version != ARCHIVE_VERSION:
        raise ConfigError(
            f"{name} is an archive of version {version}, and this lmcache-async reads version {ARCHIVE_VERSION}"
        )
    return ArchiveHead(part, made_ns, set_id, about)


def unpack_frame(data: bytes, at: int) -> Frame | End | None:
    """A frame; None where these bytes are none, or not whole."""
    if len(data) < FRAME_BYTES or not data.startswith(FRAME_MAGIC) or _sealed(data) != data:
        return None
    _, kind, key, stamp, nbytes, checksum, _ = _FRAME.unpack(data)
    if kind == _RECORD and nbytes <= MAX_RECORD_BYTES:
        return Frame(ChunkKey(key), stamp, nbytes, checksum, at)
    if kind in {_END, _MORE}:
        return End(stamp, checksum, kind == _MORE, at)
    return None


def record_checksum(record: memoryview) -> bytes:
    return xxhash.xxh3_64_digest(record)


def _sealed(packed: bytes) -> bytes:
    """With its last bytes the checksum of those before."""
    body = packed[:-_CHECKSUM_BYTES]
    return body + xxhash.xxh3_64_digest(body)
