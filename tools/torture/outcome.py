"""Result and progress of a campaign."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

MAX_PROBLEMS = 20
PROGRESS_S = 10.0


@dataclass(slots=True)
class Outcome:
    """Result of a campaign.

    Attributes:
        name: Name of the campaign.
        counts: Counts of actions and observations, by description.
        problems: Violated guarantees, at most `MAX_PROBLEMS`.
        seconds: Duration.
    """

    name: str
    counts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _printed: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    @property
    def aborted(self) -> bool:
        """Whether there are so many problems that the campaign stops."""
        return len(self.problems) >= MAX_PROBLEMS

    def add(self, what: str, count: float = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def problem(self, text: str) -> None:
        if not self.aborted:
            self.problems.append(text)
            self._print(f"PROBLEM: {text}")

    def expect(self, condition: bool, text: str) -> None:
        """Add a problem unless the condition holds."""
        if not condition:
            self.problem(text)

    def left(self, what: str, number: int, seconds: float) -> bool:
        """Return whether the campaign continues, and print its progress.

        Args:
            what: Name of a count.
            number: The count at which it ends.
            seconds: Duration in place of the count, if not 0.
        """
        if self.aborted:
            return False
        done, of, unit = float(self.counts.get(what, 0)), float(number), what
        if seconds:
            done, of, unit = time.monotonic() - self._started, seconds, "seconds"
        self.progress(done, of, unit)
        return done < of

    def progress(self, done: float, of: float, unit: str) -> None:
        """Print a line of progress every ten seconds."""
        now = time.monotonic()
        if now - self._printed >= PROGRESS_S:
            self._printed = now
            self._print(
                f"{now - self._started:5.0f} s  {done:,.0f} of {of:,.0f} {unit}, {len(self.problems)} problems"
            )

    def end(self) -> Outcome:
        self.seconds = round(time.monotonic() - self._started, 1)
        return self

    def _print(self, text: str) -> None:
        sys.stderr.write(f"{self.name:>8}: {text}\n")
        sys.stderr.flush()
