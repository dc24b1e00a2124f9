"""Asyncio client of the pool. If the master does not answer, the pool is joined in the background."""

from __future__ import annotations

import asyncio
import collections
import logging
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lmcache_async.errors import TierClosedError, TierError, TierUnavailableError
from lmcache_async.memory.threads import WorkerPool, wait_done, wait_ended
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_async.memory.arena import Arena
    from lmcache_async.plugins.mooncake.pool import Pool
    from lmcache_async.types import ChunkKey

_FIRST_S = 30.0
"""Longest wait for the engine at the start, in seconds. It takes 20 s to reject its options."""
_PAUSE_S = 1.0
"""Pause between two attempts to join, in seconds."""

P = ParamSpec("P")
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
        self._reads = WorkerPool(threads, thread_name_prefix="lmcache-mooncake")
        self._writes = WorkerPool(threads, thread_name_prefix="lmcache-mooncake")
        self._questions = WorkerPool(1, thread_name_prefix="lmcache-mooncake")
        self._joining: asyncio.Task[None] | None = None
        self._moving: collections.Counter[ChunkKey] = collections.Counter()
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
            await _ended(first)
            raise
        if not first.done():
            self._begins_without(f"the master of {self.pool.url} gave no answer in {_FIRST_S:.0f} s")
        elif (error := first.exception()) is None:
            return
        elif isinstance(error, TierUnavailableError):
            self._begins_without(error)
        else:
            raise error
        self._joining = asyncio.create_task(self._keep_joining(first))

    async def aclose(self) -> None:
        """Leave the pool. No call may be running; an attempt to join is awaited."""
        if self._joining is not None:
            await _ended(self._joining)
        await _run(self._questions, self.pool.close)
        for workers in (self._questions, self._reads, self._writes):
            workers.shutdown()

    async def there(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._call(self._questions, self.pool.there, keys)

    async def get(
        self, keys: Sequence[ChunkKey], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        return await self._move(self._reads, self.pool.get, keys, addresses, sizes)

    async def put(
        self, keys: Sequence[ChunkKey], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        return await self._move(self._writes, self.pool.put, keys, addresses, sizes)

    async def _move(
        self,
        workers: WorkerPool,
        call: Callable[[Sequence[ChunkKey], Sequence[int], Sequence[int]], list[int]],
        keys: Sequence[ChunkKey],
        addresses: Sequence[int],
        sizes: Sequence[int],
    ) -> list[int]:
        """Transfer records after pending removals of them, whose memory may already have another record."""
        await self._until(lambda: self._removing.isdisjoint(keys))
        self._moving.update(keys)
        try:
            return await self._call(workers, call, keys, addresses, sizes)
        finally:
            self._moving -= collections.Counter(keys)
            self._wake()

    async def remove(self, key: ChunkKey) -> bool:
        """Remove a record after reads and writes of it by this client. Others detect it by the checksum."""
        await self._until(lambda: key not in self._moving and key not in self._removing)
        self._removing.add(key)
        try:
            return await self._call(self._questions, self.pool.remove, key)
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

    async def _call(
        self, workers: WorkerPool, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if not self.pool.is_joined:
            raise TierUnavailableError(f"{self.pool.url} has not been joined yet: its master does not answer")
        return await _run(workers, call, *args, **kwargs)

    def _begins_without(self, cause: object) -> None:
        self._logger.report("open", "%s; the tier is opened all the same, until then all is a miss", cause)

    async def _join(self) -> None:
        await _run(self._questions, self.pool.join, self._arena.address, len(self._arena.region))

    async def _keep_joining(self, attempt: asyncio.Future[None]) -> None:
        while True:
            try:
                await attempt
            except TierError as error:
                self._logger.report("join", "still not joined: %s", error)
            else:
                self._logger.log(logging.INFO, "joined", "%s is joined", self.pool.url)
                return
            await asyncio.sleep(_PAUSE_S)
            attempt = asyncio.ensure_future(self._join())


async def _run(workers: WorkerPool, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run the call in a thread.

    If cancelled, a call that no thread has begun is withdrawn. A running call is awaited, because the memory
    that it uses must not be reused before.

    Raises:
        TierClosedError: The tier was closed.
    """
    try:
        future = workers.submit(call, *args, **kwargs)
    except RuntimeError as error:
        raise TierClosedError(f"the mooncake tier was closed: {error}") from error
    await wait_ended(future)
    return future.result()


async def _ended(task: asyncio.Future[None]) -> None:
    """Cancel the task and wait for its end."""
    task.cancel()
    await wait_done(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
