"""Isolation of namespaces: content of one is a miss in all others, and a record moved between them is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import ChunkCorruptError
from lmcache_async.hashing import ChunkHasher, Extra, Namespace, RequestNamespace, weights_fingerprint
from lmcache_async.integration.vllm.keys import Adapter, AdapterFingerprints
from lmcache_async.memory.record import RecordFormat, seal, verify
from lmcache_async.testing.rig import Rig
from lmcache_async.types import Chunk
from tests.support.engines import hits, store
from tests.support.tiers import Made

TOKENS = list(range(100, 124))  # three chunks of 8
PLAIN = RequestNamespace()


def safetensors(content: bytes) -> bytes:
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + content


def model_at(folder, content: bytes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(content))
    return folder


class Cache:
    """One store of records under engines of several namespaces."""

    def __init__(self) -> None:
        self.made = Made()
        self.rig = Rig(slabs=32)

    def open(self, **namespace):
        own = dataclasses.replace(self.rig.namespace, **namespace)
        return CacheEngine.open(
            self.rig.config(tiers=["dict"]),
            layout=self.rig.layout,
            namespace=own,
            registry=self.made.registry,
        )

    async def store(self, request=PLAIN, **namespace) -> None:
        async with self.open(**namespace) as engine:
            report = await store(self.rig, engine, TOKENS, namespace=request)
        assert report.stored + report.present == 3

    async def hit(self, request=PLAIN, **namespace) -> int:
        async with self.open(**namespace) as engine:
            found = await hits(self.rig, engine, TOKENS, namespace=request)
            self.corrupt = {
                name: count for name, count in engine.statistics().counts.items() if "corrupt" in name
            }
        return found


ENGINES = {
    "model": ({"model": "org/a"}, {"model": "org-a"}),
    "model with a separator": ({"model": "a", "weights": "b"}, {"model": "a,b", "weights": ""}),
    "weights": ({"weights": "sampled:1"}, {"weights": "sampled:2"}),
    "layout": ({"layout": "NHD"}, {"layout": "HND"}),
    "tensor rank": ({"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}),
    "very long names": ({"model": "m" * 50_000}, {"model": "m" * 49_999 + "n"}),
}
"""Some of all pairs, through an engine. Any two are covered by the property of roots and records below."""
REQUESTS = {
    "lora": (RequestNamespace(lora="a"), RequestNamespace(lora="b")),
    "lora's content": (RequestNamespace(lora="a", lora_path="1"), RequestNamespace(lora="a", lora_path="2")),
    "salt or none": (RequestNamespace(cache_salt="a"), PLAIN),
    "salt or lora": (RequestNamespace(cache_salt="a"), RequestNamespace(lora="a")),
    "tag": (RequestNamespace(tags=(("a", "1"),)), RequestNamespace(tags=(("a", "2"),))),
    "long": (RequestNamespace(cache_salt="s" * 9000), RequestNamespace(cache_salt="s" * 9001)),
}


PAIRS = ENGINES | {name: ({"request": one}, {"request": other}) for name, (one, other) in REQUESTS.items()}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
async def test_two_namespaces_share_nothing(one, other):
    cache = Cache()
    await cache.store(**one)

    assert await cache.hit(**other) == 0
    assert await cache.hit(**one) == len(TOKENS)
    await cache.store(**other)
    assert await cache.hit(**one) == await cache.hit(**other) == len(TOKENS)
    assert len(cache.made.records) == 6


def keys_of(cache: Cache, request=PLAIN, **namespace):
    own = dataclasses.replace(cache.rig.namespace, **namespace)
    return ChunkHasher(request.root(own.root()), chunk_size=8).extend_keys(TOKENS)


@pytest.mark.parametrize(("one", "other"), [ENGINES["weights"], ENGINES["layout"], ENGINES["tensor rank"]])
async def test_a_record_under_a_key_of_another_engine_is_refused(one, other):
    cache = Cache()
    await cache.store(**one)
    records = cache.made.records
    for key, wanted in zip(keys_of(cache, **one), keys_of(cache, **other), strict=True):
        records[wanted] = records[key]

    assert await cache.hit(**other) == 0
    assert set(cache.corrupt) == {"dict.corrupt.key"}  # the last of the three may be in a batch of its own


def sealed(format: RecordFormat, chunk: Chunk, request_namespace: str) -> memoryview:
    record = memoryview(bytearray(format.record_bytes(64)))
    seal(
        record, format=format, chunk=chunk, request_namespace=request_namespace, shape=(64,), payload_bytes=64
    )
    return record


nasty = st.text(alphabet='a/-_,:"\\[]{}u \0\ud83d\ude00é\u0301', max_size=5) | st.sampled_from(
    ["", "x" * 600]
)
pairs = st.lists(st.tuples(nasty, nasty), max_size=2).map(tuple)
engines = st.builds(
    Namespace, model=nasty, weights=nasty, dtype=nasty, layout=nasty, quantization=nasty, extra=pairs
)
requests = st.builds(RequestNamespace, lora=nasty, lora_path=nasty, cache_salt=nasty, tags=pairs)


@given(st.tuples(engines, requests), st.tuples(engines, requests))
def test_two_namespaces_share_neither_a_root_nor_an_accepted_record(one, other):
    formats = [RecordFormat(engine.text, "layout", "float32", 8) for engine, _ in (one, other)]
    labels = [request.label for _, request in (one, other)]
    roots = [request.root(engine.root()) for engine, request in (one, other)]
    chunk = Chunk(bytes(16), 0, np.arange(8, dtype=np.int32))  # simulates a hash collision
    record = sealed(formats[0], chunk, labels[0])

    verify(record, format=formats[0], chunk=chunk, request_namespace=labels[0])
    if one == other:
        assert roots[0] == roots[1]
        return
    assert roots[0] != roots[1]
    with pytest.raises(ChunkCorruptError) as caught:
        verify(record, format=formats[1], chunk=chunk, request_namespace=labels[1])
    assert caught.value.cause in {"namespace", "length"}


@given(st.tuples(nasty, nasty), st.integers(0, 7), st.integers(1, 8))
def test_images_at_one_place_with_other_content_share_no_key(texts, start, length):
    one, other = (
        ChunkHasher(bytes(16), chunk_size=4, extras=[Extra(start, start + length, text)]).extend(range(16))
        for text in texts
    )
    clean = ChunkHasher(bytes(16), chunk_size=4).extend(range(16))
    first = start // 4

    assert [chunk.key for chunk in one[:first]] == [chunk.key for chunk in clean[:first]]
    assert not {chunk.key for chunk in one[first:]} & {chunk.key for chunk in clean}
    if texts[0] != texts[1]:
        assert not {chunk.key for chunk in one[first:]} & {chunk.key for chunk in other[first:]}


def test_one_image_at_two_places_shares_no_key():
    made = [
        ChunkHasher(bytes(16), chunk_size=8, extras=[Extra(start, stop, "i")]).extend_keys(range(8))[0]
        for start, stop in itertools.combinations(range(9), 2)
    ]

    assert len(set(made)) == len(made)


async def test_weights_replaced_under_the_same_name_are_another_model(tmp_path):
    cache = Cache()
    folder = model_at(tmp_path / "model", b"1" * 5000)
    await cache.store(model="m", weights=weights_fingerprint(folder))
    model_at(folder, b"1" * 2500 + b"2" + b"1" * 2499)

    assert await cache.hit(model="m", weights=weights_fingerprint(folder)) == 0
    model_at(folder, b"1" * 5000)
    assert await cache.hit(model="m", weights=weights_fingerprint(folder)) == len(TOKENS)


def test_an_adapter_loaded_again_with_other_weights_is_another_one(tmp_path):
    names = AdapterFingerprints()
    folder = model_at(tmp_path / "lora", b"1" * 100)
    first = names.of(Adapter("sql", str(folder), load_id=1))
    model_at(folder, b"2" * 100)  # unloaded, replaced, loaded: the same name and path

    assert names.of(Adapter("sql", str(folder), load_id=1)) == first
    assert not names.changed(Adapter("sql", str(folder), load_id=1))
    assert names.of(Adapter("sql", str(folder), load_id=2)) != first
    assert names.changed(Adapter("sql", str(folder), load_id=2))
    assert not names.changed(Adapter("other", str(folder)))
    assert names.of(Adapter("sql", str(folder), reloaded_in_place=True)) != first


def test_one_adapter_under_two_paths_is_one(tmp_path):
    one, other = (model_at(tmp_path / name, b"1" * 100) for name in ("a", "b"))

    assert AdapterFingerprints().of(Adapter("sql", str(one))) == AdapterFingerprints().of(
        Adapter("sql", str(other))
    )


def test_an_unreadable_adapter_is_different_from_all_others(tmp_path):
    names = AdapterFingerprints()
    adapter = Adapter("sql", str(tmp_path / "none"), load_id=1)
    again = dataclasses.replace(adapter, load_id=2)

    assert names.of(adapter) == names.of(adapter)
    assert len({names.of(adapter), names.of(again), AdapterFingerprints().of(adapter)}) == 3


def test_adapters_of_hostile_tenants_are_identified_by_every_byte(tmp_path):
    content = bytearray(40_000)
    folder = model_at(tmp_path / "lora", bytes(content))
    careless, careful = AdapterFingerprints(), AdapterFingerprints("blake3")
    before = [names.of(Adapter("sql", str(folder), load_id=1)) for names in (careless, careful)]
    content[7000] = 1  # between the sampled positions
    model_at(folder, bytes(content))
    after = [names.of(Adapter("sql", str(folder), load_id=2)) for names in (careless, careful)]

    assert before[0] == after[0]
    assert before[1] != after[1]
    assert after[1].startswith("full:sha256:")
