"""The runner: order, limits in bytes, drained cancellation, leases released."""

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import BudgetExceededError, TierUnavailableError
from lmcache_async.memory.budget import ByteBudget
from lmcache_async.pipeline.batch import Batch, HashedBatch, PlannedBatch, Request
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.runner import Runner
from lmcache_async.testing.steps import turns
from lmcache_async.types import Chunk, ChunkKey
from tests.simulation.loop import Trace, new_loop

NO_TOKENS = np.zeros(1, np.int32)


def request_of(count):
    chunks = tuple(Chunk(ChunkKey(i.to_bytes(16)), i, NO_TOKENS) for i in range(count))
    return Request(chunks=chunks, rows=tuple(np.zeros(1, np.int64) for _ in chunks))


class Cut:
    per_request = True

    async def __call__(self, request: Request) -> HashedBatch:
        return HashedBatch(request=request, chunks=request.chunks, rows=request.rows)


@dataclass
class Watch:
    """A stage that blocks until resumed, and records the tasks inside."""

    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    inside: int = 0
    peak: int = 0
    started: list[int] = field(default_factory=list)
    fail_at: int | None = None
    reads_device: bool = True

    async def __call__(self, batch: Batch) -> Batch:
        start = batch.chunks[0].start if batch.chunks else -1
        self.started.append(start)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        try:
            if start in self.gates:
                await self.gates[start].wait()
            else:
                await asyncio.sleep(0)
            if start == self.fail_at:
                raise TierUnavailableError("away")
            return batch
        finally:
            self.inside -= 1


class Held:
    """A lease that counts its releases."""

    def __init__(self):
        self.released = 0

    def release(self):
        self.released += 1


class Starts:
    def __init__(self):
        self.seen = []

    async def __call__(self, batch: Batch) -> list:
        self.seen.append(batch.chunks[0].start if batch.chunks else -1)
        return [chunk.start for chunk in batch.chunks]


class Reservations:
    """A stage that returns what is reserved for the batch."""

    async def __call__(self, batch: Batch) -> list:
        return [(len(batch.chunks), batch.scope.reserved_bytes)]


class OrderedStarts(Starts):
    ordered = True


class Holds:
    per_request = True

    def __init__(self, held):
        self.held = held

    async def __call__(self, batch: HashedBatch) -> HashedBatch:
        batch.scope.add([self.held])
        return batch


class Fails:
    per_request = True

    async def __call__(self, batch: HashedBatch) -> HashedBatch:
        raise TierUnavailableError("away")


def runner_of(*stages, batch_chunks=2, max_bytes=1 << 20, ends=lambda batch, result: False, admit=None):
    chain = Chain.named([("cut", Cut()), *((type(stage).__name__, stage) for stage in stages)])
    budget = ByteBudget(max_bytes)
    runner = Runner(
        chain=chain,
        batch_chunks=batch_chunks,
        chunk_bytes=10,
        budget=budget,
        failed=lambda batch, cause: [cause],
        ends=ends,
        admit=admit,
    )
    return runner, budget


@given(count=st.integers(0, 40), size=st.integers(1, 9))
def test_results_come_in_prefix_order_and_miss_nothing(count, size):
    async def check():
        runner, budget = runner_of(Starts(), batch_chunks=size, max_bytes=50)

        results = await runner.run(request_of(count), timeout_s=60)

        assert [start for result in results for start in result] == list(range(count))
        assert budget.statistics().used_bytes == 0

    asyncio.run(check())


async def test_bytes_in_flight_are_bounded():
    watch = Watch()
    runner, _ = runner_of(watch, Starts(), batch_chunks=1, max_bytes=30)

    await runner.run(request_of(20), timeout_s=60)

    assert watch.peak == 3


async def test_a_batch_larger_than_the_bound_runs_alone():
    runner, _ = runner_of(Starts(), batch_chunks=8, max_bytes=30)

    assert await runner.run(request_of(16), timeout_s=60) == [list(range(8)), list(range(8, 16))]


async def test_an_ordered_stage_sees_batches_one_after_another():
    gate = asyncio.Event()
    watch, last = Watch(gates={0: gate}), OrderedStarts()
    runner, _ = runner_of(watch, last)
    run = asyncio.ensure_future(runner.run(request_of(6), timeout_s=60))
    while len(watch.started) < 3:
        await asyncio.sleep(0)

    assert last.seen == []
    gate.set()
    await run
    assert last.seen == [0, 2, 4]


async def test_a_result_that_ends_the_run_keeps_later_batches_from_the_ordered_stage():
    watch, last = Watch(fail_at=2), OrderedStarts()
    runner, budget = runner_of(watch, last, ends=lambda batch, result: "tier_unavailable" in result)

    results = await runner.run(request_of(20), timeout_s=60)

    assert results == [[0, 1], ["tier_unavailable"]]
    assert last.seen == [0]
    assert budget.statistics().used_bytes == 0


async def test_a_failed_batch_of_a_store_leaves_the_others_alone():
    runner, _ = runner_of(Watch(fail_at=2), Starts())

    assert await runner.run(request_of(6), timeout_s=60) == [[0, 1], ["tier_unavailable"], [4, 5]]


def test_at_the_deadline_finished_batches_stay_and_the_others_are_abandoned():
    watch = Watch(gates={2: asyncio.Event()})
    runner, budget = runner_of(watch, Starts())
    loop = new_loop(Random(1), Trace())  # its time passes only when nothing else is left to do
    start = loop.time()

    results = loop.run_until_complete(runner.run(request_of(6), timeout_s=60))
    seconds = loop.time() - start
    loop.close()

    assert seconds == pytest.approx(60, abs=1)
    assert results == [[0, 1], ["deadline"], [4, 5]]
    assert watch.inside == 0
    assert budget.statistics().used_bytes == 0


@pytest.mark.parametrize("steps", range(12))
async def test_cancelled_at_any_step_nothing_is_left_behind(steps):
    watch, copied = Watch(), []
    runner, budget = runner_of(watch, OrderedStarts(), max_bytes=40)
    run = asyncio.ensure_future(
        runner.run(request_of(12), timeout_s=60, on_copied=lambda: copied.append(True))
    )
    for _ in range(steps):
        await asyncio.sleep(0)

    run.cancel()
    await asyncio.wait({run})
    assert watch.inside == 0
    assert budget.statistics().used_bytes == 0
    assert copied == ([True] if steps else [])  # a task cancelled before its start was not called


async def test_on_copied_comes_once_when_the_last_batch_has_passed_the_copy():
    gate = asyncio.Event()
    calls = []

    class Slow:
        async def __call__(self, batch: Batch) -> list:
            await gate.wait()
            return [chunk.start for chunk in batch.chunks]

    runner, _ = runner_of(Watch(), Slow())
    run = asyncio.ensure_future(
        runner.run(request_of(6), timeout_s=60, on_copied=lambda: calls.append(not gate.is_set()))
    )
    while not calls:
        await asyncio.sleep(0)
    gate.set()
    await run

    assert calls == [True]


async def test_on_copied_comes_also_when_there_is_nothing_to_copy():
    calls = []
    runner, _ = runner_of(Starts())

    await runner.run(request_of(0), timeout_s=60, on_copied=lambda: calls.append(True))

    assert calls == [True]


async def test_a_timeout_of_a_stage_is_not_reported_as_the_deadline_of_the_run():
    class Slow:
        per_request = True

        async def __call__(self, batch: HashedBatch) -> HashedBatch:
            raise TimeoutError("of a plug-in")

    runner, _ = runner_of(Slow())

    with pytest.raises(TimeoutError, match="of a plug-in"):
        await runner.run(request_of(4), timeout_s=60)


async def test_a_bug_in_a_stage_propagates():
    class Bug:
        async def __call__(self, batch: Batch) -> list:
            raise TypeError("a bug")

    runner, budget = runner_of(Bug())

    with pytest.raises(ExceptionGroup) as caught:
        await runner.run(request_of(4), timeout_s=60)
    assert caught.group_contains(TypeError)
    assert budget.statistics().used_bytes == 0


def planned(count, resident):
    request = request_of(count)
    tiers = (0,) * count
    return PlannedBatch(
        request=request, chunks=request.chunks, rows=request.rows, tiers=tiers, resident=resident
    )


@given(count=st.integers(0, 60), resident=st.integers(0, 60), size=st.integers(1, 9), most=st.integers(1, 30))
def test_cuts_make_batches_that_cover_the_request_once_and_only_resident_ones_are_large(
    count, resident, size, most
):
    resident, most = min(resident, count), max(size, most)

    cuts = planned(count, resident).cuts(size, most)

    lengths = [stop - start for start, stop in pairwise([0, *cuts])]
    assert cuts[-1] == count
    assert all(length > 0 for length in lengths) or count == 0
    assert all(length <= size for stop, length in zip(cuts, lengths, strict=True) if stop > resident)
    if resident > size:
        assert lengths[0] == (most if resident > 2 * most else resident)
        assert cuts.index(resident) <= 1


@pytest.mark.parametrize(
    ("count", "resident", "size", "lengths"),
    [
        (16, 0, 3, [3, 3, 3, 3, 2, 1, 1]),
        (40, 0, 16, [16, 12, 6, 3, 2, 1]),
        (40, 2, 16, [16, 12, 6, 3, 2, 1]),
        (50, 30, 16, [30, 10, 5, 3, 2]),
        (50, 50, 16, [50]),
        (128, 128, 16, [128]),
        (150, 150, 16, [64, 86]),
        (1200, 1200, 16, [64, 512, 512, 112]),
        (150, 70, 16, [70, 16, 16, 16, 16, 8, 4, 2, 2]),
        (3, 0, 16, [2, 1]),
        (3, 3, 16, [3]),
    ],
)
def test_chunks_in_memory_form_large_batches_and_the_last_batches_of_a_read_get_smaller(
    count, resident, size, lengths
):
    cuts = planned(count, resident).cuts(size, 64)

    assert [stop - start for start, stop in pairwise([0, *cuts])] == lengths


class PlansInMemory:
    per_request = True

    async def __call__(self, batch: HashedBatch) -> PlannedBatch:
        return planned(len(batch.chunks), len(batch.chunks))


class WatchPlanned(Watch):
    async def __call__(self, batch: PlannedBatch) -> PlannedBatch:
        assert batch.in_memory
        return await super().__call__(batch)


async def test_all_chunks_in_memory_are_prepared_while_the_first_batch_is_copied():
    watch = WatchPlanned()
    runner, _ = runner_of(PlansInMemory(), watch, OrderedStarts(), max_bytes=40)

    results = await runner.run(request_of(300), timeout_s=60)

    assert [len(result) for result in results] == [4, 296]
    assert watch.peak == 2


async def test_a_stage_knows_what_is_reserved_for_its_batch():
    runner, _ = runner_of(PlansInMemory(), Reservations(), max_bytes=40)

    assert await runner.run(request_of(300), timeout_s=60) == [[(4, 20)], [(296, 20)]]


async def test_each_batch_is_admitted_before_it_begins_and_its_reservation_is_released():
    asked, held = [], []
    watch = Watch()

    async def admit(batch, num_chunks, timeout_s):
        asked.append((batch.chunks[0].start, num_chunks, 0 < timeout_s <= 60, list(watch.started)))
        held.append(Held())
        batch.scope.add([held[-1]])

    runner, _ = runner_of(watch, Starts(), batch_chunks=2, max_bytes=20, admit=admit)

    await runner.run(request_of(5), timeout_s=60)

    assert [one[:3] for one in asked] == [(0, 5, True), (2, 5, True), (4, 5, True)]
    assert all(start not in started for start, _, _, started in asked)
    assert [one.released for one in held] == [1, 1, 1]


async def test_a_batch_that_is_not_admitted_ends_the_run_there():
    held = Held()

    async def admit(batch, num_chunks, timeout_s):
        if batch.chunks[0].start:
            batch.scope.add([held])
            raise BudgetExceededError("no room")

    runner, budget = runner_of(Starts(), batch_chunks=2, admit=admit)

    results = await runner.run(request_of(6), timeout_s=60)

    assert results == [[0, 1], ["deadline"], ["deadline"]]
    assert held.released == 1
    assert budget.statistics().used_bytes == 0


async def test_cancelled_while_a_batch_waits_to_be_admitted_nothing_is_left():
    held, waiting = Held(), asyncio.Event()

    async def admit(batch, num_chunks, timeout_s):
        batch.scope.add([held])
        waiting.set()
        await asyncio.Event().wait()

    runner, budget = runner_of(Starts(), admit=admit)
    task = asyncio.ensure_future(runner.run(request_of(2), timeout_s=60))
    await waiting.wait()
    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()
    assert held.released == 1
    assert budget.statistics().used_bytes == 0


@pytest.mark.parametrize("count", [0, 2, 6])
async def test_a_lease_of_a_stage_for_whole_requests_is_released_with_the_last_batch_or_by_a_failure(count):
    held, last = Held(), Starts()
    runner, _ = runner_of(Holds(held), Watch(), last)

    await runner.run(request_of(count), timeout_s=60)

    assert len(last.seen) == max(count // 2, 1)
    assert held.released == 1

    failing, _ = runner_of(Holds(held), Fails(), Starts())
    with pytest.raises(TierUnavailableError):
        await failing.run(request_of(count), timeout_s=60)
    assert held.released == 2


async def test_a_run_whose_result_is_known_does_not_wait_for_the_memory_of_its_next_batch():
    watch, other = Watch(fail_at=0, gates={0: asyncio.Event()}), []
    queued = asyncio.Event()

    async def admit(batch, num_chunks, timeout_s):
        if batch.chunks[0].start == 2:  # another request is before this batch in the queue
            other.append(asyncio.ensure_future(budget.reserve(20, timeout_s=60)))
            await asyncio.sleep(0)
            queued.set()

    runner, budget = runner_of(
        watch, Starts(), max_bytes=30, ends=lambda batch, result: "tier_unavailable" in result, admit=admit
    )
    running = asyncio.ensure_future(runner.run(request_of(6), timeout_s=60))
    await queued.wait()
    watch.gates[0].set()

    assert await running == [["tier_unavailable"]]
    await other[0]
    assert budget.statistics().used_bytes == 20


@pytest.mark.parametrize("delay", range(6))
async def test_two_batches_end_the_run_while_the_next_one_waits_for_its_admission(delay):
    """Whatever the number of iterations of the event loop between their ends."""
    errors, gates = [], {0: asyncio.Event(), 1: asyncio.Event()}

    async def admit(batch, num_chunks, timeout_s):
        if batch.chunks[0].start == 2:
            await asyncio.Event().wait()

    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    runner, budget = runner_of(
        Watch(gates=gates), Starts(), batch_chunks=1, ends=lambda batch, result: True, admit=admit
    )
    running = asyncio.ensure_future(runner.run(request_of(3), timeout_s=60))
    await turns(5)

    gates[1].set()
    await turns(delay)
    gates[0].set()

    assert await running == [[0]]
    assert errors == []
    assert budget.statistics().used_bytes == 0
