"""Write queue of a slow tier: FIFO, bounded in bytes and in drain time, several chunks per call."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lmcache_async.errors import BudgetExceededError, TierClosedError, TierError, TierFullError
from lmcache_async.memory.budget import ByteBudget
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.types import ChunkKey

_DECAY = 0.75
"""Factor by which each call reduces the weight of earlier calls in the measured rate."""


@dataclass(frozen=True, slots=True)
class WriterStatistics:
    """State of a write queue.

    Attributes:
        queued_chunks: Chunks that are queued or being written.
        queued_bytes: Bytes of these chunks and of unused reservations, which count against `max_bytes`.
        max_bytes: Bound for further chunks in bytes. If the tier is slow, it is lower than configured, and may be lower
            than what is queued already.
        refused: Chunks that were dropped because the queue had no room within their deadline, or was closed.
    """

    queued_chunks: int
    queued_bytes: int
    max_bytes: int
    refused: int


Count: TypeAlias = Callable[[Sequence[TierError | None]], object]
"""Called with the outcomes of chunks that were written or refused."""


class _Item(NamedTuple):
    key: ChunkKey
    buffer: Buffer
    done: asyncio.Future[TierError | None]
    counted: Count


class WriteReservation:
    """Room in a write queue for chunks that will be submitted.

    Attributes:
        keys: The chunks.
        unused: Chunks whose room is not used yet. A submitted chunk may use the room of any reservation of its key.
    """

    __slots__ = ("_writer", "keys", "unused")

    def __init__(self, writer: TierWriter, keys: Collection[ChunkKey]) -> None:
        self._writer = writer
        self.keys = frozenset(keys)
        self.unused = set(keys)

    def release(self) -> None:
        """Return the room that no chunk has used. May be called twice."""
        self._writer.withdraw(self)


class TierWriter:
    """Writes submitted chunks to one tier, first in, first out.

    A submitted chunk holds a lease of its buffer and bytes of the bound until the tier has stored or refused
    it. Cancelling a task that waits for a result does not stop the write.

    Args:
        tier: The tier.
        max_bytes: Bound of the queue in bytes.
        max_s: Bound of the time, in seconds, that the tier takes to write the queue at its measured rate. One
            chunk may always be queued, however low the rate is.
        chunk_bytes: Bytes of the largest chunk; the bound is at least that.
        call_bytes: Maximum bytes of one call of `put_many`.
        workers: Number of concurrent calls.
    """

    def __init__(
        self,
        tier: TierHandle,
        *,
        max_bytes: int,
        max_s: float = math.inf,
        chunk_bytes: int = 0,
        call_bytes: int = 64 << 20,
        workers: int = 2,
    ) -> None:
        self._tier = tier
        self._budget = ByteBudget(max(max_bytes, chunk_bytes))
        self._max_s = max_s
        self._chunk_bytes = chunk_bytes
        self._reservations: list[WriteReservation] = []
        self._call_bytes = call_bytes
        self._queue: deque[_Item] = deque()
        self._work = asyncio.Event()
        self._num_workers = workers
        self._workers: list[asyncio.Task[None]] = []
        self._pending: set[asyncio.Future[TierError | None]] = set()
        self._refused = 0
        self._closed = False
        # Bytes written and seconds of writing, exponentially weighted, and the end of the last call.
        self._written, self._seconds, self._ended = 0.0, 0.0, -math.inf

    def start(self) -> None:
        self._workers = [asyncio.create_task(self._run()) for _ in range(self._num_workers)]

    async def reserve(self, keys: Collection[ChunkKey], *, timeout_s: float) -> WriteReservation:
        """Wait for room for chunks that will be submitted. If the call is cancelled, nothing is reserved.

        Raises:
            BudgetExceededError: There was no room within `timeout_s`, or the chunks exceed the bound (raised
                at once).
        """
        reservation = WriteReservation(self, keys)
        await self._budget.reserve(len(reservation.keys) * self._chunk_bytes, timeout_s=timeout_s)
        self._reservations.append(reservation)
        return reservation

    def withdraw(self, reservation: WriteReservation) -> None:
        """End a reservation. Other reservations of the same chunks keep their room."""
        if reservation not in self._reservations:
            return
        self._reservations.remove(reservation)
        # A chunk may have used the room of another reservation instead of this one's.
        for other in self._reservations:
            if not reservation.unused:  # true of most batches
                break
            moved = reservation.unused & (other.keys - other.unused)
            other.unused |= moved
            reservation.unused -= moved
        self._budget.release(len(reservation.unused) * self._chunk_bytes)

    async def submit(
        self,
        items: Sequence[tuple[ChunkKey, Buffer]],
        *,
        timeout_s: float,
        reserved: bool = True,
        count: Count = lambda outcomes: None,
    ) -> list[asyncio.Future[TierError | None]]:
        """Queue the chunks in order.

        If there is no room for a chunk within `timeout_s`, this chunk and all after it are refused, so that a prompt
        loses its last chunks. If the call is cancelled, chunks that are queued stay queued and are counted.

        Args:
            items: Keys and records.
            timeout_s: Longest wait for room, in seconds, for all chunks together.
            reserved: Use the room that is reserved for a chunk, if there is any.
            count: Called with the outcome of each chunk that was queued or refused.

        Returns:
            For each chunk a future of None if it was stored, else of the error.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        futures: list[asyncio.Future[TierError | None]] = []
        refusal: TierError | None = None
        for key, buffer in items:
            future: asyncio.Future[TierError | None] = loop.create_future()
            futures.append(future)
            if refusal is None and not (reserved and self._use_reservation(key, buffer.nbytes)):
                refusal = await self._take_room(buffer.nbytes, deadline - loop.time())
            if refusal is not None:
                self._refused += 1
                count([refusal])
                future.set_result(refusal)
                continue
            self._pending.add(future)
            self._queue.append(_Item(key, buffer.retain(), future, count))
            self._work.set()
        return futures

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything submitted so far is written. Return False if it is not within `timeout_s`."""
        if not self._pending:
            return True
        _, late = await asyncio.wait(set(self._pending), timeout=timeout_s)
        return not late

    async def aclose(self, *, timeout_s: float) -> None:
        """Flush for up to `timeout_s`, then release every lease, even if cancelled."""
        self._closed = True
        try:
            await self.flush(timeout_s=timeout_s)
        finally:
            for worker in self._workers:
                worker.cancel()
            # Before the next await, so that a second cancellation cannot skip it.
            left = list(self._queue)
            self._queue.clear()
            self._end(left, [self._was_closed()] * len(left))
            await asyncio.gather(*self._workers, return_exceptions=True)

    def statistics(self) -> WriterStatistics:
        budget = self._budget.statistics()
        return WriterStatistics(
            queued_chunks=len(self._pending),
            queued_bytes=budget.used_bytes,
            max_bytes=budget.max_bytes,
            refused=self._refused,
        )

    def _use_reservation(self, key: ChunkKey, nbytes: int) -> bool:
        """Use the room that is reserved for a chunk. Return whether there is any."""
        if self._closed or nbytes > self._chunk_bytes:
            return False
        for reservation in self._reservations:
            if key in reservation.unused:
                reservation.unused.remove(key)
                self._budget.release(self._chunk_bytes - nbytes)
                return True
        return False

    async def _take_room(self, nbytes: int, timeout_s: float) -> TierError | None:
        """Wait for room for a chunk. Return the error if there is none in time."""
        if refusal := self._refusal():
            return refusal
        try:
            await self._budget.reserve(nbytes, timeout_s=max(timeout_s, 0.0))
        except BudgetExceededError as error:
            full = TierFullError(f"tier {self._tier.name!r}: its write queue has no room: {error}")
            full.__cause__ = error
            return full
        if refusal := self._refusal():  # closed during the wait: it would never be written
            self._budget.release(nbytes)
        return refusal

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._work.clear()
                await self._work.wait()
            items = self._take()
            outcome: Sequence[TierError | None] = [self._was_closed()] * len(items)
            start = loop.time()
            try:
                outcome = await self._tier.put([(item.key, item.buffer) for item in items])
                self._measure(items, outcome, start, loop.time())
            finally:
                self._end(items, outcome)

    def _measure(
        self, items: Sequence[_Item], outcome: Sequence[TierError | None], start: float, end: float
    ) -> None:
        """Limit the queue to what the tier writes in `max_s`. Time that overlaps with an earlier call counts once."""
        written = sum(item.buffer.nbytes for item, error in zip(items, outcome, strict=True) if error is None)
        if not written:  # a call that stored nothing is no measurement
            return
        self._written = self._written * _DECAY + written
        self._seconds = self._seconds * _DECAY + max(0.0, end - max(start, self._ended))
        self._ended = end
        if self._seconds:
            in_time = self._written * self._max_s / self._seconds
            self._budget.limit(int(min(in_time, self._budget.max_bytes)))

    def _take(self) -> list[_Item]:
        items = [self._queue.popleft()]
        nbytes = items[0].buffer.nbytes
        while self._queue and nbytes + self._queue[0].buffer.nbytes <= self._call_bytes:
            items.append(self._queue.popleft())
            nbytes += items[-1].buffer.nbytes
        return items

    def _end(self, items: Sequence[_Item], outcomes: Sequence[TierError | None]) -> None:
        """Return the room and the leases of chunks, and set their futures."""
        for count, group in itertools.groupby(
            zip(items, outcomes, strict=True), lambda pair: pair[0].counted
        ):
            # Called by the loop, which logs an exception and continues. The callbacks of the futures run afterwards.
            asyncio.get_running_loop().call_soon(count, [error for _, error in group])
        for item, error in zip(items, outcomes, strict=True):
            self._budget.release(item.buffer.nbytes)
            item.buffer.release()
            self._pending.discard(item.done)
            if not item.done.done():
                item.done.set_result(error)

    def _refusal(self) -> TierError | None:
        return self._was_closed() if self._closed else None

    def _was_closed(self) -> TierError:
        return TierClosedError(f"tier {self._tier.name!r} was closed")
