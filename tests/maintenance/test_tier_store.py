"""Offline access through a tier: deadlines, missing capabilities and failures."""

from __future__ import annotations

import asyncio
import json

import pytest

from lmcache_async.errors import ConfigError, TierError, TierUnavailableError
from lmcache_async.maintenance.concurrency import for_each, no_progress
from lmcache_async.maintenance.copy import copy
from lmcache_async.maintenance.gc import collect
from lmcache_async.maintenance.inspection import inspect
from lmcache_async.maintenance.namespaces import Selection
from lmcache_async.maintenance.stores import Stores
from lmcache_async.maintenance.verification import verify
from lmcache_async.plugins.valkey import ValkeyTier
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.records import key_of
from lmcache_async.tiers.base import Capabilities
from tests.maintenance.filled import Failing, sealed, store_of
from tests.support.tiers import altered, hang


async def list_two(self):
    """Stop answering during a list."""
    for key in [*self.records][:2]:
        yield key
    await hang()


@pytest.mark.parametrize("members", [{"keys": list_two}, {"get": hang}], ids=["keys", "get"])
async def test_a_tier_that_stops_answering_ends_the_run(members):
    async with store_of(altered(**members)(records=sealed([10] * 4)), timeout_s=0.1) as target:
        with pytest.raises(TierUnavailableError, match=r"did not answer in 0\.1 s"):
            await verify(target)


async def test_a_record_that_cannot_be_read_is_an_error_and_the_others_are_read():
    tier = Failing(records=sealed([10] * 3))

    async with store_of(tier) as target:
        verified = await verify(target, remedy="remove")
        found = await inspect(target)

    assert (verified.records, verified.errors, verified.remedied) == (2, 1, 0)
    assert verified.wrong_records[0]["message"] == "it cannot be read"
    assert (found.records, found.errors) == (2, 1)
    assert len(tier.records) == 3


async def test_gc_counts_the_bytes_that_it_reads_and_no_record_that_is_gone():
    records = sealed([10, 20, 30])
    nbytes = sum(map(len, records.values())) - len(records[key_of(1)])

    async with store_of(DictTier(records=records)) as target:
        kept = await collect(target, lambda *_: records.pop(key_of(1), None))
        removed = await collect(target, selection=Selection(("model=m",)))

    assert (kept.kept_records, kept.kept_bytes) == (2, nbytes)
    assert removed.records["namespace"] == {"count": 2, "bytes": nbytes}
    assert (removed.freed_bytes, removed.kept_bytes, records) == (nbytes, 0, {})


async def test_a_missing_capability_is_reported():
    mute = altered(capabilities=Capabilities(writes=False))
    async with store_of(mute(records=sealed([10] * 2))) as target:
        with pytest.raises(ConfigError, match="tier 't' cannot list its records"):
            await target.list()
        with pytest.raises(ConfigError, match="it is read-only"):
            await target.prepare_writes()
        with pytest.raises(ConfigError, match="cannot delete records"):
            await target.remove([key_of(1)])


async def test_the_error_for_a_record_longer_than_the_memory_names_the_option():
    async with store_of(DictTier(records=sealed([9000])), max_record_bytes=4096) as target:
        report = await verify(target)

    assert report.errors == 1
    assert "--max-record-bytes" in report.wrong_records[0]["message"]


async def test_a_record_longer_than_the_memory_stays_on_the_server(root, valkey):
    """A tier of an engine removes a record that is longer than any of its own."""
    async with Stores().open(root) as source, Stores().open(None, valkey) as target:
        await copy(source, target)

    async with Stores(max_record_bytes=4096).open(None, valkey) as target:
        verified = await verify(target)
        found = await inspect(target)
        there = await target.list()

    assert (verified.records, verified.errors, verified.gone) == (0, 8, 0)
    assert (found.errors, found.gone, len(there)) == (8, 0, 8)
    assert "--max-record-bytes" in verified.wrong_records[0]["message"]


async def test_a_call_that_failed_for_a_moment_is_repeated(root, valkey, monkeypatch):
    async with Stores().open(root) as source, Stores().open(None, valkey) as target:
        await copy(source, target)
    read, fails = ValkeyTier.get_many, 2

    async def fail_twice(self, keys, allocate):
        nonlocal fails
        if fails:
            fails -= 1
            raise TierUnavailableError("it is busy")
        return await read(self, keys, allocate)

    monkeypatch.setattr(ValkeyTier, "get_many", fail_twice)
    async with Stores(in_flight=1).open(None, valkey) as target:
        report = await verify(target)

    assert (report.records, report.errors, fails) == (8, 0, 0)


async def test_a_list_may_need_many_requests_for_the_next_key(root, valkey):
    """A server with many other keys answers each request in time."""
    async with Stores().open(root) as source, Stores().open(None, valkey) as target:
        await copy(source, target)

    impatient = json.dumps(json.loads(valkey) | {"timeout_s": 1e-6})
    async with Stores().open(None, impatient) as target:
        assert len(await target.list()) == 8


async def test_records_of_other_namespaces_count_against_the_rate():
    """A tier has no method to read a header alone."""
    records = sealed([10] * 3)
    others, verified, copied = Selection(("model=other",)), [], []

    async with store_of(DictTier(records=records)) as target, store_of(DictTier()) as destination:
        report = await verify(target, lambda *told: verified.append(told), selection=others)
        copies = await copy(target, destination, lambda *told: copied.append(told), selection=others)

    assert report.passed_over == copies.passed_over == 3
    assert verified[-1] == copied[-1] == ("records", 3, 3, report.bytes)
    assert report.bytes == sum(map(len, records.values()))


async def test_items_are_started_in_order_and_concurrency_is_limited():
    under_way, most, started, told = 0, 0, [], []

    async def work(number):
        nonlocal under_way, most
        started.append(number)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return number

    await for_each("items", range(6), work, lambda *one: told.append(one), in_flight=3)

    assert started == list(range(6))
    assert most == 3
    assert (told[0], told[-1]) == (("items", 0, 6, 0), ("items", 6, 6, sum(range(6))))


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_an_early_end_awaits_running_work(end):
    ended, running = [], asyncio.Event()

    async def work(number):
        try:
            if number == 3:
                running.set()
                if end == "failed":
                    raise TierError("it failed")
            if number:
                await asyncio.Event().wait()
            return 0
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    task = asyncio.create_task(for_each("items", range(9), work, no_progress, in_flight=3))
    await running.wait()
    if end == "cancelled":
        task.cancel()

    with pytest.raises(asyncio.CancelledError if end == "cancelled" else TierError):
        await task
    assert sorted(ended) == [0, 1, 2, 3]
