"""A tier that keeps files in a directory: room, file system, owner, direct I/O and speed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_async.cli.checks.check import Check, fail, ok, warn
from lmcache_async.tiers.base import Tier

BLOCK_BYTES = 4 << 20
SLOW_BYTES_PER_S = 200e6  # below it, computing a prompt again is often sooner than reading it
_MEMORY = {"tmpfs", "ramfs"}
_FAR = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre"}
_SCAN_S = 3.0
_SPEED_S = 15.0  # for each of writing and reading


@dataclass(frozen=True, slots=True)
class Folder:
    """Where a tier keeps its files.

    Attributes:
        tier: Its id.
        root: The directory; it may not be there yet.
        max_bytes: The most that the tier fills it with.
        wants_direct: Whether direct I/O is asked for, and not only used where it can be.
        uses_direct: Whether it is used at all.
    """

    tier: str
    root: Path
    max_bytes: int
    wants_direct: bool
    uses_direct: bool

    @property
    def there(self) -> Path:
        """The directory, or what of its path is there already."""
        path = self.root.absolute()
        while not path.exists() and path != path.parent:
            path = path.parent
        return path


def folder_of(tier_id: str, tier: Tier) -> Folder | None:
    """The directory of a tier whose options are a path and a size; None where they are not."""
    config: Any = tier.config
    root = getattr(config, "root", getattr(config, "path", None))
    max_bytes = getattr(config, "max_bytes", None)
    if not isinstance(root, Path) or not isinstance(max_bytes, int):
        return None
    direct = getattr(config, "odirect", False)
    return Folder(tier_id, root, max_bytes, wants_direct=direct is True, uses_direct=direct is not False)


def check_folder(folder: Folder, *, sample_bytes: int | None) -> Iterator[Check]:
    """Nothing of what is there is changed; what is made is removed.

    Args:
        folder: The directory.
        sample_bytes: How much is written and read to measure its speed; None does not measure it.
    """
    there = folder.there
    yield from _check_file_system(folder, there)
    yield from _check_room(folder, there)
    yield from _check_owner(folder)
    name = f"writable ({folder.tier})"
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".lmcache-async-doctor-", dir=there))
    except OSError as error:
        todo = f"let user {os.getuid()} write there, or name another path"
        yield fail(name, f"{there}: {error.strerror}", todo)
        return
    try:
        yield ok(name, f"{there} can be written to")
        direct = _takes_direct(scratch)
        yield from _check_direct(folder, direct)
        if sample_bytes is not None:
            yield from _check_speed(folder, scratch, sample_bytes, direct=direct and folder.uses_direct)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """The kind of the file system that the path is on, such as `ext4`."""
    text = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()) if mounts is None else mounts
    best, kind = -1, "unknown"
    for line in filter(None, text.split("\n")):  # a path may have what else ends lines and parts words
        before, _, after = line.partition(" - ")
        place = _unescaped(before.split(" ")[4])
        if (path == Path(place) or Path(place) in path.parents) and len(place) >= best:
            best, kind = len(place), after.split()[0]
    return kind


def _unescaped(text: str) -> str:
    """The kernel writes bytes that would part words as three octal digits."""
    found = re.sub(rb"\\([0-3][0-7]{2})", lambda match: bytes([int(match[1], 8)]), os.fsencode(text))
    return os.fsdecode(found)


def _check_file_system(folder: Folder, there: Path) -> Iterator[Check]:
    name, kind = f"file system ({folder.tier})", file_system_of(there.resolve())
    found = f"{folder.root} is on {kind}"
    if kind in _MEMORY:
        yield warn(name, found, "name a path on a disk: this one is memory, and is gone with the machine")
    elif kind in _FAR or kind.startswith("fuse"):
        yield warn(
            name, found, "name a path on a disk of this machine: over the network it is slow and shared"
        )
    elif kind == "overlay":
        yield warn(name, found, "mount a volume there: the container's own layer is slow and goes with it")
    else:
        yield ok(name, found)


def _check_room(folder: Folder, there: Path) -> Iterator[Check]:
    name = f"room ({folder.tier})"
    status = os.statvfs(there)
    free, used = status.f_bavail * status.f_frsize, _used(folder.root)
    found = f"{_gb(free)} are free and {_gb(used)} are records; max_bytes is {_gb(folder.max_bytes)}"
    if free + used < folder.max_bytes:
        todo = (
            f"lower max_bytes to {_gb(int((free + used) * 0.95))} or less: a full disk drops what is stored"
        )
        yield warn(name, found, todo)
    else:
        yield ok(name, found)


def _check_owner(folder: Folder) -> Iterator[Check]:
    """Whether another process has it. The lock is tried and given back at once; owners hold it alone."""
    name = f"owner ({folder.tier})"
    try:
        descriptor = os.open(folder.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield ok(name, "the directory is not there yet; it is made at the first start")
        return
    except OSError as error:
        yield fail(name, f"{folder.root}: {error.strerror}", "name a directory that this user may read")
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        todo = "give each process a path or a subdirectory of its own; a running engine of this config is no harm"
        yield warn(name, f"process {_holder(folder.root)} has it", todo)
    except OSError as error:
        yield ok(name, f"not known: this file system cannot lock a directory ({error.strerror})")
    else:
        yield ok(name, "no other process has it")
    finally:
        os.close(descriptor)


def _check_direct(folder: Folder, works: bool) -> Iterator[Check]:
    name = f"direct I/O ({folder.tier})"
    if works:
        yield ok(name, "the file system takes it")
    elif folder.wants_direct:
        yield fail(name, "odirect is true, and the file system refuses it", "set odirect to auto or false")
    elif folder.uses_direct:
        yield warn(
            name, "the file system refuses it", "records go through the page cache, which costs memory"
        )
    else:
        yield ok(name, "odirect is false")


def _check_speed(folder: Folder, scratch: Path, sample_bytes: int, *, direct: bool) -> Iterator[Check]:
    name = f"speed ({folder.tier})"
    status = os.statvfs(scratch)
    nbytes = min(sample_bytes, status.f_bavail * status.f_frsize // 2) // BLOCK_BYTES * BLOCK_BYTES
    if not nbytes:
        yield warn(name, "there is no room for a sample", "make room")
        return
    try:
        write, read = _measure(scratch / "sample", nbytes, direct=direct)
    except OSError as error:
        yield fail(name, f"writing or reading a sample failed: {error.strerror}", "see the kernel's log")
        return
    how = "directly" if direct else "through the page cache"
    found = f"{write / 1e6:.0f} MB/s written, {read / 1e6:.0f} MB/s read, {how}, one at a time"
    if read < SLOW_BYTES_PER_S:
        yield warn(name, found, "use a faster disk: computing a prompt again may be sooner than loading it")
    else:
        yield ok(name, found)


def _measure(file: Path, nbytes: int, *, direct: bool) -> tuple[float, float]:
    """Bytes a second written and read; each stops at its deadline."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    descriptor = os.open(file, flags, 0o600)
    with mmap.mmap(-1, BLOCK_BYTES) as block:  # aligned, as direct I/O wants it
        try:
            block.write(os.urandom(BLOCK_BYTES))
            begin = time.perf_counter()
            written = 0
            while written < nbytes and time.perf_counter() - begin < _SPEED_S:
                written += os.pwrite(descriptor, block, written)
            os.fsync(descriptor)
            write = written / (time.perf_counter() - begin)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            begin, done = time.perf_counter(), 0
            while done < written and time.perf_counter() - begin < _SPEED_S:
                count = os.preadv(descriptor, [block], done)
                if not count:
                    break
                done += count
            return write, done / (time.perf_counter() - begin)
        finally:
            os.close(descriptor)


def _takes_direct(scratch: Path) -> bool:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            descriptor = os.open(scratch / "direct", flags, 0o600)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                return False
            raise
        try:
            os.pwrite(descriptor, page, 0)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                return False
            raise
        finally:
            os.close(descriptor)
    return True


def _used(root: Path) -> int:
    """Bytes of files there; what is found in a few seconds."""
    total, end = 0, time.monotonic() + _SCAN_S
    for directory, _, files in os.walk(root):
        for name in files:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118 - a hundred thousand
            except OSError:
                continue
        if time.monotonic() > end:
            break
    return total


def _holder(root: Path) -> str:
    try:
        text = (root / "lock").read_text(encoding="ascii", errors="replace").strip()[:20]
    except OSError:
        return "unknown"
    return text if text.isdigit() else "unknown"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
