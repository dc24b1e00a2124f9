"""The arena's memory in the client's hands, and when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_async.memory.buffer import Bytes


class Loan:
    """An array that is given away once, and the moment when nobody has it any more.

    The client sends straight out of the memory it is given, from threads of its own, and says nothing
    of when it has let go: it may do so after it has answered. But it holds the array as long as it
    looks there, and so a weak reference tells.
    """

    def __init__(self, array: Bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._back = self._loop.create_future()
        self._array: Bytes | None = array
        self._guard = weakref.ref(array, self._gone)

    def take(self) -> Bytes:
        """The array, which the caller keeps in no variable."""
        array, self._array = self._array, None
        assert array is not None
        return array

    async def ended(self, *, timeout_s: float) -> bool:
        """Wait until nobody has the array; False when that took too long. The slab is not used again before."""
        self._array = None
        done, _ = await asyncio.wait([self._back], timeout=timeout_s)
        return bool(done)

    def _gone(self, _: weakref.ref[Bytes]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed under us
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self._back.done():
            self._back.set_result(None)
