"""The peer tier while hosts are killed, hang, give up and come back: misses, drops, no wrong bytes, no lease left."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lmcache_async.errors import ConfigError, TierFullError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.plugins.peer import PeerConfig, PeerTier
from lmcache_async.testing.records import FORMAT, SLAB_BYTES, check_record, key_of, record, write_record
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import turns
from lmcache_async.tiers.base import Allocate
from tests.tiers.outcomes import get, put
from tests.tiers.peer_hosts import Host, config, running
from tests.tiers.proxy import Proxy

LARGE_BYTES = 12 << 20
"""Of a payload: more than the sockets between two ends take."""
SHORT = {"connect_timeout_s": 0.3, "lookup_timeout_s": 0.3, "transfer_timeout_s": 0.3, "retry_s": 600}
SLACK_S = 5.0


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with running(3) as hosts:
        yield hosts


@pytest.fixture
def host() -> Iterator[Host]:
    with running() as [host]:
        yield host


@pytest.fixture
def large_host() -> Iterator[Host]:
    with running(nbytes=64 << 20, segment_bytes=32 << 20) as [host]:
        yield host


@pytest.fixture
def large_arena() -> Iterator[Arena]:
    arena = Arena(48 << 20, 16 << 20, huge_pages=False, prefault=False)
    yield arena
    assert arena.statistics().leased_slabs == 0
    arena.close()


def through(proxy: Proxy, **options: object) -> PeerConfig:
    return PeerConfig.model_validate({**dict(config(Host()), peers=[f"127.0.0.1:{proxy.port}"]), **options})


@pytest.fixture
async def proxy(large_host: Host) -> AsyncIterator[Proxy]:
    async with Proxy(large_host.port) as proxy:
        yield proxy


async def test_a_host_that_is_killed_costs_its_own_records_alone_and_is_found_again(
    three: list[Host], arena: Arena, allocate: Allocate
) -> None:
    numbers = list(range(12))
    async with PeerTier(config(*three)) as tier:
        assert await put(tier, arena, *numbers) == [None] * 12
        assert await get(tier, allocate, *numbers) == ["hit"] * 12
        there = [key_of(number) in three[0].records() for number in numbers]
        three[0].kill()
        found = await get(tier, allocate, *numbers)
        expected = [{"TierPartUnavailableError", "miss"} if lost else {"hit"} for lost in there]
        assert all(one in wanted for one, wanted in zip(found, expected, strict=True))
        keys = [key_of(number) for number in numbers]
        assert await tier.contains_many(keys) == [not lost for lost in there]
        assert await get(tier, allocate, *numbers) == ["miss" if lost else "hit" for lost in there]
        assert await put(tier, arena, *range(20, 32)) == [None] * 12  # to those that are there
        three[0].start()
        while not all(await tier.contains_many(keys)):
            await asyncio.sleep(0)
        assert await get(tier, allocate, *numbers) == ["hit"] * 12
        assert await tier.clear() == 24
    assert [host.leases() for host in three] == [0, 0, 0]


async def test_a_record_is_got_from_another_host_when_the_first_one_fails(
    three: list[Host], arena: Arena, allocate: Allocate
) -> None:
    with record(arena, 1) as buffer:
        content = bytes(buffer.view)
    for host in three:
        host.replace(key_of(1), lambda _: content)
    async with PeerTier(config(*three, retry_s=600)) as tier:
        assert await tier.contains(key_of(1))
        three[0].kill()
        three[1].replace(key_of(1), lambda _: b"")  # given up since it was looked for
        for _ in range(5):
            assert await get(tier, allocate, 1) == ["hit"]


async def test_hosts_that_are_all_away_are_an_error_and_hold_nobody_up(
    three: list[Host], arena: Arena, allocate: Allocate, caplog: pytest.LogCaptureFixture
) -> None:
    for host in three:
        host.kill()
    async with PeerTier(config(*three)) as tier:
        with pytest.raises(TierUnavailableError, match=r"127\.0\.0\.1:"):
            await tier.contains(key_of(1))
        assert caplog.text.count("begins without a peer") == 3
        for host in three:
            host.start()
        while (await put(tier, arena, 1)) != [None]:
            await asyncio.sleep(0)
        assert await get(tier, allocate, 1) == ["hit"]


async def test_a_host_that_hangs_is_waited_for_once(
    three: list[Host], arena: Arena, allocate: Allocate
) -> None:
    wakes = threading.Event()
    async with PeerTier(config(*three, **SHORT)) as tier:
        assert await put(tier, arena, *range(12)) == [None] * 12
        keys = [key_of(number) for number in range(12)]
        there = [key not in three[0].records() for key in keys]
        three[0].call_soon(wakes.wait)
        try:
            start = time.monotonic()
            for _ in range(50):
                assert await tier.contains_many(keys) == there
            assert (
                time.monotonic() - start < 0.3 + SLACK_S
            )  # 50 times as much where it is waited for each time
        finally:
            wakes.set()


@pytest.mark.parametrize("after", [0, 5, 3_000, 7_000_000])
async def test_a_host_that_goes_in_the_middle_of_a_get_is_no_hit(
    large_host: Host, proxy: Proxy, large_arena: Arena, after: int
) -> None:
    put_large(large_host, large_arena)
    async with PeerTier(through(proxy)) as tier:
        assert await tier.contains(key_of(1))
        proxy.answers.break_after = after
        with pytest.raises(TierUnavailableError, match="peer at 127"):
            await tier.get(key_of(1), allocate_from(large_arena))
        assert large_arena.statistics().leased_slabs == 0
        proxy.answers.break_after = None
        while not await looks(tier):
            await asyncio.sleep(0)
        got = await tier.get(key_of(1), allocate_from(large_arena))
        assert got is not None
        with got:
            check_record(got, 1, LARGE_BYTES)
    while large_host.leases():
        await asyncio.sleep(0)


async def test_a_host_killed_while_it_sends_has_no_lease_left(large_host: Host, large_arena: Arena) -> None:
    put_large(large_host, large_arena)
    parked, go_on = asyncio.Event(), asyncio.Event()

    async def allocate(nbytes: int):
        parked.set()
        await go_on.wait()
        return await large_arena.lease(nbytes, timeout_s=5)

    async with PeerTier(config(large_host, retry_s=600)) as tier:
        call = asyncio.ensure_future(tier.get(key_of(1), allocate))
        await parked.wait()
        assert large_host.leases() == 1
        large_host.kill()
        go_on.set()
        with pytest.raises(TierUnavailableError):
            await call
    large_host.start()
    assert large_host.leases() == 0
    assert large_host.records() == {key_of(1)}


@pytest.mark.parametrize("after", [0, 30, 5_000, 7_000_000])
async def test_a_host_that_goes_in_the_middle_of_a_put_keeps_no_part_of_it(
    large_host: Host, proxy: Proxy, large_arena: Arena, after: int
) -> None:
    proxy.requests.break_after = after + 200  # what is said before
    async with PeerTier(through(proxy, retry_s=600)) as tier:
        with large_record(large_arena) as buffer, pytest.raises(TierUnavailableError):
            await tier.put(key_of(1), buffer)
    while large_host.leases() or large_host.connections():
        await asyncio.sleep(0)
    assert large_host.records() == set()


async def test_a_host_without_room_drops_and_counts(arena: Arena) -> None:
    with running(nbytes=2 * SLAB_BYTES, segment_bytes=SLAB_BYTES) as [small]:
        held = small.ask(lambda: [small.pool.reserve("other", 3 * 4096) for _ in range(100)])
        async with PeerTier(config(small)) as tier:
            [answer] = await put(tier, arena, 1)
            assert isinstance(answer, TierFullError)
            assert "max_bytes" in str(answer)
        assert small.leases() == sum(slot is not None for slot in held)


async def test_a_record_longer_than_a_slab_is_a_miss_and_is_not_asked_for_again(
    large_host: Host, large_arena: Arena, arena: Arena, allocate: Allocate
) -> None:
    put_large(large_host, large_arena)
    tier = PeerTier(config(large_host))
    tier.bind(arena)
    async with tier:
        assert await get(tier, allocate, 1) == ["miss"]
        assert tier.statistics().corrupt_by_cause == {"length": 1}
        assert not await tier.contains(key_of(1))
        assert await put(tier, arena, 1) == [None]
        assert await get(tier, allocate, 1) == ["hit"]


@pytest.mark.parametrize("password", ["wrong" * 8, None])
async def test_a_wrong_token_stops_the_start_and_is_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, password: str | None
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "tokens"
    file.write_text("right" * 8)
    file.chmod(0o600)
    options = {}
    if password:
        monkeypatch.setenv("PEER_TOKEN", password)
        options = {"password_variable": "PEER_TOKEN"}
    with running(token_file=file) as [host]:
        with pytest.raises(ConfigError, match="password_file") as caught:
            await PeerTier(config(host, **options)).__aenter__()
        assert host.address in str(caught.value)
        assert ("wrong" * 8) not in f"{caught.value!r} {caught.value.__cause__!r} {caplog.text}"
        monkeypatch.setenv("PEER_TOKEN", "right" * 8)
        async with PeerTier(config(host, password_variable="PEER_TOKEN", username="default")) as tier:
            assert not await tier.contains(key_of(1))


async def test_an_engine_serves_what_another_host_has(host: Host) -> None:
    tiers = [{"name": "peer", "peers": [host.address], "write_to": "rendezvous", "layers": []}]
    tokens = list(range(32))
    rig = Rig()
    async with rig.open(tiers=tiers) as engine:
        rig.write(range(32), rig.content(tokens))
        assert (await engine.store(tokens, range(32))).stored == 4
        assert await engine.flush(timeout_s=10)
    reading = [{"name": "cpu"}, {"name": "peer", "peers": [host.address], "layers": []}]
    again = Rig()
    async with again.open(tiers=reading) as engine:
        mask = await engine.retrieve(tokens, range(40, 72))
        assert mask.all()
        assert (again.read(range(40, 72)) == again.content(tokens)).all()
        await turns(5)
        report = await engine.store([*tokens, 1, 2, 3, 4, 5, 6, 7, 8], range(40))
        assert await engine.flush(timeout_s=10)
        assert report.dropped == {}
    assert len(host.records()) == 4  # nothing was put by who only reads


def allocate_from(arena: Arena) -> Allocate:
    async def allocate(nbytes: int):
        return await arena.lease(nbytes, timeout_s=5)

    return allocate


async def looks(tier: PeerTier) -> bool:
    try:
        return await tier.contains(key_of(1))
    except TierUnavailableError:
        return False


def large_record(arena: Arena):
    buffer = arena.lease_nowait(FORMAT.record_bytes(LARGE_BYTES))
    assert buffer is not None
    write_record(buffer, 1, LARGE_BYTES)
    return buffer


def put_large(host: Host, arena: Arena) -> None:
    with large_record(arena) as buffer:
        content = bytes(buffer.view)
    host.replace(key_of(1), lambda _: content)
