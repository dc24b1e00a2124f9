"""Copier of a paged cache on a GPU. Rows are gathered in device memory and cross the bus in long pieces.

A batch is cut into parts. Each part of a lane has its own stream, staging memory and table of row
addresses. One launch gathers the rows of a part, of all planes, into staging; each payload piece is then one
long copy. Parts run on different streams, so that the bus is not idle during a launch. On the host only the
threads of the lanes and of the fences wait. The stream of the model never waits.

A copy takes a part when its fence is reached. Otherwise copies whose fences are reached later would occupy all parts, and
all copies would end after the last of these fences.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from lmcache_async.device.copier import CheckedJob, CopyJob, DeviceEvent, Fence, Payload, check_jobs
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.movers import Mover, open_mover
from lmcache_async.device.plan import Piece, PlaneTable, cut, segments
from lmcache_async.device.planes import Int64s
from lmcache_async.device.progress import LoadProgress
from lmcache_async.errors import EngineClosedError
from lmcache_async.memory.region import cuda_thread
from lmcache_async.memory.threads import run_shielded

logger = logging.getLogger(__name__)

PARTS = 3
"""Parts of each lane: one on the bus, one gathering, one in transit to or from the thread of the loop. Four smaller ones have
more pieces and kernels for the same bytes, which take longer."""

MIN_POLL_S, MAX_POLL_S = 50e-6, 5e-3
"""Shortest and longest time between two queries of a fence."""

SHORT_POLL_S, LATE = 1e-3, 1 / 8
"""A fence is noticed at most `SHORT_POLL_S` late, or `LATE` times the time for which it was awaited."""

MAX_ENTRIES = 1 << 17
"""Maximum rows of a part. It limits the table to 3 MiB and is only reached by rows of 128 bytes or less."""


Prepared: TypeAlias = AbstractContextManager[Any]
_Watched: TypeAlias = "tuple[Any, asyncio.AbstractEventLoop, Callable[[Exception | None], None]]"


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Numbers of parts of a lane, of free parts, of callers that wait for one, and of callers that had to wait so far."""

    parts: int
    free: int
    waiting: int
    waited: int


class EventThread:
    """Thread that waits for events of a device, in the order of the calls of `watch`.

    An event that is reached early is noticed only after the events before it.

    Args:
        name: Name of the thread.
        prepare: Context in which the thread waits.
    """

    def __init__(self, name: str, prepare: Callable[[], Prepared] = contextlib.nullcontext) -> None:
        self.closed = False
        self._watched: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    def watch(self, event: Any, noticed: Callable[[], object] = lambda: None) -> asyncio.Future[None]:
        """Return a future that is resolved when the device has reached `event`, or failed.

        Args:
            event: The event.
            noticed: Called on the event loop before the future is resolved, also if the future was cancelled.

        Raises:
            EngineClosedError: The thread is closed.
        """
        if self.closed:
            raise EngineClosedError("the copier is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            noticed()
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._watched.put((event, loop, settle))
        return future

    def close(self) -> None:
        """Wait for all watched events, then end the thread. Idempotent, also after an interrupted call."""
        if not self.closed:
            self.closed = True
            self._watched.put(None)
        self._thread.join()

    def _run(self, prepare: Callable[[], Prepared]) -> None:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Exception):  # the events then report what is wrong
                stack.enter_context(prepare())
            self._wait()

    def _wait(self) -> None:
        while (watched := self._watched.get()) is not None:
            _settle(watched, _synchronized)
            del watched  # its future may have an error, whose traceback keeps payloads in use


class FenceThread(EventThread):
    """Thread that polls fences. Each is noticed when it is reached, whatever the order of the calls of `watch`.

    Args:
        name: Name of the thread.
        reached: Returns whether a fence is reached, without waiting. Raises the error of the device.
        prepare: Context in which the thread waits.
    """

    def __init__(self, name: str, reached: Callable[[Fence], bool], prepare: Callable[[], Prepared]) -> None:
        self._reached = reached
        super().__init__(name, prepare)

    def _wait(self) -> None:
        pending: dict[Fence, list[_Watched]] = {}  # a fence may be that of many copies
        interval = MIN_POLL_S
        since = 0.0  # time of the latest call of `watch`
        is_open = True
        while is_open or pending:
            try:
                watched = self._watched.get(timeout=interval if pending else None)
            except queue.Empty:
                interval = next_poll_s(interval, time.monotonic() - since)
            else:
                interval, since = MIN_POLL_S, time.monotonic()
                if watched is None:
                    is_open = False
                else:
                    pending.setdefault(watched[0], []).append(watched)
                del watched
            self._poll(pending)

    def _poll(self, pending: dict[Fence, list[_Watched]]) -> None:
        """Query each fence once, and remove those that are reached or have failed."""
        for fence, copies in list(pending.items()):
            if _settle(copies[0], self._reached):
                # Each gets an error of its own. After an error that does not last, the next query may return False.
                copies[:] = [each for each in copies[1:] if not _settle(each, self._reached)]
                if not copies:
                    del pending[fence]


def next_poll_s(last_s: float, waited_s: float) -> float:
    """Return the time until the next query of a fence.

    Each query takes the GIL, which delays the thread that launches the kernels of the model.

    Args:
        last_s: The time between the last two queries.
        waited_s: How long the fence has been awaited.
    """
    return min(2 * last_s, max(SHORT_POLL_S, waited_s * LATE), MAX_POLL_S)


def _synchronized(event: DeviceEvent) -> bool:
    event.synchronize()
    return True


def _settle(watched: _Watched, reached: Callable[[Any], bool]) -> bool:
    """Settle a watched event if `reached` returns True or raises. Return whether it did."""
    event, loop, settle = watched
    error: Exception | None = None
    try:
        if not reached(event):
            return False
    except Exception as failure:  # noqa: BLE001  set on the future
        error = failure
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle, error)
    # Break the reference cycle of the error and this frame: the traceback refers to payloads, which keep slabs in use.
    del watched, event, settle, error
    return True


class Lane:
    """Parts of one direction, and a thread that waits for their events. Used on the thread of one event loop.

    Args:
        name: Name of the thread.
        parts: The parts, lent to one caller each.
        prepare: Context in which the thread waits.
    """

    def __init__(
        self, name: str, parts: Sequence[Part], prepare: Callable[[], Prepared] = contextlib.nullcontext
    ) -> None:
        self._size = len(parts)
        self._free = deque(parts)
        self._lent = 0
        self._turns = asyncio.Semaphore(len(parts))
        self._waiting = self._waited = 0
        self._events = EventThread(name, prepare)

    async def acquire(self) -> Part:
        """Wait for a free part and take it, in FIFO order. If the call is cancelled, no part is taken.

        Raises:
            EngineClosedError: The lane is closed.
        """
        self._waiting += 1
        self._waited += self._turns.locked()
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        if self._events.closed:
            self._turns.release()
            raise EngineClosedError("the copier is closed")
        self._lent += 1
        return self._free.popleft()

    def release(self, part: Part) -> None:
        if not self._events.closed:
            self._free.append(part)
        self._lent -= 1
        self._turns.release()

    def watch(self, part: Part, event: DeviceEvent) -> asyncio.Future[None]:
        """Release the part and resolve the returned future when the device has reached `event`, or failed.

        Raises:
            EngineClosedError: The lane is closed.
        """
        return self._events.watch(event, lambda: self.release(part))

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(self._size, self._size - self._lent, self._waiting, self._waited)

    def close(self) -> None:
        """Wait for all watched events, then end the thread and free the parts. Idempotent."""
        self._events.close()
        self._free.clear()


class Streams(Protocol):
    """CUDA operations of the copier, replaced by a fake in tests without a GPU. `stream` is opaque."""

    def thread(self) -> Prepared:
        """Prepare the calling thread in the block, in which it only waits for events of the device."""

    def open(self, priority: int) -> Any:
        """Create a side stream. Priority 0 is the lowest, that of the model's streams; -1 is above it."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the current stream of this thread in the block."""

    def record(self, stream: Any, *, spin: bool = False) -> DeviceEvent:
        """Record an event after all work submitted to `stream`.

        Args:
            spin: The thread that waits for the event busy-waits, and so notices it sooner.
        """

    def end_of(self, stream: Any) -> DeviceEvent:
        """Return an event of all work submitted to `stream`, without a call of CUDA."""

    def record_current(self) -> Fence:
        """Record a fence after all work submitted to the current stream of this thread."""

    def reached(self, fence: Fence) -> bool:
        """Return whether the device has reached the fence, without waiting. Raises the error of the device."""

    def wait(self, stream: Any, fence: Fence) -> None:
        """Let work submitted to `stream` from now on run after the fence. The host does not wait."""

    def pinned(self, num_words: int) -> torch.Tensor:
        """Allocate pinned host memory: int64 of shape (num_words,)."""


class PolledEvent:
    """Event of torch.cuda that is polled.

    With a blocking event no thread would be busy, but when 56 of them are pending, the call that records another one blocks
    until one is reached (H100, CUDA 13.0). Fences are recorded on the model's thread, and their number has no bound.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event
        self.reached = False

    def query(self) -> bool:
        self.reached = self.reached or bool(self._event.query())  # type: ignore[no-untyped-call]
        return self.reached

    def wait(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class TorchStreams:
    """Streams of torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.index  # torch takes 25 us to convert a device to its index

    def thread(self) -> Prepared:
        return cuda_thread(self._device)

    def open(self, priority: int) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def use(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # `torch.cuda.stream` takes longer. At its end it also selects the previous device, which creates a context on that
        # device if it is not the device of the stream. `torch.cuda.device` does not.
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream(self._device)
            torch.cuda.set_stream(stream)
            try:
                yield
            finally:
                torch.cuda.set_stream(before)

    def record(self, stream: torch.cuda.Stream, *, spin: bool = False) -> DeviceEvent:
        event = torch.cuda.Event(blocking=not spin)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def end_of(self, stream: torch.cuda.Stream) -> DeviceEvent:
        return stream

    def record_current(self) -> PolledEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return PolledEvent(event)

    def reached(self, fence: Fence) -> bool:
        assert isinstance(fence, PolledEvent)
        if fence.reached:
            return True
        with self.thread():  # a query would invalidate a graph that another thread captures
            return fence.query()

    def wait(self, stream: torch.cuda.Stream, fence: Fence) -> None:
        assert isinstance(fence, PolledEvent)
        fence.wait(stream)

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int64, device="cpu", pin_memory=True)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Side stream and memory of one part in flight. The tables hold row positions, as int64."""

    stream: Any
    staging: torch.Tensor
    table: torch.Tensor
    host_table: torch.Tensor  # pinned
    positions: Int64s  # the memory of `host_table`


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Streams and staging memory of one or several copiers on a device.

    Stores and loads use separate lanes and never wait for each other.
    """

    streams: Streams
    store: Lane
    load: Lane
    fences: FenceThread
    part_bytes: int

    def close(self) -> None:
        for each in (self.fences, self.store, self.load):
            each.close()


class CudaCopier:
    """Copies through staging memory on side streams. See `open_cuda_copiers`.

    Payloads should be in pinned memory. Copies of pageable memory are correct, but block the event loop. The first
    `close` of several copiers with common lanes closes all of them.
    """

    def __init__(self, layout: KVLayout, mover: Mover, lanes: Lanes) -> None:
        self.layout = layout
        self.mover = mover
        self._lanes = lanes
        self._streams = lanes.streams
        self._table = PlaneTable(layout.planes)
        self._entries = _max_entries(layout, lanes.part_bytes)

    def fence(self) -> Fence | None:
        return self._streams.record_current()

    async def wait_fence(self, fence: Fence) -> None:
        if not self._streams.reached(fence):
            await self._lanes.fences.watch(fence)

    async def gather(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, *, digest: bool = False
    ) -> list[bytes] | None:
        del digest  # the device writes the payloads, so the host would have to read them again
        await self._run(jobs, fence, self._lanes.store)
        return None

    async def scatter(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, progress: LoadProgress | None = None
    ) -> None:
        del progress  # only the end of the whole load is reported
        await self._run(jobs, fence, self._lanes.load)

    def close(self) -> None:
        self._lanes.close()

    def statistics(self) -> tuple[LaneStatistics, LaneStatistics]:
        """Return the statistics of the lane of stores and of the lane of loads."""
        return self._lanes.store.statistics(), self._lanes.load.statistics()

    def copies(self, num_rows: Sequence[int]) -> list[int]:
        """Return the bytes of each copy over the bus for jobs with `num_rows` rows, none of them skipped."""
        return [piece.nbytes for pieces in self._cut(num_rows) for piece in pieces]

    async def _run(self, jobs: Sequence[CopyJob], fence: Fence | None, lane: Lane) -> None:
        checked: list[CheckedJob] = []
        running: list[asyncio.Future[None]] = []
        try:
            for pieces in self._cut([len(job.rows) for job in jobs]):
                self._check(jobs, checked, pieces[-1].job + 1, lane)
                if fence is not None:  # after the check, during which the fence may be reached
                    await self.wait_fence(fence)
                    fence = None
                part = await lane.acquire()
                try:
                    self._submit(part, checked, pieces, lane)
                finally:
                    # Also after an error: work submitted before it may still run.
                    # The thread of the lane waits for the parts before this one first, so it spins for the time of a part.
                    # A store of one part may be delayed by the kernels of the model, and is not urgent.
                    is_urgent = bool(running) or lane is self._lanes.load
                    spin = is_urgent and self._is_last(pieces[-1], jobs)
                    running.append(self._watch(part, lane, spin=spin))
            self._check(jobs, checked, len(jobs), lane)
        except BaseException as error:
            # A cancellation during the wait below refers to this error, whose frames keep the payloads.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            # The device uses payloads, tables and staging until it has finished, also after a cancellation.
            await run_shielded(asyncio.gather(*running, return_exceptions=True))
        try:
            list(map(asyncio.Future.result, running))  # no frame refers to a single future
        finally:
            running.clear()  # breaks the reference cycle of an error and this frame, which would keep the payloads

    def _check(self, jobs: Sequence[CopyJob], checked: list[CheckedJob], stop: int, lane: Lane) -> None:
        """Check the jobs before `stop` that are not checked yet. The first part need not wait for the check of all jobs."""
        start = len(checked)
        if start < stop:
            checked += check_jobs(
                self.layout, jobs[start:stop], writes_payload=lane is self._lanes.store, first=start
            )

    def _is_last(self, piece: Piece, jobs: Sequence[CopyJob]) -> bool:
        """Return whether no row of `jobs` follows the piece."""
        rows = len(jobs[-1].rows)
        return piece.job == len(jobs) - 1 and piece.stop == rows * self.layout.num_planes

    def _watch(self, part: Part, lane: Lane, *, spin: bool) -> asyncio.Future[None]:
        try:
            event = self._streams.record(part.stream, spin=spin)
        except Exception as error:  # noqa: BLE001  # such as no memory for the event; submitted work may still run
            logger.warning("no event could be recorded, waiting for the whole stream: %s", error)
            event = self._streams.end_of(part.stream)
        try:
            return lane.watch(part, event)
        except BaseException:
            lane.release(part)
            raise

    def _cut(self, counts: Sequence[int]) -> Iterator[list[Piece]]:
        return cut(self._table, counts, max_bytes=self._lanes.part_bytes, max_entries=self._entries)

    def _submit(
        self,
        part: Part,
        jobs: Sequence[CheckedJob],
        pieces: Sequence[Piece],
        lane: Lane,
    ) -> None:
        to_host = lane is self._lanes.store
        with self._streams.use(part.stream):
            if not to_host:  # first, so that the bus is busy while the table is filled
                self._copy_payloads(part.staging, jobs, pieces, to_host=False)
            steps = self.mover.fill(part.positions, jobs, pieces)
            entries = sum(piece.stop - piece.start for piece in pieces) * self.mover.columns
            part.table[:entries].copy_(part.host_table[:entries], non_blocking=True)
            self.mover.move(steps, part.table, part.staging, to_staging=to_host)
            if to_host:
                self._copy_payloads(part.staging, jobs, pieces, to_host=True)

    def _copy_payloads(
        self, staging: torch.Tensor, jobs: Sequence[CheckedJob], pieces: Sequence[Piece], *, to_host: bool
    ) -> None:
        sizes = [piece.nbytes for piece in pieces]
        staged = staging.narrow(0, 0, sum(sizes)).split_with_sizes(sizes)
        for piece, here in zip(pieces, staged, strict=True):
            job = jobs[piece.job]
            there = host_tensor(job.payload[piece.offset : piece.offset + piece.nbytes])
            if not to_host:
                here.copy_(there, non_blocking=True)
            elif not job.has_skips:
                there.copy_(here, non_blocking=True)
            else:  # staging has no data of skipped rows, and their payload bytes must not be written
                for low, high in self._present(job, piece):
                    there[low:high].copy_(here[low:high], non_blocking=True)

    def _present(self, job: CheckedJob, piece: Piece) -> list[tuple[int, int]]:
        """Return the spans of rows that are not skipped, in bytes from the start of the piece."""
        where = self._table.locate(job, piece.start, piece.stop)
        offsets = [
            [self._table.payload_offset(len(job.rows), piece.start + edge) - piece.offset for edge in span]
            for span in segments(where)
        ]
        return [(low, high) for low, high in offsets]


def host_tensor(payload: Payload) -> torch.Tensor:
    """Return the payload as a tensor, without a copy.

    `torch.from_numpy` expects a writable array, so a read-only payload is wrapped by its address.
    """
    if payload.flags.writeable:
        return torch.from_numpy(payload)
    memory = (ctypes.c_uint8 * payload.nbytes).from_address(payload.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory))


@torch.inference_mode(False)  # tensors that are made in inference mode could only be written in it
def open_cuda_copiers(
    layouts: Sequence[KVLayout],
    *,
    staging_bytes: int = 128 << 20,
    store_priority: int = 0,
    load_priority: int = 0,
    streams: Streams | None = None,
    movers: Sequence[Mover] | None = None,
) -> list[CudaCopier]:
    """Open a copier for each layout, with common streams and staging memory.

    Args:
        layouts: Layouts of paged KV caches on one device.
        staging_bytes: Bytes of device memory for each direction; more if one row needs it.
        store_priority: Priority of the side streams that gather, relative to those of the model.
        load_priority: Priority of the side streams that scatter.
        streams: Replaces CUDA in tests.
        movers: A mover for each layout; by default the best one that is available.
    """
    device = layouts[0].device
    streams = streams or TorchStreams(device)
    movers = movers or [open_mover(layout) for layout in layouts]
    largest_row = max(plane.row_bytes for layout in layouts for plane in layout.planes)
    part_bytes = max(staging_bytes // PARTS, largest_row)
    words = max(
        _max_entries(layout, part_bytes) * mover.columns
        for layout, mover in zip(layouts, movers, strict=True)
    )
    num_parts = min(PARTS, max(2, staging_bytes // part_bytes))

    def new_part(priority: int) -> Part:
        host_table = streams.pinned(words)
        return Part(
            stream=streams.open(priority),
            staging=torch.empty(-(-part_bytes // 16) * 16, dtype=torch.uint8, device=device),
            table=torch.empty(words, dtype=torch.int64, device=device),
            host_table=host_table,
            positions=host_table.numpy(),
        )

    # All memory is allocated before a thread is started.
    stores, loads = (
        [new_part(priority) for _ in range(num_parts)] for priority in (store_priority, load_priority)
    )
    # The allocator may return memory that the current stream still writes to.
    allocated = streams.record_current()
    for part in (*stores, *loads):
        streams.wait(part.stream, allocated)
    with contextlib.ExitStack() as undo:
        store = Lane("lmcache-async-gather", stores, streams.thread)
        undo.callback(store.close)
        load = Lane("lmcache-async-scatter", loads, streams.thread)
        undo.callback(load.close)
        fences = FenceThread("lmcache-async-fences", streams.reached, streams.thread)
        undo.pop_all()
    lanes = Lanes(streams, store, load, fences, part_bytes)
    return [CudaCopier(layout, mover, lanes) for layout, mover in zip(layouts, movers, strict=True)]


def _max_entries(layout: KVLayout, part_bytes: int) -> int:
    return min(MAX_ENTRIES, part_bytes // min(plane.row_bytes for plane in layout.planes))
