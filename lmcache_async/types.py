"""Frozen value types shared by all layers, without behaviour or I/O."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_async.errors import TierError

ChunkKey = NewType("ChunkKey", bytes)
"""16 bytes: hash of a chunk and all chunks before it, chained from the root of the namespace."""

KEY_BYTES = 16
MAX_CHUNK_SIZE = 1 << 24
"""Maximum tokens of a chunk. Below the marks of `hashing.namespace`, so that hashed chunks and namespaces differ."""

Tokens: TypeAlias = npt.NDArray[np.int32]
"""Token ids: C-contiguous int32 of shape (num_tokens,)."""

BlockIds: TypeAlias = npt.NDArray[np.int64]
"""Rows of the paged KV cache: C-contiguous int64; -1 marks a row that is neither read nor written."""

WriteResult: TypeAlias = "asyncio.Future[TierError | None] | TierError | None"
"""Result of the write of a chunk to a tier: None if it was stored, else the error, or a future of either."""


@dataclass(slots=True)  # not frozen: a frozen instance takes three times as long to create
class Chunk:
    """One chunk of a request. Not changed after its creation.

    Attributes:
        key: Chained key of the chunk.
        start: Position of the first token in the request.
        tokens: Token ids of the chunk; int32 of shape (stop - start,).
        extra: Further dependencies of the content (multimodal hashes), as canonical text; usually empty.
    """

    key: ChunkKey
    start: int
    tokens: Tokens
    extra: str = ""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """Result of a store.

    Attributes:
        stored: Chunks that were written to at least one tier.
        shared: Stored chunks that were written to a tier that other processes read.
        present: Chunks that were stored already.
        dropped: Chunks that no tier stored, by cause.
        tokens: Tokens of the stored chunks.
        bytes: Bytes of the records, including their headers.
        seconds: Time from the call until the last tier has finished.
        copy_seconds: Time from the call until device memory is no longer read.
    """

    stored: int = 0
    shared: int = 0
    present: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieveReport:
    """Result of a retrieve.

    The first `hit_chunks` chunks are complete in device memory. No other chunks were written.

    Attributes:
        hit_chunks: Leading chunks that were loaded.
        hit_tokens: Tokens of these chunks.
        asked_tokens: Tokens of all requested chunks.
        bytes: Payload bytes copied to the device.
        seconds: Time from the call to the end of the last copy.
        by_tier: Hit tokens by the id of the tier that they were loaded from.
        cause: Reason why the prefix ended; "" if all requested chunks were loaded.
    """

    hit_chunks: int = 0
    hit_tokens: int = 0
    asked_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    by_tier: Counter[str] = field(default_factory=Counter)
    cause: str = ""


Decided: TypeAlias = Literal["load", "partial", "recompute", "local", "miss", "late", "off", "other"]
"""Decision about the hit of a request.

"load", "partial" and "recompute": load all of it, a part of it, or nothing because recomputing is faster. The other
values mean that there is nothing to load: "local" (the inference server has the tokens itself), "miss" (no tier has
them), "late" (the lookup timed out), "off" (there was no lookup), "other" (another connector of a MultiConnector loads).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """Sources of the prompt of a request, decided at its admission.

    Attributes:
        request_id: Id of the request.
        prompt_tokens: Tokens of the prompt.
        local_tokens: Leading tokens that the inference server has itself.
        hit_tokens: Leading tokens that are stored in a tier.
        load_tokens: Tokens that are loaded, after the local ones.
        decided: Decision about the hit.
        why: Reason of the decision in words.
    """

    request_id: str
    prompt_tokens: int
    local_tokens: int = 0
    hit_tokens: int = 0
    load_tokens: int = 0
    decided: Decided = "miss"
    why: str = ""
