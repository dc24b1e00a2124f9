"""Mapping of host memory, prefaulted and pinned by a background thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np

from lmcache_async.errors import ConfigError

logger = logging.getLogger(__name__)

_STEP_BYTES = 64 << 20  # bytes registered at a time; the stop event is checked after each step
_POPULATE_BYTES = 8 << 20  # about 10 ms of page faults
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; faults pages in without changing their content
_CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for the contexts of all devices
_CU_STREAM_CAPTURE_MODE_RELAXED = 2


def request_huge_pages(address: int, nbytes: int) -> None:
    """Request transparent huge pages for memory. Only speed depends on them.

    Has no effect on less than one huge page of memory, or on a kernel without huge pages.
    """
    page = mmap.PAGESIZE
    start, end = -(-address // page) * page, (address + nbytes) // page * page
    if end - start >= _HUGE_PAGE_BYTES:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


class Region:
    """Mapping of host memory. A background thread faults its pages in and pins them, in steps.

    Faulting and pinning only affect speed: the memory can be used before they are done. Steps are multiples of
    `grain_bytes`, so that no slab extends over two pinned ranges; CUDA rejects a copy across two ranges.

    Args:
        grain_bytes: Bytes of the unit of copies (a slab).
        pin: Pin the memory for CUDA; no effect without CUDA.
        pin_device: CUDA device for pinning; None for the current device of the calling thread.
        fd: Memory file to map, shared with other processes; the caller may close it afterwards. None for
            private memory, which is zeroed.

    Raises:
        ConfigError: The memory cannot be mapped.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        grain_bytes: int,
        pin: bool,
        pin_device: int | None,
        huge_pages: bool,
        prefault: bool,
        fd: int | None = None,
    ) -> None:
        try:
            if fd is None:
                memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter
            what = "arena.max_bytes" if fd is None else "shared memory"
            raise ConfigError(f"{what}: cannot allocate {nbytes} bytes of host memory") from error
        # Child processes do not use the memory, and a fork must not share pages that a device writes to.
        memory.madvise(mmap.MADV_DONTFORK)
        self.nbytes = nbytes
        self.address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        if huge_pages:
            request_huge_pages(self.address, nbytes)
        self._view: memoryview | None = memoryview(memory)
        self._step_bytes = max(1, _STEP_BYTES // grain_bytes) * grain_bytes
        self._device = _cuda_device(pin_device) if pin else None
        self._prefault = prefault
        self._pinned: list[int] = []  # addresses of the pinned steps
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if prefault or self._device is not None:
            thread = threading.Thread(target=self._prepare, name="lmcache-async-prefault", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:
                logger.warning(
                    "no prefault and no pinning (%s); pages are allocated on first use, and copies to a GPU are slower",
                    error,
                )

    @property
    def view(self) -> memoryview:
        if self._view is None:
            raise ValueError("the region is closed")
        return self._view

    @property
    def pinned_bytes(self) -> int:
        return min(len(self._pinned) * self._step_bytes, self.nbytes)

    def wait_prepared(self, timeout_s: float) -> bool:
        """Block until the background work has ended, at most `timeout_s` seconds. Return whether it has."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop the background work after the current step and wait for its end. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Unpin and unmap the memory. Called when no slab is in use, from any thread."""
        self.stop()
        if self._pinned:
            import torch

            with self._cuda_thread():
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                while self._pinned:
                    runtime.cudaHostUnregister(self._pinned.pop())
        # Not mmap.close(): the last view of the mapping may end within this call. The mapping ends with it.
        self._view = None

    def _prepare(self) -> None:
        pins = self._device is not None
        with self._cuda_thread():
            for start in range(0, self.nbytes, self._step_bytes):
                length = min(self._step_bytes, self.nbytes - start)
                self._populate(self.address + start, length)
                if self._stop.is_set():
                    return
                pins = pins and self._pin(self.address + start, length)

    def _cuda_thread(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._device is None else cuda_thread(self._device)

    def _populate(self, address: int, length: int) -> None:
        # Not mmap.madvise, which holds the GIL during the page faults.
        libc = ctypes.CDLL(None, use_errno=True)
        for offset in range(0, length if self._prefault else 0, _POPULATE_BYTES):
            if self._stop.is_set():
                return
            nbytes = min(_POPULATE_BYTES, length - offset)
            start = ctypes.c_void_p(address + offset)
            if libc.madvise(start, ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) != 0:
                # No fallback: writing to each page could overwrite the data of a lease.
                self._prefault = False
                logger.info(
                    "no prefault (%s); pages are allocated on first use", os.strerror(ctypes.get_errno())
                )
                return

    def _pin(self, address: int, length: int) -> bool:
        import torch

        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(address, length, _CUDA_HOST_REGISTER_PORTABLE))
        if error:
            logger.warning(
                "cudaHostRegister failed with error %d after %d of %d bytes: the rest stays pageable, copies"
                " of it are slower; is the limit on locked memory (ulimit -l) too low?",
                error,
                self.pinned_bytes,
                self.nbytes,
            )
            return False
        self._pinned.append(address)
        return True


@contextlib.contextmanager
def cuda_thread(device: int) -> Iterator[None]:
    """Prepare this thread, for the block, to make CUDA calls while another thread runs the model.

    The device is set because the thread would otherwise create a context on device 0. The capture mode is set
    because pinning memory or waiting for an event otherwise fails while another thread captures a CUDA graph,
    and invalidates the graph. vLLM captures its graphs while the arena is still being pinned.
    """
    import torch

    with torch.cuda.device(device):
        previous = _exchange_capture_mode(_CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield
        finally:
            _exchange_capture_mode(previous)


def _exchange_capture_mode(mode: int) -> int:
    """Set how this thread is affected by captures of CUDA graphs in other threads. Return the previous mode."""
    number = ctypes.c_int(mode)
    if (driver := _cuda_driver()) is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(number))
    return number.value


@functools.cache
def _cuda_driver() -> ctypes.PyDLL | None:
    """Return the NVIDIA driver if it is installed. Its functions are called with the GIL, so only fast ones must be."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuThreadExchangeStreamCaptureMode") else None


def _cuda_device(device: int | None) -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.current_device() if device is None else device
