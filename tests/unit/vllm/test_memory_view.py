"""The scheduler's view of the chunks that a rank has in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.integration.vllm import events as events_module
from lmcache_async.integration.vllm.events import ChunkEvents, MemoryChange, MemoryChanges, MemoryView
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.records import key_of
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.base import Capabilities
from lmcache_async.types import ChunkKey
from tests.support.tiers import handle_of
from tests.unit.test_chunk_events import SLOTS, TOKENS, held
from tests.unit.test_lookups import Made


class Rank:
    """The changes of a rank, and the scheduler's view of it."""

    def __init__(self) -> None:
        self.changes = MemoryChanges()
        self.changes.tier = "cpu"
        self.view = MemoryView()

    def report(self) -> None:
        if (change := self.changes.take()) is not None:
            self.view.apply(change)

    async def known(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        lookups = self.view.lookups()
        if lookups is None:
            return set()
        return {key for key in keys if (await lookups.lookup_keys([key])).count}


def opened(rig: Rig, rank: Rank, tiers: Sequence[object]):
    return CacheEngine.open(
        rig.config(tiers=tiers),
        layout=rig.layout,
        namespace=rig.namespace,
        watcher=ChunkEvents(8),
        memory_watcher=rank.changes,
    )


async def test_after_a_report_the_view_is_the_content_of_host_memory(tmp_path: Path):
    """With stores, evictions, promotion and clearing."""
    rig, rank, seen = Rig(slabs=8), Rank(), set[ChunkKey]()
    disk = {"name": "disk", "path": str(tmp_path), "max_bytes": 100 * rig.slab_bytes}
    async with opened(rig, rank, ["cpu", disk]) as engine:
        assert engine.watched_memory() == "cpu"

        async def agree() -> None:
            assert await engine.flush(timeout_s=60)
            rank.report()
            content = await held(engine, "cpu")
            seen.update(content)
            assert await rank.known(seen) == content

        for first in range(0, 900, 100):
            await engine.store([first + token for token in TOKENS], SLOTS)
            await agree()
        assert engine.statistics().tiers["cpu"].evictions
        await engine.clear(memory_only=True)
        await agree()
        assert rank.view.lookups() is None
        await engine.retrieve([800 + token for token in TOKENS], SLOTS)
        await agree()
        assert rank.view.lookups() is not None


@pytest.mark.parametrize(
    ("tiers", "watched"),
    [
        (["cpu"], "cpu"),
        ([{"name": "cpu", "id": "memory"}], "memory"),
        (["dict"], None),
    ],
)
async def test_only_a_tier_in_the_arena_whose_changes_are_all_reported_is_watched(
    tiers: list[object], watched: str | None
):
    async with Rig().open(tiers=tiers, registry=Made().registry) as engine:
        assert engine.watched_memory() == watched


def test_changes_of_other_tiers_are_not_collected():
    changes = MemoryChanges()
    changes.stored("cpu", [key_of(1)])  # before the tier is known
    changes.tier = "cpu"
    changes.stored("disk", [key_of(1)])

    assert changes.take() is None


def test_a_tier_that_evicts_invalid_keys_does_not_end_the_worker(caplog: pytest.LogCaptureFixture):
    """The model's thread packs the keys, and vLLM catches no error there."""

    class InArena(DictTier):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(in_arena=True, local_index=True)

    changes, tier, key = MemoryChanges(), InArena(), key_of(1)
    changes.tier = "t"
    handle_of(tier, memory_watcher=changes)
    assert tier.on_evicted is not None

    tier.on_evicted([key.hex(), key, key[:15], None])

    assert changes.take() == MemoryChange("t", b"", key)
    assert "on_evicted" in caplog.text


async def test_if_no_step_takes_the_changes_the_view_forgets_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events_module, "MAX_CHANGES", 4)
    rank, keys = Rank(), [key_of(number) for number in range(9)]
    rank.changes.stored("cpu", keys[:4])
    rank.report()
    assert await rank.known(keys) == set(keys[:4])

    rank.changes.stored("cpu", keys[4:8])
    rank.changes.removed("cpu", keys[:1])  # too many
    rank.changes.stored("cpu", keys[8:])
    rank.report()

    assert await rank.known(keys) == {keys[8]}


async def test_the_last_of_several_changes_of_a_chunk_counts():
    rank, keys = Rank(), [key_of(number) for number in range(2)]
    rank.changes.stored("cpu", keys)
    rank.changes.removed("cpu", keys)
    rank.changes.stored("cpu", keys[:1])
    rank.report()

    assert await rank.known(keys) == {keys[0]}
    assert rank.changes.take() is None
