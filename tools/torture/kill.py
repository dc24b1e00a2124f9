"""Kills a storing engine with SIGKILL at random moments, then verifies its directory."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from lmcache_async.engine.engine import CacheEngine
from tools.torture.outcome import Outcome
from tools.torture.prompts import Bench, disk_tiers, prompt, quiet

ROOT = Path(__file__).parents[2]
LONGEST_S = 0.2  # from the fork, or from the first store, to the kill
STORING = 0.8  # share of kills after the engine has opened; the others may hit it while it opens
ROOMY, NARROW = 4 << 30, 24
"""A limit in bytes that is never reached, and one in records that is reached soon."""
KILLS_A_DIRECTORY = 12
AT_ONCE = 24  # records loaded by one call
UNCHECKED = 0.2  # share of kills after which the directory is not verified before the next kill
CHECK_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Life:
    """Output of one engine before it was killed.

    Attributes:
        began: Prompts below this number may be stored, completely or partly.
        stored: Prompts that it reported as stored.
        status: Exit status; -1 while it runs.
    """

    began: int
    stored: set[int] = field(default_factory=set)
    status: int = -1


class Writers:
    """Client of the program that forks engines."""

    def __init__(self) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no threads before a fork
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.torture.writer"],
            cwd=ROOT,
            env=os.environ | threads,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._lines: list[str] = []
        self._rest = ""
        self._line(60.0)

    def run(self, path: Path, max_bytes: int, first: int, life_s: float, *, opened: bool) -> Life:
        """Run an engine and kill it `life_s` seconds after it has opened, or after its fork."""
        os.write(self._input, f"{max_bytes} {first} {path}\n".encode())
        _, _, pid = (self._line(60.0) or "").partition(" ")
        deadline = time.monotonic() + (60.0 if opened else life_s)
        life = Life(first)
        killed = False
        while True:
            line = self._line(60.0 if killed else max(deadline - time.monotonic(), 0.0))
            if line is None:
                if killed:
                    return life
                os.kill(int(pid), signal.SIGKILL)
                killed = True
                continue
            word, _, number = line.partition(" ")
            if word == "dead":
                life.status = int(number)
                return life
            if word == "began":
                if opened and life.began == first:
                    deadline = time.monotonic() + life_s
                life.began = int(number) + 1
            else:
                life.stored.add(int(number))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _line(self, timeout_s: float) -> str | None:
        """Return the next line; None after a timeout."""
        deadline = time.monotonic() + timeout_s
        while not self._lines:
            if not select.select([self._output], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                return None
            data = os.read(self._output, 1 << 16).decode()
            if not data:
                raise RuntimeError("the writer program has ended")
            *self._lines, self._rest = (self._rest + data).split("\n")
        return self._lines.pop(0)


class Directory:
    """A directory and the prompts that were reported as stored in it.

    Attributes:
        began: Prompts below this number may be stored, completely or partly.
        reported: Prompts that must be stored completely, unless the directory has evicted some.
    """

    def __init__(self, bench: Bench, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.began = 0
        self.reported: set[int] = set()
        self._bench = bench

    def files(self) -> list[Path]:
        """Return all files but the lock: records and unfinished writes."""
        return [path for path in self.path.rglob("*") if path.is_file() and path.name != "lock"]

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    async def check(self, outcome: Outcome) -> None:
        """Open the directory; check its accounting, leftover files, every record, and the reported prompts."""
        rig, tiers = self._bench.rig, disk_tiers(self.path, self.max_bytes)
        async with rig.open(registry=self._bench.registry, tiers=tiers) as engine:
            self._count(engine, outcome)
            lacking = await self._prove(engine, outcome)
        if self.max_bytes == ROOMY:
            lost = sorted(lacking & self.reported)
            outcome.expect(
                not lost, f"{self.path}: prompts {lost[:5]} were reported as stored and are missing"
            )
            outcome.add("reported prompts found", len(self.reported - lacking))

    def _count(self, engine: CacheEngine, outcome: Outcome) -> None:
        files, held = self.files(), engine.statistics().tiers["disk"]
        there = self.bytes_on_disk()
        outcome.expect(
            held.bytes == there <= self.max_bytes,
            f"{self.path}: {held.bytes} bytes accounted, {there} on disk, limit {self.max_bytes}",
        )
        outcome.expect(held.chunks == len(files), f"{self.path}: {held.chunks} chunks, {len(files)} files")
        outcome.expect(held.corrupt == 0, f"{self.path}: {held.corrupt} records were torn")
        strays = [path for path in files if path.parent.name != path.name[:2]]
        outcome.expect(not strays, f"{self.path}: left over: {strays[:3]}")

    async def _prove(self, engine: CacheEngine, outcome: Outcome) -> set[int]:
        """Load every record and compare its bytes. Return the prompts that lack a chunk."""
        names = {path.name for path in self.files()}
        there, lacking = [], set()
        for number in range(self.began):
            for chunk, content in self._bench.with_content(prompt(number)):
                if chunk.key.hex() in names:
                    there.append((chunk, content))
                else:
                    lacking.add(number)
        outcome.expect(len(there) == len(names), f"{self.path}: {len(names) - len(there)} unknown records")
        for start in range(0, len(there), AT_ONCE):
            part = there[start : start + AT_ONCE]
            served, wrong = await self._bench.load(engine, part)
            outcome.expect(wrong == 0, f"{self.path}: {wrong} slots have wrong bytes")
            outcome.expect(served == len(part), f"{self.path}: {len(part) - served} records are not served")
            outcome.add("records proven", served)
        return lacking


class Campaign:
    """Kills engines one after the other, regularly in a new directory."""

    def __init__(self, place: Path, outcome: Outcome, seed: int) -> None:
        self.writers = Writers()
        self._outcome = outcome
        self._place = place
        self._random = random.Random(seed)
        self._bench = Bench()
        self._directory = self._fresh()
        self._descriptors = -1

    def kill_one(self) -> None:
        """Start an engine, kill it, and mostly verify the directory; otherwise the next engine opens it as it is."""
        directory, outcome = self._directory, self._outcome
        if outcome.counts["kills"] % KILLS_A_DIRECTORY == 0 and outcome.counts["kills"]:
            shutil.rmtree(directory.path)
            self._directory = directory = self._fresh()
        life = self.writers.run(
            directory.path,
            directory.max_bytes,
            directory.began,
            self._random.random() * LONGEST_S,
            opened=self._random.random() < STORING,
        )
        outcome.expect(life.status == signal.SIGKILL, f"a writer ended without a kill: status {life.status}")
        outcome.add("kills")
        outcome.add("kills with something stored", bool(life.stored))
        directory.reported |= life.stored
        directory.began = life.began
        there = directory.bytes_on_disk()
        outcome.expect(
            there <= directory.max_bytes,
            f"{directory.path}: {there} bytes including unfinished writes, limit {directory.max_bytes}",
        )
        if self._random.random() < UNCHECKED:
            outcome.add("kills without a check")
            return
        uvloop.run(asyncio.wait_for(directory.check(outcome), CHECK_TIMEOUT_S))
        self._count_descriptors()

    def _fresh(self) -> Directory:
        done = self._outcome.counts["kills"]
        narrow = (done // KILLS_A_DIRECTORY) % 2
        max_bytes = NARROW * self._bench.rig.slab_bytes if narrow else ROOMY
        return Directory(self._bench, self._place / f"{done}", max_bytes)

    def _count_descriptors(self) -> None:
        gc.collect()
        found = len(list(Path("/proc/self/fd").iterdir()))
        self._descriptors = found if self._descriptors < 0 else self._descriptors
        self._outcome.expect(
            found <= self._descriptors, f"{found} files are open, at the start {self._descriptors}"
        )


def run(*, kills: int, seconds: float, seed: int) -> Outcome:
    """Kill `kills` engines, or run for `seconds` if not 0. After a failure the directory is kept."""
    outcome = Outcome("kill", {"kills": 0, "records proven": 0, "reported prompts found": 0, "seed": seed})
    place = Path(tempfile.mkdtemp(prefix="lmcache-async-kill-"))
    campaign = Campaign(place, outcome, seed)
    try:
        with quiet():
            # The directory is kept after a failure.
            while outcome.left("kills", kills, seconds) and not outcome.failed:
                campaign.kill_one()
    finally:
        campaign.writers.close()
        if not outcome.failed:
            shutil.rmtree(place)
    return outcome.end()
