"""Slabs never overlap, are leased in order, and are always released."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_async.errors import BudgetExceededError, ConfigError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import PAGE, Buffer
from lmcache_async.testing.steps import turns

FOREVER = 1e6
SLABS = 4


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(SLABS * PAGE, PAGE)
    yield arena
    statistics = arena.statistics()
    arena.close()
    assert (statistics.leased_slabs, statistics.waiting) == (0, 0)


def all_slabs(arena: Arena) -> list[Buffer]:
    buffers = []
    while (buffer := arena.lease_nowait(PAGE)) is not None:
        buffers.append(buffer)
    return buffers


def release(buffers: list[Buffer]) -> None:
    while buffers:
        buffers.pop().release()


def lease(arena: Arena, timeout_s: float = FOREVER) -> asyncio.Task[Buffer]:
    return asyncio.ensure_future(arena.lease(1, timeout_s=timeout_s))


def lease_many(arena: Arena, count: int, timeout_s: float = FOREVER) -> asyncio.Task[list[Buffer]]:
    return asyncio.ensure_future(arena.lease_many([1] * count, timeout_s=timeout_s))


def test_slabs_do_not_overlap_and_fill_the_region() -> None:
    arena = Arena(5 * PAGE - 1, PAGE - 5)
    buffers = all_slabs(arena)
    for number, buffer in enumerate(buffers):
        buffer.array[:] = number

    assert (arena.num_slabs, arena.slab_bytes) == (4, PAGE)
    assert sorted(buffer.address - arena.address for buffer in buffers) == [0, PAGE, 2 * PAGE, 3 * PAGE]
    assert sorted(np.frombuffer(arena.region, np.uint8).tolist()) == [
        n for n in range(4) for _ in range(PAGE)
    ]
    release(buffers)
    arena.close()


def test_a_region_without_room_for_one_slab_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"arena.max_bytes is 4096, but one chunk needs 8192 bytes"):
        Arena(PAGE, PAGE + 1)


async def test_more_than_a_slab_fails_at_once(arena: Arena) -> None:
    with pytest.raises(BudgetExceededError, match="4097 bytes are more than a slab of 4096"):
        await arena.lease(PAGE + 1, timeout_s=FOREVER)
    assert arena.lease_nowait(PAGE + 1) is None
    with pytest.raises(ValueError, match="-1"):
        arena.lease_nowait(-1)


async def test_a_deadline_ends_only_its_own_wait(arena: Arena) -> None:
    buffers = all_slabs(arena)
    late = lease(arena, timeout_s=0.001)
    await turns(1)
    patient = lease(arena)

    with pytest.raises(BudgetExceededError, match=r"none of 4 slabs became free within 0.001 s"):
        await late
    buffers.pop().release()
    (await patient).release()
    assert arena.statistics().timeouts == 1
    release(buffers)


async def test_lease_many_returns_as_many_leading_buffers_as_the_arena_can_hold(arena: Arena) -> None:
    buffers = await arena.lease_many([10] * 9, timeout_s=FOREVER)
    assert [buffer.nbytes for buffer in buffers] == [10] * SLABS
    release(buffers)

    buffers = await arena.lease_many([10, PAGE, PAGE + 1, 10], timeout_s=FOREVER)
    assert [buffer.nbytes for buffer in buffers] == [10, PAGE]
    release(buffers)

    assert await arena.lease_many([PAGE + 1], timeout_s=FOREVER) == []
    assert await arena.lease_many([], timeout_s=FOREVER) == []


async def test_two_prompts_that_each_want_the_whole_arena_both_end(arena: Arena) -> None:
    blocker = [await arena.lease(1, timeout_s=0)]
    first, second = lease_many(arena, SLABS, 0.01), lease_many(arena, SLABS, 0.02)

    got_first, got_second = await asyncio.gather(first, second)

    assert (len(got_first), len(got_second)) == (SLABS - 1, 0)
    release(blocker + got_first)


async def test_a_reclaimer_provides_slabs_when_none_is_free(arena: Arena) -> None:
    kept = all_slabs(arena)
    asked: list[int] = []

    def reclaim(wanted: int) -> int:
        asked.append(wanted)
        count = min(wanted, len(kept))
        for _ in range(count):
            kept.pop().release()
        return count

    arena.add_reclaimer(reclaim)
    one = arena.lease_nowait(1)
    assert one is not None
    two = await arena.lease(1, timeout_s=0)
    rest = await arena.lease_many([1] * 9, timeout_s=0)

    assert asked == [1, 1, 4, 2]
    assert len(rest) == 2
    assert arena.statistics().reclaimed_slabs == 4
    release([one, two, *rest])


async def test_a_reclaimer_never_runs_inside_a_release(arena: Arena) -> None:
    """Its tier could be in the middle of a change."""
    buffers = all_slabs(arena)
    releasing = False

    def reclaim(wanted: int) -> int:
        assert not releasing
        return 0

    arena.add_reclaimer(reclaim)
    tasks = [lease_many(arena, SLABS), lease(arena)]
    await turns(4)
    releasing = True
    release(buffers)
    releasing = False

    release(await tasks[0])
    (await tasks[1]).release()


async def test_a_reclaimer_that_asks_for_a_lease_itself_ends(arena: Arena) -> None:
    buffers = all_slabs(arena)

    def reclaim(wanted: int) -> int:
        assert arena.lease_nowait(1) is None
        return 0

    arena.add_reclaimer(reclaim)
    assert arena.lease_nowait(1) is None
    release(buffers)


async def test_a_view_that_ends_in_another_thread_wakes_waiters(arena: Arena) -> None:
    buffers = all_slabs(arena)
    views = [buffers[0].array]
    release(buffers[:1])
    task = lease(arena)
    await turns(4)
    assert not task.done()

    await asyncio.to_thread(views.clear)
    (await task).release()
    release(buffers[1:])


async def test_close_ends_all_waits() -> None:
    arena = Arena(SLABS * PAGE, PAGE)
    buffers = all_slabs(arena)
    one, many = lease(arena), lease_many(arena, 2)
    await turns(4)

    arena.close()

    with pytest.raises(BudgetExceededError, match="closed"):
        await one
    assert await many == []
    assert arena.lease_nowait(1) is None
    with pytest.raises(BudgetExceededError, match="closed"):
        await arena.lease(1, timeout_s=FOREVER)
    release(buffers)


async def test_a_wait_whose_coroutine_is_closed_frees_the_slabs_that_it_has(arena: Arena) -> None:
    """As at the collection of a task whose event loop was closed."""
    blocker = await arena.lease(1, timeout_s=0)
    waiting = arena.lease_many([1] * SLABS, timeout_s=FOREVER)
    waiting.send(None)
    assert arena.statistics().leased_slabs == SLABS

    waiting.close()

    release([blocker])
