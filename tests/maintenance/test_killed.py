"""A copy, a gc and a verify that are killed with SIGKILL and repeated."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.maintenance.filled import content, damage, invoke, record_files, told
from tests.support.forks import Children

CALLS = (1, 2, 3, 5, 8, 11, 14, 20, 35, 60)
"""System calls at which a command is killed; a command with fewer calls ends by itself."""


class Commands(Children):
    """Runs commands in child processes; see killed_child.py."""

    def killed(self, call: int, *arguments: object) -> bool:
        """Return whether the command was killed at that call; otherwise it ended before."""
        texts = [str(argument) for argument in arguments]
        *_, last = self.start("run", call=call, arguments=texts)
        return last == f"dead {signal.SIGKILL}"


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    started = Commands("tests.maintenance.killed_child")
    yield started
    started.close()


def test_a_copy_that_is_killed_leaves_whole_records_and_the_next_one_copies_the_rest(
    commands: Commands, root: Path, tmp_path: Path
) -> None:
    killed = there = 0
    for call in CALLS:
        place = tmp_path / f"there-{call}"
        killed += commands.killed(call, "copy", root, place, "--in-flight", 1)
        assert content(place).items() <= content(root).items()

        done = told("copy", root, place)

        there += done["there"]
        assert done["records"] + done["there"] == 8
        assert content(place) == content(root)
        assert list((place / "tmp").iterdir()) == []

    assert killed >= 6
    assert there >= 4


def test_a_killed_gc_leaves_prefixes_and_the_next_run_continues(
    commands: Commands, root: Path, tmp_path: Path
) -> None:
    killed = 0
    for call in (2, 3, 4, 5, 7):
        place = tmp_path / f"cache-{call}"
        subprocess.run(["cp", "-a", str(root), str(place)], check=True)
        before = [path.name for path in record_files(place)]
        killed += commands.killed(call, "gc", place, "--max-bytes", 3 * 8192)
        left = [path.name for path in record_files(place)]
        assert left == before[: len(left)]
        assert len(left) >= 3

        told("gc", place, "--max-bytes", 3 * 8192)

        assert [path.name for path in record_files(place)] == before[:3]

    assert killed >= 3


def test_a_verify_that_is_killed_while_it_puts_aside_loses_nothing(
    commands: Commands, root: Path, tmp_path: Path
) -> None:
    for path in record_files(root)[:4]:
        damage(path)
    names = set(content(root))
    for call in (2, 4, 5, 7, 9):
        place = tmp_path / f"cache-{call}"
        subprocess.run(["cp", "-a", str(root), str(place)], check=True)
        commands.killed(call, "verify", place, "--quarantine")

        assert invoke("verify", place, "--quarantine").exit_code in {0, 1}

        aside = {path.name.partition(".")[0] for path in (place / "quarantine").iterdir()}
        assert aside | set(content(place)) == names
        assert len(aside) == 4
