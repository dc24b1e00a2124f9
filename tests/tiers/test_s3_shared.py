"""The s3 tier: a shared bucket, limits on requests, and copies into the arena in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore

from lmcache_async.errors import BudgetExceededError, ChunkCorruptError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.s3 import S3Config, S3Tier
from lmcache_async.plugins.s3 import tier as s3_tier
from lmcache_async.plugins.s3.bucket import Bucket, name_of, open_store
from lmcache_async.testing.conformance.base import TierRig, in_time
from lmcache_async.testing.records import check_record, key_of, record
from lmcache_async.testing.steps import DEADLINE_S, turns
from lmcache_async.types import ChunkKey
from tests.support.gates import Gate
from tests.support.proxy import Proxy


@pytest.fixture
def tier(s3_server, arena):
    tier = S3Tier(s3_server.config(part_bytes=4096))
    tier.bind(arena)
    return tier


async def test_objects_of_other_names_are_neither_listed_nor_deleted(tier, arena):
    store = open_store(tier.config)
    foreign = ["readme", "00/readme", f"ab/{key_of(1).hex()}", f"{name_of(key_of(1))}.tmp"]
    async with tier:
        await TierRig(tier, arena).put(1, 2)
        for name in foreign:
            await obstore.put_async(store, name, b"not ours")

        assert await TierRig(tier, arena).keys() == {key_of(1), key_of(2)}
        assert await tier.clear() == 2
        assert {entry["path"] for entry in await obstore.list(store).collect_async()} == set(foreign)


@pytest.mark.parametrize("content", [b"", bytes(200_000)], ids=["empty", "too long"])
@pytest.mark.parametrize("part_bytes", [4096, 1 << 20])
async def test_an_object_whose_length_no_record_has_is_a_miss_and_is_deleted(
    s3_server, arena, allocate, content, part_bytes
):
    tier = S3Tier(s3_server.config(part_bytes=part_bytes))
    tier.bind(arena)
    evicted = []
    tier.on_evicted = evicted.extend
    async with tier:
        await obstore.put_async(open_store(tier.config), name_of(key_of(1)), content, use_multipart=False)
        assert await tier.get(key_of(1), allocate) is None
        assert evicted == [key_of(1)]

        assert tier.statistics().corrupt_by_cause == {"length": 1}
        assert not await tier.contains(key_of(1))


@pytest.mark.parametrize("content", [b"", bytes(200_000)], ids=["empty", "too long"])
@pytest.mark.parametrize("part_bytes", [4096, 1 << 20])
async def test_an_object_of_an_invalid_length_stays_if_invalid_records_are_not_removed(
    tmp_path, arena, allocate, content, part_bytes
):
    store = LocalStore(tmp_path)
    tier = S3Tier(S3Config(url="s3://bucket", part_bytes=part_bytes), store=store)
    tier.bind(arena)
    tier.removes_invalid = False
    async with tier:
        await obstore.put_async(store, name_of(key_of(1)), content, use_multipart=False)
        with pytest.raises(ChunkCorruptError, match=f"{len(content)} bytes, expected 1 to"):
            await tier.get(key_of(1), allocate)
        assert await tier.contains(key_of(1))


async def test_a_record_is_not_read_without_memory_for_it(s3_server, arena, monkeypatch):
    read = []

    async def note_read(self: Bucket, key: object, max_bytes: int) -> None:
        read.append(key)

    monkeypatch.setattr(Bucket, "read", note_read)

    async def refuse(nbytes: int) -> Buffer:
        raise BudgetExceededError(f"no {nbytes} bytes for this test")

    tier = S3Tier(s3_server.config())
    tier.bind(arena)
    async with tier:
        with pytest.raises(BudgetExceededError):
            await tier.get(key_of(1), refuse)

    assert read == []


async def test_a_record_removed_while_it_is_read_is_a_miss(tier, arena, allocate):
    async def allocate_and_remove(nbytes: int) -> Buffer:
        await tier.remove(key_of(1))
        return await allocate(nbytes)

    async with tier:
        await TierRig(tier, arena).put(1)
        assert await tier.get(key_of(1), allocate_and_remove) is None
        await TierRig(tier, arena).check_leases()


async def test_clearing_continues_after_a_record_that_another_process_has_deleted(
    tmp_path, arena, monkeypatch
):
    pages = Bucket.pages

    async def pages_with_deleted(self: Bucket) -> AsyncIterator[list[ChunkKey]]:
        async for page in pages(self):
            yield [key_of(99), *page]

    monkeypatch.setattr(Bucket, "pages", pages_with_deleted)
    # Like most stores except S3, it reports an object that does not exist.
    tier = S3Tier(S3Config(url="s3://bucket"), store=LocalStore(tmp_path))
    tier.bind(arena)
    async with tier:
        rig = TierRig(tier, arena)
        await rig.put(*range(40))
        await tier.clear()

        monkeypatch.undo()
        assert await rig.keys() == set()


async def test_a_read_never_combines_two_versions_of_a_record(tier, arena, allocate):
    replaced = []

    async def allocate_and_replace(nbytes: int) -> Buffer:
        if len(replaced) < 2:
            replaced.append(nbytes)
            with record(arena, 1, 9000 + len(replaced)) as buffer:
                await tier.put(key_of(1), buffer)
        return await allocate(nbytes)

    async with tier:
        await TierRig(tier, arena, lambda _: 30_000).put(1)
        got = await tier.get(key_of(1), allocate_and_replace)
        assert got is not None
        check_record(got, 1, 9002)
        got.release()
        await TierRig(tier, arena).check_leases()


async def test_a_record_that_changes_all_the_time_is_an_error(tier, arena, allocate):
    lengths = iter(range(9000, 9100))

    async def allocate_and_replace(nbytes: int) -> Buffer:
        with record(arena, 1, next(lengths)) as buffer:
            await tier.put(key_of(1), buffer)
        return await allocate(nbytes)

    async with tier:
        await TierRig(tier, arena).put(1)
        with pytest.raises(TierUnavailableError, match="was replaced during"):
            await tier.get(key_of(1), allocate_and_replace)
        await TierRig(tier, arena).check_leases()


async def test_the_lookup_of_a_prefix_sends_at_most_one_window_of_requests_beyond_its_end(
    tier, arena, monkeypatch
):
    asked = []
    find = Bucket.find

    async def counted(self: Bucket, key: object) -> object:
        asked.append(key)
        return await find(self, key)  # type: ignore[arg-type]

    monkeypatch.setattr(Bucket, "find", counted)
    keys = [key_of(number) for number in range(200)]
    async with tier:
        assert await tier.count_prefix(keys) == 0
        assert len(asked) == 4
        await TierRig(tier, arena).put(*range(10))
        asked.clear()
        assert await tier.count_prefix(keys) == 10

        assert len(asked) == len(set(asked)) == 4 + tier.config.concurrency


async def test_the_number_of_concurrent_lookups_is_limited(s3_server, arena):
    async with Proxy(s3_server.port) as proxy:
        config = s3_server.config(part_bytes=4096, concurrency=3)
        tier = S3Tier(config.model_copy(update={"endpoint": f"http://127.0.0.1:{proxy.port}"}))
        tier.bind(arena)
        async with tier:
            items = [(key_of(number), record(arena, number, 60_000)) for number in range(4)]
            assert await tier.put_many(items) == [None] * 4
            for _, buffer in items:
                buffer.release()
            keys = [key for key, _ in items]
            proxy.requests.shut()
            counting = asyncio.ensure_future(tier.count_prefix(keys))
            async with asyncio.timeout(DEADLINE_S):
                while proxy.most_waiting < 3:
                    await asyncio.sleep(0)
            proxy.requests.open()
            assert await in_time(counting) == 4

        assert proxy.most_waiting == 3


async def test_a_lookup_does_not_wait_for_queued_reads(tmp_path, arena, monkeypatch):
    started, ended = [], asyncio.Event()

    async def wait_ended(_, name):
        started.append(name)
        await ended.wait()
        raise FileNotFoundError

    monkeypatch.setattr(obstore, "get_async", wait_ended)
    bucket = Bucket(S3Config(url="s3://files", concurrency=3), LocalStore(tmp_path))
    reading = [asyncio.ensure_future(bucket.read(key_of(number), 1000)) for number in range(9)]
    await turns(20)

    assert await in_time(bucket.find(key_of(1))) is None
    assert len(started) == 3

    ended.set()
    assert await in_time(asyncio.gather(*reading)) == [None] * 9


@pytest.fixture
def copies(monkeypatch):
    """A gate in front of the tier's copies, shut at first."""
    gate = Gate(monkeypatch, s3_tier, "_fill", shut=True)
    yield gate
    gate.open()


def tier_over(directory: Path, part_bytes: int, arena: Arena) -> S3Tier:
    tier = S3Tier(S3Config(url="s3://files", part_bytes=part_bytes), store=LocalStore(directory))
    tier.bind(arena)
    return tier


@pytest.mark.parametrize("part_bytes", [1 << 20, 4096], ids=["whole", "parts"])
async def test_a_cancelled_get_keeps_its_lease_until_the_copy_in_a_thread_has_ended(
    copies, tmp_path, arena, allocate, part_bytes
):
    async with tier_over(tmp_path, part_bytes, arena) as tier:
        await TierRig(tier, arena, lambda _: 60_000).put(1)
        reading = asyncio.ensure_future(tier.get(key_of(1), allocate))
        await copies.reached()
        for _ in range(3):
            reading.cancel()
            await turns(5)
        assert not reading.done()
        assert arena.statistics().leased_slabs == 1

        copies.open()
        await in_time(asyncio.wait({reading}))
        assert reading.cancelled()
        assert arena.statistics().leased_slabs == 0
        assert threading.get_ident() not in copies.threads


async def test_closing_waits_for_a_copy_and_ends_the_threads(copies, tmp_path, arena, allocate):
    tier = tier_over(tmp_path, 1 << 20, arena)
    await tier.__aenter__()
    await TierRig(tier, arena).put(1)
    reading = asyncio.ensure_future(tier.get(key_of(1), allocate))
    await copies.reached()
    closing = asyncio.ensure_future(tier.__aexit__(None, None, None))
    await turns(5)
    assert not closing.done()

    copies.open()
    await in_time(closing)
    buffer = await in_time(reading)
    assert buffer is not None
    buffer.release()
    assert not [thread for thread in threading.enumerate() if thread.ident in copies.threads]
