"""Checks of the directory of a disk tier: file system, free space, owner, direct I/O, speed. Blocking."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil  # of the extra cli, like doctor

from lmcache_async.plugins.disk.config import DiskConfig
from lmcache_async.plugins.disk.directory import (
    NO_SPACE,
    USED_NAME,
    RecordDirectory,
    detect_direct,
    lock_holder,
)
from lmcache_async.plugins.disk.files import publish_file
from lmcache_async.tiers.diagnosis import INSTALL_COMPILER, Check, fail, ok, warn

_BLOCK_BYTES = 4 << 20
_LEAST_BYTES = 10e6  # less than any useful `max_bytes`
_SLOW_BYTES_PER_S = 200e6  # below it, recomputing a prompt is often faster than reading it
_MEMORY = "name a path on a disk: this one is in memory and is lost at a reboot"
_NETWORK = "name a path on a disk of this machine: a network file system is slow and shared"
_UNSUITABLE = {
    "overlay": "mount a volume there: the container's own layer is slow and deleted with it",
    **dict.fromkeys(("tmpfs", "ramfs"), _MEMORY),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre"), _NETWORK),
}
_SCAN_S = 3.0
_SPEED_S = 15.0  # for writing and for reading


def check_directory(config: DiskConfig, sample_bytes: int | None) -> Iterator[Check]:
    """Check the directory, or its nearest existing parent. Existing files are not changed.

    Args:
        sample_bytes: Size of the file that is written and read to measure the speed; None to measure nothing.
    """
    if publish_file is None:
        found = "lmcache_async.plugins.disk._publish is not installed: each record is written by several Python calls"
        yield warn("compiled module of the disk tier", found, INSTALL_COMPILER)
    existing = config.root.absolute()
    # Unlike `Path.exists`, this is false in a directory that this user cannot search.
    while not os.path.exists(existing) and existing != existing.parent:  # noqa: PTH110
        existing = existing.parent
    yield _check_file_system(config.root, existing)
    yield _check_room(config, existing)
    yield _check_owner(config.root)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".lmcache-async-doctor-", dir=existing))
    except OSError as error:
        yield fail("writable", f"{existing}: {error.strerror}", _how_to_write(error))
        return
    try:
        yield _check_earlier_owner(config.root) or ok("writable", f"{existing} can be written to")
        try:
            with closing(RecordDirectory(scratch)) as directory:
                directory.prepare()
                direct = detect_direct(directory, "auto")
        except OSError as error:
            yield fail("direct I/O", f"a trial failed: {error.strerror}", "see the kernel's log")
            return
        yield _check_direct(config, direct)
        if sample_bytes is not None:
            yield _check_speed(scratch, sample_bytes, direct=direct and config.odirect is not False)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def file_system_of(path: Path) -> str:
    """Return the type of the file system that contains the path, such as `ext4`."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    longest = max((len(part.mountpoint) for part in mounts), default=0)
    types = [part.fstype for part in mounts if len(part.mountpoint) == longest]
    return types[-1] if types else "unknown"  # of several mounts at one path the last hides the others


def _check_file_system(root: Path, existing: Path) -> Check:
    name, kind = "file system", file_system_of(existing.resolve())
    found = f"{root} is on {kind}"
    todo = _NETWORK if kind.startswith("fuse") else _UNSUITABLE.get(kind)
    if todo is not None:
        return warn(name, found, todo)
    return ok(name, found)


def _check_room(config: DiskConfig, existing: Path) -> Check:
    name, free = "room", psutil.disk_usage(os.fspath(existing)).free
    used = _used_bytes(config.root)
    found = f"{_size(free)} are free and {_size(used)} are records; max_bytes is {_size(config.max_bytes)}"
    if free + used < config.max_bytes:
        most = _size(int((free + used) * 0.95))
        todo = f"lower max_bytes to {most} or less: on a full disk, chunks are dropped"
        return warn(name, found, todo if free + used > _LEAST_BYTES else "free some space there")
    return ok(name, found)


def _how_to_write(error: OSError) -> str:
    if error.errno in NO_SPACE:
        return "free some space or inodes there; df -h and df -i show both"
    if error.errno == errno.EROFS:
        return "mount it for writing, or name another path"
    return f"let user {os.getuid()} write there, or name another path"


def _check_earlier_owner(root: Path) -> Check | None:
    """Check the access to the lock and the folders, which may belong to another user than the directory."""
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            mode = os.R_OK | os.W_OK | (os.X_OK if entry.is_dir(follow_symlinks=False) else 0)
            if USED_NAME.fullmatch(entry.name) and not os.access(entry, mode):
                status, user = entry.stat(follow_symlinks=False), os.getuid()
                owned = f"has mode {stat.S_IMODE(status.st_mode):04o} and belongs to user {status.st_uid}"
                found = f"{entry.path} {owned}: user {user} cannot read and write it"
                return fail("writable", found, f"chown -R {user} {root}; chmod -R u+rwX {root}")
    return None


def _check_owner(root: Path) -> Check:
    """Check whether another process has locked the directory. The lock is tried and released at once."""
    name = "owner"
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ok(name, "the directory does not exist; it is created at the first start")
    except OSError as error:
        return fail(name, f"{root}: {error.strerror}", "name a directory that this user can read")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = lock_holder(descriptor) or "unknown"
        todo = "give each process its own path or subdirectory; ignore this if it is an engine of this config"
        return warn(name, f"in use by process {holder}", todo)
    except OSError as error:
        return ok(name, f"unknown: this file system cannot lock a directory ({error.strerror})")
    else:
        return ok(name, "not in use by another process")
    finally:
        os.close(descriptor)


def _check_direct(config: DiskConfig, works: bool) -> Check:
    name = "direct I/O"
    if works:
        return ok(name, "supported by the file system")
    if config.odirect is True:
        return fail(name, "odirect is true, but the file system refuses it", "set odirect to auto or false")
    if config.odirect is False:
        return ok(name, "odirect is false")
    return warn(
        name, "not supported by the file system", "records go through the page cache, which uses memory"
    )


def _check_speed(scratch: Path, sample_bytes: int, *, direct: bool) -> Check:
    name = "speed"
    free = psutil.disk_usage(os.fspath(scratch)).free
    nbytes = min(sample_bytes, free // 2) // _BLOCK_BYTES * _BLOCK_BYTES
    if not nbytes:
        return warn(name, "there is no room for a sample", "free some space")
    try:
        write, read = _measure(scratch / "sample", nbytes, direct=direct)
    except OSError as error:
        return fail(name, f"writing or reading a sample failed: {error.strerror}", "see the kernel's log")
    how = "direct I/O" if direct else "page cache"
    found = f"{write / 1e6:.0f} MB/s written, {read / 1e6:.0f} MB/s read, {how}, one block at a time"
    if read < _SLOW_BYTES_PER_S:
        return warn(name, found, "use a faster disk: recomputing a prompt may be faster than loading it")
    return ok(name, found)


def _measure(file: Path, nbytes: int, *, direct: bool) -> tuple[float, float]:
    """Return bytes per second written to and read from a file, whose directory is deleted. Each part ends after `_SPEED_S`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    descriptor = os.open(file, flags, 0o600)
    shutil.rmtree(file.parent, ignore_errors=True)  # now, so that nothing is left if the process is killed
    with mmap.mmap(-1, _BLOCK_BYTES) as block:  # aligned for direct I/O
        try:
            block.write(os.urandom(_BLOCK_BYTES))
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


def _used_bytes(root: Path) -> int:
    """Bytes of the records that are found within `_SCAN_S`. Other checks report a directory that cannot be read."""
    total, end = 0, time.monotonic() + _SCAN_S
    with closing(RecordDirectory(root)) as directory, suppress(OSError):
        directory.open_shared()
        for record in directory.scan():
            total += record.nbytes
            if time.monotonic() > end:
                break
    return total


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
