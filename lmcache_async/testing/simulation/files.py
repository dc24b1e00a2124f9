"""The real disk tier in simulation: its threads are steps of the loop, its files lie in a temporary directory."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from lmcache_async.tiers.base import Tier


class Disk:
    """Makes tiers of the given class, whose clock is the loop's, and closes what a crash leaves open.

    A real crash closes files and ends locks by itself; here the process goes on, so this has to.

    Args:
        tier_class: The disk tier's, as its entry point gives it.
    """

    def __init__(self, tier_class: type[Tier]) -> None:
        self._open: list[Any] = []
        self.tier_class = type("SimulatedDiskTier", (_VirtualClock, tier_class), {"disk": self})

    def opened(self, store: Any) -> None:
        """A tier has opened its records; its stamps are to be the same in every run."""
        loop = asyncio.get_running_loop()
        store.index._clock_ns = lambda: int(loop.time() * 1e9)
        self._open.append(store)

    def let_go(self) -> None:
        """After a process, however it ended: files are as the last finished call of a thread left them."""
        for store in self._open:
            store.close()
        self._open.clear()


class _VirtualClock(Tier):
    """Before a disk tier in the order of its classes."""

    disk: Disk
    _opened: Any

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.disk.opened(self._opened)
        return self
