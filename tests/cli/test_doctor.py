"""`lmcache-async doctor`: directories, servers and the whole command, against real ones."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_async.cli import doctor
from lmcache_async.cli.checks import disk
from lmcache_async.cli.checks.check import Check, Outcome, ok
from lmcache_async.cli.checks.daemon import check_daemon
from lmcache_async.cli.checks.disk import Folder, check_folder, file_system_of, folder_of
from lmcache_async.config import TierSpec, load_config
from lmcache_async.engine.check import make_tier
from lmcache_async.registry import Registry
from tests.support.daemons import ThreadedDaemon, socket_path

MIB = 1 << 20


def folder(root: Path, **options: object) -> Folder:
    given = {"max_bytes": MIB, "wants_direct": False, "uses_direct": True, **options}
    return Folder("disk", root, **given)  # type: ignore[arg-type]


def by_name(checks) -> dict[str, Check]:
    return {check.name.partition(" (")[0]: check for check in checks}


def contents(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_directory_is_looked_at_and_left_as_it_was(tmp_path):
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "record").write_bytes(bytes(5000))
    before = contents(tmp_path)

    checks = by_name(check_folder(folder(tmp_path), sample_bytes=8 * MIB))

    assert contents(tmp_path) == before
    assert {check.outcome for check in checks.values()} <= {Outcome.OK, Outcome.WARN}
    assert set(checks) == {"file system", "room", "owner", "writable", "direct I/O", "speed"}
    assert "MB/s written" in checks["speed"].found


def test_one_that_is_not_there_is_not_made(tmp_path):
    checks = by_name(check_folder(folder(tmp_path / "a" / "b"), sample_bytes=None))

    assert contents(tmp_path) == []
    assert checks["owner"].found == "the directory is not there yet; it is made at the first start"
    assert "speed" not in checks


def test_one_that_cannot_be_written_to_fails(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk.tempfile, "mkdtemp", refuse)

    check = by_name(check_folder(folder(tmp_path), sample_bytes=MIB))["writable"]

    assert (check.outcome, check.found) == (Outcome.FAIL, f"{tmp_path}: Permission denied")


def test_one_that_another_process_has_is_told(tmp_path):
    (tmp_path / "lock").write_text("4711\n")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        held = by_name(check_folder(folder(tmp_path), sample_bytes=None))["owner"]
    finally:
        os.close(descriptor)
    free = by_name(check_folder(folder(tmp_path), sample_bytes=None))["owner"]

    assert (held.outcome, held.found) == (Outcome.WARN, "process 4711 has it")
    assert free.found == "no other process has it"


def test_more_than_there_is_room_for_is_told(tmp_path):
    check = by_name(check_folder(folder(tmp_path, max_bytes=1 << 60), sample_bytes=None))["room"]

    assert check.outcome is Outcome.WARN
    assert "lower max_bytes" in check.todo


@pytest.mark.parametrize(
    ("wants", "uses", "outcome"),
    [(True, True, Outcome.FAIL), (False, True, Outcome.WARN), (False, False, Outcome.OK)],
)
def test_a_file_system_without_direct_io(tmp_path, monkeypatch, wants, uses, outcome):
    monkeypatch.setattr(disk, "_takes_direct", lambda scratch: False)

    place = folder(tmp_path, wants_direct=wants, uses_direct=uses)

    assert by_name(check_folder(place, sample_bytes=None))["direct I/O"].outcome is outcome


def test_file_systems_are_told_by_the_longest_mount():
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:9 / /mnt/a\\040b rw shared:1 - nfs4 host:/x rw\n"
        "3 1 0:8 / /mnt rw - tmpfs tmpfs rw\n"
    )

    assert file_system_of(Path("/mnt/a b/kv"), mounts) == "nfs4"
    assert file_system_of(Path("/mnt/other"), mounts) == "tmpfs"
    assert file_system_of(Path("/mntx"), mounts) == "ext4"


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("/mnt/käse", "/mnt/käse"),
        ("/mnt/\\303\\244\\040b", "/mnt/ä b"),  # bytes of UTF-8, if a kernel ever writes them so
        ("/mnt/a\\134040\\134n", "/mnt/a\\040\\n"),
        ("/mnt/a\u3000b\u2028c\x85\x0b", "/mnt/a\u3000b\u2028c\x85\x0b"),
        ("/mnt/\udcff", "/mnt/\udcff"),
    ],
)
def test_a_mount_whose_path_is_not_ascii(place, path):
    mounts = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / {place} rw shared:1 - nfs4 host:/x rw\n"

    assert file_system_of(Path(path, "kv"), mounts) == "nfs4"


def test_only_tiers_of_a_directory_have_one(tmp_path):
    def made(**given):
        return make_tier(TierSpec.model_validate(given), Registry(), third_party=True)

    found = folder_of("d", made(name="disk", path=tmp_path, max_bytes="1GiB", odirect=True))

    assert found == folder(tmp_path, max_bytes=1 << 30, wants_direct=True).__class__(
        "d", tmp_path, 1 << 30, wants_direct=True, uses_direct=True
    )
    assert folder_of("c", made(name="cpu", max_bytes="1GiB")) is None
    assert folder_of("v", made(name="valkey", url="valkey://host")) is None


def test_the_daemon_is_asked_at_its_socket():
    with socket_path() as path:
        there = load_config(env={}, extra={"tiers": ["cpu", {"name": "host", "socket": str(path)}]})
        with ThreadedDaemon(path) as daemon:
            [found] = check_daemon(there)
            for _ in range(20):  # turns of its loop, in which it sees that we came and went
                daemon.call(lambda: None)
        [gone] = check_daemon(there)

    assert found.outcome is Outcome.OK
    assert found.found == f"process {os.getpid()} of user {os.getuid()} listens at {path}"
    assert gone.outcome is Outcome.FAIL
    assert gone.todo.startswith("start it: lmcache-async serve")


def quick(monkeypatch) -> None:
    """Without the import of a whole vLLM."""
    monkeypatch.setattr(doctor.versions, "check_plugin", lambda: [ok("vllm plug-in", "not asked")])


def test_the_command_as_json_and_as_text(invoke, tmp_path, monkeypatch):
    quick(monkeypatch)
    file = tmp_path / "kv.yaml"
    file.write_text(
        f"arena.max_bytes: 16MiB\ntiers:\n- cpu\n- {{name: disk, path: {tmp_path}/kv, max_bytes: 1MiB}}\n"
    )

    as_json = invoke("doctor", "--config", file, "--sample", "4MiB", "--json")
    text = invoke("doctor", "--config", file, "--no-speed")

    told = json.loads(as_json.stdout)
    assert as_json.exit_code == text.exit_code == 0, text.output
    assert told["ok"] is True
    assert {"python", "torch", "vllm", "config", "cores", "memory", "speed (disk)"} <= {
        check["name"] for check in told["checks"]
    }
    assert all(check["todo"] for check in told["checks"] if check["outcome"] != "ok")
    assert f"ok    config: nothing is wrong ({file})" in text.stdout
    assert "speed" not in text.stdout
    assert text.stdout.splitlines()[-1].endswith("0 fail")


def test_what_is_wrong_with_the_config_fails_and_the_rest_is_checked(invoke, tmp_path, monkeypatch):
    quick(monkeypatch)
    file = tmp_path / "kv.yaml"
    file.write_text("tiers:\n- {name: disk, path: /x}\n- {name: dsk}\n")

    result = invoke("doctor", "--config", file, "--no-speed")

    assert result.exit_code == 1
    assert f"fail  config: {file}, line 2: tiers[0] (disk): max_bytes is missing" in result.stdout
    assert "there is no tier dsk" in result.stdout
    assert "open files" in result.stdout


def test_a_config_that_cannot_even_be_looked_at_is_a_failed_check(invoke, monkeypatch):
    """Whatever its reading raises: a bug of ours is told as one, and the rest is checked."""
    quick(monkeypatch)
    monkeypatch.setattr(doctor, "survey_config", lambda file: 1 // 0)

    result = invoke("doctor", "--no-speed")

    assert result.exit_code == 1
    assert "fail  config: the check itself failed: ZeroDivisionError" in result.stdout
    assert "open files" in result.stdout


def test_a_sample_that_is_no_size_is_refused(invoke):
    result = invoke("doctor", "--sample", "much")

    assert (result.exit_code, result.stderr) == (
        2,
        "--sample is 'much': expected a size in bytes, such as 8GiB, 500MB or 1048576\n",
    )


HANG = """
import threading
from lmcache_async.cli import doctor
from lmcache_async.cli.app import app
doctor.groups = lambda *given: [("stuck", 0.1, threading.Event().wait)]
app(["doctor"])
"""


def test_what_hangs_does_not_keep_the_command():
    ran = subprocess.run(
        [sys.executable, "-c", HANG], capture_output=True, text=True, check=False, timeout=120
    )

    assert ran.returncode == 1
    assert "fail  stuck: it did not end in 0.1 s" in ran.stdout


def test_the_flag_that_keeps_queued_writes_is_named_where_a_tier_outlives_the_process(tmp_path):
    kept = tmp_path / "kept.yaml"
    kept.write_text(f"tiers: [cpu, {{name: disk, id: slow, path: {tmp_path}/kv, max_bytes: 1GiB}}]\n")
    memory = tmp_path / "memory.yaml"
    memory.write_text("tiers: [cpu]\n")

    checks = {
        file: [
            check
            for name, _, work in doctor.groups(file, None)
            if name in {"config", "restart"}
            for check in work()
            if check.name == "restart"
        ]
        for file in (kept, memory)
    }

    [check] = checks[kept]
    assert "slow" in check.found
    assert "--shutdown-timeout 30" in check.todo
    assert checks[memory] == []


def test_a_close_shorter_than_the_queue_is_warned_of_where_a_tier_outlives_the_process(tmp_path):
    disk = f"{{name: disk, path: {tmp_path}/kv, max_bytes: 1GiB}}"
    found = {}
    for name, tiers in (("disk", f"[cpu, {disk}]"), ("memory", "[cpu]")):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"shutdown_timeout_s: 5\ntiers: {tiers}\n")
        checks = [
            check
            for group, _, work in doctor.groups(file, None)
            if group in {"config", "restart"}
            for check in work()
        ]
        found[name] = [check.found for check in checks if check.outcome is Outcome.WARN]

    [line] = found["disk"]
    assert "waits 5 s" in line
    assert "20 s (store.max_pending_write_s)" in line
    assert found["memory"] == []
