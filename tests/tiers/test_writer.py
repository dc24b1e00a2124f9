"""The queue before a slow tier: bounded, in order, failures as values, no leaks."""

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_async.errors import BudgetExceededError, TierClosedError, TierError, TierFullError
from lmcache_async.testing.fakes import DictTier, GatedTier
from lmcache_async.testing.records import SLAB_BYTES as SLAB
from lmcache_async.testing.records import key_of, small_arena
from lmcache_async.testing.steps import cancelled_at_each_await, turns
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.writer import TierWriter
from tests.support.tiers import handle_of
from tests.tiers.layered import in_virtual_time, now


@contextlib.contextmanager
def leased_items(arena, sizes, first=0):
    """Buffers of the caller, which releases them at once: queued records have their own leases."""
    with contextlib.ExitStack() as stack:
        items = []
        for number, size in enumerate(sizes, first):
            buffer = stack.enter_context(arena.lease_nowait(size))
            buffer.view[:] = bytes([number % 251]) * size
            items.append((key_of(number), buffer))
        yield items


class CallsTier(DictTier):
    """A tier that records every call of `put_many`, yields once in it, and then runs `check`."""

    def __init__(self, check=lambda: None):
        super().__init__()
        self.calls = []
        self.check = check

    async def put_many(self, items):
        self.calls.append([(key, buffer.nbytes) for key, buffer in items])
        self.check()
        await asyncio.sleep(0)
        return await super().put_many(items)

    @property
    def keys_in_order(self):
        return [key for call in self.calls for key, _ in call]


def open_writer(tier, *, max_bytes=10_000, **kwargs):
    handle = tier if isinstance(tier, TierHandle) else handle_of(tier, timeout_s=1e6)
    writer = TierWriter(handle, max_bytes=max_bytes, **kwargs)
    writer.start()
    return writer


@contextlib.asynccontextmanager
async def opened(tier, **kwargs):
    writer = open_writer(tier, **kwargs)
    yield writer
    await writer.aclose(timeout_s=1)


async def submit(writer, arena, sizes, first=0, timeout_s=0.0):
    with leased_items(arena, sizes, first) as items:
        return await writer.submit(items, timeout_s=timeout_s)


def results_of(futures):
    assert all(future.done() for future in futures)
    return [future.result() for future in futures]


@given(
    prompts=st.lists(st.lists(st.integers(1, SLAB), max_size=6), max_size=4),
    max_bytes=st.integers(0, 3 * SLAB),
    call_bytes=st.integers(1, 3 * SLAB),
    workers=st.integers(1, 3),
    turns_between=st.integers(0, 6),
)
def test_the_queue_is_bounded_and_ordered_and_a_refused_chunk_refuses_all_after_it(
    prompts, max_bytes, call_bytes, workers, turns_between
):
    async def check():
        arena = small_arena(32)

        def bound():
            statistics = writer.statistics()
            assert statistics.queued_bytes <= max_bytes
            assert arena.statistics().leased_slabs >= statistics.queued_chunks

        tier = CallsTier(bound)
        writer = open_writer(tier, max_bytes=max_bytes, call_bytes=call_bytes, workers=workers)
        submitted, kept, refused, first = [], [], 0, 0
        for sizes in prompts:
            with leased_items(arena, sizes, first) as items:
                futures = await writer.submit(items, timeout_s=0)
                bound()
            first += len(sizes)
            submitted.append((items, futures))
            await turns(turns_between)
        assert await writer.flush(timeout_s=5)
        for items, futures in submitted:
            results = results_of(futures)
            kept += [key for (key, _), result in zip(items, results, strict=True) if result is None]
            stored = results.count(None)
            assert results[:stored] == [None] * stored, "stored behind a refusal"
            assert all(isinstance(result, TierFullError) for result in results[stored:])
            refused += len(results) - stored

        assert sorted(tier.keys_in_order) == kept
        if workers == 1:
            assert tier.keys_in_order == kept
        assert [key for call in sorted(tier.calls) for key, _ in call] == kept, "a call took out of order"
        assert all(len(call) == 1 or sum(n for _, n in call) <= call_bytes for call in tier.calls)
        assert writer.statistics().queued_chunks == writer.statistics().queued_bytes == 0
        assert writer.statistics().refused == refused
        await writer.aclose(timeout_s=1)
        assert arena.statistics().leased_slabs == 0
        arena.close()

    asyncio.run(check())


async def test_a_chunk_waits_for_room_within_its_deadline(arena):
    gated = GatedTier(DictTier())
    async with opened(gated, max_bytes=100, workers=1) as writer:
        with leased_items(arena, [60, 60]) as items:
            submit = asyncio.ensure_future(writer.submit(items, timeout_s=5))
            await gated.parked.wait()
            await turns(3)
            assert not submit.done()
            assert writer.statistics().queued_chunks == 1

            gated.open_gate()
            futures = await submit
        assert await writer.flush(timeout_s=5)

        assert results_of(futures) == [None, None]
        assert gated.inner.records[key_of(1)] == bytes([1]) * 60


class OddTier(DictTier):
    """A tier that answers `put_many` as given."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    async def put_many(self, items):
        answer, self.answer = self.answer, None
        if answer is None:
            return await super().put_many(items)
        return answer(items)


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (lambda items: [None, TierError("one"), None], [type(None), TierError, type(None)]),
        (lambda items: _raise(TierError("all")), [TierError] * 3),
        (lambda items: _raise(BudgetExceededError("no room")), [TierFullError] * 3),
        (lambda items: [None], [TierError] * 3),
        (lambda items: [None] * 4, [TierError] * 3),
    ],
    ids=["one fails", "all fail", "no memory", "too few answers", "too many answers"],
)
async def test_a_failure_is_the_chunks_value_and_the_next_chunk_is_written(arena, answer, kinds):
    tier = OddTier(answer)
    async with opened(tier, workers=1) as writer:
        futures = await submit(writer, arena, [10, 20, 30])
        assert await writer.flush(timeout_s=5)
        futures += await submit(writer, arena, [40], first=3)

        assert await writer.flush(timeout_s=5), "the writer has stopped"
        assert [type(result) for result in results_of(futures)] == [*kinds, type(None)]
        assert key_of(3) in tier.records
        assert writer.statistics().queued_bytes == 0


async def test_an_error_while_chunks_are_counted_affects_no_chunk(arena):
    errors, counts = [], iter([ValueError("miscounted"), None])
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def count(outcomes):
        if error := next(counts):
            raise error

    async with opened(DictTier(), workers=1) as writer:
        with leased_items(arena, [10, 20, 30]) as items:
            futures = await writer.submit(items, timeout_s=0, count=count)
        assert await writer.flush(timeout_s=5)
        with leased_items(arena, [40], first=3) as items:
            futures += await writer.submit(items, timeout_s=0, count=count)
        assert await writer.flush(timeout_s=5), "the writer has stopped"

    assert results_of(futures) == [None] * 4
    assert list(map(str, errors)) == ["miscounted"]
    assert list(counts) == []


async def test_a_flush_with_a_blocked_tier_returns_false_at_its_deadline(arena):
    gated = GatedTier(DictTier())
    async with opened(gated) as writer:
        assert await writer.flush(timeout_s=0)
        await submit(writer, arena, [10, 10])
        await gated.parked.wait()

        assert not await writer.flush(timeout_s=0.01)
        gated.open_gate()
        assert await writer.flush(timeout_s=5)


async def test_closing_writes_the_queue(arena):
    tier = DictTier()
    writer = open_writer(tier, call_bytes=10)
    with leased_items(arena, [10] * 6) as items:
        futures = await writer.submit(items, timeout_s=0)

    await writer.aclose(timeout_s=5)

    assert results_of(futures) == [None] * 6
    assert len(tier.records) == 6


async def test_closing_with_a_suspended_tier_drops_the_rest_within_the_deadline(arena):
    gated = GatedTier(DictTier())
    writer = open_writer(gated, call_bytes=10)
    with leased_items(arena, [10] * 6) as items:
        futures = await writer.submit(items, timeout_s=0)
    await gated.parked.wait()

    await writer.aclose(timeout_s=0.01)

    assert {type(result) for result in results_of(futures)} == {TierClosedError}
    assert gated.inner.records == {}
    assert arena.statistics().leased_slabs == 0
    assert writer.statistics().queued_chunks == writer.statistics().queued_bytes == 0


async def test_closing_does_not_wait_for_a_tier_that_cannot_be_stopped(arena):
    ended, inside = asyncio.Event(), asyncio.Event()

    class Stuck(DictTier):
        async def put_many(self, items):
            inside.set()
            while not ended.is_set():
                try:
                    await ended.wait()
                except asyncio.CancelledError:
                    continue  # like a thread in the middle of a write
            return await super().put_many(items)

    tier = Stuck()
    handle = handle_of(tier)
    writer = open_writer(handle, workers=1)
    futures = await submit(writer, arena, [10, 10])
    await inside.wait()

    await writer.aclose(timeout_s=0)

    assert {type(result) for result in results_of(futures)} == {TierClosedError}
    assert arena.statistics().leased_slabs == 2  # still being read
    ended.set()
    while handle.late_calls:
        await asyncio.sleep(0)
    assert arena.statistics().leased_slabs == 0


async def test_a_closed_writer_refuses(arena):
    writer = open_writer(DictTier())
    await writer.aclose(timeout_s=1)
    with leased_items(arena, [10]) as items:
        futures = await writer.submit(items, timeout_s=5)

    assert [type(result) for result in results_of(futures)] == [TierClosedError]
    await writer.aclose(timeout_s=1)  # a second time


async def test_a_wait_for_room_fails_when_the_writer_is_closed(arena):
    gated = GatedTier(DictTier())
    writer = open_writer(gated, max_bytes=100, call_bytes=10, workers=1)
    with leased_items(arena, [10, 60, 60]) as items:  # the third fits only when the second is dropped
        submit = asyncio.ensure_future(writer.submit(items, timeout_s=60))
        await gated.parked.wait()
        await turns(3)
        assert not submit.done()

        await writer.aclose(timeout_s=0)
        futures = await submit
    await turns(3)

    assert [type(result) for result in results_of(futures)] == [TierClosedError] * 3
    assert writer.statistics().queued_chunks == writer.statistics().queued_bytes == 0
    assert arena.statistics().leased_slabs == 0


async def test_abandoning_the_wait_for_a_result_does_not_stop_the_write(arena):
    gated = GatedTier(DictTier())
    async with opened(gated) as writer:
        (future,) = await submit(writer, arena, [10])
        await gated.parked.wait()
        future.cancel()
        gated.open_gate()

        assert await writer.flush(timeout_s=5)
        await turns(5)
        assert key_of(0) in gated.inner.records


async def test_a_submit_cancelled_at_any_step_keeps_the_chunks_already_queued(arena):
    tier = CallsTier()
    async with opened(tier, max_bytes=25, call_bytes=10, workers=1) as writer:

        async def submit(_):
            with leased_items(arena, [10] * 8) as items:
                return await writer.submit(items, timeout_s=5)

        last = None
        async for task in cancelled_at_each_await(submit):
            last = task
            assert await writer.flush(timeout_s=5)
            assert arena.statistics().leased_slabs == 0
            assert writer.statistics().queued_chunks == writer.statistics().queued_bytes == 0
            assert tier.keys_in_order == [key_of(number) for number in range(len(tier.calls))]
            tier.calls.clear()
        assert results_of(last.result()) == [None] * 8


@pytest.mark.parametrize("parked", [False, True], ids=["working", "parked"])
@pytest.mark.parametrize("steps", range(8))
async def test_a_closing_cancelled_at_any_step_still_gives_every_lease_back(arena, parked, steps):
    gated = GatedTier(DictTier())
    if not parked:
        gated.open_gate()
    writer = open_writer(gated, call_bytes=10)
    with leased_items(arena, [10] * 4) as items:
        futures = await writer.submit(items, timeout_s=0)
    close = asyncio.ensure_future(writer.aclose(timeout_s=5))
    await turns(1 + steps)  # its first step has run: a call that never started cannot close
    close.cancel()
    await asyncio.wait({close})

    assert arena.statistics().leased_slabs == 0
    assert writer.statistics().queued_chunks == writer.statistics().queued_bytes == 0
    assert len(results_of(futures)) == 4
    assert all(worker.done() for worker in writer._workers)


# Reserved space.


async def test_reserved_space_is_available_when_others_have_taken_the_rest(arena):
    tier = GatedTier(DictTier())
    async with opened(tier, max_bytes=4 * SLAB, chunk_bytes=SLAB) as writer:
        reservation = await writer.reserve([key_of(0), key_of(1)], timeout_s=0)
        with leased_items(arena, [SLAB] * 3, first=10) as others:
            refused = await writer.submit(others, timeout_s=0)
        taken = await submit(writer, arena, [SLAB, 100])
        assert isinstance(refused[-1].result(), TierFullError)
        assert writer.statistics().queued_bytes == 3 * SLAB + 100
        reservation.release()
        assert writer.statistics().queued_bytes == 3 * SLAB + 100

        tier.open_gate()
        assert await writer.flush(timeout_s=5)
        assert results_of([*taken, *refused[:2]]) == [None] * 4
        assert writer.statistics().queued_bytes == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("reserve"), st.sets(st.integers(0, 2), min_size=1)),
            st.tuples(st.just("release"), st.integers(0, 3)),
            st.tuples(st.just("submit"), st.integers(0, 2)),
        ),
        max_size=12,
    )
)
@example([("reserve", {0}), ("reserve", {0}), ("submit", 0), ("release", 1), ("submit", 0)])
async def test_a_reservation_keeps_room_for_its_chunks_until_they_are_submitted_or_it_ends(steps):
    """Compared with a model: space by key, at most that of the key's reservations that have not ended."""
    arena, tier = small_arena(16), GatedTier(DictTier())
    room, ends, open_ones, used = Counter(), Counter(), [], 0
    async with opened(tier, max_bytes=6 * 100, chunk_bytes=100) as writer:
        for verb, what in steps:
            if verb == "reserve":
                fits = used + len(what) <= 6
                with contextlib.nullcontext() if fits else pytest.raises(BudgetExceededError):
                    open_ones.append((await writer.reserve(list(map(key_of, what)), timeout_s=0), what))
                    room.update(what)
                    ends.update(what)
                    used += len(what)
            elif verb == "release" and open_ones:
                reservation, keys = open_ones.pop(what % len(open_ones))
                ends.subtract(keys)
                unused = [key for key in keys if room[key] > ends[key]]
                room.subtract(unused)
                used -= len(unused)
                reservation.release()
                reservation.release()
            elif verb == "submit":
                fits = room[what] > 0 or used < 6
                used += fits and not room[what]
                room[what] -= room[what] > 0
                [future] = await submit(writer, arena, [100], first=what)
                assert future.done() is not fits
            assert writer.statistics().queued_bytes == 100 * used
        for reservation, _ in open_ones:
            reservation.release()
        tier.open_gate()
        assert await writer.flush(timeout_s=5)
        assert writer.statistics().queued_bytes == arena.statistics().leased_slabs == 0
    arena.close()


async def test_no_room_within_the_deadline_reserves_nothing(arena):
    tier = GatedTier(DictTier())
    async with opened(tier, max_bytes=2 * SLAB, chunk_bytes=SLAB) as writer:
        await submit(writer, arena, [SLAB], first=5)
        for keys in ([key_of(0), key_of(1)], [key_of(number) for number in range(3)]):
            with pytest.raises(BudgetExceededError):
                await writer.reserve(keys, timeout_s=0)
        waiting = asyncio.ensure_future(writer.reserve([key_of(0), key_of(1)], timeout_s=5))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert writer.statistics().queued_bytes == SLAB

        tier.open_gate()
        assert await writer.flush(timeout_s=5)
        (await writer.reserve([key_of(0), key_of(1)], timeout_s=0)).release()
        assert writer.statistics().queued_bytes == 0


async def test_a_queue_has_room_for_one_chunk_however_small_its_bound_is(arena):
    async with opened(DictTier(), max_bytes=10, chunk_bytes=SLAB) as writer:
        [future] = await submit(writer, arena, [SLAB])

        assert await future is None


class TimedTier(DictTier):
    """A tier with a fixed write rate in bytes per second, over all calls."""

    def __init__(self, bytes_per_s):
        super().__init__()
        self.bytes_per_s = bytes_per_s
        self.busy = asyncio.Lock()

    async def put_many(self, items):
        async with self.busy:
            await asyncio.sleep(sum(buffer.nbytes for _, buffer in items) / self.bytes_per_s)
            return await super().put_many(items)


async def written(writer, arena, count, first=0):
    """Submit chunks of 100 bytes, and return the number of queued ones."""
    with leased_items(arena, [100] * count, first) as items:
        futures = await writer.submit(items, timeout_s=0)
    queued = [not future.done() for future in futures]
    assert all(isinstance(result, TierFullError) for result in results_of(futures[sum(queued) :]))
    return sum(queued)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("bytes_per_s", "taken"), [(10, 2), (50, 10), (1000, 20), (0.1, 1)])
@in_virtual_time
async def test_the_queue_is_limited_to_what_the_tier_writes_within_max_s(arena, workers, bytes_per_s, taken):
    writer = open_writer(TimedTier(bytes_per_s), max_bytes=2000, max_s=20, call_bytes=100, workers=workers)
    assert await written(writer, arena, 4) == 4  # the rate is unknown yet
    assert await writer.flush(timeout_s=10_000)

    assert await written(writer, arena, 25, first=4) == taken
    assert writer.statistics().refused == 25 - taken
    start = now()
    assert await writer.flush(timeout_s=10_000)
    assert now() - start == pytest.approx(taken * 100 / bytes_per_s)
    await writer.aclose(timeout_s=1)


@in_virtual_time
async def test_a_tier_that_becomes_fast_again_gets_its_queue_back(arena):
    tier = TimedTier(1)
    async with opened(tier, max_bytes=2000, max_s=20, call_bytes=100, workers=1) as writer:
        assert await written(writer, arena, 1) == 1
        assert await writer.flush(timeout_s=10_000)
        # One chunk may always wait, otherwise the rate would never be known.
        assert await written(writer, arena, 20) == 1
        assert await writer.flush(timeout_s=10_000)

        tier.bytes_per_s = 10_000
        for _ in range(30):
            await written(writer, arena, 1)
            assert await writer.flush(timeout_s=10_000)

        assert await written(writer, arena, 20) == 20


@in_virtual_time
async def test_calls_that_refuse_every_chunk_do_not_change_the_bound(arena):
    tier = TimedTier(50)
    async with opened(tier, max_bytes=2000, max_s=20, call_bytes=100, workers=1) as writer:
        await written(writer, arena, 4)
        assert await writer.flush(timeout_s=10_000)
        before = writer.statistics().max_bytes

        async def refuse(items):
            await asyncio.sleep(100)
            raise TierError("away")

        tier.put_many = refuse
        await written(writer, arena, 4)
        assert await writer.flush(timeout_s=10_000)

        assert writer.statistics().max_bytes == before == 1000
