"""The mooncake tier while its master and its stores are killed, restarted, stopped or unreachable."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path

import pytest
import uvloop

from lmcache_async.errors import TierClosedError, TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.plugins.mooncake import MooncakeTier
from lmcache_async.plugins.mooncake.pool import Pool
from lmcache_async.testing.conformance.base import TierRig
from lmcache_async.testing.records import key_of, record
from lmcache_async.tiers.base import Allocate
from tests.support.mooncake_pool import MooncakePool, kill_master, kill_store, make_config, running
from tests.support.outcomes import get, put, until_hit
from tests.support.processes import hanging
from tests.support.tiers import handle_of
from tests.support.traffic import Traffic

# The tier awaits work of Mooncake's own threads, which does not depend on the event loop.
pytestmark = pytest.mark.one_loop

DEADLINE_S = 0.5
SLACK_S = 20.0
"""Time that a call may take beyond its deadline on a busy machine."""


@pytest.fixture
def haste(monkeypatch):
    """Reduce the wait of Mooncake's client for a hanging process from 30 s to one."""
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1000")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A pool to be killed: its master forgets unresponsive stores after two seconds."""
    with running(tmp_path_factory.mktemp("mortal"), 64 << 20, "--client_ttl=2") as pool:
        yield pool


def bound_tier(pool: MooncakePool, arena: Arena, **options: object) -> MooncakeTier:
    tier = MooncakeTier(make_config(pool, **options))
    tier.bind(arena)
    return tier


@pytest.mark.parametrize(
    ("kill", "restart"),
    [(kill_store, MooncakePool.start_segment), (kill_master, MooncakePool.start_master)],
    ids=["store", "master"],
)
async def test_a_restart_of_the_master_or_a_store_causes_only_misses_and_drops(
    pool, arena, allocate, kill, restart
):
    async with bound_tier(pool, arena) as inner:
        tier = handle_of(inner, timeout_s=DEADLINE_S)
        traffic = Traffic(tier.put, tier.get, arena, allocate)
        async with traffic.running():
            await traffic.seen_again("hit")
            kill(pool)
            await traffic.seen_again("drop")
            restart(pool)
            await traffic.seen_again("hit")
        assert await tier.drain(timeout_s=20)
        await TierRig(inner, arena).check_leases()
    assert traffic.seen <= {"hit", "miss", "drop", "TierUnavailableError"}
    assert traffic.slowest_s < 2 * DEADLINE_S + SLACK_S


@pytest.mark.usefixtures("haste")
async def test_a_call_to_a_hanging_store_fails_and_nothing_is_written_later(pool, arena, allocate):
    async with bound_tier(pool, arena) as tier:
        await until_hit(tier, arena, allocate)
        with hanging(pool.signal_segment):
            reading = asyncio.ensure_future(tier.get(key_of(1), allocate))
            with (
                record(arena, 2) as buffer,
                pytest.raises(TierUnavailableError, match=r"cannot put .* \(code -800\)"),
            ):
                await tier.put(key_of(2), buffer)
            with pytest.raises(
                TierUnavailableError, match=r"cannot get .* the transfer failed \(code -800\)"
            ):
                await reading
            await TierRig(tier, arena).check_leases()
            taken = [arena.lease_nowait(arena.slab_bytes) for _ in range(arena.statistics().num_slabs - 1)]
            for buffer in taken:
                buffer.view[:] = b"\xaa" * buffer.nbytes
        await until_hit(tier, arena, allocate)  # in the remaining one

        assert all(bytes(buffer.view) == b"\xaa" * buffer.nbytes for buffer in taken)
        for buffer in taken:
            buffer.release()


@pytest.mark.usefixtures("haste")
async def test_a_call_to_a_hanging_master_fails_after_its_timeout(pool, arena, allocate):
    async with bound_tier(pool, arena) as tier:
        await until_hit(tier, arena, allocate)
        with hanging(pool.signal_master):
            with pytest.raises(TierUnavailableError, match="the master did not answer in time"):
                await tier.contains(key_of(1))
            with record(arena, 2) as buffer, pytest.raises(TierUnavailableError, match="the master"):
                await tier.put(key_of(2), buffer)
        await until_hit(tier, arena, allocate)


async def test_a_store_that_hangs_does_not_delay_lookups(mooncake_pool, arena, allocate):
    """With the master's and the client's usual patience, so that the read has not failed at the lookup's end."""
    async with bound_tier(mooncake_pool, arena, threads=1) as tier:
        await until_hit(tier, arena, allocate)
        with hanging(mooncake_pool.signal_segment):
            reading = asyncio.ensure_future(tier.get(key_of(1), allocate))
            assert await tier.contains(key_of(1))
            assert not reading.done()
        buffer = await reading
        assert buffer is not None
        buffer.release()


async def test_a_tier_begins_without_its_master_and_joins_it_later(tmp_path, arena, allocate, caplog):
    pool = MooncakePool(tmp_path, 16 << 20)
    try:
        with caplog.at_level(logging.INFO):
            async with bound_tier(pool, arena) as tier:
                assert f"127.0.0.1:{pool.port} does not answer" in caplog.text
                assert "misses every chunk until the pool has been joined" in caplog.text
                assert await get(tier, allocate, 1, 2) == ["TierUnavailableError"] * 2
                answers = await put(tier, arena, *range(8))  # three batches
                assert {type(answer) for answer in answers} == {TierUnavailableError}
                with pytest.raises(TierUnavailableError, match="has not been joined yet"):
                    await tier.contains(key_of(1))
                pool.start()
                await until_hit(tier, arena, allocate)
        assert "has joined the pool" in caplog.text
    finally:
        pool.stop()


async def test_joining_continues_after_an_unexpected_error(tmp_path, arena, allocate, monkeypatch, caplog):
    pool = MooncakePool(tmp_path, 16 << 20)
    join, attempts = Pool._join, itertools.count()

    async def fail_the_second_time(pool: Pool) -> None:
        if next(attempts) == 1:
            raise RuntimeError("can't start new thread")
        await join(pool)

    monkeypatch.setattr(Pool, "_join", fail_the_second_time)
    try:
        async with bound_tier(pool, arena) as tier:
            pool.start()
            await until_hit(tier, arena, allocate)
        assert "can't start new thread" in caplog.text
    finally:
        pool.stop()


async def test_a_tier_that_never_found_its_master_closes(pool, arena):
    tier = bound_tier(pool, arena, url="mooncake://127.0.0.1:1")
    await tier.__aenter__()
    await tier.__aexit__(None, None, None)

    with pytest.raises(TierClosedError):
        await tier.contains(key_of(1))


async def test_options_that_the_engine_refuses_stop_the_start(pool, arena, monkeypatch):
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")  # otherwise it takes 20 s
    with pytest.raises(TierError, match=r"cannot join the pool of mooncake://.* by pigeons: ") as caught:
        await bound_tier(pool, arena, protocol="pigeons").__aenter__()

    assert not caught.value.retryable


def test_a_full_pool_drops_records_without_room(tmp_path, arena, allocate):
    uvloop.run(fill(tmp_path, arena, allocate))


async def fill(directory: Path, arena: Arena, allocate: Allocate) -> None:
    with running(directory, 16 << 20, "--eviction_high_watermark_ratio=1.0") as pool:
        async with bound_tier(pool, arena) as tier:
            # After a failed put the master may evict records at any time, to make room for later puts.
            errors: list[BaseException] = []
            for number in range(1_000):
                errors += [error for error in await put(tier, arena, number) if error is not None]
                if errors:
                    break
            assert number > 100
            assert all(isinstance(error, TierFullError) for error in errors)
            assert (await get(tier, allocate, number))[0] == "miss" or not errors
