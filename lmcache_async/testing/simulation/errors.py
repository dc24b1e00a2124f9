"""How a simulation ends before its time."""

from __future__ import annotations

from collections.abc import Sequence


class Violation(AssertionError):
    """Something happened that must never happen; the message says what, and with which values."""


class Deadlock(Violation):
    """Nothing is ready, no timer runs, and tasks wait.

    Attributes:
        stacks: Each waiting task with the frames that it waits in.
    """

    def __init__(self, message: str, stacks: Sequence[str]) -> None:
        super().__init__("\n".join([message, *stacks]))
        self.stacks = tuple(stacks)


class ProcessCrashed(BaseException):
    """The simulated process ends here, between two steps of its loop. Not to be caught by what runs in it."""


class Hang(KeyboardInterrupt):
    """Real time passes and the simulation does not go on. A KeyboardInterrupt: no task and no border keeps it."""
