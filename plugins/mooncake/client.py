"""Asyncio client of the pool. If the master does not answer, the pool is joined in the background."""

from __future__ import annotations

import asyncio
import collections
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.threads import WorkerPool, in_thread, wait_done

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_async.memory.arena import Arena
    from lmcache_async.memory.buffer import Buffer
    from lmcache_async.plugins.mooncake.pool import Pool
    from lmcache_async.types import ChunkKey

_FIRST_S = 30.0
"""Longest wait for the engine at the start, in seconds. It takes 20 s to reject its options."""
_PAUSE_S = 1.0
"""Pause between two attempts to join, in seconds."""

T = TypeVar("T")


class Client:
    """Runs the calls of a pool in threads. Reads, writes and requests to the master have separate threads.

    Every call raises TierUnavailableError until the pool is joined. If a call is cancelled while a thread
    works on it, it ends when the thread has ended.

    Args:
        pool: Not joined yet.
        arena: Memory that records are read into and written from.
        threads: Maximum number of concurrent reads, and of concurrent writes.
    """

    def __init__(self, pool: Pool, arena: Arena, threads: int) -> None:
        self.pool = pool
        self._arena = arena
        self._reads = WorkerPool(threads, thread_name_prefix="lmcache-mooncake-read")
        self._writes = WorkerPool(threads, thread_name_prefix="lmcache-mooncake-write")
        self._requests = WorkerPool(1, thread_name_prefix="lmcache-mooncake-request")  # to the master
        self._joining: asyncio.Task[None] | None = None
        self._transferring: collections.Counter[ChunkKey] = collections.Counter()
        self._removing: set[ChunkKey] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._logger = LimitedLogger(logging.getLogger(__name__))

    async def open(self) -> None:
        """Join the pool. If its master does not answer, keep trying in the background.

        Raises:
            TierError: The engine refuses the options or the memory.
        """
        first = asyncio.ensure_future(self._join())
        try:
            await asyncio.wait({first}, timeout=_FIRST_S)
        except asyncio.CancelledError:
            await _cancel(first)
            raise
        if not first.done():
            self._warn(f"the master of {self.pool.url} did not answer within {_FIRST_S:.0f} s")
        elif (error := first.exception()) is None:
            return
        elif isinstance(error, TierUnavailableError):
            self._warn(error)
        else:
            raise error
        self._joining = asyncio.create_task(self._keep_joining(first))

    async def aclose(self) -> None:
        """Leave the pool. No call may be running; an attempt to join is awaited."""
        if self._joining is not None:
            await _cancel(self._joining)
        await in_thread(self._requests, self.pool.close)
        for threads in (self._requests, self._reads, self._writes):
            threads.shutdown(wait=True)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._call(self._requests, partial(self.pool.contains, keys))

    async def get(self, keys: Sequence[ChunkKey], buffers: Sequence[Buffer]) -> list[int]:
        return await self._transfer(self._reads, self.pool.get, keys, buffers)

    async def put(self, keys: Sequence[ChunkKey], buffers: Sequence[Buffer]) -> list[int]:
        return await self._transfer(self._writes, self.pool.put, keys, buffers)

    async def _transfer(
        self,
        threads: WorkerPool,
        call: Callable[[Sequence[ChunkKey], Sequence[Buffer]], list[int]],
        keys: Sequence[ChunkKey],
        buffers: Sequence[Buffer],
    ) -> list[int]:
        """Transfer records after pending removals of them, whose memory may already have another record."""
        await self._until(lambda: self._removing.isdisjoint(keys))
        self._transferring.update(keys)
        try:
            return await self._call(threads, partial(call, keys, buffers))
        finally:
            self._transferring -= collections.Counter(keys)
            self._wake()

    async def remove(self, key: ChunkKey) -> bool:
        """Remove a record after reads and writes of it by this client. Others detect it by the checksum."""
        await self._until(lambda: key not in self._transferring and key not in self._removing)
        self._removing.add(key)
        try:
            return await self._call(self._requests, partial(self.pool.remove, key))
        finally:
            self._removing.discard(key)
            self._wake()

    async def _until(self, is_free: Callable[[], bool]) -> None:
        while not is_free():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _call(self, threads: WorkerPool, call: Callable[[], T]) -> T:
        if not self.pool.is_joined:
            raise TierUnavailableError(
                f"the pool of {self.pool.url} has not been joined yet: its master does not answer"
            )
        return await in_thread(threads, call)

    def _warn(self, cause: object) -> None:
        self._logger.report(
            "open", "%s; the mooncake tier misses every chunk until the pool has been joined", cause
        )

    async def _join(self) -> None:
        await in_thread(self._requests, partial(self.pool.join, self._arena.address, len(self._arena.region)))

    async def _keep_joining(self, attempt: asyncio.Future[None]) -> None:
        while True:
            try:
                await attempt
            except TierError as error:
                self._logger.report("join", "the mooncake tier has not joined the pool yet: %s", error)
            except Exception as error:  # noqa: BLE001 - no free thread now; the next attempt may have one
                cause = type(error).__name__
                self._logger.report(cause, "the mooncake tier has not joined the pool yet: %r", error)
            else:
                self._logger.log(
                    logging.INFO, "joined", "the mooncake tier has joined the pool of %s", self.pool.url
                )
                return
            await asyncio.sleep(_PAUSE_S)
            attempt = asyncio.ensure_future(self._join())


async def _cancel(task: asyncio.Future[None]) -> None:
    """Cancel the task and wait for its end."""
    task.cancel()
    await wait_done(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
