"""kill -9 at any moment: stored records are served, torn ones are not, and the byte count is exact."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.testing.records import SLAB_BYTES, check_record, key_of
from tests.tiers.disk_child import Children, Rig
from tests.tiers.disk_tools import RECORD_BYTES

REPOSITORY = Path(__file__).parents[2]
# Writers killed from outside after a number of records, and writers that kill themselves at a system call.
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
        """Run a writer until it is killed, and return the numbers of the records that it reported as stored."""
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
def writers():
    writers = Writers()
    yield writers
    writers.close()


async def check_directory(config: DiskConfig) -> set[int]:
    """Open the directory after a crash, and return the numbers of its records, which must be intact."""
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
def test_a_directory_survives_kill_9_at_any_moment(writers, tmp_path, max_slabs):
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


@dataclass
class Crash:
    """Expected content after a crash, from the system calls that had ended before."""

    config: DiskConfig
    finished: bool = False
    calls: list[str] = field(default_factory=list)
    there: set[str] = field(default_factory=set)
    put_aside: int = 0

    def note(self, line: str) -> None:
        word, *rest = line.split()
        if word == "call":
            self.calls.append(rest[0])
            names = [Path(name).name for name in rest[1:]]
            if rest[0] == "replace":
                self.there.add(names[1])
            elif rest[0] == "rename":
                self.there.discard(names[0])
                self.put_aside += 1
            elif rest[0] == "unlink":
                self.there.discard(names[0])
        elif word == "failed":
            self.calls.append(rest[0])
        elif word == "put":
            assert rest[1] == "stored"
            assert key_of(int(rest[0])).hex() in self.there
        elif word == "finished":
            self.finished = True
        else:
            assert word in {"get", "dead"}, line

    async def check(self) -> None:
        """Check that the directory opens, has exactly the published records, and accepts more."""
        rig = Rig(self.config)
        async with rig.tier as tier:
            rig_keys = {key.hex() async for key in tier.keys()}  # noqa: SIM118 - no dict
            assert rig_keys == self.there
            assert tier.statistics().corrupt == 0
            kept = [path for path in (self.config.root / "quarantine").glob("*") if path.is_file()]
            assert len(kept) == self.put_aside
            for path in kept:
                path.unlink()
            rig.check()
            for name in sorted(self.there):
                assert await rig.get(int(name, 16)) == "hit"
            assert (await tier.scrub()).chunks == len(self.there)
            assert await rig.put(77) == "stored"
            assert tier.statistics().bytes <= self.config.max_bytes
            rig.check()
        rig.arena.close()


@pytest.fixture(scope="module")
def children():
    children = Children()
    yield children
    children.close()


def test_a_directory_survives_kill_9_before_every_system_call(children, tmp_path):
    """Before each call, and thereby after each; of each write, the first page is written."""
    call = 0
    seen: set[str] = set()
    while True:
        call += 1
        config = DiskConfig(path=tmp_path / f"kv-{call}", max_bytes=3 * RECORD_BYTES)
        crash = Crash(config)
        arguments = {"path": str(config.path), "max_bytes": config.max_bytes, "call": call, "torn": True}
        for line in children.start("die_at_call", **arguments):
            crash.note(line)
        seen.update(crash.calls)
        asyncio.run(crash.check())
        shutil.rmtree(config.path)
        if crash.finished:
            break
        assert line == f"dead {int(signal.SIGKILL)}"
        assert len(crash.calls) == call - 1

    assert call > 100
    assert {"pwrite", "replace", "rename", "unlink", "fsync", "mkdir", "flock", "ftruncate"} <= seen
