"""Damaged directories of records: a miss or the right bytes, exact accounting, bounded memory, no crash."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.testing.records import (
    SLAB_BYTES,
    check_record,
    is_proven,
    key_of,
    record,
    small_arena,
)
from tests.fuzz.damage import Damage, apply, bounded_memory, damages
from tests.fuzz.effort import effort, keep_at_it
from tests.support.processes import open_fds

LENGTHS = [5000, 0, 20_000, 4096]  # by number; the records of a chunk have equal lengths
MAX_BYTES = 4 << 20
RECORD = re.compile("[0-9a-f]{32}")
HUGE = [1 << 30, 1 << 40, (1 << 34) + (1 << 20), (1 << 43) - 4096]


class Rig:
    """A tier over a directory that is damaged while in use."""

    def __init__(self, root: Path, **options: object) -> None:
        self.config = DiskConfig(path=root, max_bytes=8 * SLAB_BYTES, io_threads=1, **options)  # type: ignore[arg-type]
        self.arena: Arena = small_arena(8)

    def tier(self) -> DiskTier:
        tier = DiskTier(self.config)
        tier.bind(self.arena)
        return tier

    async def allocate(self, nbytes: int) -> Buffer:
        return await self.arena.lease(nbytes, timeout_s=5)

    async def fill(self) -> None:
        async with self.tier() as tier:
            for number in range(len(LENGTHS)):
                await self.put(tier, number)

    async def put(self, tier: DiskTier, number: int) -> bool:
        with record(self.arena, number, LENGTHS[number]) as buffer, suppress(TierError):
            await tier.put(key_of(number), buffer)
            return True
        return False

    async def get(self, tier: DiskTier, number: int) -> bool:
        """Return whether the engine would accept the record; if so, compare its bytes."""
        buffer = await tier.get(key_of(number), self.allocate)
        if buffer is None:
            return False
        with buffer:
            if is_proven(buffer, number):
                check_record(buffer, number, LENGTHS[number])
                return True
        await tier.reject(key_of(number), "checksum")
        assert not await tier.contains(key_of(number))
        return False

    def path(self, number: int) -> Path:
        name = key_of(number).hex()
        return self.config.root / name[:2] / name

    def check(self, tier: DiskTier) -> None:
        files = [
            path
            for path in self.config.root.glob("??/*")
            if RECORD.fullmatch(path.name)
            and path.name.startswith(path.parent.name)
            and path.is_file()
            and not path.is_symlink()
            and not path.parent.is_symlink()
        ]
        assert tier.statistics().bytes == sum(path.stat().st_size for path in files)
        assert self.arena.statistics().leased_slabs == 0


@contextmanager
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


numbers = st.integers(0, len(LENGTHS) - 1)
damaged = st.lists(st.tuples(numbers, st.lists(damages(b"x" * 9000), min_size=1, max_size=3)), max_size=4)
swaps = st.lists(st.tuples(numbers, numbers), max_size=2)


def damage(rig: Rig, changes: list[tuple[int, list[Damage]]], swaps: list[tuple[int, int]]) -> set[int]:
    """Damage files and return the numbers of the unchanged records."""
    before = {number: rig.path(number).read_bytes() for number in range(len(LENGTHS))}
    for number, parts in changes:
        rig.path(number).write_bytes(apply(parts, rig.path(number).read_bytes()))
    for one, other in swaps:
        contents = rig.path(other).read_bytes(), rig.path(one).read_bytes()
        rig.path(one).write_bytes(contents[0])
        rig.path(other).write_bytes(contents[1])
    return {number for number, content in before.items() if rig.path(number).read_bytes() == content}


def longer_than_a_slab(data: bytes) -> bytes:
    return data + bytes(SLAB_BYTES)


def test_any_damage_to_records_on_disk():
    @effort
    @given(damaged, swaps, st.booleans(), st.booleans(), st.booleans())
    @example(changes=[(0, [longer_than_a_slab])], swapped=[], reopen=True, quarantine=False, scrub=False)
    def check(
        changes: list[tuple[int, list[Damage]]],
        swapped: list[tuple[int, int]],
        reopen: bool,
        quarantine: bool,
        scrub: bool,
    ) -> None:
        async def do(rig: Rig) -> None:
            await rig.fill()
            whole = damage(rig, changes, swapped) if reopen else set()
            async with rig.tier() as tier:
                if not reopen:
                    whole = damage(rig, changes, swapped)
                with bounded_memory(MAX_BYTES):
                    if scrub:
                        report = await tier.scrub()
                        assert report.errors == 0
                    got = {number for number in range(len(LENGTHS)) if await rig.get(tier, number)}
                assert whole <= got
                for number in got:
                    assert await rig.get(tier, number)
                for number in range(len(LENGTHS)):
                    assert await rig.put(tier, number)
                    assert await rig.get(tier, number)
                rig.check(tier)

        with scratch() as root:
            asyncio.run(do(Rig(root / "kv", quarantine=quarantine)))

    keep_at_it(check)


names = st.one_of(
    st.builds(lambda number: key_of(number).hex(), st.integers(0, 300)),
    st.builds(
        lambda number, end: f"{key_of(number).hex()}{end}",
        numbers,
        st.sampled_from([".0", ".9", ".x", ".magic", "x"]),
    ),
    st.sampled_from(
        ["00", "01", "ff", "zz", "lock", "tmp", "quarantine", "notes.txt", "-", "\udcff", "a" * 200]
    ),
)
places = st.sampled_from(["", "00", "01", "tmp", "quarantine", "zz"])
kinds = st.one_of(
    st.tuples(
        st.just("file"), st.sampled_from([b"", b"x", bytes(4096), b"\xff" * 8192]) | st.binary(max_size=300)
    ),
    st.tuples(st.just("sparse"), st.sampled_from(HUGE)),
    st.tuples(
        st.just("link"),
        st.sampled_from([".", "nowhere", "../outside", "../outside/file", "00", "tmp"]),
    ),
    st.tuples(st.sampled_from(["directory", "fifo", "socket"]), st.none()),
    st.tuples(st.just("mode"), st.sampled_from([0, 0o444, 0o7777])),
    st.tuples(st.just("mtime"), st.sampled_from([-(1 << 31), 0, (1 << 31) - 1, (1 << 33)])),
)


def put_there(root: Path, place: str, name: str, kind: tuple[str, object]) -> None:
    """Create or change one entry. Links are not followed, and of existing files only mode and time change."""
    parent, path = root / place, root / place / name
    what, detail = kind
    if parent.is_symlink() or path.is_symlink() or (what in {"mode", "mtime"}) != path.exists():
        return
    with suppress(OSError):  # a file may be in the place of a directory
        parent.mkdir(exist_ok=True)
        if what == "file":
            path.write_bytes(detail)  # type: ignore[arg-type]
        elif what == "sparse":
            path.touch()
            os.truncate(path, detail)  # type: ignore[arg-type]
        elif what == "link":
            path.symlink_to(detail)  # type: ignore[arg-type]
        elif what == "directory":
            path.mkdir()
        elif what == "fifo":
            os.mkfifo(path)
        elif what == "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        elif what == "mode":
            path.chmod(detail)  # type: ignore[arg-type]
        else:
            os.utime(path, (0, detail))  # type: ignore[arg-type]


def foreign(root: Path) -> set[Path]:
    """Entries of a directory that the tier did not create, except those at paths that it creates itself."""
    return {
        path
        for path in root.rglob("*")
        if path.name not in {"lock", "tmp", "quarantine"}
        and not (path.is_file() and not path.is_symlink() and len(path.name) >= 32)
    }


def test_any_thing_in_the_directory_at_the_start():
    @effort
    @given(st.lists(st.tuples(places, names, kinds), max_size=6), st.booleans(), st.booleans())
    @example(
        things=[("", "00", ("link", "tmp")), ("tmp", key_of(0).hex(), ("sparse", 1 << 30))],
        filled=False,
        quarantine=False,
    )
    def check(things: list[tuple[str, str, tuple[str, object]]], filled: bool, quarantine: bool) -> None:
        async def do(rig: Rig) -> None:
            if filled:
                await rig.fill()
            else:
                rig.config.root.mkdir()
            for thing in things:
                put_there(rig.config.root, *thing)
            outside = rig.config.root.parent / "outside"
            outside.mkdir()
            (outside / "file").write_bytes(b"not ours")
            others = foreign(rig.config.root)
            tier = rig.tier()
            refusal = ""
            with bounded_memory(MAX_BYTES):
                try:
                    await tier.__aenter__()
                except TierUnavailableError as error:
                    refusal = str(error)
            if refusal:
                assert str(rig.config.root) in refusal
                return
            try:
                assert tier.statistics().bytes <= rig.config.max_bytes
                with bounded_memory(MAX_BYTES):
                    await tier.scrub()
                    for number in range(len(LENGTHS)):
                        with suppress(TierError):
                            await asyncio.wait_for(rig.get(tier, number), 60)
                for number in range(len(LENGTHS)):
                    if await rig.put(tier, number):
                        assert await rig.get(tier, number)
                rig.check(tier)
                assert tier.statistics().bytes <= rig.config.max_bytes
            finally:
                await tier.__aexit__(None, None, None)
            assert others - foreign(rig.config.root) <= records_of_other_kinds(others)
            assert [path.read_bytes() for path in outside.iterdir()] == [b"not ours"]

        with scratch() as root:
            fds = open_fds()
            asyncio.run(do(Rig(root / "kv", quarantine=quarantine)))
            assert open_fds() <= fds

    keep_at_it(check)


def records_of_other_kinds(paths: set[Path]) -> set[Path]:
    """A link, a pipe or a socket with the name of a record is replaced by a put."""
    ours = {key_of(number).hex() for number in range(len(LENGTHS))}
    return {path for path in paths if path.name in ours}
