"""The priority semaphore admits reads of older calls first, and loses no slot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk.files import RecordFiles
from lmcache_async.plugins.disk.locks import PrioritySemaphore
from lmcache_async.testing.records import SLAB_BYTES, key_of
from lmcache_async.types import ChunkKey
from tests.tiers.disk_tools import put, turns


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(32 * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)
    yield arena
    assert arena.statistics().leased_slabs == 0
    arena.close()


class Caller:
    """Takes a slot and keeps it until `end`."""

    def __init__(self, semaphore: PrioritySemaphore, call: int, log: list[int]) -> None:
        self.go_on = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(semaphore, call, log))

    async def _run(self, semaphore: PrioritySemaphore, call: int, log: list[int]) -> None:
        await semaphore.acquire(call)
        try:
            log.append(call)
            await self.go_on.wait()
        finally:
            semaphore.release()

    async def end(self) -> None:
        self.go_on.set()
        await self.task


async def test_slots_go_to_the_oldest_waiting_call() -> None:
    log: list[int] = []
    semaphore = PrioritySemaphore(2)
    callers = [Caller(semaphore, call, log) for call in (7, 3, 9, 5, 4, 5)]
    await turns()
    assert log == [7, 3]
    async with asyncio.timeout(30):
        await callers[0].end()
        for caller in callers:
            caller.go_on.set()
        await asyncio.gather(*(caller.task for caller in callers))

    assert log == [7, 3, 4, 5, 5, 9]


@pytest.mark.parametrize("moment", ["waiting", "admitted"])
async def test_a_cancelled_caller_passes_its_slot_on(moment: str) -> None:
    log: list[int] = []
    semaphore = PrioritySemaphore(1)
    first, second, third = (Caller(semaphore, call, log) for call in (1, 2, 3))
    await turns()
    if moment == "admitted":
        first.go_on.set()
        while not first.task.done():  # its slot is passed on in its last step
            await asyncio.sleep(0)
    second.task.cancel()
    await turns()
    assert second.task.cancelled()
    await first.end()
    await third.end()

    assert log in ([1, 3], [1, 2, 3])
    await asyncio.wait_for(semaphore.acquire(9), 30)


async def test_a_batch_is_read_before_the_next_one(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    real = RecordFiles.read

    def read(files: RecordFiles, key: ChunkKey, view: memoryview) -> object:
        order.append(int.from_bytes(key, "big"))
        return real(files, key, view)

    async def allocate(nbytes: int) -> Buffer:
        return await arena.lease(nbytes, timeout_s=5)

    config = DiskConfig(path=tmp_path, max_bytes=64 * SLAB_BYTES, io_threads=1)
    async with DiskTier(config) as tier:
        await put(tier, arena, *range(24))
        monkeypatch.setattr(RecordFiles, "read", read)
        edges = [0, 8, 9, 16, 23, 24]
        batches = [[key_of(number) for number in range(*edge)] for edge in pairwise(edges)]
        for results in await asyncio.gather(*(tier.get_many(batch, allocate) for batch in batches)):
            for result in results:
                assert isinstance(result, Buffer)
                result.release()

    assert order == list(range(24))
