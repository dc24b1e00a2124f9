"""What a campaign came to, and how it tells while it runs."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

MAX_PROBLEMS = 20
PROGRESS_S = 10.0


@dataclass(slots=True)
class Outcome:
    """Of one campaign.

    Attributes:
        name: The campaign's.
        counts: What was done and seen, by what it is.
        problems: Promises that were not kept; the first 20 of them.
        seconds: How long it took.
    """

    name: str
    counts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _told: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    @property
    def hopeless(self) -> bool:
        """Enough went wrong to stop looking."""
        return len(self.problems) >= MAX_PROBLEMS

    def add(self, what: str, count: float = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def problem(self, text: str) -> None:
        if not self.hopeless:
            self.problems.append(text)
            self._print(f"PROBLEM: {text}")

    def expect(self, condition: bool, text: str) -> None:
        """A promise: the text says how it was broken."""
        if not condition:
            self.problem(text)

    def tell(self, done: float, of: float, unit: str) -> None:
        """A line of progress, every ten seconds."""
        now = time.monotonic()
        if now - self._told >= PROGRESS_S:
            self._told = now
            self._print(
                f"{now - self._started:5.0f} s  {done:,.0f} of {of:,.0f} {unit}, {len(self.problems)} problems"
            )

    def end(self) -> Outcome:
        self.seconds = round(time.monotonic() - self._started, 1)
        return self

    def _print(self, text: str) -> None:
        sys.stderr.write(f"{self.name:>8}: {text}\n")
        sys.stderr.flush()
