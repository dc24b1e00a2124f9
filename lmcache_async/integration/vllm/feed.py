"""The worker's metrics for vLLM: collected on the engine's loop, taken by the model's thread without a wait."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from lmcache_async.engine.metrics import engine_families
from lmcache_async.observability.families import Family, since
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from lmcache_async.engine.engine import CacheEngine

logger = LimitedLogger(logging.getLogger(__name__))

INTERVAL_S = 0.5
"""The loop collects no more often than this, however many stores and retrieves end."""


class StatsFeed:
    """What an engine counted since the model's thread last asked.

    Nothing runs while no store and no retrieve ends. After one the loop collects, once for all that end within
    `INTERVAL_S`, and leaves what has changed for `take`. Only `take` may be called off the loop's thread.
    """

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._lock = threading.Lock()
        self._taken: list[Family] = []
        self._ready: tuple[list[Family], list[Family]] | None = None  # all there is, and what of it is new
        engine.totals.changed = self._changed
        self._changed()  # zeros are worth knowing: of them a first count is seen to rise

    def take(self) -> list[Family]:
        """What is new; nothing where that is not known without a wait."""
        if self._ready is None or not self._lock.acquire(blocking=False):
            return []
        try:
            return self._take_ready()
        finally:
            self._lock.release()

    def close(self) -> None:
        self._engine.totals.changed = None
        if self._timer is not None:
            self._timer.cancel()

    def _take_ready(self) -> list[Family]:
        ready, self._ready = self._ready, None
        if ready is None:  # the loop has found since that nothing is new
            return []
        self._taken, new = ready
        return new

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._due, self._loop.time()), self._collect)

    def _collect(self) -> None:
        self._timer = None
        self._due = self._loop.time() + INTERVAL_S
        try:
            families = engine_families(self._engine.statistics(), self._engine.totals)
        except Exception as error:  # noqa: BLE001  # a tier or a layer of somebody else's
            logger.report("statistics", "no metrics: %s: %s", type(error).__name__, error)
            return
        with self._lock:
            new = since(families, self._taken)
            self._ready = (families, new) if new else None
