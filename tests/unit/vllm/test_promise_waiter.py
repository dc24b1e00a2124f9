"""The consumer's wait in virtual time: the times of its lookups, and its timeout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

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
from tests.support.request_keys import CHUNK, ONE_GROUP, Rank, opened_keys

T = TypeVar("T")

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
        self.lookups: list[str] = []
        self.hangs_from = float("inf")

    def put(self, tokens: list[int], at: float, *, first: int = 0) -> None:
        """Add all chunks of these tokens from the chunk `first` on, including the partial one at the end."""
        chain = opened_keys(tokens)
        keys = [chain.key(self.index, chunk) for chunk in range(first, len(tokens) // CHUNK)]
        keys += [chain.tail.keys[self.index]] if chain.tail else []
        self.appears.update(dict.fromkeys(keys, at))

    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(message["op"])
        self.lookups.append(message["lookup_id"])
        if now() >= self.hangs_from:
            await asyncio.Event().wait()
        self.stored = {key for key, at in self.appears.items() if at <= now()}
        return await super().call(message)


class Bench:
    """Two ranks, and one `PromiseWaiter` that queries them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ranks = [TimedRank(0), TimedRank(1)]
        self.waiting = PromiseWaiter(Query(self.ranks, ONE_GROUP), timeout_s=TIMEOUT_S, clock=now)  # type: ignore[arg-type]
        self.counts = self.waiting.counts

    def put(self, tokens: list[int], at: float, **options: Any) -> None:
        for rank in self.ranks:
            rank.put(tokens, at, **options)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def ask(self, promise: Promise | None, *, wait_s: float = WAIT_S) -> tuple[Answer, PendingLookup, float]:
        """Return the answer and its time."""
        return self.run(self.answer(promise, wait_s=wait_s))

    async def answer(
        self, promise: Promise | None, *, wait_s: float = WAIT_S
    ) -> tuple[Answer, PendingLookup, float]:
        pending = pending_lookup(promise, wait_s)
        return await self.waiting.answer(pending), pending, now()


def pending_lookup(promise: Promise | None, wait_s: float = WAIT_S) -> PendingLookup:
    keys = opened_keys(PROMPT)
    lookup = Lookup("r#1", len(PROMPT), 0, now(), promise, wait_s)
    return PendingLookup(keys, lookup, keys.end_candidates(), lookup.asked_at)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def bench() -> Iterator[Bench]:
    loop = new_loop(Random(1), Trace())
    yield Bench(loop)
    loop.close()


WHOLE = promise_of(PROMPT, 30)


def test_without_a_promise_there_is_no_wait(bench: Bench):
    answer, lookup, when = bench.ask(None)
    assert (answer.chunks, when, lookup.promise_matches) == (0, AT_ONCE, False)
    assert bench.ranks[0].asked == ["lookup", "first"]


def test_a_promise_that_is_already_kept_costs_one_lookup(bench: Bench):
    bench.put(PROMPT, 0.0)
    answer, lookup, when = bench.ask(WHOLE)
    assert (answer.hit_tokens(CHUNK), when, lookup.promise_matches) == (30, AT_ONCE, True)
    assert bench.ranks[0].asked == ["lookup"]
    assert (bench.counts.accepted, bench.counts.kept, bench.counts.queries) == (1, 1, 0)


@pytest.mark.parametrize(
    ("puts", "promise", "at"),
    [
        *(([(PROMPT[:16], 0.0, 0), (PROMPT, at, 2)], WHOLE, at) for at in (0.001, 0.05, 0.7, 1.999)),
        ([(PROMPT, 0.1, 1), (PROMPT[:8], 0.5, 0)], WHOLE, 0.5),  # tiers may write in any order
        ([(PROMPT[:16], 0.3, 0)], promise_of(PROMPT, 16), 0.3),
    ],
)
def test_promised_chunks_that_arrive_in_time_are_awaited_and_found_soon(
    bench: Bench, puts: list[tuple[list[int], float, int]], promise: Promise, at: float
):
    for tokens, when, first in puts:
        bench.put(tokens, when, first=first)

    answer, pending, when = bench.ask(promise)
    assert answer.hit_tokens(CHUNK) == promise.tokens
    assert at <= pending.queried_at <= when <= at + LAST_PAUSE_S + STEPS_S
    assert (bench.counts.kept, bench.counts.late) == (1, 0)


def test_while_waiting_it_looks_up_only_the_first_missing_key_at_growing_intervals(bench: Bench):
    answer, _, when = bench.ask(WHOLE)
    assert (answer.hit_tokens(CHUNK), when) == (0, AT_THE_END)
    asked = bench.ranks[0].asked
    assert asked[:2] == ["lookup", "first"]  # the stored prefix, and the first missing chunk
    assert set(asked[2:-2]) == {"first"}
    assert asked[-2:] == ["lookup", "first"]  # the final answer
    assert bench.counts.queries == len(asked) - 4 <= 5 + WAIT_S / LAST_PAUSE_S


def test_at_the_deadline_the_stored_prefix_is_the_hit(bench: Bench):
    bench.put(PROMPT[:8], 0.0)
    bench.put(PROMPT[:16], 1.0, first=1)
    answer, lookup, when = bench.ask(WHOLE)
    assert (answer.hit_tokens(CHUNK), when) == (16, AT_THE_END)
    assert lookup.promise_matches
    assert (bench.counts.kept, bench.counts.late) == (0, 1)


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
def test_a_promise_that_cannot_be_of_this_request_is_not_waited_for(bench: Bench, promise: Promise):
    bench.put(PROMPT[:8], 0.0)
    answer, lookup, when = bench.ask(promise)
    assert (answer.hit_tokens(CHUNK), when, lookup.promise_matches) == (8, AT_ONCE, False)
    assert (bench.counts.mismatched, bench.counts.accepted) == (1, 0)


def test_queries_during_the_wait_are_not_of_the_lookup_so_that_they_pin_nothing(bench: Bench):
    bench.ranks[0].put(PROMPT, 0.0)
    bench.ask(WHOLE)

    asked = Counter(bench.ranks[0].lookups)
    assert asked["r#1"] == 2 * bench.ranks[0].asked.count("lookup")  # each with its partial chunk
    assert asked[""] == bench.counts.queries > 3


def test_a_lookup_after_the_deadline_asks_once_and_counts_nothing(bench: Bench):
    answer, lookup, when = bench.ask(WHOLE, wait_s=0.0)
    assert (answer.hit_tokens(CHUNK), when, lookup.promise_matches) == (0, AT_ONCE, True)
    assert (bench.counts.accepted, bench.counts.late) == (0, 0)


def test_an_abandoned_lookup_stops_waiting(bench: Bench):
    async def abandon_later() -> float:
        pending = pending_lookup(WHOLE)
        asking = asyncio.create_task(bench.waiting.answer(pending))
        await asyncio.sleep(0.3)
        pending.abandoned = True
        await asking
        return now()

    assert bench.run(abandon_later()) <= 0.3 + LAST_PAUSE_S + STEPS_S
    assert (bench.counts.late, bench.counts.waiting) == (0, 0)


@pytest.mark.parametrize("hangs_from", [0.2, 1.9])
def test_a_hanging_rank_extends_the_wait_by_one_lookup_at_most(bench: Bench, hangs_from: float):
    bench.put(PROMPT[:8], 0.0)
    bench.ranks[1].hangs_from = hangs_from
    answer, pending, when = bench.ask(WHOLE)
    assert when <= WAIT_S + TIMEOUT_S + STEPS_S
    assert pending.queried_at == AT_ONCE  # the last query has no answer
    assert (answer.chunks, answer.pinned, answer.resident) == (1, True, False)


def test_all_waiting_lookups_together_send_at_most_a_thousand_queries_per_second(bench: Bench):
    async def all_at_once() -> float:
        await asyncio.gather(*(bench.answer(WHOLE) for _ in range(300)))
        return now()

    assert bench.run(all_at_once()) <= WAIT_S + 0.3
    assert bench.counts.queries <= WAIT_S / SPACING_S + 300 * 2
    assert bench.counts.late == 300


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_pauses_grow_up_to_a_bound_and_with_the_number_of_waiting_lookups(queries: int, waiting: int):
    pause = pause_s(queries, waiting)

    assert FIRST_PAUSE_S <= pause <= max(LAST_PAUSE_S, waiting * SPACING_S)
    assert pause <= pause_s(queries + 1, waiting)
    assert waiting / pause <= 1 / SPACING_S * (1 + 1e-9)
