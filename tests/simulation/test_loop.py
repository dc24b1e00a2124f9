"""The simulated loop keeps asyncio's guarantees, draws the rest from a seed, and has virtual time."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from lmcache_async.memory.threads import WorkerPool, in_thread
from tests.simulation.loop import (
    Deadlock,
    ProcessCrashed,
    Trace,
    Violation,
    abandon,
    new_loop,
    threads_as_steps,
)


def run(coroutine_function, *, seed=0, **options):
    trace = Trace()
    loop = new_loop(Random(seed), trace, **options)
    with threads_as_steps():
        try:
            return loop.run_until_complete(coroutine_function()), trace.digest()
        finally:
            if loop.live_tasks():
                abandon(loop)
            loop.close()


async def order_of_tasks():
    order = []

    async def work(name):
        for step in range(3):
            order.append((name, step))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(work(name))
    return order


def test_the_order_of_tasks_is_drawn_from_the_seed():
    orders = {tuple(run(order_of_tasks, seed=seed)[0]) for seed in range(20)}

    assert len(orders) > 10
    for order in orders:  # the steps of each task stay in order
        assert all([step for name, step in order if name == task] == [0, 1, 2] for task in "abcd")


@pytest.mark.parametrize("seed", range(10))
def test_callbacks_keep_their_order_among_themselves_and_before_tasks_that_came_later(seed):
    async def check():
        order = []
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        for number in range(5):
            future.add_done_callback(lambda _, n=number: order.append(n))
        woken = asyncio.ensure_future(asyncio.wait_for(future, None))
        await asyncio.sleep(0)
        future.set_result(None)
        loop.call_soon(order.append, "soon")
        await woken
        return order

    assert run(check, seed=seed)[0] == [0, 1, 2, 3, 4, "soon"]


def test_a_deadlock_is_reported_with_the_stack_of_every_task():
    async def waits_forever():
        await asyncio.Event().wait()

    async def check():
        await asyncio.gather(waits_forever(), waits_forever())

    with pytest.raises(Deadlock, match=r"3 tasks wait") as caught:
        run(check)
    assert sum("waits_forever" in stack for stack in caught.value.stacks) == 2
    assert all("test_loop.py:" in stack for stack in caught.value.stacks)


def test_a_loop_that_only_turns_is_a_violation():
    async def check():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Violation, match="still turned"):
        run(check, max_real_s=0.01)


@pytest.mark.parametrize("pool", [WorkerPool, ThreadPoolExecutor])
def test_thread_pools_start_no_thread(pool):
    async def check():
        executor = pool(2)
        before = threading.active_count()
        where = [in_thread(executor, threading.get_ident) for _ in range(5)]
        where.append(asyncio.to_thread(threading.get_ident))
        idents = await asyncio.gather(*where)
        executor.shutdown()
        return set(idents), threading.active_count() - before

    assert run(check, thread_delay=lambda: 0.1)[0] == ({threading.get_ident()}, 0)


def test_a_pool_has_as_many_calls_under_way_as_workers():
    async def check():
        executor = WorkerPool(2)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(in_thread(executor, lambda: None) for _ in range(6)))
        return loop.time()

    # Two at a time, 1 s each. The next one starts when one ends.
    assert run(check, thread_delay=lambda: 1.0)[0] == pytest.approx(4.0, abs=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_a_call_that_has_begun_is_not_withdrawn(seed):
    async def check():
        executor, ran = WorkerPool(1), []
        task = asyncio.ensure_future(in_thread(executor, lambda: ran.append(True)))
        await asyncio.sleep(1.5)
        task.cancel()
        await asyncio.wait({task})
        return ran, task.cancelled(), asyncio.get_running_loop().time()

    ran, cancelled, now = run(check, seed=seed, thread_delay=lambda: 1.0)[0]

    assert (ran, cancelled) == ([True], True)
    assert now == pytest.approx(2.0, abs=0.01)


def test_a_call_that_has_not_begun_is_withdrawn():
    async def check():
        executor, ran = WorkerPool(1), []
        future = executor.submit(ran.append, True)
        assert future.cancel()
        await asyncio.sleep(10)
        return ran

    assert run(check, thread_delay=lambda: 1.0)[0] == []


def test_a_pool_that_was_shut_down_runs_its_queued_calls():
    async def check():
        executor, ran = WorkerPool(1), []
        futures = [executor.submit(ran.append, number) for number in range(3)]
        await asyncio.sleep(1.5)
        executor.shutdown(wait=True)
        assert all(future.done() for future in futures)
        await asyncio.sleep(10)
        return ran

    assert run(check, thread_delay=lambda: 1.0)[0] == [0, 1, 2]


def test_pools_outside_of_a_simulated_loop_use_threads():
    with threads_as_steps(), WorkerPool(1) as pool:
        assert pool.submit(threading.get_ident).result(timeout=60) != threading.get_ident()


def test_a_crash_ends_everything_between_two_steps_without_effects():
    ended = []

    async def stubborn():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append("not in this process")

    async def check():
        loop = asyncio.get_running_loop()
        tasks = [asyncio.ensure_future(stubborn()) for _ in range(3)]
        await asyncio.sleep(0)
        loop.crash_at = loop.trace.decisions
        await asyncio.wait(tasks)

    with pytest.raises(ProcessCrashed):
        run(check)
    assert ended == []
