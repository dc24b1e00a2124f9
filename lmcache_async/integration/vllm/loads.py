"""Loads on their way: what is to be read into which blocks, and which of them failed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.integration.vllm.metadata import SKIP, Job, pack_blocks
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_async.integration.vllm.chains import RequestChain
    from lmcache_async.integration.vllm.lookup_client import LookupClient
    from lmcache_async.integration.vllm.lookups import Answer, Lookup
    from lmcache_async.integration.vllm.requests import RequestState

logger = LimitedLogger(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """Tokens local..hit of a request are to be loaded, all in whole blocks."""

    local: int
    hit: int
    chunk_size: int
    block_size: int


@dataclass(frozen=True, slots=True)
class ActiveLoad:
    """A load that has not been reported as ended by every rank."""

    state: RequestState
    lookup: Lookup | None
    job: Job

    def first_bad_token(self, bad_blocks: set[int], block_size: int) -> int | None:
        """Position of the first token whose block is among the bad ones."""
        for index, block in enumerate(self.job.rows().tolist()):
            if block in bad_blocks:
                return self.job.start + index * block_size
        return None


@dataclass(slots=True)
class LoadCounts:
    """Since the start: loads planned, and those of them that failed in part or whole."""

    loads: int = 0
    failed_loads: int = 0


class Loads:
    """All loads on their way. The scheduler's thread only.

    A load that vLLM has asked for ends with the word of every rank. A layer-wise one ends with the step
    that it belongs to: until then its blocks are in vLLM's prefix cache and may hold nothing yet.

    Args:
        blocks_of: Gives a request's block ids, from its first token on.
        evict: Takes blocks out of vLLM's prefix cache.
        on_ended: Told of each load that has ended, by its request, and whether it failed.
    """

    def __init__(
        self,
        client: LookupClient,
        *,
        chunk_size: int,
        block_size: int,
        blocks_of: Callable[[str], Sequence[int]],
        evict: Callable[[set[int]], None],
        on_ended: Callable[[str, bool], None] = lambda name, failed: None,
    ) -> None:
        self._client = client
        self._chunk_size = chunk_size
        self._block_size = block_size
        self._blocks_of = blocks_of
        self._evict = evict
        self._on_ended = on_ended
        self._new: list[Job] = []
        self._active: dict[str, ActiveLoad] = {}
        self._layerwise: dict[str, int] = {}  # the first token that vLLM did not have, by request
        self.counts = LoadCounts()

    def __bool__(self) -> bool:
        return bool(self._active)

    def start(self, state: RequestState, job: Job) -> None:
        self._new.append(job)
        self._active[job.request_id] = ActiveLoad(state, state.lookup, job)
        state.loading = True
        self.counts.loads += 1
        if job.layerwise:
            self._layerwise[job.request_id] = state.local_tokens

    def take(self) -> tuple[Job, ...]:
        """Those planned since the last call."""
        loads, self._new = tuple(self._new), []
        return loads

    def may_be_empty(self, tokens: int) -> bool:
        """Whether some of so many leading tokens that vLLM has itself may be in blocks not filled yet."""
        return any(first < tokens for first in self._layerwise.values())

    def ended(self, request_id: str) -> None:
        load = self._active.pop(request_id, None)
        if load is None:
            return
        load.state.loading = False
        if load.lookup is not None:
            self._client.release(load.lookup)
        self._layerwise.pop(request_id, None)
        self._on_ended(request_id, load.state.load_failed)

    def step_ended(self) -> None:
        """The step's failures have been noted: what else it was to load is there."""
        for request_id in list(self._layerwise):
            self.ended(request_id)

    def failed(self, bad_blocks: set[int]) -> None:
        """Blocks that were to be loaded were not."""
        for load in self._active.values():
            bad_token = load.first_bad_token(bad_blocks, self._block_size)
            if bad_token is None:
                continue
            state = load.state
            self.counts.failed_loads += not state.load_failed
            state.load_failed = True
            # vLLM computes it again from here on, and then it is stored again.
            state.next_chunk = min(state.next_chunk, bad_token // self._chunk_size)
            state.tail_pending = state.tail_tokens > 0
            if load.job.layerwise:
                # vLLM leaves them there; others could find them before they are computed.
                mine = self._blocks_of(load.job.request_id)[bad_token // self._block_size :]
                self._evict({*mine, *(bad_blocks & set(load.job.touched_blocks()))})
            logger.report(
                "load",
                "a load of request %s failed; its tokens from %d on are computed",
                state.chain.request_id,
                bad_token,
            )


def load_job(
    job_id: int,
    epoch: int,
    chain: RequestChain,
    answer: Answer,
    span: LoadSpan,
    blocks: Sequence[Any],
    *,
    layerwise: bool = False,
) -> Job:
    """The chunks that overlap the span. Blocks outside it, which vLLM has itself, are skipped.

    Args:
        blocks: All of the request's, from its first token on, as vLLM has them.
    """
    size = span.chunk_size
    first = span.local // size
    stop = min(answer.chunks, -(-span.hit // size))
    keys, texts = chain.packed_keys(first, stop), chain.texts_of(first, stop)
    end = stop * size
    if span.hit > end and answer.partial_tokens:
        keys = tuple(full + partial for full, partial in zip(keys, answer.partial_keys, strict=True))
        if answer.partial_text:
            texts[stop - first] = answer.partial_text
        end += answer.partial_tokens
    start = first * size
    first_block, last_block = span.local // span.block_size, span.hit // span.block_size
    rows = [SKIP] * (first_block - start // span.block_size)
    rows += [block.block_id for block in blocks[first_block:last_block]]
    rows += [SKIP] * (end // span.block_size - last_block)
    return Job(
        job_id=job_id,
        request_id=chain.request_id,
        request_namespace=chain.request_namespace,
        epoch=epoch,
        start=start,
        tokens=chain.packed_tokens(start, end),
        keys=keys,
        texts=tuple(texts.items()),
        block_ids=pack_blocks(rows),
        layerwise=layerwise,
        parents=chain.packed_keys(first - 1, first) if first else (),
        told_as=chain.told_as,
    )


def lost_job(
    job_id: int, epoch: int, request_id: str, block_ids: Sequence[int], *, layerwise: bool = False
) -> Job:
    """A load that could not be planned: it has no chunks, and all of its blocks will be reported as failed."""
    return Job(job_id, request_id, "", epoch, 0, b"", (), (), pack_blocks(block_ids), layerwise)
