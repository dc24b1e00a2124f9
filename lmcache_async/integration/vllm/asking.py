"""When a request is looked up, when it is again, and how long vLLM is told to wait for the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_async.config import EngineConfig
    from lmcache_async.integration.vllm.lookup_client import LookupClient
    from lmcache_async.integration.vllm.lookups import Lookup
    from lmcache_async.integration.vllm.requests import RequestState

_MISS_AGE_S = 2.0
"""After so long a request that was not a full hit asks again: another one may have stored its prefix."""

_MAX_REPEATS = 8


class Asking:
    """The requests' lookups. The scheduler's thread only.

    Attributes:
        timeouts: Requests whose lookup was late, since the start.
    """

    def __init__(self, client: LookupClient, config: EngineConfig, block_size: int) -> None:
        self._client = client
        self._config = config
        self._block_size = block_size
        self._repeats_left = _MAX_REPEATS
        self.timeouts = 0

    def new_step(self) -> None:
        self._repeats_left = _MAX_REPEATS

    def ask(self, state: RequestState) -> Lookup:
        """Look the request up. What a producer promised is waited for once, from the first time on."""
        request, now = state.request, self._client.now()
        wait_s = 0.0
        if state.promise is not None:
            if state.wait_until is None:
                state.wait_until = now + min(self._config.vllm.wait_for_producer_s, state.promise.wait_s)
            wait_s = max(0.0, state.wait_until - now)
        state.lookup = self._client.ask(
            state.chain, request.num_tokens, request.num_preemptions, state.promise, wait_s
        )
        return state.lookup

    def current(self, state: RequestState) -> Lookup:
        """The last lookup, or a new one where that is spent, outdated or of another incarnation."""
        lookup = state.lookup
        if lookup is not None:
            same = lookup.preemptions == state.request.num_preemptions
            if same and (state.load_failed or not (lookup.released or self._to_repeat(lookup))):
                return lookup
            self._client.release(lookup)
        state.load_failed = state.adopted = False
        return self.ask(state)

    def waits_for_keys(self, state: RequestState) -> bool:
        """Whether vLLM is to ask again because a request to be handed over has no keys yet.

        One that vLLM has nearly all of itself ends within a step, and without keys nothing can be told of it.
        """
        chain = state.chain
        hashed = chain.failed or chain.num_hashed >= chain.num_prompt_tokens
        if not state.hands_over or hashed or not self._client.connected:
            return False
        now = self._client.now()
        if state.keys_until is None:
            state.keys_until = now + self._config.vllm.lookup_timeout_s
        return now < state.keys_until

    def may_wait(self, state: RequestState, lookup: Lookup) -> bool:
        """Whether vLLM is to ask again, the answer not being there; if not, it counts as late."""
        promise = lookup.promise
        if promise is not None and lookup.wait_s and state.local_tokens >= promise.tokens:
            return False  # vLLM has itself what the others would wait for
        waited_s = self._client.now() - lookup.asked_at
        if waited_s < self._config.vllm.lookup_timeout_s + lookup.wait_s:
            return True
        self.timeouts += not lookup.timed_out
        lookup.timed_out = True
        return False

    def _to_repeat(self, lookup: Lookup) -> bool:
        """Whether its answer is too old. A step repeats a few only: a long queue ages all at once."""
        if lookup.epoch != self._client.epoch:
            return True
        if lookup.answer is None or not self._repeats_left:
            return False
        age = self._client.now() - max(lookup.asked_at, lookup.answered_at)
        hit = lookup.answer.hit_tokens(self._config.chunk_size)
        complete = hit > lookup.num_tokens - self._block_size
        if age <= (self._config.vllm.lookup_pin_ttl_s / 2 if complete else _MISS_AGE_S):
            return False
        self._repeats_left -= 1
        return True
