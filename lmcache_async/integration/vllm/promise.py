"""Disaggregated prefill: what a producer tells a consumer about the stored KV of a request."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_async.integration.vllm.keys import RequestKeys

logger = LimitedLogger(logging.getLogger(__name__))

FIELD = "lmcache_async"
"""Our key in vLLM's `kv_transfer_params`, in the producer's answer and in the consumer's request."""

_VERSION = 1
_MAX_TOKENS = 1 << 31
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Promise:
    """Leading tokens of a request that a shared tier has, or will have shortly.

    A promise travels through clients and proxies. It contains no secret, and the receiver checks every field.

    Attributes:
        request_id: The producer's id of the request, for log lines.
        tokens: Number of promised tokens.
        namespace: Digest that distinguishes models, adapters and tenants.
        end: Digest that distinguishes prompts.
        wait_s: Seconds after which tokens that are not stored will not be stored.
    """

    request_id: str
    tokens: int
    namespace: str
    end: str
    wait_s: float

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Promise | None:
        """The promise in `kv_transfer_params`; None if there is none, or if it is malformed."""
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
                and _DIGEST.fullmatch(namespace)
                and _DIGEST.fullmatch(end)
                and 0 <= wait_s < math.inf
            ):
                return cls(request_id[:64], tokens, namespace, end, float(wait_s))
        logger.report("no promise", "kv_transfer_params: the value of %s is malformed; it is ignored", FIELD)
        return None

    def params(self) -> dict[str, Any]:
        """The promise as `kv_transfer_params`."""
        return {FIELD: {"version": _VERSION, **asdict(self)}}

    def doubt(self, keys: RequestKeys, chunk_size: int) -> str:
        """Why the promise cannot be of the request with these keys, which are hashed; "" if it can."""
        if self.tokens > keys.num_prompt_tokens:
            return f"it is of {self.tokens} tokens, and the prompt has {keys.num_prompt_tokens}"
        digests = keys.digests(self.tokens, chunk_size)
        if digests is None:
            return f"no chunk ends at {self.tokens} tokens here"
        if digests[0] != self.namespace:
            return "it is of another model, configuration, adapter or tenant"
        return "" if digests[1] == self.end else "it is of another prompt"
