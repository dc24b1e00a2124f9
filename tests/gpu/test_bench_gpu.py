"""`lmcache-async bench gpu` on a GPU, with small sizes."""

from __future__ import annotations

import json
import math

import pytest

from tools.benchmarks.command import main
from tools.benchmarks.gpu import QUICK, shapes
from tools.benchmarks.gpu_device import CudaGpu

pytestmark = pytest.mark.gpu


def test_the_quick_form_measures_every_layout_and_both_priorities(tmp_path):
    path = tmp_path / "gpu.json"

    assert main(["gpu", "--quick", "--rounds", "1", "--json", str(path)]) == 0

    result = json.loads(path.read_text())["benchmarks"]["gpu"]
    names = {row["name"] for row in result["rows"]}
    assert result["left_out"] == []
    for shape in shapes(QUICK.models.split(",")):
        assert {f"{shape.name}: {way}, 2 chunks" for way in ("D2H", "H2D")} <= names
    assert {f"product beside D2H, priority {level}" for level in ("low", "high")} <= names
    assert all(0 < row["value"] < math.inf and 0 < row["ratio"] < math.inf for row in result["rows"])
    movers = {row["parameters"]["mover"] for row in result["rows"]}
    assert movers == {"TritonMover"}


def test_memory_for_copies_is_pinned_in_one_piece():
    import torch

    with CudaGpu().pin((200 << 20) + 1) as host:
        assert len(host) >= (200 << 20) + 1
        assert torch.from_numpy(host[100 << 20 : 150 << 20]).is_pinned()


def test_products_are_computed_and_timed():
    running = CudaGpu().products(256).ask(3)

    assert running.milliseconds() > 0
    assert running.ended()
