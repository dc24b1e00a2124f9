"""A real engine with its status page on its own thread."""

from __future__ import annotations

import contextlib
from typing import Any

from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import EngineClosedError
from lmcache_async.testing.rig import Rig
from lmcache_async.types import RequestPlan

DEADLINE_S = 150


class Served:
    """An engine with a status page. Attributes: url: Address of the page."""

    def __init__(self, *, model: str = "test", **settings: Any) -> None:
        opening = Rig(model=model).open(**{"http.listen": "127.0.0.1:0", **settings})
        self._thread = LoopThread("test-engine")
        self._stack = contextlib.AsyncExitStack()
        self._engine = self._call(self._stack.enter_async_context(opening))
        self.url: str = self._engine.status_url

    def plan(self, name: str, **figures: Any) -> None:
        """Plan a request without loading it."""

        async def work() -> None:
            self._engine.planned(RequestPlan(request_id=name, **figures))

        self._call(work())

    def ask(self, name: str, tokens: list[int], **plan: Any) -> None:
        """Plan, store and load a request."""

        async def work() -> None:
            await self._engine.store(tokens, list(range(len(tokens))), request_id=name)
            await self._engine.retrieve(tokens, list(range(len(tokens))), request_id=name)

        if plan:
            self.plan(name, prompt_tokens=len(tokens), **plan)
        self._call(work())

    def close(self) -> None:
        with contextlib.suppress(EngineClosedError):  # closed before
            self._call(self._stack.aclose())
        self._thread.close()

    def _call(self, work: Any) -> Any:
        return self._thread.submit(work).result(DEADLINE_S)


def served(**settings: Any) -> contextlib.closing[Served]:
    return contextlib.closing(Served(**settings))
