"""A tier under measurement: opened with options, and batches put into it and got back."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.moved import TIMEOUT_S
from lmcache_async.config import validate_options
from lmcache_async.errors import ConfigError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.registry import TIERS, Registry
from lmcache_async.tiers.base import Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from lmcache_async.bench.frame import Probe
    from lmcache_async.bench.moved import Moved
    from lmcache_async.memory.arena import Arena


@contextlib.asynccontextmanager
async def opened_tier(
    name: str, options: Mapping[str, Any], arena: Arena, *, where: str
) -> AsyncIterator[Tier]:
    """The tier of that name.

    Args:
        where: What messages about a wrong option call their place.
    """
    tier_class = Registry().load(TIERS, name)
    if not (isinstance(tier_class, type) and issubclass(tier_class, Tier)):
        raise ConfigError(f"the tier {name} is {tier_class!r}, which is no subclass of Tier")
    tier = tier_class(validate_options(tier_class.config_type, dict(options), where))
    tier.bind(arena)
    async with tier:
        yield tier


def put_probe(
    moved: Moved, tier: Tier, before: Callable[[Moved, Tier], Awaitable[None]] | None = None
) -> Probe:
    """All records in one batch, in GB/s; `before` is awaited first and not counted."""

    async def probe() -> float:
        if before is not None:
            await before(moved, tier)
        start = time.perf_counter()
        answers = await tier.put_many([(key, moved.record) for key in moved.keys])
        rate = moved.rate(start)
        for answer in answers:
            if answer is not None:
                raise answer
        return rate

    return probe


def get_probe(moved: Moved, tier: Tier) -> Probe:
    """All records in one batch, in GB/s; they are put first where they are not there."""

    async def allocate(nbytes: int) -> Buffer:
        return await moved.arena.lease(nbytes, timeout_s=TIMEOUT_S)

    async def probe() -> float:
        if await tier.count_prefix(moved.keys) != moved.count:
            await put_probe(moved, tier)()
        start = time.perf_counter()
        results = await tier.get_many(moved.keys, allocate)
        rate = moved.rate(start)
        moved.check([result for result in results if isinstance(result, Buffer)])
        return rate

    return probe
