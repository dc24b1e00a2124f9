"""Hits of models with several KV groups, compared with vLLM's own rules for what a request can use."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from lmcache_async.integration.vllm.groups import KVGroup, block_size_of, full_groups
from lmcache_async.integration.vllm.keys import RequestKeys
from lmcache_async.integration.vllm.load_policy import Costs, pack_costs
from lmcache_async.integration.vllm.lookup import Answer, Lookup, Query
from lmcache_async.integration.vllm.lookup_server import PROTOCOL, Identity, unpack_counts, unpack_keys

BLOCK, CHUNK = 2, 8
SHAPE = {"num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}


class Rank:
    """Answers lookups from a set of keys.

    Attributes:
        messages: Number of messages so far.
    """

    def __init__(self, costs: Costs = ()) -> None:
        self.stored: set[bytes] = set()
        self.costs = pack_costs(costs)
        self.messages = 0

    async def call(self, message: dict[str, object]) -> dict[str, object]:
        self.messages += 1
        if message["op"] == "first":
            return {"first": self._first(message["keys"], message["counts"]), "first_pinned": False}
        keys, tail = unpack_keys(message["keys"]), unpack_keys(message["tail"])  # type: ignore[arg-type]
        count = next((at for at, key in enumerate(keys) if key not in self.stored), len(keys))
        first = boundary = -1
        if count == len(keys):
            first = next((at for at, key in enumerate(tail) if key in self.stored), -1)
            boundary = self._first(message.get("boundary_keys", b""), message.get("boundary_counts", b""))
        return {
            "count": count,
            "pinned": 0,
            "tiers": {},
            "costs": self.costs,
            "first": first,
            "first_pinned": False,
            "boundary": boundary,
            "boundary_pinned": False,
        }

    def _first(self, packed: object, counts: object) -> int:
        keys, start = unpack_keys(packed), 0  # type: ignore[arg-type]
        for position, count in enumerate(unpack_counts(counts)):  # type: ignore[arg-type]
            if self.stored.issuperset(keys[start : start + count]):
                return position
            start += count
        return -1


def spec_of(group: KVGroup) -> KVCacheGroupSpec:
    shape = {"block_size": group.block_size, **SHAPE}
    if group.window:
        spec = SlidingWindowSpec(**shape, sliding_window=group.window)
    elif group.state:
        spec = MambaSpec(
            block_size=group.block_size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    elif group.local:
        spec = ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.local)
    else:
        spec = FullAttentionSpec(**shape)
    return KVCacheGroupSpec([f"layer.{group.index}"], spec)


def opened_keys(groups: list[KVGroup], num_tokens: int) -> RequestKeys:
    """The keys of a request of these many tokens."""
    keys = RequestKeys("r", list(range(num_tokens)), num_tokens)
    identity = Identity(PROTOCOL, b"r" * 16, "xxh3_128", CHUNK, block_size_of(groups))
    keys.open([b"r" * 16], identity, "", group_roots=[[bytes([group.index]) * 16 for group in groups]])
    keys.extend(num_tokens, lambda: None)
    return keys


def blocks_of(group: KVGroup, start: int, stop: int) -> set[tuple[int, bytes]]:
    """Names in vLLM's cache of the blocks of a group with these tokens."""
    return {
        (group.index, (end // BLOCK - 1).to_bytes(4, "big"))
        for end in range(start + group.block_size, stop + 1, group.block_size)
    }


def store_chunks(rank: Rank, keys: RequestKeys, groups: list[KVGroup], counts: list[int]) -> None:
    """Store these numbers of chunks in the groups of full attention."""
    for position, (group, count) in enumerate(zip(full_groups(groups), counts, strict=True)):
        packed = keys.packed_keys(0, count)
        rank.stored.update(unpack_keys((keys.chunk_keys(group, packed) if position else packed)[0]))


def find(rank: Rank, keys: RequestKeys, groups: list[KVGroup]) -> Answer:
    query = Query([rank], groups)  # type: ignore[list-item]
    lookup = Lookup("r", keys.num_prompt_tokens, 0, 0.0)
    return asyncio.run(query(keys, lookup, keys.end_candidates()))


def usable(groups: list[KVGroup], num_tokens: int, stored: set[tuple[int, bytes]]) -> int:
    """The longest hit of vLLM's own manager classes, of which one token is left to compute."""
    coordinator = MooncakeStoreCoordinator([spec_of(group) for group in groups], block_size_of(groups), BLOCK)
    hashes = [number.to_bytes(4, "big") for number in range(num_tokens // BLOCK)]
    _, hit = coordinator.find_longest_cache_hit(
        hashes, num_tokens - 1, ExternalCachedBlockPool(BLOCK, stored)
    )
    return hit


KINDS = st.sampled_from(["full", "window", "local", "state"])


@st.composite
def models(draw: st.DrawFn) -> list[KVGroup]:
    kinds = draw(st.permutations(["full", *draw(st.lists(KINDS, max_size=3))]))
    sizes = (
        [BLOCK] if "local" in kinds else [BLOCK, 2 * BLOCK]
    )  # vLLM: one size beside chunked local attention
    groups = []
    for index, kind in enumerate(kinds):
        match kind:
            case "full":
                groups.append(KVGroup(index, draw(st.sampled_from(sizes))))
            case "window":
                groups.append(KVGroup(index, BLOCK, window=draw(st.integers(2, 30))))
            case "local":
                groups.append(KVGroup(index, BLOCK, local=BLOCK * draw(st.integers(1, 12))))
            case _:
                groups.append(KVGroup(index, BLOCK, state="GDN"))
    return groups


@given(
    groups=models(),
    num_tokens=st.integers(1, 60),
    data=st.data(),
)
def test_vllm_can_use_every_hit_and_has_no_longer_one(groups, num_tokens, data):
    rank, keys, unit = Rank(), opened_keys(groups, num_tokens), block_size_of(groups)
    full, other = full_groups(groups), [group for group in groups if not group.is_full]
    counts = [data.draw(st.integers(0, num_tokens // CHUNK)) for _ in full]
    boundaries = data.draw(st.lists(st.integers(1, 30).map(lambda units: unit * units), max_size=3))
    boundaries = [each for each in boundaries if each <= num_tokens]
    store_chunks(rank, keys, groups, counts)
    theirs = set()
    for group, count in zip(full, counts, strict=True):
        theirs |= blocks_of(group, 0, count * CHUNK)
    for boundary in boundaries:
        for group in other:
            rank.stored.update(unpack_keys(keys.boundary_keys(group, boundary)[0]))
            theirs |= blocks_of(group, group.first_needed(boundary), boundary)

    hit = find(rank, keys, groups).hit_tokens(CHUNK)

    usable_tokens = (num_tokens - 1) // unit * unit
    longest = min(usable_tokens, hit)  # one token is left to compute
    assert longest <= usable(groups, num_tokens, theirs)
    if longest:
        assert usable(groups, longest + 1, theirs) == longest
    stored = min(counts) * CHUNK
    expected = [each for each in boundaries if each <= min(stored, num_tokens - 1)]
    assert longest >= (max(expected, default=0) if other else min(stored, usable_tokens))


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_hit_ends_before_the_first_chunk_that_a_group_of_full_attention_lacks(lacking: int) -> None:
    groups = [KVGroup(0, BLOCK), KVGroup(1, 2 * BLOCK), KVGroup(2, BLOCK)]
    rank, keys = Rank(), opened_keys(groups, 5 * CHUNK)
    store_chunks(rank, keys, groups, [2 if group.index == lacking else 5 for group in groups])

    answer = find(rank, keys, groups)

    assert (answer.chunks, answer.partial_tokens, answer.resident) == (2, 0, False)
    assert answer.hit_tokens(CHUNK) == 2 * CHUNK


@pytest.mark.parametrize("num_tokens", [2 * CHUNK + BLOCK, 4 * CHUNK], ids=["same prompt", "longer prompt"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_partial_chunk_is_a_hit_if_every_group_of_full_attention_has_it(
    num_tokens: int, complete: bool
) -> None:
    groups = [KVGroup(0, BLOCK), KVGroup(1, BLOCK)]
    rank, keys, stored = Rank(), opened_keys(groups, num_tokens), opened_keys(groups, 2 * CHUNK + BLOCK)
    assert stored.tail is not None
    store_chunks(rank, keys, groups, [2, 2])
    rank.stored.update(stored.tail.keys)
    if complete:
        rank.stored.update(stored.chunk_keys(groups[1], stored.tail.keys))

    answer = find(rank, keys, groups)

    assert (answer.chunks, answer.partial_tokens) == (2, BLOCK if complete else 0)


def test_costs_of_records_are_those_of_their_chunks() -> None:
    groups = [KVGroup(0, BLOCK), KVGroup(1, BLOCK)]
    rank, keys = Rank(costs=((3, 1.0), (6, 4.0))), opened_keys(groups, 3 * CHUNK)
    store_chunks(rank, keys, groups, [3, 3])

    assert find(rank, keys, groups).costs == ((1, 1.0), (3, 4.0))


@pytest.mark.parametrize("with_full", [True, False], ids=["beside full attention", "in all layers"])
def test_a_longer_prompt_continues_where_a_shorter_one_ended_inside_of_a_chunk(with_full: bool) -> None:
    """Also if another prompt has stored the chunks after that place."""
    window = KVGroup(int(with_full), BLOCK, window=5)
    groups = [KVGroup(0, BLOCK), window] if with_full else [window]
    rank, keys = Rank(), opened_keys(groups, 100)
    store_chunks(rank, keys, groups, [10] * with_full)
    rank.stored.update(unpack_keys(keys.boundary_keys(window, 4 * CHUNK + BLOCK)[0]))

    assert find(rank, keys, groups).hit_tokens(CHUNK) == 4 * CHUNK + BLOCK


def test_a_hit_of_the_whole_prompt_takes_one_message() -> None:
    groups = [KVGroup(0, BLOCK), KVGroup(1, BLOCK, window=9), KVGroup(2, BLOCK, state="GDN")]
    rank, keys = Rank(), opened_keys(groups, 5 * CHUNK + 1)
    store_chunks(rank, keys, groups, [5])
    for group in groups[1:]:
        rank.stored.update(unpack_keys(keys.boundary_keys(group, 5 * CHUNK)[0]))

    assert find(rank, keys, groups).hit_tokens(CHUNK) == 5 * CHUNK
    assert rank.messages == 1


def test_a_boundary_after_the_stored_prefix_is_no_hit() -> None:
    """The partial chunk at the end was evicted, and the window before it was not."""
    groups = [KVGroup(0, BLOCK), KVGroup(1, BLOCK, window=9)]
    rank, keys = Rank(), opened_keys(groups, 5 * CHUNK + 2 * BLOCK + 1)
    store_chunks(rank, keys, groups, [5])
    for boundary in (5 * CHUNK + 2 * BLOCK, 4 * CHUNK):
        rank.stored.update(unpack_keys(keys.boundary_keys(groups[1], boundary)[0]))

    assert find(rank, keys, groups).hit_tokens(CHUNK) == 4 * CHUNK
