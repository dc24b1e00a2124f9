"""Promises: created by a producer's scheduler connector, used by a consumer's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.request import Request, RequestStatus

from lmcache_async.integration.vllm.jobs import WorkerReport
from lmcache_async.integration.vllm.keys import PROMISE_FIELD, Promise
from lmcache_async.integration.vllm.request import Roles
from tests.unit.vllm.test_scheduler import CHUNK, RANKS, Bench, hit, spans, tracker

PRODUCER = Roles(hands_over=True)
PROMISE = Promise("p", 20, "0" * 32, "1" * 32, 30.0)


def promised(bench: Bench, request: Request) -> int:
    """Tokens that the request promises at its end; 0 for no promise."""
    promise = bench.finish(request)
    return promise.tokens if promise is not None else 0


def prefilled(bench: Bench, num_tokens: int, **options: Any) -> Request:
    """A request whose prompt is computed, with the next token sampled."""
    request = bench.request(num_tokens, **options)
    bench.step((request, num_tokens))
    request.append_output_token_ids(5)
    return request


def test_recomputed_and_generated_tokens_are_not_promised_beyond_the_prompt():
    bench = Bench(roles=PRODUCER)
    request = prefilled(bench, 7)
    for token in range(20):
        bench.step((request, 1))
        request.append_output_token_ids(token)

    assert promised(bench, request) == 6


def test_a_request_aborted_during_its_prefill_promises_its_computed_tokens():
    bench = Bench(roles=PRODUCER)
    request = bench.request(40)
    bench.step((request, 20))
    request.status = RequestStatus.FINISHED_ABORTED

    assert promised(bench, request) == 16


@pytest.mark.parametrize("skip_save", [False, True], ids=["no keys", "not stored"])
def test_chunks_without_keys_or_that_are_not_stored_are_not_promised(skip_save: bool):
    bench = Bench(roles=PRODUCER)
    bench.client.hashes = skip_save

    assert bench.finish(prefilled(bench, 20, params={"skip_save": skip_save})) is None


@pytest.mark.parametrize("loads", [True, False])
def test_a_request_to_be_handed_over_waits_for_its_keys_if_vllm_has_all_of_it(loads: bool):
    bench = Bench(roles=replace(PRODUCER, loads=loads))
    bench.client.hashes = False
    request = bench.request(20)
    assert bench.scheduler.match(request, 18) == (None, False)
    bench.client.hashes = True
    bench.client.hash(tracker(bench, request).keys, 20)

    assert bench.scheduler.match(request, 18) == (0, False)


def test_a_wait_for_keys_ends_at_the_lookup_timeout():
    bench = Bench(roles=PRODUCER)
    bench.client.hashes = False
    request = bench.request(20)
    for at, offered in [(0.0, None), (0.05, None), (0.15, 0)]:
        bench.client.time = at
        assert bench.scheduler.match(request, 18) == (offered, False)


def test_a_request_to_be_handed_over_has_keys_soon_after_a_reset_that_replaces_them():
    bench = Bench(roles=PRODUCER, **{"vllm.reset_cache": "new_namespace"})
    request = bench.request(20)
    bench.scheduler.reset()

    offered = [bench.scheduler.match(request, 18) for _ in range(2)]
    assert offered == [(None, False), (0, False)]


def test_a_connector_with_both_roles_promises_on_request_only():
    bench = Bench()

    assert bench.finish(prefilled(bench, 20)) is None
    assert bench.finish(prefilled(bench, 20, params={"do_remote_decode": False})) is None
    assert promised(bench, prefilled(bench, 20, params={"do_remote_decode": True})) == 20


def test_a_producer_offers_its_hits_to_the_tiers_that_lack_them():
    bench = Bench(roles=PRODUCER)
    request = bench.request(20, answer=hit(2))
    assert bench.scheduler.match(request, 0) == (16, True)
    bench.allocate(request, 16, 16)
    bench.step()
    bench.report(finished={request.request_id})
    request.num_computed_tokens = 16
    jobs = bench.step((request, 4)).stores

    assert spans(jobs) == [(0, 16), (16, 20)]
    assert all(job.hand_over for job in jobs)


def report(bench: Bench, unshared: dict[int, int | None], *, ranks: int = RANKS) -> None:
    """The tiers of some ranks answer stores: the chunks that no shared tier has taken; None if all were stored before."""
    known = {job_id: chunks for job_id, chunks in unshared.items() if chunks is not None}
    bench.report(answered=WorkerReport({}, dict.fromkeys(unshared, ranks), known))


def test_chunks_that_reached_no_shared_tier_are_not_promised():
    bench = Bench(roles=PRODUCER)
    request = bench.request(60)
    first = bench.step((request, 30)).stores
    second = bench.step((request, 30)).stores
    assert spans(first + second) == [(0, 24), (24, 56), (56, 60)]
    report(bench, {first[0].job_id: 0})
    report(bench, {second[0].job_id: 2})
    report(bench, {second[1].job_id: 0})

    assert promised(bench, request) == 24


def test_while_nothing_reaches_a_shared_tier_nothing_is_promised():
    bench = Bench(roles=PRODUCER)
    requests = [prefilled(bench, 20) for _ in range(3)]
    report(bench, {99: 1})
    assert bench.finish(requests[0]) is None
    report(bench, {98: 0, 97: 3})
    assert bench.finish(requests[1]) is None
    report(bench, {96: 0})
    assert bench.finish(requests[2]) is not None


@pytest.mark.parametrize(
    ("answers", "promised"),
    [
        ([0, 0], True),
        ([0, None], True),
        ([3, 0], False),
        ([0, 3], False),
        ([3, None], False),
        ([None, None], False),
    ],
)
def test_chunks_are_promised_again_once_a_store_has_reached_a_shared_tier_on_every_rank(
    answers: list[int | None], promised: bool
):
    bench = Bench(roles=PRODUCER)
    request = prefilled(bench, 20)
    report(bench, {99: 1})
    for unshared in answers:
        report(bench, {98: unshared}, ranks=1)

    assert (bench.finish(request) is not None) == promised


@pytest.mark.parametrize(("unshared", "tokens"), [(0, 20), (1, 0)])
def test_a_promise_depends_on_the_stores_of_other_requests_with_its_chunks(unshared: int, tokens: int):
    bench = Bench(roles=PRODUCER)
    first = bench.request(20)
    second = bench.twin(first)
    jobs = bench.step((first, 20), (second, 20)).stores
    assert spans(jobs) == [(0, 16), (16, 20), (16, 20)]
    report(bench, {jobs[0].job_id: unshared})
    report(bench, {99: 0})

    assert promised(bench, second) == tokens


def test_chunks_of_a_store_that_has_failed_on_one_rank_are_stored_by_the_next_request():
    bench = Bench(roles=PRODUCER)
    first = bench.request(20)
    second = bench.twin(first)
    report(bench, {bench.step((first, 20)).stores[0].job_id: 1}, ranks=1)

    assert spans(bench.step((second, 20)).stores) == [(0, 16), (16, 20)]


def test_chunks_of_a_store_whose_answer_is_not_reported_are_stored_by_a_request_that_is_handed_over():
    bench = Bench()
    first = bench.request(20)
    second = bench.twin(first, do_remote_decode=True)

    jobs = bench.step((first, 20), (second, 20)).stores
    assert spans(jobs) == [(0, 16), (16, 20)] * 2


def promised_with_states(bench: Bench, *, offered: bool = True, unshared: int = 0) -> int:
    """Tokens promised by a request of a model with a recurrent state, whose store no shared tier may have taken."""
    request = bench.request(4 * CHUNK + 3)
    (state,) = bench.pool.get_new_blocks(1)
    state.set_block_hash(BlockHashWithGroupId(b""), num_tokens=4 * CHUNK + 2)
    bench.blocks_of(request, 4 * CHUNK + 3)
    bench.blocks[request.request_id].append(state)
    states = {request.request_id: [(1, state.block_id, 4 * CHUNK + 2)]} if offered else {}
    *_, last = bench.step((request, 4 * CHUNK + 3), states=states).stores
    report(bench, {last.job_id: unshared})
    report(bench, {99: 0})
    return promised(bench, request)


def test_several_groups_are_promised_only_if_a_consumer_can_continue_after_the_promised_tokens():
    assert promised_with_states(Bench(roles=PRODUCER, states=1)) == 4 * CHUNK + 2
    assert promised_with_states(Bench(roles=PRODUCER, states=1), offered=False) == 0
    assert promised_with_states(Bench(roles=PRODUCER, states=1), unshared=1) == 0
    # The chunks take all the room for pinned blocks.
    full = {"num_blocks": 41, "vllm.max_pinned_fraction": 17 / 41}
    assert promised_with_states(Bench(roles=PRODUCER, states=1, **full)) == 0


# Promises in transit


GOOD = PROMISE.params()[PROMISE_FIELD]


@pytest.mark.parametrize(
    "value",
    [
        "text",
        [],
        {},
        GOOD | {"version": 2},
        GOOD | {"tokens": "20"},
        GOOD | {"tokens": 0},
        GOOD | {"tokens": 1 << 40},
        GOOD | {"namespace": "0" * 31},
        GOOD | {"end": "x" * 32},
        GOOD | {"wait_s": -1},
        GOOD | {"wait_s": float("nan")},
        GOOD | {"wait_s": 10**400},
        GOOD | {"wait_s": None},
        {key: GOOD[key] for key in GOOD if key != "end"},
    ],
)
def test_invalid_promises_are_ignored(value: object):
    assert Promise.of({PROMISE_FIELD: value}) is None


def test_a_promise_is_read_together_with_other_transfer_params():
    params = {
        "do_remote_prefill": True,
        "remote_host": None,
        PROMISE_FIELD: GOOD | {"later": "versions add to it"},
    }

    assert Promise.of(params) == PROMISE
    long = Promise.of({PROMISE_FIELD: GOOD | {"request_id": "x" * 1000}})
    assert long == replace(PROMISE, request_id="x" * 64)


# The consumer


def asked_with(bench: Bench) -> tuple[Promise | None, float]:
    lookup = bench.client.asked[-1]
    return lookup.promise, lookup.wait_s


def test_a_promise_is_waited_for_as_long_as_is_configured():
    bench = Bench(**{"vllm.wait_for_producer_s": 3.0})
    request = bench.request(20, params=PROMISE.params())

    assert asked_with(bench) == (PROMISE, 3.0)
    for at, offered in [(0.0, None), (3.05, None), (3.2, 0)]:
        bench.client.time = at
        assert bench.scheduler.match(request, 0) == (offered, False)
    assert bench.scheduler.metrics.counter("late_lookups_total").value == 1


def test_a_wait_is_at_most_as_long_as_the_promise():
    bench = Bench()
    bench.request(20, params=replace(PROMISE, wait_s=0.5).params())

    assert asked_with(bench)[1] == 0.5


def test_the_wait_continues_when_a_request_is_preempted():
    bench = Bench()
    request = bench.request(20, params=PROMISE.params())
    for at, left in [(0.5, 1.5), (3.0, 0.0)]:
        bench.client.time = at
        request.num_preemptions += 1
        assert bench.scheduler.match(request, 0) == (None, False)
        assert asked_with(bench) == (PROMISE, left)
    assert len(bench.client.released) == 2


def test_an_answer_after_a_long_wait_is_not_too_old():
    bench = Bench(**{"vllm.wait_for_producer_s": 10.0})
    request = bench.request(20, params=PROMISE.params())
    bench.client.time = 9.0
    bench.client.answer(bench.client.asked[-1], hit(1), answered_at=8.9)

    assert bench.scheduler.match(request, 0) == (8, True)
    assert len(bench.client.asked) == 1


def test_vllms_own_hit_is_not_awaited():
    bench = Bench()
    request = bench.request(40, params=PROMISE.params())

    assert bench.scheduler.match(request, 18) == (None, False)
    assert bench.scheduler.match(request, 20) == (0, False)


def test_promised_chunks_are_loaded_although_computing_is_faster():
    bench = Bench(**{"vllm.prefill_tokens_per_s": 1e6})
    for promised, loaded in [(False, 0), (True, 16)]:
        request = bench.request(20, params=PROMISE.params())
        answer = replace(hit(2), costs=((2, 5.0),))
        bench.client.answer(bench.client.asked[-1], answer, promise_matches=promised)
        assert bench.scheduler.match(request, 0)[0] == loaded
