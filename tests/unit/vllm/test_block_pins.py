from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool

from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.scheduler import BlockPins, StoreQueue


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=20, enable_caching=True, hash_block_size=16)


@pytest.fixture
def pins(pool: BlockPool) -> BlockPins:
    made = BlockPins(0.5)
    made.bind(pool)
    return made


def test_only_unshared_blocks_would_become_free(pool: BlockPool, pins: BlockPins):
    blocks = pool.get_new_blocks(2)
    pins.pin(1, blocks)
    pins.pin(2, blocks[:1])

    assert not pins.would_free()
    pool.free_blocks(blocks)
    assert pins.would_free()


class Holder:
    """A request, or what it was before a preemption. It holds its blocks until it is released."""

    def __init__(self, blocks: list[Any]) -> None:
        self.blocks = blocks
        self.held = True


class SharedBlocks(RuleBasedStateMachine):
    """Requests share prefixes, pin blocks, and end or are preempted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_gpu_blocks=64, enable_caching=True, hash_block_size=16)
        self.pins = BlockPins(1.0)
        self.pins.bind(self.pool)
        self.holders: list[Holder] = []
        self.jobs: dict[int, list[Any]] = {}
        self.next_job = 0

    @rule(shared=st.integers(0, 4), own=st.integers(0, 4), data=st.data())
    def start(self, shared: int, own: int, data: st.DataObject) -> None:
        prefix: list[Any] = []
        if self.holders:
            prefix = data.draw(st.sampled_from(self.holders)).blocks[:shared]
        if own <= self.pool.get_num_free_blocks():
            self.pool.touch(prefix)
            self.holders.append(Holder([*prefix, *self.pool.get_new_blocks(own)]))

    @precondition(lambda self: self.holders)
    @rule(start=st.integers(0, 4), count=st.integers(1, 4), windowed=st.booleans(), data=st.data())
    def pin(self, start: int, count: int, windowed: bool, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.next_job += 1
        blocks = self.jobs[self.next_job] = holder.blocks[start : start + count]
        if windowed:
            self.pins.pin(self.next_job, blocks)
        else:
            self.pins.pin(self.next_job, blocks, lambda: holder.held)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        holder.held = False
        self.pool.free_blocks(reversed(holder.blocks))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        del self.jobs[job]
        self.pins.unpin(job)

    @invariant()
    def blocks_of_stores_alone_would_become_free(self) -> None:
        held = {block.block_id for holder in self.holders for block in holder.blocks}
        pinned = {block.block_id for blocks in self.jobs.values() for block in blocks}
        assert self.pins.would_free() == (not pinned <= held)
        assert self.pool.get_num_free_blocks() == 63 - len(pinned | held)


TestSharedBlocks = SharedBlocks.TestCase


def test_blocks_of_running_requests_are_not_examined(pool: BlockPool, pins: BlockPins):
    """VLLM asks in a loop, and thousands of blocks may be pinned."""

    class Unreadable:
        ref_cnt = 0

        @property
        def block_id(self) -> int:
            raise AssertionError

    pins.pin(1, [Unreadable()], held=lambda: True)

    assert not pins.would_free()


def test_the_end_of_a_prefix_is_freed_so_that_it_is_evicted_first(pool: BlockPool, pins: BlockPins):
    blocks = pool.get_new_blocks(19)
    ids = [block.block_id for block in blocks]
    pins.pin(1, blocks[:3])
    pool.free_blocks(blocks[:3])
    pins.unpin(1)

    assert [block.block_id for block in pool.get_new_blocks(3)] == ids[2::-1]


def queue_of(pins: BlockPins, *groups: KVGroup) -> StoreQueue:
    metrics: Any = SimpleNamespace(skipped=lambda *_: None)
    return StoreQueue(pins, metrics, KVGroups(groups), world_size=1, chunk_size=64)


TRACKER: Any = SimpleNamespace(
    keys=None,
    hands_over=False,
    request_id="long",
    block_table_held=lambda: lambda: True,
    boundary_started=lambda *_: None,
)


def test_a_boundary_without_room_is_counted_and_reported(pool: BlockPool, pins: BlockPins, caplog):
    skipped: list[tuple[str, int]] = []
    metrics: Any = SimpleNamespace(skipped=lambda *args: skipped.append(args))
    groups = (KVGroup(0, 16), KVGroup(1, 16, window=40))
    queue = StoreQueue(pins, metrics, KVGroups(groups), world_size=1, chunk_size=64)
    blocks = pool.get_new_blocks(5)
    pins.pin(1, pool.get_new_blocks(pins.room))

    queue.add_boundary(2, TRACKER, 80, [blocks, blocks], states={}, epoch=0, now=0.0)

    assert skipped == [("blocks", 1)]
    assert "80 tokens of request long are stored without their attention windows or states" in caplog.text


@pytest.mark.parametrize(("first", "stored"), [(0, True), (2, True), (3, False)])
def test_a_boundary_is_stored_only_while_its_whole_window_exists(
    pool: BlockPool, pins: BlockPins, first: int, stored: bool
):
    """Blocks 2 to 4 are needed; vLLM has replaced those before `first` by the null block."""
    groups = (KVGroup(0, 16), KVGroup(1, 16, window=40))
    queue = queue_of(pins, *groups)
    blocks = pool.get_new_blocks(5)
    table = [pool.null_block] * first + blocks[first:]

    queue.add_boundary(1, TRACKER, 80, [blocks, table], states={}, epoch=0, now=0.0)

    assert pins.pinned_blocks == (3 if stored else 0)
