"""The number of running calls."""

import asyncio

import pytest

from lmcache_async.testing.steps import turns
from lmcache_async.tiers.calls import Calls


async def test_the_wait_ends_with_the_last_call():
    calls = Calls()
    with calls.one():
        with calls.one():
            waiting = asyncio.ensure_future(calls.wait_ended())
            await turns(3)
        await turns(3)
        assert not waiting.done()
    await waiting


async def test_without_calls_there_is_no_wait():
    calls = Calls()
    with pytest.raises(RuntimeError, match="of this test"), calls.one():
        raise RuntimeError("of this test")
    await calls.wait_ended()


async def test_a_wait_given_up_leaves_the_calls_alone_and_can_be_made_again():
    calls = Calls()
    with calls.one():
        waiting = asyncio.ensure_future(calls.wait_ended())
        await turns(3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        again = asyncio.ensure_future(calls.wait_ended())
        await turns(3)
        assert not again.done()
    await again
