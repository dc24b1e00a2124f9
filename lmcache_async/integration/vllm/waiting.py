"""What a producer has promised is asked for again until it is there. Runs in the lookup client's loop."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmcache_async.integration.vllm.query import ends_there, query
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_async.integration.vllm.chains import RequestChain
    from lmcache_async.integration.vllm.handover import Promise
    from lmcache_async.integration.vllm.link import Link
    from lmcache_async.integration.vllm.lookups import Answer, Lookup
    from lmcache_async.types import Chunk

logger = LimitedLogger(logging.getLogger(__name__))

FIRST_PAUSE_S = 0.002
LAST_PAUSE_S = 0.064
SPACING_S = 0.001
"""All requests that wait ask no more often than this together: a producer that died leaves many of them."""


@dataclass(slots=True)
class WaitCounts:
    """Since the start.

    Attributes:
        promises: Requests that came with a promise that was believed.
        doubted: With one that cannot be of the request.
        kept: Promises that were found kept, at once or after a while.
        late: Promises that were not kept in time; what there was is loaded, and the rest computed.
        asks: Questions for the last promised chunk alone.
    """

    promises: int = 0
    doubted: int = 0
    kept: int = 0
    late: int = 0
    asks: int = 0


def pause_s(asks: int, waiting: int) -> float:
    """Seconds before the next question of one request.

    Args:
        asks: Questions of this request so far.
        waiting: Requests that wait.
    """
    return max(min(FIRST_PAUSE_S * 2.0 ** min(asks, 16), LAST_PAUSE_S), waiting * SPACING_S)


class Waiting:
    """Answers lookups; those with a promise when it is kept, or when its time is over.

    Args:
        timeout_s: Of one question.
        clock: Seconds, monotonic.
    """

    def __init__(self, links: Sequence[Link], *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._links = links
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting = 0
        self.counts = WaitCounts()

    async def answer(self, chain: RequestChain, lookup: Lookup, ends: Sequence[Sequence[Chunk]]) -> Answer:
        """What is there, after a wait of at most `lookup.wait_s` and two questions.

        Raises:
            TimeoutError: The first question has no answer.
            ValueError: A rank's answer makes no sense.
        """
        async with asyncio.timeout(self._timeout_s):
            answer = await query(self._links, chain, lookup, ends)
        promise = lookup.promise
        if promise is None:
            return answer
        size = chain.identity.chunk_size
        if doubt := promise.doubt(chain, size):
            self.counts.doubted += 1
            logger.report("doubt", "request %s: a promise is not believed: %s", chain.request_id, doubt)
            return answer
        lookup.believed = True
        if not lookup.wait_s:
            return answer  # its time was over before this lookup
        self.counts.promises += 1
        self._waiting += 1
        try:
            answer = await self._until_kept(chain, lookup, ends, promise, answer)
        finally:
            self._waiting -= 1
        if answer.hit_tokens(size) >= promise.tokens:
            self.counts.kept += 1
        elif not lookup.abandoned:  # the request is still there
            self._too_late(chain, lookup, promise, answer.hit_tokens(size))
        return answer

    async def _until_kept(
        self,
        chain: RequestChain,
        lookup: Lookup,
        ends: Sequence[Sequence[Chunk]],
        promise: Promise,
        answer: Answer,
    ) -> Answer:
        """Ask for the last promised chunk alone, and when it is there for all of them."""
        size = chain.identity.chunk_size
        last = chain.keys_at(promise.tokens, size)
        deadline = lookup.asked_at + lookup.wait_s
        asks = 0
        while answer.hit_tokens(size) < promise.tokens and (left := deadline - self._clock()) > 0:
            await asyncio.sleep(min(left, pause_s(asks, self._waiting)))
            asks += 1
            if lookup.abandoned:
                break
            if await self._is_there(lookup, last, deadline) or self._clock() >= deadline:
                answer = await self._again(chain, lookup, ends, answer)
        return answer

    async def _is_there(self, lookup: Lookup, last: Sequence[bytes], deadline: float) -> bool:
        left = deadline - self._clock()
        if left <= 0:
            return False
        self.counts.asks += 1
        try:
            async with asyncio.timeout(min(self._timeout_s, left)):
                return await ends_there(self._links, lookup.lookup_id, last)
        except TimeoutError:
            return False

    async def _again(
        self, chain: RequestChain, lookup: Lookup, ends: Sequence[Sequence[Chunk]], former: Answer
    ) -> Answer:
        lookup.answered_at = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await query(self._links, chain, lookup, ends)
        except TimeoutError:
            # Of what the former answer pinned nothing may be left, and the late one may yet pin.
            return replace(former, pinned=True, resident=False)

    def _too_late(self, chain: RequestChain, lookup: Lookup, promise: Promise, tokens: int) -> None:
        self.counts.late += 1
        logger.report(
            "late",
            "request %s: of %d tokens promised by %r, %d are there after %.3f s; the others are computed",
            chain.request_id,
            promise.tokens,
            promise.request_id,
            tokens,
            self._clock() - lookup.asked_at,
        )
