"""A browser beside a test: the test waits on its own thread, the browser is driven on another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, Self

from tools.devtools import Page, open_page

DEADLINE_S = 120


class Browser:
    """A page on a loop of its own, for tests that wait on their own thread."""

    page: Page

    def __init__(self) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="browser", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def goto(self, url: str) -> None:
        self.page.events.clear()
        self.run(self.page.goto(url))

    def until(self, script: str) -> Any:
        return self.run(self.page.until(script))

    def evaluate(self, script: str) -> Any:
        return self.run(self.page.evaluate(script))

    def until_logged(self, words: str) -> None:
        """Wait for a line on the console, which comes by an event of its own."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(words in line for line in self.page.logged()):
            assert time.monotonic() < deadline, self.page.logged()
            self.evaluate("0")

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with open_page() as self.page:
                await self.page.resize(1280, 900)
                self._started.set()
                await self._stop.wait()
        except BaseException as error:  # noqa: BLE001 - raised where the browser was to start
            self._error = error
            self._started.set()
