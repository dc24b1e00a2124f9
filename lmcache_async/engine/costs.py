"""Cost of an operation as a line over its size, fitted to measurements."""

from __future__ import annotations


class CostLine:
    """Seconds as a linear function of a count: a latency, and a cost per item.

    Least squares over all observations. Weights decay exponentially, so that the line follows changes of the
    speed. If the fitted line falls or has a negative latency, the latency is taken as zero, because a few
    similar observations do not determine it.

    The weight of an observation decays by the factor `memory` with each later one.
    """

    def __init__(self, *, memory: float = 0.7) -> None:
        self._memory = memory
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, count: float, seconds: float) -> None:
        """Add an observation: `count` items took `seconds`."""
        keep = self._memory
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + count
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + count * count
        self._xy = keep * self._xy + count * seconds

    @property
    def known(self) -> bool:
        """Whether there is an observation."""
        return self._xx > 0

    @property
    def line(self) -> tuple[float, float]:
        """Latency and seconds per item; zeros without an observation."""
        if not self.known:
            return 0.0, 0.0
        variance = self._xx * self._weight - self._x * self._x
        if variance > 1e-6 * self._xx * self._weight:
            each = (self._xy * self._weight - self._x * self._y) / variance
            latency = (self._y - each * self._x) / self._weight
            if each > 0 and latency > 0:
                return latency, each
        return 0.0, self._xy / self._xx

    def seconds(self, count: float) -> float:
        """Return the estimated seconds for `count` items."""
        latency, each = self.line
        return latency + each * count if count > 0 else 0.0
