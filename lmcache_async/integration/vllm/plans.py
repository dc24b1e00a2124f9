"""Where each request's prompt comes from, told to the workers for who looks at them. The scheduler's thread only."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from lmcache_async.integration.vllm.decide import MISS
from lmcache_async.types import RequestPlan

if TYPE_CHECKING:
    from lmcache_async.integration.vllm.requests import RequestState
    from lmcache_async.types import Decided

MAX_PLANS = 256
"""Of one step; no page shows more."""


class Plans:
    """Notes each request once, at its first admission.

    Args:
        wanted: Somebody may look; else nothing is noted.
    """

    def __init__(self, block_size: int, chunk_size: int, *, wanted: bool) -> None:
        self._block_size = block_size
        self._chunk_size = chunk_size
        self._wanted = wanted
        self._new: deque[RequestPlan] = deque(maxlen=MAX_PLANS)

    def note(self, state: RequestState, load_tokens: int) -> None:
        """The request is admitted, and so many tokens are loaded."""
        if not self._wanted or state.told:
            return
        state.told = True
        request = state.request
        answer = state.lookup.answer if state.lookup is not None else None
        decided, why = self._decided(state)
        plan = RequestPlan(
            request_id=request.request_id,
            prompt_tokens=request.num_tokens,
            local_tokens=state.local_tokens,
            hit_tokens=answer.hit_tokens(self._chunk_size) if answer is not None else 0,
            load_tokens=load_tokens,
            decided=decided,
            why=why,
        )
        self._new.append(plan)

    def take(self) -> tuple[RequestPlan, ...]:
        """Those noted since the last call."""
        plans = tuple(self._new)
        self._new.clear()
        return plans

    def _decided(self, state: RequestState) -> tuple[Decided, str]:
        request, lookup = state.request, state.lookup
        if not state.may_load or request.skip_reading_prefix_cache:
            return "off", "nothing is looked up for this request"
        if state.local_tokens >= (request.num_tokens - 1) // self._block_size * self._block_size:
            return "local", "vLLM has all of it that it can use"
        if lookup is None or lookup.answer is None:
            return "late", "the lookup had no answer in time; see vllm.lookup_timeout_s"
        if lookup.verdict is None:
            return "miss", MISS
        return lookup.verdict.decided, lookup.verdict.why
