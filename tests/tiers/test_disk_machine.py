"""The disk tier against a dict, over restarts, damage and a limit that is reached."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk.io import pages
from tests.tiers.records import FORMAT, SLAB_BYTES, check_record, key_of, record

NUMBERS = st.integers(0, 9)
# A chunk's record always has the same length, as it always has the same content.
LENGTHS = [0, 1, 4095, 4096, 4097, 9000, 20000, 30000, 50000, 64 * 1024]


def file_bytes(number: int) -> int:
    return pages(FORMAT.record_bytes(LENGTHS[number]))


class DiskMachine(RuleBasedStateMachine):
    """`held` is what may be there: everything put and not removed, less what was evicted."""

    @initialize(max_slabs=st.sampled_from([2, 4, 100]), direct=st.sampled_from(["auto", False]))
    def start(self, max_slabs: int, direct: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.config = DiskConfig(
            path=self.directory / "kv", max_bytes=max_slabs * SLAB_BYTES, odirect=direct, io_threads=2
        )
        self.runner = asyncio.Runner()
        self.arena = Arena(16 * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)
        self.held: set[int] = set()
        self.tier = DiskTier(self.config)
        self.runner.run(self.tier.__aenter__())

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.runner.run(self.tier.__aexit__(None, None, None))
        assert self.arena.statistics().leased_slabs == 0
        self.runner.close()
        self.arena.close()
        shutil.rmtree(self.directory)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=6, unique=True))
    def put(self, numbers: list[int]) -> None:
        items = [(key_of(number), record(self.arena, number, LENGTHS[number])) for number in numbers]
        results = self.runner.run(self.tier.put_many(items))
        for _, buffer in items:
            buffer.release()
        self.held.update(number for number, result in zip(numbers, results, strict=True) if result is None)
        self.learn_evictions()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=6))
    def get(self, numbers: list[int]) -> None:
        results = self.runner.run(self.tier.get_many([key_of(number) for number in numbers], self.allocate))
        for number, result in zip(numbers, results, strict=True):
            assert (number in self.held) == isinstance(result, Buffer), result
            if isinstance(result, Buffer):
                with result:
                    check_record(result, number, LENGTHS[number])

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        assert self.runner.run(self.tier.remove(key_of(number))) == (number in self.held)
        self.held.discard(number)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), damage=st.sampled_from(["cut", "half", "zeros", "gone"]))
    def damage(self, data: st.DataObject, damage: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        name = key_of(number).hex()
        path = self.config.root / name[:2] / name
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        elif damage == "zeros":
            path.write_bytes(bytes(len(content)))
        else:
            path.write_bytes(content[: -1 if damage == "cut" else len(content) // 2])
        assert self.runner.run(self.tier.get(key_of(number), self.allocate)) is None
        self.held.discard(number)

    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        if crash:  # what a writer that was killed leaves
            name = key_of(3).hex()
            (self.config.root / "tmp" / f"{name}.12").write_bytes(b"x" * 5000)
        self.runner.run(self.tier.__aexit__(None, None, None))
        self.tier = DiskTier(self.config)
        self.runner.run(self.tier.__aenter__())
        assert list((self.config.root / "tmp").iterdir()) == []

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=10))
    def look(self, numbers: list[int]) -> None:
        there = self.runner.run(self.tier.contains_many([key_of(number) for number in numbers]))
        assert there == [number in self.held for number in numbers]

    @invariant()
    def bytes_are_exact(self) -> None:
        if not hasattr(self, "tier"):
            return
        statistics = self.tier.statistics()
        assert statistics.chunks == len(self.held)
        assert statistics.bytes == sum(map(file_bytes, self.held)) <= self.config.max_bytes
        files = [path for path in self.config.root.rglob("*") if path.is_file() and path.name != "lock"]
        assert sum(path.stat().st_size for path in files) == statistics.bytes
        assert self.arena.statistics().leased_slabs == 0

    def learn_evictions(self) -> None:
        keys = self.runner.run(self._keys())
        there = {number for number in self.held if key_of(number) in keys}
        total = sum(map(file_bytes, self.held))
        assert total > self.config.max_bytes or there == self.held, "evicted without need"
        self.held = there

    async def _keys(self) -> set[bytes]:
        return {key async for key in self.tier.keys()}  # noqa: SIM118 - no dict

    async def allocate(self, nbytes: int) -> Buffer:
        return await self.arena.lease(nbytes, timeout_s=5)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
