"""Plans: the longest prefix of the union of tiers, from the fastest tier, never past a hole."""

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import TierUnavailableError
from lmcache_async.testing.records import key_of
from lmcache_async.tiers.base import Capabilities, Tier, TierConfig
from lmcache_async.tiers.stack import StackedTier, TierStack, runs
from tests.support.tiers import handle_of


class ListedTier(Tier):
    """A tier with the given chunks; `asked` lists every queried key."""

    def __init__(self, present, *, local, fails=False):
        super().__init__(TierConfig())
        self.present = present
        self.local = local
        self.fails = fails
        self.asked = []

    @property
    def capabilities(self):
        return Capabilities(local_index=self.local)

    async def contains(self, key):
        self.asked.append(key)
        if self.fails:
            raise TierUnavailableError("away")
        return key in self.present

    async def get(self, key, allocate):
        raise NotImplementedError

    async def put(self, key, buffer):
        raise NotImplementedError


def stack_of(tiers):
    return TierStack(
        [StackedTier(f"t{index}", handle_of(tier)) for index, tier in enumerate(tiers)], write_timeout_s=0
    )


@st.composite
def matrices(draw, *, may_fail=False):
    """Tiers and their keys: any combination of presence."""
    keys = [key_of(position) for position in range(draw(st.integers(0, 10)))]
    # Mostly present: with even odds long prefixes are rare.
    present = st.sets(st.sampled_from(keys)) if keys else st.just(set())
    absent = st.sets(st.sampled_from(keys), max_size=3) if keys else st.just(set())
    tiers = [
        ListedTier(
            set(keys) - draw(absent) if draw(st.booleans()) else draw(present),
            local=draw(st.booleans()),
            fails=may_fail and draw(st.booleans()),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]
    return tiers, keys


def union_prefix(tiers, keys):
    there = [any(key in tier.present and not tier.fails for tier in tiers) for key in keys]
    return there.index(False) if False in there else len(keys)


@given(matrices(may_fail=True))
def test_a_plan_is_the_longest_prefix_of_the_union_and_each_tier_has_its_chunks(case):
    tiers, keys = case

    planned, cause = asyncio.run(stack_of(tiers).plan(keys))

    assert len(planned) == union_prefix(tiers, keys)
    for key, index in zip(keys, planned, strict=False):
        assert key in tiers[index].present
        assert not tiers[index].fails
    if len(planned) == len(keys):
        assert cause == ""
    else:
        assert cause == ("tier_error" if any(tier.fails for tier in tiers) else "miss")


@given(matrices())
def test_no_slower_tier_than_the_fastest_local_one_is_planned(case):
    tiers, keys = case

    planned, _ = asyncio.run(stack_of(tiers).plan(keys))

    for key, index in zip(keys, planned, strict=False):
        assert index <= min(
            (i for i, tier in enumerate(tiers) if tier.local and key in tier.present), default=len(tiers)
        )


@given(matrices())
def test_a_remote_tier_misses_at_most_once_for_each_hole_that_others_fill(case):
    tiers, keys = case
    for tier in tiers:
        tier.local = False

    planned, _ = asyncio.run(stack_of(tiers).plan(keys))

    # A query of a remote tier costs a round trip, and ends at the first missing key.
    for tier in tiers:
        misses = [key for key in tier.asked if key not in tier.present]
        assert len(misses) <= len(planned) + 1


@given(matrices(may_fail=True))
def test_a_failing_tier_is_counted_and_changes_nothing_for_the_others(case):
    tiers, keys = case
    stack = stack_of(tiers)
    planned, _ = asyncio.run(stack.plan(keys))

    without = [tier for tier in tiers if not tier.fails]
    expected, _ = asyncio.run(stack_of(without).plan(keys))

    assert [tiers[index] for index in planned] == [without[index] for index in expected]
    for index, tier in enumerate(tiers):
        assert (stack.metrics.tier_counts()[f"t{index}.errors.TierUnavailableError"] > 0) == (
            tier.fails and bool(tier.asked)
        )


@given(matrices(may_fail=True))
def test_missing_returns_the_chunks_that_an_answering_tier_lacks(case):
    tiers, keys = case
    for tier in tiers:
        tier.local = True
    answering = [tier for tier in tiers if not tier.fails]

    missing = asyncio.run(stack_of(tiers).missing(keys))

    if answering or not tiers:
        assert missing == [
            i for i, key in enumerate(keys) if any(key not in tier.present for tier in answering)
        ]
    else:  # unknown: no chunk may be reported as present
        assert missing == list(range(len(keys)))


@given(st.lists(st.integers(0, 2)))
def test_runs_are_a_partition_into_the_longest_stretches_of_one_tier(tiers):
    parts = runs(tiers)

    assert [tier for tier, start, stop in parts for _ in range(start, stop)] == tiers
    assert [start for _, start, _ in parts] == [0, *(stop for _, _, stop in parts)][: len(parts)]
    assert all(start < stop for _, start, stop in parts)
    assert all(left[0] != right[0] for left, right in pairwise(parts))
