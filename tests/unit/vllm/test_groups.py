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

from lmcache_async.integration.vllm.groups import KVGroup
from lmcache_async.integration.vllm.keys import RequestKeys
from lmcache_async.integration.vllm.lookup import Lookup, Query
from lmcache_async.integration.vllm.lookup_server import PROTOCOL, Identity, unpack_counts, unpack_keys

BLOCK, CHUNK = 2, 8
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}


class Rank:
    """Answers lookups from a set of keys."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()

    async def call(self, message: dict[str, object]) -> dict[str, object]:
        keys = unpack_keys(message["keys"])  # type: ignore[arg-type]
        if message["op"] == "first":
            start = 0
            for position, count in enumerate(unpack_counts(message["counts"])):  # type: ignore[arg-type]
                if self.stored.issuperset(keys[start : start + count]):
                    return {"first": position, "first_pinned": False}
                start += count
            return {"first": -1, "first_pinned": False}
        tail = unpack_keys(message["tail"])  # type: ignore[arg-type]
        first = next((at for at, key in enumerate(tail) if key in self.stored), -1)
        found = {"first": first, "first_pinned": False}
        count = next((at for at, key in enumerate(keys) if key not in self.stored), len(keys))
        return found | {"count": count, "pinned": 0, "tiers": {}, "costs": b""}


def spec_of(group: KVGroup) -> KVCacheGroupSpec:
    if group.window:
        spec = SlidingWindowSpec(**SHAPE, sliding_window=group.window)
    elif group.state:
        spec = MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    elif group.local:
        spec = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=group.local)
    else:
        spec = FullAttentionSpec(**SHAPE)
    return KVCacheGroupSpec([f"layer.{group.index}"], spec)


def opened_keys(groups: list[KVGroup], num_tokens: int) -> RequestKeys:
    """The keys of a request of these many tokens."""
    keys = RequestKeys("r", list(range(num_tokens)), num_tokens)
    identity = Identity(PROTOCOL, b"r" * 16, "xxh3_128", CHUNK, BLOCK)
    keys.open([b"r" * 16], identity, "", group_roots=[[bytes([group.index]) * 16 for group in groups]])
    keys.extend(num_tokens, lambda: None)
    return keys


def usable(groups: list[KVGroup], num_tokens: int, stored: set[tuple[int, bytes]]) -> int:
    """The longest hit of vLLM's own manager classes, of which one token is left to compute."""
    coordinator = MooncakeStoreCoordinator([spec_of(group) for group in groups], BLOCK, BLOCK)
    hashes = [number.to_bytes(4, "big") for number in range(num_tokens // BLOCK)]
    _, hit = coordinator.find_longest_cache_hit(
        hashes, num_tokens - 1, ExternalCachedBlockPool(BLOCK, stored)
    )
    return hit


@st.composite
def models(draw: st.DrawFn) -> list[KVGroup]:
    groups = [KVGroup(0, BLOCK)]
    for index in range(1, draw(st.integers(2, 3))):
        match draw(st.sampled_from(["window", "local", "state"])):
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
    full_chunks=st.integers(0, 7),
    boundaries=st.lists(st.integers(1, 30).map(lambda blocks: BLOCK * blocks), max_size=3, unique=True),
)
def test_vllm_can_use_every_hit_and_has_no_longer_one(groups, num_tokens, full_chunks, boundaries):
    rank, keys = Rank(), opened_keys(groups, num_tokens)
    full_chunks = min(full_chunks, num_tokens // CHUNK)
    boundaries = [each for each in boundaries if each <= num_tokens]
    rank.stored.update(keys.key(0, chunk) for chunk in range(full_chunks))
    theirs = {(0, block.to_bytes(4, "big")) for block in range(full_chunks * CHUNK // BLOCK)}
    for boundary in boundaries:
        for group in groups[1:]:
            packed = keys.boundary_keys(group, boundary)[0]
            rank.stored.update(packed[at : at + 16] for at in range(0, len(packed), 16))
            blocks = range(group.first_needed(boundary) // BLOCK, boundary // BLOCK)
            theirs.update((group.index, block.to_bytes(4, "big")) for block in blocks)

    query = Query([rank], groups)  # type: ignore[list-item]
    answer = asyncio.run(query(keys, Lookup("r", num_tokens, 0, 0.0), [keys.end_candidates()[0]]))
    hit = answer.hit_tokens(CHUNK)

    assert hit <= usable(groups, num_tokens, theirs)
    if hit:
        assert usable(groups, hit + 1, theirs) == hit
    expected = [each for each in boundaries if each <= min(full_chunks * CHUNK, num_tokens - 1)]
    assert hit >= max(expected, default=0)


@pytest.mark.parametrize("with_full", [True, False], ids=["beside full attention", "in all layers"])
def test_a_longer_prompt_continues_where_a_shorter_one_ended_inside_of_a_chunk(with_full: bool) -> None:
    """Also if another prompt has stored the chunks after that place."""
    window = KVGroup(int(with_full), BLOCK, window=5)
    groups = [KVGroup(0, BLOCK), window] if with_full else [window]
    rank, keys = Rank(), opened_keys(groups, 100)
    rank.stored.update(keys.key(0, chunk) for chunk in range(10 * with_full))
    rank.stored.update(unpack_keys(keys.boundary_keys(window, 4 * CHUNK + BLOCK)[0]))

    query = Query([rank], groups)  # type: ignore[list-item]
    answer = asyncio.run(query(keys, Lookup("r", 100, 0, 0.0), [keys.end_candidates()[0]]))

    assert answer.hit_tokens(CHUNK) == 4 * CHUNK + BLOCK
