"""Faults and delays: kinds, probabilities and durations, all drawn from the seed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from random import Random


class Faults(StrEnum):
    """Level of injected faults."""

    NONE = "none"
    SOME = "some"
    MANY = "many"


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """Probabilities of faults, for one call of a tier or for one operation.

    Attributes:
        error: The call fails with a TierError, or with an error that a tier should not raise.
        hang: The call blocks until faults end.
        stubborn: A call that hangs also ignores its cancellation.
        slow: The call takes about as long as its deadline.
        corrupt: A record is read with a bit flipped, truncated, or is that of another key.
        rot: A record is damaged when it is stored.
        torn: A write that is cancelled or interrupted by a crash leaves a part of the record.
        lost: An acknowledged write is missing, at once or after a crash.
        lie: `contains` returns the opposite.
        stall: A worker thread is delayed.
        cancel: An operation is cancelled while it runs.
    """

    error: float = 0.0
    hang: float = 0.0
    stubborn: float = 0.0
    slow: float = 0.0
    corrupt: float = 0.0
    rot: float = 0.0
    torn: float = 0.0
    lost: float = 0.0
    lie: float = 0.0
    stall: float = 0.0
    cancel: float = 0.0

    def scaled(self, factor: float) -> Odds:
        return replace(
            self, **{field.name: min(0.9, factor * getattr(self, field.name)) for field in fields(self)}
        )


ODDS = {
    Faults.NONE: Odds(),
    Faults.SOME: Odds(
        error=0.02,
        hang=0.005,
        stubborn=0.2,
        slow=0.01,
        corrupt=0.02,
        rot=0.01,
        torn=0.3,
        lost=0.02,
        lie=0.01,
        stall=0.01,
        cancel=0.1,
    ),
    Faults.MANY: Odds(
        error=0.1,
        hang=0.03,
        stubborn=0.4,
        slow=0.05,
        corrupt=0.1,
        rot=0.05,
        torn=0.7,
        lost=0.1,
        lie=0.05,
        stall=0.05,
        cancel=0.3,
    ),
}

CALL_SECONDS = 2e-3
"""Longest call to a tier without faults, in seconds."""

THREAD_SECONDS = 2e-4
"""Longest delay of the start or end of a thread's call without faults, in seconds."""

STALL_SECONDS = 0.02
"""Longest such delay with faults, in seconds."""


class FaultInjector:
    """Draws faults and delays. `stop` ends all faults and resumes the calls that hang.

    Args:
        rng: Random number generator.
        odds: Probabilities of faults.
        call_timeout_s: Timeout of a call, in seconds. Slow calls take up to twice as long.
    """

    def __init__(self, rng: Random, odds: Odds, *, call_timeout_s: float) -> None:
        self.rng = rng
        self.odds = odds
        self.stopped = False
        self._call_timeout_s = call_timeout_s
        self._hanging: list[asyncio.Future[None]] = []

    def draws(self, odds: float) -> bool:
        """Draw whether a fault of this probability happens now."""
        return odds > 0.0 and not self.stopped and self.rng.random() < odds

    def thread_delay(self) -> float:
        if self.draws(self.odds.stall):
            return STALL_SECONDS * self.rng.random()
        return THREAD_SECONDS * self.rng.random()

    async def delay_call(self) -> None:
        """Delay a call by the time to a tier's backend and back, or block it.

        A cancelled call ends, or, if it is drawn as stubborn, continues until `stop`.
        """
        if self.draws(self.odds.hang):
            await self._hang()
        elif self.draws(self.odds.slow):
            await asyncio.sleep(self._call_timeout_s * 2 * self.rng.random())
        elif self.rng.random() < 0.7:
            await asyncio.sleep(CALL_SECONDS * self.rng.random())

    def stop(self) -> None:
        """End all faults, and resume the calls that hang."""
        self.stopped = True
        for future in self._hanging:
            if not future.done():
                future.set_result(None)
        self._hanging.clear()

    def start(self) -> None:
        self.stopped = False

    def forget(self) -> None:
        """Forget the hanging calls of a process that has ended."""
        self._hanging.clear()

    async def _hang(self) -> None:
        stubborn = self.rng.random() < self.odds.stubborn
        while True:
            future = asyncio.get_running_loop().create_future()
            self._hanging.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if not stubborn or self.stopped:
                    raise
            else:
                return
