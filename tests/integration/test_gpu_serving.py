"""An engine of `tools.gpu.serving`, on a CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.integration.vllm_driver import Engines
from tools.gpu.serving import Judge
from tools.gpu.serving_engine import LOADS, Settings


def test_an_engine_of_a_model_with_two_groups_loads_what_it_has_computed(
    engines: Engines, tmp_path: Path
) -> None:
    settings = Settings(
        "gemma3-4b", "ours", str(tmp_path), lengths=(257, 513), prompts=1, batch=2, quick=True
    )

    engines.run_module("tools.gpu.serving_engine", json.dumps([dataclasses.asdict(settings)]))

    found = json.loads(settings.result.read_text())
    assert Judge("gemma3-4b", {"ours": found}, quick=True).problems == []
    assert [load["cached_tokens"] for row in found["rows"] for load in row["loads"]] == [256] * LOADS + [
        512
    ] * LOADS
    assert found["statistics"]["corrupt"] == 0
