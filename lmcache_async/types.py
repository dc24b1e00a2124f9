"""Frozen values that travel through every layer. No behaviour, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

ChunkKey = NewType("ChunkKey", bytes)
"""16 bytes: the hash, chained from the namespace's root, of a chunk and of all that is before it."""

KEY_BYTES = 16

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
