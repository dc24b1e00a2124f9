"""A gate in front of a function that threads call."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

WAIT_S = 150.0


class Gate:
    """A replacement of the function `name` of `owner` that blocks while the gate is shut.

    Attributes:
        calls: Number of calls that were blocked.
        threads: Threads that called the function.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *, shut: bool = False
    ) -> None:
        self.calls = 0
        self.threads: set[int] = set()
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()
        if not shut:
            self._open.set()
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.threads.add(threading.get_ident())
            if not self._open.is_set():
                self.calls += 1
                self._entered.release()
                assert self._open.wait(WAIT_S)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, call)

    async def reached(self) -> None:
        """Wait until a call is blocked."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=WAIT_S)

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()
        self._entered = threading.Semaphore(0)
