"""kill -9 of a storing engine at random moments; then everything that it left is looked at."""

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
STORING = 0.8  # of the kills hit an engine that stores; the others one that may still be opening
ROOMY, NARROW = 4 << 30, 24
"""Bytes that are never used up, and records that are soon used up."""
KILLS_A_DIRECTORY = 12
AT_ONCE = 24  # records loaded by one call
UNSEEN = 0.2  # of the kills are followed by another one before anybody looks
CHECK_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Life:
    """What one engine said before it was killed.

    Attributes:
        began: All prompts below this number may be there, as a whole or in part.
        stored: Those that it reported stored.
        status: How it ended; -1 while it has not.
    """

    began: int
    stored: set[int] = field(default_factory=set)
    status: int = -1


class Writers:
    """The program that forks engines."""

    def __init__(self) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no thread before a fork
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
        """Let an engine live for so long, counted from when it has opened, or from its fork."""
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
        """The next line; None when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while not self._lines:
            if not select.select([self._output], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                return None
            data = os.read(self._output, 1 << 16).decode()
            if not data:
                raise RuntimeError("the writers' program ended")
            *self._lines, self._rest = (self._rest + data).split("\n")
        return self._lines.pop(0)


class Directory:
    """One directory with what was reported stored in it.

    Attributes:
        began: All prompts below this number may be there, as a whole or in part.
        reported: Those that must be there as a whole, in a roomy directory.
    """

    def __init__(self, bench: Bench, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.began = 0
        self.reported: set[int] = set()
        self._bench = bench

    def files(self) -> list[Path]:
        """All but the lock: records, and what was being written."""
        return [path for path in self.path.rglob("*") if path.is_file() and path.name != "lock"]

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    async def check(self, outcome: Outcome) -> None:
        """Open it, count its bytes, look for leftovers, prove every record, look for what must be there."""
        rig, tiers = self._bench.rig, disk_tiers(self.path, self.max_bytes)
        async with rig.open(registry=self._bench.registry, tiers=tiers) as engine:
            self._count(engine, outcome)
            lacking = await self._prove(engine, outcome)
        if self.max_bytes == ROOMY:
            lost = sorted(lacking & self.reported)
            outcome.expect(not lost, f"{self.path}: prompts {lost[:5]} were stored and are gone")
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
        """Load every record and compare its bytes; the prompts that lack one."""
        names = {path.name for path in self.files()}
        there, lacking = [], set()
        for number in range(self.began):
            for chunk, content in self._bench.with_content(prompt(number)):
                if chunk.key.hex() in names:
                    there.append((chunk, content))
                else:
                    lacking.add(number)
        outcome.expect(len(there) == len(names), f"{self.path}: {len(names) - len(there)} records of nobody")
        for start in range(0, len(there), AT_ONCE):
            part = there[start : start + AT_ONCE]
            served, wrong = await self._bench.load(engine, part)
            outcome.expect(wrong == 0, f"{self.path}: {wrong} slots have wrong bytes")
            outcome.expect(served == len(part), f"{self.path}: {len(part) - served} records are not served")
            outcome.add("records proven", served)
        return lacking


class Campaign:
    """Engines killed one after the other, in a fresh directory every so often."""

    def __init__(self, place: Path, outcome: Outcome, seed: int) -> None:
        self.writers = Writers()
        self._outcome = outcome
        self._place = place
        self._random = random.Random(seed)
        self._bench = Bench()
        self._directory = self._fresh()
        self._descriptors = -1

    def kill_one(self) -> None:
        """Start an engine, kill it, and most times look at what it left; else the next engine finds that."""
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
        outcome.expect(life.status == signal.SIGKILL, f"a writer ended by itself: status {life.status}")
        outcome.add("kills")
        outcome.add("kills with something stored", bool(life.stored))
        directory.reported |= life.stored
        directory.began = life.began
        there = directory.bytes_on_disk()
        outcome.expect(
            there <= directory.max_bytes,
            f"{directory.path}: {there} bytes with those half written, limit {directory.max_bytes}",
        )
        if self._random.random() < UNSEEN:
            outcome.add("kills before the check of the next one")
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
            found <= self._descriptors, f"{found} files are open, {self._descriptors} were at first"
        )


def run(*, kills: int, seconds: float, seed: int) -> Outcome:
    """Kill `kills` times, or for so long if `seconds` is not 0."""
    outcome = Outcome("kill", {"kills": 0, "records proven": 0, "reported prompts found": 0, "seed": seed})
    place = Path(tempfile.mkdtemp(prefix="lmcache-async-kill-"))
    deadline = time.monotonic() + seconds
    campaign = Campaign(place, outcome, seed)
    try:
        with quiet():
            while not outcome.failed:  # then the directory is there to be looked at
                done = outcome.counts["kills"]
                if time.monotonic() > deadline if seconds else done >= kills:
                    break
                campaign.kill_one()
                if seconds:
                    outcome.tell(seconds - (deadline - time.monotonic()), seconds, "seconds")
                else:
                    outcome.tell(done + 1, kills, "kills")
    finally:
        campaign.writers.close()
        if not outcome.failed:
            shutil.rmtree(place)
    return outcome.end()
