"""One mapping of host memory, made ready for use by a thread in the background."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from typing import Any

import numpy as np

from lmcache_async.errors import ConfigError

logger = logging.getLogger(__name__)

_STEP_BYTES = 64 << 20  # registered at a time, and looked at for a wish to stop
_POPULATE_BYTES = 8 << 20  # some 10 ms of page faults
_MADV_POPULATE_WRITE = 23  # Linux 5.14; faults pages in without touching what is in them
_CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for every device's context, not for one


class Region:
    """`nbytes` of memory, zeroed where it is our own. A background thread faults its pages in and pins them, in steps.

    Both are about speed alone: memory that is not ready yet can be used all the same. Steps are
    multiples of `grain_bytes`, so that no grain lies in two pinned ranges: a copy across their
    border would be refused by CUDA.

    Args:
        nbytes: A multiple of the page size.
        grain_bytes: What is copied at one time (a slab).
        pin: Pin the memory for CUDA; without CUDA this does nothing.
        pin_device: The CUDA device to do that with; None is the calling thread's current one.
        huge_pages: Ask for transparent huge pages.
        prefault: Fault the pages in before they are asked for.
        fd: A file of memory to map, together with whoever else maps it; the caller may close it afterwards.
            None is memory of our own.

    Raises:
        ConfigError: The memory is not to be had.
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
            raise ConfigError(f"{what}: {nbytes} bytes of host memory are not to be had") from error
        # A child process has no use for it, and a fork must not share pages that a device writes to.
        memory.madvise(mmap.MADV_DONTFORK)
        if huge_pages:
            with contextlib.suppress(OSError):  # a kernel without them; small pages do as well
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        self._view: memoryview | None = memoryview(memory)
        self._step_bytes = max(1, _STEP_BYTES // grain_bytes) * grain_bytes
        self._pin_device = _cuda_device(pin_device) if pin else None
        self._pinned_on = self._pin_device
        self._prefault = prefault
        self._pinned: list[int] = []  # addresses of the pinned steps
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if prefault or self._pin_device is not None:
            self._thread = threading.Thread(target=self._prepare, name="lmcache-async-prefault", daemon=True)
            self._thread.start()

    @property
    def view(self) -> memoryview:
        if self._view is None:
            raise ValueError("the region is closed")
        return self._view

    @property
    def pinned_bytes(self) -> int:
        return min(len(self._pinned) * self._step_bytes, self.nbytes)

    def wait_prepared(self, timeout_s: float) -> bool:
        """Block until the background work has ended; whether it has."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End the background work, after the step it is at. May be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def close(self, *, own_thread: bool = False) -> None:
        """Unpin and unmap; to be called once no slab is in use, from any thread.

        Args:
            own_thread: The calling thread is there for this alone, so its CUDA device may be set.
        """
        self.stop()
        if self._pinned:
            if own_thread:
                _set_device(self._pinned_on)
            runtime = _cuda_runtime()
            while self._pinned:
                runtime.cudaHostUnregister(self._pinned.pop())
        # Not mmap.close(): the mapping goes with its last user, who may be about to end in this very call.
        self._view = None

    def _prepare(self) -> None:
        if self._pin_device is not None:
            _set_device(self._pin_device)
        for start in range(0, self.nbytes, self._step_bytes):
            length = min(self._step_bytes, self.nbytes - start)
            self._populate(self.address + start, length)
            if self._stop.is_set():
                return
            if self._pin_device is not None and not self._pin(self.address + start, length):
                self._pin_device = None

    def _populate(self, address: int, length: int) -> None:
        # Not mmap.madvise, which keeps the GIL for as long as the page faults take.
        libc = ctypes.CDLL(None, use_errno=True)
        for offset in range(0, length if self._prefault else 0, _POPULATE_BYTES):
            if self._stop.is_set():
                return
            nbytes = min(_POPULATE_BYTES, length - offset)
            start = ctypes.c_void_p(address + offset)
            if libc.madvise(start, ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) != 0:
                # Writing to each page by hand could undo what a lease's owner has just written.
                self._prefault = False
                logger.info("no prefault (%s); pages come on first use", os.strerror(ctypes.get_errno()))
                return

    def _pin(self, address: int, length: int) -> bool:
        error = int(_cuda_runtime().cudaHostRegister(address, length, _CUDA_HOST_REGISTER_PORTABLE))
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


def _cuda_runtime() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _set_device(device: int | None) -> None:
    """Of this thread; else it would open a context on device 0."""
    import torch

    torch.cuda.set_device(device)


def _cuda_device(device: int | None) -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.current_device() if device is None else device
