"""Growth of a series of samples."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of this process.

    Attributes:
        operations: Operations so far.
        rss: Resident memory in bytes.
        descriptors: Open files.
        threads: Running threads.
    """

    operations: int
    rss: int
    descriptors: int
    threads: int


def sample(operations: int) -> Sample:
    return Sample(
        operations=operations,
        rss=int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
        descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        threads=threading.active_count(),
    )


@dataclass(frozen=True, slots=True)
class Trend:
    """Comparison of the last with the second quarter of a series. The first quarter is warm-up.

    Attributes:
        second_quarter: Mean of the second quarter.
        last_quarter: Mean of the last quarter.
        per_million: Slope of a linear fit of all but the first quarter, per 1 000 000 operations.
    """

    second_quarter: float
    last_quarter: float
    per_million: float

    @property
    def growth(self) -> float:
        return self.last_quarter - self.second_quarter


def trend(operations: Sequence[int], values: Sequence[float]) -> Trend:
    """Return the trend of a series.

    Raises:
        ValueError: There are fewer than 8 samples.
    """
    if len(values) < 8:
        raise ValueError(f"{len(values)} samples are too few for a trend; at least 8 are needed")
    quarter = len(values) // 4
    x, y = np.asarray(operations[quarter:], float), np.asarray(values[quarter:], float)
    slope = float(np.polyfit(x - x[0], y, 1)[0])
    return Trend(
        second_quarter=float(np.mean(values[quarter : 2 * quarter])),
        last_quarter=float(np.mean(values[-quarter:])),
        per_million=slope * 1e6,
    )
