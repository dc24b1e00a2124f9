"""Circuit breaker of a tier that fails or is slow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from pydantic import model_validator

from lmcache_async.config.validation import disagree
from lmcache_async.config.values import Count, Fraction, Seconds
from lmcache_async.errors import (
    ChunkCorruptError,
    TierClosedError,
    TierError,
    TierFullError,
    TierPartUnavailableError,
    TierSuspendedError,
)
from lmcache_async.tiers.answers import memory_was_short
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.around import AroundLayer, Call, Kind
from lmcache_async.tiers.layers.base import LayerConfig, LayerContext, LayerStatistics
from lmcache_async.tiers.layers.circuit import Circuit, CircuitRules, CircuitState, CircuitStatistics
from lmcache_async.tiers.layers.deadline import OptionalSeconds

T = TypeVar("T")

_AT_THE_DEADLINE = 0.9
"""Fraction of the tier's `timeout_s`. The deadline of `GuardLayer` starts a little before the call reaches
the breaker, so a call that it ends takes a little less than `timeout_s` here."""


class BreakerConfig(LayerConfig):
    """Options of the breaker layer.

    Attributes:
        failure_rate: The share of failed calls, of the last ones, that opens it.
        window_calls: How many calls are the last ones.
        window_s: How old they may be, in seconds.
        min_calls: Fewer than these open nothing.
        slow_s: A lookup or a read that takes longer has failed, in seconds.
        slow_write_s: The same for a write; none means only one that misses the tier's `timeout_s`.
        pause_s: How long an open breaker refuses every call; doubled each time that a probe fails.
        max_pause_s: The longest pause.
        probes: After the pause, how many calls must succeed, and how many may pass meanwhile.
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
            raise disagree(
                f"it would never open: min_calls is {self.min_calls}, above window_calls of {self.window_calls}",
                "min_calls",
                "window_calls",
            )
        if self.pause_s > self.max_pause_s:
            raise disagree(
                f"pause_s is {self.pause_s}, above max_pause_s of {self.max_pause_s}",
                "pause_s",
                "max_pause_s",
            )
        return self


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


class BreakerLayer(AroundLayer):
    """Fails calls at once, with TierSuspendedError, while the tier inside fails too often or is too slow.

    Lookups, reads and writes have separate circuits: a disk that is full or read-only can still be read. A
    batch is one call; it has failed if the share of its failed chunks reaches `failure_rate`. A miss, a full
    tier and a corrupt record are not failures. TierPartUnavailableError does not count. A call that its
    caller cancels does not count, unless it was already overdue. A call that does not end counts as failed
    when it becomes overdue.
    """

    options_type = BreakerConfig

    def __init__(self, inner: Tier, options: BreakerConfig, context: LayerContext) -> None:
        super().__init__(inner, options, context)
        self._failure_rate = options.failure_rate
        at_most = _AT_THE_DEADLINE * context.timeout_s
        slow_s = {
            Kind.LOOKUP: options.slow_s,
            Kind.READ: options.slow_s,
            Kind.WRITE: options.slow_write_s or at_most,
        }
        self._circuits = {
            kind: Circuit(
                CircuitRules(
                    window_calls=options.window_calls,
                    window_s=options.window_s,
                    min_calls=options.min_calls,
                    failure_rate=options.failure_rate,
                    overdue_s=min(slow_s[kind], at_most),
                    pause_s=options.pause_s,
                    max_pause_s=options.max_pause_s,
                    probes=options.probes,
                )
            )
            for kind in Kind
        }
        self._told = dict.fromkeys(Kind, CircuitState.CLOSED)
        self._now = 0.0

    def layer_statistics(self) -> BreakerStatistics:
        """Return the statistics as of now if a loop is running, else as of the last call."""
        now = self._clock()
        lookup, read, write = (self._circuits[kind].statistics(now) for kind in Kind)
        return BreakerStatistics(lookup=lookup, read=read, write=write)

    async def around(self, call: Call, run: Callable[[], Awaitable[T]]) -> T:
        kind, now = call.kind, self._clock()
        if kind is Kind.LOOKUP and not self._circuits[Kind.READ].admits(now):
            raise self._suspended(Kind.READ, now)
        if kind is Kind.LOOKUP and self.inner.capabilities.local_index:
            return await run()
        circuit = self._circuits[kind]
        permit = circuit.enter(now)
        if permit is None:
            raise self._suspended(kind, now)
        failed: bool | None = None
        try:
            result = await run()
            failed = kind is not Kind.LOOKUP and self._share_of_failures(result) >= self._failure_rate
        except Exception as error:
            failed = _is_failure(error)
            raise
        finally:
            circuit.leave(permit, self._clock(), failed=failed)
            self._tell(kind)
        return result

    def _share_of_failures(self, result: object) -> float:
        if not isinstance(result, list):
            return 0.0
        errors = [one for one in result if isinstance(one, TierError)]
        return sum(_is_failure(error) is True for error in errors) / len(result) if errors else 0.0

    def _suspended(self, kind: Kind, now: float) -> TierSuspendedError:
        self._tell(kind)
        wait_s = self._circuits[kind].wait_s(now)
        when = f"the next try is in {wait_s:.1f} s" if wait_s else "its probes are under way"
        return TierSuspendedError(f"tier {self.context.tier!r}: its breaker is open for {kind}s; {when}")

    def _tell(self, kind: Kind) -> None:
        """Log a line when a circuit has opened or closed."""
        state = self._circuits[kind].state
        if state is self._told[kind] or state is CircuitState.HALF_OPEN:
            return
        self._told[kind] = state
        cause = f"{self.context.tier}.{self.context.layer}.{kind}.{state}"
        if state is CircuitState.OPEN:
            text = "tier %r: its %ss fail or are slow; they are misses or drops until it is well again"
            self.context.logger.log(logging.WARNING, cause, text, self.context.tier, kind)
        else:
            self.context.logger.log(
                logging.INFO, cause, "tier %r: its %ss work again", self.context.tier, kind
            )

    def _clock(self) -> float:
        """Return the time of the loop, so that tests with a virtual clock control the breaker too."""
        with contextlib.suppress(RuntimeError):  # statistics may be read outside the loop
            self._now = asyncio.get_running_loop().time()
        return self._now


def _is_failure(error: Exception) -> bool | None:
    """Return whether the backend failed; None if the error says nothing about the backend."""
    nothing = TierClosedError | TierSuspendedError | TierPartUnavailableError
    if memory_was_short(error) or isinstance(error, nothing):
        return None
    return not isinstance(error, TierFullError | ChunkCorruptError)
