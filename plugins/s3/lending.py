"""Arena memory that is lent to the client of an object store."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_async.memory.buffer import Bytes


class Loan:
    """An array that is passed to the client once, and the end of its use.

    The client sends directly from the memory, in threads of its own, and may use it even after it has
    answered. It keeps a reference to the array for as long as it uses the memory, so a weak reference reports
    the end.
    """

    def __init__(self, array: Bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._back = self._loop.create_future()
        self._array: Bytes | None = array
        self._guard = weakref.ref(array, self._gone)

    def take(self) -> Bytes:
        """Return the array. The caller must not keep it in a variable."""
        array, self._array = self._array, None
        assert array is not None
        return array

    async def ended(self, *, timeout_s: float) -> bool:
        """Wait until nothing refers to the array. Return False after `timeout_s` seconds.

        The slab is not reused while the array exists.
        """
        self._array = None
        done, _ = await asyncio.wait([self._back], timeout=timeout_s)
        return bool(done)

    def _gone(self, _: weakref.ref[Bytes]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self._back.done():
            self._back.set_result(None)
