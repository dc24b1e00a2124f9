"""What goes wrong, how often, and how long things take: all drawn from the seed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from random import Random


class Faults(StrEnum):
    """How bad the world is."""

    NONE = "none"
    SOME = "some"
    MANY = "many"


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """Chances of one call to a tier, and of one operation.

    Attributes:
        error: The call fails with a TierError, or with an error that no tier should raise.
        hang: It gives no answer until the weather clears.
        stubborn: A call that hangs does not even end when it is cancelled.
        slow: It takes about as long as its deadline.
        corrupt: A record is read with a bit flipped, cut, or as another key's.
        rot: A record that is put is damaged where it lies.
        torn: A write that is cancelled, or that a crash interrupts, leaves a part of the record.
        lost: A write that was acknowledged is not there, at once or after a crash.
        lie: `contains` says what is not so.
        stall: A worker thread gets its turn late.
        cancel: An operation is cancelled in the middle.
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
"""Most that a call to a tier takes in good weather."""

THREAD_SECONDS = 2e-4
"""Most that a thread takes to start or to end a call in good weather."""

STALL_SECONDS = 0.02
"""Most that it takes in bad weather."""


class Weather:
    """Draws faults and delays; `calm` ends all faults and lets go of what hangs.

    Args:
        rng: Where they come from.
        odds: How likely they are.
        call_timeout_s: What slow calls are about as slow as.
    """

    def __init__(self, rng: Random, odds: Odds, *, call_timeout_s: float) -> None:
        self.rng = rng
        self.odds = odds
        self.fair = False
        self._call_timeout_s = call_timeout_s
        self._hanging: list[asyncio.Future[None]] = []

    def strikes(self, odds: float) -> bool:
        """Whether a fault of these odds happens now."""
        return odds > 0.0 and not self.fair and self.rng.random() < odds

    def thread_delay(self) -> float:
        if self.strikes(self.odds.stall):
            return STALL_SECONDS * self.rng.random()
        return THREAD_SECONDS * self.rng.random()

    async def travel(self) -> None:
        """The way to a tier's backend and back: takes its time, or does not end.

        Cancelled, it ends, or in bad luck does not before the weather clears.
        """
        if self.strikes(self.odds.hang):
            await self._hang()
        elif self.strikes(self.odds.slow):
            await asyncio.sleep(self._call_timeout_s * 2 * self.rng.random())
        elif self.rng.random() < 0.7:
            await asyncio.sleep(CALL_SECONDS * self.rng.random())

    def calm(self) -> None:
        """From now on nothing fails, and what hangs goes on."""
        self.fair = True
        for future in self._hanging:
            if not future.done():
                future.set_result(None)
        self._hanging.clear()

    def storm(self) -> None:
        self.fair = False

    def forget(self) -> None:
        """What hung did so in a process that is no more."""
        self._hanging.clear()

    async def _hang(self) -> None:
        stubborn = self.rng.random() < self.odds.stubborn
        while True:
            future = asyncio.get_running_loop().create_future()
            self._hanging.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if not stubborn or self.fair:
                    raise
            else:
                return
