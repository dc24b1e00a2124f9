"""Host memory in fixed slabs, leased in the order it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.errors import BudgetExceededError, ConfigError
from lmcache_async.memory.buffer import PAGE, Buffer, Slab
from lmcache_async.memory.region import Region
from lmcache_async.observability.logging import LimitedLogger, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = LimitedLogger(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """What an arena holds.

    Attributes:
        num_slabs: Slabs in all.
        slab_bytes: Bytes of each.
        leased_slabs: Slabs that are not free: leased, set aside for the first waiter, or lingering.
        peak_leased_slabs: The most that were ever not free at one time.
        lingering_slabs: Slabs without a lease that an array, a tensor or a slice still looks at.
        waiting: Calls that wait now.
        timeouts: Calls that got less than they asked for within their deadline.
        reclaimed_slabs: Slabs that reclaimers gave up.
        pinned_bytes: How much of the region CUDA can copy from and to by itself.
    """

    num_slabs: int
    slab_bytes: int
    leased_slabs: int
    peak_leased_slabs: int
    lingering_slabs: int
    waiting: int
    timeouts: int
    reclaimed_slabs: int
    pinned_bytes: int


@dataclass(slots=True, eq=False)
class _Waiter:
    wanted: int
    complete: asyncio.Future[None]
    slabs: list[Slab] = field(default_factory=list)


class Arena:
    """One region of host memory, carved into slabs that are leased in O(1).

    Used on one event loop's thread. Calls are served in the order they came; only the first in line
    collects slabs, so that two calls never hold half of what each needs, and until its deadline.

    Args:
        max_bytes: Bytes of the region.
        slab_bytes: Bytes of the largest record; rounded up to a multiple of 4096.
        pin: Pin the memory for CUDA, in the background; without CUDA this does nothing.
        pin_device: The CUDA device to do that with; None is the calling thread's current one.
        huge_pages: Ask the kernel for huge pages.
        prefault: Fault the pages in, in the background.

    Raises:
        ConfigError: `max_bytes` holds no slab, or the memory is not to be had.
    """

    def __init__(
        self,
        max_bytes: int,
        slab_bytes: int,
        *,
        pin: bool = False,
        pin_device: int | None = None,
        huge_pages: bool = True,
        prefault: bool = True,
    ) -> None:
        if slab_bytes <= 0:
            raise ValueError(f"slab_bytes must be positive, got {slab_bytes}")
        self.slab_bytes = -(-slab_bytes // PAGE) * PAGE
        self.num_slabs = max_bytes // self.slab_bytes
        if self.num_slabs < 1:
            raise ConfigError(
                f"arena.max_bytes is {max_bytes}, but one chunk needs {self.slab_bytes} bytes:"
                " raise arena.max_bytes or lower chunk_size"
            )
        self.pin, self.pin_device = pin, pin_device
        self._region = Region(
            self.num_slabs * self.slab_bytes,
            grain_bytes=self.slab_bytes,
            pin=pin,
            pin_device=pin_device,
            huge_pages=huge_pages,
            prefault=prefault,
        )
        # Held here: one that only its own weak reference's callback knows would be garbage, and lost.
        self._slabs = [Slab(self._region, i, self.slab_bytes, self) for i in range(self.num_slabs)]
        self._free = self._slabs[::-1]  # a stack: the slab used last is likely in a cache
        self._idle: deque[Slab] = deque()  # free as well, put here by any thread
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._reclaimers: list[Callable[[int], int]] = []
        self._reclaiming = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serve_is_due = False
        self._active = 0  # slabs with a lease
        self._peak = self._timeouts = self._reclaimed = 0

    @property
    def region(self) -> memoryview:
        """All slabs, in one piece, for transports that register memory."""
        return self._region.view

    @property
    def address(self) -> int:
        return self._region.address

    def lease_nowait(self, nbytes: int) -> Buffer | None:
        """A buffer now; None when no slab is free, reclaimers give none, or others wait."""
        if not self._fits(nbytes) or self._waiters:
            return None
        slabs = self._take(1)
        return self._lease(slabs[0], nbytes) if slabs else None

    async def lease(self, nbytes: int, *, timeout_s: float) -> Buffer:
        """A buffer, waiting for others to be released. Cancelled, nothing is leased.

        Raises:
            BudgetExceededError: Not to be had within `timeout_s`; or, at once, `nbytes` is more than a
                slab or the arena is closed.
        """
        if not self._fits(nbytes):
            raise BudgetExceededError(f"{nbytes} bytes are more than a slab of {self.slab_bytes}")
        buffer = self.lease_nowait(nbytes)
        if buffer is not None:
            return buffer
        slabs = await self._wait(1, timeout_s)
        if slabs:
            return self._lease(slabs[0], nbytes)
        if self._closed:
            raise BudgetExceededError("the arena is closed")
        raise BudgetExceededError(f"none of {self.num_slabs} slabs came free within {timeout_s} s")

    async def lease_many(self, sizes: Sequence[int], *, timeout_s: float) -> list[Buffer]:
        """Buffers for as many leading `sizes` as come free within `timeout_s`, maybe none.

        It does not wait for what can never be: at most `num_slabs` are given, and none from the
        first size on that is larger than a slab. Cancelled, nothing is leased.
        """
        wanted = 0
        while wanted < min(len(sizes), self.num_slabs) and self._fits(sizes[wanted]):
            wanted += 1
        slabs = await self._wait(wanted, timeout_s) if wanted else []
        return [self._lease(slab, nbytes) for slab, nbytes in zip(slabs, sizes, strict=False)]

    def add_reclaimer(self, reclaim: Callable[[int], int]) -> None:
        """`reclaim(wanted)` is called when `wanted` slabs are missing; it releases and says how many.

        It runs on the arena's thread inside `lease*`, or by itself while a call waits and after any
        release. It must not wait.
        """
        self._reclaimers.append(reclaim)

    def statistics(self) -> ArenaStatistics:
        self._collect()
        used = self.num_slabs - len(self._free)
        set_aside = sum(len(waiter.slabs) for waiter in self._waiters)
        return ArenaStatistics(
            num_slabs=self.num_slabs,
            slab_bytes=self.slab_bytes,
            leased_slabs=used,
            peak_leased_slabs=self._peak,
            lingering_slabs=max(0, used - self._active - set_aside),
            waiting=len(self._waiters),
            timeouts=self._timeouts,
            reclaimed_slabs=self._reclaimed,
            pinned_bytes=self._region.pinned_bytes,
        )

    def wait_prepared(self, timeout_s: float) -> bool:
        """Block the thread until prefault and pinning have ended; whether they have."""
        return self._region.wait_prepared(timeout_s)

    def close(self) -> None:
        """Lease no more; who waits gets what it has. Memory still leased stays until it is released."""
        self._closed = True
        self._region.stop()
        for waiter in self._waiters:
            if not waiter.complete.done():
                waiter.complete.set_result(None)
        self._waiters.clear()
        self._unmap_if_unused()

    # What slabs tell us.

    def lease_ended(self, slab: Slab) -> None:
        if slab.leases == 0:
            self._active -= 1
        # Even if the slab is not free: a reclaimer may hold its other lease, and could not give it up before.
        self._serve_soon()

    def slab_idle(self, slab: Slab) -> None:
        self._idle.append(slab)
        if self._closed:
            self._unmap_if_unused()
        else:
            self._serve_soon()

    # Taking and waiting.

    def _fits(self, nbytes: int) -> bool:
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        return nbytes <= self.slab_bytes

    def _lease(self, slab: Slab, nbytes: int) -> Buffer:
        self._active += 1
        return Buffer(slab, nbytes)

    async def _wait(self, wanted: int, timeout_s: float) -> list[Slab]:
        """Up to `wanted` slabs. Cancelled, it gives them all back."""
        self._loop = asyncio.get_running_loop()
        waiter = _Waiter(wanted, self._loop.create_future())
        # First in line, then served: one of the two sees a slab that another thread frees in between.
        self._waiters[waiter] = None
        self._serve()
        if waiter not in self._waiters:
            return waiter.slabs
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.complete
        except TimeoutError:
            self._timeouts += len(waiter.slabs) < wanted
        except asyncio.CancelledError:
            self._free.extend(waiter.slabs)
            self._unmap_if_unused()
            raise
        finally:
            self._waiters.pop(waiter, None)
            self._serve_soon()
        return waiter.slabs

    def _serve(self) -> None:
        self._serve_is_due = False
        while self._waiters:
            waiter = next(iter(self._waiters))
            if not waiter.complete.done():  # else its task was cancelled, and has not run yet
                waiter.slabs += self._take(waiter.wanted - len(waiter.slabs))
                if len(waiter.slabs) < waiter.wanted and not self._closed:
                    return
                waiter.complete.set_result(None)
            del self._waiters[waiter]

    def _serve_soon(self) -> None:
        """Serve in the loop's next turn, from any thread; not now, within somebody's release."""
        if not self._waiters or self._serve_is_due or self._loop is None:
            return
        self._serve_is_due = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
            self._loop.call_soon_threadsafe(self._serve)

    def _take(self, wanted: int) -> list[Slab]:
        if self._closed:
            return []
        self._collect()
        if len(self._free) < wanted:
            self._reclaim(wanted - len(self._free))
        count = min(wanted, len(self._free))
        slabs = [self._free.pop() for _ in range(count)]
        self._peak = max(self._peak, self.num_slabs - len(self._free))
        return slabs

    def _reclaim(self, wanted: int) -> None:
        if self._reclaiming:  # a reclaimer asked for a lease itself
            return
        self._reclaiming = True
        try:
            for reclaim in self._reclaimers:
                before = len(self._free)
                try:
                    reclaim(wanted)
                except BaseException as error:  # noqa: BLE001  # a plug-in's; who wants memory is another one
                    kind = type(error).__name__
                    logger.report(f"reclaim.{kind}", "a reclaimer raised %s: %s", kind, describe(error))
                self._collect()
                freed = len(self._free) - before  # counted here: a slab that is still looked at is not free
                self._reclaimed += freed
                wanted -= freed
                if wanted <= 0:
                    return
        finally:
            self._reclaiming = False

    def _collect(self) -> None:
        while self._idle:
            self._free.append(self._idle.popleft())

    def _unmap_if_unused(self) -> None:
        if self._closed and len(self._free) + len(self._idle) == self.num_slabs:
            self._region.close()
