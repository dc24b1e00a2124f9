"""A source with values chosen by the test."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lmcache_async.metrics.charts import Chart, Sample, Series, gauge_values


class FakeSource:
    """Attributes: name: Title of the page; broken: Whether the methods raise."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.broken = False
        self.told = 0

    def sample(self) -> Sample:
        if self.broken:
            raise RuntimeError("no sample")
        return Sample(time.monotonic(), {"level": 1.0})

    def charts(self, samples: Sequence[Sample]) -> list[Chart]:
        return [Chart("Level", "count", [Series("level", gauge_values(samples, "level"))])]

    def status(self) -> dict[str, Any]:
        self.told += 1
        if self.broken:
            raise RuntimeError("a secret of the source")
        return {"kind": "fake", "title": self.name}

    def metrics(self) -> bytes:
        return b"fake_total 1\n"
