"""Record files written by the compiled module, and by single calls from Python: the same files, modes and errors."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_async.plugins.disk import files as disk_files
from lmcache_async.plugins.disk.directory import RecordDirectory
from lmcache_async.plugins.disk.files import RecordFiles
from lmcache_async.testing.records import key_of, record
from tests.support.processes import open_fds
from tests.tiers.disk_tools import files_in

STAMP = 1_700_000_000_123_456_789
KEY = key_of(1)
NAME = KEY.hex()
COMPILED = pytest.param(
    disk_files.publish_file,
    id="compiled",
    marks=pytest.mark.skipif(disk_files.publish_file is None, reason="no module"),
)


@pytest.fixture(params=[None, COMPILED], ids=["python", "compiled"])
def directory(request, tmp_path, monkeypatch) -> Iterator[RecordDirectory]:
    monkeypatch.setattr(disk_files, "publish_file", request.param)
    opened = RecordDirectory(tmp_path / "kv")
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def view(arena) -> Iterator[memoryview]:
    with record(arena, 1) as buffer:
        yield buffer.padded_view


def write(directory: RecordDirectory, view: memoryview, *, direct: bool = False) -> int:
    """Write the record of `KEY` and return the number of the error, 0 if there is none."""
    failure = RecordFiles(directory, direct=direct, fsync=False).write(KEY, view, STAMP)
    assert failure is None or (isinstance(failure, OSError) and failure.__traceback__ is None)
    return 0 if failure is None else failure.errno or -1


@pytest.mark.parametrize("direct", [False, True])
def test_a_record_has_its_bytes_its_stamp_and_a_private_mode(directory, view, direct):
    if direct and not disk_files_direct(directory):
        direct = False

    assert write(directory, view, direct=direct) == 0

    path = directory.root / NAME[:2] / NAME
    status = path.stat()
    assert path.read_bytes() == bytes(view)
    assert (status.st_mtime_ns, status.st_atime_ns) == (STAMP, STAMP)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert files_in(directory.root) == [path]


@pytest.mark.parametrize("direct", [False, True])
def test_the_rest_of_the_last_page_is_zeros(directory, arena, direct):
    """The slab has bytes of an earlier record there, perhaps not encrypted or of another tenant."""
    with record(arena, 1, 5000) as buffer:
        view = buffer.padded_view
        view[buffer.nbytes :] = b"x" * (len(view) - buffer.nbytes)

        assert write(directory, view, direct=direct and disk_files_direct(directory)) == 0

        content = (directory.root / NAME[:2] / NAME).read_bytes()
        assert content == bytes(buffer.view) + bytes(len(view) - buffer.nbytes)
        assert len(view) > buffer.nbytes


def test_a_record_replaces_a_file_of_its_name(directory, view):
    folder = directory.root / NAME[:2]
    folder.mkdir()
    (folder / NAME).write_bytes(b"old")

    assert write(directory, view) == 0
    assert (folder / NAME).read_bytes() == bytes(view)


def test_a_deleted_directory_is_created_again(directory, view):
    (directory.root / "tmp").rmdir()
    for path in directory.root.iterdir():
        path.unlink()
    directory.root.rmdir()

    assert write(directory, view) == 0
    assert files_in(directory.root) == [directory.root / NAME[:2] / NAME]


@pytest.mark.parametrize(
    ("in_place_of_the_folder", "numbers"),
    [("file", {errno.ENOTDIR}), ("link", {errno.ENOTDIR, errno.ELOOP}), ("record", {errno.EISDIR})],
)
def test_a_folder_that_cannot_be_used_is_an_error_and_nothing_is_left(
    directory, view, tmp_path, in_place_of_the_folder, numbers
):
    folder = directory.root / NAME[:2]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    match in_place_of_the_folder:
        case "file":
            folder.touch()
        case "link":
            folder.symlink_to(elsewhere)
        case "record":
            (folder / NAME).mkdir(parents=True)

    assert write(directory, view) in numbers
    assert list((directory.root / "tmp").iterdir()) == list(elsewhere.iterdir()) == []


def test_a_write_that_fails_in_the_middle_is_an_error_and_nothing_is_left(directory, view):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(view) - 4096, hard))
    try:
        number = write(directory, view)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert number in (errno.EFBIG, errno.ENOSPC)
    assert files_in(directory.root) == []
    assert write(directory, view) == 0


def test_no_descriptor_is_left_open(directory, view):
    before = open_fds()
    folder = directory.root / NAME[:2]
    folder.touch()
    assert write(directory, view) == errno.ENOTDIR
    folder.unlink()
    (folder / NAME).mkdir(parents=True)
    assert write(directory, view) == errno.EISDIR
    (folder / NAME).rmdir()
    assert write(directory, view) == 0

    assert open_fds() == before


def disk_files_direct(directory: RecordDirectory) -> bool:
    """Whether the file system supports direct I/O."""
    path = Path(directory.root / "trial")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True
