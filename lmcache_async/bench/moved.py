"""What benchmarks of tiers move: records in one arena, through the tier and through others."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_async.memory.arena import Arena
    from lmcache_async.memory.buffer import Buffer

PREFIX = "lmcache-async-bench:"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Moved:
    """What each probe moves: `count` times the same record, under names of their own."""

    url: str
    arena: Arena
    record: Buffer
    count: int
    connections: int

    @property
    def keys(self) -> list[ChunkKey]:
        return [ChunkKey(number.to_bytes(KEY_BYTES, "big")) for number in range(self.count)]

    @property
    def names(self) -> list[str]:
        return [f"{PREFIX}{key.hex()}" for key in self.keys]

    def rate(self, start: float) -> float:
        return self.count * self.record.nbytes / (time.perf_counter() - start) / 1e9

    def check(self, buffers: list[Buffer]) -> None:
        """They are all there, and end as the record does; they are given back."""
        end = bytes(self.record.view[-64:])
        right = sum(bytes(buffer.view[-64:]) == end for buffer in buffers)
        for buffer in buffers:
            buffer.release()
        if right != self.count:
            raise RuntimeError(f"{right} of {self.count} records came back")


@contextlib.contextmanager
def made_record(arena: Arena, nbytes: int) -> Iterator[Buffer]:
    record = arena.lease_nowait(nbytes)
    if record is None:
        raise RuntimeError("the arena has no room for the record")
    with record:
        record.view[:] = bytes(range(256)) * (nbytes // 256)
        yield record
