"""The paged cache of the campaigns, prompts by number, and comparison of loaded bytes."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.hashing import ChunkHasher
from lmcache_async.pipeline.batch import RetrieveRequest
from lmcache_async.registry import Registry
from lmcache_async.testing.rig import Rig
from lmcache_async.types import Chunk

VOCABULARY = 50_000
WIPED = -7.0
"""Content of every slot after `Rig.wipe`."""


def prompt(number: int, *, most_chunks: int = 4, chunk_size: int = 8) -> list[int]:
    """Return unique tokens for a number, at most `most_chunks` chunks. Every other prompt ends in a partial chunk."""
    generator = random.Random(number)
    length = generator.randint(1, most_chunks) * chunk_size - (number % 2) * generator.randint(
        1, chunk_size - 1
    )
    return [number % VOCABULARY, number // VOCABULARY] + [
        generator.randrange(VOCABULARY) for _ in range(max(length, 3) - 2)
    ]


def disk_tiers(path: Path, max_bytes: int) -> list[Any]:
    return ["cpu", {"name": "disk", "path": str(path), "max_bytes": max_bytes}]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run torch on one thread and exclude existing objects from garbage collection, also after the campaign."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True)
class Bench:
    """A rig, and a registry that is read once.

    Attributes:
        rig: A cache with 32 KiB of KV per chunk, so that a record has several pages.
    """

    slabs: int = 40
    model: str = "torture"
    rig: Rig = field(init=False)
    registry: Registry = field(default_factory=Registry)

    def __post_init__(self) -> None:
        self.rig = Rig(blocks=80, heads=4, head_dim=64, slabs=self.slabs, model=self.model)

    def chunks(self, tokens: Sequence[int]) -> list[Chunk]:
        """Return the chunks of a store of these tokens."""
        hasher = ChunkHasher(self.rig.namespace.root(), chunk_size=self.rig.chunk_size)
        chunks = hasher.extend(list(tokens))
        tail = hasher.tail()
        return chunks if tail is None else [*chunks, tail]

    async def load(
        self, engine: CacheEngine, chunks: Sequence[tuple[Chunk, torch.Tensor]]
    ) -> tuple[int, int]:
        """Load chunks of any prompts into consecutive slots of a wiped cache.

        Returns:
            The number of leading chunks that were served, and the number of slots with wrong bytes.
        """
        self.rig.wipe()
        rows, start = [], 0
        for chunk, _ in chunks:
            rows.append(np.arange(start, start + len(chunk.tokens), dtype=np.int64))
            start += len(chunk.tokens)
        report = await engine.retrieve_chunks(
            RetrieveRequest(chunks=tuple(chunk for chunk, _ in chunks), rows=tuple(rows))
        )
        expected = torch.full((self.rig.layers, 2, self.rig.num_slots, 256), WIPED)
        for (_, content), row in list(zip(chunks, rows, strict=True))[: report.hit_chunks]:
            expected[:, :, row] = content
        wrong = (self.rig.read(range(self.rig.num_slots)) != expected).any(dim=-1).any(dim=0).any(dim=0)
        return report.hit_chunks, int(wrong.sum())

    def with_content(self, tokens: Sequence[int]) -> list[tuple[Chunk, torch.Tensor]]:
        """Return each chunk of a prompt with its KV."""
        content = self.rig.content(tokens)
        return [(chunk, content[:, :, chunk.start : chunk.stop]) for chunk in self.chunks(tokens)]
