"""VLLM's KV events of our tiers, as its scheduler publishes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from lmcache_async.integration.vllm.events import MAX_ANNOUNCED, MAX_EVENTS, ChunkEvents, Removed, Stored
from lmcache_async.types import Chunk, ChunkKey
from tests.support.vllm_simulator import SimulatedVLLM, Simulators, Until, prompt

CHUNK = 64


@pytest.fixture
def make(simulators: Simulators, tmp_path: Path) -> Callable[..., SimulatedVLLM]:
    disk = {"name": "disk", "id": "nvme", "path": str(tmp_path / "disk"), "max_bytes": "64MiB"}
    return partial(simulators, {"arena.max_bytes": "1MiB", "tiers": ["cpu", disk]})


def published(sim: SimulatedVLLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return events of our tiers, without those of the device, as a list that grows."""
    events: list[Any] = []

    def publish(batch: Any) -> None:
        events.extend(event for event in batch.events if getattr(event, "ownership", None))

    monkeypatch.setattr(sim.scheduler.kv_event_publisher, "publish", publish)
    return events


def steps_until(sim: SimulatedVLLM, until: Until, condition: Callable[[], bool]) -> None:
    """Step with other requests, whose prompts are shorter than a chunk."""

    def stepped() -> bool:
        sim.add(f"beside {len(sim.outputs)}", prompt(20, len(sim.outputs)), max_tokens=1)
        sim.run()
        return condition()

    until(stepped)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_tier_notifies_of_the_chunks_it_stores(
    make: Any, until: Until, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    sim = make(kv_events=True, ranks=ranks)
    events = published(sim, monkeypatch)
    tokens = prompt(5 * CHUNK + 20)
    sim.add("one", tokens, max_tokens=1)
    sim.run()
    steps_until(sim, until, lambda: len(events) >= 10)

    for tier, medium in (("cpu", "CPU"), ("nvme", "STORAGE")):
        mine = [event for event in events if event.ownership == tier]
        assert all(isinstance(event, BlockStored) for event in mine)
        by_hash = {event.block_hashes[0]: event for event in mine}
        assert len(by_hash) == 5  # neither the partial one nor those of the other rank
        found: list[int] = []
        parent = None
        while nexts := [event for event in by_hash.values() if event.parent_block_hash == parent]:
            [event] = nexts
            found += event.token_ids
            parent = event.block_hashes[0]
            assert (event.medium, event.locality) == (medium, "LOCAL")
            assert (event.block_size, event.lora_name) == (CHUNK, None)
        assert found == tokens[: 5 * CHUNK]


def test_evictions_of_a_full_tier_are_notified(
    make: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = make(kv_events=True)
    events = published(sim, monkeypatch)
    seeds = iter(range(1, 10000))

    def evicted() -> bool:
        sim.add(f"fills {next(seeds)}", prompt(8 * CHUNK, next(seeds)), max_tokens=1)
        sim.run()
        return any(isinstance(event, BlockRemoved) for event in events)

    until(evicted)

    engine = sim.ranks[0].connector.worker.engines[0].engine
    until(lambda: engine.statistics().running == 0)
    steps_until(sim, until, lambda: engine.statistics().running == 0 and not sim.connector.scheduler._events)
    has: set[bytes] = set()
    for event in events:
        if event.ownership == "cpu":
            if isinstance(event, BlockStored):
                has.update(event.block_hashes)
            else:
                has.difference_update(event.block_hashes)
    cached = engine.statistics().tiers["cpu"].chunks
    partial = sum(name.startswith("beside") for name in sim.outputs)  # their chunks have no events
    assert cached - partial <= len(has) <= cached


def test_salted_prompts_and_disabled_notices_publish_nothing(
    make: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = make(kv_events=True)
    events = published(sim, monkeypatch)
    sim.add("salted", prompt(3 * CHUNK, 1), max_tokens=1, cache_salt="mine")
    sim.add("open", prompt(3 * CHUNK, 2), max_tokens=1)
    sim.run()
    steps_until(sim, until, lambda: len(events) >= 6)

    reported = {token for event in events for token in event.token_ids}
    assert not reported - set(prompt(3 * CHUNK, 2))


def test_without_kv_events_no_tier_is_watched(make: Any) -> None:
    sim = make()
    sim.add("one", prompt(300), max_tokens=1)
    sim.run()

    assert sim.ranks[0].connector.worker.engines[0]._events is None
    assert list(sim.connector.take_events()) == []


def test_a_chunk_that_is_announced_again_is_remembered_as_long_as_a_new_one() -> None:
    token = np.zeros(1, np.int32)
    events = ChunkEvents(1)
    chunks = [Chunk(ChunkKey(number.to_bytes(16)), 0, token) for number in range(MAX_ANNOUNCED + 1)]
    for some in (chunks[:-1], chunks[:1], chunks[-1:]):
        events.announce(some, b"", "")

    events.stored("cpu", [chunks[0].key, chunks[1].key])

    assert [event.key for event in events.take() if isinstance(event, Stored)] == [chunks[0].key]


def test_events_are_bounded() -> None:
    events = ChunkEvents(CHUNK)
    for number in range(MAX_EVENTS + 5):
        events.removed("cpu", (number.to_bytes(16),))  # type: ignore[arg-type]

    taken = events.take()

    assert len(taken) == MAX_EVENTS
    assert taken[-1] == Removed("cpu", ((MAX_EVENTS + 4).to_bytes(16),))
    assert events.take() == ()
    assert MAX_ANNOUNCED < MAX_EVENTS
    events.stored("cpu", [b"unknown key"])  # type: ignore[list-item]
    assert not any(isinstance(event, Stored) for event in events.take())
