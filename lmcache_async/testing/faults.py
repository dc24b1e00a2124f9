"""Faults as values: what the next calls of a tier come to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.tiers.layers.base import TierLayer
from lmcache_async.types import ChunkKey

FaultKind: TypeAlias = Literal["error", "refuse", "bug", "delay", "hang", "drop", "lie", "flip", "cut"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of one call.

    Attributes:
        kind: `error`: the backend cannot be reached. `refuse`: it fails for good. `bug`: the tier raises
            something else than TierError. `delay`: it takes `seconds`. `hang`: it waits until it is
            cancelled. `drop`: a put stores nothing and says nothing, a get or contains finds nothing.
            `lie`: contains says the opposite. `flip`: a get comes with one byte changed. `cut`: it comes
            shortened. A kind that means nothing to a call waits for one to which it does.
        seconds: Of a delay.
        position: Of the byte flipped, or the length left; taken modulo the record's length, so that
            a negative one counts from the end.
    """

    kind: FaultKind
    seconds: float = 0.0
    position: int = 0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What the next calls come to, in their order; None lets one through, and so does the plan's end."""

    faults: tuple[Fault | None, ...] = ()


class FaultyTier(TierLayer):
    """Its calls of `contains`, `get` and `put` fail as told, first in first out; then it works.

    Batch verbs are made of single ones, so that each chunk has a fault of its own.

    Args:
        inner: The tier that does the work. What `flip` and `cut` do to the buffers of one in the arena
            they do to the chunk itself.
        plan: What becomes of the first calls.

    Attributes:
        faults: What the next calls come to: a fault, an exception to be raised, or None.
    """

    def __init__(self, inner: Tier, plan: FaultPlan | None = None) -> None:
        super().__init__(inner)
        self.faults: deque[Fault | Exception | None] = deque(plan.faults if plan else ())

    async def contains(self, key: ChunkKey) -> bool:
        return (await self.contains_many([key]))[0]

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        fault = await self._next("get", key)
        if fault.kind == "drop":
            return None
        buffer = await self.inner.get(key, allocate)
        if buffer is not None and buffer.nbytes:
            position = fault.position % buffer.nbytes
            if fault.kind == "flip":
                buffer.view[position] ^= 0xFF
            elif fault.kind == "cut":
                buffer.resize(position)
        return buffer

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        if (await self._next("put", key)).kind != "drop":
            await self.inner.put(key, buffer)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return await Tier.count_prefix(self, keys)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        kinds = [(await self._next("contains", key)).kind for key in keys]
        there = await self.inner.contains_many(keys)
        return [
            not present if kind == "lie" else present and kind != "drop"
            for kind, present in zip(kinds, there, strict=True)
        ]

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        return await Tier.get_many(self, keys, allocate)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        return await Tier.put_many(self, items)

    async def _next(self, verb: str, key: ChunkKey) -> Fault:
        fault = self.faults[0] if self.faults else None
        if isinstance(fault, Fault) and verb != _VERBS.get(fault.kind, verb):
            return _NONE
        if self.faults:
            self.faults.popleft()
        if isinstance(fault, Exception):
            raise fault
        if fault is None:
            return _NONE
        where = f"{verb} of {key.hex()}"
        if fault.kind == "error":
            raise TierUnavailableError(f"planned: the backend is away at {where}")
        if fault.kind == "refuse":
            raise TierError(f"planned: the backend refuses {where}")
        if fault.kind == "bug":
            raise RuntimeError(f"planned: a bug at {where}")
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "hang":
            await asyncio.get_running_loop().create_future()
        return fault


_NONE = Fault("delay")
_VERBS: dict[FaultKind, str] = {"lie": "contains", "flip": "get", "cut": "get"}


def unavailable() -> TierError:
    """An error such as a tier's backend gives."""
    return TierError("the backend is away")
