"""The GPU benchmark with the CPU as its device."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from lmcache_async.bench.measure import Frame
from lmcache_async.device.movers import TorchMover
from lmcache_async.errors import ConfigError
from tests.support.fake_streams import FakeStreams
from tools.benchmarks import gpu
from tools.benchmarks.command import Loaded, settings_of
from tools.benchmarks.gpu import DTYPES, IN, MODELS, OUT, Copies, refusal, shapes
from tools.benchmarks.gpu_device import HostGpu, available_bytes

pytestmark = pytest.mark.one_loop

GIB = 1 << 30
LOADED = Loaded(gpu.run, gpu.Settings(), gpu.QUICK)
SMALL = dataclasses.replace(gpu.QUICK, layers=1, models="llama-8b,deepseek-mla")


class LossyMover(TorchMover):
    """A mover that drops the first row of each batch when loading."""

    def move(self, steps, table, staging, *, to_staging):
        if not to_staging:
            steps = [dataclasses.replace(step, start=step.start + 1) for step in steps]
        super().move(steps, table, staging, to_staging=to_staging)


class FakeGpu(HostGpu):
    """The host as a GPU with a given amount of memory."""

    def __init__(self, *, free_bytes=100 * GIB, host_bytes=100 * GIB, mover=TorchMover):
        self._free_bytes, self._host_bytes = free_bytes, host_bytes
        self.mover = mover
        self.opened = []
        self.pinned = []
        self.trimmed = 0

    def streams(self):
        self.opened.append(FakeStreams())
        return self.opened[-1]

    def free_bytes(self):
        return self._free_bytes

    def host_bytes(self):
        return self._host_bytes

    @contextlib.contextmanager
    def pin(self, nbytes):
        self.pinned.append(nbytes)
        with super().pin(nbytes) as host:
            yield host

    def trim(self):
        self.trimmed += 1


async def rows_of(settings, device, frame=None):
    return [row async for row in gpu.measure(settings, frame or Frame(rounds=1, quick=True), device)]


@contextlib.contextmanager
def copies_of(device, *, chunks=2, form=0, priority=0):
    shape = shapes(["llama-8b"], layers=1)[form]
    host = np.zeros(shape.chunk_bytes * chunks, np.uint8)
    with Copies.open(device, shape, chunks, host, priority=priority) as copies:
        yield copies


async def test_every_cache_and_both_priorities_are_measured_beside_their_limits():
    device = FakeGpu()

    rows = await rows_of(SMALL, device)

    expected = {
        f"{shape.name}: {way}, {chunks}"
        for shape in shapes(["llama-8b", "deepseek-mla"])
        for way in ("D2H", "H2D")
        for chunks in ("1 chunk", "2 chunks")
    }
    for way in ("D2H", "H2D"):
        for level in ("low", "high"):
            expected |= {
                f"product beside {way}, priority {level}",
                f"{way} beside a product, priority {level}",
            }
    assert {row.name for row in rows} == expected
    limits = {row.name: {other.limit_name for other in rows if other.name == row.name} for row in rows}
    assert limits["llama-8b, fp8, fused: D2H, 2 chunks"] == {"memcpy, same pieces", "memcpy, one piece"}
    assert limits["product beside H2D, priority low"] == {"product alone", "product beside memcpy"}
    assert limits["D2H beside a product, priority high"] == {"D2H alone", "memcpy beside a product"}
    assert all(row.value > 0 and row.ratio > 0 for row in rows)
    [row] = {row.parameters["bytes"] for row in rows if row.name == "llama-8b, bf16, fused: D2H, 2 chunks"}
    assert row == 2 * 256 * 8 * 2 * 128 * 2


async def test_memory_is_pinned_once_for_the_largest_batch():
    device = FakeGpu()

    await rows_of(SMALL, device)

    assert device.pinned == [2 * 256 * 8 * 2 * 128 * 2]
    assert device.trimmed == len(shapes(["llama-8b", "deepseek-mla"])) + 2


async def test_batches_larger_than_the_device_are_left_out_with_a_line():
    chunk = 256 * 8 * 2 * 128 * 2
    device = FakeGpu(free_bytes=2 * chunk + 2 * gpu.STAGING_BYTES + gpu.SPARE_BYTES)
    frame = Frame(rounds=1, quick=True)

    names = {row.name for row in await rows_of(SMALL, device, frame)}

    assert "llama-8b, bf16, fused: D2H, 1 chunk" in names
    assert "llama-8b, bf16, fused: D2H, 2 chunks" not in names
    assert "llama-8b, fp8, fused: D2H, 2 chunks" in names
    assert any(
        line.startswith("llama-8b, bf16, fused, 2 chunks: it needs") and "device memory" in line
        for line in frame.left_out
    )


def test_a_batch_needs_the_device_twice_and_the_host_once():
    assert refusal(GIB, device_bytes=4 * GIB, host_bytes=GIB) == ""
    assert "it needs 1.0 GiB of pinned" in refusal(GIB, device_bytes=4 * GIB, host_bytes=GIB - 1)
    assert "it needs 3.2 GiB of device memory" in refusal(GIB, device_bytes=3 * GIB, host_bytes=GIB)


async def test_a_cache_with_other_content_ends_the_benchmark():
    with pytest.raises(RuntimeError, match="differs from the stored one"):
        await rows_of(SMALL, FakeGpu(mover=LossyMover))


@pytest.mark.parametrize("form", range(6))
async def test_a_cache_is_whole_after_its_check(form):
    device = FakeGpu()
    with copies_of(device, form=form) as copies:
        before = [storage.clone() for storage in copies.layout.storages]
        await copies.check()

        assert all(map(torch.equal, copies.layout.storages, before))


@pytest.mark.parametrize("way", [OUT, IN])
async def test_plain_copies_move_each_byte_to_its_place(way):
    with copies_of(FakeGpu()) as copies:
        copies.piece.random_()
        copies.host[:] = np.random.default_rng(1).integers(0, 256, len(copies.host))
        expected = copies.piece.clone() if way == OUT else torch.from_numpy(copies.host.copy())

        await copies.plain(way, copies.pieces(2))()

        assert sum(copies.pieces(2)) == copies.nbytes(2) == len(copies.host)
        assert torch.equal(copies.piece, expected)
        assert torch.equal(torch.from_numpy(copies.host), expected)


@pytest.mark.parametrize("shape", shapes(list(MODELS)), ids=lambda shape: shape.name)
def test_chunks_are_as_large_as_the_layout_says(shape):
    layout = shape.build(2, torch.device("meta"))

    assert shape.chunk_bytes == layout.payload_bytes(shape.chunk_blocks)
    planes = {"K and V apart": 2 * shape.model.layers, "fused": shape.model.layers, "cross-layer blocks": 1}
    assert layout.num_planes == planes[shape.form]
    assert set(DTYPES.values()) >= {shape.dtype}


@pytest.mark.parametrize("fenced", [False, True])
async def test_beside_products_copies_wait_for_no_fence_of_the_model(fenced, monkeypatch):
    device, events = FakeGpu(), []
    with copies_of(device) as copies:
        streams = device.opened[0]
        monkeypatch.setattr(streams, "reached", lambda event: not events.append(event))
        await copies.paged(OUT, 1, fenced=fenced)()

    assert len(events) == fenced


def test_an_unknown_model_is_an_error():
    with pytest.raises(ConfigError, match="there is no model 'gpt'; there are: llama-8b, llama-70b"):
        settings_of(LOADED, "gpu", ("--models", "llama-8b,gpt"), quick=False)
    assert settings_of(LOADED, "gpu", ("--host-gib", "0"), quick=False).host_gib == 0


def test_free_host_memory_is_read_from_the_kernel():
    text = "MemTotal:       24609040 kB\nMemAvailable:   10240 kB\n"

    assert available_bytes(text) == 10 << 20
    assert available_bytes("MemTotal: 5 kB") == 0
