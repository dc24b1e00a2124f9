from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lmcache_async.bench import scheduler

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_scheduler_bench_goes_through_hits_and_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "scheduler.json"

    code = scheduler.main(["--requests", "6", "--tokens", "2048", "--json", str(path)])

    result = json.loads(path.read_text())
    assert code == 0
    assert (
        result["per request"]["hit"]["count"] == result["per request"]["miss, with its stores"]["count"] == 3
    )
    assert result["per request"]["all"]["wall_p99_ms"] >= result["per request"]["all"]["wall_median_ms"] > 0
    assert "reference" in capsys.readouterr().out
