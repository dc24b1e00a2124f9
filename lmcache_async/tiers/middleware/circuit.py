"""Circuit breaker: a state machine without I/O and without a clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class CircuitState(StrEnum):
    """State of a circuit.

    CLOSED: all calls are admitted. OPEN: none. HALF_OPEN: a few, as probes of whether the tier has recovered.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class CircuitRules:
    """Conditions under which a circuit opens and closes.

    Attributes:
        window_calls: Maximum number of recent calls in the window.
        window_s: Maximum age of these calls in seconds.
        min_calls: Minimum number of calls in the window to open the circuit.
        failure_rate: Share of failed calls that opens the circuit.
        overdue_s: Seconds after which a running call counts as failed, whatever its result.
        pause_s: Seconds that the circuit stays open; doubled each time that a probe fails.
        max_pause_s: Longest pause in seconds.
        probes: Number of calls that must succeed to close the circuit; also the maximum number admitted until
            then.
    """

    window_calls: int
    window_s: float
    min_calls: int
    failure_rate: float
    overdue_s: float
    pause_s: float
    max_pause_s: float
    probes: int


@dataclass(frozen=True, slots=True)
class CircuitStatistics:
    """Statistics of a circuit.

    Attributes:
        state: Current state.
        opened: Number of times that the circuit has opened.
        refused: Calls that were not admitted.
        failures: Failed calls in the window.
        calls: Calls in the window.
    """

    state: CircuitState
    opened: int
    refused: int
    failures: int
    calls: int


class Permit:
    """An admitted call. Pass it to `Circuit.leave` once."""

    __slots__ = ("start",)

    def __init__(self, start: float) -> None:
        self.start = start


class Circuit:
    """Admits or refuses calls by the results of earlier calls.

    Times are seconds of any monotonic clock.

    Args:
        rules: Conditions under which the circuit opens and closes.
    """

    def __init__(self, rules: CircuitRules) -> None:
        self._rules = rules
        self._state = CircuitState.CLOSED
        self._running: dict[Permit, None] = {}  # in order of start
        self._window: deque[tuple[float, bool]] = deque(maxlen=rules.window_calls)
        self._passed_probes = 0
        self._until = 0.0
        self._pause_s = rules.pause_s
        self._opened = 0
        self._refused = 0

    @property
    def state(self) -> CircuitState:
        """State as of the last method call."""
        return self._state

    def admits(self, now: float) -> bool:
        """Return whether `enter` would admit a call."""
        self._sweep(now)
        if self._state is CircuitState.OPEN:
            return now >= self._until
        return self._state is CircuitState.CLOSED or self._has_room_for_a_probe()

    def enter(self, now: float) -> Permit | None:
        """Admit a call; None if it is refused."""
        if not self.admits(now):
            self._refused += 1
            return None
        if self._state is CircuitState.OPEN:
            self._become(CircuitState.HALF_OPEN)
        permit = Permit(now)
        self._running[permit] = None
        return permit

    def leave(self, permit: Permit, now: float, *, failed: bool | None) -> None:
        """Record the end of a call.

        Args:
            permit: Permit of the call.
            now: Current time in seconds.
            failed: Whether the call failed; None if it does not count, for example because its caller
                cancelled it early.
        """
        self._sweep(now)
        if permit in self._running:
            del self._running[permit]
            if failed is not None:
                self._decide(now, failed=failed)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next probe; 0 if the circuit is not open."""
        return max(0.0, self._until - now) if self._state is CircuitState.OPEN else 0.0

    def statistics(self, now: float) -> CircuitStatistics:
        self._sweep(now)
        return CircuitStatistics(
            state=self._state,
            opened=self._opened,
            refused=self._refused,
            failures=sum(failed for _, failed in self._window),
            calls=len(self._window),
        )

    def _sweep(self, now: float) -> None:
        """Count overdue calls as failed. Calls of a tier that hangs may never end."""
        while self._running:
            oldest = next(iter(self._running))
            if now - oldest.start < self._rules.overdue_s:
                return
            del self._running[oldest]
            self._decide(now, failed=True)

    def _decide(self, now: float, *, failed: bool) -> None:
        rules, window = self._rules, self._window
        if self._state is CircuitState.HALF_OPEN:
            if failed:
                self._pause_s = min(2 * self._pause_s, rules.max_pause_s)
                self._open(now)
                return
            self._passed_probes += 1
            if self._passed_probes >= rules.probes:
                self._pause_s = rules.pause_s
                self._become(CircuitState.CLOSED)
            return
        window.append((now, failed))
        while window[0][0] < now - rules.window_s:
            window.popleft()
        failures = sum(failed for _, failed in window)
        if failed and len(window) >= rules.min_calls and failures >= rules.failure_rate * len(window):
            self._open(now)

    def _open(self, now: float) -> None:
        self._become(CircuitState.OPEN)
        self._opened += 1
        self._until = now + self._pause_s

    def _become(self, state: CircuitState) -> None:
        self._state = state
        self._running.clear()  # calls admitted in an earlier state do not count any more
        self._window.clear()
        self._passed_probes = 0

    def _has_room_for_a_probe(self) -> bool:
        return len(self._running) + self._passed_probes < self._rules.probes
