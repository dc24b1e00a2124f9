"""`lmcache-async copy`: an engine loads copied records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.cli import output, records
from lmcache_async.errors import TierFullError, TierUnavailableError
from lmcache_async.maintenance.copy import copy
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk.files import RecordFiles
from lmcache_async.testing.fakes import DictConfig, DictTier
from lmcache_async.testing.records import SLAB_BYTES, key_of, record, small_arena
from lmcache_async.tiers.offline import OfflineOptions
from tests.maintenance.filled import (
    Failing,
    content,
    damage,
    filled,
    invoke,
    key_file,
    loaded,
    record_files,
    rig_of,
    sealed,
    store_of,
    told,
)
from tests.support.daemons import WAITS, ThreadedDaemon, socket_path
from tests.support.gates import Gate


def test_from_directory_to_directory(root, tmp_path):
    done = told("copy", root, tmp_path / "there")

    assert (done["records"], done["complete"], done["there"], done["dry_run"]) == (8, True, 0, False)
    assert (done["source"], done["destination"]) == (str(root), str(tmp_path / "there"))
    assert done["bytes"] == sum(map(len, content(root).values()))
    assert content(tmp_path / "there") == content(root)
    assert [path.name for path in record_files(tmp_path / "there")] == [
        path.name for path in record_files(root)
    ]
    assert loaded(rig_of(), tmp_path / "there") == 40
    assert [path.stat().st_mode & 0o777 for path in record_files(tmp_path / "there")] == [0o600] * 8

    record_files(tmp_path / "there")[2].unlink()
    again = told("copy", root, tmp_path / "there")

    assert (again["records"], again["there"]) == (1, 7)
    assert content(tmp_path / "there") == content(root)


def test_a_damaged_record_is_listed_and_not_copied(root, tmp_path):
    wrong = record_files(root)[3]
    damage(wrong)

    done = told("copy", root, tmp_path / "there", code=1)

    assert (done["records"], done["refused"], done["complete"]) == (7, {"checksum": 1}, False)
    assert [(each["key"], each["cause"]) for each in done["refused_records"]] == [(wrong.name, "checksum")]
    assert wrong.name not in content(tmp_path / "there")
    assert f"{wrong.name}: checksum: " in invoke("copy", root, tmp_path / "other").stdout


def test_a_limit_copies_the_most_recently_used_records(root, tmp_path):
    done = told("copy", root, tmp_path / "there", "--max-bytes", 5 * 4608, "--in-flight", 1)

    assert (done["records"], done["skipped"], done["complete"]) == (5, 3, False)
    assert sorted(content(tmp_path / "there")) == sorted(path.name for path in record_files(root)[:5])


def test_a_full_destination_has_the_most_recently_used_records(root, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"tiers: [{{name: disk, id: small, path: {tmp_path}/there, max_bytes: 24KiB}}]\n")

    done = told("copy", root, "small", "--config", config, "--in-flight", 1, code=1)

    assert (done["records"], done["refused"], done["skipped"]) == (3, {"full": 1}, 4)
    assert sorted(content(tmp_path / "there")) == sorted(path.name for path in record_files(root)[:3])
    assert "not copied because a destination is full: 4 records" in invoke(
        "copy", root, "small", "--config", config, "--in-flight", 1
    ).stdout.replace("5 records", "4 records")


def test_a_dry_run_counts_records_and_bytes_as_the_copy_does(root, tmp_path):
    record_files(root)[1].write_bytes(b"not a record" * 1000)

    planned = told("copy", root, tmp_path / "there", "--dry-run", code=1)
    done = told("copy", root, tmp_path / "there", code=1)

    assert (planned["records"], planned["refused"]) == (7, {"magic": 1})
    assert planned | {"complete": False, "dry_run": False} == done


def test_a_dry_run_changes_nothing_and_reports_what_is_missing(root, tmp_path):
    there = tmp_path / "there"

    new = told("copy", root, there, "--dry-run")
    assert (new["records"], new["there"], new["dry_run"], new["complete"]) == (8, 0, True, False)
    assert not there.exists()
    root.rename(tmp_path / "rank-0")
    tmp_path.joinpath("ranks").mkdir()
    ranked = told("copy", tmp_path, tmp_path / "ranks", "--dry-run", "--rank", 0)
    disk = json.dumps({"name": "disk", "path": str(there), "max_bytes": "1GiB"})
    tier = told("copy", tmp_path / "rank-0", disk, "--dry-run")
    assert (ranked["records"], ranked["destination"]) == (8, str(tmp_path / "ranks" / "rank-0"))
    assert (tier["records"], tier["destination"]) == (8, str(there))
    tmp_path.joinpath("rank-0").rename(root)

    told("copy", root, there)
    for path in record_files(there)[:3]:
        path.unlink()
    before = content(there)
    some = told("copy", root, there, "--dry-run", "--namespace", "model=model-a")
    assert (some["records"], some["there"]) == (3, 5)
    assert told("copy", root, there, "--dry-run", "--namespace", "model=none")["passed_over"] == 3
    assert told("copy", root, there, "--dry-run", "--max-bytes", 2 * 4608)["skipped"] == 1
    assert "to copy: 3 records" in invoke("copy", root, there, "--dry-run").stdout
    assert content(there) == before


def test_encrypted_records_stay_encrypted_and_load_with_their_key(tmp_path):
    encrypted = {"encryption.key_file": str(key_file(tmp_path))}
    filled(tmp_path / "cache", **encrypted)

    done = told("copy", tmp_path / "cache", tmp_path / "there")

    assert done["encrypted"] == 5
    assert content(tmp_path / "there") == content(tmp_path / "cache")
    assert loaded(rig_of(), tmp_path / "there", **encrypted) == 40
    assert loaded(rig_of(), tmp_path / "there") == 0
    assert "encrypted: 5 records" in invoke("copy", tmp_path / "cache", tmp_path / "other").stdout


def test_a_time_of_use_in_the_future_is_not_taken_over(root, tmp_path):
    newest = record_files(root)[0]
    os.utime(newest, ns=(1 << 61, 1 << 61))

    told("copy", root, tmp_path / "there")

    assert record_files(tmp_path / "there")[0].name == newest.name
    assert record_files(tmp_path / "there")[0].stat().st_mtime_ns <= time.time_ns()


def test_a_copy_stopped_by_ctrl_c_leaves_whole_records_and_the_next_one_copies_the_rest(
    root, tmp_path, monkeypatch
):
    @contextlib.contextmanager
    def interrupted():
        yield lambda what, done, *_: signal.raise_signal(signal.SIGINT) if done == 3 else None

    monkeypatch.setattr(records, "progress", interrupted)
    stopped = invoke("copy", root, tmp_path / "there", "--in-flight", 1)
    monkeypatch.undo()

    assert stopped.exit_code == 130
    copied = content(tmp_path / "there")
    assert 3 <= len(copied) < 8
    assert copied.items() <= content(root).items()
    assert list((tmp_path / "there" / "tmp").iterdir()) == []
    done = told("copy", root, tmp_path / "there")
    assert (done["records"], done["there"]) == (8 - len(copied), len(copied))
    assert content(tmp_path / "there") == content(root)


def test_the_time_that_is_left_is_that_of_the_items_in_work(monkeypatch, capsys):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():  # as on a terminal
        monkeypatch.setenv(name, value)
    with output.progress() as show:
        for what, done in [("headers", 0), ("headers", 1), ("headers", 2), ("records", 0), ("records", 1)]:
            show(what, done, 2, 0)

    last = capsys.readouterr().err.rpartition("records")[2]
    assert "1/2" in last
    assert "-:--:--" in last


def test_to_a_valkey_server_and_back(root, tmp_path, valkey):
    there = told("copy", root, valkey)
    again = told("copy", root, valkey)

    assert (there["records"], again["records"], again["there"]) == (8, 0, 8)
    assert loaded(rig_of(), None, tiers=[json.loads(valkey)]) == 40
    assert told("inspect", "--tier", valkey)["namespaces"][0]["records"] == 8
    assert told("verify", "--tier", valkey)["records"] == 8

    back = told("copy", valkey, tmp_path / "back", "--namespace", "model=model-a")
    assert back["records"] == 8
    assert content(tmp_path / "back") == content(root)
    assert min(path.stat().st_mtime for path in record_files(tmp_path / "back")) > time.time() - 3600
    assert told("copy", valkey, tmp_path / "none", "--namespace", "model=none")["passed_over"] == 8
    assert told("gc", "--tier", valkey, "--namespace", "model=model-a")["freed_records"] == 8
    assert told("inspect", "--tier", valkey)["records"] == 0


def test_between_tiers_of_a_config(root, tmp_path, valkey):
    config = tmp_path / "config.yaml"
    disk = {"name": "disk", "path": str(root.parent / "ranks"), "max_bytes": "1GiB"}
    (root.parent / "ranks").mkdir()
    root.rename(root.parent / "ranks" / "rank-1")
    config.write_text(json.dumps({"tiers": ["cpu", json.loads(valkey), disk]}))

    done = told("copy", "disk", "valkey", "--config", config, "--rank", 1)

    assert (done["source"], done["destination"]) == (f"{disk['path']}/rank-1", "tier 'valkey'")
    assert done["records"] == 8


def test_a_wrong_record_in_a_valkey_server_is_found_and_removed(root, server, valkey):
    told("copy", root, valkey)
    prefix = json.loads(valkey)["key_prefix"]
    name = next(key for key in server.ask("KEYS", f"*{prefix}*") if key)
    value = bytearray(server.ask("GET", name))
    value[4200] ^= 1
    server.ask("SET", name, bytes(value))

    found = told("verify", "--tier", valkey, "--remove", code=1)

    assert (found["records"], found["wrong"], found["remedied"]) == (7, {"checksum": 1}, 1)
    assert told("verify", "--tier", valkey)["records"] == 7


def test_gc_of_a_tier_refuses_age_and_size(valkey):
    for options in (["--older-than", "1d"], ["--max-bytes", "1GiB"]):
        refused = invoke("gc", "--tier", valkey, *options)

        assert refused.exit_code == 2
        assert "does not report times of use" in refused.stderr


def test_to_the_pool_of_a_host_and_back(root, tmp_path):
    with socket_path() as path, ThreadedDaemon(path):
        tier = {"name": "host", "socket": str(path), "prefault": False, **WAITS}

        assert told("copy", root, json.dumps(tier))["records"] == 8
        assert loaded(rig_of(), None, tiers=[tier]) == 40
        size = "8 records, of unknown size; already there: 0"
        assert size in invoke("copy", json.dumps(tier), tmp_path / "back", "--dry-run").stdout
        assert told("copy", json.dumps(tier), tmp_path / "back")["records"] == 8

    assert content(tmp_path / "back") == content(root)


def test_a_directory_whose_name_is_not_utf_8_is_copied(root, tmp_path):
    odd = root.rename(tmp_path / os.fsdecode(b"odd-\xff"))

    assert told("copy", odd, tmp_path / "there")["records"] == 8
    assert invoke("inspect", odd).exit_code == 0
    assert "no record" in invoke("inspect", odd, "00" * 16).stderr


async def test_a_directory_counts_rewritten_and_removed_records(tmp_path):
    (one, data), (other, _) = sealed([3000, 3000]).items()
    config = DiskConfig(path=tmp_path / "there", max_bytes=8192)
    options = OfflineOptions(change=True, in_flight=1, max_record_bytes=SLAB_BYTES, create=True)

    async with DiskTier.offline(config, options) as target:

        async def write(key):
            with await target.allocate(len(data)) as buffer:
                buffer.view[:] = data
                await target.write(key, buffer, 1)

        await target.prepare_writes()
        await write(one)
        await write(one)
        assert [(each.key, each.nbytes) for each in await target.list()] == [(one, 8192)]
        await target.remove([one])
        await write(other)
        assert await target.has([one, other]) == [False, True]


async def test_records_that_are_written_while_others_are_removed_are_counted(tmp_path, monkeypatch):
    (data, *_) = sealed([3000]).values()
    config = DiskConfig(path=tmp_path / "there", max_bytes=2 * 8192)
    options = OfflineOptions(change=True, in_flight=3, max_record_bytes=SLAB_BYTES, create=True)
    gate = Gate(monkeypatch, RecordFiles, "write")

    async with DiskTier.offline(config, options) as target:

        async def write(number):
            with await target.allocate(len(data)) as buffer:
                buffer.view[:] = data
                await target.write(key_of(number), buffer, 1)

        await write(1)
        gate.shut()
        second = asyncio.ensure_future(write(2))
        await gate.reached()
        await target.remove([key_of(1)])
        third = asyncio.ensure_future(write(3))
        await gate.reached()
        gate.open()
        await asyncio.gather(second, third)

        with pytest.raises(TierFullError, match="16384 bytes of 16384"):
            await write(4)
        assert await target.has(map(key_of, range(5))) == [False, False, True, True, False]


# Between tiers in this process, where each step can be made to fail.


async def copied(source, destination, *, in_flight=3, **options):
    async with store_of(source, in_flight=in_flight) as from_, store_of(destination) as into:
        return await copy(from_, into, **options)


@st.composite
def stores(draw):
    """Records, keys of damaged records, and keys present in the destination."""
    records = sealed(draw(st.lists(st.integers(0, 9000), max_size=6)))
    keys = sorted(records)
    some = st.lists(st.sampled_from(keys), unique=True) if keys else st.just([])
    return records, set(draw(some)), set(draw(some))


@given(stores(), st.integers(0, 1 << 20))
def test_a_copy_has_the_same_bytes_and_no_damaged_record(made, at):
    records, damaged, had = made
    source = {}
    for key, data in records.items():
        place = at % len(data)
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        source[key] = changed if key in damaged else data
    into = {key: records[key] for key in had}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(copied(DictTier(records=source), DictTier(records=into)))

    missing = set(records) - had
    assert into == {key: records[key] for key in had | (missing - damaged)}
    assert report.there == len(had)
    assert report.records == len(missing - damaged)
    assert report.refused.total() == len(missing & damaged)
    assert report.bytes == sum(len(records[key]) for key in missing - damaged)


async def test_a_record_that_fails_is_refused_and_the_others_are_copied():
    records, into = sealed([10] * 4), {}

    report = await copied(Failing(records=records), Failing(records=into))

    assert sorted(into) == [key_of(3), key_of(4)]
    assert report.refused == {"error": 2}
    assert {one["message"] for one in report.refused_records} == {"it cannot be read", "it cannot be written"}


async def test_the_error_for_a_record_longer_than_the_memory_names_the_option():
    into = {}
    source, destination = (DictTier(records=each) for each in (sealed([9000]), into))

    async with store_of(source) as from_, store_of(destination, max_record_bytes=4096) as small:
        report = await copy(from_, small)

    assert report.refused == {"too_long": 1}
    assert "--max-record-bytes" in report.refused_records[0]["message"]


async def test_a_copy_ends_when_it_evicts_its_own_records():
    records = sealed([10] * 12)
    nbytes = len(records[key_of(1)])
    few = {key_of(number): records[key_of(number)] for number in (1, 2, 3)}
    into = {key_of(99): records[key_of(1)]}

    fits = await copied(DictTier(records=few), DictTier(DictConfig(max_bytes=3 * nbytes), records=into))
    small = DictTier(DictConfig(max_bytes=6 * nbytes), records=into)
    full = await copied(DictTier(records=records), small, in_flight=1)

    assert (fits.complete, fits.records) == (True, 3)
    assert (full.complete, full.there, full.refused["full"] > 0) == (False, 3, True)
    assert {key_of(12), key_of(11), key_of(10)} <= into.keys()  # copied first


async def test_a_copy_does_not_join_prompts_in_the_order_of_eviction():
    records = sealed([10] * 3)
    third = records.pop(key_of(3))
    tier = DictTier(DictConfig(max_bytes=2 * len(third)))

    await copied(DictTier(records=records), tier)
    await tier.contains_many([key_of(1)])
    with record(small_arena(1), 3, 10) as buffer:
        await tier.put(key_of(3), buffer)

    assert [*tier.records] == [key_of(1), key_of(3)]


class Silent(DictTier):
    """A tier whose second and later `put` calls block."""

    async def put(self, key, buffer):
        if self.records:
            await asyncio.Event().wait()
        await super().put(key, buffer)


async def test_a_destination_that_stops_answering_ends_the_copy():
    into = {}
    async with (
        store_of(DictTier(records=sealed([10] * 3))) as source,
        store_of(Silent(records=into), timeout_s=0.1) as destination,
    ):
        with pytest.raises(TierUnavailableError, match=r"did not answer in 0\.1 s"):
            await copy(source, destination)

    assert len(into) == 1


@pytest.mark.parametrize("count", range(1, 6))
async def test_a_cancelled_copy_gives_back_its_memory(count):
    records, into = sealed([10] * 5), {}
    async with store_of(DictTier(records=records)) as source, store_of(DictTier(records=into)) as destination:
        copying = asyncio.create_task(
            copy(source, destination, lambda what, done, *_: copying.cancel() if done == count else None)
        )
        await asyncio.wait([copying])

        assert copying.cancelled()
        assert into.items() <= records.items()
        for target in (source, destination):  # every slab can be leased
            leased = [await target.allocate(SLAB_BYTES) for _ in range(8)]
            for buffer in leased:
                buffer.release()
