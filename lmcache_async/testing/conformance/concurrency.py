"""Tests of concurrent calls, of cancellation at every await of every method, and of opening and closing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.conformance.base import (
    Cases,
    TierRig,
    in_time,
    open_resources,
    opened_rig,
    release_all,
    start_threads_of_loop,
    wait_for_no_others,
)
from lmcache_async.testing.conformance.content import LENGTHS
from lmcache_async.testing.records import key_of
from lmcache_async.testing.steps import cancelled_at_await, turns
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.types import ChunkKey

CHUNKS = 4
"""Chunks of a batch."""

MAX_AWAITS = 200
"""Number of the last await at which a call is cancelled."""

Items = Sequence[tuple[ChunkKey, Buffer]]
Verb = Callable[[Tier, Items, Allocate], Coroutine[Any, Any, Any]]

WRITES: dict[str, Verb] = {
    "put": lambda tier, items, _: tier.put(*items[0]),
    "put_many": lambda tier, items, _: tier.put_many(items),
}
VERBS = WRITES | {
    "get": lambda tier, items, allocate: tier.get(items[0][0], allocate),
    "get_many": lambda tier, items, allocate: tier.get_many([key for key, _ in items], allocate),
    "remove": lambda tier, items, _: tier.remove(items[0][0]),
    "reject": lambda tier, items, _: tier.reject(items[0][0], "checksum"),
    "contains": lambda tier, items, _: tier.contains(items[0][0]),
    "contains_many": lambda tier, items, _: tier.contains_many([key for key, _ in items]),
    "count_prefix": lambda tier, items, _: tier.count_prefix([key for key, _ in items]),
    "clear": lambda tier, *_: tier.clear(),
    "scrub": lambda tier, *_: tier.scrub(),
}


class OverlapCases(Cases):
    """Concurrent calls see no partial effect of each other."""

    async def test_puts_of_the_same_chunks_at_the_same_time_store_each_once(self, rig: TierRig) -> None:
        async def put() -> None:
            await rig.put(1)
            assert await rig.contains(1), "a put has ended, but the chunk is not stored"

        batches = map(rig.put_many, [range(5), range(4, -1, -1), range(5)])
        answers = await in_time(asyncio.gather(*batches, *(put() for _ in range(8))))

        assert answers == [[None] * 5] * 3 + [None] * 8
        await rig.check_stored(*range(5))
        assert rig.statistics.chunks in {0, 5}, "a chunk that was put concurrently is counted more than once"
        if rig.tier.capabilities.lists:
            assert await rig.keys() == {key_of(number) for number in range(5)}

    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    async def test_a_put_stores_a_chunk_although_another_put_of_it_is_cancelled(
        self, rig: TierRig, steps: int
    ) -> None:
        first = asyncio.ensure_future(rig.put(1))
        await turns(steps)
        second = asyncio.ensure_future(rig.put(1))
        await turns(1)
        first.cancel()
        await in_time(asyncio.wait({first, second}))

        assert not second.cancelled(), "the cancellation of a put has cancelled another one"
        second.result()
        assert await rig.holds(1), "a put has ended, but the chunk is not stored"

    @pytest.mark.parametrize("verb", ["put", "remove"])
    async def test_a_get_during_a_put_or_removal_finds_all_or_nothing(self, rig: TierRig, verb: str) -> None:
        numbers = range(10)
        if verb == "remove":
            await rig.put(*numbers)
        change: Callable[[int], Coroutine[Any, Any, object]] = rig.put if verb == "put" else rig.remove
        for number in numbers:
            await in_time(
                asyncio.gather(rig.holds(number), change(number), rig.holds(number), rig.contains(number))
            )
            assert await rig.holds(number) is (verb == "put" or not rig.tier.capabilities.removes)

    async def test_keys_are_listed_while_chunks_are_stored_and_removed(self, rig: TierRig) -> None:
        if not rig.tier.capabilities.lists:
            return

        async def change() -> None:
            await rig.put(*range(6, 9))
            await rig.remove(5)

        await rig.put(*range(6))
        changing = asyncio.ensure_future(change())
        listed = set()
        async for key in rig.tier.keys():
            listed.add(key)
            await in_time(changing)  # begins with the listing and ends before the second key is listed

        assert listed >= {key_of(number) for number in range(5)}, "keys left out a chunk that was not changed"

    async def test_many_random_calls_end_with_correct_results(self, rig: TierRig) -> None:
        for seed in range(3):
            await in_time(_random_calls(random.Random(seed), rig))

            for number in range(6):
                found = await rig.contains(number)
                assert found is await rig.holds(number), "contains and get disagree after concurrent calls"


async def _random_calls(seeded: random.Random, rig: TierRig) -> None:
    """Run eight tasks of ten random calls each on six keys. `holds` fails if a record is wrong."""
    calls: tuple[Any, ...] = (rig.holds, rig.holds, rig.put, rig.put, rig.contains, rig.remove)

    async def call() -> None:
        for _ in range(10):
            number = seeded.randrange(6)
            await seeded.choice(calls)(number)

    await asyncio.gather(*(call() for _ in range(8)))


class CancellationCases(Cases):
    """A cancelled call ends, holds no lease, reads no buffer afterwards, and stores whole chunks or none."""

    @pytest.mark.parametrize("verb", VERBS)
    async def test_a_call_can_be_cancelled_at_any_await(self, rig: TierRig, verb: str) -> None:
        async def start(numbers: range, allocate: Allocate) -> Any:
            with rig.items(numbers) as items:
                return await VERBS[verb](rig.tier, items, allocate)

        numbers = range(CHUNKS)
        # A tier may suppress a cancellation, or lose a result, only with or only without these awaits.
        for allocate in (rig.allocate, _with_more_awaits(rig.allocate)):
            for awaits in range(MAX_AWAITS):
                if verb in WRITES:  # of new chunks, so that none is stored yet
                    numbers = range(numbers.stop, numbers.stop + CHUNKS)
                else:
                    await rig.put(*numbers)
                task = await cancelled_at_await(start(numbers, allocate), awaits)
                if not task.cancelled():
                    release_all(task.result())
                rig.overwrite_free_memory()  # a read after the cancellation would return wrong bytes
                await rig.check_leases()
                found = await rig.stored(numbers)
                held = [number for number in numbers if await rig.holds(number)]
                if verb in WRITES:
                    # Over a network, a removal may take effect between the two.
                    assert set(found) <= set(held), (
                        f"cancelled at await {awaits}: contains finds a chunk, but get reports a miss"
                    )
                if not task.cancelled():  # the call has no more awaits
                    break
        await rig.put(*range(CHUNKS))
        assert await rig.holds(*range(CHUNKS)), "the tier does not work after cancelled calls"

    @pytest.mark.parametrize("verb", ["get", "get_many"])
    async def test_a_read_cancelled_while_it_waits_for_memory_holds_none(
        self, rig: TierRig, verb: str
    ) -> None:
        if rig.leases_content:
            return  # it allocates no memory
        await rig.put(*range(CHUNKS))
        waiting = asyncio.Event()
        left = iter(range(CHUNKS - 1 if verb == "get_many" else 0))

        async def scarce(nbytes: int) -> Buffer:
            if next(left, None) is not None:
                return await rig.allocate(nbytes)
            waiting.set()
            await asyncio.get_running_loop().create_future()
            raise AssertionError("the wait ended without a cancellation")

        with rig.items(range(CHUNKS)) as items:
            task = asyncio.ensure_future(VERBS[verb](rig.tier, items, scarce))
            await in_time(waiting.wait())
            task.cancel()
            await in_time(asyncio.wait({task}))

        assert task.cancelled()
        await rig.check_leases()
        await rig.check_stored(0)


def _with_more_awaits(allocate: Allocate) -> Allocate:
    """Wrap `allocate` with an await before and after it, as when other callers wait for memory too."""

    async def slow(nbytes: int) -> Buffer:
        await asyncio.sleep(0)
        buffer = await allocate(nbytes)
        try:
            await asyncio.sleep(0)
        except BaseException:
            buffer.release()
            raise
        return buffer

    return slow


class LifecycleCases(Cases):
    """A tier works while it is open. Content that it keeps after closing is complete."""

    async def test_a_persistent_tier_has_its_chunks_after_it_was_reopened(
        self, tier: Tier, arena: Arena
    ) -> None:
        async with opened_rig(tier, arena) as rig:
            rig.length = LENGTHS.__getitem__
            await rig.put(*range(len(LENGTHS)))
            removed = await rig.remove(0)
            before = rig.statistics
        if not tier.capabilities.persistent:
            assert arena.statistics().leased_slabs == 0
            return
        for _ in range(2):
            async with opened_rig(self.reopen(tier), arena) as again:
                again.length = LENGTHS.__getitem__
                found = again.statistics
                counts = (found.chunks, found.bytes)
                assert counts == (before.chunks, before.bytes), "the statistics differ after reopening"
                assert await again.contains(0) is not removed, "contains contradicts remove after reopening"
                for number, length in list(enumerate(LENGTHS))[1:]:
                    assert await again.contains(number), f"contains does not find a record of {length} bytes"
                    assert await again.holds(number), f"a record of {length} bytes is lost"
                assert await again.tier.count_prefix([key_of(number) for number in (1, 2, 99)]) == 2

    async def test_records_are_complete_after_cancelled_puts(self, tier: Tier, arena: Arena) -> None:
        async with opened_rig(tier, arena) as rig:
            for number in range(12):
                task = asyncio.ensure_future(rig.put(number))
                await turns(number)
                task.cancel()
                await in_time(asyncio.wait({task}))
        if not tier.capabilities.persistent:
            return
        async with opened_rig(self.reopen(tier), arena) as again:
            for number in range(12):
                found = await again.contains(number)
                assert found is await again.holds(number), "a cancelled put left an incomplete record"
            await again.put(*range(12))
            await again.check_stored(*range(12))

    @pytest.mark.parametrize("steps", [0, 1, 2, 5])
    async def test_closing_with_calls_in_flight_ends_them_and_releases_every_lease(
        self, tier: Tier, arena: Arena, steps: int
    ) -> None:
        tier.bind(arena)
        await tier.__aenter__()
        rig = TierRig(tier, arena)
        await rig.put(*range(4))
        with rig.items(range(4, 10)) as items:
            calls: list[Coroutine[Any, Any, Any]] = [
                tier.put_many(items[:3]),
                tier.put(*items[3]),
                tier.get_many([key_of(number) for number in range(4)], rig.allocate),
                tier.get(key_of(0), rig.allocate),
                tier.remove(key_of(3)),
                tier.contains(key_of(1)),
            ]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await turns(steps)
            await in_time(tier.__aexit__(None, None, None))
            await in_time(asyncio.wait(tasks))
            for task in tasks:
                error = None if task.cancelled() else task.exception()
                assert error is None or isinstance(error, TierError | BudgetExceededError), (
                    f"a call during the closing raised {error!r}, not a TierError"
                )
                if not task.cancelled() and error is None:
                    release_all(task.result())
        assert arena.statistics().leased_slabs == 0, "leases are left after the tier was closed"
        if tier.capabilities.persistent:
            async with opened_rig(self.reopen(tier), arena) as again:
                for number in range(10):
                    assert await again.contains(number) is await again.holds(number)
                assert await again.holds(*range(3)), "records were lost when the tier was closed"

    async def test_closing_ends_tasks_and_threads_and_closes_files(self, tier: Tier, arena: Arena) -> None:
        """Except for tasks, two uses of a persistent tier are compared: the first one may start what the process keeps."""
        start_threads_of_loop()
        before: set[object] = {*asyncio.all_tasks()}
        async with opened_rig(tier, arena) as rig:
            await rig.put(1)
            await rig.check_stored(1)
        await wait_for_no_others(before, asyncio.all_tasks)
        if tier.capabilities.persistent:
            before = open_resources()
            async with opened_rig(self.reopen(tier), arena) as again:
                await again.check_stored(1)
                await again.put(2)
            await wait_for_no_others(before, open_resources)

    async def test_a_failing_backend_causes_tier_errors(self, rig: TierRig) -> None:
        await rig.put(1)
        if not await self.stop_backend(rig.tier):
            return
        with contextlib.suppress(TierError):
            assert await in_time(rig.contains(1)), "contains reports a miss, not the failure of the backend"
        with pytest.raises(TierError):
            await in_time(rig.holds(1))
        with pytest.raises(TierError):
            await in_time(rig.put(2))

    async def test_a_closed_tier_raises_tier_errors_or_returns_correct_results(
        self, tier: Tier, arena: Arena
    ) -> None:
        async with opened_rig(tier, arena) as rig:
            await rig.put(1)
        stored = False
        with contextlib.suppress(TierError):
            await in_time(rig.put(2))
            stored = tier.capabilities.persistent
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: rig.contains(1),
            lambda: rig.holds(1),
            lambda: rig.remove(5),
        ]
        for call in calls:
            with contextlib.suppress(TierError):
                assert await in_time(call()) in {True, False}
        assert arena.statistics().leased_slabs == 0, "calls of a closed tier left leases"
        if stored:
            async with opened_rig(self.reopen(tier), arena) as again:
                assert await again.holds(2), (
                    "put of a closed tier raised no error, but the chunk is not stored"
                )

    async def test_an_error_within_the_block_closes_the_tier_and_is_raised(
        self, tier: Tier, arena: Arena
    ) -> None:
        async def fail() -> None:
            async with opened_rig(tier, arena) as rig:
                await rig.put(1)
                raise LookupError("of this test")

        with pytest.raises(LookupError, match="of this test"):
            await fail()
        assert arena.statistics().leased_slabs == 0
        if tier.capabilities.persistent:
            async with opened_rig(self.reopen(tier), arena) as again:
                await again.check_stored(1)
