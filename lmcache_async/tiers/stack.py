"""The tiers of an engine, fastest first, as one: plan, fetch, write, promote."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self

from lmcache_async.errors import BudgetExceededError, TierError, TierFullError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Allocate
from lmcache_async.tiers.layers.guard import GuardLayer
from lmcache_async.tiers.outcome import leaving, no_room, release_all, when_all
from lmcache_async.tiers.plan import Cover, runs
from lmcache_async.tiers.stacked import Fetched, StackedTier
from lmcache_async.tiers.writer import WriteReservation
from lmcache_async.types import ChunkKey

__all__ = ["Fetched", "StackedTier", "TierStack"]


class TierStack:
    """Ordered tiers. A failure of one is a miss of that one, or a counted drop; it never raises.

    Args:
        tiers: Fastest first.
        write_timeout_s: How long a chunk waits for room in a slow tier's queue before it is dropped.
        encrypted: Nothing but encrypted records may leave the process's memory.
    """

    def __init__(
        self, tiers: Sequence[StackedTier], *, write_timeout_s: float, encrypted: bool = False
    ) -> None:
        self.tiers = tuple(tiers)
        self.counts: Counter[str] = Counter()
        self._write_timeout_s = write_timeout_s
        self._encrypted = encrypted
        self._exit = AsyncExitStack()

    @property
    def leaves_memory(self) -> bool:
        """Whether any tier is given records that leave the process's memory."""
        return any(stacked.leaves_memory for stacked in self._takers)

    @property
    def _takers(self) -> list[StackedTier]:
        return [stacked for stacked in self.tiers if stacked.takes]

    @property
    def late_calls(self) -> int:
        """Calls that were given up and have not ended yet."""
        return sum(s.tier.late_calls for s in self.tiers if isinstance(s.tier, GuardLayer))

    async def open(self, arena: Arena) -> Self:
        """Open every tier; when one fails those already open are closed again."""
        async with AsyncExitStack() as stack:
            for stacked in self.tiers:
                stacked.tier.bind(arena)
                await stack.enter_async_context(stacked.tier)
                if stacked.writer is not None:
                    stacked.writer.start()
                    stack.push_async_callback(stacked.writer.aclose, timeout_s=0.0)
            self._exit = stack.pop_all()
        return self

    async def aclose(self, *, timeout_s: float) -> None:
        """Write what is queued, within the deadline, then close every tier; that also when cancelled."""
        try:
            await self.flush(timeout_s=timeout_s)
        finally:
            await self._exit.aclose()

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until nothing is queued or under way to any tier; False when the deadline came first."""
        waits = [s.writer.flush(timeout_s=timeout_s) for s in self.tiers if s.writer is not None]
        waits += [s.tier.drain(timeout_s=timeout_s) for s in self.tiers if isinstance(s.tier, GuardLayer)]
        return all(await asyncio.gather(*waits))

    async def plan(self, keys: Sequence[ChunkKey], in_arena: bool = False) -> tuple[tuple[int, ...], str]:
        """For each chunk of the longest prefix that is there, the fastest tier that has it.

        Args:
            in_arena: Ask only the tiers that keep their chunks in the arena.

        Returns:
            The tiers' indices, and why the prefix ends ("" when it is all of `keys`).
        """
        cover = Cover(len(keys))
        failed = False
        hole = -1
        while hole < cover.prefix < len(keys):
            hole = cover.prefix
            for index, stacked in enumerate(self.tiers):
                positions = cover.holes()
                if not positions:
                    break
                if in_arena and not stacked.tier.capabilities.in_arena:
                    continue
                try:
                    cover.mark(index, await stacked.holds(keys, positions))
                except TierError as error:
                    failed = True
                    self._count(stacked, "errors", error)
        found = cover.tiers[: cover.prefix]
        cause = "" if cover.prefix == len(keys) else "tier_error" if failed else "miss"
        return tuple(tier for tier in found if tier is not None), cause

    async def missing(self, keys: Sequence[ChunkKey], *, memory_chunks: int | None = None) -> list[int]:
        """Positions of the chunks that at least one tier that takes any lacks, as far as it is cheap to know.

        All of them when no such tier answers: what nobody vouches for is not there.

        Args:
            memory_chunks: How many leading chunks tiers in the arena are to have; None is all of them.
        """
        lacking: set[int] = set()
        everything = list(range(len(keys)))
        answered = not self._takers
        for stacked in self._takers:
            try:
                held = await stacked.holds(keys, everything)
            except TierError as error:
                self._count(stacked, "errors", error)
                continue  # a tier that fails takes no write now either
            answered = True
            wanted = everything if stacked.leaves_memory else everything[:memory_chunks]
            lacking.update(set(wanted).difference(held))
        return sorted(lacking) if answered else everything

    async def fetch(
        self, keys: Sequence[ChunkKey], tiers: Sequence[int], allocate: Allocate, *, slower: bool = True
    ) -> Fetched:
        """Get the chunks, each from the tier planned for it or, failing that, from a slower one if `slower`.

        Cancelled, it gives back what it has got.
        """
        got: list[Buffer | None] = [None] * len(keys)
        sources = list(tiers)
        cause = ""
        try:
            parts = runs(tiers)
            if len(parts) == 1:  # nothing to run side by side
                await self._fetch_run(keys, parts[0], allocate, got)
            else:
                async with asyncio.TaskGroup() as group:
                    for part in parts:
                        group.create_task(self._fetch_run(keys, part, allocate, got))
            for position, key in enumerate(keys):
                if got[position] is None and slower:
                    sources[position] = await self._fetch_slower(key, position, tiers, allocate, got)
                if got[position] is None:
                    cause = "vanished"
                    break
        except BaseException:
            release_all(got)
            raise
        count = next((i for i, buffer in enumerate(got) if buffer is None), len(got))
        release_all(got[count:])
        self.counts.update(f"{self.tiers[tier].id}.hits" for tier in sources[:count])
        buffers = tuple(buffer for buffer in got[:count] if buffer is not None)
        return Fetched(buffers, tuple(sources[:count]), cause)

    async def _fetch_run(
        self,
        keys: Sequence[ChunkKey],
        run: tuple[int, int, int],
        allocate: Allocate,
        got: list[Buffer | None],
    ) -> None:
        index, start, stop = run
        stacked = self.tiers[index]
        try:
            results = await stacked.tier.get_many(keys[start:stop], allocate)
        except (TierError, BudgetExceededError) as error:
            self._count(stacked, "errors", error)
            return
        for position, result in enumerate(results, start):
            if isinstance(result, TierError):
                self._count(stacked, "errors", result)
            else:
                got[position] = result

    async def _fetch_slower(
        self,
        key: ChunkKey,
        position: int,
        tiers: Sequence[int],
        allocate: Allocate,
        got: list[Buffer | None],
    ) -> int:
        for index in range(tiers[position] + 1, len(self.tiers)):
            try:
                got[position] = await self.tiers[index].tier.get(key, allocate)
            except (TierError, BudgetExceededError) as error:
                self._count(self.tiers[index], "errors", error)
            if got[position] is not None:
                return index
        return tiers[position]

    async def lease_in_arena(self, keys: Sequence[ChunkKey], tiers: Sequence[int]) -> list[Buffer]:
        """Leases of those chunks that their planned tier keeps in the arena; nothing is copied."""
        leases: list[Buffer] = []
        try:
            for index, start, stop in runs(tiers):
                stacked = self.tiers[index]
                if not stacked.tier.capabilities.in_arena:
                    continue
                try:
                    got = await stacked.tier.get_many(keys[start:stop], no_room)
                except (TierError, BudgetExceededError) as error:
                    self._count(stacked, "errors", error)
                    continue
                leases += [buffer for buffer in got if isinstance(buffer, Buffer)]
        except BaseException:
            release_all(leases)
            raise
        return leases

    async def reserve_writes(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> list[WriteReservation]:
        """Wait until every slow tier's queue has room for these chunks.

        Cancelled, or where one has none in time, nothing is reserved.

        Raises:
            BudgetExceededError: A queue has no room within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        reservations: list[WriteReservation] = []
        try:
            for stacked in self._takers:
                if stacked.writer is not None:
                    left = max(0.0, deadline - loop.time())
                    reservations.append(await stacked.writer.reserve(keys, timeout_s=left))
        except BaseException:
            for reservation in reservations:
                reservation.release()
            raise
        return reservations

    async def write(
        self,
        items: Sequence[tuple[ChunkKey, Buffer]],
        on_outcome: Callable[[int, str], None],
        *,
        at_rest: Sequence[Buffer] | None = None,
    ) -> list[list[asyncio.Future[TierError | None]]]:
        """Give the chunks to every tier that takes any. Ends when each tier has them or has queued them.

        Args:
            on_outcome: Called once for each chunk, with its position and "" when at least one tier keeps
                it or else the cause; for queued chunks when the last tier has answered.
            at_rest: What tiers outside of the arena are given for the first so many chunks, instead of the
                same buffers; the other chunks they are not given. None is refused where all is encrypted.

        Returns:
            For each chunk the answers to come of those tiers that share it with other processes.
        """
        outside = leaving(items, at_rest, encrypted=self._encrypted and self.leaves_memory)
        shared: list[list[asyncio.Future[TierError | None]]] = [[] for _ in items]
        errors: list[TierError | None] = [None] * len(items)
        kept = [False] * len(items)
        queued: list[list[asyncio.Future[TierError | None]]] = [[] for _ in items]
        for stacked in self._takers:
            given = outside if stacked.leaves_memory else items
            for position in range(len(given), len(items)):
                errors[position] = TierFullError("no arena memory to encrypt it in")
                self._written(stacked, errors[position])
            if stacked.writer is not None:
                futures = await stacked.writer.submit(given, timeout_s=self._write_timeout_s)
                for position, future in enumerate(futures):
                    queued[position].append(future)
                    if stacked.tier.capabilities.shared:
                        shared[position].append(future)
                    future.add_done_callback(lambda f, s=stacked: self._written(s, f.result()))  # type: ignore[misc]
                continue
            outcomes = await stacked.put_now(given)
            self._written(stacked, *outcomes)
            for position, outcome in enumerate(outcomes):
                errors[position] = outcome
                kept[position] |= outcome is None
        for position, futures in enumerate(queued):
            when_all(futures, kept[position], errors[position], position, on_outcome)
        return shared

    def _written(self, stacked: StackedTier, *outcomes: TierError | None) -> None:
        if stored := outcomes.count(None):
            self.counts[f"{stacked.id}.stored"] += stored
        for error in outcomes:
            if error is not None:
                self._count(stacked, "dropped", error)

    async def promote(self, items: Sequence[tuple[ChunkKey, Buffer]], sources: Sequence[int]) -> None:
        """Copy chunks that came from slower tiers into the faster ones; without waiting for room.

        Where all is encrypted, into those in the arena alone: these buffers are decrypted.
        """
        for index, stacked in enumerate(self.tiers):
            wanted = [item for item, source in zip(items, sources, strict=True) if source > index]
            if not (wanted and stacked.takes) or (self._encrypted and stacked.leaves_memory):
                continue
            if stacked.writer is not None:
                await stacked.writer.submit(wanted, timeout_s=0.0)
            else:
                outcomes = await stacked.put_now(wanted)
                self.counts[f"{stacked.id}.promoted"] += outcomes.count(None)

    async def discard(self, tier: int, key: ChunkKey, cause: str) -> None:
        """Count a record that could not be proven right, and have its tier reject it."""
        stacked = self.tiers[tier]
        self.counts[f"{stacked.id}.corrupt.{cause}"] += 1
        try:
            await stacked.tier.reject(key, cause)
        except TierError as error:
            self._count(stacked, "errors", error)

    def _count(self, stacked: StackedTier, what: str, error: Exception) -> None:
        self.counts[f"{stacked.id}.{what}.{type(error).__name__}"] += 1
