"""Functions for child processes of the disk tier's tests; see tests.support.forks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import Any

from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk import files as disk_files
from lmcache_async.testing.records import SLAB_BYTES, check_record, key_of, record, small_arena
from tests.support.forks import say, serve
from tests.support.processes import open_fds
from tests.support.tiers import handle_of

NOBODY = 65534


class Rig:
    """A tier, an arena for it, and calls whose results are words."""

    def __init__(self, config: DiskConfig, slabs: int = 8) -> None:
        self.config = config
        self.arena: Arena = small_arena(slabs)
        self.tier = DiskTier(config)

    async def put(self, number: int) -> str:
        with record(self.arena, number) as buffer:
            try:
                await self.tier.put(key_of(number), buffer)
            except TierError as error:
                return type(error).__name__
        return "stored"

    async def get(self, number: int) -> str:
        try:
            buffer = await self.tier.get(key_of(number), self.allocate)
        except TierError as error:
            return type(error).__name__
        if buffer is None:
            return "miss"
        with buffer:
            check_record(buffer, number)
        return "hit"

    async def allocate(self, nbytes: int) -> Buffer:
        return await self.arena.lease(nbytes, timeout_s=5)

    def check(self) -> None:
        """Check that nothing is leaked and that the counters match the directory."""
        assert self.arena.statistics().leased_slabs == 0
        files = [p for p in self.config.root.rglob("*") if p.is_file() and p.name != "lock"]
        assert all(path.parent.name == path.name[:2] for path in files), files
        assert self.tier.statistics().bytes == sum(path.stat().st_size for path in files)


# Functions for children.


def own(path: str, ready: str) -> None:
    """Open the directory and keep it until killed, with an idle forked child."""

    async def do() -> None:
        async with DiskTier(DiskConfig(path=path, max_bytes=1 << 20)):
            forked, reached = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(reached, b".")  # the directory is closed here by now
                signal.pause()
                os._exit(0)
            os.read(forked, 1)
            say(f"{ready} {os.getpid()} {child}")
            signal.pause()

    asyncio.run(do())


def use_after_fork(path: str) -> None:
    """In a forked child the inherited tier and the directory refuse use; the parent continues."""

    async def do() -> None:
        rig = Rig(DiskConfig(path=path, max_bytes=1 << 20))
        async with rig.tier:
            say(await rig.put(1))
            child = os.fork()
            if child == 0:
                _in_forked_child(rig)
            _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - nothing else is to run
            say(f"child {status}")
            say(await rig.put(2))
            say(await rig.get(1))
            left = os.fork()
            if left == 0:
                signal.pause()
                os._exit(0)
        async with DiskTier(rig.config):  # although a child forked while it was open is alive
            say("reopened")
        os.kill(left, signal.SIGKILL)
        os.waitpid(left, 0)  # noqa: ASYNC222

    asyncio.run(do())


def _in_forked_child(rig: Rig) -> None:
    status = 1
    try:
        for coroutine in (
            rig.tier.contains(key_of(1)),
            rig.tier.remove(key_of(1)),
            DiskTier(rig.config).__aenter__(),
        ):
            try:
                say(f"answer {asyncio.run(coroutine)}")
            except TierError as error:
                say(type(error).__name__)
        status = 0
    finally:
        os._exit(status)


def full_disk(path: str) -> None:
    """A file system much smaller than the tier's limit, if mounting is permitted."""

    async def do(root: Path, mounted: bool) -> None:
        rig = Rig(DiskConfig(path=root / "kv", max_bytes=64 * SLAB_BYTES))
        async with rig.tier:
            say(await rig.put(0))
            fds = open_fds()
            if mounted:
                for number in range(1, 40):
                    assert await rig.put(number) == "stored"  # old records are evicted
                    rig.check()
                assert rig.tier.statistics().evictions > 10
                ballast = root / "ballast"
                _fill(ballast)
                _fill(ballast)
                assert await rig.put(100) == "stored"  # replaces an old record
                rig.check()
                await rig.tier.__aexit__()
                _fill(ballast)
                await rig.tier.__aenter__()
                assert await rig.get(100) == "hit"
                assert await rig.put(101) == "stored"
                rig.check()
                await rig.tier.clear()
                _fill(ballast)
                assert [await rig.put(200), await rig.get(200)] == ["TierFullError", "miss"]
                rig.check()
                ballast.unlink()
            say(f"{await rig.put(200)} {await rig.get(200)}")
            rig.check()
            assert open_fds() == fds

    mounted = _mount_tmpfs(Path(path))
    say("mounted" if mounted else "not mounted")
    asyncio.run(do(Path(path), mounted))


def _fill(ballast: Path) -> None:
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def _mount_tmpfs(path: Path) -> bool:
    """In a private mount namespace, so nothing remains afterwards."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mounts, private = 0x10000000, 0x00020000, (1 << 18) | (1 << 14)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(new_mounts) != 0:
        if libc.unshare(new_user | new_mounts) != 0:
            return False
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    libc.mount(b"none", b"/", None, private, None)
    return libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"size=256k,mode=700") == 0


def two_mounts(path: str, other: str) -> None:
    """The same directory through another mount, if permitted, and through a link."""

    async def do() -> None:
        ways = [Path(other) / "link"]
        ways[0].symlink_to(path)
        if _bind(path, Path(other) / "mount"):
            ways.append(Path(other) / "mount")
        async with DiskTier(DiskConfig(path=path, max_bytes=1 << 20)):
            for way in ways:
                try:
                    async with DiskTier(DiskConfig(path=way, max_bytes=1 << 20)):
                        say("opened")
                except TierError as error:
                    say(f"refused: {error}")

    asyncio.run(do())


def _bind(path: str, other: Path) -> bool:
    import ctypes

    other.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:
        return False
    libc.mount(b"none", b"/", None, (1 << 18) | (1 << 14), None)
    return libc.mount(os.fsencode(path), os.fsencode(other), None, 1 << 12, None) == 0


def no_rights(path: str) -> None:
    """Permissions are removed and restored, as a user other than root."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    async def do() -> None:
        rig = Rig(DiskConfig(path=Path(path) / "kv", max_bytes=1 << 20))
        root = rig.config.root
        shard = root / "00"
        async with rig.tier:
            say(f"{await rig.put(1)} {await rig.get(1)}")
            fds = open_fds()
            for place, mode in ((root, 0), (root, 0o500), (shard, 0), (shard, 0o500), (root / "tmp", 0)):
                place.chmod(mode)
                removed = "removed"
                try:
                    await rig.tier.remove(key_of(1))
                except TierError as error:
                    removed = type(error).__name__
                if removed == "removed":
                    assert place.name == "tmp" or place == root  # the record's own directory was not touched
                say(f"{place.name} {mode:o}: {await rig.put(2)} {await rig.get(1)} {removed}")
                place.chmod(0o700)
                if removed == "removed":
                    assert await rig.put(1) == "stored"
                rig.check()
                say(f"back: {await rig.put(2)} {await rig.get(2)} {await rig.get(1)}")
                await rig.tier.remove(key_of(2))
            assert open_fds() == fds
        (root / "lock").unlink()
        root.chmod(0o500)
        try:
            await DiskTier(rig.config).__aenter__()
        except TierError as error:
            say(f"start: {type(error).__name__} {error}")
        root.chmod(0o700)
        async with rig.tier:
            say(f"{await rig.get(1)}")

    asyncio.run(do())


def end_while_stuck(path: str) -> None:
    """Give up closing a tier whose disk never answers."""

    async def do() -> None:
        handle = handle_of(DiskTier(DiskConfig(path=path, max_bytes=1 << 20)), timeout_s=0.05)
        arena = small_arena(1)
        async with handle:
            disk_files.publish_file = None
            os.pwrite = lambda *_: threading.Event().wait()  # type: ignore[assignment]
            with record(arena, 1) as buffer:
                [error] = await handle.put([(key_of(1), buffer)])
                say(type(error).__name__)

    loop = LoopThread()
    loop.submit(do()).result()
    loop.close(0.05)
    say("closed")


SYSTEM_CALLS = (
    *("open", "close", "mkdir", "scandir", "stat", "fstat", "ftruncate", "pwrite", "preadv"),
    *("utime", "fsync", "replace", "rename", "unlink"),
)


def die_at_call(path: str, max_bytes: int, call: int, torn: bool) -> None:
    """Use a tier, and be killed before its `call`-th system call, or in the middle of it if it is a write.

    Prints every system call that has ended, with its paths, and every finished method.
    """
    _kill_before(call, torn=torn)

    async def do() -> None:
        rig = Rig(
            DiskConfig(
                path=path, max_bytes=max_bytes, io_threads=1, fsync=True, quarantine=True, odirect=True
            )
        )
        async with rig.tier:
            for number in (1, 2, 3, 4):  # one too many
                say(f"put {number} {await rig.put(number)}")
            await rig.tier.reject(key_of(3), "checksum")
            await rig.tier.remove(key_of(2))
            say(f"put 300 {await rig.put(300)}")  # in another directory
        async with rig.tier:
            say(f"put 5 {await rig.put(5)}")
            say(f"get 4 {await rig.get(4)}")
        say("finished")

    asyncio.run(do())


def _kill_before(call: int, *, torn: bool) -> None:
    count = 0

    def wrap(module: Any, name: str) -> None:
        real = getattr(module, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal count
            if not threading.current_thread().name.startswith("lmcache-disk"):
                return real(*args, **options)
            count += 1
            if count == call:
                if torn and name == "pwrite":
                    real(args[0], memoryview(args[1])[:4096], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                result = real(*args, **options)
            except OSError:
                say(f"failed {name}")
                raise
            names = [arg for arg in args if isinstance(arg, str)]
            say(f"call {name} {' '.join(names)}")
            return result

        setattr(module, name, wrapped)

    for name in SYSTEM_CALLS:
        wrap(os, name)
    wrap(fcntl, "flock")


if __name__ == "__main__":
    serve(globals())
