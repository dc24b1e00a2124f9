"""Messages between the scheduler connector and the worker connectors, sent in vLLM's own step messages."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_async.integration.vllm.events import ChunkEvent, MemoryChange
from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.keys import RequestKeys, Tail
from lmcache_async.integration.vllm.lookup_server import LookupServer, TCPAddress
from lmcache_async.integration.vllm.request import LoadSpan
from lmcache_async.types import KEY_BYTES, BlockIds, Chunk, ChunkKey, RequestPlan

SKIP = -1
"""A block that is neither read nor written."""


def pack_blocks(block_ids: Sequence[int]) -> bytes:
    """Block ids as int64. For thousands of ids `struct` is the fastest conversion of a list."""
    return struct.pack(f"{len(block_ids)}q", *block_ids)


@dataclass(frozen=True, slots=True)
class JobPart:
    """Consecutive chunks of one KV group that a job reads or writes. The last one may be partial.

    Attributes:
        group: Index of the KV group.
        start: Position of the first token; a multiple of the chunk size for full attention, else of the block size.
        tokens: Token ids, int32 in native byte order.
        keys: Per rank (or shard of its KV heads), the keys of the chunks, 16 bytes each; empty if no chunk can
            be loaded, so that all blocks fail.
        texts: Extra text of the chunks that have one, by index in the part.
        block_ids: Block ids, int64; SKIP for a block that is not touched.
        parents: Per rank, the key of the chunk before the first one; empty if there is none, and for groups other than
            the leading one.
    """

    group: int
    start: int
    tokens: bytes
    keys: tuple[bytes, ...]
    texts: tuple[tuple[int, str], ...]
    block_ids: bytes
    parents: tuple[bytes, ...] = ()

    @property
    def num_chunks(self) -> int:
        return len(self.keys[0]) // KEY_BYTES if self.keys else 0

    def rows(self) -> BlockIds:
        return np.frombuffer(self.block_ids, np.int64)

    def touched_blocks(self) -> list[int]:
        return [block for block in self.rows().tolist() if block != SKIP]

    def chunks(self, rank: int, chunk_size: int, block_size: int) -> Iterator[tuple[Chunk, BlockIds]]:
        """Each chunk of this rank with its block ids."""
        tokens, rows, keys = np.frombuffer(self.tokens, np.int32), self.rows(), self.keys[rank]
        texts = dict(self.texts)
        for index, at in enumerate(range(0, len(tokens), chunk_size)):
            ids = tokens[at : at + chunk_size]
            key = ChunkKey(keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])
            chunk = Chunk(key, self.start + at, ids, texts.get(index, ""))
            yield chunk, rows[at // block_size : (at + len(ids)) // block_size]


@dataclass(frozen=True, slots=True)
class Job:
    """Chunks of one request to be loaded or stored, with a part for each KV group.

    Attributes:
        job_id: Unique in the scheduler's process.
        epoch: Number of cache resets before the job was created.
        layerwise: Whether the forward pass of the same step awaits this load, layer by layer.
        awaited: Whether the worker awaits this load before the end of the step, because the step computes nothing.
        hand_over: Whether this store is promised to another vLLM instance, so that the tiers' answers are reported.
        event_lora_name: The adapter's name in KV events, "" without one; None if no event is published.
    """

    job_id: int
    request_id: str
    request_namespace: str
    epoch: int
    parts: tuple[JobPart, ...]
    layerwise: bool = False
    awaited: bool = False
    hand_over: bool = False
    event_lora_name: str | None = None

    @property
    def num_chunks(self) -> int:
        return sum(part.num_chunks for part in self.parts)

    def touched_blocks(self) -> list[int]:
        return [block for part in self.parts for block in part.touched_blocks()]

    def first_token_in(self, blocks: set[int], groups: KVGroups) -> int | None:
        """Position of the first token with a block in `blocks` in any group; None if there is none."""
        positions = [
            part.start + index * groups[part.group].block_size
            for part in self.parts
            for index, block in enumerate(part.rows().tolist())
            if block in blocks
        ]
        return min(positions, default=None)


def load_job(
    job_id: int,
    epoch: int,
    keys: RequestKeys,
    span: LoadSpan,
    block_ids: Sequence[Sequence[int]],
    groups: KVGroups,
    *,
    chunk_size: int,
    awaited: bool,
) -> Job:
    """Return a job that loads the chunks that overlap the span.

    Blocks outside the span are not written: vLLM has those before it and computes those after it.

    `block_ids` is the block table of the request for each group, from its first token on.
    """

    def blocks(group: KVGroup, start: int, stop: int) -> bytes:
        """Return the packed ids of the blocks of tokens `start` to `stop`; SKIP for blocks that are not loaded."""
        begin, end = start // group.block_size, stop // group.block_size
        first = max(begin, span.local // group.block_size)
        last = min(end, span.hit // group.block_size)
        table = block_ids[group.index]
        return pack_blocks([*[SKIP] * (first - begin), *table[first:last], *[SKIP] * (end - last)])

    answer = span.answer
    if answer is None:  # the load cannot be planned: all blocks after the local tokens are reported as failed
        firsts = [span.local // group.block_size for group in groups]
        parts = tuple(
            JobPart(group.index, first * group.block_size, b"", (), (), pack_blocks(ids[first:]))
            for group, first, ids in zip(groups, firsts, block_ids, strict=True)
        )
    else:
        first, stop = span.local // chunk_size, min(answer.chunks, -(-span.hit // chunk_size))
        end, partial = stop * chunk_size, None
        if span.hit > end and answer.partial_keys:  # there are none without full attention
            partial = Tail(end, answer.partial_tokens, answer.partial_keys, answer.partial_text)
            end += answer.partial_tokens
        tables = [blocks(group, first * chunk_size, end) for group in groups.full]
        ends = [blocks(group, group.first_needed(span.hit), span.hit) for group in groups.boundary_groups]
        parts = (
            *chunk_parts(keys, groups, first, stop, partial, tables, chunk_size=chunk_size),
            *boundary_parts(keys, groups, span.hit, ends),
        )
    return Job(
        job_id=job_id,
        request_id=keys.request_id,
        request_namespace=keys.request_namespace,
        epoch=epoch,
        parts=parts,
        layerwise=span.layerwise,
        awaited=awaited,
        event_lora_name=keys.event_lora_name,
    )


def chunk_parts(
    keys: RequestKeys,
    groups: KVGroups,
    first: int,
    stop: int,
    partial: Tail | None,
    block_ids: Sequence[bytes],
    *,
    chunk_size: int,
) -> tuple[JobPart, ...]:
    """Return the full chunks `first`..`stop` and the partial chunk after them, in each group of full attention.

    `block_ids` are the blocks of these chunks in each of these groups.
    """
    packed, texts = keys.packed_keys(first, stop), keys.texts_of(first, stop)
    start, end = first * chunk_size, stop * chunk_size
    if partial is not None:
        packed = tuple(full + key for full, key in zip(packed, partial.keys, strict=True))
        if partial.text:
            texts[stop - first] = partial.text
        end += partial.num_tokens
    tokens = keys.packed_tokens(start, end)
    return tuple(
        JobPart(
            group=group.index,
            start=start,
            tokens=tokens,
            keys=packed if group is groups.leading else keys.chunk_keys(group, packed),
            texts=tuple(texts.items()),
            block_ids=ids,
            parents=keys.packed_keys(first - 1, first) if first and group is groups.leading else (),
        )
        for group, ids in zip(groups.full, block_ids, strict=True)
    )


def boundary_parts(
    keys: RequestKeys, groups: KVGroups, boundary: int, block_ids: Sequence[bytes]
) -> tuple[JobPart, ...]:
    """Return the chunks that the groups other than full attention need to continue after `boundary` tokens.

    `block_ids` are the blocks of these chunks in each of these groups. A group that needs none has no part.
    """
    before = keys.keys_before(boundary) if any(block_ids) else ()
    return tuple(
        JobPart(
            group=group.index,
            start=group.first_needed(boundary),
            tokens=keys.packed_tokens(group.first_needed(boundary), boundary),
            keys=keys.boundary_keys(group, boundary, before),
            texts=(),
            block_ids=ids,
        )
        for group, ids in zip(groups.boundary_groups, block_ids, strict=True)
        if ids
    )


@dataclass(frozen=True)
class LookupAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """TCP addresses of the lookup servers of a worker, sent once to the scheduler connector.

    Attributes:
        local: The lookup server of the only rank, if the worker runs in the scheduler's process. It is not pickled.
    """

    addresses: tuple[TCPAddress, ...]
    local: LookupServer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"addresses": self.addresses}


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Message from the scheduler connector to every worker connector, sent once per step.

    Attributes:
        plans: Load decisions for the status page.
        step: Number of the step; the workers report its end. 0 for none.
    """

    loads: tuple[Job, ...] = ()
    stores: tuple[Job, ...] = ()
    plans: tuple[RequestPlan, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Message from the worker connectors to the scheduler connector: progress of stores by job id, and the end of a step.

    vLLM adds up the reports of all ranks of a step. The scheduler connector adds up those of all steps.

    Attributes:
        copied: Number of ranks (or shards of the KV heads) that no longer read the blocks of the store.
        answered: For stores to be handed over, the number of ranks whose tiers have answered.
        unshared: For the same stores, the number of chunks that did not reach a tier that other processes read. Stores
            whose chunks were all present before are left out, because they do not show whether tiers accept writes.
        events: Chunks that the tiers of the first rank stored or removed.
        memory: Changes of host memory, by rank.
        step: Number of the step that the report belongs to; 0 for none.
    """

    copied: Mapping[int, int]
    answered: Mapping[int, int] = field(default_factory=dict)
    unshared: Mapping[int, int] = field(default_factory=dict)
    events: tuple[ChunkEvent, ...] = ()
    memory: Mapping[int, MemoryChange] = field(default_factory=dict)
    step: int = 0

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        return WorkerReport(
            _added(self.copied, other.copied),
            _added(self.answered, other.answered),
            _added(self.unshared, other.unshared),
            self.events + other.events,
            {**self.memory, **other.memory},
            max(self.step, other.step),
        )


def _added(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    return {job: one.get(job, 0) + other.get(job, 0) for job in {**one, **other}}
