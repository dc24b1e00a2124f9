"""The state machine of one request, without vLLM, threads or blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.keys import Adapter, RequestKeys
from lmcache_async.integration.vllm.load_policy import Decision, Hit, LoadPolicy, PrefillClock
from lmcache_async.integration.vllm.lookup import MISS, Answer, AnsweredLookup, Lookup
from lmcache_async.integration.vllm.request import (
    Release,
    RequestPolicy,
    RequestTracker,
    StoreSpan,
)
from tests.support.request_keys import BLOCK, CHUNK, ONE_GROUP, opened_keys

LOOKUP_TIMEOUT_S = 0.1


@dataclass
class View:
    """The attributes of vLLM's request."""

    num_tokens: int
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False


def policy(load_policy: LoadPolicy | None = None, **options: Any) -> RequestPolicy:
    decider = load_policy or LoadPolicy(PrefillClock(lambda: 0.0), CHUNK)
    given = {
        "partial_chunks": True,
        "generated_tokens": True,
        "lookup_timeout_s": LOOKUP_TIMEOUT_S,
        "lookup_pin_ttl_s": 30.0,
        "wait_for_producer_s": 2.0,
        "layerwise_tokens": 0,
        "decide": decider.decide,
    }
    return RequestPolicy(chunk_size=CHUNK, **{"groups": ONE_GROUP, **given, **options})


def tracker_of(num_tokens: int, settings: RequestPolicy | None = None, **options: Any) -> RequestTracker:
    return RequestTracker(View(num_tokens), opened_keys(range(num_tokens)), settings or policy(), **options)


def ask(tracker: RequestTracker, *, now: float = 0.0, epoch: int = 0, name: str = "1") -> Lookup:
    lookup = Lookup(name, tracker.num_tokens, epoch, now)
    tracker.lookup_sent(lookup)
    return lookup


def answer(tracker: RequestTracker, lookup: Lookup, given: Answer, **options: Any) -> None:
    times = {"queried_at": lookup.asked_at, "answered_at": lookup.asked_at}
    tracker.lookup_answered(AnsweredLookup("r", lookup.lookup_id, given, **{**times, **options}))


def test_an_answer_to_an_earlier_lookup_has_no_effect() -> None:
    tracker = tracker_of(40)
    first = ask(tracker, name="1")
    second = ask(tracker, name="2")
    answer(tracker, first, Answer(5))

    assert tracker.offer(0.0, ready=True).tokens is None
    answer(tracker, second, MISS)
    assert tracker.offer(0.0, ready=True).tokens == 0


@pytest.mark.parametrize("end", ["preempted", "finished"])
def test_a_request_holds_its_blocks_until_it_ends_or_is_preempted(end: str) -> None:
    view = View(40)
    tracker = RequestTracker(view, opened_keys(range(40)), policy())
    held = tracker.block_table_held()
    assert held()

    if end == "preempted":
        view.num_preemptions += 1
        assert tracker.block_table_held()()  # of the blocks that it is given next
    else:
        tracker.end()
        assert not tracker.block_table_held()()

    assert not held()


@pytest.mark.parametrize(
    ("chunks", "queried_at", "answered_at", "now", "asks"),
    [
        (5, 0.0, 0.1, 14.9, False),
        (5, 0.0, 0.1, 15.1, True),  # half of the time of the pins
        (5, 0.0, 14.0, 15.9, False),
        (5, 0.0, 14.0, 16.1, True),
        (4, 0.0, 5.0, 6.9, False),
        (4, 0.0, 5.0, 7.1, True),  # its prefix may have been stored since
    ],
)
def test_a_lookup_is_repeated_when_its_pins_may_expire_or_more_may_be_stored(
    chunks: int, queried_at: float, answered_at: float, now: float, asks: bool
) -> None:
    """The answer of a slow lookup is used for 2 s at least."""
    tracker = tracker_of(40)
    answer(tracker, ask(tracker), Answer(chunks), queried_at=queried_at, answered_at=answered_at)

    assert tracker.refresh_lookup(now, 0, may_repeat=True).ask == asks


def test_a_load_that_was_never_offered_cannot_start() -> None:
    with pytest.raises(RuntimeError, match="never offered"):
        tracker_of(40).load_started(16)


def test_a_hit_is_decided_once_for_each_number_of_local_tokens() -> None:
    decided_at: list[int] = []
    decider = LoadPolicy(PrefillClock(lambda: 0.0, 1000.0), CHUNK)
    decide = decider.decide

    def noted(request_id: str, hit: Hit, *, promised: bool) -> Decision:
        decided_at.append(hit.local_tokens)
        return decide(request_id, hit, promised=promised)

    tracker = tracker_of(1001, replace(policy(decider), decide=noted))
    answer(tracker, ask(tracker), Answer(10, costs=((10, 1.5),)))

    tracker.local_found(0)
    assert [tracker.offer(0.0, ready=True).tokens for _ in range(3)] == [0, 0, 0]
    tracker.local_found(72)
    assert tracker.offer(0.0, ready=True).tokens == 0
    assert decided_at == [0, 72]


def test_each_decision_has_a_reason() -> None:
    def decided(tracker: RequestTracker) -> tuple[str, str]:
        admission = tracker.admitted(0)
        return admission.plan.decided, admission.plan.why

    off = tracker_of(1001, may_load=False)
    local = tracker_of(1001)
    local.local_found(1000)
    late = tracker_of(1001)
    ask(late)
    miss = tracker_of(1001)
    answer(miss, ask(miss), MISS)
    slow = tracker_of(1001, policy(LoadPolicy(PrefillClock(lambda: 0.0, 1000.0), CHUNK)))
    answer(slow, ask(slow), Answer(100, costs=((100, 9.0),)))
    slow.offer(0.0, ready=True)

    assert decided(off)[0] == "off"
    assert decided(local)[0] == "local"
    assert decided(late)[0] == "late"
    assert decided(miss) == ("miss", "no tier has a prefix of the prompt")
    assert decided(slow) == ("recompute", "1.001 s to the first token, 9.201 s with all 800 tokens loaded")


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 40))
def test_stores_are_whole_chunks_in_order_within_the_room(prompt: int, computed: int, room: int) -> None:
    tracker = tracker_of(prompt)
    computed = min(prompt, computed)
    spans = tracker.plan_stores(computed, {}, room)

    assert sum(span.num_tokens for span in spans) <= room * BLOCK
    end = 0
    for span in spans:
        assert span.first == end
        end = span.stop
        assert span.first * CHUNK + span.num_tokens <= computed or span.is_tail
    if room * BLOCK >= prompt:
        assert sum(span.num_tokens for span in spans) == (
            computed // CHUNK * CHUNK if computed < prompt else prompt // BLOCK * BLOCK
        )
    assert tracker.plan_stores(computed, {}, 0) == []


@pytest.mark.parametrize(("local", "changed", "stored"), [(0, True, 5), (8, True, 0), (8, False, 5)])
def test_nothing_is_stored_of_a_request_with_kv_of_an_adapter_s_former_weights(
    local: int, changed: bool, stored: int
) -> None:
    """VLLM does not invalidate its own prefix cache when it loads an adapter again."""
    keys = opened_keys(range(40), adapter=Adapter("sql", "/sql"), adapter_changed=changed)
    tracker = RequestTracker(View(40), keys, policy())
    tracker.local_found(local)

    assert sum(span.stop - span.first for span in tracker.plan_stores(40, {}, 100)) == stored


def test_a_request_that_ends_without_keys_is_not_stored_if_its_adapter_may_have_changed() -> None:
    tracker = RequestTracker(
        View(40), RequestKeys("r", range(40), 40, adapter=Adapter("sql", "/sql")), policy()
    )
    tracker.local_found(8)

    assert tracker.finished(40, 100) == ([], 0)


class TrackerMachine(RuleBasedStateMachine):
    """Any order of events.

    The last lookup decides what is offered, pins are released, nothing is stored twice, and only computed tokens are
    stored.
    """

    PROMPT = 44

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = 0
        self.view = View(self.PROMPT)
        self.keys = opened_keys(range(self.PROMPT))
        self.tracker = RequestTracker(self.view, self.keys, policy())
        self.open: dict[str, Lookup] = {}
        self.unanswered: dict[str, Lookup] = {}  # also released ones
        self.asked_at = 0.0
        self.asked_preemptions = self.asked_epoch = 0
        self.hit: int | None = None
        self.load_failed = False
        self.released: list[str] = []
        self.stored: list[range] = []
        self.offered: int | None = 0
        self.local = 0
        self.loading = 0
        self.filled = 0  # leading tokens whose blocks have their KV
        self.others_tokens = 0  # that another connector loads
        self.admitted = False  # since then neither preempted nor without blocks after a failed load
        self.names = 0
        self.done = False

    @property
    def waits(self) -> bool:
        """Whether vLLM waits for a load."""
        return bool(self.loading or self.others_tokens)

    def _release(self, release: Release | None) -> None:
        if release is not None:
            self.released.append(release.lookup.lookup_id)
            del self.open[release.lookup.lookup_id]

    def _stored(self, spans: Sequence[StoreSpan]) -> None:
        for span in spans:
            tokens = range(span.first * CHUNK, span.first * CHUNK + span.num_tokens)
            assert tokens.stop <= self.filled
            self.stored.append(tokens)

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.2, 3.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.done and not self.admitted)
    @rule(local=st.integers(0, 22), ready=st.booleans())
    def vllm_asks(self, local: int, ready: bool) -> None:
        self.local = local * BLOCK
        self.tracker.local_found(self.local)
        refresh = self.tracker.refresh_lookup(self.now, self.epoch, may_repeat=True)
        preempted = self.view.num_preemptions > self.asked_preemptions
        reset = self.epoch > self.asked_epoch and not self.load_failed
        assert refresh.ask or not (preempted or reset)
        if refresh.ask:
            assert preempted or not self.load_failed
            self.asked_preemptions, self.asked_epoch = self.view.num_preemptions, self.epoch
            self._release(refresh.release)
            self.names += 1
            lookup = Lookup(str(self.names), self.view.num_tokens, self.epoch, self.now)
            self.open[lookup.lookup_id] = self.unanswered[lookup.lookup_id] = lookup
            self.tracker.lookup_sent(lookup)
            self.asked_at, self.hit, self.load_failed = self.now, None, False
        offer = self.tracker.offer(self.now, ready=ready)
        self.offered = offer.tokens
        assert self.offered == self._expected_offer(ready=ready)
        assert offer.is_async == bool(offer.tokens)

    def _expected_offer(self, *, ready: bool) -> int | None:
        if self.load_failed or not ready:
            return 0
        if self.hit is None:
            return None if self.now - self.asked_at < LOOKUP_TIMEOUT_S else 0
        return max(0, self.hit - self.local)

    @precondition(lambda self: self.unanswered)
    @rule(chunks=st.integers(0, 5), partial=st.integers(0, 2), data=st.data())
    def answered(self, chunks: int, partial: int, data: st.DataObject) -> None:
        self._answer(data.draw(st.sampled_from(sorted(self.unanswered))), chunks, partial)

    def _answer(self, name: str, chunks: int, partial: int = 0) -> None:
        given = Answer(chunks, partial * BLOCK if chunks == 5 else 0, pinned=True)
        answer(self.tracker, self.unanswered.pop(name), given)
        if name == str(self.names):
            self.hit = given.hit_tokens(CHUNK)
            self.offered = 0

    @precondition(lambda self: not self.done and not self.admitted and self.offered is not None)
    @rule()
    def allocated(self) -> None:
        load, self.admitted = self.offered or 0, True
        self.tracker.admitted(load)
        if load:
            span = self.tracker.load_started(load)
            assert (span.local, span.hit) == (self.local, self.local + load)
            self.tracker.skip_stored(self.epoch)
            self.loading = load
            self.offered = 0
            self.view.num_computed_tokens = self.local + load  # vLLM counts them from the start of the load
        else:
            self._release(self.tracker.lookup_unused())
            self.view.num_computed_tokens = max(self.view.num_computed_tokens, self.local)
        self.filled = max(self.filled, self.local)

    @precondition(lambda self: not self.done and not self.admitted)
    @rule(local=st.integers(0, 4), tokens=st.integers(1, 14))
    def another_connector_loads(self, local: int, tokens: int) -> None:
        self.vllm_asks(local, ready=True)
        if self.offered is not None:
            self.admitted = True
            self.tracker.admitted(0)
            self._release(self.tracker.lookup_unused())
            self.filled, self.others_tokens = self.local, tokens * BLOCK
            self.view.num_computed_tokens = self.local + self.others_tokens

    @precondition(lambda self: self.others_tokens)
    @rule(fails=st.booleans())
    def another_load_ended(self, fails: bool) -> None:
        self.filled = self.local + (0 if fails else self.others_tokens)
        self.others_tokens = 0
        self._continue()

    def _continue(self) -> None:
        """After a load. If it has loaded nothing, vLLM frees the blocks and asks again."""
        if self.done:
            return
        self.view.num_computed_tokens = self.filled
        if self.filled:
            self.tracker.admitted(0)
        else:
            self.admitted, self.load_failed, self.offered = False, True, None

    @precondition(lambda self: not self.done and not self.waits)
    @rule(local=st.integers(0, 4), chunks=st.integers(1, 5), tokens=st.integers(0, 20), data=st.data())
    def hit_is_loaded(self, local: int, chunks: int, tokens: int, data: st.DataObject) -> None:
        """A preemption, a lookup, its load and a step: the usual order, which events chosen one by one rarely have."""
        if self.admitted:
            self.preempted()
        self.vllm_asks(local, ready=True)
        if str(self.names) in self.unanswered:
            self._answer(str(self.names), chunks)
            self.vllm_asks(local, ready=True)
        self.allocated()
        if self.loading and data.draw(st.booleans()):
            self.load_ended(data, fails=data.draw(st.booleans()))
        self.step(tokens, room=30)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), fails=st.booleans())
    def load_ended(self, data: st.DataObject, fails: bool) -> None:
        computed = self.local + self.loading
        if fails:
            first = data.draw(st.integers(self.local // BLOCK, computed // BLOCK - 1)) * BLOCK
            self.tracker.load_tokens_failed(first)
            self.load_failed = True
            if not self.done and data.draw(st.booleans()):  # another rank is still loading
                self.step(0, room=30)
            # vLLM computes these tokens again, and they may be stored again.
            self.stored = [tokens for tokens in self.stored if tokens.stop <= first // CHUNK * CHUNK]
            computed = first
        self._release(self.tracker.load_ended())
        self.loading = 0
        self.filled = computed
        self._continue()

    @precondition(lambda self: not self.done)
    @rule(tokens=st.integers(0, 20), room=st.integers(0, 30))
    def step(self, tokens: int, room: int) -> None:
        if self.waits or not self.admitted:
            return  # vLLM does not schedule the request
        computed = self.filled = self.tracker.step_planned(tokens)
        self.tracker.skip_stored(self.epoch)
        self._stored(self.tracker.plan_stores(computed, {}, room))
        self.view.num_computed_tokens = computed

    @precondition(lambda self: self.admitted and not self.done and not self.waits)
    @rule()
    def preempted(self) -> None:
        self.admitted = False
        self.view.num_preemptions += 1
        self.view.num_computed_tokens = self.filled = 0

    @precondition(lambda self: not self.done)
    @rule()
    def reset(self) -> None:
        self.epoch += 1
        may_store_again = not (self.waits or self.view.num_computed_tokens)
        self.tracker.cache_reset()
        self.stored = []
        self.offered = 0 if self.loading else None
        assert self.tracker.stores is False or may_store_again

    @precondition(lambda self: not self.done)
    @rule(room=st.integers(0, 30), ends=st.sampled_from([*9 * [False], True]))
    def finished(self, room: int, ends: bool) -> None:
        if ends:
            self._finish(room)

    def teardown(self) -> None:
        if not self.done:
            self._finish(30)
        self._release(self.tracker.load_ended())
        assert not self.open

    def _finish(self, room: int) -> None:
        self.done = True
        self._release(self.tracker.lookup_unused())
        spans, dropped = self.tracker.finished(self.tracker.computed_tokens, room)
        assert dropped >= 0
        assert not (spans and self.waits)
        self._stored(spans)

    @invariant()
    def nothing_is_stored_twice(self) -> None:
        tokens = [token for span in self.stored for token in span]
        assert len(tokens) == len(set(tokens))

    @invariant()
    def pins_are_released_once_and_in_the_end_all(self) -> None:
        assert len(self.released) == len(set(self.released))
        if self.done and not self.loading:
            assert not self.open


TestTracker = TrackerMachine.TestCase


WINDOWS = KVGroups((KVGroup(0, BLOCK), KVGroup(1, BLOCK, window=6)))


def load_to_boundary(tracker: RequestTracker, boundary: int) -> None:
    """Look the request up, and start to load it up to a stored boundary."""
    answer(tracker, ask(tracker), Answer(-(-boundary // CHUNK), boundary=boundary))
    tracker.local_found(0)
    tracker.offer(0.0, ready=True)
    tracker.admitted(boundary)
    tracker.load_started(boundary)
    tracker.skip_stored(0)


@pytest.mark.parametrize(
    ("prompt", "partial_chunks", "boundaries"),
    [
        (21, True, [20]),
        (20, True, [18, 20]),
        (24, True, [22, 24]),
        (21, False, [16]),
        (24, False, [16, 24]),
        (2, True, [2]),
    ],
)
def test_windows_are_stored_where_a_later_request_can_continue(
    prompt: int, partial_chunks: bool, boundaries: list[int]
) -> None:
    tracker = tracker_of(prompt, policy(groups=WINDOWS, partial_chunks=partial_chunks))

    assert tracker.plan_boundaries(boundaries[0] - 1) == []
    assert tracker.plan_boundaries(prompt) == boundaries
    assert tracker.plan_boundaries(prompt) == []  # once


STATES = KVGroups((KVGroup(0, BLOCK), KVGroup(1, BLOCK, state="GDN")))


@pytest.mark.parametrize(
    ("offered", "generated_tokens", "stored"),
    [
        ([16, 8], True, [8, 16]),
        ([20, 24], True, [20, 24]),  # after generated tokens, like their chunks
        ([20, 24], False, [20]),
        ([15], True, []),  # inside of a block
    ],
)
def test_recurrent_states_are_stored_in_the_step_in_which_vllm_offers_them(
    offered: list[int], generated_tokens: bool, stored: list[int]
) -> None:
    tracker = tracker_of(21, policy(groups=STATES, generated_tokens=generated_tokens))

    assert tracker.plan_boundaries(30) == []
    tracker.states_offered(offered)
    assert all(tracker.tokens_to_hash(boundary) >= boundary for boundary in stored)
    assert tracker.plan_boundaries(30) == stored
    tracker.states_offered([])
    assert tracker.plan_boundaries(30) == []


def test_a_recurrent_state_that_was_loaded_is_not_stored_again_unless_the_load_failed() -> None:
    tracker = tracker_of(40, policy(groups=STATES))
    load_to_boundary(tracker, 38)
    tracker.load_ended()

    tracker.states_offered([38])
    assert tracker.plan_boundaries(40) == []
    tracker.load_tokens_failed(0)
    tracker.states_offered([38])
    assert tracker.plan_boundaries(40) == [38]


def test_the_prefix_shared_with_other_requests_can_be_longer_than_the_hit() -> None:
    tracker = tracker_of(40, policy(groups=STATES))
    assert tracker.shared_tokens == 0
    answer(tracker, ask(tracker), Answer(4, boundary=16))

    assert tracker.shared_tokens == 4 * CHUNK
    tracker.local_found(4 * CHUNK)
    assert tracker.shared_tokens == 0


def test_one_group_of_full_attention_has_no_boundaries() -> None:
    tracker = tracker_of(21)
    tracker.add_shared_boundary(16)

    assert tracker.plan_boundaries(21) == []


def test_a_hit_ends_where_every_group_has_what_it_needs() -> None:
    tracker = tracker_of(40, policy(groups=WINDOWS))
    answer(tracker, ask(tracker), Answer(4, boundary=22))
    tracker.local_found(0)

    assert tracker.offer(0.0, ready=True).tokens == 22
    admission = tracker.admitted(22)
    assert admission.plan.hit_tokens == 22
    # Another prompt shares four chunks, so the next one that does can continue after them.
    assert tracker.plan_boundaries(40) == [32, 38, 40]


@pytest.mark.parametrize(("boundary", "asks"), [(14, False), (12, True)])
def test_a_hit_of_all_that_vllm_can_use_is_not_looked_up_again_soon(boundary: int, asks: bool) -> None:
    groups = KVGroups((KVGroup(0, BLOCK), KVGroup(1, BLOCK, window=5)))
    tracker = tracker_of(16, policy(groups=groups))
    answer(tracker, ask(tracker), Answer(2, boundary=boundary))

    assert tracker.refresh_lookup(3.0, 0, may_repeat=True).ask == asks


def test_a_hit_of_several_groups_is_loaded_as_a_whole_or_not_at_all() -> None:
    slow = LoadPolicy(PrefillClock(lambda: 0.0, tokens_per_s=10.0), CHUNK)
    costs = ((2, 0.0), (4, 2.0))
    for boundary, tokens in ((None, 16), (32, 32)):
        tracker = tracker_of(40, policy(slow, groups=WINDOWS if boundary else ONE_GROUP))
        answer(tracker, ask(tracker), Answer(4, costs=costs, boundary=boundary))
        tracker.local_found(0)
        assert tracker.offer(0.0, ready=True).tokens == tokens


def test_after_a_failed_load_the_boundaries_are_stored_again() -> None:
    tracker = tracker_of(40, policy(groups=WINDOWS))
    load_to_boundary(tracker, 38)
    tracker.load_tokens_failed(0)
    tracker.load_ended()

    assert tracker.plan_boundaries(40) == [38, 40]


def test_a_model_of_windows_alone_stores_no_chunks() -> None:
    tracker = tracker_of(40, policy(groups=KVGroups((KVGroup(0, BLOCK, window=6),))))

    assert tracker.plan_stores(40, {}, 100) == []
    assert tracker.plan_boundaries(40) == [38, 40]
