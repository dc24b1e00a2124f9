"""What a check of `lmcache-async doctor` comes to, and the deadline that each one has."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")


class Outcome(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: Of the check; with the tier's id in brackets where it is of one.
        outcome: How bad it is.
        found: What there is.
        todo: What to do about it; "" where nothing is to be done.
    """

    name: str
    outcome: Outcome
    found: str
    todo: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, found: str) -> Check:
    return Check(name, Outcome.OK, found)


def warn(name: str, found: str, todo: str) -> Check:
    return Check(name, Outcome.WARN, found, todo)


def fail(name: str, found: str, todo: str) -> Check:
    return Check(name, Outcome.FAIL, found, todo)


class HungError(Exception):
    """It did not end in time; its thread still runs."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` gives, in a thread of its own that is left alone after so many seconds.

    Raises:
        HungError: It has not ended by then.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            results.put((None, error))

    threading.Thread(target=run, name="lmcache-async-check", daemon=True).start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise HungError(f"it did not end in {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # without an error it is what work gave


def guarded(name: str, seconds: float, work: Callable[[], Iterable[Check]]) -> tuple[list[Check], bool]:
    """What a group of checks comes to, and whether it hung; whatever goes wrong in it is one of them."""
    try:
        return within(seconds, lambda: list(work())), False
    except HungError as error:
        return [fail(name, str(error), "see whether the disk or the server behind it hangs")], True
    except Exception as error:  # noqa: BLE001 - a check that fails harms no other
        text = f"{type(error).__name__}: {error!s:.300}"
        return [fail(name, f"the check itself failed: {text}", "report it, with this line")], False
