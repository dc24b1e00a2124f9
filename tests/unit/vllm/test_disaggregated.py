"""Prefill in one simulated vLLM and decode in another, with a shared tier controlled by the test.

The simulator fails a test when a request would read KV that is not the KV of its tokens.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from lmcache_async.engine import engine as engine_module
from lmcache_async.integration.vllm.keys import PROMISE_FIELD
from lmcache_async.testing.fakes import FakeRegistry
from tests.support.vllm_simulator import (
    SimulatedVLLM,
    Simulators,
    assert_nothing_is_held,
    expected,
    prompt,
    scheduler_of,
)
from tests.unit.vllm.shelf import Shelf
from tests.unit.vllm.test_simulated import MODELS

Params = dict[str, Any] | None


class Pair:
    """A producer and a consumer with a shelf between them."""

    def __init__(self, simulators: Simulators, shelf: Shelf) -> None:
        self.simulators = simulators
        self.shelf = shelf

    def vllm(self, role: str, options: dict[str, Any] | None = None, **setup: Any) -> SimulatedVLLM:
        given = {"tiers": ["cpu", "shelf"], "vllm.wait_for_producer_s": 60.0, **(options or {})}
        return self.simulators(given, kv_role=role, **setup)

    def prefill(self, producer: SimulatedVLLM, name: str, tokens: list[int], **options: Any) -> Params:
        """Like a proxy: generate one token, and return the KV transfer parameters of the answer."""
        producer.add(name, tokens, max_tokens=1, **options)
        producer.run()
        assert producer.outputs[name] == expected(tokens, 1)
        return producer.kv_transfer_params[name]

    def waiting(self, consumer: SimulatedVLLM, asks: int = 3) -> None:
        """Step until the consumer's requests have been looked up this many times without a hit."""
        counts = scheduler_of(consumer).promises

        def asked() -> bool:
            consumer.step()
            return bool(counts.queries >= asks)

        self.simulators.until(asked)


@pytest.fixture
def pair(simulators: Simulators, monkeypatch: pytest.MonkeyPatch) -> Pair:
    shelf = Shelf()
    registry = FakeRegistry(tiers={"shelf": shelf.tier_class()})
    monkeypatch.setattr(engine_module, "Registry", lambda: registry)
    return Pair(simulators, shelf)


def waits(consumer: SimulatedVLLM) -> Any:
    return scheduler_of(consumer).promises


@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("length", [8, 40, 64, 300, 512])
def test_the_consumer_decodes_from_the_producers_kv(pair: Pair, length: int, ranks: int, overlapped: bool):
    producer = pair.vllm("kv_producer", ranks=ranks, overlapped=overlapped)
    consumer = pair.vllm("kv_consumer", ranks=ranks, overlapped=overlapped)
    tokens = prompt(length)
    params = pair.prefill(producer, "p", tokens)
    consumer.add("d", tokens, params=params)
    consumer.run()

    whole = length - length % 16
    assert (params[PROMISE_FIELD]["tokens"] if params else 0) == whole
    assert consumer.cached_tokens["d"] == (0, whole)
    assert consumer.computed_tokens == (length - whole or 1) + 3
    assert consumer.outputs["d"] == expected(tokens, 4)
    assert (waits(consumer).kept, waits(consumer).late) == (int(whole > 0), 0)


@pytest.mark.kv_groups
@pytest.mark.parametrize("length", [288, 300])
@pytest.mark.parametrize(("model", "pinned"), [("window", 0.5), ("window", 0.02), ("two states", 0.5)])
def test_no_consumer_waits_for_groups_that_the_producer_has_not_stored(
    pair: Pair, model: str, length: int, pinned: float
):
    """The producer has room to pin the blocks of all groups, or of a chunk of full attention but not of a window."""
    producer = pair.vllm("kv_producer", {"vllm.max_pinned_fraction": pinned}, groups=MODELS[model])
    consumer = pair.vllm("kv_consumer", groups=MODELS[model])
    tokens = prompt(length)
    consumer.add("d", tokens, params=pair.prefill(producer, "p", tokens))
    consumer.run()

    assert consumer.outputs["d"] == expected(tokens, 4)
    assert (waits(consumer).kept, waits(consumer).late) == (int(pinned == 0.5), 0)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_one_rank_and_two_ranks_keep_each_others_promises_of_head_shards(
    pair: Pair, prefill: int, decode: int
):
    shards = {"vllm.kv_head_shards": 2}
    producer = pair.vllm("kv_producer", shards, ranks=prefill, split_heads=True)
    consumer = pair.vllm("kv_consumer", shards, ranks=decode, split_heads=True)
    tokens = prompt(300)
    consumer.add("d", tokens, params=pair.prefill(producer, "p", tokens))
    consumer.run()

    assert consumer.cached_tokens["d"] == (0, 288)
    assert consumer.outputs["d"] == expected(tokens, 4)
    assert (waits(consumer).kept, waits(consumer).late, waits(consumer).mismatched) == (1, 0, 0)


@pytest.mark.parametrize(
    ("roles", "params"),
    [(("kv_producer", "kv_consumer"), None), (("kv_both", "kv_both"), {"do_remote_decode": True})],
    ids=["apart", "both"],
)
def test_pending_writes_are_awaited_while_others_run(pair: Pair, roles: tuple[str, str], params: Params):
    producer, consumer = (pair.vllm(role) for role in roles)
    pair.shelf.slow = True
    tokens, other = prompt(300), prompt(100, seed=1)
    consumer.add("d", tokens, params=pair.prefill(producer, "p", tokens, params=params))
    pair.waiting(consumer)
    consumer.add("other", other)
    while "other" not in consumer.finish_reasons:
        consumer.step()
    assert consumer.outputs["d"] == []
    pair.shelf.arrive()
    consumer.run()

    assert consumer.cached_tokens["d"] == (0, 288)
    assert (consumer.outputs["d"], consumer.outputs["other"]) == (expected(tokens, 4), expected(other, 4))


@pytest.mark.parametrize("chunks", [0, 2])
def test_a_dead_producer_delays_a_request_by_the_configured_time_and_changes_no_answer(
    pair: Pair, chunks: int
):
    producer = pair.vllm("kv_producer")
    consumer = pair.vllm("kv_consumer", {"vllm.wait_for_producer_s": 0.05})
    tokens = prompt(300)
    pair.prefill(producer, "part", tokens[: chunks * 64 or 1])
    pair.simulators.settle(producer)
    pair.shelf.slow = True
    consumer.add("d", tokens, params=pair.prefill(producer, "p", tokens))
    consumer.run()

    assert consumer.cached_tokens["d"] == (0, chunks * 64)
    assert consumer.outputs["d"] == expected(tokens, 4)
    assert (waits(consumer).kept, waits(consumer).late) == (0, 1)


def test_aborting_a_request_that_waits_leaves_nothing_behind(pair: Pair):
    producer, consumer = pair.vllm("kv_producer"), pair.vllm("kv_consumer")
    pair.shelf.slow = True
    tokens = prompt(300)
    consumer.add("d", tokens, params=pair.prefill(producer, "p", tokens))
    pair.waiting(consumer)
    consumer.abort("d")
    consumer.run()
    pair.simulators.until(lambda: waits(consumer).waiting == 0)

    assert_nothing_is_held(consumer)
    pair.shelf.arrive()
    consumer.add("again", tokens)
    consumer.run()
    assert consumer.cached_tokens["again"] == (0, 288)


def test_resetting_the_cache_ends_a_wait(pair: Pair):
    producer, consumer = pair.vllm("kv_producer"), pair.vllm("kv_consumer")
    pair.shelf.slow = True
    tokens = prompt(300)
    consumer.add("d", tokens, params=pair.prefill(producer, "p", tokens))
    pair.waiting(consumer)
    consumer.scheduler.reset_prefix_cache(reset_connector=True)
    consumer.run()

    assert consumer.cached_tokens["d"] == (0, 0)
    assert consumer.outputs["d"] == expected(tokens, 4)


def test_when_the_shared_tier_refuses_consumers_are_not_told_to_wait(pair: Pair):
    producer = pair.vllm("kv_producer")
    pair.shelf.broken = True
    first = pair.prefill(producer, "first", prompt(200))  # one step, so its end is not known before it ends
    pair.simulators.settle(producer)
    producer.add("tells", prompt(10, seed=1), max_tokens=2)  # a step, which delivers the tiers' answer
    producer.run()
    second = pair.prefill(producer, "second", prompt(300, seed=2))
    pair.shelf.broken = False
    numbers = itertools.count(3)

    def promises_again() -> bool:  # once the breaker before the tier has let a store through
        number = next(numbers)
        return pair.prefill(producer, f"later {number}", prompt(300, seed=number)) is not None

    pair.simulators.until(promises_again)
    assert first is not None  # the failure was not known yet
    assert second is None


def test_chunks_lost_by_the_shared_tier_are_written_again_from_memory(pair: Pair):
    producer, consumer = pair.vllm("kv_producer"), pair.vllm("kv_consumer")
    tokens = prompt(300)
    pair.prefill(producer, "p", tokens)
    pair.simulators.settle(producer)
    pair.shelf.visible.clear()
    params = pair.prefill(producer, "again", tokens)
    assert producer.cached_tokens["again"] == (0, 288)
    consumer.add("d", tokens, params=params)
    consumer.run()

    assert consumer.cached_tokens["d"] == (0, 288)
    assert consumer.outputs["d"] == expected(tokens, 4)


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_lengths_deaths_and_aborts_gives_every_request_its_own_answer(pair: Pair, seed: int):
    chosen = random.Random(seed)
    ranks, chunk = chosen.choice([1, 2]), chosen.choice([16, 32, 64])
    options = {"chunk_size": chunk, "arena.max_bytes": chosen.choice(["256KiB", "1MiB"])}
    producer = pair.vllm("kv_producer", options, ranks=ranks, overlapped=chosen.random() < 0.5)
    wait = {"vllm.wait_for_producer_s": chosen.choice([0.02, 0.2])}
    consumer = pair.vllm(
        "kv_consumer",
        options | wait,
        ranks=ranks,
        overlapped=chosen.random() < 0.5,
        num_blocks=chosen.choice([24, 200]),
        max_num_seqs=chosen.choice([2, 8]),
    )
    roots = [prompt(280, seed=1000 + index) for index in range(2)]
    prompts = {}
    for index in range(16):
        tokens = chosen.choice(roots)[: chosen.randrange(1, 280)] + prompt(chosen.choice([0, 1, 20]), index)
        prompts[f"r{index}"] = tokens
        pair.shelf.slow, pair.shelf.broken = chosen.random() < 0.3, chosen.random() < 0.1
        consumer.add(f"r{index}", tokens, params=pair.prefill(producer, f"r{index}", tokens))
        for _ in range(chosen.randrange(4)):
            consumer.step()
        if chosen.random() < 0.3:
            pair.shelf.arrive()
        if chosen.random() < 0.1 and f"r{index}" not in consumer.finish_reasons:
            consumer.abort(f"r{index}")
    consumer.run()

    for name, tokens in prompts.items():
        if consumer.finish_reasons[name] != "abort":
            assert consumer.outputs[name] == expected(tokens, 4)
