from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from lmcache_async.hashing import ChunkHasher, Extra
from lmcache_async.integration.vllm.groups import KVGroup
from lmcache_async.integration.vllm.keys import PIECE_TOKENS, RequestKeys
from tests.support.request_keys import opened_keys

ROOTS = (b"r" * 16, b"s" * 16, b"r" * 16)


def opened(tokens: list[int], num_prompt: int | None = None, **options: object) -> RequestKeys:
    return opened_keys(tokens, roots=ROOTS, num_prompt=num_prompt, hashed=False, **options)


@given(tokens=st.lists(st.integers(0, 9), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_keys_are_those_of_the_hasher_however_the_request_grows(tokens, cuts):
    chain = opened(tokens)
    for cut in sorted(min(cut, len(tokens)) for cut in cuts):
        chain.extend(cut, lambda: None)
    chain.extend(len(tokens), lambda: None)

    for rank, root in enumerate(ROOTS):
        expected = ChunkHasher(root, chunk_size=8).extend_keys(tokens)
        assert chain.packed_keys(0, len(expected))[rank] == b"".join(expected)
        assert [chain.key(rank, at) for at in range(len(expected))] == expected


@given(prompt=st.integers(0, 40), generated=st.integers(0, 20))
def test_the_tail_is_the_prompt_s_whole_blocks_after_its_last_full_chunk(prompt, generated):
    tokens = list(range(prompt + generated))
    chain = opened(tokens, prompt)

    chain.extend(len(tokens), lambda: None)

    whole_blocks = prompt % 8 - prompt % 2
    if not whole_blocks:
        assert chain.tail is None
    else:
        hasher = ChunkHasher(ROOTS[1], chunk_size=8)
        hasher.extend(tokens[:prompt])
        assert chain.tail is not None
        assert (chain.tail.start, chain.tail.num_tokens) == (prompt - prompt % 8, whole_blocks)
        assert chain.tail.keys[1] == hasher.partials(2)[0].key


def test_hashing_pauses_after_each_piece():
    pauses: list[int] = []
    chain = opened([1] * (2 * PIECE_TOKENS + 1))

    chain.extend(2 * PIECE_TOKENS + 1, lambda: pauses.append(chain.num_hashed))

    assert pauses == [PIECE_TOKENS, 2 * PIECE_TOKENS]


def test_an_image_is_part_of_the_keys_and_its_text_is_kept_by_chunk():
    plain = opened([7] * 24)
    image = opened([7] * 24, extras=(Extra(10, 12, "image"),))
    for chain in (plain, image):
        chain.extend(24, lambda: None)

    assert plain.key(0, 0) == image.key(0, 0)
    assert plain.key(0, 1) != image.key(0, 1)
    assert set(image.texts_of(0, 3)) == {1}
    assert set(image.texts_of(1, 3)) == {0}


def test_the_candidates_at_a_missing_chunk_include_the_tail_of_a_shorter_prompt():
    longer, shorter = opened(list(range(30))), opened(list(range(14)))
    for chain in (longer, shorter):
        chain.extend(len(chain.source), lambda: None)

    assert shorter.tail is not None
    for rank in range(3):
        keys = [chunk.key for chunk in longer.hole_candidates(1)[rank]]
        assert shorter.tail.keys[rank] in keys
        assert len(keys) == 3


WINDOW, LOCAL = KVGroup(1, 2, window=6), KVGroup(2, 2, local=16)


def grouped(tokens: list[int], **options: object) -> RequestKeys:
    return opened_keys(tokens, roots=ROOTS, groups=(KVGroup(0, 2), WINDOW, LOCAL), **options)


@given(boundary=st.integers(1, 30).map(lambda blocks: 2 * blocks))
def test_a_group_needs_its_window_or_its_attention_chunk(boundary):
    assert WINDOW.first_needed(boundary) == max(0, boundary - 6)  # five tokens, in three blocks
    assert LOCAL.first_needed(boundary) == boundary // 16 * 16
    assert KVGroup(0, 2).first_needed(boundary) == 0


@given(
    tokens=st.lists(st.integers(0, 2), min_size=40, max_size=60),
    others=st.lists(st.integers(0, 2), min_size=40, max_size=60),
    boundary=st.integers(1, 20).map(lambda blocks: 2 * blocks),
)
def test_boundary_keys_are_equal_exactly_for_equal_tokens_before_the_boundary(tokens, others, boundary):
    ours, theirs = grouped(tokens), grouped(others)

    for group in (WINDOW, LOCAL):
        same = tokens[:boundary] == others[:boundary]
        if group.first_needed(boundary) < boundary:
            assert (ours.boundary_keys(group, boundary) == theirs.boundary_keys(group, boundary)) == same


def test_boundary_keys_are_those_of_one_rank_one_group_and_one_position():
    chain = grouped(list(range(48)))
    keys = [chain.boundary_keys(group, at) for group in (WINDOW, LOCAL) for at in (12, 14, 24)]

    twin = KVGroup(0, 2, window=WINDOW.window)  # the same tokens in another namespace
    keys.append(chain.boundary_keys(twin, 24))

    flat = [each[at : at + 16] for ranks in keys for each in ranks[:2] for at in range(0, len(each), 16)]
    assert len(set(flat)) == len(flat)
    assert all(ranks[0] == ranks[2] for ranks in keys)  # these ranks have the same root
    assert [len(each) // 16 for each in chain.boundary_keys(LOCAL, 30)] == [2, 2, 2]
    assert chain.boundary_keys(LOCAL, 32) == (b"", b"", b"")  # an attention chunk begins there


def test_chunk_keys_are_those_of_one_group_and_of_all_tokens_before():
    groups, first, second = (KVGroup(1, 2), KVGroup(2, 2)), grouped([7] * 32), grouped([8] + [7] * 31)
    keys = [chain.chunk_keys(group, chain.packed_keys(0, 4)) for chain in (first, second) for group in groups]
    leading = [chain.packed_keys(0, 4) for chain in (first, second)]

    flat = [
        each[at : at + 16] for ranks in [*keys, *leading] for each in ranks[:2] for at in range(0, 64, 16)
    ]
    assert len(set(flat)) == 2 * 3 * 2 * 4  # requests, groups, roots, chunks
    assert all(ranks[0] == ranks[2] for ranks in keys)  # these ranks have the same root
    assert first.chunk_keys(groups[0], first.packed_keys(1, 2)) == tuple(each[16:32] for each in keys[0])


def test_an_image_before_the_boundary_is_part_of_its_keys():
    plain, image = grouped([7] * 40), grouped([7] * 40, extras=(Extra(2, 4, "image"),))

    assert plain.boundary_keys(WINDOW, 30) != image.boundary_keys(WINDOW, 30)
