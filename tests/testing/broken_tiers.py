"""Tiers with one fault each, such as people write: the kit has to find every one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import ClassVar

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.fakes import DictTier
from lmcache_async.tiers.base import Capabilities, Tier


class WrongBytes(DictTier):
    """Answers with the record of another key."""

    async def get(self, key, allocate):
        if key not in self.records:
            return None
        other = list(self.records)[0]  # noqa: RUF015 - the first one put
        return await super().get(other, allocate)


class CollidingKeys(DictTier):
    """Keeps only half of each key."""

    def short(self, key):
        return key[:15] + b"\x00"

    async def contains(self, key):
        return await super().contains(self.short(key))

    async def get(self, key, allocate):
        return await super().get(self.short(key), allocate)

    async def put(self, key, buffer):
        await super().put(self.short(key), buffer)


class WrongLength(DictTier):
    """Gives a whole number of pages, whatever was put."""

    async def get(self, key, allocate):
        record = self.records.get(key)
        if record is None:
            return None
        buffer = await allocate(-(-len(record) // 4096) * 4096)
        buffer.view[: len(record)] = record
        return buffer


class CutsLongOnes(DictTier):
    """Has room for 64 KiB of each record."""

    async def put(self, key, buffer):
        self.records[key] = bytes(buffer.view[:65536])


class KeepsLease(DictTier):
    """Takes a lease of each buffer put, and never gives it back."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.kept = []

    async def put(self, key, buffer):
        self.kept.append(buffer.retain())
        await super().put(key, buffer)


class ReleasesCallersLease(DictTier):
    """Gives the caller's lease back, as if it had been handed over."""

    async def put(self, key, buffer):
        await super().put(key, buffer)
        buffer.release()


class KeepsView(DictTier):
    """Keeps the caller's memory in place of a copy."""

    async def get(self, key, allocate):
        view = self.records.get(key)
        if view is None:
            return None
        buffer = await allocate(len(view))
        buffer.view[:] = view
        return buffer

    async def put(self, key, buffer):
        self.records[key] = buffer.array  # outlives the lease


class ChangesCallersBuffer(DictTier):
    """Scrambles in place before it stores."""

    def scramble(self, view):
        for position in range(0, len(view), 1024):
            view[position] ^= 0xFF

    async def get(self, key, allocate):
        buffer = await super().get(key, allocate)
        if buffer is not None:
            self.scramble(buffer.view)
        return buffer

    async def put(self, key, buffer):
        self.scramble(buffer.view)
        await super().put(key, buffer)


class LeaksOnCancel(DictTier):
    """Loses the buffer of a get that is cancelled while the answer arrives."""

    async def get(self, key, allocate):
        buffer = await super().get(key, allocate)
        await asyncio.sleep(0)
        return buffer


class LeaksOnCancelledBatch(DictTier):
    """Loses what a batch has got already when it is cancelled."""

    async def get_many(self, keys, allocate):
        results = []
        for key in keys:
            results.append(await self.get(key, allocate))
            await asyncio.sleep(0)
        return results


class ReadsAfterCancel(DictTier):
    """Goes on reading the caller's memory in the background after it was cancelled."""

    async def put(self, key, buffer):
        view = buffer.array

        async def copy():
            for _ in range(3):
                await asyncio.sleep(0)
            self.records[key] = bytes(view)

        self.task = asyncio.ensure_future(copy())
        await asyncio.shield(self.task)


class TornPut(DictTier):
    """Writes in place, piece by piece: a cancelled or overlapping call finds half a record."""

    async def put(self, key, buffer):
        record = bytes(buffer.view)
        for stop in range(4096, len(record) + 4096, 4096):
            self.records[key] = record[:stop]
            await asyncio.sleep(0)


class LosesOnOverwrite(DictTier):
    """Removes the old record first, and stores nothing when there was one."""

    async def put(self, key, buffer):
        if not await self.remove(key):
            await super().put(key, buffer)


class CountsTwice(DictTier):
    """Counts every put, also that of a chunk which is there."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.counted = 0

    async def put(self, key, buffer):
        await super().put(key, buffer)
        self.counted += buffer.nbytes

    def statistics(self):
        statistics = super().statistics()
        return type(statistics)(chunks=statistics.chunks, bytes=self.counted)


class ContainsLies(DictTier):
    """Remembers what it was ever given."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = set()

    async def contains(self, key):
        return key in self.seen

    async def put(self, key, buffer):
        self.seen.add(key)
        await super().put(key, buffer)


class PrefixOverHoles(DictTier):
    """Counts how many keys are there, not how many leading ones."""

    async def count_prefix(self, keys):
        return sum([await self.contains(key) for key in keys])


class BatchOutOfOrder(DictTier):
    """Answers a batch in the order of the keys' values, as its backend does."""

    async def get_many(self, keys, allocate):
        return await super().get_many(sorted(keys), allocate)


class BatchDropsMisses(DictTier):
    """Gives no answer for what is not there."""

    async def get_many(self, keys, allocate):
        return [result for result in await super().get_many(keys, allocate) if result is not None]


class SwallowsCancellation(DictTier):
    """Takes a cancellation for an error of the backend."""

    async def get(self, key, allocate):
        try:
            await asyncio.sleep(0)
        except (asyncio.CancelledError, OSError):
            return None
        return await super().get(key, allocate)


class HidesCancellation(DictTier):
    """Goes on with a put when it is cancelled, and reports success."""

    async def put(self, key, buffer):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await super().put(key, buffer)


class ExceedsCapacity(DictTier):
    """Evicts after it has stored, in the next turn of the loop."""

    async def put(self, key, buffer):
        limit, self._max_bytes = self._max_bytes, None
        await super().put(key, buffer)
        self._max_bytes = limit
        while limit is not None and sum(map(len, self.records.values())) > 2 * limit:
            self.records.pop(next(iter(self.records)))


class EvictsInSilence(DictTier):
    """Gives records up without counting them."""

    def statistics(self):
        statistics = super().statistics()
        return type(statistics)(
            chunks=statistics.chunks, bytes=statistics.bytes, max_bytes=statistics.max_bytes
        )


class TornContentPasses(DictTier):
    """Remembers the payload of what it stored, and mends with it what was cut off: a torn record passes for whole.

    That would be honest, were the memory not of the wrong record: the one put last.
    """

    async def get(self, key, allocate):
        record = self.records.get(key)
        if record is None:
            return None
        if len(record) < 8192:
            raise IndexError("a record is shorter than it should be")
        buffer = await allocate(len(record))
        buffer.view[:] = record
        return buffer


class DropsOnClose(DictTier):
    """Calls itself persistent, and writes the last record only with the next one."""

    async def __aexit__(self, *error):
        if self.records:
            self.records.popitem()


class KeepsLeaseOverClose(KeepsLease):
    """A tier in the arena that does not give its leases back when it is closed."""

    @property
    def capabilities(self):
        return Capabilities(in_arena=True, removes=True, lists=True, local_index=True)

    async def put(self, key, buffer):
        if key not in self.records:
            await super().put(key, buffer)


class WritesOnInHandedOut(DictTier):
    """Hands out one buffer again and again, and writes the next record into it."""

    scratch: ClassVar[Buffer | None] = None

    async def get(self, key, allocate):
        record = self.records.get(key)
        if record is None:
            return None
        if self.scratch is None:
            self.scratch = await allocate(70_000)
        self.scratch.resize(len(record))
        self.scratch.view[:] = record
        return self.scratch.retain()

    async def __aexit__(self, *error):
        if self.scratch is not None:
            self.scratch.release()
            self.scratch = None


class OtherMemory(DictTier):
    """Gives buffers of an arena of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        from lmcache_async.testing.records import small_arena

        self.own = small_arena(48)

    async def get(self, key, allocate):
        async def own(nbytes):
            return await self.own.lease(nbytes, timeout_s=5)

        return await super().get(key, own)


class MissIsAnError(DictTier):
    """Raises where there is nothing."""

    async def get(self, key, allocate):
        if key not in self.records:
            raise KeyError(key)
        return await super().get(key, allocate)


class NoMemoryBreaksBatch(DictTier):
    """A batch for part of which there is no memory leaks the rest."""

    async def get_many(self, keys, allocate):
        results = []
        for key in keys:
            try:
                results.append(await self.get(key, allocate))
            except BudgetExceededError as error:
                return [TierError(str(error))] * len(keys)
        return results


class RemovesNothing(DictTier):
    """Says that it removed a chunk, and keeps it."""

    async def remove(self, key):
        return key in self.records


class ListsTwice(DictTier):
    """Lists keys by page, and the border of a page twice."""

    async def keys(self):
        for key in list(self.records):
            yield key
        for key in list(self.records)[:1]:
            yield key


class OddErrorWhenClosed(DictTier):
    """Raises what its backend raises when it is used after it was closed."""

    is_open = True

    async def put(self, key, buffer):
        if not self.is_open:
            raise ValueError("I/O operation on closed file")
        await super().put(key, buffer)

    async def __aexit__(self, *error):
        self.is_open = False


class BreaksWhenOverlapped(DictTier):
    """Keeps the record of the call under way in an attribute."""

    async def put(self, key, buffer):
        self.current = bytes(buffer.view)
        await asyncio.sleep(0)
        self.records[key] = self.current


class PutComesLater(DictTier):
    """Says that a chunk is kept before it is there."""

    async def put(self, key, buffer):
        record = bytes(buffer.view)
        self.later = asyncio.get_running_loop().call_soon(self.records.__setitem__, key, record)


class TextKeys(DictTier):
    """Cuts keys at zero bytes, as a backend of strings does."""

    def text(self, key):
        return key.rstrip(b"\x00 ")

    async def contains(self, key):
        return self.text(key) in self.records

    async def get(self, key, allocate):
        return await super().get(self.text(key), allocate)

    async def put(self, key, buffer):
        await super().put(self.text(key), buffer)

    async def remove(self, key):
        return await super().remove(self.text(key))


BROKEN: list[type[Tier]] = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, DictTier) and kind is not DictTier
]
