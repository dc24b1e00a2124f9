"""The region is prepared in the background, which affects speed only, and is freed with its last user."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_async.errors import ConfigError
from lmcache_async.memory import region
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import PAGE, Buffer
from lmcache_async.memory.region import Region

MIB = 1 << 20


def all_slabs(arena: Arena) -> Iterator[Buffer]:
    while (buffer := arena.lease_nowait(arena.slab_bytes)) is not None:
        yield buffer


@dataclass
class FakeRuntime:
    """CUDA's host registration: ranges must not overlap, and only registered ranges can be unregistered."""

    refuse_after: int | None = None
    ranges: dict[int, int] = field(default_factory=dict)
    total: int = 0
    mode: int = 0
    devices: list[int] = field(default_factory=list)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1  # portable: for every context
        self._check_thread()
        if self.total == self.refuse_after:
            return 2
        assert all(
            address + nbytes <= start or start + length <= address for start, length in self.ranges.items()
        )
        self.ranges[address] = nbytes
        self.total += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._check_thread()
        del self.ranges[address]
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0

    def _check_thread(self) -> None:
        assert self.devices == [3], "the call would create a context on device 0"
        assert self.mode == 2, "the call would invalidate a graph that vLLM captures"

    @contextlib.contextmanager
    def device(self, device: int) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", runtime.device)
    monkeypatch.setattr(region, "_cuda_driver", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    yield runtime
    assert (runtime.devices, runtime.mode) == ([], 0)


def test_memory_that_the_system_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"arena.max_bytes"):
        Arena(1 << 60, 1 << 50)


def test_prefault_keeps_bytes_written_meanwhile() -> None:
    arena = Arena(64 * MIB, MIB, prefault=True)
    buffers = list(all_slabs(arena))
    for buffer in buffers:
        buffer.array[::PAGE] = 7

    assert arena.wait_prepared(60)
    assert all((buffer.array[::PAGE] == 7).all() for buffer in buffers)
    for buffer in buffers:
        buffer.release()
    arena.close()


def test_prefaulted_pages_are_resident() -> None:
    region = Region(MIB, grain_bytes=PAGE, pin=False, pin_device=None, huge_pages=False, prefault=True)
    assert region.wait_prepared(60)

    resident = (ctypes.c_ubyte * (MIB // PAGE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(region.address), ctypes.c_size_t(MIB), resident) == 0
    assert all(resident)
    region.close()


def test_without_a_thread_memory_is_used_unprepared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    arena = Arena(MIB, PAGE, prefault=True)

    assert arena.wait_prepared(0)
    assert len(list(all_slabs(arena))) == arena.num_slabs
    assert "can't start new thread" in caplog.text
    arena.close()


def test_close_ends_the_prefault_thread() -> None:
    before = set(threading.enumerate())
    arena = Arena(1024 * MIB, MIB, prefault=True)
    arena.close()

    assert set(threading.enumerate()) <= before
    arena.close()


def test_no_slab_is_in_two_pinned_ranges(runtime: FakeRuntime) -> None:
    arena = Arena(200 * MIB, 7 * MIB, pin=True, prefault=False)
    assert arena.wait_prepared(60)

    assert sum(runtime.ranges.values()) == len(arena.region) == arena.statistics().pinned_bytes
    assert all((start - arena.address) % arena.slab_bytes == 0 for start in runtime.ranges)
    assert len(runtime.ranges) > 1
    arena.close()
    assert runtime.ranges == {}


def test_memory_is_unpinned_only_after_its_last_lease(runtime: FakeRuntime) -> None:
    arena = Arena(4 * PAGE, PAGE, pin=True)
    assert arena.wait_prepared(60)
    buffer = arena.lease_nowait(1)
    assert buffer is not None

    arena.close()
    assert runtime.ranges
    buffer.release()
    assert not runtime.ranges


def test_memory_that_cuda_cannot_pin_stays_pageable_with_a_log_line(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuse_after = 1
    arena = Arena(200 * MIB, MIB, pin=True, prefault=False)
    assert arena.wait_prepared(60)

    assert arena.statistics().pinned_bytes == 64 * MIB
    assert "ulimit -l" in caplog.text
    arena.close()
    assert runtime.ranges == {}


def test_without_cuda_pin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arena = Arena(4 * PAGE, PAGE, pin=True)

    assert arena.wait_prepared(60)
    assert arena.statistics().pinned_bytes == 0
    arena.close()


@pytest.mark.gpu
def test_cuda_takes_the_slabs_for_pinned_memory() -> None:
    arena = Arena(200 * MIB, 7 * MIB, pin=True)
    assert arena.wait_prepared(60)

    assert arena.statistics().pinned_bytes == len(arena.region)
    for number, buffer in enumerate(list(all_slabs(arena))):
        tensor = buffer.tensor(torch.int32, (buffer.nbytes // 4,))
        assert tensor.is_pinned()
        tensor.copy_(torch.full_like(tensor, number, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        assert (np.frombuffer(buffer.view, np.int32) == number).all()
        del tensor
        buffer.release()
    arena.close()


@pytest.mark.gpu
def test_a_cuda_graph_can_be_captured_while_memory_is_pinned() -> None:
    counter, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    arena = Arena(1024 * MIB, MIB, pin=True)

    with torch.cuda.graph(graph):
        counter.add_(1)
        assert arena.wait_prepared(60)
    graph.replay()

    assert counter.item() == 1
    assert arena.statistics().pinned_bytes == len(arena.region)
    arena.close()


def test_leased_memory_outlives_the_arenas_close() -> None:
    arena = Arena(4 * PAGE, PAGE)
    buffer = arena.lease_nowait(PAGE)
    assert buffer is not None
    arena.close()

    buffer.view[:] = b"x" * PAGE
    kept = buffer.array
    assert bytes(kept) == b"x" * PAGE
    buffer.release()
    assert bytes(kept) == b"x" * PAGE
    del kept
    with pytest.raises(ValueError, match="closed"):
        _ = arena.region
