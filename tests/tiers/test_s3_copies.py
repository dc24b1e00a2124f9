"""The s3 tier: received data is copied into the arena in threads, and no copy outlives its lease."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from obstore.store import LocalStore

from lmcache_async.memory.arena import Arena
from lmcache_async.plugins.s3 import S3Config, S3Tier
from lmcache_async.plugins.s3 import tier as s3_tier
from lmcache_async.testing.conformance.base import TierRig, in_time
from lmcache_async.testing.records import key_of
from lmcache_async.testing.steps import turns

WHOLE, IN_PARTS = 1 << 20, 4096


class Copies:
    """Intercepts the tier's copies: counts those started, and blocks them until it is opened."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self._fill = s3_tier._fill

    def __call__(self, *args: object) -> None:
        self.threads.add(threading.get_ident())
        self.begun.release()
        assert self.gate.wait(30)
        self._fill(*args)

    async def wait_begun(self) -> None:
        await asyncio.to_thread(self.begun.acquire, timeout=30)


@pytest.fixture
def copies(monkeypatch):
    copies = Copies()
    monkeypatch.setattr(s3_tier, "_fill", copies)
    yield copies
    copies.gate.set()


def tier_over(directory: Path, part_bytes: int, arena: Arena) -> S3Tier:
    tier = S3Tier(S3Config(url="s3://files", part_bytes=part_bytes), store=LocalStore(directory))
    tier.bind(arena)
    return tier


@pytest.mark.parametrize("part_bytes", [WHOLE, IN_PARTS], ids=["whole", "parts"])
async def test_a_cancelled_get_keeps_its_lease_until_the_copy_in_a_thread_has_ended(
    copies, tmp_path, arena, allocate, part_bytes
):
    async with tier_over(tmp_path, part_bytes, arena) as tier:
        await TierRig(tier, arena, lambda _: 60_000).put(1)
        reading = asyncio.ensure_future(tier.get(key_of(1), allocate))
        await copies.wait_begun()
        for _ in range(3):
            reading.cancel()
            await turns(5)
        assert not reading.done()
        assert arena.statistics().leased_slabs == 1

        copies.gate.set()
        await in_time(asyncio.wait({reading}))
        assert reading.cancelled()
        assert arena.statistics().leased_slabs == 0
        assert threading.get_ident() not in copies.threads


async def test_closing_waits_for_a_copy_and_ends_the_threads(copies, tmp_path, arena, allocate):
    tier = tier_over(tmp_path, WHOLE, arena)
    await tier.__aenter__()
    await TierRig(tier, arena).put(1)
    reading = asyncio.ensure_future(tier.get(key_of(1), allocate))
    await copies.wait_begun()
    closing = asyncio.ensure_future(tier.__aexit__(None, None, None))
    await turns(5)
    assert not closing.done()

    copies.gate.set()
    await in_time(closing)
    buffer = await in_time(reading)
    assert buffer is not None
    buffer.release()
    assert not [thread for thread in threading.enumerate() if thread.ident in copies.threads]
