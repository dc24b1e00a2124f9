"""Tools for tests of layers: virtual time, a scripted tier, chunks as plain bytes."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import random
import selectors
from collections import defaultdict, deque

from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.fakes import DictTier, HandleTier
from lmcache_async.testing.records import allocator
from lmcache_async.testing.records import key_of as key
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.middleware.base import LayerContext
from lmcache_async.types import ChunkKey

HANG = object()


class VirtualSelector(selectors.DefaultSelector):
    """A selector that advances virtual time instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout=None):
        events = super().select(0)
        if not events and timeout is None:
            raise AssertionError("everything waits, and nothing will ever happen")
        if not events:
            self.loop.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop with virtual time, which advances when nothing is ready."""

    def __init__(self):
        self.now = 1000.0
        selector = VirtualSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.now


def in_virtual_time(test):
    """Run an async test on a VirtualLoop."""

    @functools.wraps(test)
    def run(**fixtures):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**fixtures))

    run.__signature__ = inspect.signature(test)
    return run


def now() -> float:
    return asyncio.get_running_loop().time()


class Highest(random.Random):
    """A random source that returns the upper bound."""

    def uniform(self, a, b):
        return b


class ScriptedTier(DictTier):
    """A tier with scripted results of batches, first in first out: an error, a delay in seconds, HANG or None.

    Attributes:
        script: Results of calls of any method.
        chunk_errors: Errors of single chunks in `get_many` and `put_many`, by key.
        calls: Method and keys of each call, in order.
        busy: Number of running calls.
        peak: Maximum of `busy`.
    """

    def __init__(self, *, far=True):
        super().__init__()
        self.script = deque()
        self.chunk_errors = defaultdict(deque)
        self.calls = []
        self.far = far
        self.busy = self.peak = 0

    @property
    def capabilities(self):
        return Capabilities(removes=True, lists=True, local_index=not self.far)

    async def contains_many(self, keys):
        await self._do("contains_many", keys)
        return [key in self.records for key in keys]

    async def count_prefix(self, keys):
        await self._do("count_prefix", keys)
        return next((count for count, key in enumerate(keys) if key not in self.records), len(keys))

    async def get_many(self, keys, allocate):
        await self._do("get_many", keys)
        return [self._error(key) or await self.get(key, allocate) for key in keys]

    async def put_many(self, items):
        await self._do("put_many", [key for key, _ in items])
        return [self._error(key) or await self.put(key, buffer) for key, buffer in items]

    async def remove(self, key):
        await self._do("remove", [key])
        return await super().remove(key)

    def _error(self, key):
        return self.chunk_errors[key].popleft() if self.chunk_errors[key] else None

    async def _do(self, verb, keys):
        self.calls.append((verb, list(keys)))
        what = self.script.popleft() if self.script else None
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        try:
            if what is HANG:
                await asyncio.get_running_loop().create_future()
            elif isinstance(what, Exception):
                raise what
            elif what is not None:
                await asyncio.sleep(what)
        finally:
            self.busy -= 1


class LayeredTier(HandleTier):
    """A tier with layers, outermost first.

    Attributes:
        layer: The outermost layer.
    """

    def __init__(self, inner, *layers, timeout_s=30.0, close_timeout_s=None):
        self.layer = layers[0] if layers else None
        handle = TierHandle(
            inner,
            name=layers[0].context.tier if layers else "t",
            logger=LimitedLogger(logging.getLogger("test")),
            timeout_s=timeout_s,
            close_timeout_s=close_timeout_s,
            layers=layers,
        )
        super().__init__(handle)

    @property
    def late_calls(self):
        return self.handle.late_calls

    def layer_statistics(self):
        return self.layer.statistics()

    async def drain(self, *, timeout_s):
        return await self.handle.drain(timeout_s=timeout_s)


def context(
    *,
    timeout_s: float = 30.0,
    tier: str = "t",
    layer: str = "l",
    shared: dict[str, object] | None = None,
) -> LayerContext:
    return LayerContext(
        tier=tier,
        layer=layer,
        timeout_s=timeout_s,
        logger=LimitedLogger(logging.getLogger("test")),
        shared={} if shared is None else shared,
        where=f"tiers[0] ({tier}), layers[0] ({layer})",
    )


def content(number: int, nbytes: int = 1000) -> bytes:
    return bytes((number + index) % 251 for index in range(nbytes))


def fill(tier: DictTier, count: int) -> DictTier:
    tier.records.update({key(number): content(number) for number in range(count)})
    return tier


def chunk(arena: Arena, number: int) -> Buffer:
    """A leased buffer with the content of a chunk."""
    data = content(number)
    buffer = arena.lease_nowait(len(data))
    assert buffer is not None
    buffer.view[:] = data
    return buffer


def chunks(arena: Arena, count: int) -> list[tuple[ChunkKey, Buffer]]:
    return [(key(number), chunk(arena, number)) for number in range(count)]


def release(items) -> None:
    for _, buffer in items:
        buffer.release()


def taken(result: object) -> object:
    """Release a buffer returned by a get and return its content; return other results unchanged."""
    if not isinstance(result, Buffer):
        return result
    with result:
        return bytes(result.view)


async def call(tier, verb: str, arena: Arena) -> object:
    """Call one method for chunk 1, or for the chunks 0 to 3, and return the result; see `taken`."""
    keys = [key(number) for number in range(4)]
    with chunk(arena, 1) as buffer:
        calls = {
            "contains": lambda: tier.contains(keys[1]),
            "contains_many": lambda: tier.contains_many(keys),
            "count_prefix": lambda: tier.count_prefix(keys),
            "get": lambda: tier.get(keys[1], allocator(arena)),
            "get_many": lambda: tier.get_many(keys[1:2], allocator(arena)),
            "put": lambda: tier.put(keys[1], buffer),
            "put_many": lambda: tier.put_many([(keys[1], buffer)]),
            "remove": lambda: tier.remove(keys[1]),
            "reject": lambda: tier.reject(keys[1], "magic"),
            "clear": tier.clear,
        }
        return taken(await calls[verb]())
