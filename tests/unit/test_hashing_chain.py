"""Keys: equal exactly for equal prefixes, independent of the form of the tokens, in a stable format."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import ConfigError
from lmcache_async.hashing import (
    ChunkHasher,
    Extra,
    digest_function,
    packed_keys,
    partial_candidates,
)

ROOT = b"0123456789abcdef"
SIZE = 4
tokens = st.lists(st.integers(0, 3), max_size=30)
extras = st.lists(
    st.builds(
        lambda start, length, text: Extra(start, start + length, text),
        st.integers(0, 25),
        st.integers(1, 12),
        st.sampled_from(["cat", "dog"]),
    ),
    max_size=4,
)


def hasher(**options):
    return ChunkHasher(ROOT, **{"chunk_size": SIZE, **options})


def common_prefix(one, other):
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def plain(chunks):
    return [(chunk.key, chunk.start, chunk.tokens.tolist(), chunk.extra) for chunk in chunks]


@given(tokens, extras, st.lists(st.integers(0, 30)))
def test_any_split_of_the_tokens_gives_the_same_chunks(ids, spans, cuts):
    whole, parts = hasher(extras=spans), hasher(extras=spans)
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    expected = whole.extend(ids)

    chunks = [c for a, b in itertools.pairwise(borders) for c in parts.extend(ids[a:b])]

    assert plain(chunks) == plain(expected)
    assert parts.tail() is None if whole.tail() is None else plain([parts.tail()]) == plain([whole.tail()])
    assert (parts.parent, parts.num_tokens) == (whole.parent, whole.num_tokens)


@given(tokens, tokens, tokens)
def test_leading_keys_are_equal_exactly_as_far_as_the_tokens_are(shared, one, other):
    one, other = shared + one, shared + other

    keys = [hasher().extend_keys(ids) for ids in (one, other)]

    expected = min(common_prefix(one, other) // SIZE, *map(len, keys))
    assert common_prefix(*keys) == expected
    assert not set(keys[0][expected:]) & set(keys[1][expected:])


@given(tokens, extras)
def test_chunks_cover_the_tokens_in_order(ids, spans):
    one = hasher(extras=spans)

    chunks = one.extend(ids)
    tail = one.tail()

    covered = [*chunks, *([tail] if tail else [])]
    assert [t for chunk in covered for t in chunk.tokens.tolist()] == ids
    assert [chunk.start for chunk in covered] == list(range(0, len(ids), SIZE))
    assert one.num_tokens == len(ids)
    assert one.parent == (chunks[-1].key if chunks else ROOT)
    assert [chunk.key for chunk in chunks] == hasher(extras=spans).extend_keys(ids)


@given(tokens, extras, extras)
def test_extras_change_the_keys_from_the_first_chunk_that_they_reach(ids, one, other):
    both = [hasher(extras=spans) for spans in (one, other)]
    chunks = [each.extend(ids) for each in both]

    def reaching(spans, chunk):
        return sorted(span for span in spans if span.start < chunk.stop and span.stop > chunk.start)

    differs = [reaching(one, chunk) != reaching(other, chunk) for chunk in chunks[0]]
    expected = differs.index(True) if True in differs else len(differs)
    assert common_prefix(*([chunk.key for chunk in each] for each in chunks)) == expected


@pytest.mark.parametrize(
    ("spans", "texts"),
    [
        (
            [Extra(9, 10, "cat"), Extra(1, 6, "cat")],
            ['[[1,6,"cat"]]', '[[-3,2,"cat"]]', '[[1,2,"cat"]]'],
        ),
        (
            [Extra(0, 7, "cat"), Extra(1, 4, "dog"), Extra(6, 8, "elk")],
            ['[[0,7,"cat"],[1,4,"dog"]]', '[[-4,3,"cat"],[2,4,"elk"]]', ""],
        ),
    ],
)
def test_a_chunk_has_the_images_that_reach_it_relative_to_its_start(spans, texts):
    one = hasher(extras=spans)

    assert [chunk.extra for chunk in (*one.extend([7] * 11), one.tail())] == texts


@given(tokens.filter(bool), tokens)
def test_the_key_of_a_partial_chunk_is_never_that_of_a_full_one(head, ids):
    ids = head + ids
    one = hasher()
    full = one.extend_keys(ids)
    shorter = [ChunkHasher(ROOT, chunk_size=n).extend_keys(ids[:n])[:1] for n in range(1, SIZE)]

    for at in range(0, len(ids), SIZE):
        parent = ROOT if at == 0 else full[at // SIZE - 1]
        partials = partial_candidates(parent, ids[at:], start=at, unit=1, chunk_size=SIZE)
        assert not {chunk.key for chunk in partials} & set(full)
        assert not {(chunk.key,) for chunk in partials} & {tuple(keys) for keys in shorter}


@given(tokens, extras, st.integers(1, 5))
def test_partials_are_the_leading_multiples_of_the_unit_longest_first(ids, spans, unit):
    one = hasher(extras=spans)
    one.extend(ids)
    tail = ids[len(ids) - len(ids) % SIZE :]

    partials = one.partials(unit)

    assert [chunk.tokens.tolist() for chunk in partials] == [
        tail[:n] for n in range(len(tail), 0, -1) if n % unit == 0
    ]
    for chunk in partials:
        shorter = hasher(extras=spans)
        shorter.extend(ids[: chunk.stop])
        assert plain([chunk]) == plain([shorter.tail()])


@given(tokens, extras, st.integers(1, 4))
def test_candidates_at_a_missing_chunk_include_the_tail_of_a_request_that_ended_there(ids, spans, unit):
    keys = hasher(extras=spans).extend_keys(ids)
    for hole in range(len(keys) + 1):
        start = hole * SIZE
        ended = hasher(extras=spans)
        ended.extend(ids[: start + SIZE - 1])

        found = partial_candidates(
            keys[hole - 1] if hole else ROOT,
            ids[start:],
            start=start,
            unit=unit,
            chunk_size=SIZE,
            extras=spans,
        )

        assert plain(found) == plain(ended.partials(unit))


@given(tokens, st.sampled_from([("xxh3_128", b""), ("sha256", b"k" * 32)]))
def test_packed_keys_are_those_of_the_chunks(ids, hashing):
    options = {"algorithm": hashing[0], "hash_key": hashing[1]}
    chain = hasher(**options)
    keys = [*chain.extend_keys(ids), *([tail.key] if (tail := chain.tail()) else [])]

    assert packed_keys(ROOT, struct.pack(f"<{len(ids)}i", *ids), chunk_size=SIZE, **options) == b"".join(keys)


def test_chunks_keep_their_tokens_when_the_caller_changes_its_list():
    ids = np.arange(SIZE + 2, dtype=np.int32)
    one = hasher()
    chunks = one.extend(ids)
    ids[:] = 9

    assert chunks[0].tokens.tolist() == [0, 1, 2, 3]
    assert one.tail().tokens.tolist() == [4, 5]
    assert not chunks[0].tokens.flags.writeable


def test_refused_tokens_leave_the_hasher_as_it_was():
    one = hasher()
    one.extend([1, 2])

    with pytest.raises(ValueError, match="token 1 is -1"):
        one.extend([3, -1, 5])

    assert one.extend_keys([3, 4]) == hasher().extend_keys([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: hasher(chunk_size=0), "chunk_size is 0"),
        (lambda: hasher(chunk_size=-1), "chunk_size is -1"),
        (lambda: ChunkHasher(b"short", chunk_size=SIZE), "expected 16"),
        (lambda: hasher().partials(0), "unit is 0"),
        (lambda: Extra(3, 3, "cat"), "cat"),
        (lambda: Extra(4, 3, "cat"), "cat"),
        (lambda: Extra(-1, 2, "cat"), "cat"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(refused, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        refused()


def test_the_messages_are_the_documented_ones():
    digest = digest_function("sha256")
    one = ChunkHasher(ROOT, chunk_size=4, algorithm="sha256", extras=[Extra(5, 6, "cat")])

    keys = one.extend_keys([1, 2, 3, 4, 5, 6, 7, 8, 9])

    text = b'[[1,2,"cat"]]'
    first = digest(ROOT + struct.pack("<4i", 1, 2, 3, 4))
    second = digest(
        first + struct.pack("<4i", 5, 6, 7, 8) + text + struct.pack("<II", len(text), 4 | 1 << 31)
    )
    assert keys == [first, second]
    assert one.tail().key == digest(second + struct.pack("<iII", 9, 0, 1 | 1 << 31))


@pytest.mark.parametrize(
    ("algorithm", "full", "imaged", "partial"),
    [
        (
            "blake3",
            "260e848cfec5367f4f3080a9d5ce25c4",
            "1d29ba635b38aab2f3dc90799d209e4b",
            "0769a0da48971d37718b70e1582c56eb",
        ),
    ],
)
def test_the_keys_are_the_golden_ones(algorithm, full, imaged, partial):
    """A change here makes all stored records unreachable, so it requires a new format_version."""
    one = ChunkHasher(ROOT, chunk_size=256, algorithm=algorithm, extras=[Extra(300, 310, "é")])

    chunks = one.extend(range(100, 100 + 600))

    assert [chunk.key.hex() for chunk in chunks] == [full, imaged]
    assert one.tail().key.hex() == partial
