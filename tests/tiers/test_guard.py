"""The border around a tier: deadlines, errors, and calls that are left to end by themselves."""

import asyncio
import logging

import pytest

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.arena import Arena
from lmcache_async.testing.fakes import DictTier, FaultyTier, GatedTier
from lmcache_async.tiers.layers.guard import GuardLayer
from lmcache_async.types import ChunkKey

KEY = ChunkKey(b"k" * 16)


@pytest.fixture
def arena():
    arena = Arena(8 * 4096, 4096, prefault=False, huge_pages=False)
    yield arena
    assert arena.statistics().leased_slabs == 0
    arena.close()


def guard(inner, timeout_s=5.0):
    return GuardLayer(inner, name="t", timeout_s=timeout_s, logger=LimitedLogger(logging.getLogger("test")))


async def allocate_from(arena, nbytes):
    return await arena.lease(nbytes, timeout_s=1)


async def test_a_late_call_is_an_error_at_the_deadline_and_gives_its_buffer_back_when_it_ends(arena):
    inner = GatedTier(DictTier())
    tier = guard(inner, timeout_s=0.01)
    with (
        arena.lease_nowait(10) as buffer,
        pytest.raises(TierUnavailableError, match=r"'t': put gave no answer in 0.01 s"),
    ):
        await tier.put(KEY, buffer)
    while tier.late_calls:
        await asyncio.sleep(0)


async def test_a_late_call_that_cannot_be_stopped_keeps_its_lease_until_it_has_ended(arena):
    ended = asyncio.Event()

    class Stubborn(DictTier):
        async def put(self, key, buffer):
            while not ended.is_set():
                try:
                    await ended.wait()
                except asyncio.CancelledError:
                    continue  # as a thread in the middle of a write
            self.records[key] = bytes(buffer.view)

    inner = Stubborn()
    tier = guard(inner, timeout_s=0.01)
    buffer = arena.lease_nowait(10)
    buffer.view[:] = b"0123456789"
    with pytest.raises(TierUnavailableError):
        await tier.put(KEY, buffer)
    buffer.release()

    assert arena.statistics().leased_slabs == 1
    ended.set()
    while tier.late_calls:
        await asyncio.sleep(0)
    assert inner.records[KEY] == b"0123456789"


@pytest.mark.parametrize("verb", ["put", "put_many"])
async def test_a_put_that_has_ended_holds_nothing(arena, verb):
    tier = guard(DictTier())
    buffer = arena.lease_nowait(10)

    await (tier.put(KEY, buffer) if verb == "put" else tier.put_many([(KEY, buffer)]))

    buffer.release()
    assert arena.statistics().leased_slabs == 0


async def test_a_cancelled_get_gives_back_what_still_arrives(arena):
    inner = DictTier()
    inner.records[KEY] = b"abc"

    class Late(DictTier):
        async def get(self, key, allocate):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return await inner.get(key, allocate)

    tier = guard(Late())
    task = asyncio.ensure_future(tier.get(KEY, lambda nbytes: allocate_from(arena, nbytes)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while tier.late_calls:
        await asyncio.sleep(0)


async def test_whatever_a_tier_raises_becomes_a_tier_error_and_is_told_once(arena, caplog):
    inner = FaultyTier(DictTier())
    inner.faults.extend([ValueError("odd"), ValueError("odd")])
    tier = guard(inner)

    for _ in range(2):
        with pytest.raises(TierError, match="tier 't': contains raised ValueError: odd"):
            await tier.contains(KEY)
    assert caplog.text.count("raised ValueError") == 1
    assert await tier.contains(KEY) is False


class _Stuck(DictTier):
    """Never opens, or never closes."""

    def __init__(self, *, opens):
        super().__init__()
        self.opens = opens

    async def __aenter__(self):
        if not self.opens:
            await asyncio.Event().wait()
        return self

    async def __aexit__(self, *_):
        await asyncio.Event().wait()


async def test_a_tier_that_never_opens_is_an_error_at_the_deadline():
    logger = LimitedLogger(logging.getLogger("test"))
    tier = GuardLayer(_Stuck(opens=False), name="t", timeout_s=5, open_timeout_s=0.01, logger=logger)
    async with asyncio.timeout(5):
        with pytest.raises(TierUnavailableError, match=r"'t': was not open after 0.01 s; .* open_timeout_s"):
            await tier.__aenter__()


async def test_a_tier_that_never_closes_is_left_at_the_deadline(caplog):
    logger = LimitedLogger(logging.getLogger("test"))
    tier = GuardLayer(_Stuck(opens=True), name="t", timeout_s=5, close_timeout_s=0.01, logger=logger)
    async with asyncio.timeout(5), tier:
        pass
    assert "tier 't': was not closed after 0.02 s" in caplog.text
