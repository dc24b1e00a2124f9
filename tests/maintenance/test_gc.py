"""`lmcache-async gc` on directories filled by a real engine."""

from __future__ import annotations

import json
import os
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.maintenance.gc import choose
from lmcache_async.tiers.offline import StoredRecord
from lmcache_async.types import ChunkKey
from tests.maintenance.filled import content, damage, filled, invoke, loaded, record_files, rig_of, told

RECORD_BYTES = 8192


@pytest.fixture
def root(tmp_path):
    filled(tmp_path / "cache")
    return tmp_path / "cache"


def test_max_bytes_deletes_suffixes_first(root):
    whole = record_files(root)

    freed = told("gc", root, "--max-bytes", 3 * RECORD_BYTES)

    assert freed["records"]["room"] == {"count": 2, "bytes": 2 * RECORD_BYTES}
    assert (freed["freed_bytes"], freed["kept_bytes"]) == (2 * RECORD_BYTES, 3 * RECORD_BYTES)
    assert record_files(root) == whole[:3]
    assert loaded(rig_of(), root) == 24


def test_one_namespace_can_be_selected(root):
    filled(root, rig=rig_of("model-b"))

    old = told("gc", root, "--namespace", "model=model-a", "--older-than", "1d")
    lacking = told("gc", root, "--namespace", "quantisation=None")
    freed = told("gc", root, "--namespace", "model=model-a")

    assert (old["freed_records"], lacking["freed_records"], freed["freed_records"]) == (0, 0, 5)
    assert loaded(rig_of("model-a"), root) == 0
    assert loaded(rig_of("model-b"), root) == 40


def test_older_than_deletes_records_by_time_of_use(root):
    day_ago = time.time_ns() - 86400 * 10**9
    for path in record_files(root)[3:]:
        os.utime(path, ns=(day_ago, day_ago))

    assert told("gc", root, "--older-than", "2d")["freed_records"] == 0
    assert told("gc", root, "--older-than", "1000000s")["freed_records"] == 0
    assert told("gc", root, "--older-than", f"{'9' * 12}w")["freed_records"] == 0
    assert told("gc", root, "--older-than", "12h")["records"]["age"]["count"] == 2
    assert len(record_files(root)) == 3


@pytest.mark.parametrize(
    "command",
    [
        "gc {other}",
        "gc {other} --dry-run",
        "verify {other}",
        "verify {other} --remove",
        "inspect {other}",
        "copy {other} {other}/../there",
        "copy {other} {other}/../there --dry-run",
        "warm --config {other}/../kv.yaml --prompts {other}/../prompts",
    ],
)
def test_a_directory_of_other_files_is_refused_and_not_changed(tmp_path, command):
    other = tmp_path / "other"
    (other / "ab").mkdir(parents=True)
    (other / "ab" / ("0" * 38)).write_text("an object of git")
    (other / "lock").write_text("of a package manager")
    (tmp_path / "prompts").write_text("[1, 2, 3]\n")
    disks = [
        {"name": "disk", "id": name, "path": str(tmp_path / name), "max_bytes": "1GiB"}
        for name in ("new", "other")
    ]
    (tmp_path / "kv.yaml").write_text(json.dumps({"tiers": disks}))
    before = {path: path.is_file() and path.read_text() for path in other.rglob("*")}

    result = invoke(*command.format(other=other).split())

    assert result.exit_code == 2, result.output
    assert f"{other} is not a directory of the disk tier" in result.stderr
    assert {path: path.is_file() and path.read_text() for path in other.rglob("*")} == before
    assert not (tmp_path / "there").exists()


def test_the_file_that_prevents_a_change_is_named(root):
    (root / "lock").unlink()
    (root / "lock").mkdir()

    result = invoke("gc", root)

    assert result.exit_code == 2
    assert f"cannot open {root} to change it: lock: Is a directory; name" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "gc"])
def test_records_that_are_not_readable_are_counted_with_a_command_that_shows_why(root, monkeypatch, command):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("lmcache_async.plugins.disk.files.RecordFiles.open", fail)

    result = invoke(command, root)

    assert result.exit_code == 1
    assert "not readable: 5" in result.stdout
    assert "`lmcache-async verify` lists the records that are not readable" in result.stdout
    assert "Input/output error" in invoke("verify", root).stdout


def test_unreadable_records_are_deleted_unless_disabled(root):
    newest, second, third, *_ = record_files(root)
    damage(newest, at=0)
    damage(second, at=8)
    damage(third)  # the payload is not read

    assert told("gc", root, "--no-unreadable")["freed_records"] == 0
    assert told("gc", root)["records"]["unreadable"]["count"] == 2
    assert len(record_files(root)) == 3


def test_unfinished_and_quarantined_files_are_deleted_and_foreign_ones_kept(root):
    (root / "ab").mkdir(exist_ok=True)
    (root / "ab" / "README").write_text("a foreign file")
    (root / "tmp" / f"{'ab' * 16}.0").write_bytes(bytes(100))
    (root / "tmp" / "notes").write_text("a foreign file")
    damage(record_files(root)[1])
    told("verify", root, "--quarantine", code=1)

    first = told("gc", root)
    second = told("gc", root, "--quarantine", "--max-bytes", "1B")

    assert first["files"] == {"half_written": {"count": 1, "bytes": 100}}
    assert second["files"]["quarantine"] == {"count": 1, "bytes": RECORD_BYTES}
    assert [path.name for path in (root / "tmp").iterdir()] == ["notes"]
    assert list((root / "quarantine").iterdir()) == []
    assert record_files(root) == [root / "ab" / "README"]


def test_a_dry_run_changes_nothing_and_reports_what_would_be_deleted(root):
    (root / "tmp" / f"{'ab' * 16}.0").write_bytes(bytes(100))
    before = content(root)

    would = told("gc", root, "--max-bytes", RECORD_BYTES, "--dry-run")

    assert would["to_free_bytes"] == 4 * RECORD_BYTES + 100
    assert (would["freed_bytes"], would["freed_records"]) == (0, 0)
    assert content(root) == before
    assert "would be freed" in invoke("gc", root, "--max-bytes", "1B", "--dry-run").stdout
    assert told("gc", root, "--max-bytes", RECORD_BYTES)["freed_bytes"] == 4 * RECORD_BYTES + 100


@st.composite
def prompts(draw):
    """Records of several prompts, each a chain with descending stamps, in any order."""
    kept, chains = [], []
    number = 0
    for start in draw(st.lists(st.integers(1, 10**6), max_size=5)):
        chain = []
        for place in range(draw(st.integers(1, 6))):
            number += 1
            key = ChunkKey(number.to_bytes(16, "big"))
            chain.append(
                StoredRecord(key, draw(st.integers(1, 5)) * 4096, 10**9 + start * 10**4 - place * 1000)
            )
        chains.append(chain)
        kept += chain
    random.Random(draw(st.integers())).shuffle(kept)
    return kept, chains


@given(prompts(), st.integers(0, 40).map(lambda pages: pages * 4096), st.data())
def test_the_kept_records_are_prefixes_within_the_limit_and_no_more_than_needed_is_deleted(
    made, max_bytes, data
):
    kept, chains = made
    aged = data.draw(st.lists(st.sampled_from(kept), unique=True) if kept else st.just([]))

    victims = choose(kept, {"age": aged}, kept, max_bytes)

    room = victims["room"]
    gone = set(victims["age"]) | set(room)
    stays = [one for one in kept if one not in gone]
    assert len(gone) == len(victims["age"]) + len(room)
    assert sum(one.nbytes for one in stays) <= max_bytes
    for chain in chains:  # no chunk that was deleted for space has a continuation that stays
        places = [place for place, one in enumerate(chain) if one in room]
        assert all(chain[later] in gone for place in places for later in range(place, len(chain)))
    if room:
        last = room[-1]
        assert sum(one.nbytes for one in stays) + last.nbytes > max_bytes


def test_each_reason_is_printed(root):
    first, second, third, *_ = record_files(root)
    os.utime(first, (1, 1))
    damage(second)
    told("verify", root, "--quarantine", code=1)
    damage(third, at=0)
    (root / "tmp" / f"{'ab' * 16}.0").write_bytes(bytes(100))

    shown = []
    for options in (
        ["--quarantine", "--older-than", "1h", "--max-bytes", "9KiB"],
        ["--namespace", "model=model-a"],
    ):
        shown += invoke("gc", root, *options, "--dry-run").stdout.splitlines()
    done = invoke("gc", root).stdout.splitlines()

    assert shown[:7] == [
        "would remove 1 record, 8.0 KiB: header not readable",
        "would remove 1 record, 8.0 KiB: unused for longer than --older-than",
        "would remove 1 record, 8.0 KiB: total size above --max-bytes, least recently used",
        "would remove 1 file, 100 B: unfinished files of interrupted writes",
        "would remove 1 file, 8.0 KiB: quarantined",
        f"{root}: 32.1 KiB would be freed",
        "kept: 1 record, 8.0 KiB",
    ]
    assert "would remove 3 records, 24.0 KiB: selected by --namespace" in shown[7:]
    assert done[0] == "removed 1 record, 8.0 KiB: header not readable"
    assert f"{root}: 1 record removed, 8.1 KiB freed" in done
