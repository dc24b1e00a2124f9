"""A copy of the tree to mutate; the checkout itself is never touched."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tools.mutants.mutation import Mutation

ROOT = Path(__file__).parents[2]


class MutationError(Exception):
    """A mutation cannot be made: the source has changed under it."""


def copy_tree(target: Path) -> None:
    """Copy every file that git knows or does not ignore, as it is in the checkout now; links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.exists() or source.is_symlink():  # else deleted, and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def mutated(mutation: Mutation, source: str) -> str:
    """The source with the mutation.

    Raises:
        MutationError: Its text is not there exactly once, or the result is no Python.
    """
    count = source.count(mutation.old)
    if count != 1:
        raise MutationError(
            f"{mutation.name!r}: {mutation.path} has the text {mutation.old!r} {count} times, not once:"
            " write it in tools/mutants as it stands in the source now"
        )
    text = source.replace(mutation.old, mutation.new)
    try:
        compile(text, mutation.path, "exec")
    except SyntaxError as error:
        raise MutationError(f"{mutation.name!r}: {mutation.path} would be no Python: {error}") from error
    return text
