"""Names that layers written for version 0.1 import; `lmcache_async.Layer` replaces them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from lmcache_async.tiers.middleware.base import Call, Kind, Layer, Next, Results

__all__ = ["AroundLayer", "Call", "Kind"]


class AroundLayer(Layer):
    """Base class of layers in version 0.1, with `async def around(self, call, run)`.

    `await run()` carries out the call. Its result is the list of results of the call, also for a single chunk.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "around" in vars(cls):
            cls.around = _adapted(cls.around)  # type: ignore[method-assign]


def _adapted(around: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    @wraps(around)
    async def adapted(self: AroundLayer, call: Call, next: Next) -> Results:
        # `run` ignores an argument, so that `super().around(call, run)` of another adapted layer can be awaited.
        results: Results = await around(self, call, lambda _=None: next(call))
        return results

    return adapted
