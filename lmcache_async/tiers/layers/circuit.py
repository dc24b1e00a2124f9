"""When to stop asking a tier that fails, and when to try again: a state machine without time or I/O of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class CircuitState(StrEnum):
    """Whether calls pass.

    CLOSED: all do. OPEN: none does. HALF_OPEN: a few do, to see whether the tier is well again.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class CircuitRules:
    """When a circuit opens and closes.

    Attributes:
        window_calls: How many of the last calls count.
        window_s: How old they may be, in seconds.
        min_calls: Fewer than these decide nothing.
        failure_rate: The share of failures that opens it.
        overdue_s: A call that takes longer has failed, whatever becomes of it.
        pause_s: How long it stays open; twice as long each time that a probe fails.
        max_pause_s: The longest pause.
        probes: Calls that must succeed before it closes; no more than these pass meanwhile.
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
    """What a circuit counts.

    Attributes:
        state: Now.
        opened: How often it has opened.
        refused: Calls that did not pass.
        failures: Failed calls among those that decide now.
        calls: How many decide now.
    """

    state: CircuitState
    opened: int
    refused: int
    failures: int
    calls: int


class Permit:
    """One call that passed: to be given to `leave` once."""

    __slots__ = ("start",)

    def __init__(self, start: float) -> None:
        self.start = start


class Circuit:
    """Passes calls, refuses them, tries again. Times are seconds of any clock, and never go back."""

    def __init__(self, rules: CircuitRules) -> None:
        self._rules = rules
        self._state = CircuitState.CLOSED
        self._running: dict[Permit, None] = {}  # in the order of their starts
        self._window: deque[tuple[float, bool]] = deque(maxlen=rules.window_calls)
        self._passed_probes = 0
        self._until = 0.0
        self._pause_s = rules.pause_s
        self._opened = 0
        self._refused = 0

    @property
    def state(self) -> CircuitState:
        """As of the last call."""
        return self._state

    def admits(self, now: float) -> bool:
        """Whether `enter` would let a call pass."""
        self._sweep(now)
        if self._state is CircuitState.OPEN:
            return now >= self._until
        return self._state is CircuitState.CLOSED or self._has_room_for_a_probe()

    def enter(self, now: float) -> Permit | None:
        """Let a call pass; None refuses it."""
        if not self.admits(now):
            self._refused += 1
            return None
        if self._state is CircuitState.OPEN:
            self._become(CircuitState.HALF_OPEN)
        permit = Permit(now)
        self._running[permit] = None
        return permit

    def leave(self, permit: Permit, now: float, *, failed: bool | None) -> None:
        """The call has ended. None: it says nothing of the tier, as when its caller gave it up early."""
        self._sweep(now)
        if permit in self._running:
            del self._running[permit]
            if failed is not None:
                self._decide(now, failed=failed)

    def wait_s(self, now: float) -> float:
        """Seconds until the next try, where it is open."""
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
        """Calls that run for too long have failed: a tier that hangs may never end them."""
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
        self._running.clear()  # what still runs passed in an earlier state, and decides nothing any more
        self._window.clear()
        self._passed_probes = 0

    def _has_room_for_a_probe(self) -> bool:
        return len(self._running) + self._passed_probes < self._rules.probes
