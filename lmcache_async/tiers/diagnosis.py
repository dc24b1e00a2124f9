"""Checks of `lmcache-async doctor`, as returned by `Tier.diagnose`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

INSTALL_COMPILER = "install a C compiler (gcc) and reinstall lmcache-async with pip's option --no-cache-dir"
"""Advice for a compiled module that is missing or was built from another version."""


class Outcome(StrEnum):
    """Severity of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: Name of the check, such as `file system`.
        outcome: Severity; FAIL if the tier cannot work.
        found: The facts.
        todo: What the user should do; "" if nothing is to be done.
    """

    name: str
    outcome: Outcome
    found: str
    todo: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Outcome.OK, found)


def warn(name: str, found: str, todo: str) -> Check:
    return Check(name, Outcome.WARN, found, todo)


def fail(name: str, found: str, todo: str) -> Check:
    return Check(name, Outcome.FAIL, found, todo)
