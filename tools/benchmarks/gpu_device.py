"""Interface of the GPU benchmark to a GPU, with torch and CUDA, and on the host for runs without a GPU."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lmcache_async.device.cuda import Streams, TorchStreams
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.movers import Mover, open_mover
from lmcache_async.errors import ConfigError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.region import Region
from tests.support.fake_streams import FakeStreams

HostBytes: TypeAlias = npt.NDArray[np.uint8]

_PIN_S = 120.0


class Running(Protocol):
    """Products submitted to the device."""

    def ended(self) -> bool:
        """Return whether the last one has ended, without waiting."""

    def milliseconds(self) -> float:
        """Wait for the last one and return the mean time of a product on the device, in milliseconds."""

    def cycles(self) -> float:
        """Return the mean cycles of a product by the clock of the multiprocessors; 0 if there is no such clock.

        A GPU changes its clock with its power, which changes the time of a product and not its cycles. Called after
        `milliseconds`.
        """


class Products(Protocol):
    """Matrix products in bfloat16 on the model's stream, as a load."""

    def ask(self, count: int) -> Running:
        """Submit `count` products, one after the other, without waiting."""


class Gpu(Protocol):
    """A device and its host memory, this machine's.

    Attributes:
        name: Name of the device.
        device: Device of tensors.
    """

    name: str
    device: torch.device

    def streams(self) -> Streams:
        """Return the streams for a copier."""

    def mover(self, layout: KVLayout) -> Mover:
        """Return the mover of rows within device memory."""
        return open_mover(layout)

    def free_bytes(self) -> int:
        """Return the unused bytes of device memory."""

    def host_bytes(self) -> int:
        """Return the unused bytes of host memory."""
        return available_bytes(Path("/proc/meminfo").read_text(encoding="ascii"))

    def pin(self, nbytes: int) -> contextlib.AbstractContextManager[HostBytes]:
        """Pin contiguous host memory. No copy may be running at the end of the block.

        Raises:
            ConfigError: The memory cannot be pinned.
        """

    def products(self, size: int, *, constant: bool = False) -> Products:
        """Return products of two matrices of `size` rows and columns.

        Args:
            size: Rows and columns.
            constant: All elements are equal, which takes less power than random ones. With random ones a GPU is at the limit
                of its power, and lowers its clock for anything that runs beside them.
        """

    def spin(self) -> None:
        """Busy-wait for the work submitted to the current stream, for the lowest latency."""

    def trim(self) -> None:
        """Return unused memory of the allocator to the device."""


class CudaGpu(Gpu):
    """The current CUDA device."""

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.name = torch.cuda.get_device_name(index)
        self.device = torch.device("cuda", index)

    def streams(self) -> Streams:
        return TorchStreams(self.device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)

    @contextlib.contextmanager
    def pin(self, nbytes: int) -> Iterator[HostBytes]:
        whole = -(-nbytes // PAGE) * PAGE
        # One grain, so that it is pinned in one range: CUDA refuses a copy that spans two.
        region = Region(
            whole,
            grain_bytes=whole,
            pin=True,
            pin_device=self.device.index,
            huge_pages=True,
            prefault=True,
        )
        try:
            if not region.wait_prepared(_PIN_S) or region.pinned_bytes < nbytes:
                raise ConfigError(
                    f"{nbytes >> 20} MiB of host memory could not be pinned: raise the limit on locked memory "
                    "(ulimit -l), or reduce --host-gib"
                )
            yield np.frombuffer(region.view, np.uint8)
        finally:
            region.close()

    def products(self, size: int, *, constant: bool = False) -> Products:
        return _CudaProducts(size, self.device, constant=constant)

    def spin(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()

    def trim(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


class _CudaProducts:
    def __init__(self, size: int, device: torch.device, *, constant: bool) -> None:
        make = torch.ones if constant else torch.randn
        self._left, self._right, self._product = (
            make(size, size, device=device, dtype=torch.bfloat16) for _ in range(3)
        )

    def ask(self, count: int) -> Running:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        clocks = read_clocks(self._left.device)
        start.record()
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._product)
        end.record()
        return _CudaRunning(start, end, count, clocks, read_clocks(self._left.device))


@dataclass(frozen=True, slots=True)
class _CudaRunning:
    start: torch.cuda.Event
    end: torch.cuda.Event
    count: int
    clocks_before: torch.Tensor
    clocks_after: torch.Tensor

    def ended(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def milliseconds(self) -> float:
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / self.count

    def cycles(self) -> float:
        # A multiprocessor that ran none of the programs has no entry.
        before, after = (dict(clocks.tolist()) for clocks in (self.clocks_before, self.clocks_after))
        passed = [after[unit] - before[unit] for unit in before.keys() & after.keys()]
        return float(statistics.median(passed)) / self.count


def read_clocks(device: torch.device) -> torch.Tensor:
    """Submit reads of the clocks of the multiprocessors: int64 of shape (programs, 2), each a number and its cycles."""
    from tools.benchmarks.gpu_clock import PROGRAMS, read

    clocks = torch.empty((PROGRAMS, 2), dtype=torch.int64, device=device)
    read[(PROGRAMS,)](clocks, num_warps=1)
    return clocks


class HostGpu(Gpu):
    """The host in place of a GPU: the same code with simulated streams. Its figures have no meaning.

    The mover is the Triton kernel if Triton's interpreter is on (`TRITON_INTERPRET=1`).
    """

    name = "CPU in place of a GPU"
    device = torch.device("cpu")

    def streams(self) -> Streams:
        return FakeStreams()

    def free_bytes(self) -> int:
        return self.host_bytes()

    @contextlib.contextmanager
    def pin(self, nbytes: int) -> Iterator[HostBytes]:
        yield np.zeros(nbytes, np.uint8)

    def products(self, size: int, *, constant: bool = False) -> Products:
        del constant
        return _HostProducts(size)

    def spin(self) -> None:
        pass

    def trim(self) -> None:
        pass


class _HostProducts:
    def __init__(self, size: int) -> None:
        self._left, self._right = torch.randn(2, size, size).unbind(0)

    def ask(self, count: int) -> Running:
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(self._left, self._right)
        return _HostRunning((time.perf_counter() - start) * 1e3 / count)


@dataclass(slots=True)
class _HostRunning:
    """Products that have ended, but not at the first query, so that some copies run concurrently."""

    mean_ms: float
    looks: int = 0

    def ended(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def milliseconds(self) -> float:
        return self.mean_ms

    def cycles(self) -> float:
        return 0.0


def available_bytes(meminfo: str) -> int:
    """Return the unused bytes of host memory from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0
