"""The mooncake tier: chunks in a memory pool of several machines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.mooncake.config import MooncakeConfig
from lmcache_async.plugins.mooncake.pool import NOT_FOUND, NOT_READY, TOO_LONG, Pool
from lmcache_async.tiers.base import Allocate, Capabilities
from lmcache_async.tiers.bundled import BundledTier
from lmcache_async.tiers.results import no_memory, read_results, run_each
from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore


class MooncakeTier(BundledTier[MooncakeConfig, Pool]):
    """Stores records in a Mooncake Store, which transfers them between its segments and the registered arena.

    A batch takes a few calls of Mooncake's client, each in a thread. The tier itself copies no record. The master
    decides where records are stored and which are evicted. A record is visible when its put is complete.

    A call that is cancelled while a thread works on it ends when the thread has finished; records that were put stay.

    Args:
        config: The options.
        store: A client that is already set up; it is not closed by the tier. By default a new client.
    """

    config_type = MooncakeConfig

    def __init__(self, config: MooncakeConfig, *, store: MooncakeDistributedStore | None = None) -> None:
        super().__init__(config, f"mooncake tier of {config.url}")
        self._store = store

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities. Persistent if this process adds no segment, because all records are then in other processes."""
        return Capabilities(
            persistent=not self.config.segment_bytes,
            removes=True,
            shared=True,
        )

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._call() as pool:
            return await pool.contains(keys) if keys else []

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        with self._call() as pool, read_results(len(keys)) as results:

            async def get(positions: Sequence[int]) -> None:
                await self._get_batch(pool, keys, positions, allocate, results)

            await self._in_batches(keys, get, results)
        return results

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        results: list[TierError | None] = [None] * len(items)
        with self._call() as pool:

            async def put(positions: Sequence[int]) -> None:
                keys = [items[position][0] for position in positions]
                codes = await pool.put(keys, [items[position][1] for position in positions])
                for position, key, code in zip(positions, keys, codes, strict=True):
                    results[position] = pool.error("put", key, code) if code else None

            await self._in_batches([key for key, _ in items], put, results)
        return results

    async def remove(self, key: ChunkKey) -> bool:
        with self._call() as pool:
            return await pool.remove(key)

    async def __aenter__(self) -> Self:
        """Join the pool. If its master does not answer, it is joined in the background.

        Raises:
            MissingDependencyError: Mooncake's client, or a library that it needs, is not installed.
            TierError: Mooncake's client refuses the options or the memory.
        """
        pool = Pool(self.config, self._bound(), self._store)
        try:
            await pool.open()
        except TierError:
            await pool.aclose()
            raise
        except BaseException:  # cancelled: a thread may be joining the pool for minutes
            pool.close_later()
            raise
        self._open(pool)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Leave the pool after running calls have ended. Records in segments of other processes stay.

        If cancelled, it does not wait for calls in threads. The last of them closes Mooncake's client; until then the
        arena stays mapped.
        """
        if self._opened is None:
            return
        pool = self._opened
        try:
            await self._end_calls()
        except BaseException:
            pool.close_later()
            raise
        await pool.aclose()

    async def _get_batch(
        self,
        pool: Pool,
        keys: Sequence[ChunkKey],
        positions: Sequence[int],
        allocate: Allocate,
        results: list[Buffer | TierError | None],
    ) -> None:
        """Read records directly into new leases. Mooncake's client returns the length of each."""
        leased: dict[int, Buffer] = {}
        try:
            for position in positions:
                try:
                    leased[position] = await allocate(self._max_record_bytes)
                except BudgetExceededError as error:  # the chunks that got memory are usable
                    results[position] = no_memory(error)
            if not leased:
                return
            asked = [keys[position] for position in leased]
            answers = await pool.get(asked, list(leased.values()))
            for position, key, answer in zip(tuple(leased), asked, answers, strict=True):
                if answer > 0:
                    leased[position].resize(answer)
                    results[position] = leased.pop(position)
                elif answer in {0, TOO_LONG}:
                    await self._reject_length(key, partial(pool.remove, key))
                elif answer not in {NOT_FOUND, NOT_READY}:  # removed or replaced since the lookup
                    results[position] = pool.error("get", key, answer)
        finally:
            for buffer in leased.values():
                buffer.release()

    async def _in_batches(
        self,
        keys: Sequence[ChunkKey],
        work: Callable[[Sequence[int]], Awaitable[None]],
        results: list[TierError | None] | list[Buffer | TierError | None],
    ) -> None:
        """Call `work` with batches of positions, at most one per thread at a time.

        A batch has no key twice, because a call of Mooncake's client fills one buffer per key. If a batch fails, its error
        becomes the result of each of its positions that has no result yet.
        """
        step = max(1, self.config.batch_bytes // self._max_record_bytes)
        batches: list[dict[ChunkKey, int]] = []
        for position, key in enumerate(keys):
            if not batches or key in batches[-1] or len(batches[-1]) == step:
                batches.append({})
            batches[-1][key] = position

        async def run(batch: dict[ChunkKey, int]) -> None:
            try:
                await work(list(batch.values()))
            except TierError as error:
                for position in batch.values():
                    if results[position] is None:
                        results[position] = error

        await run_each(batches, run, min(self.config.threads, len(batches)))
