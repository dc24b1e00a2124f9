"""Mutations, and the copy of the repository to which they are applied. The checkout is never changed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of the source that removes a guarantee.

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


class MutationError(Exception):
    """A mutation does not fit the source any more."""


def copy_tree(target: Path) -> None:
    """Copy all files that git tracks or does not ignore, and the compiled module. Links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    compiled = [str(path.relative_to(ROOT)) for path in ROOT.glob("lmcache_async/**/*.so")]
    for name in filter(None, [*listed.stdout.split("\0"), *compiled]):
        source = ROOT / name
        if source.exists() or source.is_symlink():  # otherwise deleted and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def mutated(mutation: Mutation, source: str) -> str:
    """Return the source with the mutation.

    Raises:
        MutationError: The old text does not occur exactly once, or the result is not valid Python.
    """
    count = source.count(mutation.old)
    if count != 1:
        raise MutationError(
            f"{mutation.name!r}: {mutation.path} contains {mutation.old!r} {count} times instead of once:"
            " update the mutation in tools/mutants"
        )
    text = source.replace(mutation.old, mutation.new)
    try:
        compile(text, mutation.path, "exec")
    except SyntaxError as error:
        raise MutationError(
            f"{mutation.name!r}: {mutation.path} would not be valid Python: {error}"
        ) from error
    return text
