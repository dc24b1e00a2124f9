"""Threads that read several files read them together: pieces of the first, by all of them, then the next. Blocking.

A disk is as fast with a few pieces under way as with as many whole records, often faster; but whole records, read
side by side, share it and end together, and nothing can be proven and copied while they are read.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import os
import threading
from typing import TYPE_CHECKING

from lmcache_async.memory.buffer import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIECE_BYTES = 2 << 20
"""Large enough for the disk's full speed, small enough for a record of 8 MiB to occupy four threads."""


def read_all(descriptor: int, view: memoryview, offset: int = 0) -> int:
    """Fill `view` from the file's `offset` on; fewer bytes where the file ends.

    Raises:
        OSError: The file cannot be read.
    """
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
        if done % PAGE:  # the end of a file that was cut
            break
    return done


def even_piece(nbytes: int, about: int) -> int:
    """Bytes of each piece, in whole pages, so that none is much smaller than the others.

    A record is its payload and a page: cut every 2 MiB, that page alone would be a read of its own, and wait for its
    turn at the disk like a large one.
    """
    count = max((nbytes + about // 2) // about, 1)
    return max(-(-nbytes // count // PAGE) * PAGE, PAGE)


class SharedReads:
    """Reads of files, shared out in pieces among the threads that wait for them, in the order they came.

    A thread whose own file is read leaves, and towards the end the last ones would be read by one thread.
    So others are asked to help wherever fewer threads read than may.

    Args:
        threads: How many are to read, as long as there are pieces.
        ask: Has another thread make a call some time. What it raises means that there is none to be had.
    """

    def __init__(
        self,
        piece_bytes: int = PIECE_BYTES,
        *,
        threads: int = 1,
        ask: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._piece_bytes = piece_bytes
        self._threads = threads
        self._ask = ask
        self._numbers = itertools.count()
        self._waiting: list[_Read] = []  # a heap: those with pieces that no thread has begun
        self._changed = threading.Condition()
        self._reading = 0  # threads in `read`
        self._helping = 0  # threads that were asked to help, come or still to come

    def place(self) -> int:
        """A place in the order, for a read whose file is still to be opened."""
        return next(self._numbers)

    def read(self, place: int, descriptor: int, view: memoryview) -> int:
        """Fill `view` from the file's start; how many bytes there were, up to the first that is missing.

        The calling thread reads pieces, its own or an earlier call's, until its own are all there. When it
        returns no thread reads from the file or into `view` any more, nor holds either.

        Raises:
            Exception: Whatever a piece of it could not be read for, mostly an OSError.
        """
        mine = _Read(place, descriptor, view, self._piece_bytes)
        with self._changed:
            heapq.heappush(self._waiting, mine)
            self._reading += 1
            self._changed.notify_all()  # those that only wait can help
        try:
            self._ask_for_help(but=1)  # which this thread reads
            while (turn := self._next(mine)) is not None:
                self._read_piece(*turn)
                del turn
        finally:
            with self._changed:
                self._reading -= 1
            self._ask_for_help()  # this thread's own is read, others' may not be
        return mine.result()

    def _ask_for_help(self, but: int = 0) -> None:
        """For all pieces that nobody has begun, but so many."""
        if self._ask is None:
            return
        with self._changed:
            left = sum(read.unbegun for read in self._waiting) - but
            count = max(min(self._threads - self._reading - self._helping, left), 0)
            self._helping += count
        for _ in range(count):
            try:
                self._ask(self._help)
            except Exception:  # noqa: BLE001 - it goes without; who left here would leave others writing to its memory
                with self._changed:
                    self._helping -= 1

    def _help(self) -> None:
        """Read pieces of others as long as there are any, and threads too few."""
        try:
            while (turn := self._next(None)) is not None:
                self._read_piece(*turn)
                del turn
        finally:
            with self._changed:
                self._helping -= 1

    def _next(self, mine: _Read | None) -> tuple[_Read, int] | None:
        """The first piece that nobody has begun; None once all of `mine` are there.

        Who has no read of its own waits for nothing, and makes room where threads enough have one.
        """
        with self._changed:
            while not (mine.ended if mine else self._reading + self._helping > self._threads):
                while self._waiting:
                    read = self._waiting[0]
                    start = read.begin()
                    if start is not None:
                        return read, start
                    heapq.heappop(self._waiting)
                if mine is None:
                    return None
                self._changed.wait()
            return None

    def _read_piece(self, read: _Read, start: int) -> None:
        error: Exception | None = None
        count = 0
        try:
            with read.piece(start) as piece:
                count = read_all(read.descriptor, piece, start)
        except Exception as failure:  # noqa: BLE001 - told to the thread whose read it is
            error = failure.with_traceback(None)  # its frames hold the piece
        with self._changed:
            if read.end(start, count, error):
                self._changed.notify_all()


class _Read:
    """One file's read: which pieces are left, and what became of those that were begun."""

    def __init__(self, place: int, descriptor: int, view: memoryview, piece_bytes: int) -> None:
        self.place = place
        self.descriptor = descriptor
        self.piece_bytes = even_piece(len(view), piece_bytes)
        self.view: memoryview | None = view
        starts = range(0, len(view), self.piece_bytes)
        self._starts: Iterator[int] = iter(starts)
        self._nbytes = len(view)
        self._whole = len(view)  # bytes from the start on without a gap
        self._left = len(starts)
        self._error: Exception | None = None

    def __lt__(self, other: _Read) -> bool:
        return self.place < other.place

    @property
    def unbegun(self) -> int:
        """Pieces that no thread has begun."""
        return operator.length_hint(self._starts)

    @property
    def ended(self) -> bool:
        return self._left == 0

    def begin(self) -> int | None:
        """Where the next piece begins; None if there is none to be begun."""
        return next(self._starts, None)

    def piece(self, start: int) -> memoryview:
        """The piece's memory; to be released before its end is told."""
        assert self.view is not None  # until its last piece has ended
        return self.view[start : start + self.piece_bytes]

    def end(self, start: int, count: int, error: Exception | None) -> bool:
        """A piece has ended; whether it was the last one."""
        self._left -= 1
        if count < min(self.piece_bytes, self._nbytes - start):
            self._whole = min(self._whole, start + count)
        if error is not None:
            self._error = self._error or error
        if self.ended:
            self.view = None  # a thread that waits to read may know this read by its place in the heap
        return self.ended

    def result(self) -> int:
        if self._error is not None:
            raise self._error
        return self._whole
