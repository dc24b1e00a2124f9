"""A short race run on a GPU, and the CUDA calls counted by the profile."""

from __future__ import annotations

import pytest

from lmcache_async.bench.measure import Frame
from tools.benchmarks.gpu_device import CudaGpu
from tools.gpu import profile, race

pytestmark = [pytest.mark.gpu, pytest.mark.one_loop]


async def test_kv_is_bit_equal_with_random_delays():
    outcome = await race.run(CudaGpu(), race.QUICK, seconds=60, seed=1, most_engines=5)

    assert outcome.problems == []
    assert outcome.counts["loads that hit"] > 0


async def test_a_copy_launches_one_kernel_for_each_part_and_waits_for_no_stream():
    rows = [row async for row in profile.profile(profile.QUICK, Frame(rounds=1), CudaGpu(), 60)]

    calls = [row["calls"] for row in rows if "calls" in row]
    assert len(calls) == 8
    assert {count["kernels"] for count in calls} == {1}  # one part
    assert {count["waits for streams"] for count in calls} == {0}
    assert all(min(row["bus_idle_us"].values()) >= 0 for row in rows if "calls" in row)
    assert all(row["compute_cycles"] > 0 for row in rows if "compute_slowdown" in row)
