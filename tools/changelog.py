"""The changelog out of its fragments: `python -m tools.changelog` prints the next section.

`python -m tools.changelog --release 0.2.0` writes it into CHANGELOG.md and removes the fragments.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {
    "removal": "Removed",
    "change": "Changed",
    "feature": "New",
    "fix": "Fixed",
    "docs": "Documentation",
}
"""Kinds of fragments and their headings, what a reader must act on first."""

_RELEASE = re.compile(r"^\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?$")
_UNRELEASED = re.compile(r"^## Unreleased[^\n]*\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class ChangelogError(ValueError):
    """A fragment or a version that makes no changelog."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one change means to a user.

    Attributes:
        kind: One of `KINDS`.
        text: Markdown in one paragraph.
    """

    path: Path
    kind: str
    text: str


def read_fragments(folder: Path) -> list[Fragment]:
    """The fragments of a folder by name.

    Raises:
        ChangelogError: A file's name or content is not a fragment's.
    """
    return [_read(path) for path in sorted(folder.glob("*.md")) if path.name != "README.md"]


def section(title: str, fragments: Sequence[Fragment], *, links_from: str = "") -> str:
    """The section of one release.

    Args:
        links_from: Where relative links begin, seen from the changelog; nothing for one beside the fragments.
    """
    parts = [f"## {title}\n"]
    for kind, heading in KINDS.items():
        entries = [_entry(one.text, links_from) for one in fragments if one.kind == kind]
        if entries:
            parts.append(f"### {heading}\n\n" + "\n".join(entries) + "\n")
    return "\n".join(parts)


def release(version: str, day: dt.date, changelog: Path, folder: Path) -> None:
    """Put the fragments into the changelog under the version, and remove them.

    Raises:
        ChangelogError: There is nothing to release, or the version is none or is there already.
    """
    if not _RELEASE.match(version):
        raise ChangelogError(f"{version!r} is no version: expected for example 0.2.0 or 0.2.0rc1")
    text = changelog.read_text(encoding="utf-8")
    if f"## {version} " in text:
        raise ChangelogError(f"{changelog} has version {version} already")
    fragments = read_fragments(folder)
    if not fragments:
        raise ChangelogError(f"{folder} holds no fragment: there is nothing to release")
    links_from = folder.relative_to(changelog.parent).as_posix()
    new = section(f"{version} ({day.isoformat()})", fragments, links_from=links_from)
    rest = _UNRELEASED.sub("", text).rstrip("\n")
    head, mark, old = rest.partition("\n## ")
    changelog.write_text(
        f"{head.rstrip()}\n\n{new}" + (f"\n## {old}\n" if mark else ""),
        encoding="utf-8",
    )
    for one in fragments:
        one.path.unlink()


def _read(path: Path) -> Fragment:
    kind = path.name.removesuffix(".md").rpartition(".")[2]
    text = path.read_text(encoding="utf-8").strip()
    if kind not in KINDS:
        raise ChangelogError(f"{path}: expected <short-name>.<kind>.md with a kind of {', '.join(KINDS)}")
    if not text:
        raise ChangelogError(f"{path}: the fragment is empty: say what changes for a user")
    return Fragment(path, kind, text)


def _entry(text: str, links_from: str) -> str:
    if links_from:
        text = re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", lambda link: f"]({_joined(links_from, link[1])})", text)
    return "- " + text.replace("\n", "\n  ")


def _joined(folder: str, link: str) -> str:
    parts: list[str] = folder.split("/")
    for part in link.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", metavar="VERSION", help="write CHANGELOG.md and remove the fragments")
    version = parser.parse_args(arguments).release
    folder = ROOT / "docs" / "changes"
    try:
        if version is None:
            sys.stdout.write(section("Unreleased", read_fragments(folder), links_from="docs/changes"))
        else:
            release(version, dt.datetime.now(dt.UTC).date(), ROOT / "CHANGELOG.md", folder)
    except ChangelogError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
