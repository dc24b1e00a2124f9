from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from lmcache_async.hashing import ChunkHasher, Extra
from lmcache_async.integration.vllm.keys import PIECE_TOKENS, RequestKeys
from lmcache_async.integration.vllm.lookup_server import Identity

IDENTITY = Identity(1, b"r" * 16, "xxh3_128", 8, 2)
ROOTS = (b"r" * 16, b"s" * 16, b"r" * 16)


def opened(tokens: list[int], num_prompt: int | None = None, **options: object) -> RequestKeys:
    chain = RequestKeys("r", tokens, len(tokens) if num_prompt is None else num_prompt, **options)  # type: ignore[arg-type]
    chain.open(ROOTS, IDENTITY, "")
    return chain


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


def test_the_other_thread_gets_a_turn_after_each_piece():
    pauses: list[int] = []
    chain = opened([1] * (2 * PIECE_TOKENS + 1))

    chain.extend(2 * PIECE_TOKENS + 1, lambda: pauses.append(chain.num_hashed))

    assert pauses == [PIECE_TOKENS, 2 * PIECE_TOKENS, 2 * PIECE_TOKENS + 1]


def test_keys_are_there_before_they_are_counted():
    chain = opened(list(range(5000)))

    chain.extend(5000, lambda: None)

    assert len(chain.keys[0]) // 16 == chain.num_hashed // 8
    assert np.frombuffer(chain.packed_tokens(0, 5000), np.int32).tolist() == list(range(5000))


def test_an_image_is_part_of_the_keys_and_its_text_is_kept_by_chunk():
    plain = opened([7] * 24)
    image = opened([7] * 24, extras=(Extra(10, 12, "image"),))
    for chain in (plain, image):
        chain.extend(24, lambda: None)

    assert plain.key(0, 0) == image.key(0, 0)
    assert plain.key(0, 1) != image.key(0, 1)
    assert set(image.texts_of(0, 3)) == {1}
    assert set(image.texts_of(1, 3)) == {0}


def test_the_candidates_at_a_hole_are_what_a_shorter_prompt_stored_there():
    longer, shorter = opened(list(range(30))), opened(list(range(14)))
    for chain in (longer, shorter):
        chain.extend(len(chain.source), lambda: None)

    assert shorter.tail is not None
    for rank in range(3):
        keys = [chunk.key for chunk in longer.hole_candidates(1)[rank]]
        assert shorter.tail.keys[rank] in keys
        assert len(keys) == 3
