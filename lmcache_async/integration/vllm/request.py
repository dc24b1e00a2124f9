"""State of one request in the scheduler.

`RequestTracker` is a state machine without I/O, threads or vLLM imports. The scheduler connector calls one method
for each event (a lookup was answered, blocks were allocated, a step was planned, a load ended, ...) and carries out
what the method returns: a lookup to release, a load to start, chunks to store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmcache_async.integration.vllm.groups import KVGroups
from lmcache_async.integration.vllm.keys import Promise, RequestKeys
from lmcache_async.integration.vllm.load_policy import NO_PREFIX, Decision, Hit
from lmcache_async.integration.vllm.lookup import Answer, AnsweredLookup, Lookup
from lmcache_async.logging import LimitedLogger
from lmcache_async.types import Decided, RequestPlan

logger = LimitedLogger(logging.getLogger(__name__))

MAX_JOB_CHUNKS = 32
"""Maximum number of chunks in a store job. Its blocks are unpinned together, so several jobs store a long prefill."""

MISS_AGE_S = 2.0
"""Age at which a lookup without a full hit is repeated, because the prefix may have been stored since."""

_TAG_PREFIX = "lmcache.tag."  # LMCache's spelling of one tag as a key


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of this vLLM instance, from its `kv_role` and the configuration.

    Attributes:
        hands_over: Another vLLM instance continues every request.
    """

    loads: bool = True
    stores: bool = True
    hands_over: bool = False


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options in the `kv_transfer_params` of a request. Other keys are ignored.

    LMCache's `lmcache.skip_save` and `lmcache.tag.<name>` are accepted in addition to our own names. With `hand_over` another
    vLLM instance continues the request and needs a promise. `promise` is the promise of a producer for this request.
    """

    load: bool = True
    store: bool = True
    hand_over: bool = False
    promise: Promise | None = None
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> RequestOptions:
        if not params:
            return cls()
        tags = params.get("tags")
        usable = tags is None or isinstance(tags, dict)
        if not usable:  # without the tags the request's KV would be shared with all requests
            logger.report(
                "tags",
                "kv_transfer_params: tags is a %s; expected an object of names and values; the request is neither"
                " loaded nor stored",
                type(tags).__name__,
            )
        pairs = {str(name): str(value) for name, value in tags.items()} if isinstance(tags, dict) else {}
        for name, value in params.items():
            if name.startswith(_TAG_PREFIX):
                pairs[name.removeprefix(_TAG_PREFIX)] = str(value)
        return cls(
            load=usable and not _is_set(params, "skip_load"),
            store=usable and not (_is_set(params, "skip_save") or _is_set(params, "force_skip_save")),
            hand_over=params.get("do_remote_decode") is True,
            promise=Promise.of(params),
            tags=tuple(sorted(pairs.items())),
        )


def _is_set(params: Mapping[str, Any], name: str) -> bool:
    return bool(params.get(name) or params.get(f"lmcache.{name}"))


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Settings that all requests of an engine share.

    Attributes:
        layerwise_tokens: Longest hit that is loaded layer by layer in the step that uses it; 0 for none.
        decide: Decides how much of a hit is loaded; called as `decide(request_id, hit, promised=...)`.
    """

    chunk_size: int
    groups: KVGroups
    partial_chunks: bool
    generated_tokens: bool
    lookup_timeout_s: float
    lookup_pin_ttl_s: float
    wait_for_producer_s: float
    layerwise_tokens: int
    decide: Callable[..., Decision]

    def blocks_of(self, num_tokens: int) -> int:
        """Return the number of blocks of `num_tokens` tokens, over all groups that are stored chunk by chunk."""
        return sum(num_tokens // group.block_size for group in self.groups.full)

    def tail_tokens(self, num_prompt_tokens: int) -> int:
        """Tokens of a prompt's partial chunk: the whole blocks after its last full chunk."""
        rest = num_prompt_tokens % self.chunk_size
        return rest - rest % self.groups.block_size if self.partial_chunks and self.groups.full else 0

    def boundaries(self, num_prompt_tokens: int) -> list[int]:
        """Return the positions where the same prompt or a longer one can continue, ascending.

        At these positions the groups other than full attention are stored. Without partial chunks they are the ends of
        chunks. With a recurrent state none is known in advance; see `RequestTracker.states_offered`.
        """
        if not self.groups.boundary_groups or self.groups.has_states:
            return []
        found = {self.last_boundary(num_prompt_tokens), self.last_boundary(num_prompt_tokens + 1)}
        return sorted(found - {0})

    def last_boundary(self, num_prompt_tokens: int) -> int:
        """Return `KVGroups.last_boundary` of a prompt with the chunk size of this policy."""
        return self.groups.last_boundary(
            num_prompt_tokens, self.chunk_size, partial_chunks=self.partial_chunks
        )


class RequestView(Protocol):
    """The attributes of vLLM's request that change while it runs."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def skip_reading_prefix_cache(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Release:
    """Action: release the pins of a lookup."""

    lookup: Lookup
    answer: Answer | None


@dataclass(frozen=True, slots=True)
class Offer:
    """The number of external tokens that is offered to vLLM; `tokens` is None if vLLM has to ask again.

    `late` is set once, when the lookup has become late and is treated as a miss.
    """

    tokens: int | None
    is_async: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Refresh:
    """Action: send a new lookup before an offer if `ask` is set, and release the former lookup if it still holds pins.

    `repeated` is set if the former lookup is only repeated because of its age.
    """

    ask: bool
    release: Release | None = None
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """A request was admitted by vLLM's scheduler.

    Attributes:
        result: Outcome of the lookup (`hit`, `miss`, `late`, `unneeded`); None if none is counted.
        hit_by_tier: Tokens of the hit that vLLM does not have itself, by tier id.
        first: The request was not admitted before.
    """

    result: str | None
    plan: RequestPlan
    hit_by_tier: Mapping[str, int]
    first: bool


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """Action: load the tokens `local`..`hit`, both on block boundaries.

    If `answer` is None, the load cannot be planned and all of its blocks fail. A layer-wise load is part of the step
    that uses it.
    """

    local: int
    hit: int
    answer: Answer | None
    layerwise: bool


@dataclass(frozen=True, slots=True)
class StoreSpan:
    """Action: store the chunks `first`..`stop` (exclusive), with `num_tokens` tokens in whole blocks.

    Attributes:
        is_tail: The single chunk is the partial end of the prompt.
    """

    first: int
    stop: int
    is_tail: bool
    num_tokens: int


@dataclass(slots=True, eq=False)
class _LookupState:
    lookup: Lookup
    preemptions: int
    answered: AnsweredLookup | None = None
    released: bool = False
    timed_out: bool = False
    decision: Decision | None = None
    decision_local: int = -1

    @property
    def answer(self) -> Answer | None:
        """The answer; None if there is none yet, or the ranks did not answer in time."""
        return self.answered.answer if self.answered is not None and not self.answered.late else None

    def release(self) -> Release | None:
        """Release the pins, once."""
        if self.released:
            return None
        self.released = True
        return Release(self.lookup, self.answer)


@dataclass(slots=True)
class _StoreCursor:
    next_chunk: int = 0
    tail_pending: bool = False
    stored_skipped: bool = False  # chunks that the lookup found are not stored again
    first_chunks: dict[int, int] = field(default_factory=dict)  # by job, if the request is handed over
    lost_chunk: int | None = None  # first chunk that did not reach a shared tier
    boundaries: dict[int, int] = field(default_factory=dict)  # by job, if the request is handed over


class RequestTracker:
    """State machine of one request. Only its own methods assign its fields.

    Of vLLM's request only the attributes of `RequestView` are read.

    Attributes:
        stores: The request may still be stored.
        hands_over: Another vLLM instance continues the request.
        local_tokens: Leading tokens that vLLM found in its own prefix cache, in whole blocks.
        is_loading: vLLM waits for a load.
        load_failed: A load failed since the current lookup, or another connector's since the last preemption.
    """

    def __init__(
        self,
        request: RequestView,
        keys: RequestKeys,
        policy: RequestPolicy,
        *,
        may_load: bool = True,
        may_store: bool = True,
        hands_over: bool = False,
        promise: Promise | None = None,
    ) -> None:
        self.request_id = keys.request_id
        self.keys = keys
        self._request = request
        self._policy = policy
        self._may_load = may_load
        self.stores = may_store
        self.hands_over = may_store and hands_over
        self._promise = promise
        self._tail_tokens = policy.tail_tokens(keys.num_prompt_tokens)
        self._lookup: _LookupState | None = None
        # The lookup was repeated because of its age and not offered since. It is then not repeated again, however old it is.
        self._repeated = False
        self._promise_until: float | None = None  # on the monotonic clock, from the first lookup on
        self._keys_until: float | None = None
        self.local_tokens = 0
        self._layerwise = False
        self.is_loading = False
        self._load_lookup: _LookupState | None = None  # its pins are held until the load has ended
        self.load_failed = False
        self._gave_way = True  # at the last call of `gives_way`
        self._admitted_preemptions: int | None = None  # preemptions before the last admission
        self._in_step = False  # since the last admission
        self._ended = False
        self._cursor = _StoreCursor(tail_pending=self._tail_tokens > 0)
        self._boundaries = policy.boundaries(keys.num_prompt_tokens)  # not stored yet, ascending
        self._known_boundary = 0  # found by the lookup

    @property
    def looks_up(self) -> bool:
        return self._may_load and not self._request.skip_reading_prefix_cache

    @property
    def has_promise(self) -> bool:
        """Whether a producer has promised tokens for this request."""
        return self._promise is not None

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was generated."""
        return self._request.num_tokens

    def step_planned(self, scheduled_tokens: int) -> int:
        """Record a step with `scheduled_tokens` further tokens. Return the number of known tokens with KV after it."""
        self._in_step = True
        return min(self._request.num_computed_tokens + scheduled_tokens, self._request.num_tokens)

    @property
    def computed_tokens(self) -> int:
        """Known tokens with KV after the planned steps; 0 before the first step after an admission.

        vLLM counts the tokens of a load as computed from its start, also if another connector loads them.
        """
        return min(self._request.num_computed_tokens, self._request.num_tokens) if self._in_step else 0

    def block_table_held(self) -> Callable[[], bool]:
        """Return a function that returns whether the request has neither ended nor been preempted since this call.

        Until then vLLM frees none of its blocks in groups of full attention.
        """
        preemptions = self._request.num_preemptions
        return lambda: not self._ended and self._request.num_preemptions == preemptions

    @property
    def loaded_by_another(self) -> bool:
        """Whether another connector of a MultiConnector loads tokens in the first step after `local_found`."""
        return not self.is_loading and self._request.num_computed_tokens > self.local_tokens

    def shares(self, other: RequestTracker, start: int) -> bool:
        """Return whether the prefix that vLLM has for this request may include the block of `other` after `start` tokens."""
        stop = start + self._policy.groups.block_size
        return self.local_tokens > start and self.keys.source[start:stop] == other.keys.source[start:stop]

    def tokens_by_tier(self, num_tokens: int) -> Mapping[str, int]:
        """The tier of each of the `num_tokens` tokens after the local ones: numbers of tokens by tier id."""
        answer = self._lookup.answer if self._lookup is not None else None
        if answer is None:
            return {}
        first = self.local_tokens
        return answer.tokens_by_tier(first, first + num_tokens, self._policy.chunk_size)

    # Lookup

    def promise_to_wait_for(self, now: float) -> tuple[Promise | None, float]:
        """Return the promise, and the seconds that a lookup sent now may wait for it.

        The waiting time starts with the first lookup.
        """
        if self._promise is None:
            return None, 0.0
        if self._promise_until is None:
            self._promise_until = now + min(self._policy.wait_for_producer_s, self._promise.wait_s)
        return self._promise, max(0.0, self._promise_until - now)

    def lookup_sent(self, lookup: Lookup) -> None:
        self._lookup = _LookupState(lookup, self._request.num_preemptions)
        self.load_failed = self._cursor.stored_skipped = False

    def lookup_answered(self, answered: AnsweredLookup) -> None:
        """Record the answer of the current lookup. The answer of an earlier lookup has no effect."""
        state = self._lookup
        if state is not None and state.lookup.lookup_id == answered.lookup_id:
            state.answered = answered

    def local_found(self, local_tokens: int) -> None:
        """Record that vLLM found `local_tokens` leading tokens in its own prefix cache.

        vLLM looks for an admitted request again if it was preempted, or if a load failed, perhaps of another connector.
        After a failed load it still reserves the request's blocks, so that a second load might wait forever.
        """
        self.local_tokens = local_tokens
        if self._admitted_preemptions == self._request.num_preemptions:
            self.load_failed = True

    def gives_way(self) -> bool:
        """Return whether vLLM has to try the next requests first: every second time after a failed load.

        The blocks of a failed load are freed only when vLLM tries the request, and vLLM tries no request after one that does
        not fit. Without this, a request whose load has failed could wait forever for blocks of later requests.
        """
        self._gave_way = not self._gave_way
        return self.load_failed and self._gave_way

    @property
    def local_suffices(self) -> bool:
        """Whether vLLM has every token of the request that it can use from a cache."""
        unit = self._policy.groups.block_size
        return self.local_tokens >= (self.num_tokens - 1) // unit * unit

    def waits_for_keys(self, now: float, *, connected: bool) -> bool:
        """Return whether vLLM has to ask again, because the request is to be handed over and has no keys yet.

        If vLLM has nearly all of the prompt, the request ends within one step, and nothing can be promised without keys.
        """
        hashed = self.keys.failed or self.keys.num_hashed >= self.keys.num_prompt_tokens
        if not self.hands_over or hashed or not connected:
            return False
        if self._keys_until is None:
            self._keys_until = now + self._policy.lookup_timeout_s
        return now < self._keys_until

    def refresh_lookup(self, now: float, epoch: int, *, may_repeat: bool) -> Refresh:
        """Return whether the request needs a new lookup.

        It does if the last lookup is of another epoch, was sent before a preemption, or is too old. After a failed load it
        does only if the request was preempted.
        """
        state = self._lookup
        if state is None:
            return Refresh(ask=True)
        repeated = False
        if state.preemptions == self._request.num_preemptions:
            if self.load_failed:
                return Refresh(ask=False)
            if state.lookup.epoch == epoch:
                repeated = may_repeat and not self._repeated and self._is_old(state, now)
                if not repeated:
                    return Refresh(ask=False)
                self._repeated = True
        return Refresh(ask=True, release=state.release(), repeated=repeated)

    def offer(self, now: float, *, ready: bool) -> Offer:
        """Return the external tokens for vLLM, from the current lookup. There are none if the client is not ready."""
        state = self._lookup
        if state is None or self.load_failed or not ready:
            return Offer(0)
        answered = state.answered
        if answered is not None:
            self._repeated = False
        elif self._may_wait(state, now):
            return Offer(None)
        if answered is None or answered.late:
            late, state.timed_out = not state.timed_out, True
            return Offer(0, late=late)
        hit = self._tokens_worth_loading(state, answered)
        external = max(0, hit - self.local_tokens)
        # One token must be left to compute in the same step.
        fits = hit < self.num_tokens and external <= self._policy.layerwise_tokens
        self._layerwise = answered.answer.resident and fits
        return Offer(external, is_async=external > 0 and not self._layerwise)

    def _is_old(self, state: _LookupState, now: float) -> bool:
        if state.answered is None:
            return False
        hit = state.answered.answer.hit_tokens(self._policy.chunk_size)
        usable = state.lookup.num_tokens - bool(self._policy.groups.boundary_groups)  # see `boundaries`
        complete = hit > usable - self._policy.groups.block_size
        limit = self._policy.lookup_pin_ttl_s / 2 if complete else MISS_AGE_S
        # The answer of a slow lookup is used for some time too; otherwise the lookup would be repeated without end.
        used_for = now - state.answered.answered_at
        return now - state.answered.queried_at > limit and used_for > min(limit, MISS_AGE_S)

    def _may_wait(self, state: _LookupState, now: float) -> bool:
        lookup = state.lookup
        if lookup.promise is not None and lookup.wait_s and self.local_tokens >= lookup.promise.tokens:
            return False  # vLLM has the promised tokens itself
        return now - lookup.asked_at < self._policy.lookup_timeout_s + lookup.wait_s

    def _tokens_worth_loading(self, state: _LookupState, answered: AnsweredLookup) -> int:
        """Return the number of leading tokens worth loading. It is decided anew when the number of local tokens changes."""
        if state.decision is None or state.decision_local != self.local_tokens:
            answer = answered.answer
            hit = Hit(
                answer.costs,
                answer.hit_tokens(self._policy.chunk_size),
                self.local_tokens,
                self.num_tokens,
                divisible=answer.boundary is None,
            )
            state.decision = self._policy.decide(self.request_id, hit, promised=answered.promise_matches)
            state.decision_local = self.local_tokens
        return state.decision.tokens

    # Admission and loads

    def admitted(self, load_tokens: int) -> Admission:
        """Record that vLLM allocated blocks for the request, including those of `load_tokens` external tokens."""
        first, self._in_step = self._admitted_preemptions is None, False
        self._admitted_preemptions = self._request.num_preemptions
        state = self._lookup
        answer = state.answer if state is not None else None
        hit = answer.hit_tokens(self._policy.chunk_size) if answer is not None else 0
        self.add_shared_boundary(self.shared_tokens)
        decided, why = self._decision(state, load_tokens)
        plan = RequestPlan(
            request_id=self.request_id,
            prompt_tokens=self.num_tokens,
            local_tokens=self.local_tokens,
            hit_tokens=hit,
            load_tokens=load_tokens,
            decided=decided,
            why=why,
        )
        return Admission(
            self._result(state, hit),
            plan,
            self.tokens_by_tier(min(hit, self.num_tokens) - self.local_tokens),
            first,
        )

    def lookup_unused(self) -> Release | None:
        """Return the release of the lookup's pins if nothing is being loaded; None if there is nothing to release."""
        return self._lookup.release() if self._lookup is not None and not self.is_loading else None

    def load_started(self, load_tokens: int) -> LoadSpan:
        """Record that vLLM waits for `load_tokens` tokens after the local ones. Return the load.

        Raises:
            RuntimeError: These tokens were never offered.
        """
        state = self._lookup
        if state is None or state.answer is None:
            raise RuntimeError(f"{load_tokens} tokens of request {self.request_id} were never offered")
        self.is_loading, self._load_lookup = True, state
        hit = self.local_tokens + load_tokens
        return LoadSpan(self.local_tokens, hit, state.answer, self._layerwise)

    def load_impossible(self) -> LoadSpan | None:
        """Return a load that fails, because vLLM waits for a load that cannot be planned; None if one is running already."""
        if self.is_loading:
            return None
        self.is_loading, self._load_lookup = True, self._lookup
        return LoadSpan(self.local_tokens, self.local_tokens, None, self._layerwise)

    def load_tokens_failed(self, first_token: int) -> bool:
        """Record that tokens from `first_token` on were not loaded. vLLM computes them, and they are stored again.

        Return whether this is the first failure of the load.
        """
        first, self.load_failed = not self.load_failed, True
        self._cursor.next_chunk = min(self._cursor.next_chunk, first_token // self._policy.chunk_size)
        self._cursor.tail_pending = self._tail_tokens > 0
        self._boundaries = self._policy.boundaries(self.keys.num_prompt_tokens)
        self._known_boundary = 0
        return first

    def load_ended(self) -> Release | None:
        """Record the end of a load, on every rank or with the step of a layer-wise load. Return the release of its pins."""
        self.is_loading = False
        state, self._load_lookup = self._load_lookup, None
        return state.release() if state is not None else None

    def _result(self, state: _LookupState | None, hit_tokens: int) -> str | None:
        if state is None or state.released:
            return None
        if state.answer is None:
            return "late" if state.timed_out else "unneeded"
        return "hit" if min(hit_tokens, self.num_tokens) > self.local_tokens else "miss"

    def _decision(self, state: _LookupState | None, load_tokens: int) -> tuple[Decided, str]:
        if not self.looks_up:
            return "off", "nothing is looked up for this request"
        if self.local_suffices:
            if not self.local_tokens:
                return "miss", "the prompt is too short: a hit is at least one block"
            return "local", "vLLM has every cached token that it can use"
        if state is None or state.answer is None:
            return "late", "the lookup had no answer in time; see vllm.lookup_timeout_s"
        if state.decision is None:
            return "miss", NO_PREFIX
        if state.decision.tokens > self.local_tokens and not load_tokens:
            return "other", "another connector of the MultiConnector loads tokens of the prompt"
        return state.decision.decided, state.decision.why

    # Stores

    def skip_stored(self, epoch: int) -> None:
        """Exclude chunks that the lookup found from the stores.

        Chunks that are computed although a tier has them are stored, because they may reach a faster tier.
        """
        state, cursor = self._lookup, self._cursor
        if cursor.stored_skipped or state is None or state.answer is None or state.lookup.epoch != epoch:
            return
        cursor.stored_skipped = True
        if self.load_failed or self.hands_over:
            return  # a request that is handed over is stored in every tier that lacks it
        answer, size = state.answer, self._policy.chunk_size
        chunks = (
            answer.chunks if state.decision is None else min(answer.chunks, state.decision.tokens // size)
        )
        cursor.next_chunk = max(cursor.next_chunk, chunks)
        if answer.boundary is not None:
            self._known_boundary = answer.boundary
            self._boundaries = [each for each in self._boundaries if each != answer.boundary]
        ends_there = chunks == self.keys.num_prompt_tokens // size
        if ends_there and answer.partial_tokens >= self._tail_tokens:
            cursor.tail_pending = False

    def tokens_to_hash(self, computed_tokens: int) -> int:
        """Number of tokens whose keys are needed to store what is computed; 0 if there is nothing to store."""
        full, tail = self._due(computed_tokens)
        boundaries = self._due_boundaries(computed_tokens)
        if full <= self._cursor.next_chunk and not tail and not boundaries:
            return 0
        ends = self.keys.num_prompt_tokens if tail else 0
        return max(full * self._policy.chunk_size, ends, *boundaries)

    def plan_stores(self, computed_tokens: int, in_flight: Mapping[bytes, int], room: int) -> list[StoreSpan]:
        """Plan the stores of a step, of chunks whose keys are known.

        Args:
            in_flight: Chunks that other requests are storing, by their keys of the first rank: the job, or 0 if the tiers'
                answers to it are not reported. These chunks are skipped; if this request is handed over, only those of
                jobs whose answers are reported, because its promise depends on them.
            room: Number of blocks that may still be pinned. Chunks that do not fit wait for a later step.
        """
        full, tail = self._due(computed_tokens)
        full = min(full, self.keys.num_hashed // self._policy.chunk_size)
        return self._spans(full, tail and self.keys.tail is not None, in_flight, room)

    def plan_boundaries(self, computed_tokens: int) -> list[int]:
        """Boundaries that a step reaches, at which the groups other than full attention are stored.

        Each is planned once, because its blocks may not exist any more later.
        """
        due = self._due_boundaries(computed_tokens)
        self._boundaries = self._boundaries[len(due) :]
        return due

    @property
    def shared_tokens(self) -> int:
        """Number of leading tokens in chunks that another request has stored, if more than the usable hit; else 0."""
        answer = self._lookup.answer if self._lookup is not None else None
        if answer is None or not self._policy.groups.full:
            return 0
        size = self._policy.chunk_size
        shared = answer.chunks * size
        return shared if shared > max(answer.hit_tokens(size), self.local_tokens) else 0

    def states_offered(self, boundaries: Iterable[int]) -> None:
        """Record the numbers of tokens after which vLLM has the recurrent states, for the stores of this step only."""
        prompt, known = self.keys.num_prompt_tokens, self._known_boundary
        self._boundaries = sorted(
            boundary
            for boundary in boundaries
            if boundary % self._policy.groups.block_size == 0
            and boundary != known
            and (self._policy.generated_tokens or boundary <= prompt)
        )

    def add_shared_boundary(self, num_tokens: int) -> None:
        """Add a boundary at the last end of a chunk within `num_tokens` leading tokens, which other requests share."""
        boundary = num_tokens - num_tokens % self._policy.chunk_size
        groups = self._policy.groups
        if boundary and groups.boundary_groups and not (groups.has_states or boundary in self._boundaries):
            self._boundaries = sorted([*self._boundaries, boundary])

    def end(self) -> None:
        """Record that vLLM frees the blocks of the request that are not pinned."""
        self._ended = True

    def finished(self, computed_tokens: int, room: int) -> tuple[list[StoreSpan], int]:
        """Plan the remaining stores of a request that ends, also of chunks that have no keys yet.

        Return the stores, and the number of chunks that are dropped because they do not fit in `room`.
        """
        full, tail = self._due(computed_tokens)
        spans = self._spans(full, tail, {}, room)
        dropped = max(0, full - self._cursor.next_chunk) + (tail and self._cursor.tail_pending)
        return spans, dropped

    def store_started(self, job_id: int, span: StoreSpan) -> None:
        if self.hands_over:
            self._cursor.first_chunks[job_id] = span.first

    def boundary_started(self, job_id: int, boundary: int) -> None:
        if self.hands_over:
            self._cursor.boundaries[job_id] = boundary

    def store_not_shared(self, job_id: int) -> None:
        """Record that chunks of the store did not reach a tier that other processes read."""
        cursor = self._cursor
        cursor.boundaries.pop(job_id, None)
        first = cursor.first_chunks.get(job_id)
        if first is not None:
            cursor.lost_chunk = first if cursor.lost_chunk is None else min(first, cursor.lost_chunk)

    def promise(self, wait_s: float) -> Promise | None:
        """Return the promise for the vLLM instance that continues this request, after its last stores were planned.

        The stores end within `wait_s` seconds. None if nothing is handed over or the chunks have no keys.
        """
        if not (self.hands_over and self.stores):
            return None
        tokens = self._promised_tokens()
        digests = self.keys.digests(tokens, self._policy.chunk_size)
        return None if digests is None else Promise(self.request_id[:64], tokens, *digests, wait_s)

    def stop_storing(self) -> None:
        """Store nothing more of the request, because its KV may be wrong."""
        self.stores = False

    def cache_reset(self, keys: RequestKeys | None = None) -> None:
        """The cache was reset. KV computed before the reset is not stored.

        `keys` replaces the keys of the request if its namespace has changed.
        """
        if keys is not None:
            self.keys = keys
        if self.is_loading or self._request.num_computed_tokens:
            self.stores = False
        else:
            self._cursor = _StoreCursor(tail_pending=self._tail_tokens > 0)
            self._boundaries = self._policy.boundaries(self.keys.num_prompt_tokens)
            self._known_boundary = 0

    @property
    def _may_store_now(self) -> bool:
        keys = self.keys
        # vLLM does not invalidate its own prefix cache when it loads an adapter again. Without keys this is not known yet.
        stale = keys.adapter_changed or (keys.adapter is not None and not keys.opened)
        return self.stores and not self.is_loading and not keys.failed and not (stale and self.local_tokens)

    def _due_boundaries(self, computed_tokens: int) -> list[int]:
        if not self._may_store_now:
            return []
        return [boundary for boundary in self._boundaries if boundary <= computed_tokens]

    def _due(self, computed_tokens: int) -> tuple[int, bool]:
        """Number of full chunks that are computed, and whether the prompt's partial end is to be stored now."""
        if not self._may_store_now or not self._policy.groups.full:
            return 0, False
        prompt = self.keys.num_prompt_tokens
        limit = computed_tokens if self._policy.generated_tokens else min(computed_tokens, prompt)
        return limit // self._policy.chunk_size, self._cursor.tail_pending and computed_tokens >= prompt

    def _stored_by(self, chunk: int, in_flight: Mapping[bytes, int]) -> int | None:
        """The job that stores a chunk for this request too; None if the request has to store it itself."""
        job = in_flight.get(self.keys.key(0, chunk)) if in_flight else None
        return job if job or not self.hands_over else None

    def _spans(self, full: int, tail: bool, in_flight: Mapping[bytes, int], room: int) -> list[StoreSpan]:
        cursor, size = self._cursor, self._policy.chunk_size
        blocks_per_chunk = self._policy.blocks_of(size)
        spans: list[StoreSpan] = []
        while cursor.next_chunk < full:
            first = cursor.next_chunk
            if (job := self._stored_by(first, in_flight)) is not None:
                if self.hands_over:
                    cursor.first_chunks.setdefault(job, first)
                cursor.next_chunk += 1
                continue
            stop = min(full, first + min(MAX_JOB_CHUNKS, max(0, room // blocks_per_chunk)))
            if in_flight:
                stop = next(
                    (c for c in range(first, stop) if self._stored_by(c, in_flight) is not None), stop
                )
            if stop == first:
                return spans  # no room; a later step tries again
            spans.append(StoreSpan(first, stop, is_tail=False, num_tokens=(stop - first) * size))
            room -= (stop - first) * blocks_per_chunk
            cursor.next_chunk = stop
        last = self.keys.num_prompt_tokens // size
        if tail and cursor.next_chunk >= last and room >= self._policy.blocks_of(self._tail_tokens):
            spans.append(StoreSpan(last, last + 1, is_tail=True, num_tokens=self._tail_tokens))
            cursor.tail_pending = False
        return spans

    def _promised_tokens(self) -> int:
        """Return the number of leading prompt tokens, stored or being stored, after which a consumer can continue."""
        tokens = self._tokens_in_chunks()
        if not self._policy.groups.boundary_groups:
            return tokens
        end = min(tokens, self._policy.last_boundary(self.keys.num_prompt_tokens))
        return tokens if end in self._cursor.boundaries.values() else 0

    def _tokens_in_chunks(self) -> int:
        size, cursor = self._policy.chunk_size, self._cursor
        last = self.keys.num_prompt_tokens // size
        full = min(cursor.next_chunk, last)
        if cursor.lost_chunk is not None and cursor.lost_chunk <= full:
            return cursor.lost_chunk * size
        return full * size + (self._tail_tokens if full == last and not cursor.tail_pending else 0)
