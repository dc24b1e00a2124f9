"""Hits of models with several KV groups, compared with vLLM's own rules for usable blocks."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
)

from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.keys import RequestKeys
from lmcache_async.integration.vllm.lookup import Answer, Lookup, Query
from lmcache_async.integration.vllm.lookup_server import unpack_keys
from tests.support.request_keys import BLOCK, CHUNK, Rank, opened_keys
from tests.support.vllm_simulator import spec_of

ROOT = b"r" * 16


def blocks_of(group: KVGroup, start: int, stop: int) -> set[tuple[int, bytes]]:
    """Return the names in vLLM's cache of the blocks of a group with these tokens."""
    return {
        (group.index, (end // BLOCK - 1).to_bytes(4, "big"))
        for end in range(start + group.block_size, stop + 1, group.block_size)
    }


def find(keys: RequestKeys, groups: list[KVGroup], *ranks: Rank) -> Answer:
    query = Query(ranks, KVGroups(groups))  # type: ignore[arg-type]
    lookup = Lookup("r", keys.num_prompt_tokens, 0, 0.0)
    return asyncio.run(query(keys, lookup, keys.end_candidates()))


def usable(groups: list[KVGroup], num_tokens: int, stored: set[tuple[int, bytes]]) -> int:
    """Return the longest hit by vLLM's own manager classes, with one token left to compute."""
    coordinator = MooncakeStoreCoordinator(
        [KVCacheGroupSpec([f"layer.{group.index}"], spec_of(group)) for group in groups],
        KVGroups(groups).block_size,
        BLOCK,
    )
    hashes = [number.to_bytes(4, "big") for number in range(num_tokens // BLOCK)]
    _, hit = coordinator.find_longest_cache_hit(
        hashes, num_tokens - 1, ExternalCachedBlockPool(BLOCK, stored)
    )
    return hit


KINDS = st.sampled_from(["full", "window", "local", "state"])


@st.composite
def models(draw: st.DrawFn) -> list[KVGroup]:
    """One to four groups of any kind, with blocks of one or two sizes."""
    kinds = draw(st.lists(KINDS, min_size=1, max_size=4))
    # VLLM has one block size with chunked local attention.
    sizes = st.sampled_from([BLOCK] if "local" in kinds else [BLOCK, 2 * BLOCK])
    groups = []
    for index, kind in enumerate(kinds):
        match kind:
            case "full":
                own = {}
            case "window":
                own = {"window": draw(st.integers(2, 30))}
            case "local":
                own = {"local": BLOCK * draw(st.integers(1, 12))}
            case _:
                own = {"state": "GDN"}
        groups.append(KVGroup(index, draw(sizes), **own))
    return groups


def records_at(keys: RequestKeys, group: KVGroup, boundary: int) -> dict[bytes, set[tuple[int, bytes]]]:
    """Return the records of a group for one boundary, and the blocks in each of them."""
    starts = range(group.first_needed(boundary), boundary, CHUNK)
    spans = [(start, min(start + CHUNK, boundary)) for start in starts]
    names = unpack_keys(keys.boundary_keys(group, boundary)[0])
    return {name: blocks_of(group, *span) for name, span in zip(names, spans, strict=True)}


def records_of_prompt(groups: list[KVGroup], num_tokens: int) -> dict[bytes, set[tuple[int, bytes]]]:
    """Return the records of a prompt in the groups of full attention, and the blocks in each of them.

    The last one may be a partial chunk.
    """
    keys = opened_keys(range(num_tokens), roots=[ROOT], groups=groups)
    count, found = num_tokens // CHUNK, {}
    spans = [(chunk * CHUNK, (chunk + 1) * CHUNK) for chunk in range(count)]
    leading = keys.packed_keys(0, count)
    if keys.tail is not None:
        spans.append((keys.tail.start, keys.tail.start + keys.tail.num_tokens))
        leading = (leading[0] + keys.tail.keys[0],)
    for position, group in enumerate(KVGroups(groups).full):
        names = unpack_keys((keys.chunk_keys(group, leading) if position else leading)[0])
        found |= {name: blocks_of(group, *span) for name, span in zip(names, spans, strict=True)}
    return found


@given(groups=models(), num_tokens=st.integers(1, 60), data=st.data())
def test_a_hit_equals_that_of_vllms_coordinator_for_the_stored_records(groups, num_tokens, data):
    """A prompt of the same tokens was stored, and the other groups at up to three boundaries. Any record may be evicted.

    For each position the coordinator says whether a request can continue there with the chunks and the records for this
    position. Records for two positions are not combined.
    """
    keys, unit = opened_keys(range(num_tokens), roots=[ROOT] * 2, groups=groups), KVGroups(groups).block_size
    earlier = data.draw(st.integers(0, num_tokens).map(lambda less: num_tokens - less), label="stored tokens")
    positions = [*range(num_tokens - num_tokens % unit, 0, -unit)]
    boundaries = data.draw(st.sets(st.sampled_from(positions), max_size=3) if positions else st.just(set()))
    stored = records_of_prompt(groups, earlier)
    at_boundary: dict[int, list[bytes]] = {}
    for boundary in boundaries:
        for group in groups:
            if not group.is_full:
                stored |= (records := records_at(keys, group, boundary))
                at_boundary.setdefault(boundary, []).extend(records)
    chunks = stored.keys() - {name for names in at_boundary.values() for name in names}
    ranks = [Rank(), Rank()]
    for rank in ranks:
        bounded = sorted(stored.keys() - chunks)
        records = [st.sampled_from(names) for names in (sorted(chunks), bounded) if names]
        evicted = data.draw(st.sets(st.one_of(records), max_size=2)) if records else set()
        rank.stored = stored.keys() - evicted
    held = ranks[0].stored & ranks[1].stored

    hit = min(find(keys, groups, *ranks).hit_tokens(CHUNK), (num_tokens - 1) // unit * unit)

    def can_continue(position: int) -> bool:
        names = held & {*chunks, *at_boundary.get(position, [])}
        blocks = set().union(*(stored[name] for name in names))
        return usable(groups, position + 1, blocks) == position

    assert hit == max(filter(can_continue, range(unit, num_tokens, unit)), default=0)
    assert hit <= usable(groups, num_tokens, set().union(*(stored[name] for name in held)))


@pytest.mark.parametrize("num_tokens", [2 * CHUNK + BLOCK, 4 * CHUNK], ids=["same prompt", "longer prompt"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_partial_chunk_is_a_hit_if_every_group_of_full_attention_has_it(
    num_tokens: int, complete: bool
) -> None:
    groups = [KVGroup(0, BLOCK), KVGroup(1, BLOCK)]
    rank, keys = Rank(), opened_keys(range(num_tokens), roots=[ROOT], groups=groups)
    *others, partial_of_second_group = records_of_prompt(groups, 2 * CHUNK + BLOCK)
    rank.stored.update([*others, partial_of_second_group] if complete else others)

    answer = find(keys, groups, rank)

    assert (answer.chunks, answer.partial_tokens) == (2, BLOCK if complete else 0)


def test_costs_of_records_are_those_of_their_chunks() -> None:
    groups = [KVGroup(0, BLOCK), KVGroup(1, BLOCK)]
    rank, keys = Rank(costs=((3, 1.0), (6, 4.0))), opened_keys(range(3 * CHUNK), roots=[ROOT], groups=groups)
    rank.stored.update(records_of_prompt(groups, 3 * CHUNK))

    assert find(keys, groups, rank).costs == ((1, 1.0), (3, 4.0))


def test_a_hit_of_the_whole_prompt_takes_one_message() -> None:
    groups = [KVGroup(0, BLOCK), KVGroup(1, BLOCK, window=9), KVGroup(2, BLOCK, state="GDN")]
    rank, keys = Rank(), opened_keys(range(5 * CHUNK + 1), roots=[ROOT], groups=groups)
    rank.stored.update(records_of_prompt(groups, 5 * CHUNK))
    for group in groups[1:]:
        rank.stored.update(unpack_keys(keys.boundary_keys(group, 5 * CHUNK)[0]))

    assert find(keys, groups, rank).hit_tokens(CHUNK) == 5 * CHUNK
    assert rank.messages == 1


def test_a_boundary_after_the_stored_prefix_is_no_hit() -> None:
    """The partial chunk at the end was evicted, and the window before it was not."""
    groups = [KVGroup(0, BLOCK), KVGroup(1, BLOCK, window=9)]
    rank, keys = Rank(), opened_keys(range(5 * CHUNK + 2 * BLOCK + 1), roots=[ROOT], groups=groups)
    rank.stored.update(records_of_prompt(groups, 5 * CHUNK))
    for boundary in (5 * CHUNK + 2 * BLOCK, 4 * CHUNK):
        rank.stored.update(unpack_keys(keys.boundary_keys(groups[1], boundary)[0]))

    assert find(keys, groups, rank).hit_tokens(CHUNK) == 4 * CHUNK
