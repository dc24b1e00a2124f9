import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lmcache_async import LayerConfig
from lmcache_async.config import Seconds
from lmcache_async.tiers.layers.around import AroundLayer, Call, Kind

T = TypeVar("T")


class PacedConfig(LayerConfig):
    pause_s: Seconds = 0.01


class PacedLayer(AroundLayer):
    """Waits a little before each write."""

    options_type = PacedConfig

    async def around(self, call: Call, run: Callable[[], Awaitable[T]]) -> T:
        if call.kind is Kind.WRITE:
            await asyncio.sleep(self.options.pause_s)
        return await run()
