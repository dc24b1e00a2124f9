"""Bytes are reserved in order, within the budget, and never lost."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from lmcache_async.errors import BudgetExceededError
from lmcache_async.memory.budget import ByteBudget
from lmcache_async.testing.steps import turns

FOREVER = 1e6


async def waiting(budget: ByteBudget, *sizes: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.ensure_future(budget.reserve(size, timeout_s=FOREVER)) for size in sizes]
    await turns(3)
    return tasks


async def test_more_than_the_whole_budget_fails_at_once() -> None:
    budget = ByteBudget(10)

    with pytest.raises(BudgetExceededError, match="11 bytes are more than the whole budget of 10"):
        await budget.reserve(11, timeout_s=FOREVER)
    assert budget.statistics().refused == 1


async def test_a_deadline_ends_the_wait_and_lets_the_next_one_pass() -> None:
    budget = ByteBudget(10)
    assert budget.reserve_nowait(5)
    late = asyncio.ensure_future(budget.reserve(6, timeout_s=0.001))
    await turns(1)
    (small,) = await waiting(budget, 5)

    with pytest.raises(BudgetExceededError, match="5 of 10 are in use"):
        await late
    await small
    assert budget.statistics().used_bytes == 10
    assert budget.statistics().waiting == 0


async def test_a_reservation_whose_coroutine_is_closed_returns_the_bytes_that_it_was_granted() -> None:
    """As at the collection of a task whose event loop was closed."""
    budget = ByteBudget(10)
    assert budget.reserve_nowait(10)
    waiting = budget.reserve(6, timeout_s=FOREVER)
    waiting.send(None)
    budget.release(10)
    assert budget.statistics().used_bytes == 6

    waiting.close()

    assert budget.statistics().used_bytes == 0


async def test_giving_back_twice_is_an_error() -> None:
    budget = ByteBudget(10)
    assert budget.reserve_nowait(4)
    budget.release(4)

    with pytest.raises(RuntimeError, match="4 bytes released, but only 0 are reserved"):
        budget.release(4)


@pytest.mark.parametrize("call", ["reserve_nowait", "release"])
def test_negative_sizes_are_bugs(call: str) -> None:
    with pytest.raises(ValueError, match="-1"):
        getattr(ByteBudget(10), call)(-1)


FULL = [("reserve", 12), ("turn", 0), ("reserve", 12), ("reserve", 12), ("turn", 0)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "reserve_nowait", "release", "cancel", "turn"]), st.integers(0, 12)
        )
    )
)
@example([*FULL, ("release", 0), ("cancel", 0), ("turn", 0)])  # cancelled in the iteration of its grant
@example([*FULL, ("cancel", 0), ("release", 0), ("turn", 0)])
@example([*FULL, ("reserve", 0), ("cancel", 0), ("cancel", 1), ("turn", 0)])
def test_the_budget_holds_and_returns_to_zero(steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        budget = ByteBudget(12)
        tasks: list[tuple[asyncio.Task[None], int]] = []
        held: list[int] = []

        def settle() -> None:
            ended = [task.done() for task, _ in tasks if not task.cancelled()]
            assert ended == sorted(ended, reverse=True), "a later reservation was served first"
            for task, size in [item for item in tasks if item[0].done()]:
                tasks.remove((task, size))
                if not task.cancelled():
                    task.result()
                    held.append(size)

        for step, number in steps:
            if step == "reserve":
                tasks.append((asyncio.ensure_future(budget.reserve(number, timeout_s=FOREVER)), number))
            elif step == "reserve_nowait":
                await turns(3)
                settle()
                granted = not tasks and sum(held) + number <= 12  # others are first
                assert budget.reserve_nowait(number) == granted
                held += [number] * granted
            elif step == "release" and held:
                budget.release(held.pop(number % len(held)))
            elif step == "cancel" and tasks:
                tasks[number % len(tasks)][0].cancel()
            else:
                await turns(3)
                settle()
                assert sum(held) == budget.statistics().used_bytes <= 12
                assert budget.statistics().waiting == len(tasks)
                if tasks:
                    assert sum(held) + tasks[0][1] > 12  # no call waits for available bytes
        await turns(3)
        settle()
        while held:
            budget.release(held.pop())
            await turns(3)
            settle()
        assert not tasks
        assert budget.statistics().used_bytes == 0

    asyncio.run(main())


async def test_a_limit_below_the_budget_holds_until_it_is_raised() -> None:
    budget = ByteBudget(10)
    assert budget.reserve_nowait(6)
    budget.limit(7)
    assert budget.statistics().max_bytes == 7
    assert not budget.reserve_nowait(2)
    waiting = asyncio.ensure_future(budget.reserve(4, timeout_s=FOREVER))
    await turns(3)
    assert not waiting.done()

    budget.limit(99)  # the whole budget, not more

    await turns(3)
    assert waiting.done()
    assert budget.statistics().used_bytes == budget.statistics().max_bytes == 10


async def test_a_reservation_within_the_budget_is_granted_alone_whatever_the_limit() -> None:
    budget = ByteBudget(10)
    budget.limit(0)

    assert budget.reserve_nowait(10)
    assert not budget.reserve_nowait(1)
    budget.release(10)
    assert not budget.reserve_nowait(11)
