"""`lmcache-async verify`, over directories that a real engine has filled."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal

import pytest
import uvloop

from lmcache_async.cli.records import Bar
from lmcache_async.errors import ConfigError
from lmcache_async.records.flight import Meter
from lmcache_async.records.opening import TargetSpec, open_target
from lmcache_async.records.state import StateFile
from lmcache_async.records.verifying import Remedy, VerifyOptions, about, verify
from tests.records.filled import (
    TOKENS,
    content,
    damage,
    filled,
    invoke,
    loaded,
    plant,
    record_files,
    rig_of,
    told,
)


def key_file(folder):
    path = folder / "keys"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def test_what_an_engine_has_stored_is_right_and_its_keys_follow_from_the_root(root):
    found = told("verify", root)

    assert found["complete"]
    assert (found["records"], found["wrong"]) == (8, {})
    assert found["keys"] == {
        "linked": 7,
        "root": 1,
    }  # two prompts with a common beginning, and a partial chunk
    assert found["bytes"] == sum(
        told("inspect", root, path.name)["record_bytes"] for path in record_files(root)
    )


@pytest.mark.parametrize(
    ("at", "cause"), [(0, "magic"), (8, "version"), (12, "length"), (40, "header"), (4200, "checksum")]
)
def test_any_damage_is_found_and_ends_with_1(root, at, cause):
    path = record_files(root)[3]
    damage(path, at)

    found = told("verify", root, code=1)

    assert found["wrong"] == {cause: 1}
    assert [(wrong["key"], wrong["cause"]) for wrong in found["wrong_records"]] == [(path.name, cause)]
    assert found["records"] == 7
    assert path.name in invoke("verify", root).stdout


def test_a_record_under_another_key_is_wrong(root):
    first, second, *_ = record_files(root)
    first.write_bytes(second.read_bytes())

    assert told("verify", root, code=1)["wrong"] == {"key": 1}


def test_of_an_extra_text_that_no_engine_makes_the_key_is_not_proven(root):
    plant(root, rig_of().namespace.text, extra="\ud800")

    assert told("verify", root)["keys"] == {"extra": 1, "linked": 7, "root": 1}


@pytest.mark.parametrize("change", ["cut", "grown", "empty"])
def test_a_file_of_another_length_is_wrong(root, change):
    path = record_files(root)[0]
    data = path.read_bytes()
    path.write_bytes({"cut": data[:4096], "grown": data + bytes(4096), "empty": b""}[change])

    assert told("verify", root, code=1)["wrong"] == {"length": 1}


def test_what_is_wrong_is_removed(root):
    path = record_files(root)[-1]
    damage(path)

    assert told("verify", root, "--remove", code=1)["remedied"] == 1
    assert not path.exists()
    assert told("verify", root)["records"] == 7


def test_what_is_wrong_is_put_aside(root):
    path = record_files(root)[-1]
    damage(path)
    data = path.read_bytes()

    told("verify", root, "--quarantine", code=1)

    assert (root / "quarantine" / f"{path.name}.checksum").read_bytes() == data
    assert not path.exists()
    assert told("verify", root)["wrong"] == {}


def test_without_a_remedy_nothing_is_changed(root):
    damage(record_files(root)[0])
    before = content(root)

    told("verify", root, code=1)

    assert content(root) == before


def test_one_namespace(root):
    filled(root, rig=rig_of("model-b"))
    damage(record_files(root)[0])  # of model-b

    found = told("verify", root, "--namespace", "model=model-a")

    assert (found["records"], found["passed_over"]) == (8, 5)


def test_a_missing_parent_is_no_damage(root):
    record_files(root)[0].unlink()  # the beginning of both prompts

    found = told("verify", root)

    assert found["records"] == 7
    assert found["keys"] == {"linked": 6, "parent": 1}


def test_keys_made_with_a_secret_are_proven_with_it_alone(tmp_path):
    keys = key_file(tmp_path)
    config = {"hash_algorithm": "sha256", "hash_key_file": str(keys)}
    rig = rig_of(hash_key=bytes.fromhex(keys.read_text()))
    filled(tmp_path / "cache", rig=rig, **config)
    file = tmp_path / "config.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in config.items()))

    assert told("verify", tmp_path / "cache")["keys"] == {"hash_key": 5}
    assert told("verify", tmp_path / "cache", "--config", file)["keys"] == {"linked": 4, "root": 1}


def test_encrypted_records_are_proven_by_their_checksum_and_opened_with_the_key(tmp_path):
    keys = key_file(tmp_path)
    filled(tmp_path / "cache", **{"encryption.key_file": str(keys)})
    config = tmp_path / "config.yaml"
    config.write_text(f"encryption: {{key_file: {keys}}}\n")
    first, second, *_ = record_files(tmp_path / "cache")

    assert told("verify", tmp_path / "cache")["keys"] == {"encrypted": 5}
    assert told("verify", tmp_path / "cache", "--config", config)["keys"] == {"linked": 4, "root": 1}

    second.write_bytes(first.read_bytes())  # whole, but of another chunk: the key alone can tell

    assert told("verify", tmp_path / "cache")["wrong"] == {}
    assert told("verify", tmp_path / "cache", "--config", config, code=1)["wrong"] == {"tag": 1}


class StopAfter(Meter):
    """Cancels the run after so many records."""

    def __init__(self, count):
        self.left = count

    def advance(self, records, nbytes):
        self.left -= records
        if self.left == 0:
            asyncio.current_task().cancel()


def run_verify(root, state, meter, remedy=Remedy.KEEP):
    async def work():
        async with open_target(
            TargetSpec(path=root, in_flight=1), change=remedy is not Remedy.KEEP
        ) as target:
            noted = StateFile(state, about(target.name, VerifyOptions().selection, remedy))
            return await verify(target, VerifyOptions(state=noted, remedy=remedy), meter)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def test_stopped_it_goes_on_where_it_was(root, tmp_path):
    state = tmp_path / "state"
    damage(min(record_files(root), key=lambda path: path.name))  # read by the first run
    with pytest.raises(asyncio.CancelledError):
        run_verify(root, state, StopAfter(3))

    counted = StopAfter(1000)
    report = run_verify(root, state, counted)

    assert 1000 - counted.left == 8 - 3
    assert (report.resumed, report.records, report.wrong) == (3, 7, {"checksum": 1})
    assert not state.exists()  # complete: the next one begins anew


def test_the_command_takes_the_state_of_its_own_run_alone(root, tmp_path):
    state = tmp_path / "state"
    with pytest.raises(asyncio.CancelledError):
        run_verify(root, state, StopAfter(3))

    other = invoke("verify", root, "--state", state, "--namespace", "model=model-a")

    assert other.exit_code == 2
    assert "is of another run" in other.stderr
    assert told("verify", root, "--state", state)["resumed"] == 3


@pytest.mark.parametrize("lacks", ["records", "wrong", "after"])
@pytest.mark.parametrize("instead", [None, "x"])
def test_a_state_that_lacks_something_is_refused_and_stays(root, tmp_path, lacks, instead):
    state = tmp_path / "state"
    with pytest.raises(asyncio.CancelledError):
        run_verify(root, state, StopAfter(3))
    noted = json.loads(state.read_text())
    noted["state"].pop(lacks)
    if instead is not None:
        noted["state"][lacks] = instead
    state.write_text(json.dumps(noted))

    refused = invoke("verify", root, "--state", state)

    assert refused.exit_code == 2
    assert "is no state of an earlier run" in refused.stderr
    assert json.loads(state.read_text()) == noted


@pytest.mark.parametrize("content", ["my notes", "[" * 100_000])
def test_a_state_that_is_none_is_refused_and_stays(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)

    with pytest.raises(ConfigError, match="is no state of an earlier run"):
        StateFile(path, {}).load()

    assert path.read_text() == content


def test_the_rate_is_kept(root, monkeypatch):
    waits = []
    real = asyncio.sleep

    async def sleep(seconds):
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr("lmcache_async.records.flight.asyncio.sleep", sleep)

    found = told("verify", root, "--limit-rate", "1KiB")

    # Bytes beyond the first second's are waited for; the clock stands nearly still here.
    assert max(waits) == pytest.approx(found["bytes"] / 1024 - 1, abs=5)


def test_the_options_exclude_each_other(root):
    assert invoke("verify", root, "--remove", "--quarantine").exit_code == 2


def test_what_verify_leaves_an_engine_loads(root):
    rig = rig_of()
    damage(record_files(root)[-1])
    told("verify", root, "--remove", code=1)

    assert loaded(rig, root, TOKENS) >= 16


def test_ctrl_c_ends_with_130_and_the_next_run_goes_on(root, tmp_path, monkeypatch):
    state = tmp_path / "state"
    left = [3]

    def advance(self, records, nbytes):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Bar, "advance", advance)
    stopped = invoke("verify", root, "--state", state, "--in-flight", 1)
    monkeypatch.undo()

    assert stopped.exit_code == 130
    assert "the same command goes on" in stopped.stderr
    found = told("verify", root, "--state", state)
    assert (found["resumed"], found["records"]) == (3, 8)


def test_counts_are_in_words_that_fit_any_number(root):
    first, second, *_ = record_files(root)
    damage(first)

    one = invoke("verify", root).stdout.splitlines()
    damage(second)
    two = invoke("verify", root, "--remove").stdout.splitlines()

    assert one[0].startswith(f"{root}: correct: 7 records, corrupt: 1, not readable: 0; ")
    assert two[0].startswith(f"{root}: correct: 6 records, corrupt: 2, not readable: 0; ")
    assert two[-1] == "deleted: 2 records"
