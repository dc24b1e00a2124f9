"""kill -9 at any moment: stored records are served, torn ones are not, and the byte count is exact."""

from __future__ import annotations

import asyncio
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_async.plugins.disk import DiskConfig
from lmcache_async.testing.records import key_of
from tests.tiers.disk_child import Rig
from tests.tiers.disk_tools import RECORD_BYTES


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
