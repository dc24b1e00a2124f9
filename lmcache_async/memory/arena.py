"""Host memory in fixed-size slabs, leased in FIFO order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_async.errors import BudgetExceededError, ConfigError
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.buffer import Buffer, Slab, pages
from lmcache_async.memory.region import Region

logger = LimitedLogger(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Statistics of an `Arena`.

    Attributes:
        num_slabs: Number of slabs.
        slab_bytes: Bytes of each slab.
        leased_slabs: Slabs that are not free: leased, reserved for the first waiter, or lingering.
        peak_leased_slabs: Maximum of `leased_slabs` so far.
        lingering_slabs: Slabs without a lease that are still used by an array, a tensor or a slice.
        waiting: Calls that are waiting.
        timeouts: Calls that received fewer slabs than requested because of their timeout.
        reclaimed_slabs: Slabs freed by reclaimers.
        pinned_bytes: Bytes of the region that are pinned for CUDA.
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
    """Region of host memory, divided into slabs that are leased in O(1).

    Used on the thread of one event loop. Calls are served in FIFO order. Only the first waiter collects
    slabs, until its timeout, so that two calls cannot deadlock with half of their slabs each.

    Args:
        max_bytes: Bytes of the region.
        slab_bytes: Bytes of the largest record; rounded up to a multiple of 4096.
        pin: Pin the memory for CUDA, in the background; no effect without CUDA.
        pin_device: CUDA device for pinning; None for the current device of the calling thread.
        huge_pages: Request transparent huge pages.
        prefault: Fault the pages in, in the background.

    Raises:
        ConfigError: `max_bytes` is less than one slab, or the memory cannot be allocated.
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
        self.slab_bytes = pages(slab_bytes)
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
        # This list keeps the slabs alive. Otherwise only callbacks of weak references would refer to them.
        self._slabs = [Slab(self._region, i, self.slab_bytes, self) for i in range(self.num_slabs)]
        self._free = self._slabs[::-1]  # a stack: the slab used last is likely in a CPU cache
        self._idle: deque[Slab] = deque()  # also free, appended by any thread
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
        """All slabs as one memoryview, for transports that register memory."""
        return self._region.view

    @property
    def address(self) -> int:
        return self._region.address

    def lease_nowait(self, nbytes: int) -> Buffer | None:
        """Lease a slab without waiting.

        Returns:
            The buffer; None if no slab is free and reclaimers free none, other calls wait, `nbytes` exceeds a slab, or
            the arena is closed.
        """
        if not self._fits(nbytes) or self._waiters:
            return None
        slabs = self._take(1)
        self._active += len(slabs)
        return Buffer(slabs[0], nbytes) if slabs else None

    async def lease(self, nbytes: int, *, timeout_s: float) -> Buffer:
        """Lease a slab, waiting for other leases to be released if necessary.

        If the call is cancelled, nothing is leased.

        Args:
            nbytes: Bytes of the buffer.
            timeout_s: Longest wait in seconds.

        Raises:
            BudgetExceededError: No slab became free within `timeout_s`. Raised at once if `nbytes` exceeds a
                slab or the arena is closed.
        """
        if not self._fits(nbytes):
            raise BudgetExceededError(f"{nbytes} bytes are more than a slab of {self.slab_bytes}")
        buffer = self.lease_nowait(nbytes)
        if buffer is not None:
            return buffer
        if slabs := await self._wait(1, timeout_s):
            self._active += 1
            return Buffer(slabs[0], nbytes)
        if self._closed:
            raise BudgetExceededError("the arena is closed")
        raise BudgetExceededError(f"none of {self.num_slabs} slabs became free within {timeout_s} s")

    async def lease_many(self, sizes: Sequence[int], *, timeout_s: float) -> list[Buffer]:
        """Lease slabs for as many leading `sizes` as become free within `timeout_s`, possibly none.

        At most `num_slabs` are leased. A size that exceeds a slab and all sizes after it get no slab, and the call does
        not wait for them. If the call is cancelled, nothing is leased.

        Args:
            sizes: Bytes of each buffer.
            timeout_s: Longest wait in seconds.
        """
        wanted = min(len(sizes), self.num_slabs)
        if wanted and not (min(sizes) >= 0 and max(sizes) <= self.slab_bytes):
            wanted = next((i for i in range(wanted) if not self._fits(sizes[i])), wanted)
        if not wanted:
            return []
        self._collect()
        if self._waiters or len(self._free) < wanted:
            slabs = await self._wait(wanted, timeout_s)
        else:
            slabs = self._take(wanted)
        self._active += len(slabs)
        return [Buffer(slab, nbytes) for slab, nbytes in zip(slabs, sizes, strict=False)]

    def add_reclaimer(self, reclaim: Callable[[int], int]) -> None:
        """Add a function that frees slabs on demand.

        Args:
            reclaim: `reclaim(wanted)` is called when `wanted` slabs are missing. It releases leases and
                returns their number. It is called on the thread of the arena, within `lease*` or, while a
                call waits, after a release. It must not block.
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
        """Block the thread until prefault and pinning have ended, at most `timeout_s` seconds.

        Returns:
            Whether they have ended.
        """
        return self._region.wait_prepared(timeout_s)

    def close(self) -> None:
        """Stop leasing. Waiting calls return the slabs they have.

        The memory is unmapped when every slab is free.
        """
        self._closed = True
        self._region.stop()
        for waiter in self._waiters:
            if not waiter.complete.done():
                waiter.complete.set_result(None)
        self._waiters.clear()
        self._unmap_if_unused()

    # SlabOwner

    def lease_ended(self, slab: Slab) -> None:
        if slab.leases == 0:
            self._active -= 1
        if self._waiters:  # even if the slab is not free: a reclaimer may be able to release its other lease
            self._serve_soon()

    def slab_idle(self, slab: Slab) -> None:
        self._idle.append(slab)
        if self._closed:
            self._unmap_if_unused()
        elif self._waiters:
            self._serve_soon()

    def _fits(self, nbytes: int) -> bool:
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        return nbytes <= self.slab_bytes

    async def _wait(self, wanted: int, timeout_s: float) -> list[Slab]:
        """Wait for `wanted` slabs and take as many as become free in time. If cancelled, free all of them again."""
        self._loop = asyncio.get_running_loop()
        waiter = _Waiter(wanted, self._loop.create_future())
        # Queue first, then serve, so that a slab freed by another thread in between is not missed.
        self._waiters[waiter] = None
        self._serve()
        if waiter not in self._waiters:
            return waiter.slabs
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.complete
        except TimeoutError:
            self._timeouts += len(waiter.slabs) < wanted
        except (asyncio.CancelledError, GeneratorExit):
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
            if not waiter.complete.done():  # done: its task was cancelled and has not run yet
                waiter.slabs += self._take(waiter.wanted - len(waiter.slabs))
                if len(waiter.slabs) < waiter.wanted and not self._closed:
                    return
                waiter.complete.set_result(None)
            del self._waiters[waiter]

    def _serve_soon(self) -> None:
        """Serve waiters in the next iteration of the loop, not within the current release. Thread-safe."""
        if not self._waiters or self._serve_is_due or self._loop is None:
            return
        self._serve_is_due = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._serve)

    def _take(self, wanted: int) -> list[Slab]:
        if self._closed:
            return []
        self._collect()
        if len(self._free) < wanted:
            self._reclaim(wanted - len(self._free))
        count = min(wanted, len(self._free))
        slabs = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        self._peak = max(self._peak, self.num_slabs - len(self._free))
        return slabs

    def _reclaim(self, wanted: int) -> None:
        if self._reclaiming:  # a reclaimer called `lease*`
            return
        self._reclaiming = True
        try:
            for reclaim in self._reclaimers:
                before = len(self._free)
                try:
                    reclaim(wanted)
                except BaseException as error:  # noqa: BLE001  # must not fail the lease of another caller
                    kind = type(error).__name__
                    logger.report(f"reclaim.{kind}", "a reclaimer raised %s: %s", kind, describe(error))
                self._collect()
                freed = len(self._free) - before  # not what `reclaim` returned: a lingering slab is not free
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
            for slab in self._slabs:
                slab.forget_bytes()
            self._region.close()
