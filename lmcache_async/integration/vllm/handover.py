"""Prefill here, decode there: what a producer tells of a request's KV, and when it is true."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lmcache_async.integration.vllm.chains import RequestChain
    from lmcache_async.integration.vllm.requests import RequestState
    from lmcache_async.integration.vllm.stores import StorePolicy

logger = LimitedLogger(logging.getLogger(__name__))

FIELD = "lmcache_async"
"""Our place in vLLM's `kv_transfer_params`, in the producer's answer and in the consumer's request."""

_VERSION = 1
_MAX_TOKENS = 1 << 31
_MARK = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Promise:
    """Leading tokens of a request that a shared tier has, or will have shortly.

    It goes through clients and proxies: it holds nothing secret, and who reads it believes nothing that
    it cannot check.

    Attributes:
        request_id: The producer's name of the request, for log lines.
        tokens: So many.
        namespace: Tells models, adapters and tenants apart.
        end: Tells the tokens apart.
        wait_s: What is not there after so long will not come.
    """

    request_id: str
    tokens: int
    namespace: str
    end: str
    wait_s: float

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Promise | None:
        """What `kv_transfer_params` hold; None if there is none, or nothing that makes sense to us."""
        match params.get(FIELD):
            case None:
                return None
            case {
                "version": 1,
                "request_id": str(request_id),
                "tokens": int(tokens),
                "namespace": str(namespace),
                "end": str(end),
                "wait_s": int() | float() as wait_s,
            } if (
                0 < tokens < _MAX_TOKENS
                and _MARK.fullmatch(namespace)
                and _MARK.fullmatch(end)
                and 0 <= wait_s < math.inf
            ):
                return cls(request_id[:64], tokens, namespace, end, float(wait_s))
        logger.report("no promise", "kv_transfer_params: what %s holds is no promise of ours", FIELD)
        return None

    def params(self) -> dict[str, Any]:
        """The same, for `kv_transfer_params`."""
        return {FIELD: {"version": _VERSION, **asdict(self)}}

    def doubt(self, chain: RequestChain, chunk_size: int) -> str:
        """Why this cannot be of the request with that chain, which is hashed; "" if it can."""
        if self.tokens > chain.num_prompt_tokens:
            return f"it is of {self.tokens} tokens, and the prompt has {chain.num_prompt_tokens}"
        marks = chain.marks(self.tokens, chunk_size)
        if marks is None:
            return f"no chunk ends at {self.tokens} tokens here"
        if marks[0] != self.namespace:
            return "it is of another model, configuration, adapter or tenant"
        return "" if marks[1] == self.end else "it is of another prompt"


class Handover:
    """The producer's side. The scheduler's thread only.

    Args:
        wait_s: After so long a store has come to its end.
    """

    def __init__(self, policy: StorePolicy, *, wait_s: float) -> None:
        self._policy = policy
        self._wait_s = wait_s
        self._reaches = True  # until a store says otherwise: so the first consumers wait in vain at worst

    def written(self, unshared: Mapping[int, int], states: Callable[[], Iterable[RequestState]]) -> None:
        """What tiers have answered to stores: by job, how many chunks no shared tier has taken."""
        for job_id, chunks in unshared.items():
            self._reaches = not chunks
            if not chunks:
                continue
            logger.report(
                "unshared",
                "%d chunks of a store did not reach a tier that other processes read:"
                " until one does, consumers are not told to wait",
                chunks,
            )
            for state in states():
                first = state.first_chunks.get(job_id)
                if first is not None:
                    state.lost_chunk = first if state.lost_chunk is None else min(first, state.lost_chunk)

    def promise(self, state: RequestState) -> Promise | None:
        """What can be told of a request that ends now, its last stores planned."""
        if not (state.hands_over and state.may_store and self._reaches):
            return None
        tokens = self._tokens(state)
        marks = state.chain.marks(tokens, self._policy.chunk_size)
        if marks is None:
            return None
        return Promise(state.chain.request_id[:64], tokens, *marks, self._wait_s)

    def _tokens(self, state: RequestState) -> int:
        """Leading tokens of the prompt that are stored or on their way."""
        size, lost = self._policy.chunk_size, state.lost_chunk
        last = state.chain.num_prompt_tokens // size
        full = min(state.next_chunk, last)
        if lost is not None and lost <= full:
            return min(lost, full) * size
        return full * size + (state.tail_tokens if full == last and not state.tail_pending else 0)
