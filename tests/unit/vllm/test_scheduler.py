"""The scheduler connector alone, with a client controlled by the test and blocks of vLLM's own pool."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.request import Request, RequestStatus

from lmcache_async.config import load_config
from lmcache_async.engine.lookup import MemoryLookups
from lmcache_async.integration.vllm.events import MemoryChange
from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.jobs import SKIP, Job, StepMetadata, WorkerReport
from lmcache_async.integration.vllm.keys import Promise, RequestKeys
from lmcache_async.integration.vllm.load_policy import MIN_RUNS
from lmcache_async.integration.vllm.lookup import MISS, Answer, AnsweredLookup, Lookup, PromiseCounts
from lmcache_async.integration.vllm.lookup_server import Identity, unpack_keys
from lmcache_async.integration.vllm.others import WAIT_S
from lmcache_async.integration.vllm.request import MAX_JOB_CHUNKS, RequestTracker, Roles
from lmcache_async.integration.vllm.scheduler import (
    MAX_PEEKED_TOKENS,
    MAX_PEEKED_TOKENS_ALONE,
    MAX_PEEKS,
    SchedulerConnector,
)
from lmcache_async.tiers.base import Capabilities

CHUNK, BLOCK, RANKS = 8, 2, 2
IDENTITY = Identity(1, b"0" * 16, "xxh3_128", CHUNK, BLOCK)


class Client:
    """The lookup client without its thread. It hashes at once unless `hashes` is False, and answers in `answer`.

    `in_memory` is the answer of a lookup in memory: None if its content is not known, MISS if it lacks the first chunk.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.epoch = 0
        self.ready = self.connected = True
        self.hashes = True
        self.in_memory: Answer | None = None
        self.memories: Sequence[Callable[[], MemoryLookups | None]] = ()
        self.promises = PromiseCounts()
        self.asked: list[Lookup] = []
        self.released: list[Lookup] = []
        self.answers: list[AnsweredLookup] = []
        self._request_ids: dict[str, str] = {}
        self.memory_only: list[bool] = []

    def now(self) -> float:
        return self.time

    def ask(
        self, keys: RequestKeys, num_tokens: int, promise: Promise | None = None, wait_s: float = 0.0
    ) -> Lookup:
        lookup = Lookup(f"{len(self.asked)}", num_tokens, self.epoch, self.time, promise, wait_s)
        self._request_ids[lookup.lookup_id] = keys.request_id
        self.asked.append(lookup)
        if not self.ready:
            self.answer(lookup, MISS)
        self.hash(keys, num_tokens)
        return lookup

    def set_memories(self, memories: Sequence[Callable[[], MemoryLookups | None]]) -> None:
        self.memories = memories

    def peek(self, keys: RequestKeys, num_tokens: int) -> tuple[Lookup, AnsweredLookup] | None:
        if self.in_memory is None:
            return None
        self.hash(keys, CHUNK if self.in_memory is MISS else num_tokens)
        if self.in_memory is MISS:
            return None
        lookup = Lookup(f"peeked {keys.request_id}", num_tokens, self.epoch, self.time)
        return lookup, AnsweredLookup(keys.request_id, lookup.lookup_id, self.in_memory, self.time, self.time)

    def answer(self, lookup: Lookup, answer: Answer, **options: Any) -> None:
        given = {"queried_at": lookup.asked_at, "answered_at": lookup.asked_at, **options}
        self.answers.append(
            AnsweredLookup(self._request_ids[lookup.lookup_id], lookup.lookup_id, answer, **given)
        )

    def take_answers(self) -> list[AnsweredLookup]:
        answers, self.answers = self.answers, []
        return answers

    def hash(self, keys: RequestKeys, num_tokens: int) -> None:
        if not self.hashes:
            return
        if not keys.opened:
            roots = (b"0" * 16, b"1" * 16)
            group_roots = [[bytes([group]) + root[1:] for group in range(3)] for root in roots]
            keys.open(roots, IDENTITY, "", group_roots=group_roots)
        keys.extend(num_tokens, lambda: None)

    def release(self, lookup: Lookup, answer: Answer | None) -> None:
        self.released.append(lookup)

    def reset(self, *, memory_only: bool) -> None:
        self.memory_only.append(memory_only)
        self.epoch += 1
        self.ready = False

    def close(self, timeout_s: float) -> None:
        pass


class Bench:
    """A scheduler connector, and the calls of vLLM's scheduler."""

    def __init__(
        self,
        *,
        num_blocks: int = 1001,
        roles: Roles | None = None,
        awaited_tokens: int = 0,
        groups: int = 1,
        states: int = 0,
        beside_others: bool = False,
        tiers: Mapping[str, Capabilities] | None = None,
        **options: Any,
    ) -> None:
        self.client = Client()
        self.groups = groups + states
        self.pool = BlockPool(num_blocks, enable_caching=False, hash_block_size=BLOCK)
        config = load_config(env={}, extra={"chunk_size": CHUNK, "vllm.lookup_timeout_s": 0.1, **options})
        self.scheduler = SchedulerConnector(
            config,
            groups=KVGroups(
                KVGroup(index, BLOCK, state="" if index < groups else "GDN") for index in range(self.groups)
            ),
            world_size=RANKS,
            roles=roles or Roles(),
            client=self.client,
            awaited_tokens=awaited_tokens,
            layerwise_tokens=awaited_tokens if self.groups == 1 else 0,
            beside_others=beside_others,
            tiers=tiers,
        )
        self.evicted: set[int] = set()
        self.blocks: dict[str, list[Any]] = {}
        self.scheduler.bind_cache_manager(
            SimpleNamespace(
                block_pool=self.pool,
                get_blocks=lambda name: SimpleNamespace(blocks=(self.blocks.get(name, []),) * self.groups),
                evict_blocks=self.evicted.update,
            )
        )
        self.names = itertools.count()

    def request(self, num_tokens: int, *, answer: Answer | None = None, **options: Any) -> Request:
        """A new request, whose lookup has this answer."""
        params = options.pop("params", None)
        sampling = SamplingParams(
            max_tokens=100, extra_args={"kv_transfer_params": params} if params else None, **options
        )
        tokens = [next(self.names)] + [1] * (num_tokens - 1)
        request = Request(f"r{tokens[0]}", tokens, sampling, None)
        self.scheduler.on_new_request(request)
        if answer is not None:
            self.answer(request, answer)
        return request

    def twin(self, request: Request, **params: Any) -> Request:
        """A new request with the same prompt."""
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None)
        twin = Request(f"twin {next(self.names)}", list(request.prompt_token_ids), sampling, None)
        self.scheduler.on_new_request(twin)
        return twin

    def answer(self, request: Request, answer: Answer) -> None:
        self.client.answer(self.client.asked[-1], answer)

    def blocks_of(self, request: Request, num_tokens: int) -> list[Any]:
        mine = self.blocks.setdefault(request.request_id, [])
        missing = -(-num_tokens // BLOCK) - len(mine)
        mine.extend(self.pool.get_new_blocks(missing) if missing > 0 else [])
        return mine

    def allocate(self, request: Request, external: int, num_tokens: int) -> None:
        blocks = SimpleNamespace(blocks=(self.blocks_of(request, num_tokens),) * self.groups)
        self.scheduler.allocated(request, blocks, external)

    def step(
        self,
        *scheduled: tuple[Request, int],
        states: Mapping[str, list[tuple[int, int, int]]] | None = None,
        drafts: Mapping[str, list[int]] | None = None,
        loads: bool = False,
    ) -> StepMetadata:
        for request, count in scheduled:
            self.blocks_of(request, request.num_computed_tokens + count)
        output = SimpleNamespace(
            num_scheduled_tokens={request.request_id: count for request, count in scheduled},
            total_num_scheduled_tokens=sum(count for _, count in scheduled),
            scheduled_spec_decode_tokens=drafts or {},
            has_sync_kv_loads=loads,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads=states or {}),
        )
        metadata = self.scheduler.plan_step(output)
        for request, count in scheduled:
            request.num_computed_tokens += count
        return metadata

    def idle(self) -> StepMetadata:
        return self.step()

    def report(
        self,
        *,
        copied: dict[int, int] | None = None,
        finished: set[str] | None = None,
        bad: set[int] = frozenset(),
        step: int = 0,
        answered: WorkerReport | None = None,
        memory: Mapping[int, MemoryChange] | None = None,
    ) -> None:
        self.scheduler.update(
            SimpleNamespace(
                invalid_block_ids=set(bad),
                finished_recving=finished,
                kv_connector_worker_meta=WorkerReport(copied or {}, memory=memory or {}, step=step)
                if copied or step or memory
                else answered,
            )
        )

    def finish(self, request: Request) -> Promise | None:
        promise = self.scheduler.finished(request)
        blocks = self.blocks.pop(request.request_id, [])
        self.pool.free_blocks(reversed(blocks))
        return promise

    def complete(self, jobs: tuple[Job, ...]) -> None:
        for job in jobs:
            self.report(copied={job.job_id: RANKS})


def tracker(bench: Bench, request: Request) -> RequestTracker:
    found = bench.scheduler.tracker(request.request_id)
    assert found is not None
    return found


def spans(jobs: tuple[Job, ...]) -> list[tuple[int, int]]:
    return [(part.start, part.start + len(part.tokens) // 4) for job in jobs for part in job.parts]


def hit(chunks: int, partial: int = 0, *, resident: bool = False) -> Answer:
    keys = (b"p" * 16, b"q" * 16) if partial else ()
    return Answer(
        chunks, partial, keys, "", {"cpu": chunks} if chunks else {}, "cpu", pinned=True, resident=resident
    )


# Lookups


def test_a_request_is_looked_up_once_and_vllm_asks_again_until_the_answer():
    bench = Bench()
    request = bench.request(20)

    assert [bench.scheduler.match(request, 0) for _ in range(3)] == [(None, False)] * 3
    assert [lookup.num_tokens for lookup in bench.client.asked] == [20]


def test_a_hit_in_memory_is_looked_up_again_if_the_step_does_not_use_it():
    bench = Bench()
    bench.client.in_memory = hit(2, resident=True)
    request, ended = bench.request(20), bench.request(20)
    bench.finish(ended)
    bench.idle()

    assert [lookup.num_tokens for lookup in bench.client.asked] == [20]  # now with pins
    assert bench.scheduler.match(request, 0) == (None, False)
    bench.answer(request, hit(1))
    assert bench.scheduler.match(request, 0) == (8, True)


def known(bench: Bench, keys: bytes) -> list[int]:
    """The number of leading keys that are known to be in host memory, by rank."""
    made = [memory() for memory in bench.client.memories]
    return [0 if each is None else each._count(unpack_keys(keys)) for each in made]


def test_reports_of_host_memory_are_used_until_a_reset():
    bench, key = Bench(), b"k" * 16
    bench.report(memory={0: MemoryChange("cpu", key, b""), 1: MemoryChange("cpu", 2 * key, b"")})
    assert known(bench, key) == [1] * RANKS

    bench.scheduler.reset()

    assert [memory() for memory in bench.client.memories] == [None] * RANKS
    bench.report(memory={1: MemoryChange("cpu", key, b"")})
    assert known(bench, key) == [0, 1]


def test_with_other_connectors_no_content_of_host_memory_is_known():
    bench = Bench(beside_others=True)
    bench.report(memory={0: MemoryChange("cpu", b"k" * 16, b"")})

    assert not bench.client.memories


@pytest.mark.parametrize("admitted", [True, False])
def test_the_ranks_learn_of_a_lookup_by_the_scheduler_when_its_request_ends(admitted: bool):
    """The eviction policies of their tiers need it. Nothing stays pinned."""
    bench = Bench()
    bench.client.in_memory = hit(2, resident=True)
    request = bench.request(20)
    if admitted:
        assert bench.scheduler.match(request, 0) == (16, True)
        bench.allocate(request, 16, 16)
        bench.report(finished={request.request_id})
    bench.finish(request)

    assert len(bench.client.asked) == admitted
    assert set(bench.client.asked) <= set(bench.client.released)


def test_a_lookup_by_the_scheduler_is_not_repeated_after_a_reset():
    """The chunks are deleted, and the request may have other keys."""
    bench = Bench(**{"vllm.reset_cache": "new_namespace"})
    bench.client.in_memory = hit(2, resident=True)
    request = bench.request(20)
    bench.scheduler.match(request, 0)
    bench.allocate(request, 16, 16)
    bench.report(finished={request.request_id})
    bench.scheduler.reset()
    bench.finish(request)

    assert not bench.client.asked


def test_a_request_that_is_looked_up_in_its_first_step_is_not_looked_up_at_its_end_too():
    """The pins of the first lookup would be held until they expire."""
    bench = Bench()
    bench.client.in_memory = hit(2, resident=True)
    request = bench.request(20)
    bench.client.epoch += 1  # a reset, so the answer is void
    bench.scheduler.match(request, 0)
    bench.idle()

    assert len(bench.client.asked) == 1


@pytest.mark.parametrize(
    "lengths", [(MAX_PEEKED_TOKENS - 10, 11, 10), (*[10] * MAX_PEEKS, 11)], ids=["long", "many"]
)
def test_few_requests_of_a_step_are_looked_up_by_the_scheduler_s_thread(lengths: tuple[int, ...]):
    bench = Bench()
    bench.client.in_memory = hit(2, resident=True)
    for step in (1, 2):
        requests = [bench.request(num_tokens) for num_tokens in lengths]
        assert [lookup.num_tokens for lookup in bench.client.asked] == [11] * step
        for request in requests:
            bench.finish(request)
        bench.idle()


def test_a_request_whose_first_chunk_is_not_in_memory_uses_little_of_what_a_step_may_look_up():
    """Only its first chunk is hashed on the scheduler's thread."""
    bench = Bench()
    bench.client.in_memory = MISS
    bench.request(20)
    bench.request(MAX_PEEKED_TOKENS - 100)
    bench.client.in_memory = hit(2, resident=True)
    bench.request(MAX_PEEKED_TOKENS - 100)

    assert [lookup.num_tokens for lookup in bench.client.asked] == [20, MAX_PEEKED_TOKENS - 100]


@pytest.mark.parametrize(
    ("others", "num_tokens", "peeked"),
    [
        (0, MAX_PEEKED_TOKENS_ALONE, True),
        (0, MAX_PEEKED_TOKENS_ALONE + 1, False),
        (1, MAX_PEEKED_TOKENS - 10, True),
        (1, MAX_PEEKED_TOKENS + 1, False),
    ],
)
def test_a_long_request_without_others_is_looked_up_by_the_scheduler_s_thread(
    others: int, num_tokens: int, peeked: bool
):
    bench = Bench()
    bench.client.in_memory = hit(2, resident=True)
    for _ in range(others):
        bench.request(10)

    bench.request(num_tokens)

    assert [lookup.num_tokens for lookup in bench.client.asked] == [num_tokens] * (not peeked)


def test_an_answer_that_is_late_is_a_miss_and_counted_once():
    bench = Bench()
    request = bench.request(20)
    bench.client.time = 0.2

    assert [bench.scheduler.match(request, 0) for _ in range(2)] == [(0, False)] * 2
    assert bench.scheduler.metrics.counter("late_lookups_total").value == 1
    bench.answer(request, hit(2))
    assert bench.scheduler.match(request, 0) == (16, True)  # it serves a repeated lookup


def test_a_lookup_that_the_ranks_did_not_answer_in_time_is_late_and_no_miss():
    """The client's deadline may pass between two steps of vLLM, which then sees its answer first."""
    bench = Bench(**{"http.listen": "127.0.0.1:0"})
    request = bench.request(20)
    bench.client.answer(bench.client.asked[-1], MISS, late=True)

    assert bench.scheduler.match(request, 0) == (0, False)
    bench.allocate(request, 0, 20)
    metrics = bench.scheduler.metrics
    assert metrics.values("lookups_total") == {("hit",): 0, ("miss",): 0, ("late",): 1}
    assert metrics.counter("late_lookups_total").value == 1
    assert [plan.decided for plan in bench.idle().plans] == ["late"]


def test_a_late_lookup_is_repeated_after_some_time_if_its_request_waits():
    bench = Bench()
    request = bench.request(20)
    bench.client.answer(bench.client.asked[-1], MISS, late=True)
    assert bench.scheduler.match(request, 0) == (0, False)
    bench.client.time = 3.0

    assert bench.scheduler.match(request, 0) == (None, False)
    bench.answer(request, hit(2))
    assert bench.scheduler.match(request, 0) == (16, True)
    assert bench.scheduler.metrics.counter("late_lookups_total").value == 1


@pytest.mark.parametrize(("tokens", "local", "waits"), [(20, 18, False), (20, 16, True), (21, 20, False)])
def test_no_lookup_is_awaited_if_vllm_has_all_it_can_use(tokens, local, waits):
    bench = Bench()
    request = bench.request(tokens)

    assert bench.scheduler.match(request, local) == ((None if waits else 0), False)
    if not waits:
        bench.allocate(request, 0, tokens)
        assert bench.client.released == bench.client.asked
        bench.step((request, tokens - local))
        bench.finish(request)


SLOW = {"vllm.prefill_tokens_per_s": 10}  # 40 tokens are computed in 4 s


def test_a_hit_that_is_faster_to_compute_is_unpinned_and_stored_for_faster_tiers():
    bench = Bench(**SLOW)
    request = bench.request(40)
    bench.answer(request, Answer(4, 0, tiers={"disk": 4}, pinned=True, costs=((4, 9.0),)))

    assert [bench.scheduler.match(request, 0) for _ in range(2)] == [(0, False)] * 2
    bench.allocate(request, 0, 40)

    assert bench.client.released == bench.client.asked
    assert not bench.scheduler.has_work
    assert spans(bench.step((request, 40)).stores) == [(0, 40)]
    counted = bench.scheduler.metrics.values("decided_total")
    assert counted == {("load",): 0, ("recompute",): 1, ("partial",): 0}


def test_a_hit_is_counted_as_decided_once_however_often_its_request_is_looked_up():
    bench = Bench()
    request, aborted = bench.request(40), bench.request(40)
    for lookup in bench.client.asked:
        bench.client.answer(lookup, hit(4))
    for _ in range(3):  # the requests wait for blocks, and their lookups get old
        assert bench.scheduler.match(request, 0) == bench.scheduler.match(aborted, 0) == (32, True)
        bench.client.time += 3.0
        for repeated in (request, aborted):
            assert bench.scheduler.match(repeated, 0) == (None, False)
            bench.client.answer(bench.client.asked[-1], hit(4), queried_at=bench.client.time)
        bench.idle()
    bench.finish(aborted)
    assert bench.scheduler.match(request, 0) == (32, True)
    bench.allocate(request, 32, 40)

    counted = bench.scheduler.metrics.values
    assert counted("lookups_total") == {("hit",): 1, ("miss",): 0}
    assert counted("decided_total") == {("load",): 1, ("recompute",): 0, ("partial",): 0}


def test_hits_that_are_faster_to_compute_are_loaded_if_all_are_to_be_loaded():
    bench = Bench(**SLOW, **{"vllm.load_policy": "always"})
    request = bench.request(40)
    bench.answer(request, Answer(4, costs=((4, 9.0),)))

    assert bench.scheduler.match(request, 0) == (32, True)


def test_only_the_part_of_a_hit_in_the_fast_tier_is_loaded():
    bench = Bench(**SLOW)
    request = bench.request(40)
    keys, tiers = (b"p" * 16, b"q" * 16), {"cpu": 1, "disk": 3}
    bench.answer(request, Answer(4, 4, keys, "", tiers, "disk", costs=((1, 0.1), (4, 9.0))))

    assert bench.scheduler.match(request, 0) == (8, True)
    bench.allocate(request, 8, 40)

    (load,) = bench.step().loads
    assert spans((load,)) == [(0, 8)]
    assert load.parts[0].rows().tolist() == [block.block_id for block in bench.blocks[request.request_id][:4]]
    bench.report(finished={request.request_id})
    request.num_computed_tokens = 8
    assert spans(bench.step((request, 32)).stores) == [(8, 40)]
    counted = bench.scheduler.metrics.values
    assert counted("lookup_hit_tokens_total") == {("cpu",): 8, ("disk",): 28}
    assert counted("load_tokens_total") == {("cpu",): 8}


def test_tokens_after_those_of_vllm_are_counted_for_the_tier_that_has_them():
    bench = Bench()
    request = bench.request(40)
    bench.answer(request, Answer(4, 4, (b"p" * 16, b"q" * 16), tiers={"cpu": 2, "disk": 2}, end_tier="disk"))

    assert bench.scheduler.match(request, 12) == (24, True)
    bench.allocate(request, 24, 40)

    assert bench.scheduler.tokens_by_tier(request, 24) == {"cpu": 4, "disk": 20}


def test_the_speed_of_the_model_is_learnt_while_steps_overlap():
    """Between the prompts are a step without tokens, whose end vLLM may not report, and decodes with drafts."""
    bench = Bench(num_blocks=5001)
    decoding = bench.request(8)
    bench.step((decoding, 8))
    in_flight: list[int] = []
    for _ in range(3 * MIN_RUNS):
        drafts = {decoding.request_id: [0] * 199}
        in_flight += [bench.step((bench.request(200), 200)).step, bench.idle().step]
        in_flight.append(bench.step((decoding, 200), drafts=drafts).step)
        for step in in_flight[:-1]:
            bench.client.time += 0.1 if step else 0.0
            bench.report(step=step)
        del in_flight[:-1]

    assert bench.scheduler.load_policy.prefill.seconds(200) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "loads", "stores"),
    [
        ({"params": {"skip_load": True}}, False, True),
        ({"params": {"lmcache.skip_load": 1}}, False, True),
        ({"skip_reading_prefix_cache": True}, False, True),
        *(
            ({"params": {name: True}}, True, False)
            for name in ("skip_save", "force_skip_save", "lmcache.skip_save")
        ),
        *(({"params": {"tags": tags}}, False, False) for tags in (["a"], "a", 0, True, [])),
    ],
    ids=str,
)
def test_a_request_may_ask_not_to_be_loaded_or_stored(options: dict[str, Any], loads: bool, stores: bool):
    """With tags that name nothing, it would share its KV with all requests."""
    bench = Bench()
    request = bench.request(20, **options)
    if loads:
        bench.answer(request, MISS)

    assert bench.scheduler.match(request, 0) == (0, False)
    assert bool(bench.client.asked) == loads
    assert spans(bench.step((request, 20)).stores) == ([(0, 16), (16, 20)] if stores else [])
    bench.finish(request)
    assert bench.scheduler.has_work == stores


def image(identifier: str) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=2, length=9))


@pytest.mark.parametrize(
    ("options", "cached"),
    [
        ({"mm_features": [image("cat.png")]}, True),
        ({"mm_features": [image("renderer0-mm-1-image-0")]}, False),
        ({"prompt_embeds": torch.zeros(20, 4)}, False),
        ({"prompt_token_ids": None, "prompt_embeds": torch.zeros(20, 4)}, False),
        ({"resumable": True}, False),
    ],
    ids=["a named image", "a counted image", "embeddings", "embeddings alone", "a streaming session"],
)
def test_prompts_that_their_tokens_do_not_identify_are_neither_looked_up_nor_stored(
    options: dict[str, Any], cached: bool
):
    bench = Bench()
    given = {"prompt_token_ids": [1] * 20, "sampling_params": SamplingParams(max_tokens=1), **options}
    request = Request("r", pooling_params=None, **given)
    bench.scheduler.on_new_request(request)

    assert bool(bench.client.asked) == cached
    assert bench.scheduler.match(request, 0) == (None if cached else 0, False)
    assert bool(bench.step((request, 20)).stores) == cached


def test_tags_of_both_spellings_name_one_namespace():
    bench = Bench()
    bench.request(20, params={"tags": {"team": "a"}, "lmcache.tag.user": 7})

    assert bench.scheduler.tracker("r0").keys.tags == (("team", "a"), ("user", "7"))


def test_a_preempted_request_is_looked_up_again_with_its_generated_tokens():
    bench = Bench()
    request = bench.request(20, answer=MISS)
    bench.scheduler.match(request, 0)
    request.append_output_token_ids([5, 6, 7, 8])
    request.num_preemptions += 1

    assert bench.scheduler.match(request, 0) == (None, False)
    assert bench.client.asked[-1].num_tokens == 24
    assert bench.client.released == bench.client.asked[:1]


def test_a_miss_that_waited_long_in_the_queue_is_looked_up_again_with_a_limit_per_step():
    bench = Bench()
    requests = [bench.request(20) for _ in range(20)]
    for lookup in bench.client.asked:
        bench.client.answer(lookup, MISS)
    bench.client.time = 3.0

    results = [bench.scheduler.match(request, 0) for request in requests]

    assert results.count((None, False)) == 8
    bench.idle()
    assert bench.scheduler.match(requests[-1], 0) == (None, False)


def test_the_answer_of_a_repeated_lookup_is_used_however_long_the_steps_take():
    bench = Bench()
    request = bench.request(20, answer=MISS)
    offered = []
    for step in range(1, 5):
        bench.client.time = 3.0 * step
        offered.append(bench.scheduler.match(request, 0))
        bench.answer(request, hit(2))  # soon, and long before the next step

    assert offered == [(None, False), (16, True)] * 2


# Loads


def load(bench: Bench, answer: Answer, *, num_tokens: int, local: int) -> tuple[Request, Job]:
    request = bench.request(num_tokens, answer=answer)
    external, _ = bench.scheduler.match(request, local)
    assert external is not None
    bench.allocate(request, external, local + external)
    request.num_computed_tokens = local + external
    (job,) = bench.idle().loads
    return request, job


@given(chunks=st.integers(0, 5), partial=st.integers(0, 3), local=st.integers(0, 20))
def test_a_load_is_of_the_chunks_that_overlap_and_skips_the_blocks_that_vllm_has(chunks, partial, local):
    total, local_tokens = chunks * CHUNK + partial * BLOCK, local * BLOCK
    if total <= local_tokens:
        return
    bench = Bench()
    request, job = load(bench, hit(chunks, partial * BLOCK), num_tokens=60, local=local_tokens)
    ids = [block.block_id for block in bench.blocks[request.request_id]]

    (part,) = job.parts
    assert part.start == local_tokens // CHUNK * CHUNK
    assert part.start + len(part.tokens) // 4 == total
    expected = [
        ids[block] if block >= local else SKIP for block in range(part.start // BLOCK, total // BLOCK)
    ]
    assert part.rows().tolist() == expected
    assert array("i", part.tokens).tolist() == list(request.all_token_ids[part.start : total])
    assert {len(keys) for keys in part.keys} == {16 * -(-len(part.tokens) // 4 // CHUNK)}
    parts = list(part.chunks(1, CHUNK, BLOCK))
    if partial:
        assert parts[-1][0].key == b"q" * 16
    assert sum(len(rows) for _, rows in parts) == len(expected)


def test_pins_of_a_lookup_last_until_the_load_has_ended():
    bench = Bench()
    request, _ = load(bench, hit(2), num_tokens=30, local=0)
    bench.allocate(request, 0, 16)

    assert bench.idle().loads == ()  # sent once
    assert not bench.client.released
    bench.report(finished={request.request_id})
    assert len(bench.client.released) == 1


def test_a_request_aborted_in_the_middle_of_its_load_stores_nothing_and_gives_its_pins_back_at_the_end():
    bench = Bench()
    request, _ = load(bench, hit(2), num_tokens=30, local=0)
    bench.finish(request)

    assert bench.idle().stores == ()
    assert not bench.client.released
    assert bench.scheduler.has_work  # otherwise vLLM would not step, and not notice the end of the load
    bench.report(finished={request.request_id})
    assert len(bench.client.released) == 1
    assert not bench.scheduler.has_work


def test_after_a_failed_load_vllm_computes_and_the_computed_chunks_are_stored_again():
    bench = Bench()
    request, job = load(bench, hit(4, 4), num_tokens=37, local=0)
    bad = job.touched_blocks()[5:]  # from the second chunk on

    bench.report(bad=set(bad), finished={request.request_id})
    request.num_computed_tokens = 10
    stores = bench.step((request, 27)).stores

    assert bench.scheduler.metrics.counter("failed_loads_total").value == 1
    assert spans(stores) == [(8, 32), (32, 36)]


def test_of_a_load_that_fails_in_part_the_rest_is_counted_as_loaded():
    """The ranks report the failures in different steps."""
    bench = Bench(**{"vllm.prefill_tokens_per_s": 100})
    request, job = load(bench, hit(4, 4), num_tokens=37, local=4)
    touched = job.touched_blocks()

    bench.report(bad=set(touched[10:]))
    bench.report(bad=set(touched[6:8]), finished={request.request_id})

    counted = bench.scheduler.metrics.values
    assert counted("failed_loads_total") == {(): 1}
    assert counted("load_tokens_total") == {("cpu",): 6 * BLOCK}
    assert counted("prefill_saved_seconds_total") == {(): 0.12}


def test_a_load_that_failed_from_the_first_token_on_is_not_tried_again():
    bench = Bench()
    request, job = load(bench, hit(3), num_tokens=37, local=0)
    bench.report(bad=set(job.touched_blocks()), finished={request.request_id})
    request.num_computed_tokens = 0

    assert bench.scheduler.match(request, 0) == (0, False)
    assert len(bench.client.asked) == 1


def test_a_load_whose_job_cannot_be_created_is_reported_as_failed():
    bench = Bench()
    request = bench.request(30)
    # The key of one rank is missing.
    bench.answer(request, Answer(2, 4, (b"p" * 16,), "", {"cpu": 2}, pinned=True))
    external, _ = bench.scheduler.match(request, 4)
    blocks = SimpleNamespace(blocks=(bench.blocks_of(request, 30),))

    with pytest.raises(ValueError, match="zip"):
        bench.scheduler.allocated(request, blocks, external)
    bench.scheduler.fail_load(request, blocks)

    (job,) = bench.scheduler.take_loads()
    assert job.parts[0].keys == ()
    assert job.touched_blocks() == [block.block_id for block in blocks.blocks[0][2:]]
    assert bench.client.released == bench.client.asked
    bench.report(finished={request.request_id}, bad=set(job.touched_blocks()))
    assert not tracker(bench, request).is_loading
    assert bench.client.released == bench.client.asked


# Layer-wise loads


def layerwise(bench: Bench, chunks: int = 3, *, num_tokens: int = 37, local: int = 0) -> tuple[Request, Job]:
    """A request whose hit is loaded by the step that includes it."""
    request = bench.request(num_tokens, answer=hit(chunks, resident=True))
    external, is_async = bench.scheduler.match(request, local)
    assert (external, is_async) == (chunks * CHUNK - local, False)
    bench.allocate(request, external, num_tokens)
    request.num_computed_tokens = local + external
    (job,) = bench.step((request, num_tokens - local - external)).loads
    return request, job


def test_hits_in_host_memory_are_loaded_by_the_step_that_uses_them():
    bench = Bench(awaited_tokens=24)
    request, job = layerwise(bench)

    assert job.layerwise
    assert tracker(bench, request).is_loading
    bench.report()
    assert not tracker(bench, request).is_loading
    assert [lookup.num_tokens for lookup in bench.client.released] == [37]


@pytest.mark.parametrize(
    ("chunks", "num_tokens", "resident"),
    [(4, 37, True), (3, 24, True), (3, 37, False)],
    ids=["too long", "nothing left to compute", "not in memory"],
)
def test_other_hits_are_loaded_before_the_request_joins(chunks: int, num_tokens: int, resident: bool):
    bench = Bench(awaited_tokens=24)
    request = bench.request(num_tokens, answer=hit(chunks, resident=resident))

    assert bench.scheduler.match(request, 0) == (chunks * CHUNK, True)
    bench.allocate(request, chunks * CHUNK, num_tokens)
    step = bench.idle()
    assert [job.layerwise for job in step.loads] == [False]
    assert [each.awaited for each in step.loads] == [resident and chunks == 3]


@pytest.mark.parametrize("beside", ["nothing", "an ended step", "a running step", "its own step"])
def test_with_several_groups_an_idle_step_awaits_hits_in_host_memory(beside: str):
    bench = Bench(awaited_tokens=24, groups=2)
    request, other = bench.request(37), bench.request(20)
    bench.client.answer(bench.client.asked[0], hit(3, resident=True))
    if beside.endswith(("ended step", "running step")):
        number = bench.step((other, 20)).step
        if beside == "an ended step":
            bench.report(step=number)
    assert bench.scheduler.match(request, 0) == (24, True)
    bench.allocate(request, 24, 37)

    step = bench.step((other, 20)) if beside == "its own step" else bench.idle()
    (job,) = step.loads
    assert not job.layerwise
    assert job.awaited == (beside in ("nothing", "an ended step"))


def test_blocks_to_be_filled_by_a_step_are_not_shared():
    bench = Bench(awaited_tokens=100)
    other = bench.request(40, params={"skip_load": True})
    layerwise(bench, local=8)

    assert bench.scheduler.match(other, 8) == (0, False)  # these were stored before
    assert bench.scheduler.match(other, 10) == (None, False)
    bench.report()
    assert bench.scheduler.match(other, 10) == (0, False)


def test_blocks_of_a_layerwise_load_that_failed_leave_vllms_prefix_cache():
    bench = Bench(awaited_tokens=100)
    request, job = layerwise(bench)
    ids = [block.block_id for block in bench.blocks[request.request_id]]

    bench.report(bad=set(job.touched_blocks()[5:7]))

    assert bench.evicted == set(ids[5:])
    assert spans(bench.step((request, 0)).stores) == [(8, 32), (32, 36)]
    assert bench.scheduler.metrics.counter("failed_loads_total").value == 1


def test_a_request_aborted_in_the_step_that_failed_leaves_no_wrong_blocks_either():
    bench = Bench(awaited_tokens=100)
    request, job = layerwise(bench)
    ids = {block.block_id for block in bench.blocks[request.request_id]}
    request.status = RequestStatus.FINISHED_ABORTED
    bench.finish(request)
    assert bench.evicted == ids  # also those that were computed after the hit
    assert bench.idle().stores == ()

    bench.report(bad=set(job.touched_blocks()))

    assert not bench.scheduler.has_work


def test_a_request_that_ends_with_its_first_token_is_stored_too():
    bench = Bench(awaited_tokens=100)
    request, _ = layerwise(bench)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    bench.finish(request)

    assert spans(bench.idle().stores) == [(24, 32), (32, 36)]
    assert len(bench.client.released) == 1


def test_blocks_of_a_load_with_unknown_outcome_are_not_stored():
    bench = Bench(awaited_tokens=100)
    request = bench.request(37, answer=hit(3, resident=True))
    bench.allocate(request, bench.scheduler.match(request, 0)[0], 37)
    request.num_computed_tokens = 24
    step = bench.step((request, 13))

    assert (len(step.loads), step.stores) == (1, ())
    bench.report()
    assert spans(bench.step((request, 1)).stores) == [(24, 32), (32, 36)]


def test_a_layerwise_load_that_cannot_be_planned_fails_in_its_own_step():
    bench = Bench(awaited_tokens=100)
    request = bench.request(30, answer=hit(2, resident=True))
    bench.scheduler.match(request, 4)
    blocks = SimpleNamespace(blocks=(bench.blocks_of(request, 16),))

    bench.scheduler.fail_load(request, blocks)

    (job,) = bench.scheduler.take_loads()
    assert (job.parts[0].keys, job.layerwise) == ((), True)


# Loads of other connectors in a MultiConnector


def loaded_by_another(bench: Bench) -> Request:
    """A request that is admitted with 2 tokens in vLLM's cache and 8 that another connector loads in the next step."""
    request = bench.request(40, answer=MISS)
    assert bench.scheduler.match(request, 2) == (0, False)
    bench.allocate(request, 0, 40)
    request.num_computed_tokens = 10
    return request


def test_blocks_that_another_connector_loads_are_not_shared_before_the_end_of_the_step():
    bench = Bench(beside_others=True)
    other = bench.request(40, params={"skip_load": True})
    running = bench.step((bench.request(20), 20))
    loaded = loaded_by_another(bench)

    assert bench.scheduler.match(other, 2) == (0, False)  # these were there before
    assert bench.scheduler.match(other, 4) == (None, False)
    first = bench.step((loaded, 30), loads=True)
    assert bench.scheduler.match(other, 4) == (None, False)
    second = bench.step((loaded, 1))  # planned while the first one runs
    bench.report(step=running.step)
    assert bench.scheduler.match(other, 4) == (None, False)
    bench.report(step=first.step)
    assert bench.scheduler.match(other, 4) == (0, False)
    bench.allocate(other, 0, 40)
    other.num_computed_tokens = 4

    assert (first.stores, second.stores) == ((), ())
    assert spans(bench.step((other, 36)).stores) == [(0, 40)]


def test_requests_with_other_tokens_do_not_wait_for_another_connector():
    bench = Bench(beside_others=True)
    other = bench.request(40, params={"skip_load": True})
    loaded = bench.request(40, params={"skip_load": True})
    bench.scheduler.match(loaded, 0)
    bench.allocate(loaded, 0, 40)
    loaded.num_computed_tokens = 8

    assert bench.scheduler.match(other, 16) == (0, False)  # the first token of each prompt is its own
    bench.step((loaded, 32), loads=True)
    assert bench.scheduler.match(other, 16) == (0, False)


def test_a_request_that_has_waited_too_long_for_another_connector_is_not_stored():
    bench = Bench(beside_others=True)
    other = bench.request(40, params={"skip_load": True})
    bench.step((loaded_by_another(bench), 30), loads=True)
    bench.client.time = WAIT_S

    assert bench.scheduler.match(other, 4) == (0, False)
    bench.allocate(other, 0, 40)
    assert bench.step((other, 40)).stores == ()


def test_a_request_does_not_wait_for_another_connector_while_this_connectors_engines_are_off():
    """The end of a step is not reported then. The request is not stored if the engines are connected later."""
    bench = Bench(beside_others=True)
    bench.client.ready = bench.client.connected = False
    others = [bench.request(40, params={"skip_load": True}) for _ in range(2)]
    loaded = loaded_by_another(bench)

    assert bench.scheduler.match(others[0], 4) == (0, False)
    bench.step((loaded, 30), loads=True)
    assert bench.scheduler.match(others[1], 4) == (0, False)
    bench.client.ready = bench.client.connected = True
    for other in others:
        bench.allocate(other, 0, 40)
        assert bench.step((other, 40)).stores == ()


def test_a_request_waits_for_another_connector_while_a_connection_is_lost():
    bench = Bench(beside_others=True)
    other = bench.request(40, params={"skip_load": True})
    bench.report(step=bench.step((bench.request(40, params={"skip_load": True}), 40)).step)
    bench.client.ready = bench.client.connected = False
    bench.step((loaded_by_another(bench), 30), loads=True)

    assert bench.scheduler.match(other, 4) == (None, False)


def test_blocks_that_another_connector_failed_to_load_leave_vllms_prefix_cache():
    """So does what vLLM computes for the request afterwards."""
    bench = Bench(beside_others=True)
    loaded = loaded_by_another(bench)
    step = bench.step((loaded, 30), loads=True).step
    blocks = [block.block_id for block in bench.blocks[loaded.request_id]]

    bench.report(bad={blocks[3]}, step=step)
    assert bench.evicted == set(blocks[1:])
    loaded.num_computed_tokens = 6
    assert bench.step((loaded, 40)).stores == ()
    later = {block.block_id for block in bench.blocks[loaded.request_id]} - set(blocks)
    assert bench.evicted == {*blocks[1:], *later}
    bench.evicted.clear()
    bench.finish(loaded)
    assert bench.evicted == {*blocks[1:], *later}
    bench.evicted.clear()
    bench.idle()
    assert bench.evicted == set()


def test_blocks_of_a_request_that_ends_before_the_failure_is_known_leave_vllms_prefix_cache_too():
    bench = Bench(beside_others=True)
    loaded = loaded_by_another(bench)
    step = bench.step((loaded, 30), loads=True).step
    blocks = [block.block_id for block in bench.blocks[loaded.request_id]]
    bench.finish(loaded)

    bench.report(bad={blocks[3]}, step=step)
    assert bench.evicted == set(blocks[1:])
    bench.evicted.clear()
    bench.idle()
    assert bench.evicted == set()


def test_loads_of_others_are_forgotten_if_the_ranks_never_report_the_end_of_a_step():
    """The engine of this connector could not be opened, and another connector loads all the same."""
    bench = Bench(beside_others=True)
    for _ in range(5):
        request = bench.request(40)
        bench.scheduler.match(request, 0)
        bench.allocate(request, 0, 40)
        request.num_computed_tokens = 16
        bench.step((request, 24), loads=True)
        bench.client.time += 3 * WAIT_S

    assert len(bench.scheduler._others._loads) == 1


def test_a_request_whose_hit_ends_inside_of_a_block_is_stored_beside_others_in_a_step_without_loads():
    """VLLM counts the tokens of the block as computed, and no connector has loaded them."""
    bench = Bench(beside_others=True)

    assert spans(bench.step((loaded_by_another(bench), 30)).stores) == [(0, 40)]


# Stores


def test_chunks_are_stored_in_the_step_that_completes_them():
    bench = Bench()
    request = bench.request(37, answer=MISS)

    stored = [spans(bench.step((request, count)).stores) for count in (7, 1, 20, 8, 1)]

    assert stored == [[], [(0, 8)], [(8, 24)], [(24, 32), (32, 36)][:1], [(32, 36)]]


def test_a_request_whose_own_hit_ends_inside_of_a_block_is_stored():
    """With recurrent states vLLM matches less than a block. The connector is given the whole blocks of the hit."""
    bench = Bench()
    request = bench.request(37, answer=MISS)
    bench.scheduler.match(request, 8)
    request.num_computed_tokens = 10

    assert spans(bench.step((request, 22)).stores) == [(0, 32)]


def test_a_job_has_a_part_for_each_group():
    bench = Bench(groups=2)
    request, load_of_both = load(bench, hit(2), num_tokens=36, local=0)
    bench.report(finished={request.request_id})
    (store, *_) = bench.step((request, 20)).stores

    for job in (load_of_both, store):
        assert [part.group for part in job.parts] == [0, 1]
        assert spans((job,)) == [spans((job,))[0]] * 2
    blocks = bench.blocks[request.request_id]
    assert sum(block.ref_cnt - 1 for block in blocks) == 2 * (8 + 2)  # two chunks, and the partial one
    bench.complete((store,))
    assert sum(block.ref_cnt - 1 for block in blocks) == 2 * 2


@pytest.mark.parametrize(
    ("found", "tokens", "stored"),
    [(hit(2), 36, [(16, 32), (32, 36)]), (hit(4, 4), 37, [])],
    ids=["chunks", "all"],
)
def test_chunks_found_by_the_lookup_are_not_stored_again(
    found: Answer, tokens: int, stored: list[tuple[int, int]]
):
    bench = Bench()
    request, _ = load(bench, found, num_tokens=tokens, local=0)
    bench.report(finished={request.request_id})

    assert spans(bench.step((request, tokens - found.hit_tokens(CHUNK))).stores) == stored


@pytest.mark.parametrize(("generated", "stored"), [(True, [(8, 16)]), (False, [])])
def test_generated_tokens_are_stored_chunk_by_chunk_unless_configured_otherwise(generated: bool, stored: Any):
    bench = Bench(**{"store.generated_tokens": generated})
    request = bench.request(8)
    bench.step((request, 8))
    jobs: list[Job] = []
    for token in range(9):
        request.append_output_token_ids(token)
        jobs.extend(bench.step((request, 1)).stores)

    assert spans(jobs) == stored


def test_drafted_tokens_that_may_be_rejected_are_not_stored():
    bench = Bench()
    request = bench.request(15)
    bench.step((request, 15))
    request.append_output_token_ids(3)

    assert spans(bench.step((request, 9)).stores) == [(8, 16)]  # one known token and eight drafts
    request.num_computed_tokens = 16
    assert bench.step((request, 0)).stores == ()


def test_two_requests_with_one_prefix_store_it_once():
    bench = Bench()
    first = bench.request(37)
    second = bench.twin(first)

    jobs = bench.step((first, 32), (second, 32)).stores

    assert spans(jobs) == [(0, 32)]
    bench.complete(jobs)
    third = bench.twin(first)
    assert spans(bench.step((third, 32)).stores) == [(0, 32)]  # ended: the engine's answer takes precedence


def test_source_blocks_are_held_until_every_rank_has_copied_them():
    bench = Bench()
    request = bench.request(16)
    (job,) = bench.step((request, 16)).stores
    assert not bench.scheduler.would_free_blocks
    bench.finish(request)

    assert bench.pool.get_num_free_blocks() == 1000 - 8
    assert bench.scheduler.has_work
    assert bench.scheduler.would_free_blocks
    bench.report(copied={job.job_id: 1})
    assert bench.scheduler.has_work
    bench.report(copied={job.job_id: 1})
    assert not bench.scheduler.has_work
    assert bench.pool.get_num_free_blocks() == 1000


def test_blocks_of_an_ended_request_are_freed_also_if_its_last_stores_cannot_be_planned(monkeypatch):
    bench = Bench()
    request = bench.request(16)
    bench.step((request, 16))
    monkeypatch.setattr(bench.scheduler, "_with_keys", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        bench.finish(request)
    bench.pool.free_blocks(reversed(bench.blocks.pop(request.request_id)))

    assert bench.scheduler.would_free_blocks


def test_beyond_the_cap_chunks_wait_for_a_later_step():
    bench = Bench(num_blocks=41, **{"vllm.max_pinned_fraction": 0.25})
    request = bench.request(32)
    first = bench.step((request, 32)).stores
    nothing = bench.step((request, 0)).stores
    bench.complete(first)
    second = bench.step((request, 0)).stores

    assert (spans(first), nothing, spans(second)) == ([(0, 16)], (), [(16, 32)])


def test_chunks_above_the_cap_at_the_end_are_dropped_counted_and_not_promised():
    bench = Bench(num_blocks=41, roles=Roles(hands_over=True), **{"vllm.max_pinned_fraction": 0.25})
    request = bench.request(38)
    bench.step((request, 38))
    promise = bench.finish(request)

    assert promise is not None
    assert promise.tokens == 16
    assert bench.idle().stores == ()
    assert bench.scheduler.metrics.counter("skipped_chunks_total", "blocks").value == 3


def test_a_long_prefill_is_several_jobs():
    bench = Bench(num_blocks=4001)
    request = bench.request(CHUNK * (2 * MAX_JOB_CHUNKS + 1))
    jobs = bench.step((request, request.num_tokens)).stores

    assert [job.num_chunks for job in jobs] == [MAX_JOB_CHUNKS, MAX_JOB_CHUNKS, 1]


def test_the_last_chunks_of_a_finished_request_wait_for_their_keys_with_their_blocks_held():
    bench = Bench()
    bench.client.hashes = False
    request = bench.request(20)
    bench.step((request, 20))
    chain = tracker(bench, request).keys
    bench.finish(request)

    assert bench.idle().stores == ()
    assert bench.scheduler.has_work
    bench.client.hashes = True
    bench.client.hash(chain, 20)
    jobs = bench.idle().stores
    assert spans(jobs) == [(0, 16), (16, 20)]
    bench.complete(jobs)
    assert bench.pool.get_num_free_blocks() == 1000


@pytest.mark.parametrize("groups", [1, 2])
def test_without_a_connection_to_the_workers_no_block_waits_for_keys(groups: int):
    """For example if the engine of a worker could not be opened."""
    bench = Bench(groups=groups)
    bench.client.connected = bench.client.ready = bench.client.hashes = False
    request = bench.request(20)
    bench.step((request, 20))
    bench.finish(request)

    assert not bench.scheduler.has_work
    assert bench.pool.get_num_free_blocks() == 1000


def test_chunks_whose_keys_are_never_computed_are_counted_drops_and_release_their_blocks():
    bench = Bench()
    bench.client.hashes = False
    request = bench.request(20)
    bench.step((request, 20))
    bench.finish(request)
    bench.client.time = 100.0

    assert bench.idle().stores == ()
    assert not bench.scheduler.has_work
    assert bench.pool.get_num_free_blocks() == 1000
    assert bench.scheduler.metrics.counter("skipped_chunks_total", "keys").value == 3


# Reset


def test_after_a_reset_everything_is_a_miss_until_it_is_done_and_then_looked_up_again():
    bench = Bench()
    request = bench.request(20, answer=hit(2))
    bench.scheduler.reset()

    assert bench.scheduler.match(request, 0) == (0, False)
    bench.client.ready = True
    bench.client.time = 3.0
    assert bench.scheduler.match(request, 0) == (None, False)


def test_kv_computed_before_a_reset_is_not_stored_after_it():
    bench = Bench()
    running, waiting = bench.request(20), bench.request(20)
    bench.step((running, 8))
    bench.scheduler.reset()

    jobs = bench.step((running, 12), (waiting, 20)).stores

    assert {job.request_id for job in jobs} == {waiting.request_id}
    assert {job.epoch for job in jobs} == {1}


def test_a_chunk_of_a_store_that_a_reset_drops_is_stored_by_the_next_request():
    bench = Bench()
    before = bench.request(20)
    bench.step((before, 20))
    bench.scheduler.reset()
    after = bench.twin(before)

    assert spans(bench.step((after, 20)).stores) == [(0, 16), (16, 20)]


def test_after_a_reset_a_request_is_promised_although_a_store_before_it_did_not_reach_a_shared_tier():
    bench = Bench(roles=Roles(hands_over=True))
    request = bench.request(16)
    for unshared in (1, 0):
        (job,) = bench.step((request, 16)).stores
        ranks = {job.job_id: RANKS}
        bench.report(answered=WorkerReport(ranks, ranks, {job.job_id: unshared}))
        if unshared:
            request.num_computed_tokens, request.num_preemptions = 0, 1
            bench.scheduler.reset()
    promise = bench.finish(request)

    assert promise is not None
    assert promise.tokens == 16


def test_a_reset_may_change_the_namespace_of_all_requests():
    bench = Bench(**{"vllm.reset_cache": "new_namespace"})
    waiting = bench.request(20, params={"tags": {"team": "a"}})
    before = tracker(bench, waiting).keys
    names = []
    for _ in range(2):
        bench.scheduler.reset()
        keys = tracker(bench, waiting).keys
        new = tracker(bench, bench.request(20, params={"tags": {"team": "a"}})).keys
        assert keys.tags == new.tags == (("team", "a"),)
        assert keys.reset == new.reset
        assert keys.num_hashed == 0
        assert keys.source is before.source
        names.append(keys.reset)

    assert len({before.reset, *names}) == 3
    assert bench.client.memory_only == [True, True]


def test_a_reset_of_all_tiers_keeps_the_namespace():
    bench = Bench()
    request = bench.request(20)
    keys = tracker(bench, request).keys
    bench.scheduler.reset()

    assert tracker(bench, request).keys is keys
    assert bench.client.memory_only == [False]


@pytest.mark.parametrize(
    "other",
    [
        Capabilities(removes=True),
        Capabilities(lists=True),
        # After a restart, the weights are those of the files again.
        Capabilities(removes=True, lists=True, persistent=True),
    ],
)
def test_a_reset_changes_the_namespace_if_a_tier_cannot_be_cleared_or_outlives_the_process(other):
    bench = Bench(tiers={"cpu": Capabilities(removes=True, lists=True), "other": other})
    request = bench.request(20)
    bench.scheduler.reset()

    assert tracker(bench, request).keys.reset
    assert tracker(bench, request).keys.event_lora_name == ""  # KV events are still published
    assert bench.client.memory_only == [False]


@given(data=st.data())
def test_all_blocks_are_released_and_only_computed_ones_are_read(data):
    bench = Bench(num_blocks=201, **{"vllm.max_pinned_fraction": 0.2})
    live: list[Request] = []
    flying: list[Job] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "step", "step", "finish", "copied", "grow"]))
        if action == "add" and len(live) < 3:
            live.append(bench.request(data.draw(st.integers(1, 40))))
            bench.answer(live[-1], hit(0))
        elif action == "step" and live:
            request = data.draw(st.sampled_from(live))
            left = request.num_tokens - request.num_computed_tokens
            jobs = bench.step((request, data.draw(st.integers(0, left)))).stores
            assert all(stop <= request.num_computed_tokens for _, stop in spans(jobs))
            flying.extend(jobs)
        elif action == "grow" and live:
            data.draw(st.sampled_from(live)).append_output_token_ids([1] * data.draw(st.integers(1, 9)))
        elif action == "finish" and live:
            bench.finish(live.pop(data.draw(st.integers(0, len(live) - 1))))
        elif action == "copied" and flying:
            bench.complete((flying.pop(),))
        held = sum(map(len, bench.blocks.values()))
        assert sum(block.ref_cnt for block in bench.pool.blocks) <= held + 40
    for request in live:
        bench.finish(request)
    flying.extend(bench.idle().stores)
    bench.complete(tuple(flying))

    assert not bench.scheduler.has_work
    assert bench.pool.get_num_free_blocks() == 200


def test_requests_of_older_vllms_have_no_shared_prefix_boundary():
    """VLLM 0.31 and older; a model with one group needs none."""
    bench = Bench()
    request = bench.request(64)
    del request.shared_prefix_boundary

    bench.allocate(request, 0, 64)

    assert bench.scheduler.tracker(request.request_id) is not None


@pytest.mark.parametrize("offered", [(1, 2), (1,), ()])
@pytest.mark.parametrize("owner", ["the request", "the request again", "another request", "none"])
def test_recurrent_states_are_stored_from_the_blocks_that_vllm_offers_in_a_step(
    offered: tuple[int, ...], owner: str
) -> None:
    """The block table has another block at that position. A boundary without the state of every group is useless.

    VLLM may free an offered block, and give it to another request or again to this one, before the step is planned.
    """
    bench = Bench(states=2)
    request = bench.request(4 * CHUNK + 3)
    blocks = dict(zip(offered, bench.pool.get_new_blocks(len(offered)), strict=True))
    bench.blocks_of(request, 4 * CHUNK)
    if owner.startswith("the request"):
        bench.blocks[request.request_id].extend(blocks.values())
    elif owner == "none":
        bench.pool.free_blocks(blocks.values())
    if owner == "the request":
        for block in blocks.values():
            block.set_block_hash(BlockHashWithGroupId(b""), num_tokens=4 * CHUNK)
    offers = [(group, block.block_id, 4 * CHUNK) for group, block in blocks.items()]

    metadata = bench.step((request, 4 * CHUNK), states={request.request_id: offers})

    chunks, *boundaries = metadata.stores
    stored = owner == "the request" and offered == (1, 2)
    assert [part.group for part in chunks.parts] == [0]
    parts = [part for boundary in boundaries for part in boundary.parts]
    assert [(part.group, part.start, part.touched_blocks()) for part in parts] == [
        (group, 4 * CHUNK - BLOCK, [block]) for group, block, _ in offers if stored
    ]
    held = 0 if owner == "none" else 1
    assert all(block.ref_cnt == held + stored for block in blocks.values())
    bench.complete(metadata.stores)
    assert all(block.ref_cnt == held for block in blocks.values())


@pytest.mark.parametrize(("known", "position"), [(0, 4), (5, 5)])
def test_vllm_gets_the_position_where_prompts_with_a_common_prefix_differ(known: int, position: int) -> None:
    """It ends a step there and offers the recurrent states. A longer prefix that it knows is kept."""
    bench = Bench(states=1)
    request = bench.request(6 * CHUNK)
    request.shared_prefix_boundary = known * CHUNK
    bench.answer(request, Answer(4, boundary=CHUNK))

    assert bench.scheduler.match(request, 0)[0] == CHUNK
    assert request.shared_prefix_boundary == position * CHUNK


@pytest.mark.parametrize(("states", "stored"), [(0, 4 * CHUNK), (1, 4 * CHUNK + BLOCK)])
def test_partial_chunks_are_always_stored_with_recurrent_states(states: int, stored: int) -> None:
    """VLLM's last state is at the end of a block, which may be inside of a chunk."""
    bench = Bench(states=states, **{"store.partial_chunks": False})
    request = bench.request(4 * CHUNK + BLOCK + 1)
    jobs = bench.step((request, 4 * CHUNK + BLOCK + 1)).stores

    assert max(stop for _, stop in spans(jobs)) == stored
