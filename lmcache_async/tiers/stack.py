"""The tier stack of an engine: lookup, fetch, write and promotion over all tiers, fastest first."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from operator import not_
from typing import Protocol, Self

from lmcache_async.errors import (
    BudgetExceededError,
    ChainError,
    ChunkCorruptError,
    TierClosedError,
    TierError,
    TierFullError,
    TierSuspendedError,
)
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.encryption import is_encrypted
from lmcache_async.metrics.metrics import EngineMetrics
from lmcache_async.tiers.base import Allocate
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.results import ReadResult, release_results
from lmcache_async.tiers.writer import TierWriter, WriteReservation
from lmcache_async.types import ChunkKey, WriteResult

_LOGGED_ELSEWHERE = TierSuspendedError, TierClosedError, ChunkCorruptError
"""Errors that are logged elsewhere: by the breaker, when the engine closes, or by the tier itself."""


@dataclass(frozen=True, slots=True)
class StackedTier:
    """A tier in the stack.

    Attributes:
        id: Name in the configuration, log lines and counters; unique in the stack.
        tier: The tier with its layers.
        writer: Write queue of the tier; None for a tier in the arena, which stores a chunk at once, and for a
            read-only tier.
    """

    id: str
    tier: TierHandle
    writer: TierWriter | None = None

    @property
    def leaves_memory(self) -> bool:
        """Whether its records are stored outside the arena."""
        return not self.tier.capabilities.in_arena

    @property
    def writable(self) -> bool:
        """Whether the tier accepts writes; otherwise it is only read."""
        return self.tier.capabilities.writes


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch: buffers of the leading chunks, leased to the caller.

    Attributes:
        buffers: One for each chunk up to the first missing one.
        tiers: For each buffer the index of the tier that it was read from.
        cause: Why the prefix ends early; "" if all chunks were read.
    """

    buffers: tuple[Buffer, ...]
    tiers: tuple[int, ...]
    cause: str


class OnResults(Protocol):
    """Callback with the results of a write to one tier, and whether the tier is `shared` with other processes."""

    def __call__(self, results: Sequence[WriteResult], *, shared: bool) -> None: ...


class TierStack:
    """Ordered tiers. A failure of one tier is a miss of that tier or a counted drop; it is not raised.

    Args:
        tiers: Entries, fastest first.
        write_timeout_s: Seconds that a chunk waits for room in the queue of a slow tier before it is dropped.
        encrypted: Only encrypted records may leave the memory of the process.
        metrics: Counts hits, writes and failures.
        logger: Logs failures.
    """

    def __init__(
        self,
        tiers: Sequence[StackedTier],
        *,
        write_timeout_s: float,
        encrypted: bool = False,
        metrics: EngineMetrics | None = None,
        logger: LimitedLogger | None = None,
    ) -> None:
        self.tiers = tuple(tiers)
        self.metrics = metrics or EngineMetrics()
        self._counts = {stacked.id: self.metrics.tier(stacked.id) for stacked in tiers}
        self._logger = logger or LimitedLogger(logging.getLogger(__name__))
        self._write_timeout_s = write_timeout_s
        self._encrypted = encrypted
        self._exit = AsyncExitStack()
        self._writable = [stacked for stacked in self.tiers if stacked.writable]

    @property
    def leaves_memory(self) -> bool:
        """Whether records are written to any tier outside the arena."""
        return any(stacked.leaves_memory for stacked in self._writable)

    @property
    def late_calls(self) -> int:
        """Number of abandoned calls that have not ended yet."""
        return sum(stacked.tier.late_calls for stacked in self.tiers)

    async def open(self, arena: Arena) -> Self:
        """Bind every tier to the arena and open it. If one fails, those already open are closed again."""
        async with AsyncExitStack() as stack:
            for stacked in self.tiers:
                stacked.tier.bind(arena)
                await stack.enter_async_context(stacked.tier)
                if stacked.writer is not None:
                    stacked.writer.start()
                    stack.push_async_callback(stacked.writer.aclose, timeout_s=0.0)
            self._exit = stack.pop_all()
        # The capabilities of a tier may change when it is opened.
        self._writable = [stacked for stacked in self.tiers if stacked.writable]
        return self

    async def aclose(self, *, timeout_s: float) -> None:
        """Flush the write queues for up to `timeout_s`, then close every tier, even if cancelled."""
        try:
            await self.flush(timeout_s=timeout_s)
        finally:
            await self._exit.aclose()

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until no write is queued and no write or abandoned call is running.

        Return False if this is not the case within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        writers = [stacked.writer for stacked in self.tiers if stacked.writer is not None]
        written = await asyncio.gather(*(writer.flush(timeout_s=timeout_s) for writer in writers))
        left_s = max(0.0, deadline - loop.time())  # a write may have been abandoned in the meantime
        ended = await asyncio.gather(*(stacked.tier.drain(timeout_s=left_s) for stacked in self.tiers))
        return all(written) and all(ended)

    async def plan(
        self, keys: Sequence[ChunkKey], in_arena: bool = False, *, deadline: float = math.inf
    ) -> tuple[tuple[int, ...], str]:
        """Find the longest stored prefix and, for each of its chunks, the fastest tier that has it.

        Args:
            keys: Keys in prefix order.
            in_arena: Look up only the tiers that store their chunks in the arena.
            deadline: Time of the event loop after which tiers outside the arena are not awaited; they then have no chunk.

        Returns:
            The indices of the tiers, and the reason why the prefix ends ("" if it is all of `keys`).
        """
        tiers = [-1] * len(keys)
        holes = list(range(len(keys)))
        failed = False
        first = -1
        while holes and holes[0] > first:  # the last round has extended the prefix
            first = holes[0]
            for index, stacked in enumerate(self.tiers):
                if not holes:
                    break
                if in_arena and not stacked.tier.capabilities.in_arena:
                    continue
                try:
                    stored = await stacked.tier.lookup(
                        [keys[position] for position in holes], deadline=deadline
                    )
                except TierError as error:
                    failed = True
                    self._failed(stacked, error)
                    continue
                for position in compress(holes, stored):
                    tiers[position] = index
                holes = [position for position in holes if tiers[position] < 0]
        prefix = holes[0] if holes else len(keys)
        cause = "" if prefix == len(keys) else "tier_error" if failed else "miss"
        return tuple(tiers[:prefix]), cause

    async def missing(
        self, keys: Sequence[ChunkKey], *, memory_chunks: int | None = None, deadline: float = math.inf
    ) -> list[int]:
        """Return the positions of chunks that at least one writable tier lacks.

        A tier without a local index is only queried for a prefix. If every writable tier fails, all positions
        are returned.

        Args:
            keys: Keys in prefix order.
            memory_chunks: Number of leading chunks that tiers in the arena should have; None for all.
            deadline: Time of the event loop after which tiers outside the arena are not awaited; they then count as failed.
        """
        lacking: set[int] = set()
        everything = list(range(len(keys)))
        answered = not self._writable
        for stacked in self._writable:
            try:
                stored = await stacked.tier.lookup(keys, deadline=deadline)
            except TierError as error:
                self._failed(stacked, error)
                continue  # a tier that fails would not accept a write now either
            answered = True
            wanted = everything if stacked.leaves_memory else everything[:memory_chunks]
            lacking.update(compress(wanted, map(not_, stored)))
        return everything if len(lacking) == len(keys) or not answered else sorted(lacking)

    async def fetch(
        self,
        keys: Sequence[ChunkKey],
        tiers: Sequence[int],
        allocate: Allocate,
        *,
        slower: bool = True,
        max_slower: int | None = None,
        deadline: float = math.inf,
    ) -> Fetched:
        """Read the chunks up to the first one that cannot be read, each from its planned tier.

        If the call is cancelled, all buffers read so far are released.

        Args:
            keys: Keys in prefix order.
            tiers: For each key the index of its tier.
            allocate: Leases memory for records.
            slower: If the planned tier does not have a chunk, try slower tiers.
            max_slower: Number of chunks for which slower tiers are tried; None for all.
            deadline: Time of the event loop after which tiers outside the arena are not awaited.
        """
        got: list[Buffer | None] = [None] * len(keys)
        sources = list(tiers)
        slower_left = 0 if not slower else len(keys) if max_slower is None else max_slower

        async def read(index: int, start: int, stop: int) -> None:
            got[start:stop] = await self._read(index, keys[start:stop], allocate, deadline)

        try:
            parts = runs(tiers)
            if len(parts) == 1:  # nothing to run concurrently, so without the frames of `read`
                stacked = self.tiers[tiers[0]]
                try:
                    got = self._hits(stacked, await stacked.tier.get(keys, allocate, deadline=deadline))
                except (TierError, BudgetExceededError) as error:
                    self._failed(stacked, error)
            else:
                async with asyncio.TaskGroup() as group:
                    for part in parts:
                        group.create_task(read(*part))
            for position, planned in enumerate(tiers):
                if got[position] is None and slower_left:
                    slower_left -= 1
                    for index in range(planned + 1, len(self.tiers)):
                        await read(index, position, position + 1)
                        sources[position] = index
                        if got[position] is not None:
                            break
                if got[position] is None:
                    break
        except BaseException:
            release_results(got)
            raise
        count = next((i for i, buffer in enumerate(got) if buffer is None), len(got))
        release_results(got[count:])
        for tier, start, stop in runs(sources[:count]):
            self._counts[self.tiers[tier].id].hit_chunks.add(stop - start)
        buffers = tuple(buffer for buffer in got[:count] if buffer is not None)
        return Fetched(buffers, tuple(sources[:count]), "" if count == len(keys) else "vanished")

    async def _read(
        self, index: int, keys: Sequence[ChunkKey], allocate: Allocate, deadline: float = math.inf
    ) -> list[Buffer | None]:
        """Read chunks from one tier. A failure of the tier is counted and is a miss."""
        stacked = self.tiers[index]
        try:
            return self._hits(stacked, await stacked.tier.get(keys, allocate, deadline=deadline))
        except (TierError, BudgetExceededError) as error:
            self._failed(stacked, error)
            return [None] * len(keys)

    def _hits(self, stacked: StackedTier, results: list[ReadResult]) -> list[Buffer | None]:
        """Count the errors among the results of a tier and replace them by misses."""
        hits: list[Buffer | None] = []
        for result in results:
            if isinstance(result, TierError):
                self._failed(stacked, result)
                hits.append(None)
            else:
                hits.append(result)
        return hits

    async def lease_in_arena(self, keys: Sequence[ChunkKey], tiers: Sequence[int]) -> list[Buffer]:
        """Lease the chunks whose planned tier, by index, stores them in the arena; nothing is copied.

        If the call is cancelled, all leases are released.
        """
        leases: list[Buffer] = []
        try:
            for index, start, stop in runs(tiers):
                if self.tiers[index].tier.capabilities.in_arena:
                    read = await self._read(index, keys[start:stop], _no_memory)
                    leases += [buffer for buffer in read if buffer is not None]
        except BaseException:
            release_results(leases)
            raise
        return leases

    async def reserve_writes(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> list[WriteReservation]:
        """Wait until the queue of every slow tier has room for these chunks.

        If the call is cancelled or fails, nothing is reserved.

        Raises:
            BudgetExceededError: A queue has no room within `timeout_s`, which is for all queues together.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        reservations: list[WriteReservation] = []
        try:
            for stacked in self._writable:
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
        on_results: OnResults,
        *,
        at_rest: Sequence[Buffer] | None = None,
    ) -> None:
        """Write the chunks to every writable tier. Ends when each tier has stored or queued them.

        Args:
            items: Keys and records.
            on_results: Called once for each tier with its result for each chunk, or a future of the result.
            at_rest: Encrypted records of the first `len(at_rest)` chunks, for tiers outside the arena. The
                other chunks are not written to these tiers. None means that the plain records are written,
                which is refused if everything is encrypted.

        Raises:
            ChainError: Encryption is on, and `at_rest` is None or contains a record that is not encrypted.
        """
        outside = items
        if at_rest is not None:
            outside = [(key, buffer) for (key, _), buffer in zip(items, at_rest, strict=False)]
        needs_encryption = self._encrypted and self.leaves_memory
        if needs_encryption and (at_rest is None or not all(is_encrypted(one.view) for one in at_rest)):
            raise ChainError("encryption is on, but a stage of store.stages passes plain records to `write`")
        for stacked in self._writable:
            count = partial(self._written, stacked)
            given = outside if stacked.leaves_memory else items
            left_out = [TierFullError("no arena memory for the encrypted record")] * (len(items) - len(given))
            count(left_out)
            results: Sequence[WriteResult]
            if stacked.writer is None:
                results = await stacked.tier.put(given)
                count(results)
            else:
                results = await stacked.writer.submit(given, timeout_s=self._write_timeout_s, count=count)
            on_results([*results, *left_out], shared=stacked.tier.capabilities.shared)

    async def promote(self, items: Sequence[tuple[ChunkKey, Buffer]], sources: Sequence[int]) -> None:
        """Copy chunks that were read from slower tiers to the faster ones, without waiting for room.

        If encryption is on, they are only copied to tiers in the arena, because these buffers are decrypted.

        Args:
            items: Keys and verified records.
            sources: For each item the index of the tier that it was read from.
        """
        for index, stacked in enumerate(self.tiers):
            wanted = [item for item, source in zip(items, sources, strict=True) if source > index]
            if not (wanted and stacked.writable) or (self._encrypted and stacked.leaves_memory):
                continue
            count = partial(self._promoted, stacked)
            if stacked.writer is not None:
                # Reserved room is for stores, so a promotion does not use it.
                await stacked.writer.submit(wanted, timeout_s=0.0, reserved=False, count=count)
            else:
                count(await stacked.tier.put(wanted))

    async def reject(self, tier: int, key: ChunkKey, error: ChunkCorruptError, what: str) -> None:
        """Log what is wrong with a record that was read from the tier of index `tier`, and discard it."""
        self._logger.report(
            f"{what}.{error.cause}",
            "tier %r: record %s %s (%s: %s); rejected, counted as a miss",
            self.tiers[tier].id,
            key.hex(),
            what,
            error.cause,
            error,
        )
        await self.discard(tier, key, error.cause)

    async def discard(self, tier: int, key: ChunkKey, cause: str) -> None:
        """Count a record that failed verification for `cause`, and reject it in the tier of index `tier`."""
        stacked = self.tiers[tier]
        self._counts[stacked.id].corrupt(cause)
        try:
            await stacked.tier.reject(key, cause)
        except TierError as error:
            self._failed(stacked, error)

    def _failed(self, stacked: StackedTier, error: TierError | BudgetExceededError) -> None:
        """Count and log a failure that is handled as a miss."""
        self._counts[stacked.id].failed(error)
        self._log(stacked, "a call failed and counts as a miss", error)

    def _written(self, stacked: StackedTier, outcomes: Sequence[TierError | None]) -> None:
        """Count the chunks of a write, and log why chunks were not stored."""
        self._counts[stacked.id].written(outcomes)
        for error in filter(None, outcomes):
            self._log(stacked, "a chunk was not stored", error)

    def _promoted(self, stacked: StackedTier, outcomes: Sequence[TierError | None]) -> None:
        """Count the chunks of a promotion, and log failures. A full tier is not a failure: promotions do not wait for room."""
        self._counts[stacked.id].promoted(outcomes)
        for error in filter(None, outcomes):
            if not isinstance(error, TierFullError):
                self._log(stacked, "a chunk was not promoted", error)

    def _log(self, stacked: StackedTier, what: str, error: TierError | BudgetExceededError) -> None:
        if isinstance(error, _LOGGED_ELSEWHERE):
            return
        text = describe(error).removeprefix(f"tier {stacked.id!r}: ")
        kind = type(error.__cause__ or error).__name__
        self._logger.report(f"{stacked.id}.{what}.{kind}", "tier %r: %s: %s", stacked.id, what, text)


def runs(tiers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group consecutive chunks of the same tier: (tier, start, stop) in prefix order."""
    if tiers and tiers.count(tiers[0]) == len(tiers):  # by far the most frequent case
        return [(tiers[0], 0, len(tiers))]
    cuts = [position for position in range(1, len(tiers)) if tiers[position] != tiers[position - 1]]
    return [(tiers[start], start, stop) for start, stop in pairwise([0, *cuts, len(tiers)]) if start < stop]


async def _no_memory(nbytes: int) -> Buffer:
    raise BudgetExceededError(f"a tier in the arena requested {nbytes} bytes; it must return its own leases")
