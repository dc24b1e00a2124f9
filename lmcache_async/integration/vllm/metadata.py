"""What travels between the two halves of the connector, in vLLM's own messages."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_async.types import KEY_BYTES, BlockIds, Chunk, ChunkKey, RequestPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lmcache_async.integration.vllm.notices import Notice

SKIP = -1
"""A block that is neither read nor written."""


def pack_blocks(block_ids: Sequence[int]) -> bytes:
    """Block ids as int64. Thousands come here at a time, and `struct` is the fastest way from a list."""
    return struct.pack(f"{len(block_ids)}q", *block_ids)


@dataclass(frozen=True, slots=True)
class Job:
    """Consecutive chunks of one request to be loaded or stored; the last one may be partial.

    Attributes:
        job_id: Unique in the scheduler's process.
        epoch: How often the cache had been reset when the job was made.
        start: Position of the first token; a multiple of the chunk size.
        tokens: Token ids, int32 in the machine's order.
        keys: For each rank the chunks' keys, 16 bytes each.
        texts: Extra text of those chunks that have one, by index in the job.
        block_ids: Block ids, int64; SKIP for a block that is not to be touched.
        layerwise: A load that the forward of the same step waits for, layer by layer.
        hand_over: A store that another vLLM is told of: what the tiers answer is reported.
        parents: For each rank the key of the chunk before the first one; empty where that is a prompt's first.
        told_as: In KV events the adapter's name, empty without one; None if nobody is to be told.
    """

    job_id: int
    request_id: str
    request_namespace: str
    epoch: int
    start: int
    tokens: bytes
    keys: tuple[bytes, ...]
    texts: tuple[tuple[int, str], ...]
    block_ids: bytes
    layerwise: bool = False
    hand_over: bool = False
    parents: tuple[bytes, ...] = ()
    told_as: str | None = None

    @property
    def num_chunks(self) -> int:
        return len(self.keys[0]) // KEY_BYTES if self.keys else 0

    def rows(self) -> BlockIds:
        return np.frombuffer(self.block_ids, np.int64)

    def touched_blocks(self) -> list[int]:
        return [block for block in self.rows().tolist() if block != SKIP]

    def chunks(self, rank: int, chunk_size: int, block_size: int) -> Iterator[tuple[Chunk, BlockIds]]:
        """Each chunk of this rank with the blocks that hold it."""
        tokens, rows, keys = np.frombuffer(self.tokens, np.int32), self.rows(), self.keys[rank]
        texts = dict(self.texts)
        for index, at in enumerate(range(0, len(tokens), chunk_size)):
            ids = tokens[at : at + chunk_size]
            key = ChunkKey(keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])
            chunk = Chunk(key, self.start + at, ids, texts.get(index, ""))
            yield chunk, rows[at // block_size : (at + len(ids)) // block_size]


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler half to every worker half, once a step.

    Attributes:
        plans: Of requests admitted by the step, where somebody may look at them.
    """

    loads: tuple[Job, ...] = ()
    stores: tuple[Job, ...] = ()
    plans: tuple[RequestPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the worker halves to the scheduler half: what became of stores, by job.

    A step's reports of all ranks are added up by vLLM; the scheduler half adds over the steps.

    Attributes:
        copied: How many ranks no longer read the store's blocks.
        unshared: Of stores to be handed over that tiers have answered, how many chunks did not come as far
            as a tier that other processes read.
        notices: Of the first rank: which tier has got or given up which chunk.
    """

    copied: Mapping[int, int]
    unshared: Mapping[int, int] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        return WorkerReport(
            _added(self.copied, other.copied),
            _added(self.unshared, other.unshared),
            self.notices + other.notices,
        )


def _added(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    return {job: one.get(job, 0) + other.get(job, 0) for job in {**one, **other}}
