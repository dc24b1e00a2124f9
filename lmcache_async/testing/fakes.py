"""Fake tiers (in a dict, gated, slow, faulty), wrappers of tiers and handles, and a registry that also offers given plug-ins."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, TypeVar, cast

from lmcache_async.config.values import OptionalSize
from lmcache_async.errors import TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.registry import LAYERS, STAGES, TIERS, Registry
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierConfig, TierStatistics
from lmcache_async.tiers.eviction import LRUPolicy
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.results import release_results, unwrap
from lmcache_async.types import ChunkKey

T = TypeVar("T")

FaultKind: TypeAlias = Literal["error", "refuse", "bug", "delay", "hang", "drop", "lie", "flip", "cut"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one call.

    Attributes:
        kind: Effect of the fault:

            - `error`: the call raises TierUnavailableError.
            - `refuse`: the call raises TierError.
            - `bug`: the call raises RuntimeError.
            - `delay`: the call takes `seconds` longer.
            - `hang`: the call blocks until it is cancelled.
            - `drop`: a put stores nothing and returns normally; a get or contains reports a miss.
            - `lie`: contains returns the opposite.
            - `flip`: a get returns the record with one byte inverted.
            - `cut`: a get returns the record truncated.

            A fault that does not apply to a call stays queued until a call to which it applies.
        seconds: Length of a delay, in seconds.
        position: Index of the inverted byte, or length after truncation. It is taken modulo the length of the
            record, so a negative position counts from the end.
    """

    kind: FaultKind
    seconds: float = 0.0
    position: int = 0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults of the next calls, in order.

    Attributes:
        faults: One entry for each call; None for a call without a fault. Calls after the last entry have
            none.
    """

    faults: tuple[Fault | None, ...] = ()


class ForwardingTier(Tier):
    """A tier that forwards every call to another one. Base class of tiers that change some of the calls."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner.config)
        self.inner = inner

    async def around(self, verb: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call`, a call of the inner tier; override it to change calls. `nbytes` is the size of put records, else 0."""
        del verb, nbytes
        return await call()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def bind(self, arena: Arena) -> None:
        self.inner.on_evicted = self.on_evicted
        self.inner.bind(arena)

    async def contains(self, key: ChunkKey) -> bool:
        return await self.around("contains", 0, lambda: self.inner.contains(key))

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        return await self.around("get", 0, lambda: self.inner.get(key, allocate))

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        await self.around("put", buffer.nbytes, lambda: self.inner.put(key, buffer))

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return await self.around("count_prefix", 0, lambda: self.inner.count_prefix(keys))

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self.around("contains_many", 0, lambda: self.inner.contains_many(keys))

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        return await self.around("get_many", 0, lambda: self.inner.get_many(keys, allocate))

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        nbytes = sum(buffer.nbytes for _, buffer in items)
        return await self.around("put_many", nbytes, lambda: self.inner.put_many(items))

    async def remove(self, key: ChunkKey) -> bool:
        return await self.around("remove", 0, lambda: self.inner.remove(key))

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        return await self.inner.reject(key, cause)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        return await self.inner.scrub(max_bytes_per_s=max_bytes_per_s)

    async def keys(self) -> AsyncIterator[ChunkKey]:
        async for key in self.inner.keys():
            yield key

    async def clear(self) -> int:
        return await self.inner.clear()

    def statistics(self) -> TierStatistics:
        return self.inner.statistics()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.inner.__aexit__(None, None, None)


class HandleTier(ForwardingTier):
    """The calls of a tier handle as a tier, for tests of layers and of the handle itself."""

    def __init__(self, handle: TierHandle) -> None:
        Tier.__init__(self, TierConfig())
        self.handle = handle
        self.inner = cast("Tier", handle)  # the methods that are not overridden have the names of a tier's

    def bind(self, arena: Arena) -> None:
        self.handle.bind(arena)

    async def contains(self, key: ChunkKey) -> bool:
        (stored,) = await self.handle.lookup([key], exact=True)
        return stored

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self.handle.lookup(keys, exact=True)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return [*await self.handle.lookup(keys), False].index(False)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        (result,) = await self.handle.get([key], allocate)
        return unwrap(result)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        return await self.handle.get(keys, allocate)

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        (error,) = await self.handle.put([(key, buffer)])
        if error is not None:
            raise error

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        return await self.handle.put(items)


class FaultyTier(ForwardingTier):
    """A tier that injects planned faults into `contains`, `get` and `put`, in order of the calls.

    Batch calls are split into single ones, so each chunk takes one entry of the plan. When the plan is used
    up, calls pass unchanged.

    Args:
        inner: Wrapped tier. If its content is in the arena (capability `in_arena`), `flip` and `cut` change
            the stored chunk itself.
        plan: Faults of the first calls.

    Attributes:
        faults: Queue of the next calls: a fault, an exception to raise, or None.
    """

    count_prefix = Tier.count_prefix
    get_many = Tier.get_many
    put_many = Tier.put_many

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

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        kinds = [(await self._next("contains", key)).kind for key in keys]
        there = await self.inner.contains_many(keys)
        return [
            not present if kind == "lie" else present and kind != "drop"
            for kind, present in zip(kinds, there, strict=True)
        ]

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
        if fault.kind in _RAISED:
            error, text = _RAISED[fault.kind]
            raise error(f"planned: {text} {verb} of {key.hex()}")
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "hang":
            await asyncio.get_running_loop().create_future()
        return fault


_NONE = Fault("delay")
_VERBS: dict[FaultKind, str] = {"lie": "contains", "flip": "get", "cut": "get"}
_RAISED: dict[FaultKind, tuple[type[Exception], str]] = {
    "error": (TierUnavailableError, "the backend is unavailable at"),
    "refuse": (TierError, "the backend refuses"),
    "bug": (RuntimeError, "a bug at"),
}


def unavailable() -> TierError:
    """Return a TierError, for tests of calls that fail and are not retried."""
    return TierError("the backend is unavailable")


class DictConfig(TierConfig):
    """Options of a DictTier.

    Attributes:
        max_bytes: Capacity: maximum bytes of all records; no limit by default.
    """

    max_bytes: OptionalSize = None


class DictTier(Tier):
    """A tier that keeps copies of records in a dict: the smallest complete tier, a reference for others.

    With a capacity it evicts the least recently used chunks, suffixes before their prefixes.

    Args:
        config: A DictConfig, or another config; its field `max_bytes` is used if it has one.
        records: Dict for the records. If it is given, it outlives the tier, and the tier declares itself
            persistent.
    """

    config_type = DictConfig

    def __init__(
        self, config: TierConfig | None = None, *, records: dict[ChunkKey, bytes] | None = None
    ) -> None:
        super().__init__(config or DictConfig())
        self.records = {} if records is None else records
        self._persistent = records is not None
        self._max_bytes: int | None = getattr(self.config, "max_bytes", None)
        self._policy = LRUPolicy()
        self._evictions = 0
        for key, record in self.records.items():
            self._policy.add(key, len(record))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=self._persistent, removes=True, lists=True, local_index=True)

    async def contains(self, key: ChunkKey) -> bool:
        return key in self.records

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._policy.touch(keys, gapless=False)
        return await super().contains_many(keys)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        record = self.records.get(key)
        if record is None:
            return None
        self._policy.touch([key])
        buffer = await allocate(len(record))
        buffer.view[:] = record
        return buffer

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        if self._max_bytes is not None:
            self._make_room(key, buffer.nbytes, self._max_bytes)
        self.records[key] = bytes(buffer.view)

    async def remove(self, key: ChunkKey) -> bool:
        self._policy.discard(key)
        return self.records.pop(key, None) is not None

    async def keys(self) -> AsyncIterator[ChunkKey]:
        for key in list(self.records):
            yield key

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            chunks=len(self.records),
            bytes=sum(map(len, self.records.values())),
            max_bytes=self._max_bytes,
            evictions=self._evictions,
        )

    def _make_room(self, key: ChunkKey, nbytes: int, max_bytes: int) -> None:
        self._policy.discard(key)
        self._policy.add(key, nbytes)  # before the eviction, so that no prefix of this chunk is evicted
        self._policy.touch([key])
        used = sum(len(record) for other, record in self.records.items() if other != key)
        victims = self._policy.evict(used + nbytes - max_bytes, lambda other: other != key)
        if not victims and used + nbytes > max_bytes:
            self._policy.discard(key)
            self.records.pop(key, None)
            raise TierFullError(f"there is no room for a record of {nbytes} bytes within {max_bytes}")
        self._evictions += len(victims)
        for victim in victims:
            del self.records[victim]
        if victims and self.on_evicted is not None:
            self.on_evicted(victims)


class GatedTier(ForwardingTier):
    """A tier that blocks every `get` and `put` until the gate is opened. The gate is closed at first.

    Cancelling a blocked call ends it without a call of the inner tier.

    Attributes:
        parked: Set when a call is blocked.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.close_gate()

    def open_gate(self) -> None:
        self._gate.set()

    def close_gate(self) -> None:
        """Block calls from now on. `parked` is replaced by a new event."""
        self.parked = asyncio.Event()
        self._gate = asyncio.Event()

    async def around(self, verb: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        if verb.startswith(("get", "put")):
            if not self._gate.is_set():
                self.parked.set()
            await self._gate.wait()
        return await call()


class LatencyTier(ForwardingTier):
    """A tier that delays calls by a fixed latency and by the transfer time of their bytes.

    A batch call is delayed once. Time is the running loop's, so a loop with virtual time does not wait.

    Args:
        inner: Wrapped tier.
        latency_s: Latency of each call, in seconds.
        bytes_per_s: Bandwidth for records, in bytes per second; None for no limit.
    """

    def __init__(self, inner: Tier, *, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s

    async def around(self, verb: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        if not verb.startswith("get"):
            await self._wait(nbytes)
            return await call()
        result = await call()
        results = result if isinstance(result, list) else [result]
        try:
            await self._wait(sum(each.nbytes for each in results if isinstance(each, Buffer)))
        except BaseException:
            release_results(results)
            raise
        return result

    async def _wait(self, nbytes: int) -> None:
        transfer_s = nbytes / self._bytes_per_s if self._bytes_per_s else 0.0
        await asyncio.sleep(self._latency_s + transfer_s)


def installed() -> Registry:
    """Return a registry of the installed plug-ins. It is cached by `sys.path`, because creating it takes about 50 ms."""
    return _read_plugins(tuple(sys.path))


_read_plugins = functools.lru_cache(maxsize=8)(Registry)


class FakeRegistry(Registry):
    """A registry of the given plug-ins and the installed ones; a given plug-in takes precedence.

    Args:
        tiers: Tier classes by name.
        stages: Stage classes or async functions by name.
        layers: Layer classes by name.
    """

    def __init__(
        self,
        *,
        tiers: Mapping[str, object] | None = None,
        stages: Mapping[str, object] | None = None,
        layers: Mapping[str, object] | None = None,
    ) -> None:
        vars(self).update(vars(installed()))  # the metadata does not change
        self._given = {TIERS: dict(tiers or {}), STAGES: dict(stages or {}), LAYERS: dict(layers or {})}

    def load(self, group: str, name: str, *, third_party: bool = True) -> object:
        if name in self._given[group]:
            return self._given[group][name]
        return super().load(group, name, third_party=third_party)


class FaultyRegistry(Registry):
    """A registry that wraps each tier of another one in a FaultyTier, unless its content is in the arena.

    Attributes:
        made: The FaultyTiers, in order of construction.
    """

    def __init__(self, inner: Registry) -> None:
        vars(self).update(vars(inner))  # the metadata does not change
        self.made: list[FaultyTier] = []
        self._inner = inner

    def load(self, group: str, name: str, *, third_party: bool = True) -> object:
        loaded = self._inner.load(group, name, third_party=third_party)
        if group == TIERS and isinstance(loaded, type) and issubclass(loaded, Tier):
            return self._faulty(loaded)
        return loaded

    def _faulty(self, tier_class: type[Tier]) -> type[Tier]:
        made = self.made

        class Faulty(Tier):
            config_type = tier_class.config_type

            def __new__(cls, config: TierConfig) -> Tier:  # type: ignore[misc]  # a FaultyTier
                tier = tier_class(config)
                if tier.capabilities.in_arena:
                    return tier
                made.append(FaultyTier(tier))
                return made[-1]

        return Faulty
