"""kill -9 at any moment: what was stored is served, nothing torn is, and the bytes are exact."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from tests.tiers.records import SLAB_BYTES, check_record, key_of

REPOSITORY = Path(__file__).parents[2]
# Writers killed from outside after so many records, and those that die at a system call of theirs.
KILLS = 6
CALLS = (1, 2, 3, 5, 8, 9, 12, 14, 17, 20, 22, 25, 27, 30, 40, 43, 46, 60, 61, 75, 76)


class Writers:
    """The program that forks writers; see crash_writer.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.crash_writer"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._line() == ["ready"]

    def run(self, config: DiskConfig, first: int, *, call: int = 0, kill_after: int = 0) -> set[int]:
        """Let a writer live until it is killed; the numbers of the records that it reported stored."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{config.path} {config.max_bytes} {first} {call}\n")
        _, pid = self._line()
        stored: set[int] = set()
        while True:
            word, number = self._line()
            if word == "dead":
                assert int(number) == signal.SIGKILL
                return stored
            stored.add(int(number))
            if kill_after and len(stored) == kill_after:
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the writers' program ended"
        return line.split()


@pytest.fixture
def writers() -> Iterator[Writers]:
    writers = Writers()
    yield writers
    writers.close()


async def check_directory(config: DiskConfig) -> set[int]:
    """Open it after a crash; the numbers of the records that are there, each one intact."""
    arena = Arena(4 * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)

    async def allocate(nbytes: int) -> Buffer:
        return await arena.lease(nbytes, timeout_s=5)

    numbers = set()
    async with DiskTier(config) as tier:
        files = [path for path in config.path.rglob("*") if path.is_file() and path.name != "lock"]
        assert all(path.parent.name == path.name[:2] for path in files), "a temporary file was left"
        assert tier.statistics().bytes == sum(path.stat().st_size for path in files) <= config.max_bytes
        assert tier.statistics().chunks == len(files)
        assert tier.statistics().corrupt == 0
        keys = [key async for key in tier.keys()]  # noqa: SIM118 - no dict
        for key in keys:
            number = int.from_bytes(key, "big")
            buffer = await tier.get(key, allocate)
            assert buffer is not None
            with buffer:
                check_record(buffer, number, 60_000)
            numbers.add(number)
    assert {key_of(number) for number in numbers} == set(keys)
    assert arena.statistics().leased_slabs == 0
    arena.close()
    return numbers


@pytest.mark.parametrize("max_slabs", [10_000, 6])
def test_a_directory_survives_kill_9_at_any_moment(writers: Writers, tmp_path: Path, max_slabs: int) -> None:
    config = DiskConfig(path=tmp_path / "kv", max_bytes=max_slabs * SLAB_BYTES)
    stored: set[int] = set()
    first = 0
    rounds = [{"kill_after": random.randint(1, 20)} for _ in range(KILLS)] + [{"call": n} for n in CALLS]
    for options in rounds:
        stored |= writers.run(config, first, **options)
        first += 1000
        there = asyncio.run(check_directory(config))

        if max_slabs == 10_000:
            assert stored <= there, "a record that was stored is gone"
        else:
            assert len(there) >= 2
        stored = there
