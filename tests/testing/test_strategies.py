"""The strategies generate what they document, and stacks of faulty tiers keep the guarantees of a stack."""

import asyncio

from hypothesis import find, given, settings
from hypothesis import strategies as st

from lmcache_async.device.layout import KVLayout
from lmcache_async.testing import chunk_keys, fault_plans, kv_layouts, payloads, tier_stacks, token_streams
from lmcache_async.testing.fakes import Fault
from lmcache_async.testing.records import allocator, check_record, is_proven, key_of, record, small_arena
from lmcache_async.types import KEY_BYTES


@given(chunk_keys())
def test_a_key_has_sixteen_bytes(key):
    assert len(key) == KEY_BYTES


def test_chunk_keys_include_keys_that_need_escaping():
    wanted = {b"../../etc/passwd", bytes(KEY_BYTES), b"\xff" * KEY_BYTES}

    for key in wanted:
        assert find(chunk_keys(), key.__eq__) == key


@given(token_streams(min_size=3, max_size=9, vocabulary=4))
def test_a_stream_is_within_its_bounds(tokens):
    assert 3 <= len(tokens) <= 9
    assert set(tokens) <= set(range(4))


def test_streams_share_their_beginnings_often():
    shared = []

    @settings(max_examples=100, derandomize=True, database=None)
    @given(token_streams(min_size=12), token_streams(min_size=12))
    def compare(one, other):
        shared.append(one[:8] == other[:8])

    compare()
    assert sum(shared) >= 5


@given(payloads(max_bytes=5000))
def test_a_payload_is_no_longer_than_asked_for(payload):
    assert len(payload) <= 5000


@given(kv_layouts(max_blocks=4))
@settings(max_examples=20, deadline=None)
def test_a_layout_has_rows_of_bytes(layout):
    assert isinstance(layout, KVLayout)
    assert layout.num_rows > 0
    assert layout.payload_bytes(1) == layout.bytes_per_row > 0


@given(fault_plans(kinds=["delay", "flip"], max_size=5, max_delay_s=0.5))
def test_a_plan_has_the_kinds_and_the_size_asked_for(plan):
    assert len(plan.faults) <= 5
    for fault in plan.faults:
        assert fault is None or (isinstance(fault, Fault) and fault.kind in {"delay", "flip"})
        assert fault is None or fault.seconds <= 0.5


@given(data=st.data(), numbers=st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
@settings(max_examples=30, deadline=None)
def test_a_stack_of_faulty_tiers_returns_a_prefix_of_the_written_chunks(data, numbers):
    """Whatever the tiers do: no error, no buffer after a hole, no remaining lease, and proven content is right."""
    stack = data.draw(tier_stacks())
    arena = small_arena(24)

    async def use():
        await stack.open(arena)
        items = [(key_of(number), record(arena, number)) for number in numbers]
        outcomes = []
        await stack.write(items, lambda results, *, shared: outcomes.append(results))
        for _, buffer in items:
            buffer.release()
        assert await stack.flush(timeout_s=30)
        assert [len(results) for results in outcomes] == [len(numbers)] * len(stack.tiers)
        keys = [key for key, _ in items]
        tiers, _ = await stack.plan(keys)
        fetched = await stack.fetch(keys[: len(tiers)], tiers, allocator(arena))
        assert len(fetched.buffers) <= len(tiers) <= len(keys)
        for number, buffer in zip(numbers, fetched.buffers, strict=False):
            with buffer:
                if is_proven(buffer, number):
                    check_record(buffer, number)
        await stack.flush(timeout_s=30)
        assert arena.statistics().leased_slabs == 0
        await stack.aclose(timeout_s=30)

    asyncio.run(use())
    arena.close()
