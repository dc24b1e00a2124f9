"""The archive: what is exported is imported to the byte, and whatever becomes of the file, nothing wrong gets in."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from pathlib import Path

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_async.errors import ConfigError, LMCacheAsyncError, TierInUseError
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.records.archive import FRAME_BYTES, ArchiveHead, End, Frame, record_checksum
from lmcache_async.records.exporting import about, export
from lmcache_async.records.flight import Meter
from lmcache_async.records.importing import import_records
from lmcache_async.records.namespaces import EVERYTHING
from lmcache_async.records.opening import TargetSpec, open_target
from lmcache_async.records.reader import ArchiveReader
from lmcache_async.records.tier import TierTarget
from lmcache_async.records.writer import ArchiveWriter, PartWriter, StreamWriter
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.records import SLAB_BYTES, key_of, record, small_arena
from lmcache_async.tiers.layers.guard import GuardLayer
from tests.records.filled import filled, invoke, told

PAYLOADS = st.lists(st.integers(0, 9000), max_size=6)
ABOUT = about("tier 'dict'", EVERYTHING)


def records_of(payloads):
    """Sealed records by key."""
    arena = small_arena(2)
    made = {}
    for number, nbytes in enumerate(payloads, 1):
        with record(arena, number, nbytes) as buffer:
            made[key_of(number)] = bytes(buffer.view)
    return made


def target_of(records):
    tier = GuardLayer(
        DictTier(records=records), name="dict", timeout_s=30, logger=LimitedLogger(logging.getLogger("test"))
    )
    return TierTarget(tier, name="dict", max_record_bytes=SLAB_BYTES, in_flight=3)


def run(work):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def exported(records, writer):
    async with target_of(records) as target:
        return await export(target, writer, Meter())


async def imported(into, *paths):
    files = [path.open("rb", buffering=0) for path in paths]
    try:
        readers = [ArchiveReader(file, str(path)) for file, path in zip(files, paths, strict=True)]
        async with target_of(into) as target:
            return await import_records(readers, target, Meter())
    finally:
        for file in files:
            file.close()


def archive_of(records, path):
    path.unlink(missing_ok=True)
    assert run(exported(records, ArchiveWriter(path, ABOUT))).complete
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("archives")


@given(PAYLOADS)
def test_what_is_exported_is_imported_to_the_byte(folder, payloads):
    records = records_of(payloads)
    path = archive_of(records, folder / "a.lmcar")
    into = {}

    report = run(imported(into, path))

    assert into == records
    assert report.right
    assert report.records == len(records)
    assert path.stat().st_size == (len(records) + 2) * FRAME_BYTES + sum(map(len, records.values()))


@given(PAYLOADS, st.integers(4096, 40000))
def test_parts_together_are_the_whole(tmp_path_factory, payloads, part_bytes):
    records = records_of(payloads)
    folder = tmp_path_factory.mktemp("parts")

    made = run(exported(records, ArchiveWriter(folder, ABOUT, part_bytes)))

    parts = sorted(folder.iterdir())
    assert made.parts == len(parts)
    assert made.archive_bytes == sum(part.stat().st_size for part in parts)
    into = {}
    report = run(imported(into, *parts))
    assert into == records
    assert report.right
    if len(parts) > 1:
        assert not run(imported({}, *parts[:-1])).right  # the last one is missing
        with pytest.raises(ConfigError, match="parts before it are missing"):
            run(imported({}, *parts[1:]))


@st.composite
def damages(draw):
    """A change of a file's bytes."""
    kind = draw(st.sampled_from(["flip", "cut", "zero", "insert", "repeat", "remove", "swap", "append"]))
    at, other = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    size = draw(st.sampled_from([1, 8, 64, 512, 4096, 8192]))
    noise = draw(st.binary(min_size=1, max_size=64))

    def change(data):
        start, second = int(at * (len(data) - 1)), int(other * (len(data) - 1))
        stop = start + size
        part = data[start:stop]
        if kind == "flip":
            return data[:start] + bytes([data[start] ^ (1 << size % 8)]) + data[start + 1 :]
        if kind == "cut":
            return data[:start]
        if kind == "zero":
            return data[:start] + bytes(len(part)) + data[stop:]
        if kind == "insert":
            return data[:start] + noise + data[start:]
        if kind == "repeat":
            return data[:stop] + part + data[stop:]
        if kind == "remove":
            return data[:start] + data[stop:]
        if kind == "swap":
            low, high = sorted((start, second))
            half = min(size, high - low)
            return (
                data[:low]
                + data[high : high + half]
                + data[low + half : high]
                + data[low : low + half]
                + data[high + half :]
            )
        return data + noise

    return change


@settings(max_examples=150)
@given(PAYLOADS.filter(bool), st.lists(damages(), min_size=1, max_size=3))
def test_whatever_becomes_of_an_archive_nothing_wrong_gets_in(folder, payloads, changes):
    records = records_of(payloads)
    path = archive_of(records, folder / "b.lmcar")
    data = whole = path.read_bytes()
    for change in changes:
        if data:
            data = change(data)
    path.write_bytes(data)
    into = {}

    try:
        report = run(imported(into, path))
    except ConfigError:
        assert data[:FRAME_BYTES] != whole[:FRAME_BYTES]
        return

    assert into.items() <= records.items()
    assert report.records == len(into)
    if data != whole and not data.startswith(whole):
        assert not report.right
    else:  # what is behind its end means nothing
        assert into == records


def frames(*pairs):
    """An archive that its own checksums find no fault with."""
    framed, body = b"", b""
    for key, data in pairs:
        frame = Frame(key, 0, len(data), record_checksum(memoryview(data))).pack()
        framed += frame
        body += frame + data
    end = End(len(pairs), record_checksum(memoryview(framed)), more=False).pack()
    return ArchiveHead(0, 0, bytes(16), bytes(16)).pack() + body + end


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("forge", "cause"),
    [
        (lambda data: (key_of(2), data), "key"),
        (lambda data: (key_of(1), flipped(data, 5000)), "checksum"),
        (lambda data: (key_of(1), flipped(data, 100)), "header"),
        (lambda data: (key_of(1), flipped(data, 0)), "magic"),
        (lambda data: (key_of(1), flipped(data, 8)), "version"),
        (lambda data: (key_of(1), data[:-1]), "length"),
        (lambda data: (key_of(1), data + b"\0"), "length"),
        (lambda data: (key_of(1), data[:100]), "length"),
        (lambda data: (key_of(1), b""), "length"),
    ],
)
def test_a_forged_archive_lets_in_no_wrong_record(tmp_path, forge, cause):
    [good, other] = records_of([3000, 3000]).values()
    path = tmp_path / "a.lmcar"
    path.write_bytes(frames(forge(good), (key_of(2), other)))
    into = {}

    report = run(imported(into, path))

    assert report.refused == {cause: 1}
    assert not report.right
    assert into == {key_of(2): other}


def test_behind_a_damaged_frame_it_goes_on_with_the_next(tmp_path):
    records = records_of([3000, 3000, 3000])
    path = archive_of(records, tmp_path / "a.lmcar")
    data = bytearray(path.read_bytes())
    second = FRAME_BYTES + FRAME_BYTES + 4096 + 3000
    data[second + 20] ^= 1  # the key in the second frame
    path.write_bytes(data)
    into = {}

    report = run(imported(into, path))

    assert len(into) == 2
    assert "a frame is damaged; the next one begins at byte" in report.damage[0]["what"]
    assert not report.complete


def test_a_record_longer_than_there_is_memory_for_is_passed_by(tmp_path):
    records = records_of([3000])
    path = tmp_path / "a.lmcar"
    path.write_bytes(frames((key_of(9), bytes(SLAB_BYTES + 4096)), *records.items()))
    into = {}

    report = run(imported(into, path))

    assert report.refused == {"too_long": 1}
    assert into == records


@pytest.mark.parametrize("data", [b"", b"short", bytes(64), b"LMCARCHV" + bytes(56)])
def test_what_is_no_archive_is_said_to_be_none(tmp_path, data):
    path = tmp_path / "a.lmcar"
    path.write_bytes(data)

    with pytest.raises(ConfigError, match="is no archive of records"):
        run(imported({}, path))


def test_an_archive_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lmcache_async.records.archive.ARCHIVE_VERSION", 2)
    path = archive_of(records_of([100]), tmp_path / "a.lmcar")
    monkeypatch.undo()

    with pytest.raises(ConfigError, match="of version 2, and this lmcache-async reads version 1"):
        run(imported({}, path))


def test_through_a_pipe(tmp_path):
    records = records_of([9000] * 40)  # more than a pipe holds
    into = {}
    reading, writing = os.pipe()

    async def both():
        with os.fdopen(writing, "wb", buffering=0) as end:
            made = exported(records, StreamWriter(end.fileno(), ABOUT))
            async with asyncio.TaskGroup() as group:
                group.create_task(close_after(made, end))
                with os.fdopen(reading, "rb", buffering=0) as start:
                    async with target_of(into) as target:
                        return await import_records([ArchiveReader(start, "pipe")], target, Meter())

    async def close_after(made, end):
        await made
        end.close()

    report = run(both())

    assert report.right
    assert into == records


def test_damage_in_a_pipe_ends_it(tmp_path):
    path = archive_of(records_of([3000, 3000]), tmp_path / "a.lmcar")

    class Pipe(io.BytesIO):
        def seekable(self):
            return False

    async def do():
        data = flipped(path.read_bytes(), FRAME_BYTES + 20)
        async with target_of({}) as target:
            return await import_records([ArchiveReader(Pipe(data), "pipe")], target, Meter())

    report = run(do())

    assert report.records == 0
    assert "a pipe cannot be searched" in report.damage[0]["what"]


@given(PAYLOADS.filter(bool), st.floats(0, 1), st.booleans())
def test_an_export_goes_on_from_any_byte_that_it_was_cut_at(folder, payloads, at, torn):
    records = records_of(payloads)
    path = archive_of(records, folder / "c.lmcar")
    data = path.read_bytes()
    partial = path.with_name("c.lmcar.partial")
    cut = bytearray(data[: int(at * len(data))])
    if torn and len(cut) > 2 * FRAME_BYTES:  # the power failed: the end of what was written is noise
        cut[-FRAME_BYTES:] = os.urandom(FRAME_BYTES)
    partial.write_bytes(cut)
    path.unlink()

    report = run(exported(records, ArchiveWriter(path, ABOUT)))

    assert report.records == len(records)
    assert not partial.exists()
    into = {}
    assert run(imported(into, path)).right
    assert into == records


def test_an_export_goes_on_with_its_own_beginnings_alone(tmp_path):
    path = archive_of(records_of([100]), tmp_path / "a.lmcar")
    path.rename(tmp_path / "b.lmcar.partial")

    with pytest.raises(ConfigError, match="begun by an export of something else"):
        run(exported(records_of([100]), ArchiveWriter(tmp_path / "b.lmcar", about("other", EVERYTHING))))


def test_a_complete_archive_is_not_written_over(tmp_path):
    path = archive_of(records_of([100]), tmp_path / "a.lmcar")
    data = path.read_bytes()

    with pytest.raises(ConfigError, match="is there already"):
        run(exported(records_of([100, 100]), ArchiveWriter(path, ABOUT)))

    assert path.read_bytes() == data


def test_two_exports_do_not_write_one_archive(tmp_path):
    first = PartWriter(tmp_path / "a.lmcar", ArchiveHead(0, 0, bytes(16), ABOUT))
    first.open()
    try:
        with pytest.raises(TierInUseError, match="is being written by another export"):
            run(exported(records_of([100]), ArchiveWriter(tmp_path / "a.lmcar", ABOUT)))
    finally:
        first.close()


def test_a_full_disk_is_told_and_what_is_there_stays(tmp_path, monkeypatch):
    records = records_of([3000, 3000, 3000])
    path = tmp_path / "a.lmcar"
    real, written = os.write, []

    def write(fd, data):
        written.append(len(data))
        if sum(written) > 9000:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr("lmcache_async.records.writer.os.write", write)
    with pytest.raises(LMCacheAsyncError, match=r"No space left.*the same command goes on"):
        run(exported(records, ArchiveWriter(path, ABOUT)))
    monkeypatch.undo()

    assert run(exported(records, ArchiveWriter(path, ABOUT))).resumed == 1
    into = {}
    run(imported(into, path))
    assert into == records


def test_a_wrong_record_is_not_exported(tmp_path):
    records = records_of([3000, 3000])
    records[key_of(1)] = flipped(records[key_of(1)], 5000)
    path = tmp_path / "a.lmcar"

    report = run(exported(records, ArchiveWriter(path, ABOUT)))

    assert report.refused == {"checksum": 1}
    assert not report.right
    into = {}
    run(imported(into, path))
    assert list(into) == [key_of(2)]


async def test_cancelled_an_import_gives_back_its_memory_and_leaves_whole_records(tmp_path):
    records = records_of([9000] * 20)
    path = await asyncio.to_thread(archive_of, records, tmp_path / "a.lmcar")

    class Stop(Meter):
        left = 5

        def advance(self, count, nbytes):
            self.left -= 1
            if self.left == 0:
                asyncio.current_task().cancel()

    into = {}
    target = target_of(into)

    async def stopped():
        with path.open("rb", buffering=0) as file:
            async with target:
                try:
                    await import_records([ArchiveReader(file, "a")], target, Stop())
                finally:
                    assert target._arena.statistics().leased_slabs == 0

    with pytest.raises(asyncio.CancelledError):
        await stopped()

    assert into.items() <= records.items()
    assert len(into) < len(records)
    report = await imported(into, path)
    assert (report.records + report.there, into) == (20, records)


def test_the_names_of_parts_are_in_order():
    writer = ArchiveWriter(Path("x"), ABOUT, 1)

    assert sorted(str(writer._path(part)) for part in (0, 9, 10, 99999)) == [
        str(writer._path(part)) for part in (0, 9, 10, 99999)
    ]


def test_an_archive_that_lost_a_record_is_not_complete(tmp_path):
    records = records_of([3000, 3000, 3000])
    path = archive_of(records, tmp_path / "a.lmcar")
    data = path.read_bytes()
    step = FRAME_BYTES + 4096 + 3000
    path.write_bytes(data[: FRAME_BYTES + step] + data[FRAME_BYTES + 2 * step :])
    into = {}

    report = run(imported(into, path))

    assert len(into) == 2
    assert not report.right
    assert "2 records were found of the 3" in report.damage[0]["what"]


def test_a_record_that_is_there_several_times_is_saved_once(tmp_path):
    [(key, data)] = records_of([3000]).items()
    path = tmp_path / "a.lmcar"
    path.write_bytes(frames(*[(key, data)] * 3))
    into = {}

    report = run(imported(into, path))

    assert into == {key: data}
    assert (report.records, report.there, report.bytes) == (1, 2, len(data))
    assert report.right


def test_a_wrong_record_keeps_out_no_right_one_of_its_key(tmp_path):
    [(key, data), (_, other)] = records_of([3000, 3001]).items()
    path = tmp_path / "a.lmcar"
    path.write_bytes(frames((key, other), (key, data), (key, data), (key, other)))
    into = {}

    report = run(imported(into, path))

    assert into == {key: data}
    assert (report.records, report.there, report.refused) == (1, 2, {"key": 1})


def test_a_record_that_is_saved_again_takes_the_room_of_the_former(tmp_path):
    [(key, data)] = records_of([3000]).items()
    spec = TargetSpec(path=tmp_path / "there", max_bytes=8192)

    async def save_twice():
        async with open_target(spec, change=True) as target:
            await target.begin_saves()
            for _ in range(2):
                with await target.allocate(len(data)) as buffer:
                    buffer.view[:] = data
                    await target.save(key, buffer, 1)
            return await target.list()

    assert [(kept.key, kept.nbytes) for kept in run(save_twice())] == [(key, 8192)]


def test_a_directory_whose_name_is_no_utf_8_is_exported(tmp_path):
    filled(tmp_path / "cache")
    odd = (tmp_path / "cache").rename(tmp_path / os.fsdecode(b"odd-\xff"))

    assert told("export", odd, tmp_path / "a.lmcar")["records"] == 5
    assert invoke("inspect", odd).exit_code == 0
    assert "no record" in invoke("inspect", odd, "00" * 16).stderr
