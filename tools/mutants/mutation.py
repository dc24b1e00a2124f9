"""A mutation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of the source that breaks a promise.

    Attributes:
        name: Description, matched by `--only`.
        path: The file, relative to the root.
        old: Text that occurs in the file exactly once.
        new: Its replacement.
        tests: Test files, or single tests of slow files. At least one of the tests must fail.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
