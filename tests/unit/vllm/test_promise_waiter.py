"""The consumer's wait in virtual time: the times of its lookups, and its timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache_async.integration.vllm.keys import Promise
from lmcache_async.integration.vllm.lookup import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    SPACING_S,
    Answer,
    Lookup,
    PendingLookup,
    PromiseWaiter,
    Query,
    pause_s,
)
from tests.simulation.loop import Trace, new_loop
from tests.support.request_keys import CHUNK, Rank, opened_keys

PROMPT = list(range(30))
TIMEOUT_S, WAIT_S = 0.5, 2.0
STEPS_S = 0.01  # duration of the loop's steps, each of some virtual microseconds
AT_ONCE = pytest.approx(0.0, abs=STEPS_S)
AT_THE_END = pytest.approx(WAIT_S, abs=STEPS_S)


def promise_of(tokens: list[int], num_tokens: int, **roots: Any) -> Promise:
    marks = opened_keys(tokens, **roots).digests(num_tokens, CHUNK)
    assert marks is not None
    return Promise("producer", num_tokens, *marks, 30.0)


class TimedRank(Rank):
    """A lookup server whose keys appear at given times."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.appears: dict[bytes, float] = {}
        self.asked: list[str] = []
        self.hangs_from = float("inf")

    def put(self, tokens: list[int], at: float, *, first: int = 0) -> None:
        """Add all chunks of these tokens from the chunk `first` on, including the partial one at the end."""
        chain = opened_keys(tokens)
        keys = [chain.key(self.index, chunk) for chunk in range(first, len(tokens) // CHUNK)]
        keys += [chain.tail.keys[self.index]] if chain.tail else []
        self.appears.update(dict.fromkeys(keys, at))

    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(message["op"])
        if now() >= self.hangs_from:
            await asyncio.Event().wait()
        self.stored = {key for key, at in self.appears.items() if at <= now()}
        return await super().call(message)


class Bench:
    """Two ranks, and one `PromiseWaiter` that queries them."""

    def __init__(self) -> None:
        self.ranks = [TimedRank(0), TimedRank(1)]
        self.waiting = PromiseWaiter(Query(self.ranks), timeout_s=TIMEOUT_S, clock=now)  # type: ignore[arg-type]
        self.counts = self.waiting.counts

    def put(self, tokens: list[int], at: float, **options: Any) -> None:
        for rank in self.ranks:
            rank.put(tokens, at, **options)

    async def ask(
        self, promise: Promise | None, *, tokens: list[int] = PROMPT, wait_s: float = WAIT_S
    ) -> tuple[Answer, PendingLookup, float]:
        """Return the answer and its time."""
        keys = opened_keys(tokens)
        lookup = Lookup("r#1", len(tokens), 0, now(), promise, wait_s)
        pending = PendingLookup(keys, lookup, keys.end_candidates(), lookup.asked_at)
        answer = await self.waiting.answer(pending)
        return answer, pending, now()


def now() -> float:
    return asyncio.get_running_loop().time()


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    loop = new_loop(Random(1), Trace())
    try:
        loop.run_until_complete(test(Bench()))
    finally:
        loop.close()


WHOLE = promise_of(PROMPT, 30)


def test_without_a_promise_there_is_no_wait():
    async def test(bench: Bench) -> None:
        answer, lookup, when = await bench.ask(None)
        assert (answer.chunks, when, lookup.believed) == (0, AT_ONCE, False)
        assert bench.ranks[0].asked == ["lookup", "first"]

    run(test)


def test_a_promise_that_is_already_kept_costs_one_lookup():
    async def test(bench: Bench) -> None:
        bench.put(PROMPT, 0.0)
        answer, lookup, when = await bench.ask(WHOLE)
        assert (answer.hit_tokens(CHUNK), when, lookup.believed) == (30, AT_ONCE, True)
        assert bench.ranks[0].asked == ["lookup"]
        assert (bench.counts.promises, bench.counts.kept, bench.counts.asks) == (1, 1, 0)

    run(test)


@pytest.mark.parametrize("at", [0.001, 0.05, 0.7, 1.999])
def test_chunks_that_arrive_in_time_are_awaited_and_found_soon(at: float):
    async def test(bench: Bench) -> None:
        bench.put(PROMPT[:16], 0.0)
        bench.put(PROMPT, at, first=2)
        answer, pending, when = await bench.ask(WHOLE)
        assert answer.hit_tokens(CHUNK) == 30
        assert at <= pending.queried_at <= when <= at + LAST_PAUSE_S + STEPS_S
        assert (bench.counts.kept, bench.counts.late) == (1, 0)

    run(test)


def test_while_waiting_it_looks_up_only_the_first_missing_key_at_growing_intervals():
    async def test(bench: Bench) -> None:
        answer, _, when = await bench.ask(WHOLE)
        assert (answer.hit_tokens(CHUNK), when) == (0, AT_THE_END)
        asked = bench.ranks[0].asked
        assert asked[:2] == ["lookup", "first"]  # the stored prefix, and the first missing chunk
        assert set(asked[2:-2]) == {"first"}
        assert asked[-2:] == ["lookup", "first"]  # the final answer
        assert bench.counts.asks == len(asked) - 4 <= 5 + WAIT_S / LAST_PAUSE_S

    run(test)


def test_at_the_deadline_the_stored_prefix_is_the_hit():
    async def test(bench: Bench) -> None:
        bench.put(PROMPT[:8], 0.0)
        bench.put(PROMPT[:16], 1.0, first=1)
        answer, lookup, when = await bench.ask(WHOLE)
        assert (answer.hit_tokens(CHUNK), when) == (16, AT_THE_END)
        assert lookup.believed
        assert (bench.counts.kept, bench.counts.late) == (0, 1)

    run(test)


def test_a_missing_chunk_before_the_last_one_is_waited_for_too():
    async def test(bench: Bench) -> None:
        bench.put(PROMPT, 0.1, first=1)  # tiers may write in any order
        bench.put(PROMPT[:8], 0.5)
        answer, _, when = await bench.ask(WHOLE)
        assert answer.hit_tokens(CHUNK) == 30
        assert 0.5 <= when <= 0.5 + LAST_PAUSE_S + STEPS_S

    run(test)


def test_a_promise_of_a_part_is_kept_by_that_part():
    async def test(bench: Bench) -> None:
        bench.put(PROMPT[:16], 0.3)
        answer, _, when = await bench.ask(promise_of(PROMPT, 16))
        assert answer.hit_tokens(CHUNK) == 16
        assert 0.3 <= when <= 0.3 + LAST_PAUSE_S + STEPS_S

    run(test)


@pytest.mark.parametrize(
    "promise",
    [
        replace(WHOLE, tokens=40),
        promise_of([*PROMPT, *range(10)], 40),
        replace(WHOLE, tokens=13),
        promise_of(PROMPT, 30, roots=(b"2" * 16, b"3" * 16)),
        promise_of(PROMPT, 30, roots=(b"0" * 16,)),
        promise_of([7, *PROMPT[1:]], 30),
        promise_of([7, *PROMPT[1:]], 16),
    ],
    ids=[
        "more than the prompt",
        "a longer prompt's",
        "no chunk's end",
        "other model",
        "other ranks",
        "other prompt",
        "other prompt's part",
    ],
)
def test_a_promise_that_cannot_be_of_this_request_is_not_waited_for(promise: Promise):
    async def test(bench: Bench) -> None:
        bench.put(PROMPT[:8], 0.0)
        answer, lookup, when = await bench.ask(promise)
        assert (answer.hit_tokens(CHUNK), when, lookup.believed) == (8, AT_ONCE, False)
        assert (bench.counts.doubted, bench.counts.promises) == (1, 0)

    run(test)


def test_a_lookup_after_the_deadline_asks_once_and_counts_nothing():
    async def test(bench: Bench) -> None:
        answer, lookup, when = await bench.ask(WHOLE, wait_s=0.0)
        assert (answer.hit_tokens(CHUNK), when, lookup.believed) == (0, AT_ONCE, True)
        assert (bench.counts.promises, bench.counts.late) == (0, 0)

    run(test)


def test_a_request_that_is_gone_is_not_waited_for():
    async def test(bench: Bench) -> None:
        keys = opened_keys(PROMPT)
        lookup = Lookup("r#1", 30, 0, 0.0, WHOLE, WAIT_S)
        pending = PendingLookup(keys, lookup, keys.end_candidates(), lookup.asked_at)
        asking = asyncio.create_task(bench.waiting.answer(pending))
        await asyncio.sleep(0.3)
        pending.abandoned = True
        await asking
        assert now() <= 0.3 + LAST_PAUSE_S + STEPS_S
        assert bench.counts.late == 0
        assert bench.counts.waiting == 0

    run(test)


@pytest.mark.parametrize("hangs_from", [0.2, 1.9])
def test_a_hanging_rank_extends_the_wait_by_one_lookup_at_most(hangs_from: float):
    async def test(bench: Bench) -> None:
        bench.put(PROMPT[:8], 0.0)
        bench.ranks[1].hangs_from = hangs_from
        answer, pending, when = await bench.ask(WHOLE)
        assert when <= WAIT_S + TIMEOUT_S + STEPS_S
        assert pending.queried_at == AT_ONCE  # the last query has no answer
        assert (answer.chunks, answer.pinned, answer.resident) == (1, True, False)

    run(test)


def test_many_that_wait_ask_no_more_often_together_than_a_thousand_times_a_second():
    async def test(bench: Bench) -> None:
        await asyncio.gather(*(bench.ask(WHOLE) for _ in range(300)))
        assert now() <= WAIT_S + 0.3
        assert bench.counts.asks <= WAIT_S / SPACING_S + 300 * 2
        assert bench.counts.late == 300

    run(test)


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_pauses_grow_to_a_bound_and_with_the_number_that_wait(asks: int, waiting: int):
    pause = pause_s(asks, waiting)

    assert FIRST_PAUSE_S <= pause <= max(LAST_PAUSE_S, waiting * SPACING_S)
    assert pause <= pause_s(asks + 1, waiting)
    assert waiting / pause <= 1 / SPACING_S * (1 + 1e-9)
