"""What was decided, as a digest: equal for two runs exactly when they took the same steps."""

from __future__ import annotations

from array import array
from collections import deque

import xxhash

_FLUSH = 4096


class Trace:
    """Takes in every scheduling decision of a simulation.

    Attributes:
        decisions: How many so far.
        recent: The last few, as (virtual seconds, what ran, out of how many that could have run).
    """

    def __init__(self, *, keep: int = 40) -> None:
        self.decisions = 0
        self.recent: deque[tuple[float, str, int]] = deque(maxlen=keep)
        self._digest = xxhash.xxh3_128()
        self._numbers = array("q")
        self._names: dict[str, int] = {}

    def decide(self, now: float, what: str, number: int, chosen: int, candidates: int) -> None:
        """One step: callback `what` (of task `number`, if it is one) ran as the `chosen` of `candidates`."""
        self.decisions += 1
        name = self._names.get(what)
        if name is None:
            name = self._name(what)
        self._numbers.extend((int(now * 1e9), name, number, chosen, candidates))
        self.recent.append((now, what, candidates))
        if len(self._numbers) >= _FLUSH:
            self._flush()

    def note(self, text: str) -> None:
        """Something else that belongs to the run: an operation that began, and how it ended."""
        self._flush()
        self._digest.update(text.encode())

    def digest(self) -> str:
        """32 hex digits over all of it."""
        self._flush()
        return self._digest.hexdigest()

    def _name(self, what: str) -> int:
        self.note(what)
        return self._names.setdefault(what, len(self._names))

    def _flush(self) -> None:
        self._digest.update(self._numbers)
        del self._numbers[:]
