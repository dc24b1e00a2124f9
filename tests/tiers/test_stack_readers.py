"""Tiers that are only read from: given nothing, and no reason to store what others have."""

from __future__ import annotations

import logging

import pytest

from lmcache_async.config import load_config
from lmcache_async.engine.tiers import stacked_tiers
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.arena import Arena
from lmcache_async.plugins.cpu import CPUConfig, CPUTier
from lmcache_async.registry import Registry
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.records import key_of, record
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.stack import StackedTier, TierStack
from tests.support.tiers import handle_of

KEYS = [key_of(number) for number in range(3)]


class ReadTier(DictTier):
    """Somebody else's records."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(writes=False)

    async def put_many(self, items):
        raise AssertionError("it was given a record")


def stack_of(*tiers) -> TierStack:
    stacked = [StackedTier(f"t{index}", handle_of(tier)) for index, tier in enumerate(tiers)]
    return TierStack(stacked, write_timeout_s=0.0, encrypted=True)


@pytest.fixture
def theirs(arena: Arena) -> ReadTier:
    tier = ReadTier()
    with record(arena, 2) as buffer:
        tier.records[key_of(2)] = bytes(buffer.view)
    return tier


async def test_it_lacks_nothing_and_is_given_nothing(arena: Arena, theirs: ReadTier) -> None:
    told: list[tuple[int, str]] = []
    stack = await stack_of(CPUTier(CPUConfig()), theirs).open(arena)
    buffers = [record(arena, number) for number in range(2)]
    try:
        assert await stack.missing(KEYS) == [0, 1, 2]  # what only they have is stored here too
        items = list(zip(KEYS, buffers, strict=False))
        await stack.write(items, lambda position, cause: told.append((position, cause)))
        assert await stack.missing(KEYS) == [2]
        await stack.promote(items, [1, 1])
        assert not stack.leaves_memory  # nothing that is written, so nothing is encrypted
        assert await stack.plan(KEYS) == ((0, 0, 1), "")
    finally:
        for buffer in buffers:
            buffer.release()
        await stack.aclose(timeout_s=5)
    assert told == [(0, ""), (1, "")]
    assert stack.metrics.tier_counts() == {"t0.stored": 2, "t0.promoted": 2}


async def test_behind_a_tier_that_is_slower_it_is_not_promoted_into(arena: Arena, theirs: ReadTier) -> None:
    stack = await stack_of(theirs, DictTier()).open(arena)
    with record(arena, 0) as buffer:
        await stack.promote([(key_of(0), buffer)], [1])
    await stack.aclose(timeout_s=5)
    assert set(theirs.records) == {key_of(2)}


async def test_alone_it_makes_nothing_to_store(arena: Arena, theirs: ReadTier) -> None:
    stack = await stack_of(theirs).open(arena)
    assert await stack.missing(KEYS) == []
    await stack.aclose(timeout_s=5)


class NamedReadTier(ReadTier):
    """Found by its name."""


def test_it_has_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "load", lambda self, group, name, **_: NamedReadTier)
    rig = Rig()
    config = load_config(env={}, extra={"tiers": [{"name": "theirs", "layers": []}]})
    [stacked] = stacked_tiers(Registry(), config, rig.namespace, LimitedLogger(logging.getLogger("test")))

    assert stacked.writer is None
    assert not stacked.tier.capabilities.writes
