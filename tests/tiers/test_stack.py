"""The tier stack: fallback, writes to all tiers, promotion; failures are values, and leases are released."""

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from concurrent.futures import Executor, Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.config import load_config
from lmcache_async.engine.tiers import stacked_tiers
from lmcache_async.errors import BudgetExceededError, TierFullError, TierUnavailableError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.pipeline.batch import NO_ROWS, FetchedBatch, RetrieveRequest
from lmcache_async.pipeline.report import WriteOutcomes
from lmcache_async.plugins.cpu import CPUConfig, CPUTier
from lmcache_async.stages.decrypt import DecryptStage
from lmcache_async.stages.fetch import FetchStage
from lmcache_async.testing.fakes import DictTier, FakeRegistry, FaultyTier, GatedTier, unavailable
from lmcache_async.testing.records import SLAB_BYTES as SLAB
from lmcache_async.testing.records import allocator, key_of, small_arena
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import cancelled_at_each_await, turns
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.stack import StackedTier, TierStack
from lmcache_async.tiers.writer import TierWriter
from lmcache_async.types import Chunk
from tests.support.tiers import handle_of
from tests.tiers.layered import in_virtual_time


def content_of(number):
    return bytes([number + 1]) * 100


class TurningTier(DictTier):
    """Yields to the loop before and after each step, so that a call can be cancelled there."""

    async def contains(self, key):
        await asyncio.sleep(0)
        return await super().contains(key)

    async def get(self, key, allocate):
        await asyncio.sleep(0)
        buffer = await super().get(key, allocate)
        try:
            await asyncio.sleep(0)
        except BaseException:
            if buffer is not None:
                buffer.release()
            raise
        return buffer

    async def put(self, key, buffer):
        await asyncio.sleep(0)
        await super().put(key, buffer)
        await asyncio.sleep(0)

    async def remove(self, key):
        await asyncio.sleep(0)
        return await super().remove(key)


def holding(numbers, kind=DictTier):
    tier = kind()
    tier.records.update({key_of(number): content_of(number) for number in numbers})
    return tier


def stack_of(*tiers, max_bytes=10_000, write_timeout_s=0.0, chunk_bytes=0, encrypted=False, timeout_s=60.0):
    """Tiers t0, t1, ...; a cpu tier has no queue, the others have one."""
    stacked = []
    for index, tier in enumerate(tiers):
        handle = handle_of(tier, name=f"t{index}", timeout_s=timeout_s)
        writer = None
        if handle.capabilities.writes and not handle.capabilities.in_arena:
            writer = TierWriter(handle, max_bytes=max_bytes, chunk_bytes=chunk_bytes)
        stacked.append(StackedTier(f"t{index}", handle, writer))
    return TierStack(stacked, write_timeout_s=write_timeout_s, encrypted=encrypted)


class Opened:
    """An open stack; all leases must be released when it is closed."""

    def __init__(self, arena, *tiers, **kwargs):
        self.arena, self.stack = arena, stack_of(*tiers, **kwargs)

    async def __aenter__(self):
        return await self.stack.open(self.arena)

    async def __aexit__(self, *_):
        await self.stack.aclose(timeout_s=5)


allocate_from = functools.partial(allocator, timeout_s=0.01)


def filled(arena, numbers):
    items = []
    for number in numbers:
        buffer = arena.lease_nowait(100)
        buffer.view[:] = content_of(number)
        items.append((key_of(number), buffer))
    return items


def release(buffers):
    for buffer in buffers:
        buffer.release()


def check_and_release(fetched, numbers):
    assert [bytes(buffer.view) for buffer in fetched.buffers] == [content_of(number) for number in numbers]
    release(fetched.buffers)


async def write(stack, arena, numbers):
    """Write and flush, and return the outcomes by position."""
    items = filled(arena, numbers)
    outcomes = WriteOutcomes(len(items))
    await stack.write(items, outcomes.add)
    release(buffer for _, buffer in items)
    assert await stack.flush(timeout_s=5)
    assert outcomes.pending() == []
    return outcomes.causes()


# Fetching.


@pytest.mark.parametrize(
    ("held", "planned", "tiers"),
    [
        ([[0, 1, 2], [2, 3]], [0, 0, 1, 1], (0, 0, 1, 1)),
        ([[0, 2], [], [1]], [0, 0, 0], (0, 2, 0)),
        ([[0, 2, 3], [3]], [0, 0, 0, 1], (0,)),
        ([[0], []], [1], ()),
    ],
    ids=["as planned", "removed after the plan", "gone from all tiers", "only in a faster tier"],
)
async def test_a_chunk_comes_from_its_planned_tier_or_a_slower_one_and_the_first_hole_ends_it(
    arena, held, planned, tiers
):
    async with Opened(arena, *map(holding, held)) as stack:
        fetched = await stack.fetch([key_of(n) for n in range(len(planned))], planned, allocate_from(arena))

        assert fetched.tiers == tiers
        assert fetched.cause == ("" if len(tiers) == len(planned) else "vanished")
        assert arena.statistics().leased_slabs == len(tiers)
        counts = stack.metrics.tier_counts()
        assert [counts[f"t{tier}.hits"] for tier in range(len(held))] == [
            tiers.count(tier) for tier in range(len(held))
        ]
        check_and_release(fetched, range(len(tiers)))


@pytest.mark.parametrize(
    ("options", "tiers"),
    [({}, (1, 0, 1, 1)), ({"max_slower": 2}, (1, 0, 1)), ({"slower": False}, ())],
    ids=["any number", "two", "none"],
)
async def test_a_number_of_chunks_is_read_from_slower_tiers(arena, options, tiers):
    async with Opened(arena, holding([1]), holding([0, 1, 2, 3])) as stack:
        fetched = await stack.fetch(
            [key_of(n) for n in range(4)], [0, 0, 0, 0], allocate_from(arena), **options
        )

        assert fetched.tiers == tiers
        check_and_release(fetched, range(len(tiers)))


async def test_a_failing_read_is_served_by_a_slower_tier_and_counted(arena):
    faulty = FaultyTier(holding([0, 1, 2]))
    async with Opened(arena, faulty, holding([1])) as stack:
        faulty.faults.extend([None, unavailable(), None])
        fetched = await stack.fetch([key_of(n) for n in range(3)], [0, 0, 0], allocate_from(arena))

        assert fetched.tiers == (0, 1, 0)
        assert stack.metrics.tier_counts()["t0.errors.TierError"] == 1
        check_and_release(fetched, [0, 1, 2])


async def test_the_reasons_of_misses_drops_and_failed_promotions_are_logged_once(arena, caplog):
    faulty = FaultyTier(holding([0]))
    async with Opened(arena, faulty) as stack:
        faulty.faults.extend([ValueError("odd"), ValueError("odd"), TierFullError("no space left")])
        for _ in range(2):
            assert (await stack.fetch([key_of(0)], [0], allocate_from(arena))).buffers == ()
        await write(stack, arena, [1])
        faulty.faults.append(KeyError("odd"))
        [item] = filled(arena, [2])
        await stack.promote([item], [1])
        item[1].release()
        assert await stack.flush(timeout_s=5)

    assert [record.message for record in caplog.records] == [
        "tier 't0': a call failed and counts as a miss: get raised ValueError: odd",
        "tier 't0': a chunk was not stored: no space left",
        "tier 't0': a chunk was not promoted: put raised KeyError: 'odd'",
    ]


class AtOnce(Executor):
    """Runs each call in `submit`."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def loaded(count, **fields):
    """Return a batch of a retrieve with a deadline of 10 s, of chunks in the first tier, and the config."""
    chunks = tuple(Chunk(key_of(n), n, np.zeros(1, np.int32)) for n in range(count))
    batch = FetchedBatch(
        request=RetrieveRequest(chunks=chunks),
        chunks=chunks,
        rows=(NO_ROWS,) * count,
        tiers=(0,) * count,
        **fields,
    )
    return batch, load_config(env={}, extra={"retrieve.timeout_s": 10})


@in_virtual_time
async def test_leading_chunks_with_memory_are_fetched_before_the_deadline_of_the_retrieve():
    arena = small_arena(2)
    batch, config = loaded(4)
    async with Opened(arena, holding([0, 1, 2, 3])) as stack:
        async with asyncio.timeout(9):  # the rest is for the copy
            fetched = await FetchStage(stack, arena, config)(batch)

        assert len(fetched.chunks) == 2
        check_and_release(fetched, [0, 1])
    arena.close()


async def test_chunks_of_a_batch_in_memory_are_read_again_as_far_as_memory_is_reserved(arena):
    batch, config = loaded(4, resident=4)
    batch.scope.reserved_bytes = 2 * arena.slab_bytes
    async with Opened(arena, holding([]), holding([0, 1, 2, 3])) as stack:
        fetched = await FetchStage(stack, arena, config)(batch)

        assert (fetched.tiers, fetched.cause) == ((1, 1), "vanished")
        check_and_release(fetched, [0, 1])


@in_virtual_time
async def test_a_decryption_without_memory_ends_before_the_deadline_of_the_retrieve():
    arena = small_arena(1)
    [(_, buffer)] = filled(arena, [0])
    with buffer, buffer.retain():  # as memory of a tier, which is not written to
        batch, config = loaded(1, buffers=(buffer,))
        stage = DecryptStage(stack_of(holding([0])), arena, AtOnce(), config, RecordCipher([bytes(32)]))
        async with asyncio.timeout(9):
            decrypted = await stage(batch)

    assert (decrypted.chunks, decrypted.cause) == ((), "no_room")
    arena.close()


async def test_each_record_is_decrypted_into_memory_of_its_length_if_another_lease_ends_meanwhile(
    monkeypatch,
):
    """A tier with memory of its own may evict a record while the decryption waits for memory."""
    arena, lengths = small_arena(4), []
    buffers = tuple(arena.lease_nowait(nbytes) for nbytes in (100, 60))
    others, lease_many = [buffer.retain() for buffer in buffers], arena.lease_many

    async def evict_and_lease(sizes, **options):
        others[0].release()
        return await lease_many(sizes, **options)

    class Cipher(RecordCipher):
        def decrypt(self, record, into, key):
            lengths.append((len(record), len(into)))

    monkeypatch.setattr(arena, "lease_many", evict_and_lease)
    batch, config = loaded(2, buffers=buffers)
    decrypted = await DecryptStage(stack_of(holding([])), arena, AtOnce(), config, Cipher([bytes(32)]))(batch)
    batch.scope.close()
    release([*buffers, others[1]])
    arena.close()

    assert (len(decrypted.chunks), lengths) == (2, [(100, 100), (60, 60)])


async def test_a_record_larger_than_a_slab_is_a_miss_of_that_chunk_alone(arena):
    tier = holding([0, 2])
    tier.records[key_of(1)] = bytes(SLAB + 1)
    async with Opened(arena, tier, holding([1])) as stack:
        fetched = await stack.fetch([key_of(n) for n in range(3)], [0, 0, 0], allocate_from(arena))

        assert fetched.tiers == (0, 1, 0)
        check_and_release(fetched, [0, 1, 2])


async def test_a_fetch_cancelled_at_any_step_gives_every_buffer_back(arena):
    keys, planned = [key_of(n) for n in range(6)], [0, 0, 1, 0, 1, 1]
    tiers = [holding([0, 1], TurningTier), holding([2, 4, 5, 3], TurningTier)]  # chunk 3 was removed
    async with Opened(arena, *tiers) as stack:

        async def fetch(_):
            fetched = await stack.fetch(keys, planned, allocate_from(arena))
            check_and_release(fetched, range(6))
            return fetched.tiers

        last = None
        async for task in cancelled_at_each_await(fetch):
            last = task
            while stack.late_calls:
                await asyncio.sleep(0)
            assert arena.statistics().leased_slabs == 0
        assert last.result() == (0, 0, 1, 1, 1, 1)


# Writing.


@given(
    fails=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=3),
    cpu_slabs=st.none() | st.integers(1, 4),
    max_bytes=st.sampled_from([150, 350, 10_000]),
)
def test_a_chunk_is_kept_if_any_tier_keeps_it_and_its_outcome_is_reported_once(fails, cpu_slabs, max_bytes):
    class Picky(TurningTier):
        def __init__(self, refused):
            super().__init__()
            self.refused = refused

        async def put(self, key, buffer):
            await asyncio.sleep(0)
            if int.from_bytes(key, "big") in self.refused:
                raise TierUnavailableError("away")
            await super().put(key, buffer)

    async def check():
        arena = small_arena(24)
        slow = [Picky(refused) for refused in fails]
        fast = [] if cpu_slabs is None else [CPUTier(CPUConfig(max_bytes=cpu_slabs * SLAB))]
        async with Opened(arena, *fast, *slow, max_bytes=max_bytes) as stack:
            outcomes = await write(stack, arena, range(4))

            for number, cause in enumerate(outcomes):
                kept = any([await tier.contains(key_of(number)) for tier in [*fast, *slow]])
                assert (cause == "") == kept, (number, cause)
                assert cause in {"", "TierUnavailableError", "TierFullError"}
            for index, tier in enumerate(slow, len(fast)):
                assert stack.metrics.tier_counts()[f"t{index}.stored"] == len(tier.records)
                dropped = sum(
                    n
                    for name, n in stack.metrics.tier_counts().items()
                    if name.startswith(f"t{index}.dropped.")
                )
                assert dropped == 4 - len(tier.records)
        assert arena.statistics().leased_slabs == 0
        arena.close()

    asyncio.run(check())


async def test_a_failure_of_the_whole_memory_tier_is_a_counted_drop(arena):
    class Away(CPUTier):
        async def put_many(self, items):
            raise TierUnavailableError("away")

    async with Opened(arena, Away(CPUConfig())) as stack:
        assert await write(stack, arena, [0, 1]) == ["TierUnavailableError"] * 2
        assert stack.metrics.tier_counts()["t0.dropped.TierUnavailableError"] == 2


@pytest.mark.parametrize("verb", ["write", "promote"])
async def test_a_write_or_a_promotion_cancelled_at_any_step_gives_every_lease_back_and_is_counted(
    arena, verb
):
    puts = Counter()

    class CountedTier(TurningTier):
        async def put(self, key, buffer):
            await super().put(key, buffer)
            puts[self] += 1

    tiers = [CountedTier(), CountedTier()]
    event = {"write": "stored", "promote": "promoted"}[verb]
    async with Opened(arena, *tiers, DictTier(), max_bytes=250, write_timeout_s=60) as stack:

        async def one(_):
            items = filled(arena, range(6))
            try:
                if verb == "write":
                    await stack.write(items, WriteOutcomes(len(items)).add)
                else:
                    await stack.promote(items, [2] * 6)
            finally:
                release(buffer for _, buffer in items)

        async for _ in cancelled_at_each_await(one):
            assert await stack.flush(timeout_s=5)
            assert arena.statistics().leased_slabs == 0
            await turns(2)
            counts = stack.metrics.tier_counts()
            assert [counts[f"t{index}.{event}"] for index in range(2)] == [puts[tier] for tier in tiers]
        assert all(len(tier.records) == 6 for tier in tiers) or verb == "promote"


# Promoting, discarding, pinning.


async def test_chunks_are_promoted_to_every_faster_tier_and_to_no_other(arena):
    cpu, middle, slow = CPUTier(CPUConfig()), DictTier(), DictTier()
    async with Opened(arena, cpu, middle, slow) as stack:
        items = filled(arena, range(3))
        await stack.promote(items, [0, 1, 2])
        release(buffer for _, buffer in items)
        assert await stack.flush(timeout_s=5)

        assert await cpu.contains_many([key_of(n) for n in range(3)]) == [False, True, True]
        assert set(middle.records) == {key_of(2)}
        assert slow.records == {}
        assert stack.metrics.tier_counts() == {"t0.promoted": 2, "t1.promoted": 1}


async def test_a_promotion_does_not_wait_for_room_and_does_not_raise(arena):
    class Away(CPUTier):
        async def put_many(self, items):
            raise TierFullError("full")

    gated = GatedTier(DictTier())
    async with Opened(
        arena, Away(CPUConfig()), gated, holding([]), max_bytes=250, write_timeout_s=60
    ) as stack:
        items = filled(arena, range(4))
        await stack.promote(items, [2] * 4)
        release(buffer for _, buffer in items)

        assert stack.tiers[1].writer.statistics().refused == 2
        gated.open_gate()


async def test_a_record_that_fails_verification_is_removed_from_its_tier_and_both_are_counted(arena):
    class Stays(DictTier):
        async def remove(self, key):
            raise TierUnavailableError("away")

    fast, slow = holding([0]), holding([0])
    async with Opened(arena, fast, slow, holding([0], Stays)) as stack:
        await stack.discard(1, key_of(0), "checksum")
        await stack.discard(2, key_of(0), "key")

        assert (key_of(0) in fast.records, key_of(0) in slow.records) == (True, False)
        assert stack.metrics.tier_counts() == {
            "t1.corrupt.checksum": 1,
            "t2.corrupt.key": 1,
            "t2.errors.TierUnavailableError": 1,
        }


class Arenaish(TurningTier):
    """A tier that claims to be in the arena and yields, as a third-party tier may."""

    @property
    def capabilities(self):
        return Capabilities(in_arena=True, local_index=True)

    def bind(self, arena):
        self.arena = arena

    async def get(self, key, allocate):
        return await super().get(key, allocate_from(self.arena))


async def test_only_chunks_in_the_arena_are_leased_for_a_pin_also_if_one_of_its_tiers_fails(arena):
    class Away(Arenaish):
        async def get_many(self, keys, allocate):
            raise TierUnavailableError("away")

    tiers = [holding([0, 2], Arenaish), holding([1], Away), holding([3])]  # the last is not in the arena
    async with Opened(arena, *tiers) as stack:
        leases = await stack.lease_in_arena([key_of(n) for n in range(4)], [0, 1, 0, 2])

        assert [bytes(buffer.view) for buffer in leases] == [content_of(0), content_of(2)]
        assert stack.metrics.tier_counts()["t1.errors.TierUnavailableError"] == 1
        release(leases)


async def test_leasing_for_a_pin_cancelled_at_any_step_gives_every_lease_back(arena):
    async with Opened(arena, holding([0, 2], Arenaish), holding([1], Arenaish)) as stack:

        async def lease(_):
            leases = await stack.lease_in_arena([key_of(n) for n in range(3)], [0, 1, 0])
            release(leases)
            return len(leases)

        last = None
        async for task in cancelled_at_each_await(lease):
            last = task
            assert arena.statistics().leased_slabs == 0
        assert last.result() == 3


# Opening and closing.


class Watched(DictTier):
    def __init__(self, log, name, fails=False):
        super().__init__()
        self.log, self.name, self.fails = log, name, fails

    async def __aenter__(self):
        await asyncio.sleep(0)
        if self.fails:
            raise TierUnavailableError("no such place")
        self.log.append(f"+{self.name}")
        return self

    async def __aexit__(self, *_):
        self.log.append(f"-{self.name}")


async def test_when_a_tier_cannot_be_opened_those_before_it_are_closed(arena):
    log = []
    stack = stack_of(Watched(log, "a"), Watched(log, "b"), Watched(log, "c", fails=True))
    with pytest.raises(TierUnavailableError):
        await stack.open(arena)

    assert log == ["+a", "+b", "-b", "-a"]
    assert all(worker.done() for stacked in stack.tiers for worker in stacked.writer._workers)
    await stack.aclose(timeout_s=1)
    assert len(log) == 4


async def test_an_opening_cancelled_at_any_step_closes_the_opened_tiers(arena):
    log = []

    async def open_and_close(_):
        stack = stack_of(Watched(log, "a"), Watched(log, "b"))
        await stack.open(arena)
        log.append("open")
        await stack.aclose(timeout_s=1)

    async for _ in cancelled_at_each_await(open_and_close):
        assert [name for name in log if name[0] == "+"] == [
            f"+{name[1]}" for name in reversed(log) if name[0] == "-"
        ]
        log.clear()


@pytest.mark.parametrize("steps", range(6))
async def test_a_closing_cancelled_at_any_step_still_closes_every_tier(arena, steps):
    log, gated = [], GatedTier(Watched([], "slow"))
    stack = stack_of(Watched(log, "a"), gated, Watched(log, "b"))
    await stack.open(arena)
    items = filled(arena, range(4))
    await stack.write(items, WriteOutcomes(len(items)).add)
    release(buffer for _, buffer in items)
    close = asyncio.ensure_future(stack.aclose(timeout_s=60))
    await turns(1 + steps)
    close.cancel()
    await asyncio.wait({close})

    assert log == ["+a", "+b", "-b", "-a"]
    assert gated.inner.log == ["+slow", "-slow"]
    assert arena.statistics().leased_slabs == 0


async def test_the_outcome_of_a_write_whose_future_is_cancelled_is_unknown(arena):
    tier = GatedTier(DictTier())
    async with Opened(arena, tier) as stack:
        items = filled(arena, range(2))
        outcomes = WriteOutcomes(len(items))
        await stack.write(items, lambda results, *, shared: outcomes.add(results, shared=True))
        release(buffer for _, buffer in items)
        outcomes.pending()[0].cancel()
        tier.open_gate()
        assert await stack.flush(timeout_s=5)
        assert outcomes.causes() == [None, ""]
        assert outcomes.shared() == 1
        assert len(tier.inner.records) == 2


@in_virtual_time
async def test_a_flush_waits_for_a_write_that_is_abandoned_meanwhile(arena):
    ended = asyncio.Event()

    class Stuck(DictTier):
        async def put_many(self, items):
            while not ended.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await ended.wait()
            return [None] * len(items)

    async with Opened(arena, Stuck(), timeout_s=0.01) as stack:
        items = filled(arena, [0])
        await stack.write(items, WriteOutcomes(len(items)).add)
        release(buffer for _, buffer in items)

        flushed, late = await stack.flush(timeout_s=0.05), stack.late_calls
        ended.set()
        assert (flushed, late) == (False, 1)
        assert await stack.flush(timeout_s=5)


async def test_a_pin_leases_no_chunk_that_would_have_to_be_copied(arena):
    class Copies(Arenaish):
        async def get(self, key, allocate):
            return await DictTier.get(self, key, allocate)

    async with Opened(arena, holding([0], Copies)) as stack:
        assert await stack.lease_in_arena([key_of(0)], [0]) == []


async def test_room_is_reserved_in_every_queue_or_in_none(arena):
    gate = GatedTier(DictTier())
    async with Opened(arena, DictTier(), gate, max_bytes=200, chunk_bytes=100) as stack:
        first, second = (stacked.writer for stacked in stack.tiers)
        items = filled(arena, [9])
        await second.submit(items, timeout_s=0)
        release(buffer for _, buffer in items)
        with pytest.raises(BudgetExceededError):
            await stack.reserve_writes([key_of(0), key_of(1)], timeout_s=0)
        assert [w.statistics().queued_bytes for w in (first, second)] == [0, 100]

        reserved = await stack.reserve_writes([key_of(0)], timeout_s=0)
        assert [w.statistics().queued_bytes for w in (first, second)] == [100, 200]
        release(reserved)
        assert [w.statistics().queued_bytes for w in (first, second)] == [0, 100]
        gate.open_gate()


async def test_a_promotion_does_not_take_room_that_is_reserved_for_a_store(arena):
    gate = GatedTier(DictTier())
    async with Opened(arena, gate, DictTier(), max_bytes=200, chunk_bytes=100) as stack:
        reserved = await stack.reserve_writes([key_of(0), key_of(1)], timeout_s=0)
        items, outcomes = filled(arena, [0, 1]), WriteOutcomes(2)
        await stack.promote(items[:1], [1])
        await stack.write(items, outcomes.add)
        release([buffer for _, buffer in items] + reserved)

        gate.open_gate()
        assert await stack.flush(timeout_s=5)
        assert outcomes.causes() == ["", ""]
        assert set(gate.inner.records) == {key_of(0), key_of(1)}


async def test_only_leading_chunks_that_memory_should_have_count_as_missing_from_it(arena):
    keys = [key_of(number) for number in range(5)]
    async with Opened(arena, CPUTier(CPUConfig()), holding([0, 1, 3])) as stack:
        assert await stack.missing(keys) == [0, 1, 2, 3, 4]
        assert await stack.missing(keys, memory_chunks=1) == [0, 2, 4]
        assert await stack.missing(keys, memory_chunks=0) == [2, 4]


# Read-only tiers.


class ReadTier(DictTier):
    @property
    def capabilities(self):
        return Capabilities(writes=False)

    async def put_many(self, items):
        raise AssertionError("it was given a record")


async def test_a_read_only_tier_lacks_nothing_and_is_given_nothing(arena):
    keys = [key_of(number) for number in range(3)]
    async with Opened(arena, CPUTier(CPUConfig()), holding([2], ReadTier), encrypted=True) as stack:
        assert await stack.missing(keys) == [0, 1, 2]  # also chunks of the read-only tier
        assert await write(stack, arena, range(2)) == ["", ""]
        assert await stack.missing(keys) == [2]
        items = filled(arena, range(2))
        await stack.promote(items, [1, 1])
        release(buffer for _, buffer in items)
        assert not stack.leaves_memory  # no record leaves memory, so none is encrypted
        assert await stack.plan(keys) == ((0, 0, 1), "")
        assert stack.metrics.tier_counts() == {"t0.stored": 2, "t0.promoted": 2}


async def test_no_record_is_promoted_into_a_faster_read_only_tier(arena):
    async with Opened(arena, ReadTier(), DictTier()) as stack:
        items = filled(arena, [0])
        await stack.promote(items, [1])
        release(buffer for _, buffer in items)


async def test_with_only_a_read_only_tier_nothing_is_to_be_stored(arena):
    async with Opened(arena, holding([2], ReadTier)) as stack:
        assert await stack.missing([key_of(number) for number in range(3)]) == []


def test_a_read_only_tier_of_an_engine_has_no_queue():
    config = load_config(env={}, extra={"tiers": [{"name": "theirs", "layers": []}]})
    logger = LimitedLogger(logging.getLogger("test"))
    [stacked] = stacked_tiers(FakeRegistry(tiers={"theirs": ReadTier}), config, Rig().namespace, logger)

    assert stacked.writer is None
    assert not stacked.tier.capabilities.writes
