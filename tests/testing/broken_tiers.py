"""Tiers with one typical fault each. The kit must detect all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from lmcache_async.errors import BudgetExceededError, TierError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.fakes import DictTier
from lmcache_async.tiers.base import Capabilities, Tier
from lmcache_async.tiers.results import call_each


class WrongBytes(DictTier):
    """Returns the record of another key."""

    async def get(self, key, allocate):
        if key not in self.records:
            return None
        other = list(self.records)[0]  # noqa: RUF015 - the first one put
        return await super().get(other, allocate)


class CutsLongOnes(DictTier):
    """Truncates records at 64 KiB."""

    async def put(self, key, buffer):
        self.records[key] = bytes(buffer.view[:65536])


class KeepsLease(DictTier):
    """Retains the buffer of each put and never releases it."""

    kept = ()

    async def put(self, key, buffer):
        self.kept = (*self.kept, buffer.retain())
        await super().put(key, buffer)


class ReleasesCallersLease(DictTier):
    """Releases the caller's lease."""

    async def put(self, key, buffer):
        await super().put(key, buffer)
        buffer.release()


class ChangesCallersBuffer(DictTier):
    """Modifies the caller's buffer before storing it."""

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
    """Leaks the buffer of a get that is cancelled while the answer arrives."""

    async def get(self, key, allocate):
        buffer = await super().get(key, allocate)
        await asyncio.sleep(0)
        return buffer


class ReadsAfterCancel(DictTier):
    """Continues to read the caller's memory in the background after a cancellation."""

    async def put(self, key, buffer):
        view = buffer.array

        async def copy():
            for _ in range(3):
                await asyncio.sleep(0)
            self.records[key] = bytes(view)

        self.task = asyncio.ensure_future(copy())
        await asyncio.shield(self.task)


class CopiesInThreadAfterPut(DictTier):
    """Copies the record in a thread after put has returned. Other calls wait for the thread."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.pool = ThreadPoolExecutor(1)
        self.copies = []

    def copy(self, key, array):
        self.records[key] = bytes(array)

    async def put(self, key, buffer):
        self.copies.append(self.pool.submit(self.copy, key, buffer.array))

    async def wait_for_copies(self):
        while self.copies:
            await asyncio.wrap_future(self.copies.pop())

    async def contains(self, key):
        await self.wait_for_copies()
        return await super().contains(key)

    async def get(self, key, allocate):
        await self.wait_for_copies()
        return await super().get(key, allocate)

    async def __aexit__(self, *error):
        await self.wait_for_copies()
        self.pool.shutdown()


class TornPut(DictTier):
    """Writes in place, piece by piece: after a cancellation or during an overlapping call half a record is visible."""

    async def put(self, key, buffer):
        record = bytes(buffer.view)
        for stop in range(4096, len(record) + 4096, 4096):
            self.records[key] = record[:stop]
            await asyncio.sleep(0)


class LosesOnOverwrite(DictTier):
    """Removes the old record first, and then stores nothing."""

    async def put(self, key, buffer):
        if not await self.remove(key):
            await super().put(key, buffer)


class CountsTwice(DictTier):
    """Counts every put, also of a stored chunk."""

    counted = 0

    async def put(self, key, buffer):
        await super().put(key, buffer)
        self.counted += buffer.nbytes

    def statistics(self):
        statistics = super().statistics()
        return type(statistics)(chunks=statistics.chunks, bytes=self.counted)


class ContainsLies(DictTier):
    """Reports every key that was ever put."""

    seen = frozenset()

    async def contains(self, key):
        return key in self.seen

    async def put(self, key, buffer):
        self.seen |= {key}
        await super().put(key, buffer)


class PrefixOverHoles(DictTier):
    """Returns the number of stored keys instead of the length of the leading run."""

    async def count_prefix(self, keys):
        return sum([await self.contains(key) for key in keys])


class BatchDropsMisses(DictTier):
    """Omits misses from the results of a batch."""

    async def get_many(self, keys, allocate):
        return [result for result in await super().get_many(keys, allocate) if result is not None]


class SwallowsCancellation(DictTier):
    """Handles a cancellation as an error of the backend."""

    async def get(self, key, allocate):
        try:
            await asyncio.sleep(0)
        except (asyncio.CancelledError, OSError):
            return None
        return await super().get(key, allocate)


class HidesCancellation(DictTier):
    """Continues a cancelled put, and reports success."""

    async def put(self, key, buffer):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await super().put(key, buffer)


class ExceedsCapacity(DictTier):
    """Evicts one loop iteration after storing."""

    async def put(self, key, buffer):
        limit, self._max_bytes = self._max_bytes, None
        await super().put(key, buffer)
        self._max_bytes = limit
        while limit is not None and sum(map(len, self.records.values())) > 2 * limit:
            self.records.pop(next(iter(self.records)))


class OddErrorForLongRecord(DictTier):
    """Raises an error of its own for a record larger than its capacity."""

    async def put(self, key, buffer):
        if self._max_bytes is not None and buffer.nbytes > self._max_bytes:
            raise ValueError("too long")
        await super().put(key, buffer)


class EvictsInSilence(DictTier):
    """Does not count evictions."""

    def statistics(self):
        statistics = super().statistics()
        return type(statistics)(
            chunks=statistics.chunks, bytes=statistics.bytes, max_bytes=statistics.max_bytes
        )


class EvictsWithoutEvent(DictTier):
    """Counts evictions, but does not call `on_evicted`."""

    on_evicted = property(lambda self: None, lambda self, callback: None)


class ReportsEvictionsInThread(DictTier):
    """Calls `on_evicted` in a thread of its own."""

    @property
    def on_evicted(self):
        return self.report

    @on_evicted.setter
    def on_evicted(self, callback):
        self.callback = callback

    def report(self, keys):
        with ThreadPoolExecutor() as pool:
            pool.submit(self.callback, keys).result()


class TornContentPasses(DictTier):
    """Repairs truncated records with the payload last stored: a torn record passes as complete.

    The repair would be right if the payload were that of the same record.
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
    """Claims to be persistent, but writes each record only with the next one."""

    async def __aexit__(self, *error):
        if self.records:
            self.records.popitem()


class KeepsLeaseOverClose(KeepsLease):
    """A tier in the arena that does not release its leases when it is closed."""

    @property
    def capabilities(self):
        return Capabilities(in_arena=True, removes=True, lists=True, local_index=True)

    async def put(self, key, buffer):
        if key not in self.records:
            await super().put(key, buffer)


class WritesOnInHandedOut(DictTier):
    """Returns the same buffer each time, and writes the next record into it."""

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
    """Returns buffers of a separate arena."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        from lmcache_async.testing.records import small_arena

        self.own = small_arena(48)

    async def get(self, key, allocate):
        async def own(nbytes):
            return await self.own.lease(nbytes, timeout_s=5)

        return await super().get(key, own)


class NoMemoryBreaksBatch(DictTier):
    """Leaks buffers if memory for a part of a batch is not available."""

    async def get_many(self, keys, allocate):
        results = []
        for key in keys:
            try:
                results.append(await self.get(key, allocate))
            except BudgetExceededError as error:
                return [TierError(str(error))] * len(keys)
        return results


class RemovesNothing(DictTier):
    """Reports a chunk as removed, and keeps it."""

    async def remove(self, key):
        return key in self.records


class ListsTwice(DictTier):
    """Lists the keys at page boundaries twice."""

    async def keys(self):
        for key in list(self.records):
            yield key
        for key in list(self.records)[:1]:
            yield key


class OddErrorWhenClosed(DictTier):
    """Raises the backend's own error when used after close."""

    is_open = True

    async def put(self, key, buffer):
        if not self.is_open:
            raise ValueError("I/O operation on closed file")
        await super().put(key, buffer)

    async def __aexit__(self, *error):
        self.is_open = False


class LosesWhenClosed(OddErrorWhenClosed):
    """Reports success of a put after close, and stores nothing."""

    async def put(self, key, buffer):
        if self.is_open:
            await super().put(key, buffer)


class BreaksWhenOverlapped(DictTier):
    """Keeps the record of the current call in an attribute."""

    async def put(self, key, buffer):
        self.current = bytes(buffer.view)
        await asyncio.sleep(0)
        self.records[key] = self.current


class PutComesLater(DictTier):
    """Reports a chunk as stored before it is."""

    async def put(self, key, buffer):
        record = bytes(buffer.view)
        self.later = asyncio.get_running_loop().call_soon(self.records.__setitem__, key, record)


class EndsBeforeOtherPut(DictTier):
    """Ends a put at once if another put of the same key is running."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.running = set()

    async def put(self, key, buffer):
        if key in self.running:
            return
        self.running.add(key)
        try:
            await asyncio.sleep(0)
            await super().put(key, buffer)
        finally:
            self.running.remove(key)


class SharesCancellation(DictTier):
    """Lets a put wait for another put of the same key, also if that one is cancelled."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.running = {}

    async def put(self, key, buffer):
        if key in self.running:
            await self.running[key].wait()
            return
        ended = self.running[key] = asyncio.Event()
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await super().put(key, buffer)
        finally:
            del self.running[key]
            ended.set()


class TextKeys(DictTier):
    """Truncates keys at zero bytes, like a backend with C strings."""

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


class StaleAfterClear(DictTier):
    """Keeps the records that were read in a cache that `clear` does not empty."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cache = {}

    async def get(self, key, allocate):
        record = self.cache.setdefault(key, self.records.get(key))
        if record is None:
            return await super().get(key, allocate)
        buffer = await allocate(len(record))
        buffer.view[:] = record
        return buffer

    async def remove(self, key):
        self.cache.pop(key, None)
        return await super().remove(key)

    async def clear(self):
        count = len(self.records)
        self.records.clear()
        return count


class StaleBatchLookup(DictTier):
    """Remembers the chunks that a batch found, also after they were removed."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.found = set()

    async def contains_many(self, keys):
        self.found.update(key for key in keys if key in self.records)
        return [key in self.found for key in keys]


class StalePrefix(StaleBatchLookup):
    """Remembers the chunks of prefixes, also after they were removed."""

    async def count_prefix(self, keys):
        return [*await StaleBatchLookup.contains_many(self, keys), False].index(False)

    contains_many = DictTier.contains_many


class StaleBatchRead(StaleAfterClear):
    """Only batches are read from a cache, which removals do not empty."""

    remove = DictTier.remove
    clear = DictTier.clear

    async def get(self, key, allocate):
        return await DictTier.get(self, key, allocate)

    async def get_many(self, keys, allocate):
        return await call_each("get", keys, lambda key: StaleAfterClear.get(self, key, allocate), 1)


class SwallowsRejectCancellation(DictTier):
    """Continues a cancelled `reject`."""

    async def reject(self, key, cause):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return await self.remove(key)


class RemembersMisses(DictTier):
    """`lacks` remembers the chunks that were not stored, also after they were."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.missing = set()

    def lacks(self, key):
        if key not in self.records:
            self.missing.add(key)
        return key in self.missing


class LeavesTask(DictTier):
    """Starts a task when it is opened, and does not end it."""

    async def __aenter__(self):
        self.task = asyncio.ensure_future(asyncio.Event().wait())
        return self


class LeavesFile(DictTier):
    """Opens a file whenever it is opened, and does not close it."""

    files: ClassVar[list[int]] = []

    async def __aenter__(self):
        self.files.append(os.open(os.devnull, os.O_RDONLY))
        return self


class LeavesThread(DictTier):
    """Starts a thread whenever it is opened, and does not end it."""

    async def __aenter__(self):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return self


class MissesInOutage(DictTier):
    """Reports a miss while its backend is stopped."""

    stopped = False

    async def get(self, key, allocate):
        return await self.in_outage(super().get(key, allocate), None)

    async def put(self, key, buffer):
        await self.in_outage(super().put(key, buffer), TierUnavailableError("the backend is stopped"))

    async def in_outage(self, call, result):
        if not self.stopped:
            return await call
        call.close()
        if isinstance(result, Exception):
            raise result
        return result


class StoresNothingInOutage(MissesInOutage):
    """Ignores puts while its backend is stopped."""

    async def in_outage(self, call, result):
        return await super().in_outage(call, result and None)

    async def get(self, key, allocate):
        return await super().in_outage(DictTier.get(self, key, allocate), TierUnavailableError("stopped"))


class OddErrorInOutage(MissesInOutage):
    """Raises an OSError while its backend is stopped."""

    async def in_outage(self, call, result):
        return await super().in_outage(call, OSError("the backend is stopped"))


class ListsLiveRecords(DictTier):
    """Fails to list its keys if a chunk is stored meanwhile. A put takes many steps of the loop."""

    async def put(self, key, buffer):
        record = bytes(buffer.view)
        for _ in range(50):
            await asyncio.sleep(0)
        self.records[key] = record

    async def keys(self):
        for key in self.records:
            yield key


class MergesRepeatedKeys(DictTier):
    """Looks up a repeated key of a batch once."""

    async def contains_many(self, keys):
        return [key in self.records for key in dict.fromkeys(keys)]


class FindsCancelledPuts(DictTier):
    """Enters a chunk in its index before the record is stored, and leaves it there if the put is cancelled."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.index = set(self.records)

    async def contains(self, key):
        return key in self.index

    async def put(self, key, buffer):
        self.index.add(key)
        record = bytes(buffer.view)
        await asyncio.sleep(0)
        if key in self.index:
            self.records[key] = record

    async def remove(self, key):
        self.index.discard(key)
        return await super().remove(key)


class ReturnsBytes(DictTier):
    """Returns the stored bytes instead of a buffer."""

    async def get(self, key, allocate):
        return self.records.get(key)


BROKEN: list[type[Tier]] = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, DictTier) and kind is not DictTier
]
