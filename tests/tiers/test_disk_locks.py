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
from tests.tiers.disk_tools import put


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(32 * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)
    yield arena
    assert arena.statistics().leased_slabs == 0
    arena.close()


def submit(semaphore: PrioritySemaphore, call: int, log: list[int], *, starts: bool = True) -> None:
    def start() -> bool:
        if starts:
            log.append(call)
        return starts

    semaphore.submit(call, start)


def test_slots_go_to_the_oldest_waiting_call() -> None:
    log: list[int] = []
    semaphore = PrioritySemaphore(2)
    for call in (7, 3, 9, 5, 4, 5):
        submit(semaphore, call, log)
    assert log == [7, 3]
    for _ in range(4):
        semaphore.release()

    assert log == [7, 3, 4, 5, 5, 9]


@pytest.mark.parametrize("withdrawn", ["first", "waiting"])
def test_a_read_that_does_not_start_passes_its_slot_on(withdrawn: str) -> None:
    log: list[int] = []
    semaphore = PrioritySemaphore(1)
    submit(semaphore, 1, log, starts=withdrawn != "first")
    submit(semaphore, 2, log, starts=withdrawn != "waiting")
    submit(semaphore, 3, log)
    semaphore.release()
    submit(semaphore, 4, log)
    semaphore.release()

    assert log == ([2, 3, 4] if withdrawn == "first" else [1, 3, 4])


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
