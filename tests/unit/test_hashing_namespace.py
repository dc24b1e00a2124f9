"""Namespace texts: canonical, injective for all names, the same in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import re
import sys
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import MissingDependencyError
from lmcache_async.hashing import (
    ALGORITHMS,
    ChunkHasher,
    Namespace,
    RequestNamespace,
    digest_function,
    hash_key_id,
    partial_candidates,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
# Few characters, so that near collisions occur; then any text, including lone surrogates.
nasty = st.text(alphabet='a/-_,:"\\[]{}u \0\n\ud83d\ude00\u00e9\u0301😀é', max_size=6)
texts = nasty | st.text(max_size=8)
pairs = st.lists(st.tuples(texts, texts), max_size=3).map(tuple)
namespaces = st.builds(
    Namespace,
    model=texts,
    weights=texts,
    dtype=texts,
    layout=texts,
    quantization=texts,
    world_size=st.integers(1, 3),
    tp_rank=st.integers(0, 2),
    tp_size=st.integers(1, 3),
    pp_rank=st.integers(0, 2),
    pp_size=st.integers(1, 3),
    chunk_size=st.sampled_from([16, 256]),
    algorithm=st.sampled_from(ALGORITHMS),
    extra=pairs,
    hash_key=st.sampled_from([b"", b"", KEY, OTHER_KEY]),
)
requests = st.builds(RequestNamespace, lora=texts, lora_path=texts, cache_salt=texts, tags=pairs)
PLAIN = Namespace(model="m", weights="sampled:1", dtype="bfloat16", layout="NHD")


@given(namespaces, namespaces)
def test_namespaces_have_one_text_exactly_if_they_are_equal(one, other):
    assert (one.text == other.text) == (one == other)
    assert dataclasses.replace(one).text == one.text


@given(requests, requests)
def test_request_namespaces_have_one_text_exactly_if_they_are_equal(one, other):
    assert (one.text == other.text) == (one == other)


@pytest.mark.parametrize(
    "field",
    [
        field.name
        for field in dataclasses.fields(Namespace)
        if field.name not in ("replicated", "tp_replicas")
    ],
)
def test_each_field_changes_the_root(field):
    plain = dataclasses.replace(PLAIN, algorithm="sha256")  # requires a key
    value = getattr(plain, field)
    other = {int: 7, str: "blake3", tuple: (("kv_scale", "1"),), bytes: KEY}[type(value)]

    assert dataclasses.replace(plain, **{field: other}).root() != plain.root()


def test_ranks_that_have_the_same_kv_have_the_same_root():
    ranks = [dataclasses.replace(PLAIN, tp_size=2, tp_rank=rank, replicated=True) for rank in (0, 1)]

    assert ranks[0].root() == ranks[1].root()
    assert ranks[0].root() == dataclasses.replace(ranks[0], replicated=False).root()
    assert ranks[0].root() != dataclasses.replace(ranks[0], tp_size=4).root()
    assert ranks[0].root() != dataclasses.replace(ranks[0], pp_rank=1).root()


def test_consecutive_ranks_with_the_same_kv_have_the_same_root():
    ranks = [dataclasses.replace(PLAIN, tp_size=4, tp_rank=rank, tp_replicas=2) for rank in range(4)]
    roots = [rank.root() for rank in ranks]

    assert roots[0] == roots[1] == dataclasses.replace(ranks[0], tp_replicas=1).root()
    assert roots[2] == roots[3]
    assert roots[0] != roots[2]


@given(requests)
def test_a_text_is_json_in_utf_8(request_namespace):
    text = request_namespace.text

    assert text.encode("utf-8").decode("utf-8") == text
    if text:
        assert json.loads(text).keys() <= {"lora", "lora_path", "cache_salt", "tags"}


@pytest.mark.parametrize("field", ["lora", "lora_path", "cache_salt"])
@pytest.mark.parametrize("value", [0, False, 7, b"", b"a", [], {}, 0.0], ids=repr)
def test_values_that_are_no_text_are_not_treated_as_missing(field, value):
    with pytest.raises(TypeError, match=f"{field} is of type {type(value).__name__}; expected a string"):
        RequestNamespace(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model", Path("/models/m"), "a string"),
        ("weights", b"w", "a string"),
        ("dtype", 16, "a string"),
        ("tp_rank", "0", "an integer"),
        ("world_size", "2", "an integer"),
        ("chunk_size", 256.0, "an integer"),
    ],
)
def test_values_of_another_type_are_refused_in_the_namespace_of_an_engine(field, value, expected):
    with pytest.raises(TypeError, match=f"{field} is {re.escape(repr(value))}.*expected {expected}"):
        dataclasses.replace(PLAIN, **{field: value})


@pytest.mark.parametrize("field", ["lora", "lora_path", "cache_salt"])
def test_none_equals_a_missing_field(field):
    assert RequestNamespace(**{field: None}) == RequestNamespace()


@pytest.mark.parametrize(
    "tags",
    [
        "ab",
        ["ab"],
        ["a"],
        ("ab", "cd"),
        {"a": "b"},
        [("a", 1)],
        [(1, "a")],
        [("a", "b", "c")],
        {("a", "b")},
        0,
    ],
    ids=repr,
)
def test_tags_are_pairs_of_texts_and_nothing_else(tags):
    with pytest.raises(TypeError, match="tag"):
        RequestNamespace(tags=tags)


def test_the_text_and_the_roots_are_the_golden_ones():
    request = RequestNamespace(lora="sql", lora_path="/adapters/sql", cache_salt="é", tags=(("team", "a"),))

    assert PLAIN.text == (
        '{"algorithm":"xxh3_128","chunk_size":256,"dtype":"bfloat16","extra":[],"format_version":1,'
        '"layout":"NHD","model":"m","pp_rank":0,"pp_size":1,"quantization":"","tp_rank":0,"tp_size":1,'
        '"weights":"sampled:1","world_size":1}'
    )
    assert request.text == '{"cache_salt":"é","lora":"sql","lora_path":"/adapters/sql","tags":[["team","a"]]}'
    assert PLAIN.root().hex() == "7b08075b2a52b2f981eb6e1fe4ba8f48"
    assert request.root(PLAIN.root()).hex() == "fe222afa565bf9b0a684b37a8c749de5"


def test_blake3_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)

    with pytest.raises(MissingDependencyError, match=r"lmcache-async\[blake3\]"):
        digest_function("blake3")


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_a_key_changes_every_digest_and_keys_are_told_apart(algorithm):
    digests = {digest_function(algorithm, key)(b"message") for key in (b"", KEY, OTHER_KEY)}

    assert len(digests) == 3
    assert len({hash_key_id(key) for key in (b"", KEY, OTHER_KEY)}) == 3


def test_a_keyed_digest_is_the_standards_own():
    assert digest_function("sha256", KEY)(b"m") == hmac.digest(KEY, b"m", "sha256")[:16]
    assert digest_function("blake3", KEY)(b"m") == blake3(b"m", key=KEY).digest()[:16]


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_the_next_key_cannot_be_computed_without_the_secret(algorithm):
    keyed = ChunkHasher(b"r" * 16, chunk_size=4, algorithm=algorithm, hash_key=KEY).extend_keys(range(8))
    without = ChunkHasher(keyed[0], chunk_size=4, algorithm=algorithm).extend_keys(range(4, 8))
    partial = partial_candidates(
        keyed[0], [4, 5, 6, 7], start=4, unit=2, chunk_size=4, algorithm=algorithm, hash_key=KEY
    )
    guessed = partial_candidates(keyed[0], [4, 5, 6, 7], start=4, unit=2, chunk_size=4, algorithm=algorithm)

    assert without[0] != keyed[1]
    assert partial[0].key != guessed[0].key


def test_a_hash_key_is_never_shown_and_its_id_is_in_the_text():
    namespace = dataclasses.replace(PLAIN, algorithm="sha256", hash_key=KEY)

    assert "hash_key" not in repr(namespace)
    assert KEY.hex() not in namespace.text
    assert hash_key_id(KEY) in namespace.text
    assert hash_key_id(KEY) not in hashlib.sha256(KEY).hexdigest()


def test_labels_of_one_salt_differ_by_key():
    request = RequestNamespace(cache_salt="0000")

    assert len({request.label, request.keyed_label(KEY), request.keyed_label(OTHER_KEY)}) == 3
    assert RequestNamespace().keyed_label(KEY) == ""
