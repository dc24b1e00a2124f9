"""Loads on their way: what is to be read into which blocks, and which of them failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.integration.vllm.metadata import SKIP, Job, pack_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.integration.vllm.chains import RequestChain
    from lmcache_async.integration.vllm.lookups import Answer, Lookup
    from lmcache_async.integration.vllm.requests import RequestState


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


def load_job(
    job_id: int, epoch: int, chain: RequestChain, answer: Answer, span: LoadSpan, blocks: Sequence[Any]
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
    )


def lost_job(job_id: int, epoch: int, request_id: str, block_ids: Sequence[int]) -> Job:
    """A load that could not be planned: it has no chunks, and all of its blocks will be reported as failed."""
    return Job(job_id, request_id, "", epoch, 0, b"", (), (), pack_blocks(block_ids))
