"""The mooncake tier with a real master and a store in another process: the contract, and a comparison with a dict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import uvloop
from hypothesis import strategies as st
from hypothesis.stateful import rule

from lmcache_async.errors import ChunkCorruptError, TierUnavailableError
from lmcache_async.plugins.mooncake import MooncakeTier
from lmcache_async.testing.conformance import TierConformance
from lmcache_async.testing.conformance.base import TierRig, in_time
from lmcache_async.testing.machines import TierMachine
from lmcache_async.testing.records import key_of, record
from lmcache_async.testing.steps import turns
from lmcache_async.types import ChunkKey
from tests.support.gates import Gate
from tests.support.mooncake_pool import MooncakePool, make_config, replace
from tests.support.thorough import machine_settings

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore


@pytest.fixture
def config(mooncake_pool):
    """A config with its own key prefix."""
    return make_config(mooncake_pool)


@pytest.fixture(scope="session")
def client(mooncake_pool):
    """One client for all cases: closing it takes half a second."""
    with mooncake_pool.client() as client:
        yield client


class TestMooncakeTier(TierConformance):
    many_keys = 300

    @pytest.fixture
    def tier(self, config, client):
        return MooncakeTier(config, store=client)

    def reopen(self, tier: MooncakeTier) -> MooncakeTier:
        return MooncakeTier(tier.config, store=tier._store)

    async def damage(self, tier: MooncakeTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return replace(tier._store, tier.config.prefix + key.hex(), edit)


class MooncakeMachine(TierMachine):
    loop_factory = staticmethod(uvloop.new_event_loop)
    pool: ClassVar[MooncakePool]
    client: ClassVar[MooncakeDistributedStore]
    batch_bytes = 200_000
    threads = 4

    @rule(batch_bytes=st.sampled_from([1, 100_000, 1 << 20]), threads=st.integers(1, 4))
    def restart_with(self, batch_bytes: int, threads: int) -> None:
        self.batch_bytes, self.threads = batch_bytes, threads
        self.restart()

    def make_tier(self, directory: Path, max_bytes: int | None) -> MooncakeTier:
        del max_bytes  # the pool's own limit applies
        prefix = f"{directory.name}/"
        config = make_config(self.pool, prefix=prefix, batch_bytes=self.batch_bytes, threads=self.threads)
        return MooncakeTier(config, store=self.client)

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return replace(self.client, self.tier.config.prefix + key.hex(), edit)


class TestMooncakeMachine(MooncakeMachine.TestCase):  # type: ignore[misc,name-defined]
    settings = machine_settings(25)

    @pytest.fixture(autouse=True)
    def _pool(self, mooncake_pool, client):
        MooncakeMachine.pool, MooncakeMachine.client = mooncake_pool, client


class Store:
    """Mooncake's client with calls that a test can replace."""

    def __init__(self, client: MooncakeDistributedStore) -> None:
        self._client = client
        self.order: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def note(self, verb: str) -> None:
        """Record the start and the end of calls."""
        real = getattr(self._client, verb)

        def call(*arguments: object, **options: object) -> object:
            self.order.append(f"{verb} begins")
            result = real(*arguments, **options)
            self.order.append(f"{verb} ends")
            return result

        setattr(self, verb, call)


@pytest.fixture
def store(client):
    return Store(client)


@pytest.fixture
async def opened(config, store, arena):
    tier = MooncakeTier(config, store=store)
    tier.bind(arena)
    async with tier:
        yield tier


async def test_the_error_of_a_lookup_names_the_key_that_failed(opened, store):
    store.batch_is_exist = lambda names: [1, -900]

    with pytest.raises(TierUnavailableError, match=f"cannot find .*{key_of(2).hex()}"):
        await opened.contains_many([key_of(1), key_of(2)])


async def test_records_are_transferred_between_the_arena_and_the_pool_without_a_copy(
    opened, store, client, arena, allocate
):
    given: list[int] = []

    def noted(call: Callable[..., list[int]]) -> Callable[..., list[int]]:
        return lambda names, addresses, *more: given.extend(addresses) or call(names, addresses, *more)

    store.batch_put_from = noted(client.batch_put_from)
    store.batch_get_into = noted(client.batch_get_into)
    with record(arena, 1) as buffer:
        await opened.put(key_of(1), buffer)
        got = await opened.get(key_of(1), allocate)
        assert got is not None

        assert given == [buffer.address, got.address]
        got.release()


async def test_a_cancelled_get_keeps_its_buffers_until_its_thread_has_ended(
    opened, store, arena, allocate, monkeypatch
):
    await TierRig(opened, arena).put(*range(3))
    gate = Gate(monkeypatch, store, "batch_get_into", shut=True)
    reading = asyncio.ensure_future(opened.get_many([key_of(number) for number in range(3)], allocate))
    await gate.reached()
    for _ in range(3):
        reading.cancel()
        await turns(5)
    assert not reading.done()
    assert arena.statistics().leased_slabs > 0
    gate.open()
    await in_time(asyncio.wait({reading}))

    assert reading.cancelled()
    await TierRig(opened, arena).check_leases()


@pytest.mark.parametrize("code", [-704, -703], ids=["removed", "being put anew"])
async def test_a_record_deleted_between_lookup_and_read_is_a_miss(opened, store, arena, allocate, code):
    await TierRig(opened, arena).put(1)
    store.batch_get_into = lambda names, *_: [code] * len(names)

    assert await opened.get(key_of(1), allocate) is None


@pytest.mark.parametrize("removes", [True, False])
async def test_a_record_that_is_too_long_is_removed_unless_invalid_records_stay(
    opened, store, arena, allocate, removes
):
    await TierRig(opened, arena).put(1)
    store.batch_get_into = lambda names, *_: [-600] * len(names)
    opened.removes_invalid = removes
    if removes:
        assert await opened.get(key_of(1), allocate) is None
    else:
        with pytest.raises(ChunkCorruptError, match="an invalid length"):
            await opened.get(key_of(1), allocate)

    assert await opened.contains(key_of(1)) is not removes


@pytest.mark.parametrize("moving", ["batch_get_into", "batch_put_from"])
async def test_a_record_is_not_removed_while_it_is_transferred_and_not_transferred_while_it_is_removed(
    opened, store, arena, monkeypatch, moving
):
    """The space of a removed record may be reused at once."""
    await TierRig(opened, arena).put(1)
    store.note(moving)
    gate = Gate(monkeypatch, store, moving, shut=True)
    store.note("remove")
    rig = TierRig(opened, arena)
    moved = asyncio.ensure_future(rig.holds(1) if moving == "batch_get_into" else rig.put(1))
    await gate.reached()
    removed = asyncio.ensure_future(opened.remove(key_of(1)))
    await turns(5)
    gate.open()
    await in_time(asyncio.gather(moved, removed))

    assert store.order == [f"{moving} begins", f"{moving} ends", "remove begins", "remove ends"]
    assert await removed
