"""The machine, and what a container leaves of it: cores, memory, limits, pages."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from lmcache_async.cli.checks.check import Check, fail, ok, warn
from lmcache_async.config import EngineConfig, format_size

MIN_FILES = 1024
MIN_SHM_BYTES = 1 << 30  # vLLM's processes pass tensors through it; a container has 64 MiB by default
_NO_LIMIT = 1 << 60  # what the older kind of control group says for none


def check_cores(config: EngineConfig, root: Path = Path("/")) -> Iterator[Check]:
    cores: float = len(os.sched_getaffinity(0))
    quota = _cpu_quota(root)
    cores = min(cores, quota) if quota is not None else cores
    name, found = "cores", f"{cores:g} for this process"
    if cores < 2:
        yield warn(name, found, "give it two at least: with one, copies and the model wait for each other")
    elif config.copy_threads > cores:
        todo = f"lower copy_threads ({config.copy_threads}): copies would leave the model no core"
        yield warn(name, found, todo)
    else:
        yield ok(name, found)


def check_memory(config: EngineConfig, root: Path = Path("/")) -> Iterator[Check]:
    name, wanted = "memory", config.arena.max_bytes
    limit, available = memory_limit(root), _meminfo(root, "MemAvailable")
    found = f"the arena takes {_gib(wanted)} in each worker process"
    if limit is not None:
        found += f"; the control group allows {_gib(limit)}"
    if available is not None:
        found += f"; {_gib(available)} are available"
    least = min(value for value in (limit, available, _NO_LIMIT) if value is not None)
    if limit is not None and wanted >= limit:
        yield fail(name, found, "lower arena.max_bytes, or raise the limit of the container")
    elif wanted > least * 0.8:
        yield warn(name, found, "lower arena.max_bytes: the model and the page cache need memory too")
    else:
        yield ok(name, found)


def check_pinning(config: EngineConfig, *, has_cuda: bool, limit: int | None = None) -> Iterator[Check]:
    name = "pinned memory"
    if not has_cuda:
        yield ok(name, "no CUDA device: nothing is pinned")
        return
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY or soft >= config.arena.max_bytes:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else _gib(soft)
        yield ok(name, f"locked memory is {shown}")
    else:
        found = (
            f"locked memory is limited to {format_size(soft)}, the arena is {_gib(config.arena.max_bytes)}"
        )
        yield warn(name, found, "ulimit -l unlimited (in a container --ulimit memlock=-1)")


def check_huge_pages(config: EngineConfig, root: Path = Path("/")) -> Iterator[Check]:
    folder = root / "sys/kernel/mm/transparent_hugepage"
    reserved = _meminfo(root, "HugePages_Total") or 0
    for name, file, uses in (
        ("huge pages", "enabled", config.arena.huge_pages),
        ("huge pages of shared memory", "shmem_enabled", any(tier.name == "host" for tier in config.tiers)),
    ):
        chosen = _chosen(folder / file)
        found = f"{file} is {chosen or 'not known'}; {reserved} are reserved, which nothing here uses"
        if uses and chosen in {"never", "deny", None}:
            word = "madvise" if file == "enabled" else "advise"
            yield warn(name, found, f"echo {word} > /{(folder / file).relative_to(root)} (as root)")
        elif uses or name == "huge pages":
            yield ok(name, found)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Check]:
    name = "shared memory"
    try:
        status = os.statvfs(path)
    except OSError as error:
        yield warn(name, f"{path}: {error.strerror}", "mount a tmpfs there: vLLM's processes need it")
        return
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{path} has {_gib(size)}, {_gib(free)} free"
    if size < MIN_SHM_BYTES:
        yield warn(name, found, "start the container with --shm-size=2g or more: vLLM passes tensors there")
    else:
        yield ok(name, found)


def check_open_files(limit: int | None = None) -> Iterator[Check]:
    name = "open files"
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        yield warn(name, found, f"ulimit -n {8 * MIN_FILES}: sockets, record files and vLLM's own need more")
    else:
        yield ok(name, found)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least that this process's control group and those above it allow; None without a limit."""
    limits = [_number(folder / name) for folder, name in _groups(root, "memory")]
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder, _ in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """The folders of this process's control groups, innermost first, and the file of the memory limit there."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, name = base, "memory.max"
        elif controller in controllers.split(","):
            top, name = base / controllers, "memory.limit_in_bytes"
            top = top if top.exists() else base / controller
        else:
            continue
        folder = top / path.strip("/")
        while folder != top and top in folder.parents:
            yield folder, name
            folder = folder.parent
        yield top, name


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _meminfo(root: Path, key: str) -> int | None:
    match = re.search(rf"^{key}:\s+(\d+)( kB)?$", _read(root / "proc/meminfo"), re.MULTILINE)
    return None if match is None else int(match[1]) * (1024 if match[2] else 1)


def _chosen(file: Path) -> str | None:
    match = re.search(r"\[(\w+)\]", _read(file))
    return match[1] if match else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
