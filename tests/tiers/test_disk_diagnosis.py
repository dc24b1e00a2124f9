"""Checks of the disk tier for `lmcache-async doctor`."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from lmcache_async.plugins.disk import DiskConfig, DiskTier, diagnosis
from lmcache_async.plugins.disk.diagnosis import file_system_of
from lmcache_async.tiers.diagnosis import Check, Outcome

MIB = 1 << 20


class Mount(NamedTuple):
    mountpoint: str
    fstype: str


class Usage(NamedTuple):
    free: int


def diagnosed(root: Path, *, sample_bytes: int | None = None, **options: object) -> dict[str, Check]:
    tier = DiskTier(DiskConfig.model_validate({"path": root, "max_bytes": MIB, **options}))
    return {check.name: check for check in tier.diagnose(sample_bytes=sample_bytes)}


def contents(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.parametrize("publish_file", [None, lambda *_: (0, True)])
def test_a_missing_compiled_module_is_a_warning(tmp_path, monkeypatch, publish_file):
    monkeypatch.setattr(diagnosis, "publish_file", publish_file, raising=False)

    check = diagnosed(tmp_path).get("compiled module of the disk tier")

    if publish_file is None:
        assert check is not None
        assert (check.outcome, check.found.partition(":")[0]) == (
            Outcome.WARN,
            "lmcache_async.plugins.disk._publish is not installed",
        )
    else:
        assert check is None


def test_a_directory_is_checked_and_not_changed(tmp_path):
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / ("ab" * 16)).write_bytes(bytes(5_000_000))
    before = contents(tmp_path)

    checks = diagnosed(tmp_path, sample_bytes=8 * MIB)

    assert contents(tmp_path) == before
    assert {check.outcome for check in checks.values()} <= {Outcome.OK, Outcome.WARN}
    assert set(checks) - {"compiled module of the disk tier"} == {
        "file system",
        "room",
        "owner",
        "writable",
        "direct I/O",
        "speed",
    }
    assert "5.0 MB are records; max_bytes is 1.0 MB" in checks["room"].found
    assert "MB/s written" in checks["speed"].found


def test_a_check_that_is_killed_leaves_nothing(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(diagnosis.os, "fsync", lambda _: found.append(contents(tmp_path)))

    diagnosed(tmp_path, sample_bytes=8 * MIB)

    assert found == [[]], "the sample has no name while it is written"


@pytest.mark.parametrize(
    ("scan_s", "found"), [(60.0, "6.0 GB"), (-1.0, "3.0 GB")], ids=["all", "in the time"]
)
def test_the_room_includes_the_records_that_are_counted_within_a_time_limit(
    tmp_path, monkeypatch, scan_s, found
):
    monkeypatch.setattr(diagnosis, "_SCAN_S", scan_s)
    for shard in ("ab", "cd"):
        (tmp_path / shard).mkdir()
        with (tmp_path / shard / (shard * 16)).open("wb") as file:
            file.truncate(3 * 10**9)

    assert f"{found} are records" in diagnosed(tmp_path)["room"].found


def test_a_missing_directory_is_not_created(tmp_path):
    checks = diagnosed(tmp_path / "a" / "b")

    assert contents(tmp_path) == []
    assert checks["owner"].found == "the directory does not exist; it is created at the first start"
    assert "speed" not in checks


def test_a_directory_that_is_not_writable_fails(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(diagnosis.tempfile, "mkdtemp", refuse)

    check = diagnosed(tmp_path, sample_bytes=MIB)["writable"]

    assert (check.outcome, check.found) == (Outcome.FAIL, f"{tmp_path}: Permission denied")


@pytest.mark.parametrize(
    ("number", "todo"),
    [
        (errno.ENOSPC, "free some space or inodes there"),
        (errno.EROFS, "mount it for writing"),
        (errno.EACCES, f"let user {os.getuid()} write there"),
    ],
)
def test_the_advice_depends_on_why_nothing_can_be_written(tmp_path, monkeypatch, number, todo):
    def refuse(**options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(diagnosis.tempfile, "mkdtemp", refuse)

    assert diagnosed(tmp_path)["writable"].todo.startswith(todo)


@pytest.mark.parametrize("name", ["lock", "tmp", "ab"])
def test_a_part_of_another_user_fails(tmp_path, monkeypatch, name):
    for folder in ("tmp", "ab", "cd"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lock").touch()
    (tmp_path / "other").mkdir()
    access = os.access
    monkeypatch.setattr(
        diagnosis.os,
        "access",
        lambda path, mode: Path(path).name not in {name, "other"} and access(path, mode),
    )

    check = diagnosed(tmp_path)["writable"]

    assert check.outcome is Outcome.FAIL
    mode = (tmp_path / name).stat().st_mode & 0o777
    assert check.found.startswith(f"{tmp_path / name} has mode {mode:04o} and belongs to user {os.getuid()}:")


def test_a_directory_that_cannot_be_searched_is_not_a_bug_of_the_check(tmp_path, monkeypatch):
    real = os.stat

    def refuse(path, *arguments, **options):
        if tmp_path in Path(path if isinstance(path, str | Path) else "").parents:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)

    checks = diagnosed(tmp_path / "a" / "b")

    assert str(tmp_path / "a" / "b") in checks["file system"].found


def test_the_process_that_uses_the_directory_is_named(tmp_path):
    async def while_open() -> Check:
        async with DiskTier(DiskConfig(path=tmp_path, max_bytes=MIB)):
            return await asyncio.to_thread(lambda: diagnosed(tmp_path)["owner"])

    held = asyncio.run(while_open())
    free = diagnosed(tmp_path)["owner"]

    assert (held.outcome, held.found) == (Outcome.WARN, f"in use by process {os.getpid()}")
    assert (free.outcome, free.found) == (Outcome.OK, "not in use by another process")


def test_more_than_the_free_space_is_a_warning(tmp_path):
    check = diagnosed(tmp_path, max_bytes=1 << 60)["room"]

    assert check.outcome is Outcome.WARN
    assert "lower max_bytes" in check.todo


def test_a_full_file_system_is_a_warning_without_a_size_to_choose(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis.psutil, "disk_usage", lambda _: Usage(free=4096))

    check = diagnosed(tmp_path)["room"]

    assert (check.outcome, check.todo) == (Outcome.WARN, "free some space there")
    assert check.found == "0.0 MB are free and 0.0 MB are records; max_bytes is 1.0 MB"


@pytest.mark.parametrize(
    ("odirect", "outcome"), [(True, Outcome.FAIL), ("auto", Outcome.WARN), (False, Outcome.OK)]
)
def test_a_file_system_without_direct_io(tmp_path, monkeypatch, odirect, outcome):
    monkeypatch.setattr(diagnosis, "detect_direct", lambda directory, wanted: False)

    assert diagnosed(tmp_path, odirect=odirect)["direct I/O"].outcome is outcome


def test_a_trial_of_direct_io_that_fails_is_a_failed_check(tmp_path, monkeypatch):
    def refuse(directory, wanted):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(diagnosis, "detect_direct", refuse)

    checks = diagnosed(tmp_path, sample_bytes=MIB)

    assert checks["direct I/O"].found == "a trial failed: Input/output error"
    assert checks["writable"].outcome is Outcome.OK
    assert contents(tmp_path) == []


def test_the_file_system_is_that_of_the_longest_mount_and_of_several_the_last(monkeypatch):
    mounts = [Mount("/", "ext4"), Mount("/mnt/a b", "tmpfs"), Mount("/mnt/a b", "nfs4"), Mount("/mnt", "xfs")]
    monkeypatch.setattr(diagnosis.psutil, "disk_partitions", lambda all: mounts)

    assert file_system_of(Path("/mnt/a b/kv")) == "nfs4"
    assert file_system_of(Path("/mnt/other")) == "xfs"
    assert file_system_of(Path("/mntx")) == "ext4"
