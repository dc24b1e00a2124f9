"""Event loops that fail for good on demand: what a loop thread does then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import uvloop

from lmcache_async.engine import loop as loop_module


class BrokenLoops:
    """The loops of LoopThreads made from now on, until the test ends, can be broken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        is_broken = self._is_broken = threading.Event()

        class BrokenLoop(uvloop.Loop):
            def run_forever(self) -> None:
                if is_broken.is_set():
                    is_broken.clear()  # once: the thread cleans up on the same loop
                    raise OSError("the selector is closed")
                super().run_forever()

        monkeypatch.setattr(loop_module.uvloop, "new_event_loop", BrokenLoop)

    def break_one(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """End the loop on which `call_soon` calls."""

        def stop() -> None:
            self._is_broken.set()
            asyncio.get_running_loop().stop()

        call_soon(stop)
