"""Metrics of an engine as read by the model thread."""

from __future__ import annotations

import asyncio
from typing import Any

from lmcache_async.integration.vllm.worker import StatsFeed
from lmcache_async.metrics.samples import Samples
from lmcache_async.testing.rig import Rig

TOKENS = list(range(100, 140))  # 40 tokens: 5 chunks of 8
SLOTS = list(range(40))


async def taken(feed: StatsFeed) -> Samples:
    async with asyncio.timeout(150):
        while not (samples := feed.take()):
            await asyncio.sleep(0.001)
    return samples


async def test_each_count_is_taken_once_after_the_initial_zeros() -> None:
    async with Rig().open() as engine:
        feed = StatsFeed(engine)
        first = await taken(feed)
        await engine.store(TOKENS, SLOTS)
        later = await taken(feed)
        await engine.store(TOKENS, SLOTS)
        last = await taken(feed)
        feed.close()

    assert [samples.total("stores_total") for samples in (first, later, last)] == [0, 1, 1]
    assert first.get("stores_total") == 0
    assert not feed.take()


async def test_the_model_thread_never_waits_for_the_loop() -> None:
    async with Rig().open() as engine:
        feed = StatsFeed(engine)
        feed._collect()
        with feed._lock:  # the loop is comparing
            assert not feed.take()

        class Lock:
            """A lock that simulates a comparison without a change at the last moment."""

            def acquire(self, *, blocking: bool) -> bool:
                assert not blocking
                feed._ready = None
                return True

            def release(self) -> None:
                pass

        lock: Any = Lock()
        feed._lock = lock
        assert not feed.take()
        feed.close()


async def test_a_store_notifies_once_for_all_its_chunks() -> None:
    rig = Rig(blocks=64, slabs=40)
    calls = []
    async with rig.open() as engine:
        feed = StatsFeed(engine)
        await taken(feed)
        changed = engine.metrics.changed
        engine.metrics.changed = lambda: (calls.append(1), changed())[1]
        await engine.store(list(range(256)), list(range(256)))  # 32 chunks in 11 batches
        await engine.retrieve(list(range(256)), list(range(256)))
        feed.close()

    assert len(calls) == 2
