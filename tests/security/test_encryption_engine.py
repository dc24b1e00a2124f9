"""Encryption at rest through the whole engine: data on disk is secret, and loads return the stored content."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_async.errors import ChainError, ConfigError
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import turns
from tests.support import engines
from tests.support.secret_files import secret_file
from tests.support.tiers import registry_of

TOKENS = list(range(100, 136))  # four chunks of 8 and a partial one of 4
SLOTS = list(range(len(TOKENS)))
BACK = [slot + 64 for slot in SLOTS]  # destination slots of a retrieve


def key_file(folder: Path, *keys: bytes, name: str = "keys") -> str:
    return str(secret_file(folder, "".join(f"{key.hex()}\n" for key in keys), name=name))


@pytest.fixture
def keys():
    return [secrets.token_bytes(32) for _ in range(3)]


def disk(folder: Path, **options):
    return {
        "name": "disk",
        "path": str(folder / "records"),
        "max_bytes": "16MiB",
        "odirect": "auto",
        **options,
    }


def rig_of(**options) -> Rig:
    return Rig(**{"slabs": 32, **options})


async def stored(rig: Rig, tokens=TOKENS, **config):
    async with rig.open(**config) as engine:
        return await engines.store(rig, engine, tokens), engine.statistics()


async def retrieved(rig: Rig, tokens=TOKENS, **config):
    """Return the number of hit tokens, compared bit by bit, and the engine's counts."""
    async with rig.open(**config) as engine:
        return await engines.hits(rig, engine, tokens), engine.statistics()


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "records").rglob("*") if path.is_file() and path.stat().st_size > 4096]


async def test_nothing_on_disk_is_in_the_clear(tmp_path, keys):
    rig = rig_of()
    await stored(rig, tiers=["cpu", disk(tmp_path)], **{"encryption.key_file": key_file(tmp_path, keys[0])})
    content = b"".join(path.read_bytes() for path in files(tmp_path))
    plain = rig.content(TOKENS)

    assert len(files(tmp_path)) == 5
    assert rig.layout.text.encode() not in content
    assert b"namespace" not in content
    assert torch.tensor(TOKENS[:4], dtype=torch.int32).numpy().tobytes() not in content
    for token in range(len(TOKENS)):
        assert plain[0, 0, token].numpy().tobytes() not in content


async def test_a_promoted_chunk_is_served_from_memory_and_stays_secret_elsewhere(tmp_path, keys):
    second = {"name": "disk", "id": "far", "path": str(tmp_path / "far"), "max_bytes": "16MiB"}
    near = disk(tmp_path, id="near")
    config = {"encryption.key_file": key_file(tmp_path, keys[0])}
    await stored(rig_of(), tiers=[second], **config)
    rig = rig_of()
    async with rig.open(tiers=["cpu", near, second], **config) as engine:
        for _ in range(2):
            assert await engines.hits(rig, engine, TOKENS) == len(TOKENS)
        assert await engine.flush(timeout_s=30)
        counts = engine.statistics().counts

    assert counts["far.hits"] == counts["cpu.hits"] == 5
    assert files(tmp_path) == []  # without encryption it would have been stored


@pytest.mark.parametrize(
    ("written", "read", "cause"),
    [(0, 1, "cipher_key"), (0, None, "encrypted"), (None, 0, "unencrypted")],
    ids=["another key", "no key any more", "no key before"],
)
async def test_with_another_key_all_are_misses(tmp_path, keys, written, read, cause):
    def config(number):
        one = (
            {}
            if number is None
            else {"encryption.key_file": key_file(tmp_path, keys[number], name=str(number))}
        )
        return {"tiers": [disk(tmp_path)], **one}

    await stored(rig_of(), **config(written))

    hit, statistics = await retrieved(rig_of(), **config(read))

    assert hit == 0
    assert statistics.counts[f"disk.corrupt.{cause}"] >= 1


@pytest.mark.one_loop
@settings(max_examples=8)
@given(where=st.floats(0, 1), bit=st.integers(0, 7), victim=st.integers(0, 4))
async def test_a_flipped_bit_ends_the_prefix(tmp_path_factory, where, bit, victim):
    folder = tmp_path_factory.mktemp("flip")
    config = {"tiers": [disk(folder)], "encryption.key_file": key_file(folder, secrets.token_bytes(32))}
    await stored(rig_of(), **config)
    order = sorted(files(folder))
    data = bytearray(order[victim].read_bytes())
    data[int(where * (len(data) - 1))] ^= 1 << bit
    order[victim].write_bytes(data)

    hit, _ = await retrieved(rig_of(), **config)  # compares the content

    assert hit in {0, 8, 16, 24, 32, len(TOKENS)}


class SharingTier(DictTier):
    """A tier that answers with its own memory and keeps it, like a tier that coalesces equal reads."""

    shared: ClassVar[list] = []

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, own_memory=True)

    def bind(self, arena):
        self.arena = arena

    async def get_many(self, keys, allocate):
        buffers = await super().get_many(keys, lambda nbytes: self.arena.lease(nbytes, timeout_s=60))
        type(self).shared += [buffer.retain() for buffer in buffers if buffer is not None]
        return buffers


async def test_a_slab_that_others_read_is_not_decrypted_in_its_place(tmp_path, keys):
    SharingTier.shared = []
    rig = rig_of()
    registry = registry_of(sharing=SharingTier)
    config = {"tiers": ["sharing"], "encryption.key_file": key_file(tmp_path, keys[0])}
    async with rig.open(registry=registry, **config) as engine:
        await engines.store(rig, engine, TOKENS)

        assert await engines.hits(rig, engine, TOKENS) == len(TOKENS)
        assert len(SharingTier.shared) == 5
        for buffer in SharingTier.shared:
            assert buffer.view[8:10] == b"\x01\x80"  # still an encrypted record
            buffer.release()
    assert engine.statistics().arena.leased_slabs == 0


async def test_a_store_without_room_for_secret_copies_stays_in_memory(tmp_path, keys):
    rig = rig_of(slabs=1)
    config = {"tiers": ["cpu", disk(tmp_path)], "encryption.key_file": key_file(tmp_path, keys[0])}
    async with rig.open(**config) as engine:
        report = await engines.store(rig, engine, TOKENS[:8])
        counts = engine.statistics().counts

        assert report.stored == 1
        assert "disk.stored" not in counts
        assert counts["disk.dropped.TierFullError"] == 1
    assert engine.statistics().arena.leased_slabs == 0


async def test_a_prompt_larger_than_memory_goes_to_disk_encrypted_and_whole(tmp_path, keys):
    rig = rig_of(slabs=4)
    config = {
        "tiers": ["cpu", disk(tmp_path)],
        "encryption.key_file": key_file(tmp_path, keys[0]),
        "store.batch_bytes": "32MiB",
        "store.allocate_timeout_s": 5,
    }
    async with rig.open(**config) as engine:
        report = await engines.store(rig, engine, TOKENS)

        assert (report.stored, report.dropped) == (5, {})
        assert engine.statistics().counts["disk.stored"] == 5
        assert await engines.hits(rig, engine, TOKENS) == len(TOKENS)
    assert engine.statistics().arena.leased_slabs == 0


async def test_a_stage_after_encrypt_cannot_let_plain_records_out(tmp_path, keys):
    config = {
        "tiers": [disk(tmp_path)],
        "encryption.key_file": key_file(tmp_path, keys[0]),
        "store.stages": ["hash", "lookup", "allocate", "device_to_host", "encrypt", "seal", "write"],
    }

    with pytest.raises(ChainError, match="encrypt"):
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(rig_of().open(**config))


@pytest.mark.parametrize(
    "stages",
    [
        {"store.stages": ["hash", "lookup", "allocate", "device_to_host", "seal", "encrypt", "write"]},
        {"retrieve.stages": ["hash", "plan", "fetch", "decrypt", "verify", "host_to_device"]},
    ],
    ids=["encrypt", "decrypt"],
)
async def test_the_stages_without_a_key_stop_the_start(tmp_path, stages):
    with pytest.raises(ConfigError, match=r"encryption\.key_file"):
        async with rig_of().open(tiers=[disk(tmp_path)], **stages):
            pass


async def test_named_or_not_the_stages_are_there_once(tmp_path, keys):
    config = {
        "tiers": [disk(tmp_path)],
        "encryption.key_file": key_file(tmp_path, keys[0]),
        "store.stages": ["hash", "lookup", "allocate", "device_to_host", "seal", "encrypt", "write"],
        "retrieve.stages": ["hash", "plan", "fetch", "decrypt", "verify", "host_to_device"],
    }
    await stored(rig_of(), **config)

    assert (await retrieved(rig_of(), **config))[0] == len(TOKENS)


async def test_encryption_without_a_hash_key_is_worth_a_warning_that_shows_no_key(tmp_path, keys, caplog):
    config = {"tiers": [disk(tmp_path)], "encryption.key_file": key_file(tmp_path, keys[0])}
    async with rig_of().open(**config):
        pass

    assert [record.message for record in caplog.records if "set hash_key_file" in record.message]
    assert keys[0].hex() not in caplog.text


@settings(max_examples=10)
@given(
    count=st.integers(1, 60),
    seed=st.integers(0, 2**31 - 100),
    key=st.binary(min_size=32, max_size=32).filter(lambda key: len(set(key)) > 1),
    memory=st.booleans(),
)
@pytest.mark.one_loop
async def test_any_prompt_comes_back_bit_by_bit(tmp_path_factory, count, seed, key, memory):
    folder = tmp_path_factory.mktemp("any")
    tokens = [(seed + i * i) % 1000 for i in range(count)]
    config = {
        "tiers": [*["cpu"][:memory], disk(folder)],
        "encryption.key_file": key_file(folder, key),
        "hash_algorithm": "sha256",
    }
    await stored(rig_of(), tokens, **config)

    hit, statistics = await retrieved(rig_of(), tokens, **config)

    assert hit == count
    assert not [name for name in statistics.counts if "corrupt" in name or "dropped" in name]


async def test_prefetched_chunks_are_in_memory_in_the_clear(tmp_path, keys):
    config = {"tiers": ["cpu", disk(tmp_path)], "encryption.key_file": key_file(tmp_path, keys[0])}
    await stored(rig_of(), **config)
    rig = rig_of()
    async with rig.open(**config) as engine:
        assert await engine.prefetch(TOKENS) == len(TOKENS)
        for path in files(tmp_path):
            path.unlink()

        assert await engines.hits(rig, engine, TOKENS) == len(TOKENS)


@pytest.mark.parametrize("steps", range(0, 60, 4))
async def test_cancelled_anywhere_every_lease_comes_back(tmp_path, keys, steps):
    rig = rig_of()
    rig.write(SLOTS, rig.content(TOKENS))
    config = {"tiers": ["cpu", disk(tmp_path)], "encryption.key_file": key_file(tmp_path, keys[0])}
    async with rig.open(**config) as engine:
        for start in (
            lambda: engine.store(TOKENS, torch.tensor(SLOTS)),
            lambda: engine.retrieve(TOKENS, torch.tensor(BACK)),
        ):
            task = asyncio.ensure_future(start())
            await turns(steps)
            task.cancel()
            await asyncio.wait({task})
            await engine.clear(memory_only=True)  # the retrieve must read the disk
    assert engine.statistics().arena.leased_slabs == 0
