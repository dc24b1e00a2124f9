"""Archives read from front to end, from a file or a pipe; damage is stepped over. Blocking; run in threads."""

from __future__ import annotations

import io
from typing import NamedTuple

import xxhash

from lmcache_async.records.archive import (
    FRAME_BYTES,
    FRAME_MAGIC,
    ArchiveHead,
    End,
    Frame,
    record_checksum,
    unpack_frame,
    unpack_head,
)

_STEP_BYTES = 1 << 20


class Damage(NamedTuple):
    """Something is not as it was written; reading goes on behind it where that is possible.

    Attributes:
        at: Where it begins.
        what: In words.
    """

    at: int
    what: str


class ArchiveReader:
    """One archive.

    `next` and then, for a `Frame`, one of `body` and `skip`.

    Args:
        file: Unbuffered, at its start.
        name: For messages.
    """

    def __init__(self, file: io.RawIOBase, name: str) -> None:
        self.name = name
        self.at = 0
        self.records = 0
        self._file = file
        self._seekable = file.seekable()
        self.nbytes = file.seek(0, io.SEEK_END) if self._seekable else None
        if self._seekable:
            file.seek(0)
        self._frames = xxhash.xxh3_64()
        self._ended = False

    def head(self) -> ArchiveHead:
        """How it begins.

        Raises:
            ConfigError: It is no archive, or one of another version.
            OSError: It cannot be read.
        """
        return unpack_head(self._read(FRAME_BYTES), self.name)

    @property
    def frames_checksum(self) -> bytes:
        """Of the frames so far."""
        return self._frames.digest()

    def next(self) -> Frame | End | Damage | None:
        """What comes next; None at the end of the file.

        Raises:
            OSError: It cannot be read.
        """
        if self._ended:
            return None
        at = self.at
        data = self._read(FRAME_BYTES)
        if not data:
            self._ended = True
            return Damage(at, "it ends without an end: it was cut, or its export has not ended")
        found = unpack_frame(data, at)
        if isinstance(found, End):
            return self._end(found)
        if found is None:
            return self._resume(at)
        self.records += 1
        self._frames.update(data)
        return found

    def body(self, frame: Frame, view: memoryview) -> str:
        """Read the record into `view`, of its length; "" or why it is not what was written.

        Raises:
            OSError: It cannot be read.
        """
        if self._fill(view) != frame.nbytes:
            return "truncated"
        return "" if record_checksum(view) == frame.checksum else "archive"

    def skip(self, frame: Frame) -> None:
        """Go on behind the record.

        Raises:
            OSError: It cannot be read.
        """
        if self.nbytes is not None:
            self._seek(min(self.at + frame.nbytes, self.nbytes))
            return
        scratch = memoryview(bytearray(min(frame.nbytes, _STEP_BYTES)))
        left = frame.nbytes
        while left and (read := self._fill(scratch[:left])):
            left -= read

    def prove(self, frame: Frame, scratch: memoryview) -> bool:
        """Whether the record is what was written, read in pieces into `scratch`.

        Raises:
            OSError: It cannot be read.
        """
        digest = xxhash.xxh3_64()
        left = frame.nbytes
        while left:
            piece = scratch[:left]
            if self._fill(piece) != len(piece):
                return False
            digest.update(piece)
            left -= len(piece)
        return digest.digest() == frame.checksum

    def _end(self, end: End) -> End | Damage:
        self._ended = True
        if (end.records, end.checksum) == (self.records, self.frames_checksum):
            return end
        return Damage(end.at, f"{self.records} records were found of the {end.records} that it says it has")

    def _resume(self, at: int) -> Damage:
        """Find the next frame, whose checksum says that it is one."""
        what = "a frame is damaged"
        if self.nbytes is None:
            self._ended = True
            return Damage(at, f"{what}, and a pipe cannot be searched for the next one")
        overlap = FRAME_BYTES - 1
        start = at + 1
        while start < self.nbytes:
            self._seek(start)
            block = self._read(_STEP_BYTES)
            place = block.find(FRAME_MAGIC)
            while place >= 0:
                if unpack_frame(self._frame_at(block, start, place), start + place) is not None:
                    self._seek(start + place)
                    return Damage(at, f"{what}; the next one begins at byte {start + place}")
                place = block.find(FRAME_MAGIC, place + 1)
            if len(block) < _STEP_BYTES:
                break
            start += len(block) - overlap
        self._ended = True
        return Damage(at, f"{what}, and there is none behind it")

    def _frame_at(self, block: bytes, start: int, place: int) -> bytes:
        if place + FRAME_BYTES <= len(block):
            return block[place : place + FRAME_BYTES]
        self._seek(start + place)
        return self._read(FRAME_BYTES)

    def _seek(self, at: int) -> None:
        self._file.seek(at)
        self.at = at

    def _read(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        return bytes(data[: self._fill(memoryview(data))])

    def _fill(self, view: memoryview) -> int:
        done = 0
        while done < len(view) and (read := self._file.readinto(view[done:])):
            done += read
        self.at += done
        return done
