"""The other side of the scheduler bench: a lookup server in a process of its own, as a vLLM worker has it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.frame import option
from lmcache_async.engine.lookup import FirstPresent, LookupResult
from lmcache_async.hashing import ChunkHasher
from lmcache_async.integration.vllm.lookup_server import LookupServer
from lmcache_async.integration.vllm.wire import PROTOCOL, Identity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lmcache_async.types import ChunkKey

CHUNK = 256
ROOT = b"scheduler bench."


@dataclass(frozen=True, slots=True)
class Workload:
    """Attributes are options; see docs/benchmarks.md."""

    requests: int = option(500, "requests, every second one a hit")
    tokens: int = option(32768, "tokens of each prompt")
    block_size: int = option(16, "tokens of vLLM's blocks")


class KnownKeys:
    """An engine that has the chunks of every second prompt."""

    def __init__(self, load: Workload) -> None:
        self.keys: set[bytes] = set()
        for index in range(0, load.requests, 2):
            self.keys.update(ChunkHasher(ROOT, chunk_size=CHUNK).extend_keys(prompt(index, load.tokens)))

    async def lookup_keys(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> LookupResult:
        del lookup_id
        count = next((at for at, key in enumerate(keys) if key not in self.keys), len(keys))
        return LookupResult(count=count, by_tier={"cpu": count}, pinned=count)

    async def first_present(
        self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None
    ) -> FirstPresent | None:
        del lookup_id
        position = next((at for at, key in enumerate(keys) if key in self.keys), None)
        return FirstPresent(position, pinned=True) if position is not None else None

    def unpin(self, lookup_id: str) -> None:
        del lookup_id


def prompt(index: int, num_tokens: int) -> list[int]:
    """Fresh int objects above Python's small ones, as a tokenizer makes them."""
    chosen = random.Random(index)
    return [chosen.randrange(1000, 128000) for _ in range(num_tokens)]


def serve(load: Workload, path: Path, ready: Any) -> None:
    """The other process: one rank's lookup server."""

    async def main() -> None:
        identity = Identity(PROTOCOL, ROOT, "xxh3_128", CHUNK, load.block_size)
        await LookupServer(KnownKeys(load), identity, path, clear=_never).start()
        ready.set()
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())


async def _never(epoch: int, memory_only: bool) -> int:
    raise RuntimeError(f"nobody clears here ({epoch}, {memory_only})")
