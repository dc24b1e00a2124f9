"""Records into the pool, copied by threads that do not hold the interpreter's lock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, TypeAlias

from lmcache_async.errors import TierClosedError
from lmcache_async.memory.buffer import Bytes
from lmcache_async.memory.copies import FasterWay, copy_bytes
from lmcache_async.memory.threads import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

Pair: TypeAlias = tuple[Bytes, Bytes]
"""Where to, and where from: of one length."""

SHARE_BYTES = 2 << 20
"""What a further thread is worth: a hop takes some 50 microseconds, copying 2 MiB some 200."""


class Copier:
    """Copies batches, large ones in as many threads as it has."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._way = FasterWay()
        self._workers = WorkerPool(threads, thread_name_prefix="lmcache-async-host")

    async def copy(self, pairs: list[Pair]) -> None:
        """Copy them all; `pairs` is empty afterwards. Cancelled, it waits until no thread is at it any more.

        Raises:
            TierClosedError: The copier is closed.
        """
        total = sum(len(source) for _, source in pairs)
        stream = self._way.choose(total)
        count = max(1, min(self._threads, total // SHARE_BYTES))
        pieces = shares(pairs, -(-total // count))
        futures: list[Future[float]] = []
        try:
            for piece in pieces:
                futures.append(self._workers.submit(_copy, piece, stream))  # noqa: PERF401 - one may fail
        except RuntimeError as error:
            raise TierClosedError(f"the host tier was closed: {error}") from error
        finally:
            try:
                await _ended(futures)
            finally:  # a traceback may keep this frame: what looks at a slab from here would keep the slab
                for part in (pairs, *pieces):
                    part.clear()
        seconds = sum(future.result() for future in futures)
        self._way.note(stream=stream, nbytes=total, seconds=seconds)

    def close(self) -> None:
        """No copy runs any more: `copy` has ended."""
        self._workers.shutdown(wait=True)


def shares(pairs: Sequence[Pair], share_bytes: int) -> list[list[Pair]]:
    """The same bytes in pieces of so many; long pairs are cut."""
    found: list[list[Pair]] = [[]]
    left = share_bytes
    for target, source in pairs:
        start = 0
        while start < len(source):
            if not left:
                found.append([])
                left = share_bytes
            stop = min(start + left, len(source))
            found[-1].append((target[start:stop], source[start:stop]))
            left -= stop - start
            start = stop
    return found


def _copy(pairs: list[Pair], stream: bool) -> float:
    """Seconds of this thread that it took."""
    start = time.thread_time()
    for target, source in pairs:
        copy_bytes(target, source, stream=stream)
    return time.thread_time() - start


async def _ended(futures: Sequence[Future[float]]) -> None:
    """Wait for their real ends; cancelled, those that no thread has begun are taken back."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    left = len(futures)

    def one_ended() -> None:
        nonlocal left
        left -= 1
        if not left and not ended.done():
            ended.set_result(None)

    def tell_loop(_: Future[float]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed under us
            loop.call_soon_threadsafe(one_ended)

    if not futures:
        return
    for future in futures:
        future.add_done_callback(tell_loop)
    try:
        await asyncio.wait([ended])
    except asyncio.CancelledError:
        for future in futures:
            future.cancel()
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
        raise
