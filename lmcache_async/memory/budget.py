"""Byte reservations in FIFO order, for backpressure."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from lmcache_async.errors import BudgetExceededError


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    """Statistics of a `ByteBudget`. `waited` and `refused` count all reservations so far."""

    max_bytes: int  # the whole budget, or the lower value of `limit`
    used_bytes: int
    waiting: int
    waited: int
    refused: int  # with BudgetExceededError


class ByteBudget:
    """Limit on the bytes in use. Used on the thread of one event loop.

    Reservations are served in FIFO order, so smaller ones never overtake a large one.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        self.max_bytes = max_bytes
        self._limit = max_bytes
        self._used = 0
        self._waited = 0
        self._refused = 0
        # Not a deque: a waiter that times out is removed from the middle in O(1).
        self._waiters: OrderedDict[asyncio.Future[bool], int] = OrderedDict()

    def limit(self, nbytes: int) -> None:
        """Limit new reservations to `nbytes` bytes in total. Existing reservations are kept.

        A reservation within the whole budget is always granted when no other bytes are reserved.
        """
        _check(nbytes)
        self._limit = min(nbytes, self.max_bytes)
        self._serve()

    def reserve_nowait(self, nbytes: int) -> bool:
        """Reserve without waiting. Return False if the bytes are not free or other reservations wait."""
        _check(nbytes)
        if self._waiters or not self._fits(nbytes):
            return False
        self._used += nbytes
        return True

    async def reserve(self, nbytes: int, *, timeout_s: float) -> None:
        """Reserve bytes, waiting for releases if necessary. If the call is cancelled, nothing is reserved.

        Raises:
            BudgetExceededError: The reservation timed out, or (at once) exceeds the whole budget.
        """
        if self.reserve_nowait(nbytes):
            return
        if nbytes > self.max_bytes:
            self._refused += 1
            raise BudgetExceededError(f"{nbytes} bytes are more than the whole budget of {self.max_bytes}")
        self._waited += 1
        loop = asyncio.get_running_loop()
        granted = loop.create_future()
        self._waiters[granted] = nbytes
        timer = loop.call_later(timeout_s, _expire, granted)
        try:
            if await granted:
                return
            self._refused += 1
            raise BudgetExceededError(
                f"{nbytes} bytes were not free within {timeout_s} s: {self._used} of {self._limit} are in use"
            )
        except (asyncio.CancelledError, GeneratorExit):
            if granted.done() and not granted.cancelled() and granted.result():
                self.release(nbytes)
            raise
        finally:
            timer.cancel()
            if self._waiters.pop(granted, None) is not None:
                self._serve()  # the next reservation may be smaller and fit

    def release(self, nbytes: int) -> None:
        """Release reserved bytes.

        Raises:
            RuntimeError: Fewer bytes are reserved, so some were released twice.
        """
        _check(nbytes)
        if nbytes > self._used:
            raise RuntimeError(f"{nbytes} bytes released, but only {self._used} are reserved")
        self._used -= nbytes
        self._serve()

    def statistics(self) -> BudgetStatistics:
        return BudgetStatistics(
            max_bytes=self._limit,
            used_bytes=self._used,
            waiting=len(self._waiters),
            waited=self._waited,
            refused=self._refused,
        )

    def _fits(self, nbytes: int) -> bool:
        return self._used + nbytes <= (self._limit if self._used else self.max_bytes)

    def _serve(self) -> None:
        while self._waiters:
            granted, nbytes = next(iter(self._waiters.items()))
            if not granted.done():  # done: it was cancelled or timed out, and its task has not run yet
                if not self._fits(nbytes):
                    return
                # Counted here and not by the waiter, so that no other call takes the bytes before it runs.
                self._used += nbytes
                granted.set_result(True)
            del self._waiters[granted]


def _expire(granted: asyncio.Future[bool]) -> None:
    if not granted.done():
        granted.set_result(False)


def _check(nbytes: int) -> None:
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative, got {nbytes}")
