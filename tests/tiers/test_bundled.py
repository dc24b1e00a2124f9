"""Tests of the base class of the bundled tiers: open state, running calls, batches of chunks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from lmcache_async.errors import TierClosedError
from lmcache_async.testing.records import key_of
from lmcache_async.testing.steps import turns
from lmcache_async.tiers.base import TierConfig
from lmcache_async.tiers.bundled import BundledTier
from lmcache_async.tiers.results import ContractError, run_each
from lmcache_async.types import ChunkKey


class Slow(BundledTier[TierConfig, asyncio.Event]):
    """Lookups that end when the event is set."""

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._call() as event:
            await event.wait()
        return [True] * len(keys)


def opened(event: asyncio.Event) -> Slow:
    tier = Slow(TierConfig(), "slow tier")
    tier._open(event)
    return tier


async def test_closing_waits_for_the_last_call_and_refuses_further_ones() -> None:
    event = asyncio.Event()
    tier = opened(event)
    calls = [asyncio.ensure_future(tier.contains(key_of(number))) for number in range(2)]
    await turns(3)
    given_up = asyncio.ensure_future(tier._end_calls())
    await turns(3)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    closing = asyncio.ensure_future(tier._end_calls())
    await turns(3)

    assert not closing.done()
    with pytest.raises(TierClosedError, match="the slow tier is not open"):
        await tier.contains(key_of(3))
    event.set()
    assert await asyncio.gather(*calls) == [True, True]
    await closing
    await tier._end_calls()


async def test_a_tier_opened_before_a_fork_is_refused_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(asyncio.Event())
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)

    with pytest.raises(TierClosedError, match="the slow tier was opened before this process was forked"):
        await tier.contains(key_of(1))


async def test_a_call_for_one_chunk_that_cancels_its_own_task_fails_the_batch() -> None:
    async def cancel_own(_: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(ContractError, match="cancelled its own task"):
        await run_each(range(4), cancel_own, 2)
