"""Frozen values that travel through every layer. No behaviour, no I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

ChunkKey = NewType("ChunkKey", bytes)
"""16 bytes: the hash, chained from the namespace's root, of a chunk and of all that is before it."""

KEY_BYTES = 16
MAX_CHUNK_SIZE = 1 << 24
"""Tokens; far above any use, and below the marks that end the messages of keys."""

Tokens: TypeAlias = npt.NDArray[np.int32]
"""Token ids: C-contiguous int32 of shape (num_tokens,)."""

BlockIds: TypeAlias = npt.NDArray[np.int64]
"""Rows of the paged KV cache: C-contiguous int64; -1 marks a row that is neither read nor written."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a request: where it lies in the prompt, and its key.

    Attributes:
        key: Its chained key.
        start: Position of its first token in the request.
        tokens: Its own token ids, int32 of shape (stop - start,).
        extra: What else its content depends on (multimodal hashes), as canonical text; usually empty.
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
    """What became of the chunks of a store.

    Attributes:
        stored: Chunks that at least one tier keeps now.
        shared: Of these, how many a tier keeps that other processes read.
        present: Chunks that were there already.
        dropped: Chunks that no tier took, by cause.
        tokens: Tokens of the stored chunks.
        bytes: Payload bytes copied from the device.
        seconds: From the request to the last tier's answer.
        copy_seconds: From the request until device memory was not read any more.
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
    """What became of a retrieve: the first `hit_chunks` chunks are complete in device memory.

    Nothing beyond them was written.

    Attributes:
        hit_chunks: Leading chunks that are there.
        hit_tokens: Their tokens.
        asked_tokens: Tokens of all chunks asked for.
        bytes: Payload bytes copied to the device.
        seconds: From the request to the end of the last copy.
        by_tier: Hit tokens by the id of the tier that gave them.
        cause: Why the prefix ended; "" when everything asked for was there.
    """

    hit_chunks: int = 0
    hit_tokens: int = 0
    asked_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    by_tier: Counter[str] = field(default_factory=Counter)
    cause: str = ""


Decided: TypeAlias = Literal["load", "partial", "recompute", "local", "miss", "late", "off"]
"""What becomes of a request's hit: all of it is loaded, a part, or nothing since computing is sooner. Or there is
nothing to load: the model's server has it itself, no tier has it, the answer was late, or nobody was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """Where a request's prompt comes from, decided when it was admitted.

    Attributes:
        request_id: Its name.
        prompt_tokens: Tokens in all.
        local_tokens: Leading ones that the model's server has itself.
        hit_tokens: Leading ones that are in some tier.
        load_tokens: Those that are loaded, after the local ones.
        decided: What became of the hit.
        why: The same in words.
    """

    request_id: str
    prompt_tokens: int
    local_tokens: int = 0
    hit_tokens: int = 0
    load_tokens: int = 0
    decided: Decided = "miss"
    why: str = ""
