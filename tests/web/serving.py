"""A real engine with its status page on its own thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import EngineClosedError
from lmcache_async.testing.rig import Rig
from lmcache_async.types import RequestPlan

DEADLINE_S = 60


class Served:
    """An engine with a status page. Attributes: url: Address of the page."""

    def __init__(self, rig: Rig, **settings: Any) -> None:
        self.rig = rig
        self._settings = {"http.listen": "127.0.0.1:0", **settings}
        self._thread = LoopThread("test-engine")
        self._opened = self._thread.submit(self._open())
        self.engine: CacheEngine = self._opened.result(DEADLINE_S)
        assert self.engine.status_url is not None
        self.url = self.engine.status_url

    def call(self, work: Any) -> Any:
        return self._thread.submit(work).result(DEADLINE_S)

    def plan(self, name: str, **figures: Any) -> None:
        """Plan a request without loading it."""

        async def work() -> None:
            self.engine.planned(RequestPlan(request_id=name, **figures))

        self.call(work())

    def ask(self, name: str, tokens: list[int], **plan: Any) -> None:
        """Plan, store and load a request."""

        async def work() -> None:
            if plan:
                self.engine.planned(RequestPlan(request_id=name, prompt_tokens=len(tokens), **plan))
            await self.engine.store(tokens, list(range(len(tokens))), request_id=name)
            await self.engine.retrieve(tokens, list(range(len(tokens))), request_id=name)

        self.call(work())

    def close(self) -> None:
        with contextlib.suppress(EngineClosedError):  # closed before
            self.call(self._stack.aclose())
        self._thread.close()

    async def _open(self) -> CacheEngine:
        self._stack = contextlib.AsyncExitStack()
        return await self._stack.enter_async_context(self.rig.open(**self._settings))


@contextlib.contextmanager
def served(**settings: Any) -> Iterator[Served]:
    one = Served(Rig(model=settings.pop("model", "test")), **settings)
    try:
        yield one
    finally:
        one.close()
