"""What a mutation is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of the source that breaks a promise.

    Attributes:
        name: What `--only` takes.
        path: The file, relative to the root.
        old: Text that is in the file exactly once.
        new: What stands there instead.
        tests: Files, or single tests of long ones; at least one test of them fails.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
