"""The mooncake tier: the contract, against a real master and a store in another process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.mooncake import MooncakeConfig, MooncakeTier
from lmcache_async.testing.conformance import TierConformance
from lmcache_async.testing.conformance.base import TierRig, in_time
from lmcache_async.testing.records import key_of, record
from lmcache_async.testing.steps import turns
from lmcache_async.tiers.base import Allocate
from lmcache_async.types import ChunkKey
from tests.support import outcomes
from tests.support.mooncake_pool import MooncakePool, make_config, replace

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore


@pytest.fixture
def config(mooncake_pool: MooncakePool) -> MooncakeConfig:
    """A part of the pool that no other test uses."""
    return make_config(mooncake_pool)


@pytest.fixture(scope="session")
def client(mooncake_pool: MooncakePool) -> Iterator[MooncakeDistributedStore]:
    """One for all cases: it takes half a second to close."""
    with mooncake_pool.client() as client:
        yield client


class TestMooncakeTier(TierConformance):
    many_keys = 300

    @pytest.fixture
    def tier(self, config: MooncakeConfig, client: MooncakeDistributedStore) -> MooncakeTier:
        return MooncakeTier(config, store=client)

    def reopen(self, tier: MooncakeTier) -> MooncakeTier:
        return MooncakeTier(tier.config, store=tier._store)

    async def damage(self, tier: MooncakeTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return replace(tier._store, tier.config.prefix + key.hex(), edit)


@pytest.fixture
async def opened(
    config: MooncakeConfig, client: MooncakeDistributedStore, arena: Arena
) -> AsyncIterator[MooncakeTier]:
    tier = MooncakeTier(config, store=client)
    tier.bind(arena)
    async with tier:
        yield tier


async def test_records_go_between_the_arena_and_the_pool_without_a_copy_of_ours(
    opened: MooncakeTier, arena: Arena, allocate: Allocate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = opened._opened.pool
    given: list[int] = []
    put_real, get_real = pool.put, pool.get

    def noted_put(keys, buffers):
        given.extend(buffer.address for buffer in buffers)
        return put_real(keys, buffers)

    def noted_get(keys, buffers):
        given.extend(buffer.address for buffer in buffers)
        return get_real(keys, buffers)

    monkeypatch.setattr(pool, "put", noted_put)
    monkeypatch.setattr(pool, "get", noted_get)
    with record(arena, 1) as buffer:
        await opened.put(key_of(1), buffer)
        got = await opened.get(key_of(1), allocate)
        assert got is not None

        assert given == [buffer.address, got.address]
        got.release()


async def test_a_cancelled_get_keeps_its_buffers_until_its_thread_has_ended(
    opened: MooncakeTier, arena: Arena, allocate: Allocate, monkeypatch: pytest.MonkeyPatch
) -> None:
    await TierRig(opened, arena).put(*range(3))
    pool = opened._opened.pool
    begun, gate, real = threading.Event(), threading.Event(), pool.get

    def parked(*arguments):
        begun.set()
        assert gate.wait(30)
        return real(*arguments)

    monkeypatch.setattr(pool, "get", parked)
    reading = asyncio.ensure_future(opened.get_many([key_of(number) for number in range(3)], allocate))
    await asyncio.to_thread(begun.wait, 30)
    for _ in range(3):
        reading.cancel()
        await turns(5)
    assert not reading.done()
    assert arena.statistics().leased_slabs > 0
    gate.set()
    await in_time(asyncio.wait({reading}))

    assert reading.cancelled()
    await TierRig(opened, arena).check_leases()


async def test_what_one_client_puts_another_finds(
    opened: MooncakeTier, config: MooncakeConfig, arena: Arena, allocate: Allocate
) -> None:
    other_arena = Arena(8 * arena.slab_bytes, arena.slab_bytes, huge_pages=False, prefault=False)
    other = MooncakeTier(config)
    other.bind(other_arena)
    async with other:
        await TierRig(opened, arena).put(1)
        got = await other.get(key_of(1), lambda nbytes: other_arena.lease(nbytes, timeout_s=5))
        assert isinstance(got, Buffer)
        got.release()
        assert await other.remove(key_of(1))
        assert not await opened.contains(key_of(1))
    other_arena.close()


async def test_chunks_that_a_batch_names_twice_are_stored_and_read_twice(
    opened: MooncakeTier, arena: Arena, allocate: Allocate
) -> None:
    assert await outcomes.put(opened, arena, 1, 2, 1, 1) == [None] * 4
    TierRig(opened, arena).scribble()

    assert await outcomes.get(opened, allocate, 1, 1, 2, 3, 1, 2, 3) == [
        *["hit"] * 3,
        "miss",
        *["hit"] * 2,
        "miss",
    ]
    assert await opened.contains_many([key_of(number) for number in (1, 3, 1, 2)]) == [
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("code", [-704, -703], ids=["removed", "being put anew"])
async def test_a_record_that_went_between_lookup_and_read_is_a_miss(
    opened: MooncakeTier, arena: Arena, allocate: Allocate, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    await TierRig(opened, arena).put(1)
    monkeypatch.setattr(opened._opened.pool, "get", lambda keys, *_: [code] * len(keys))

    assert await opened.get(key_of(1), allocate) is None


@pytest.mark.parametrize("moving", ["get", "put"])
async def test_a_record_is_not_removed_while_it_moves_nor_moved_while_it_is_removed(
    opened: MooncakeTier, arena: Arena, allocate: Allocate, monkeypatch: pytest.MonkeyPatch, moving: str
) -> None:
    """Its place in the pool is another record's as soon as it is removed."""
    await TierRig(opened, arena).put(1)
    pool = opened._opened.pool
    order: list[str] = []
    begun, gate = threading.Event(), threading.Event()

    def noted(verb: str, is_parked: bool) -> None:
        real = getattr(pool, verb)

        def call(*arguments):
            order.append(f"{verb} begins")
            if is_parked:
                begun.set()
                assert gate.wait(30)
            result = real(*arguments)
            order.append(f"{verb} ends")
            return result

        monkeypatch.setattr(pool, verb, call)

    noted(moving, is_parked=True)
    noted("remove", is_parked=False)
    move = TierRig(opened, arena).holds(1) if moving == "get" else TierRig(opened, arena).put(1)
    moved = asyncio.ensure_future(move)
    await asyncio.to_thread(begun.wait, 30)
    removed = asyncio.ensure_future(opened.remove(key_of(1)))
    await turns(5)
    gate.set()
    await in_time(asyncio.gather(moved, removed))

    assert order == [f"{moving} begins", f"{moving} ends", "remove begins", "remove ends"]
    assert await removed
