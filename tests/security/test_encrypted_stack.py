"""The tier stack lets no plain record out, whatever the preceding stages do."""

from __future__ import annotations

import pytest

from lmcache_async.errors import ChainError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.header import ENCRYPTED, MAGIC, PREFIX, VERSION
from lmcache_async.pipeline.report import WriteOutcomes
from lmcache_async.plugins.cpu import CPUConfig, CPUTier
from lmcache_async.testing.fakes import DictTier
from lmcache_async.tiers.stack import StackedTier, TierStack
from lmcache_async.tiers.writer import TierWriter
from lmcache_async.types import ChunkKey
from tests.support.tiers import handle_of

KEYS = [ChunkKey(bytes([number]) * 16) for number in range(3)]
PLAIN = b"plain" * 100
SECRET = PREFIX.pack(MAGIC, VERSION | ENCRYPTED, 0, 0, 0, bytes(8)) + b"secret" * 80


@pytest.fixture
def arena():
    arena = Arena(24 * 4096, 4096, prefault=False, huge_pages=False)
    yield arena
    assert arena.statistics().leased_slabs == 0
    arena.close()


@pytest.fixture
def records():
    """Records of all tiers except memory."""
    return {}


@pytest.fixture(params=["queued", "at once"])
def outside(request, records):
    handle = handle_of(DictTier(records=records), name="far")
    writer = TierWriter(handle, max_bytes=1 << 20) if request.param == "queued" else None
    return StackedTier("far", handle, writer)


def filled(arena, content, count):
    buffers = [arena.lease_nowait(len(content)) for _ in range(count)]
    for buffer in buffers:
        buffer.view[:] = content
    return buffers


def release(buffers):
    for buffer in buffers:
        buffer.release()


async def given(arena, stack, keys, plain, secret):
    """Result of a get for each key."""
    outcomes = WriteOutcomes(len(keys))
    items = list(zip(keys, plain, strict=True))
    await stack.write(items, outcomes.add, at_rest=secret)
    assert await stack.flush(timeout_s=30)
    return outcomes.causes()


async def test_tiers_in_the_arena_get_the_record_and_others_its_encrypted_form(arena, outside, records):
    stack = TierStack(
        [StackedTier("cpu", handle_of(CPUTier(CPUConfig()))), outside], write_timeout_s=0, encrypted=True
    )
    await stack.open(arena)
    plain, secret = filled(arena, PLAIN, 3), filled(arena, SECRET, 2)

    outcomes = await given(arena, stack, KEYS, plain, secret)

    assert outcomes == ["", "", ""]
    assert records == dict.fromkeys(KEYS[:2], SECRET)
    assert stack.metrics.tier_counts()["far.dropped.TierFullError"] == 1
    release(plain + secret)
    fetched = await stack.fetch(KEYS, (0, 0, 0), arena.lease_nowait)
    assert [bytes(buffer.view) for buffer in fetched.buffers] == [PLAIN] * 3
    release(fetched.buffers)
    await stack.aclose(timeout_s=60)


async def test_a_chunk_that_no_tier_was_given_is_dropped(arena, outside):
    stack = TierStack([outside], write_timeout_s=0, encrypted=True)
    await stack.open(arena)
    plain, secret = filled(arena, PLAIN, 2), filled(arena, SECRET, 1)

    outcomes = await given(arena, stack, KEYS[:2], plain, secret)

    assert outcomes == ["", "TierFullError"]
    release(plain + secret)
    await stack.aclose(timeout_s=60)


async def test_a_plain_record_is_not_let_out(arena, outside, records):
    stack = TierStack([outside], write_timeout_s=0, encrypted=True)
    await stack.open(arena)
    plain = filled(arena, PLAIN, 1)

    for at_rest in (None, plain):  # the second as from a stage between `encrypt` and `write`
        with pytest.raises(ChainError, match=r"encryption is on.*store\.stages"):
            await given(arena, stack, KEYS[:1], plain, at_rest)

    await stack.promote([(KEYS[0], plain[0])], [1])
    assert await stack.flush(timeout_s=30)
    assert records == {}
    release(plain)
    await stack.aclose(timeout_s=60)
