"""Event loops that fail on demand, to test the loop thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import uvloop

from lmcache_async.engine import loop as loop_module


class BrokenLoops:
    """Makes the loops of LoopThreads breakable, from its construction to the end of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        is_broken = self._is_broken = threading.Event()

        class BrokenLoop(uvloop.Loop):
            def run_forever(self) -> None:
                if is_broken.is_set():
                    is_broken.clear()  # only once: the thread cleans up on the same loop
                    raise OSError("the selector is closed")
                super().run_forever()

        monkeypatch.setattr(loop_module.uvloop, "new_event_loop", BrokenLoop)

    def break_one(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Make the loop of `call_soon` raise OSError."""

        def stop() -> None:
            self._is_broken.set()
            asyncio.get_running_loop().stop()

        call_soon(stop)
