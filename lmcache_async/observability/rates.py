"""How long so many of something take, learnt from what was measured."""

from __future__ import annotations


class CostLine:
    """Seconds as a line over a count: a latency, and so much for each one.

    Least squares over all observations, each weighing `memory` times as much as the next one, so that it
    follows a tier or a model whose speed changes. A line that falls, or begins below zero, is taken to
    begin at zero: a few observations alike say nothing of the latency.

    Args:
        memory: From 0 to 1.
    """

    def __init__(self, *, memory: float = 0.7) -> None:
        self._memory = memory
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, count: float, seconds: float) -> None:
        """`count` of them took `seconds`."""
        keep = self._memory
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + count
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + count * count
        self._xy = keep * self._xy + count * seconds

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._xx > 0

    @property
    def line(self) -> tuple[float, float]:
        """Latency, and seconds for each one; zeros while nothing is known."""
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
        """What `count` of them would take now."""
        latency, each = self.line
        return latency + each * count if count > 0 else 0.0
