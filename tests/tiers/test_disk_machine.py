"""The disk tier compared with a dict, with restarts, damage and a reached limit; also its files, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk.files import pages
from lmcache_async.testing.machines import TierMachine
from lmcache_async.testing.machines.tier import LENGTHS
from lmcache_async.testing.records import FORMAT, key_of
from lmcache_async.types import ChunkKey
from tests.support.thorough import machine_settings


def file_bytes(number: int) -> int:
    return pages(FORMAT.record_bytes(LENGTHS[number]))


class DiskMachine(TierMachine):
    @rule(direct=st.sampled_from(["auto", False]))
    def restart_with(self, direct: bool) -> None:
        self.direct = direct
        self.restart()

    def make_tier(self, directory: Path, max_bytes: int | None) -> DiskTier:
        config = DiskConfig(
            path=directory / "kv",
            max_bytes=max_bytes or 1 << 30,
            odirect=getattr(self, "direct", "auto"),
            io_threads=2,
        )
        self.root = config.root
        return DiskTier(config)

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        path = self.root / key.hex()[:2] / key.hex()
        path.write_bytes(edit(path.read_bytes()))
        return True

    @rule()
    def restart_after_a_kill(self) -> None:
        name = key_of(3).hex()
        (self.root / "tmp" / f"{name}.12").write_bytes(b"x" * 5000)  # left by a killed writer
        self.restart()
        assert list((self.root / "tmp").iterdir()) == []

    @invariant()
    def bytes_are_exact(self) -> None:
        if not hasattr(self, "tier") or self.model.damaged:
            return
        statistics = self.tier.statistics()
        keys = self.run(self.rig.keys())
        held = [number for number in range(len(LENGTHS)) if key_of(number) in keys]
        assert statistics.chunks == len(held)
        assert statistics.bytes == sum(map(file_bytes, held))
        files = [path for path in self.root.rglob("*") if path.is_file() and path.name != "lock"]
        assert sum(path.stat().st_size for path in files) == statistics.bytes


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = machine_settings(25)
