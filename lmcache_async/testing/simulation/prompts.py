"""A few families of prompts with shared beginnings, and what a model would compute for each."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
import xxhash

from lmcache_async.hashing import RequestNamespace
from lmcache_async.types import Tokens

NAMESPACES = (RequestNamespace(), RequestNamespace(cache_salt="tenant"))

Content = npt.NDArray[np.uint8]
"""Of a prompt: one row of bytes for each token."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt in one namespace.

    Attributes:
        namespace: Index of its namespace.
        tokens: Token ids.
        content: The KV: row i depends on the namespace and on tokens 0 to i.
        chunks: For each chunk a number that equal chunks of all prompts share, with the position it stops at.
    """

    namespace: int
    tokens: Tokens
    content: Content
    chunks: tuple[tuple[int, int], ...]

    @property
    def request_namespace(self) -> RequestNamespace:
        return NAMESPACES[self.namespace]


def make_prompts(
    rng: Random, *, count: int, max_tokens: int, chunk_size: int, row_bytes: int
) -> list[tuple[Prompt, ...]]:
    """`count` texts, each as one prompt for each namespace; many begin as another one does."""
    texts: list[list[int]] = []
    for _ in range(count):
        text: list[int] = []
        if texts and rng.random() < 0.8:
            other = rng.choice(texts)
            text = other[: rng.randrange(len(other) + 1)]
        wanted = max(1, rng.randrange(max_tokens + 1))
        texts.append((text + [rng.randrange(100) for _ in range(max_tokens)])[: max(wanted, len(text))])
    numbers: dict[tuple[int, bytes], int] = {}
    return [
        tuple(
            _prompt(numbers, namespace, np.asarray(text, np.int32), chunk_size, row_bytes)
            for namespace in range(len(NAMESPACES))
        )
        for text in texts
    ]


def _prompt(
    numbers: dict[tuple[int, bytes], int], namespace: int, tokens: Tokens, chunk_size: int, row_bytes: int
) -> Prompt:
    stops = [*range(chunk_size, len(tokens), chunk_size), len(tokens)]
    chunks = tuple(
        (numbers.setdefault((namespace, tokens[:stop].tobytes()), len(numbers)), stop) for stop in stops
    )
    rows = [_row(namespace, tokens[: stop + 1], row_bytes) for stop in range(len(tokens))]
    return Prompt(namespace, tokens, np.frombuffer(b"".join(rows), np.uint8).reshape(-1, row_bytes), chunks)


def _row(namespace: int, prefix: Tokens, row_bytes: int) -> bytes:
    text = bytes([namespace]) + prefix.tobytes()
    parts = [xxhash.xxh3_128_digest(text, seed=part) for part in range(-(-row_bytes // 16))]
    return b"".join(parts)[:row_bytes]
