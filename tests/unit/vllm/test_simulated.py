"""Scheduler and worker connectors under vLLM's real scheduler, with the real engine and known KV values.

The simulator fails a test when a request would read KV that is not the KV of its tokens.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_async.device.progress import LoadProgress
from lmcache_async.integration.vllm.events import MemoryChanges
from lmcache_async.integration.vllm.groups import KVGroups
from lmcache_async.integration.vllm.jobs import Job
from lmcache_async.integration.vllm.worker import LayerwiseLoads
from lmcache_async.memory.header import read_header
from lmcache_async.plugins.disk.directory import RecordDirectory
from lmcache_async.types import RetrieveReport
from tests.support.vllm_simulator import (
    MODELS,
    SIMULATOR_OPTIONS,
    Setup,
    SimulatedVLLM,
    Simulators,
    assert_nothing_is_held,
    engine_of,
    engines_of,
    expected,
    prompt,
    scheduler_of,
)
from tests.support.vllm_traffic import Traffic, another_connector, related_prompts

MODEL_NAMES = [
    pytest.param(name, marks=() if groups == MODELS["full"] else pytest.mark.kv_groups)
    for name, groups in MODELS.items()
]


@pytest.mark.parametrize(("stored", "scheduled"), [(False, 200), (True, 0)])
def test_a_prompt_that_no_tier_has_begins_in_its_first_step(
    simulators: Simulators, tmp_path: Path, stored: bool, scheduled: int
):
    """The index of the disk tier is in memory. A prompt whose beginning is only on disk is looked up."""
    options = {"tiers": ["cpu", {"name": "disk", "path": str(tmp_path / "disk"), "max_bytes": "1GiB"}]}
    first, known = simulators.stored(options, num_tokens=200)
    first.close()
    simulators.made.remove(first)
    sim = simulators(options)

    sim.add("new", known if stored else prompt(200, seed=9))
    output = sim.scheduler.schedule()

    assert output.total_num_scheduled_tokens == scheduled


def test_the_next_turn_of_a_conversation_finds_the_last_one_s_answer(simulators: Simulators):
    sim = simulators()
    tokens = prompt(100)
    sim.add("first", tokens, max_tokens=100)
    simulators.settle(sim)
    turn = tokens + sim.outputs["first"] + prompt(30, seed=1)
    sim.add("second", turn)
    sim.run()

    assert sim.cached_tokens["second"] == (0, 192)
    assert sim.outputs["second"] == expected(turn, 4)


def test_tenants_share_nothing(simulators: Simulators):
    sim = simulators()
    tokens = prompt(200)
    sim.add("mine", tokens, cache_salt="a", params={"tags": {"team": "x"}})
    simulators.settle(sim)
    sim.add("other salt", tokens, cache_salt="b", params={"tags": {"team": "x"}})
    sim.add("other tag", tokens, cache_salt="a")
    simulators.settle(sim)
    sim.add("mine again", tokens, cache_salt="a", params={"tags": {"team": "x"}})
    sim.run()

    assert sim.cached_tokens["other salt"][1] == sim.cached_tokens["other tag"][1] == 0
    assert sim.cached_tokens["mine again"] == (0, 192)


SHARDS = {"vllm.kv_head_shards": 2}


def on_disk(folder: Path) -> dict[str, Any]:
    return {"tiers": ["cpu", {"name": "disk", "path": str(folder), "max_bytes": "64MiB"}]}


def hit_after_restart(
    simulators: Simulators, folder: Path, before: dict[str, Any], after: dict[str, Any]
) -> int:
    """Return the number of tokens that a second vLLM, with its own options and setup, loads from the first one's disk."""
    tokens = prompt(500)
    sims = []
    for setup in (before, after):
        options = {**on_disk(folder), **setup.get("options", {})}
        rest = {name: value for name, value in setup.items() if name != "options"}
        sims.append(simulators(options, split_heads=True, **rest))
        sims[-1].add("one", tokens)
        simulators.settle(sims[-1])
        sims[-1].close()
        simulators.made.clear()
    for sim in sims:
        assert sim.outputs["one"] == expected(tokens, 4)
        assert_nothing_is_held(sim)
    return sims[1].cached_tokens["one"][1]


@pytest.mark.parametrize("layerwise", ["auto", "never"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_one_rank_and_two_ranks_load_each_others_head_shards(
    simulators: Simulators, tmp_path: Path, before: int, after: int, layerwise: str
):
    options = {**SHARDS, "vllm.layerwise_load": layerwise}
    hit = hit_after_restart(
        simulators,
        tmp_path / "kv",
        {"ranks": before, "options": options},
        {"ranks": after, "options": options},
    )

    assert hit == 496


def test_head_shards_of_pages_by_head_are_the_records_of_as_many_ranks(
    simulators: Simulators, tmp_path: Path
):
    shards = {"ranks": 1, "options": SHARDS}

    assert hit_after_restart(simulators, tmp_path / "there", {"ranks": 2}, shards) == 496
    assert hit_after_restart(simulators, tmp_path / "back", shards, {"ranks": 2}) == 496


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ranks": 1}, {"ranks": 2}),
        ({"ranks": 2}, {"ranks": 1}),
        ({"ranks": 1}, {"ranks": 1, "options": SHARDS}),
        ({"ranks": 1, "options": SHARDS}, {"ranks": 1}),
        ({"ranks": 1, "options": {"vllm.kv_head_shards": 1}}, {"ranks": 1, "options": SHARDS}),
        ({"ranks": 1, "options": SHARDS}, {"ranks": 1, "options": {"vllm.kv_head_shards": 1}}),
        ({"ranks": 1, "options": {"vllm.kv_head_shards": 1}}, {"ranks": 2, "options": SHARDS}),
    ],
    ids=str,
)
def test_ranks_and_head_shards_of_other_numbers_load_nothing(
    simulators: Simulators, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
):
    assert hit_after_restart(simulators, tmp_path / "kv", before, after) == 0


def test_a_hit_ends_where_one_head_shard_has_no_record(simulators: Simulators, tmp_path: Path):
    folder = tmp_path / "kv"
    tokens = prompt(500)
    first = simulators({**SHARDS, **on_disk(folder)}, split_heads=True)
    first.add("cold", tokens)
    simulators.settle(first)
    first.close()
    simulators.made.clear()
    for path in (folder / "rank-1").glob("??/*"):
        if read_header(memoryview(path.read_bytes())).tokens.tolist() == tokens[128:192]:
            path.unlink()

    second = simulators({**SHARDS, **on_disk(folder)}, split_heads=True, ranks=2)
    second.add("warm", tokens)
    second.run()

    assert second.cached_tokens["warm"] == (0, 128)
    assert second.outputs["warm"] == expected(tokens, 4)


def test_a_step_that_fails_in_one_head_shard_is_reported_once_for_the_rank(
    simulators: Simulators, monkeypatch: pytest.MonkeyPatch
):
    sim, tokens = simulators.stored({**SHARDS, "vllm.layerwise_load": "never"}, split_heads=True)
    first, _ = sim.ranks[0].connector.worker.engines

    def fail(jobs: Sequence[Job]) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(first.transfers.layerwise, "start", fail)
    sim.add("warm", tokens)
    sim.run()

    assert sim.outputs["warm"] == expected(tokens, 4)
    assert scheduler_of(sim).metrics.counter("failed_loads_total").value == 1


def test_a_head_shard_that_cannot_be_opened_closes_those_before_it(socket_dir: Path, tmp_path: Path):
    folder = tmp_path / "kv"
    taken, free = RecordDirectory(folder / "rank-1"), RecordDirectory(folder / "rank-0")
    taken.open()

    options = {**SIMULATOR_OPTIONS, "vllm.socket_dir": str(socket_dir), **SHARDS, **on_disk(folder)}
    sim = SimulatedVLLM(Setup(folder=tmp_path / "model", options=options, split_heads=True))

    assert sim.ranks[0].connector.worker is None
    assert free.open() == []
    for closes in (taken, free, sim):
        closes.close()


def test_records_stored_after_a_reset_are_not_found_after_a_restart(simulators: Simulators, tmp_path: Path):
    """The weights may have changed in place before the reset. After the restart they are those of the files."""
    sim, tokens = simulators.stored(on_disk(tmp_path / "kv"))
    assert sim.scheduler.reset_prefix_cache(reset_connector=True)
    simulators.until(lambda: scheduler_of(sim).ready)
    for name in ("stored", "found"):
        sim.add(name, tokens)
        simulators.settle(sim)
    sim.close()
    simulators.made.clear()
    restarted = simulators(on_disk(tmp_path / "kv"))
    restarted.add("restarted", tokens)
    restarted.run()

    assert [sim.cached_tokens[name][1] for name in ("stored", "found")] == [0, 288]
    assert restarted.cached_tokens["restarted"] == (0, 0)


@pytest.mark.parametrize(("num_ranks", "overlapped"), [(1, True), (2, False)])
def test_a_hit_in_a_slow_tier_is_computed_without_any_setting(
    simulators: Simulators, tmp_path: Path, overlapped: bool, num_ranks: int
):
    """The first hit is loaded and shows the speed of the tier. A read takes longer than all steps of a prompt."""
    faults = {"name": "faults", "delay_s": 2.0, "get": {"delay": 1.0}}
    disk = {"name": "disk", "path": str(tmp_path / "kv"), "max_bytes": "64MiB", "layers": [faults]}
    options = {
        "vllm.load_policy": "auto",
        "tiers": ["cpu", disk],
        "arena.max_bytes": "256KiB",  # less than one prompt
        "retrieve.promote": False,
    }
    sim = simulators(options, overlapped=overlapped, ranks=num_ranks)
    prompts = [prompt(900, seed) for seed in range(4)]
    for index, tokens in enumerate(prompts):
        sim.add(f"cold{index}", tokens)
        simulators.settle(sim)
    assert scheduler_of(sim).load_policy.prefill.known
    for index, tokens in enumerate(prompts[:2]):
        sim.add(f"warm{index}", tokens)
        simulators.settle(sim)

    counted = scheduler_of(sim).metrics.values("decided_total")
    assert counted == {("load",): 1, ("recompute",): 1, ("partial",): 0}
    assert sim.cached_tokens["warm1"] == (0, 0)
    assert sim.outputs["warm1"] == expected(prompts[1], 4)


@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_preempted_requests_finish_with_the_right_answers(simulators: Simulators, overlapped: bool):
    sim = simulators(num_blocks=24, overlapped=overlapped, max_num_seqs=4)
    prompts = {f"r{index}": prompt(60, seed=index) for index in range(4)}
    for name, tokens in prompts.items():
        sim.add(name, tokens, max_tokens=70)
    sim.run()

    assert sim.preemptions > 0
    for name, tokens in prompts.items():
        assert sim.outputs[name] == expected(tokens, 70)


def test_a_request_aborted_during_its_prefill_stores_its_computed_chunks(simulators: Simulators):
    sim = simulators()
    tokens = prompt(500)
    sim.add("cold", tokens)
    while sim.computed_tokens < 256:
        sim.step()
    sim.abort("cold")
    simulators.settle(sim)
    sim.add("warm", tokens)
    sim.run()

    assert sim.cached_tokens["warm"] == (0, 256)
    assert sim.outputs["warm"] == expected(tokens, 4)


@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_a_streaming_session_is_neither_loaded_nor_stored(simulators: Simulators, overlapped: bool):
    """VLLM revokes the last token of each answer."""
    sim, tokens = simulators.stored(overlapped=overlapped)
    more = prompt(100, seed=1)
    turns = [expected(tokens, 4)]
    whole = tokens + turns[0][:-1] + more
    turns.append(expected(whole, 4))

    sim.add("session", tokens, resumable=True)
    for further in (more, []):
        sim.run()
        sim.extend("session", further)
    simulators.settle(sim)
    sim.add("after", whole)
    sim.run()

    assert sim.outputs["session"] == turns[0] + turns[1]
    assert [sim.cached_tokens[name][1] for name in ("session", "after")] == [0, 288]
    assert sim.outputs["after"] == turns[1]


@pytest.mark.parametrize("layerwise", ["auto", "never"])
@pytest.mark.parametrize("hit_chunks", [0, 1, 3])
@pytest.mark.parametrize(
    ("num_ranks", "shards"), [(1, None), (2, None), (1, 2)], ids=["one rank", "two ranks", "shards"]
)
def test_a_load_that_fails_on_one_rank_is_computed_and_stored_again(
    simulators: Simulators, hit_chunks: int, num_ranks: int, shards: int | None, layerwise: str
):
    options = {"vllm.layerwise_load": layerwise, "vllm.kv_head_shards": shards}
    sim, tokens = simulators.stored(options, ranks=num_ranks, split_heads=shards is not None)
    engine = engines_of(sim)[-1]
    retrieve = engine.retrieve_chunks

    async def some(request: Any) -> Any:
        engine.retrieve_chunks = retrieve  # once
        if not hit_chunks:
            return RetrieveReport()
        return await retrieve(
            replace(request, chunks=request.chunks[:hit_chunks], rows=request.rows[:hit_chunks])
        )

    engine.retrieve_chunks = some
    sim.add("warm", tokens)
    sim.run()

    assert sim.outputs["warm"] == expected(tokens, 4)
    assert "length" in sim.finish_reasons["warm"]
    counted = scheduler_of(sim).metrics.values
    assert counted("failed_loads_total") == {(): 1}
    assert counted("load_tokens_total") == ({("cpu",): hit_chunks * 64} if hit_chunks else {})


def test_a_load_that_fails_after_its_blocks_are_filled_is_computed_again(
    simulators: Simulators, monkeypatch: pytest.MonkeyPatch
):
    sim, tokens = simulators.stored()
    is_proven = LayerwiseLoads._was_awaited

    def unproven(loads: LayerwiseLoads, progress: LoadProgress) -> bool:
        is_proven(loads, progress)
        return False

    monkeypatch.setattr(LayerwiseLoads, "_was_awaited", unproven)
    sim.add("warm", tokens)
    sim.run()

    assert sim.outputs["warm"] == expected(tokens, 4)
    assert scheduler_of(sim).metrics.counter("failed_loads_total").value == 1


@pytest.mark.parametrize("when", ["at once", "later"])
def test_blocks_of_a_failed_layerwise_load_are_never_read(simulators: Simulators, when: str):
    sim = simulators({"chunk_size": 32}, max_num_batched_tokens=64)
    tokens = prompt(300)
    sharing = tokens[:280] + prompt(20, seed=1)
    sim.add("cold", tokens)
    simulators.settle(sim)
    engine = engine_of(sim.ranks[0])
    retrieve = engine.retrieve_chunks

    async def nothing(request: Any) -> Any:
        engine.retrieve_chunks = retrieve  # once
        return RetrieveReport()

    engine.retrieve_chunks = nothing
    sim.add("warm", tokens)
    if when == "at once":
        sim.add("sharing", sharing)
    scheduler = scheduler_of(sim)
    names = ["warm", "sharing"] if when == "at once" else ["warm"]
    simulators.until(
        lambda: all(scheduler.tracker(name).offer(0.0, ready=True).tokens is not None for name in names)
    )
    while not scheduler_of(sim).metrics.counter("failed_loads_total").value:
        sim.step()
    sim.abort("warm")  # so that it does not compute the missing part
    if when == "later":
        sim.add("sharing", sharing)
    sim.run()

    assert sim.outputs["sharing"] == expected(sharing, 4)


def test_blocks_computed_after_a_failed_load_of_an_aborted_request_are_never_read(simulators: Simulators):
    """VLLM aborts a request between its step and the report of the step, and then frees its block table."""
    sim, tokens = simulators.stored({"chunk_size": 32}, num_tokens=160)
    longer = tokens + prompt(96, seed=5)
    engine = engine_of(sim.ranks[0])
    retrieve, update = engine.retrieve_chunks, sim.scheduler.update_from_output

    async def nothing(request: Any) -> Any:
        engine.retrieve_chunks = retrieve  # once
        return RetrieveReport()

    def abort_and_update(output: Any, result: Any) -> Any:
        if "warm" in output.num_scheduled_tokens:
            sim.abort("warm")
        return update(output, result)

    engine.retrieve_chunks = nothing
    sim.scheduler.update_from_output = abort_and_update
    sim.add("warm", longer)
    sim.run()
    for name in ("second", "third"):
        sim.add(name, longer)
        sim.run()
        assert sim.outputs[name] == expected(longer, 4)

    assert scheduler_of(sim).metrics.counter("failed_loads_total").value == 1


@pytest.mark.parametrize(
    ("role", "option", "stores", "loads"),
    [
        ("kv_producer", {}, True, True),
        ("kv_producer", {"vllm.producer_loads": False}, True, False),
        ("kv_consumer", {}, False, False),
        ("kv_consumer", {"vllm.consumer_stores": True}, True, True),
        ("kv_both", {}, True, True),
    ],
)
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_stores_and_loads_by_role(
    simulators: Simulators, role: str, option: dict[str, Any], stores: bool, loads: bool, overlapped: bool
):
    sim = simulators(option, kv_role=role, overlapped=overlapped)
    tokens = prompt(300)
    for name in ("cold", "warm"):
        sim.add(name, tokens)
        simulators.settle(sim)

    assert sim.cached_tokens["warm"] == (0, 288 if loads else 0)
    assert bool(engine_of(sim.ranks[0]).statistics().tiers["cpu"].chunks) == stores
    # This is how vLLM decides that a load must not get blocks that a step still writes.
    assert sim.config.kv_transfer_config.is_kv_consumer == (loads or role != "kv_producer")


@pytest.mark.parametrize("length", [300, 288, 192, 193])
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("model", "layerwise"),
    [("full", "never"), *(pytest.param(*each.values, "auto", marks=each.marks) for each in MODEL_NAMES)],
)
def test_a_hit_has_all_of_a_prompt_that_vllm_can_use(
    simulators: Simulators, model: str, num_ranks: int, layerwise: str, overlapped: bool, length: int
):
    groups = MODELS[model]
    sim = simulators(
        {"vllm.layerwise_load": layerwise}, groups=groups, overlapped=overlapped, ranks=num_ranks
    )
    tokens = prompt(length)
    for name in ("cold", "warm"):
        sim.add(name, tokens)
        simulators.settle(sim)

    usable = length if model == "full" else length - 1
    hit = usable - usable % KVGroups(groups).block_size
    assert sim.cached_tokens["warm"] == (0, hit)
    assert sim.computed_tokens == length + (length - hit or 1) + 2 * 3  # and three generated tokens each
    assert sim.outputs["cold"] == sim.outputs["warm"] == expected(tokens, 4)
    counted = scheduler_of(sim).metrics.values
    assert counted("load_tokens_total") == {("cpu",): hit}
    assert counted("failed_loads_total") == {(): 0}


def test_a_hit_within_the_first_chunk_is_counted_by_its_tier(simulators: Simulators):
    sim, tokens = simulators.stored(num_tokens=40)
    sim.add("warm", tokens)
    sim.run()

    counted = scheduler_of(sim).metrics.values
    assert counted("lookup_hit_tokens_total") == counted("load_tokens_total") == {("cpu",): 32}
    assert sim.cached_tokens["warm"] == (0, 32)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_hit_in_host_memory_needs_no_step_for_the_lookup(
    simulators: Simulators, model: str, num_ranks: int
):
    """The scheduler has the worker's index if both are in one process; otherwise it has what the ranks have reported."""
    sim, tokens = simulators.stored(groups=MODELS[model], ranks=num_ranks)
    sim.add("other", prompt(40, seed=1))  # in its steps, the ranks report what they have stored
    simulators.settle(sim)
    sim.add("warm", tokens)
    sim.step()

    found = scheduler_of(sim).metrics.counter("loads_total").value
    assert found == any(group.is_full for group in MODELS[model])


@pytest.mark.parametrize("model", ["full", pytest.param("window", marks=pytest.mark.kv_groups)])
def test_after_a_failed_load_hits_in_host_memory_need_no_step_for_the_lookup(
    simulators: Simulators, model: str, monkeypatch: pytest.MonkeyPatch
):
    """Their chunks stay in host memory, so no later report contains them."""
    sim, tokens = simulators.stored(groups=MODELS[model], ranks=2)
    others = prompt(300, seed=5)
    for name, asked in (("others", others), ("short", prompt(40, seed=1))):
        sim.add(name, asked)
        simulators.settle(sim)
    loads, failed = (
        scheduler_of(sim).metrics.counter(name) for name in ("loads_total", "failed_loads_total")
    )

    async def fail(request: Any) -> RetrieveReport:
        return RetrieveReport(cause="a disk error")

    with monkeypatch.context() as patched:
        patched.setattr(engine_of(sim.ranks[1]), "retrieve_chunks", fail)
        sim.add("fails", others)
        simulators.settle(sim)
    for name, asked in (("of another prompt", tokens), ("of the same prompt", others)):
        before = loads.value
        sim.add(name, asked)
        sim.step()
        assert (failed.value, loads.value) == (1, before + 1), name
        simulators.settle(sim)


@pytest.mark.kv_groups
def test_a_request_whose_load_has_failed_lets_vllm_try_those_that_hold_blocks(
    simulators: Simulators, monkeypatch: pytest.MonkeyPatch
):
    """A prompt may need more blocks to be computed than to be loaded, and vLLM tries no request after one that does not fit."""
    sim, tokens = simulators.stored(groups=MODELS["chunked local"], num_tokens=242, num_blocks=36)
    loads, gate = scheduler_of(sim).metrics.counter("loads_total"), threading.Event()

    async def fail(request: Any) -> RetrieveReport:
        await asyncio.to_thread(gate.wait)
        return RetrieveReport(cause="a disk error")

    monkeypatch.setattr(engine_of(sim.ranks[0]), "retrieve_chunks", fail)
    for name in ("first", "second"):
        sim.add(name, tokens)
    simulators.until(lambda: sim.step() or loads.value == 2)
    gate.set()
    sim.run(max_seconds=20)

    assert sim.outputs["first"] == sim.outputs["second"] == expected(tokens, 4)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_chunks_evicted_between_lookup_and_load_are_computed(
    simulators: Simulators, model: str, num_ranks: int
):
    sim, tokens = simulators.stored(groups=MODELS[model], ranks=num_ranks)
    sim.add("warm", tokens)
    (rank,) = sim.ranks[-1].connector.worker.engines
    rank._loop.submit(rank.engine.clear()).result(60)
    sim.run()

    assert sim.outputs["warm"] == expected(tokens, 4)


@pytest.mark.parametrize(
    "model",
    [name for name in MODEL_NAMES if name.values != ("window in all layers",)],  # which evicts nothing
)
def test_answers_are_right_if_no_eviction_is_reported(
    simulators: Simulators, model: str, monkeypatch: pytest.MonkeyPatch
):
    """The scheduler then takes every chunk that was ever stored to be in host memory."""
    monkeypatch.setattr(MemoryChanges, "removed", lambda *_: None)
    options = {"arena.max_bytes": "256KiB", "vllm.max_pinned_fraction": 0.9}  # so that no store is dropped
    sim = simulators(options, groups=MODELS[model], ranks=2)
    prompts = [prompt(600, seed=seed) for seed in range(16)]
    for turn in range(3):
        for seed, tokens in enumerate(prompts):
            sim.add(f"{turn} {seed}", tokens)
            simulators.settle(sim)

    evictions = [engine_of(rank).statistics().tiers["cpu"].evictions for rank in sim.ranks]
    assert all(evictions)
    assert scheduler_of(sim).metrics.counter("failed_loads_total").value
    for turn in range(3):
        for seed, tokens in enumerate(prompts):
            assert sim.outputs[f"{turn} {seed}"] == expected(tokens, 4)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chunks_that_are_looked_up_in_the_scheduler_s_process_are_evicted_last_chunk_first(
    simulators: Simulators, num_ranks: int
):
    """The chunks are stored by several steps, so the eviction policy learns their order from the lookup alone."""
    sim = simulators({"arena.max_bytes": "512KiB"}, ranks=num_ranks)
    tokens = prompt(1024)
    for name, asked in (("cold", tokens), ("other", prompt(1936, seed=1)), ("warm", tokens)):
        sim.add(name, asked)
        while sim.busy:
            sim.step()
            simulators.end_calls(sim)  # the stores of the steps end in their order
        simulators.settle(sim)

    assert engine_of(sim.ranks[0]).statistics().tiers["cpu"].evictions
    assert sim.cached_tokens["warm"][1] >= 512


@pytest.mark.parametrize("local", [100, 200, 250])
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_hit_continues_vllms_own_hit(simulators: Simulators, model: str, local: int):
    """If vLLM has the start of chunks and windows, only the rest is loaded."""
    sim, tokens = simulators.stored(groups=MODELS[model])
    sim.add("short", tokens[:local], max_tokens=1, params={"skip_load": True})
    sim.run()
    sim.add("warm", tokens)
    sim.run()

    own = local - local % KVGroups(MODELS[model]).block_size
    assert sim.cached_tokens["warm"] == (own, 288 - own)
    assert sim.outputs["warm"] == expected(tokens, 4)
    assert scheduler_of(sim).metrics.counter("failed_loads_total").value == 0


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_any_mix_gives_every_request_its_own_answer(simulators: Simulators, model: str, number: int):
    chosen = random.Random(number * len(MODELS) + list(MODELS).index(model))
    groups = MODELS[model]
    shards = 2 if chosen.random() < 0.3 and not any(group.state for group in groups) else None
    overlapped, stages = chosen.random() < 0.5, chosen.choice([1, 1, 2, 3])
    multi = model == "full" and shards is None and chosen.random() < 0.5
    another = another_connector(number, sync_failures=not overlapped and stages == 1)
    sim = simulators(
        {
            "chunk_size": chosen.choice([32, 64]),
            "arena.max_bytes": chosen.choice(["256KiB", "1MiB"]),
            "store.partial_chunks": chosen.random() < 0.7,
            "vllm.lookup_timeout_s": chosen.choice([1e-4, 0.1, 20.0]),
            "vllm.layerwise_load": chosen.choice(["auto", "never"]),
            "vllm.layerwise_max_tokens": chosen.choice([100, 16384]),
            "vllm.kv_head_shards": shards,
        },
        groups=() if multi else groups,
        num_blocks=chosen.choice([24, 40, 200]) * len(groups),
        ranks=chosen.choice([1, 2]),
        overlapped=overlapped,
        stages=stages,
        by_priority=not multi and chosen.random() < 0.3,
        max_num_batched_tokens=chosen.choice([64, 256]),
        max_num_seqs=chosen.choice([2, 8]),
        prefix_caching=chosen.random() < 0.5,
        split_heads=shards is not None,
        multi=multi,
        others=(another,) if multi else (),
    )
    fail_some_loads(sim, chosen)
    prompts = related_prompts(chosen, num_tokens=280, count=16)
    traffic = Traffic(sim, chosen, list(prompts.values()))
    while len(traffic.answers) < 24 or sim.busy:
        traffic.event()
        sim.step()
        if chosen.random() < 0.2:
            simulators.end_calls(sim)  # so that later requests find what is stored
        if len(traffic.answers) >= 24 and chosen.random() < 0.1:
            break
    traffic.resume()
    sim.run()

    traffic.check()
    assert_nothing_is_held(sim)
    simulators.until(lambda: not any(engine.statistics().pinned_chunks for engine in engines_of(sim)))


@pytest.mark.kv_groups
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", [9, 11])
@pytest.mark.parametrize("model", ["window", "one state", "two states"])
def test_rejected_drafts_never_lead_to_wrong_kv(
    simulators: Simulators, model: str, seed: int, overlapped: bool
):
    """VLLM moves the blocks of states, and gives them to other requests, while steps with drafts still run."""
    chosen = random.Random(seed)
    groups = MODELS["two states"][:2] if model == "one state" else MODELS[model]
    sim = simulators(
        {"chunk_size": chosen.choice([32, 64]), "vllm.max_pinned_fraction": 0.9},
        groups=groups,
        drafts=chosen.choice([3, 5, 7]),
        num_blocks=chosen.choice([20, 22, 26]) * len(groups),
        overlapped=overlapped,
        max_num_batched_tokens=chosen.choice([64, 256]),
    )
    prompts = related_prompts(chosen, num_tokens=200, count=12)
    waiting, lengths = list(prompts), {name: chosen.choice([3, 40, 90]) for name in prompts}
    turns = {
        name: tokens + expected(tokens, lengths[name]) + prompt(5, 7) for name, tokens in prompts.items()
    }
    while waiting or sim.busy:
        if waiting and chosen.random() < 0.3:
            name = waiting.pop()
            sim.add(name, prompts[name], max_tokens=lengths[name])
        if chosen.random() < 0.02:
            sim.scheduler.reset_prefix_cache()
        sim.step()
        simulators.end_calls(sim)  # so that a seed nearly always gives the same steps
    simulators.settle(sim)
    for name, tokens in turns.items():
        sim.add(f"next {name}", tokens)
    sim.run()

    for name, tokens in prompts.items():
        assert sim.outputs[name] == expected(tokens, lengths[name])
        assert sim.outputs[f"next {name}"] == expected(turns[name], 4)
    assert sum(sim.cached_tokens[f"next {name}"][1] for name in prompts) > 500
    assert_nothing_is_held(sim)


def fail_some_loads(sim: SimulatedVLLM, chosen: random.Random) -> None:
    for engine in engines_of(sim):

        async def some(request: Any, retrieve: Any = engine.retrieve_chunks) -> Any:
            if chosen.random() < 0.1:
                raise RuntimeError("a bug of ours")
            keep = (
                chosen.randrange(1, len(request.chunks) + 1) if chosen.random() < 0.3 else len(request.chunks)
            )
            return await retrieve(replace(request, chunks=request.chunks[:keep], rows=request.rows[:keep]))

        engine.retrieve_chunks = some
