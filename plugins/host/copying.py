"""Copies of records into the pool, in threads that release the GIL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from lmcache_async.errors import TierUnavailableError
from lmcache_async.memory.buffer import Bytes
from lmcache_async.memory.copies import StreamingChoice, copy_bytes
from lmcache_async.memory.threads import WorkerPool, in_threads

Pair: TypeAlias = tuple[Bytes, Bytes]
"""Target and source of a copy, of equal length."""

SHARE_BYTES = 2 << 20
"""Minimum of bytes per thread. A thread hop takes about 50 us, copying 2 MiB about 200 us."""


class Copier:
    """Copies batches of records, large ones in several threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._streaming = StreamingChoice()
        self._workers = WorkerPool(threads, thread_name_prefix="lmcache-async-host")

    async def copy(self, pairs: list[Pair]) -> None:
        """Copy all pairs and empty the list. If cancelled, it waits until no thread copies any more."""
        total = sum(len(source) for _, source in pairs)
        stream = self._streaming.choose(total)
        count = max(1, min(self._threads, total // SHARE_BYTES))
        pieces = shares(pairs, -(-total // count))
        try:
            seconds = await in_threads(self._workers, [partial(_copy, piece, stream) for piece in pieces])
        except RuntimeError as error:
            raise TierUnavailableError(
                f"no thread for the host tier: {error}; raise the limit of threads or processes"
            ) from error
        finally:  # a traceback may keep this frame alive, and its views would keep the slabs leased
            for part in (pairs, *pieces):
                part.clear()
        self._streaming.note(stream=stream, nbytes=total, seconds=sum(seconds))

    def close(self) -> None:
        """Shut the threads down. No copy may be running."""
        self._workers.shutdown(wait=True)


def shares(pairs: Sequence[Pair], share_bytes: int) -> list[list[Pair]]:
    """Divide the pairs into lists of `share_bytes` each. Long pairs are split."""
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
    """Copy the pairs and return the CPU seconds of this thread."""
    start = time.thread_time()
    for target, source in pairs:
        copy_bytes(target, source, stream=stream)
    return time.thread_time() - start
