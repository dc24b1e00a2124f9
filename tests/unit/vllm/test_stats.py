"""Series in vLLM's own /metrics, with both connectors under its real scheduler, and its real Prometheus client."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from lmcache_async.integration.vllm.connector import LMCacheAsyncConnector
from lmcache_async.integration.vllm.metrics import (
    MAX_PARTS,
    PARTS,
    LMCacheAsyncStats,
    _unregister,
    added_up,
    observations,
)
from lmcache_async.metrics.samples import Samples
from lmcache_async.metrics.series import CALL_BUCKETS_S
from tests.support.vllm_simulator import SimulatedVLLM, Simulators, Until, prompt

LABELS = {"model_name": "tiny", "engine": "0"}


@pytest.fixture(autouse=True)
def _own_metrics() -> Iterator[None]:
    yield
    _unregister()


@pytest.fixture
def multi() -> bool:
    return False


@pytest.fixture
def shards() -> int | None:
    return None


@pytest.fixture
def simulator(simulators: Simulators, tmp_path: Path, multi: bool, shards: int | None) -> SimulatedVLLM:
    options = {
        "vllm.prefill_tokens_per_s": 100,
        "tiers": ["cpu", {"name": "disk", "path": str(tmp_path / "disk"), "max_bytes": "64MiB"}],
    }
    if shards:  # two engines in one process, which share its memory, instead of in two
        options |= {"vllm.kv_head_shards": shards, "arena.max_bytes": "16MiB"}
    return simulators(options, ranks=1 if shards else 2, multi=multi, split_heads=True)


def values(**labels: str) -> dict[tuple[str, ...], float]:
    """Our series as read by Prometheus, by name and values of our labels, in the order of the label names."""
    return {
        (sample.name.removeprefix("lmcache_async_"), *(v for k, v in sample.labels.items() if k not in LABELS)): sample.value
        for family in text_string_to_metric_families(generate_latest(REGISTRY).decode())
        for sample in family.samples
        if sample.name.startswith("lmcache_async_") and {**sample.labels, **labels} == sample.labels
    }  # fmt: skip


def server_metrics(sim: SimulatedVLLM) -> KVConnectorProm:
    return KVConnectorProm(sim.config, list(LABELS), {0: list(LABELS.values())})


def served(sim: SimulatedVLLM, prom: KVConnectorProm, *, engine: int = 0) -> None:
    """Pass the statistics of the steps to the front end, as vLLM does through its socket."""
    received, sim.connector_stats = sim.connector_stats, []
    for stats in received:
        prom.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats)), engine)


def run_until_received(
    sim: SimulatedVLLM, prom: KVConnectorProm, until: Until, wanted: dict[Any, float]
) -> None:
    """Run other requests until their steps have sent the wanted values."""
    seeds = iter(range(1000, 2000))

    def received() -> bool:
        sim.add(f"beside {next(seeds)}", prompt(20, next(seeds)), max_tokens=1)
        sim.run()
        served(sim, prom)
        found = values()
        return all(found.get(key) == value for key, value in wanted.items())

    until(received)


@pytest.mark.parametrize(
    ("multi", "shards"),
    [(False, None), (True, None), (False, 2)],
    ids=["alone", "in a MultiConnector", "shards"],
)
def test_a_hit_is_exported_by_tier_with_vllms_labels(
    simulator: SimulatedVLLM, simulators: Simulators
) -> None:
    sim, until = simulator, simulators.until
    prom = server_metrics(sim)
    tokens = prompt(500)
    sim.add("cold", tokens)
    simulators.settle(sim)
    sim.add("warm", tokens)
    sim.run()
    run_until_received(sim, prom, until, {("retrieve_hit_tokens_total", "cpu"): 2 * 496})

    received = values(**LABELS)
    assert received["retrieve_seconds_count",] == 2  # a retrieve of each rank
    assert received["retrieve_asked_tokens_total",] == 2 * 496
    assert received["lookup_hit_tokens_total", "cpu"] == received["load_tokens_total", "cpu"] == 496
    assert received["decided_total", "load"] == 1
    assert received["lookups_total", "hit"] == 1
    assert received["prefill_saved_seconds_total",] == pytest.approx(4.96)
    assert received["prefill_tokens_per_second",] == 100
    assert received["arena_bytes",] > 8 << 20  # of both ranks
    assert received["tier_chunks", "disk"] >= 2 * 8
    assert received["breaker_state", "read", "disk"] == 0
    assert received["tier_call_seconds_count", "cpu", "get_many"] >= 2
    assert values() == received  # every series has vLLM's labels


def test_without_changes_nothing_is_sent(simulator: SimulatedVLLM, simulators: Simulators) -> None:
    sim, until = simulator, simulators.until
    sim.add("cold", prompt(500))
    simulators.settle(sim)

    def silent() -> bool:
        sides = [*(rank.connector for rank in sim.ranks), sim.connector]
        return all(side.get_kv_connector_stats() is None for side in sides)

    until(silent)
    rank = sim.ranks[0].connector.worker.engines[0]
    assert not rank.take_stats()
    assert rank._feed._timer is None or rank._feed._timer.when() > 0


def test_an_error_in_the_metrics_does_not_affect_requests(
    simulator: SimulatedVLLM,
    simulators: Simulators,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    sim = simulator
    monkeypatch.setattr("lmcache_async.metrics.metrics.Metrics.read", broken)
    sim.add("cold", prompt(500))
    simulators.settle(sim)

    assert sim.finish_reasons == {"cold": "length"}
    simulators.until(lambda: "on purpose" in caplog.text)


def test_a_second_engine_in_the_process_starts_at_zero(simulator: SimulatedVLLM) -> None:
    first, second = server_metrics(simulator), server_metrics(simulator)
    part = filled(arena_waiting=3)

    first.observe({PARTS: [part]})
    assert ("arena_waiting",) not in values()
    second.observe({PARTS: [part]})
    assert values()["arena_waiting",] == 3


def test_vllms_log_line_has_a_few_numbers(simulator: SimulatedVLLM, simulators: Simulators) -> None:
    sim, until = simulator, simulators.until
    logged = KVConnectorLogging(sim.config.kv_transfer_config)
    sim.add("cold", prompt(500))
    simulators.settle(sim)
    until(lambda: _steps_tell(sim, logged, "stored tokens"))
    lines: list[str] = []

    logged.log(lambda text, *arguments: lines.append(text % arguments))

    assert "stored tokens=" in lines[0]
    assert "dropped" not in lines[0]
    assert len(lines[0]) < 300


def _steps_tell(sim: SimulatedVLLM, logged: KVConnectorLogging, name: str) -> bool:
    sim.add(f"beside {len(sim.outputs)}", prompt(20, len(sim.outputs)), max_tokens=1)
    sim.run()
    for stats in sim.connector_stats:
        logged.observe(stats)
    sim.connector_stats = []
    received = logged.transfer_stats_accumulator
    return received is not None and name in received.reduce()


def filled(source: str = "rank 0", **gauges: float) -> list[Any]:
    out = Samples()
    for name, value in gauges.items():
        out.add(name, value)
    out.add("stores_total", 1)
    out.add("retrieve_seconds", (0.04, *[0] * 5, 2, *[0] * 11))
    return [source, out.to_plain()]


def test_the_parts_of_an_interval_are_added_up_and_bounded() -> None:
    stats = LMCacheAsyncConnector.build_kv_connector_stats()
    assert stats.is_empty()
    for number in range(5 * MAX_PARTS):
        stats = stats.aggregate(
            LMCacheAsyncStats({PARTS: [filled(f"rank {number % 2}", arena_waiting=number)]})
        )
    stats = pickle.loads(pickle.dumps(stats))

    assert len(stats.parts) <= MAX_PARTS
    counted = added_up(stats.parts)
    assert counted.get("stores_total") == 5 * MAX_PARTS
    assert counted.get("retrieve_seconds")[1 + 5] == 10 * MAX_PARTS
    last = {source: Samples.from_plain(plain).get("arena_waiting") for source, plain in stats.parts}
    assert last == {"rank 0": 5 * MAX_PARTS - 2, "rank 1": 5 * MAX_PARTS - 1}
    stats.reset()
    assert stats.is_empty()


def test_unknown_series_and_invalid_parts_are_ignored(
    simulator: SimulatedVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    prom = server_metrics(simulator)

    prom.observe({PARTS: [["rank 0", {"of_tomorrow_total": [[[], 1]]}], filled(arena_waiting=1)]})
    prom.observe({PARTS: [["rank 0", {"stores_total": 5}]]})

    assert values()["arena_waiting",] == 1
    assert "cannot export the metrics of LMCacheAsyncConnector" in caplog.text


@given(st.lists(st.floats(1e-7, 1e3), max_size=30))
def test_observations_are_in_their_buckets_and_add_up(seconds: list[float]) -> None:
    counts = [0] * (len(CALL_BUCKETS_S) + 1)
    for value in seconds:
        counts[sum(value > bound for bound in CALL_BUCKETS_S)] += 1

    found = list(observations(CALL_BUCKETS_S, counts, sum(seconds)))

    again = [0] * len(counts)
    for value, count in found:
        again[sum(value > bound for bound in CALL_BUCKETS_S)] += count
    assert again == counts
    assert sum(value * count for value, count in found) == pytest.approx(sum(seconds), rel=1e-6, abs=1e-9)
