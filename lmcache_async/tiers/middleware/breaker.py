"""Circuit breaker of a tier that fails or is slow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from pydantic import model_validator

from lmcache_async.config.validation import disagree
from lmcache_async.config.values import Count, Fraction, OptionalSeconds, Seconds
from lmcache_async.errors import (
    ChunkCorruptError,
    TierClosedError,
    TierError,
    TierFullError,
    TierPartUnavailableError,
    TierSuspendedError,
)
from lmcache_async.tiers.middleware.base import (
    Call,
    Kind,
    Layer,
    LayerConfig,
    LayerContext,
    LayerStatistics,
    Next,
    Results,
    Verb,
)
from lmcache_async.tiers.results import memory_was_short

_TIMER_S = 0.001
"""Resolution of the timers of uvloop, in seconds. A call may be cancelled this long before its deadline."""

_MIN_FRACTION, _MIN_S = 0.25, 0.05
"""A late call does not count as failed if it spent less than this fraction of its time limit, or less than these seconds, inside
the breaker: it had waited in `limit`, or another tier had used up the time of the request."""


class BreakerConfig(LayerConfig):
    """Options of the breaker layer.

    Attributes:
        failure_rate: Fraction of failed calls in the window that opens the breaker.
        window_calls: Number of recent calls in the window.
        window_s: Maximum age of these calls in seconds.
        min_calls: Minimum number of calls in the window before the breaker can open.
        slow_s: Duration in seconds above which a lookup or read counts as failed.
        slow_write_s: The same for a write; none: only a write that exceeds the tier's `timeout_s`.
        pause_s: Seconds that the breaker stays open; doubled after each failed probe.
        max_pause_s: Maximum of `pause_s` after doubling.
        probes: Number of calls that must succeed to close the breaker, and maximum number of calls until then.
    """

    failure_rate: Fraction = 0.5
    window_calls: Count = 20
    window_s: Seconds = 60.0
    min_calls: Count = 5
    slow_s: Seconds = 5.0
    slow_write_s: OptionalSeconds = None
    pause_s: Seconds = 5.0
    max_pause_s: Seconds = 60.0
    probes: Count = 2

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.min_calls > self.window_calls:
            text = f"min_calls is {self.min_calls}, above window_calls of {self.window_calls}"
            raise disagree(f"it would never open: {text}", "min_calls", "window_calls")
        if self.pause_s > self.max_pause_s:
            text = f"pause_s is {self.pause_s}, above max_pause_s of {self.max_pause_s}"
            raise disagree(text, "pause_s", "max_pause_s")
        return self


class CircuitState(StrEnum):
    """State of a circuit.

    CLOSED: all calls are admitted. OPEN: none. HALF_OPEN: a few, as probes of whether the tier has recovered.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class CircuitStatistics:
    """Statistics of a circuit."""

    state: CircuitState
    opened: int  # number of times that the circuit has opened
    refused: int  # calls that were not admitted
    failures: int  # failed calls in the window
    calls: int  # calls in the window


class Circuit:
    """Admits or refuses calls by the results of earlier calls, without I/O and without a clock.

    Times are seconds of any monotonic clock. A call that has run for `overdue_s` counts as failed, whatever its
    result.
    """

    def __init__(self, options: BreakerConfig, overdue_s: float) -> None:
        self._options = options
        self._overdue_s = overdue_s
        self._state = CircuitState.CLOSED
        self._running: dict[object, float] = {}  # permit -> start, in order of start
        self._window: deque[tuple[float, bool]] = deque(maxlen=options.window_calls)
        self._passed_probes = 0
        self._until = 0.0
        self._pause_s = options.pause_s
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
        probes = len(self._running) + self._passed_probes
        return self._state is CircuitState.CLOSED or probes < self._options.probes

    def enter(self, now: float) -> object | None:
        """Admit a call and return its permit, to be passed to `leave` once; None if it is refused."""
        if not self.admits(now):
            self._refused += 1
            return None
        if self._state is CircuitState.OPEN:
            self._become(CircuitState.HALF_OPEN)
        permit = object()
        self._running[permit] = now
        return permit

    def leave(self, permit: object, now: float, *, failed: bool | None) -> None:
        """Record the end of a call. `failed=None` means that it does not count, such as a call cancelled by its caller."""
        self._sweep(now)
        if self._running.pop(permit, None) is not None and failed is not None:
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
            oldest, start = next(iter(self._running.items()))
            if now - start < self._overdue_s:
                return
            del self._running[oldest]
            self._decide(now, failed=True)

    def _decide(self, now: float, *, failed: bool) -> None:
        options, window = self._options, self._window
        if self._state is CircuitState.HALF_OPEN:
            if failed:
                self._pause_s = min(2 * self._pause_s, options.max_pause_s)
                self._open(now)
                return
            self._passed_probes += 1
            if self._passed_probes >= options.probes:
                self._pause_s = options.pause_s
                self._become(CircuitState.CLOSED)
            return
        window.append((now, failed))
        while window[0][0] < now - options.window_s:
            window.popleft()
        failures = sum(failed for _, failed in window)
        if failed and len(window) >= options.min_calls and failures >= options.failure_rate * len(window):
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


@dataclass(frozen=True, slots=True)
class BreakerStatistics(LayerStatistics):
    """The three circuits of a breaker, each with its own state.

    Attributes:
        lookup: Circuit of lookups. Lookups answered from memory of this process are not counted.
        read: Circuit of reads. While it is open, lookups are refused too, because their hits could not be
            read.
        write: Circuit of writes and removals.
    """

    lookup: CircuitStatistics
    read: CircuitStatistics
    write: CircuitStatistics


class BreakerLayer(Layer):
    """Fails calls at once, with TierSuspendedError, while the tier fails too often or is too slow.

    Lookups, reads and writes have separate circuits: a disk that is full or read-only can still be read. A
    batch is one call; it has failed if the fraction of its failed chunks reaches `failure_rate`. A miss, a full
    tier and a corrupt record are not failures. TierPartUnavailableError does not count. A call that its
    caller cancels does not count, unless it was already overdue. A call that does not end counts as failed
    when it becomes overdue. `reject` is always carried out and does not count: otherwise a corrupt record would be found
    again while writes fail.
    """

    options_type = BreakerConfig
    options: BreakerConfig
    bounded = True

    def __init__(self, options: BreakerConfig, context: LayerContext) -> None:
        super().__init__(options, context)
        slow_s = dict.fromkeys(Kind, options.slow_s) | {Kind.WRITE: options.slow_write_s or context.timeout_s}
        self._circuits = {kind: Circuit(options, min(slow_s[kind], context.timeout_s)) for kind in Kind}
        self._logged = dict.fromkeys(Kind, CircuitState.CLOSED)
        self._now = 0.0

    def statistics(self) -> BreakerStatistics:
        """Return the statistics as of now if a loop is running, else as of the last call."""
        now = self._clock()
        lookup, read, write = (self._circuits[kind].statistics(now) for kind in Kind)
        return BreakerStatistics(lookup=lookup, read=read, write=write)

    async def around(self, call: Call, next: Next) -> Results:
        kind, now = call.kind, self._clock()
        if kind is Kind.LOOKUP and not self._circuits[Kind.READ].admits(now):
            raise self._suspended(Kind.READ, now)
        if call.local or call.verb is Verb.REJECT:
            return await next(call)
        circuit = self._circuits[kind]
        permit = circuit.enter(now)
        if permit is None:
            raise self._suspended(kind, now)
        failed: bool | None = None
        try:
            results = await next(call)
            failed = kind is not Kind.LOOKUP and _failed_fraction(results) >= self.options.failure_rate
        except BaseException as error:
            # A cancellation comes from a deadline outside of this layer, or, before the deadline, from the caller.
            late = self._clock() >= call.deadline - _TIMER_S
            failed = _is_failure(error) if isinstance(error, Exception) else late or None
            given_s = min(self.context.timeout_s, call.deadline - call.start)
            if failed and late and self._clock() - now < max(_MIN_FRACTION * given_s, _MIN_S):
                failed = None  # it was too short to judge the backend
            raise
        finally:
            circuit.leave(permit, self._clock(), failed=failed)
            self._log_change(kind)
        return results

    def _suspended(self, kind: Kind, now: float) -> TierSuspendedError:
        self._log_change(kind)
        wait_s = self._circuits[kind].wait_s(now)
        when = f"the next probe is in {wait_s:.1f} s" if wait_s else "its probes are running"
        return TierSuspendedError(f"tier {self.context.tier!r}: its breaker is open for {kind}s; {when}")

    def _log_change(self, kind: Kind) -> None:
        """Log a line when a circuit has opened or closed."""
        state = self._circuits[kind].state
        if state is self._logged[kind] or state is CircuitState.HALF_OPEN:
            return
        self._logged[kind] = state
        level, text = logging.INFO, "tier %r: %ss work again"
        if state is CircuitState.OPEN:
            level = logging.WARNING
            effect = "their chunks are not stored" if kind is Kind.WRITE else "they are misses"
            text = f"tier %r: %ss failed or were slow and are suspended: {effect} until a probe succeeds"
        cause = f"{self.context.tier}.{self.context.layer}.{kind}.{state}"
        self.context.logger.log(level, cause, text, self.context.tier, kind)

    def _clock(self) -> float:
        """Return the time of the loop, so that tests with a virtual clock control the breaker too."""
        with contextlib.suppress(RuntimeError):  # statistics may be read outside the loop
            self._now = asyncio.get_running_loop().time()
        return self._now


def _failed_fraction(results: Results) -> float:
    errors = [result for result in results if isinstance(result, TierError)]
    return sum(_is_failure(error) is True for error in errors) / len(results) if errors else 0.0


def _is_failure(error: Exception) -> bool | None:
    """Return whether the backend failed; None if the error says nothing about the backend."""
    nothing = TierClosedError | TierSuspendedError | TierPartUnavailableError
    if memory_was_short(error) or isinstance(error, nothing):
        return None
    return not isinstance(error, TierFullError | ChunkCorruptError)
