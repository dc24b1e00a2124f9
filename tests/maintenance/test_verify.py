"""`lmcache-async verify` on directories filled by a real engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.maintenance.filled import (
    TOKENS,
    content,
    damage,
    filled,
    invoke,
    key_file,
    loaded,
    record_files,
    rig_of,
    told,
)


@pytest.mark.parametrize(
    ("at", "cause"), [(0, "magic"), (8, "version"), (12, "length"), (40, "header"), (4200, "checksum")]
)
def test_any_damage_is_found_and_ends_with_1(root, at, cause):
    path = record_files(root)[3]
    damage(path, at)
    before = content(root) if cause in {"checksum", "header"} else None

    found = told("verify", root, code=1)

    assert found["wrong"] == {cause: 1}
    assert [(wrong["key"], wrong["cause"]) for wrong in found["wrong_records"]] == [(path.name, cause)]
    assert found["records"] == 7
    assert path.name in invoke("verify", root).stdout
    assert before is None or content(root) == before, "nothing is changed without a remedy"


def test_files_of_another_length_or_key_are_wrong(root):
    cut, grown, empty, other, whole, *_ = record_files(root)
    cut.write_bytes(cut.read_bytes()[:4096])
    grown.write_bytes(grown.read_bytes() + bytes(4096))
    empty.write_bytes(b"")
    other.write_bytes(whole.read_bytes())

    assert told("verify", root, code=1)["wrong"] == {"length": 3, "key": 1}


def test_the_bytes_read_do_not_exceed_the_files(root):
    cut, sparse, *others = record_files(root)
    whole = content(root)
    cut.write_bytes(cut.read_bytes()[:4096])
    with sparse.open("r+b") as file:
        file.write(bytes(8))
        file.truncate(1 << 30)  # the first piece is read

    found = told("verify", root, code=1)

    assert found["bytes"] == 4096 + sum(len(whole[path.name]) for path in others)


def test_damaged_records_are_removed_and_an_engine_loads_the_others(root):
    first, second, *_ = reversed(record_files(root))
    damage(first)
    one = invoke("verify", root).stdout.splitlines()
    damage(second)

    two = invoke("verify", root, "--remove").stdout.splitlines()

    assert one[0].startswith(f"{root}: correct: 7 records, corrupt: 1, not readable: 0; ")
    assert two[0].startswith(f"{root}: correct: 6 records, corrupt: 2, not readable: 0; ")
    assert two[-1] == "deleted: 2 records"
    assert not first.exists()
    found = told("verify", root)
    assert (found["records"], found["wrong"], found["encrypted"]) == (6, {}, 0)
    assert found["bytes"] == sum(map(len, content(root).values()))
    assert loaded(rig_of(), root, TOKENS) >= 16


def test_damaged_records_are_quarantined(root):
    path = record_files(root)[-1]
    damage(path)
    data = path.read_bytes()

    told("verify", root, "--quarantine", code=1)

    assert (root / "quarantine" / f"{path.name}.checksum").read_bytes() == data
    assert not path.exists()
    assert told("verify", root)["wrong"] == {}


def test_one_namespace_can_be_selected(root):
    filled(root, rig=rig_of("model-b"))
    damage(record_files(root)[0])  # of model-b

    found = told("verify", root, "--namespace", "model=model-a")

    assert (found["records"], found["passed_over"]) == (8, 5)


def test_encrypted_records_are_verified_by_their_checksum_or_with_the_key(tmp_path):
    keys = key_file(tmp_path)
    filled(tmp_path / "cache", **{"encryption.key_file": str(keys)})
    config = tmp_path / "config.yaml"
    config.write_text(f"encryption: {{key_file: {keys}}}\n")
    first, second, *_ = record_files(tmp_path / "cache")

    assert told("verify", tmp_path / "cache")["encrypted"] == 5
    assert told("verify", tmp_path / "cache", "--config", config)["encrypted"] == 0
    assert "outer checksum only: 5 records" in invoke("verify", tmp_path / "cache").stdout

    second.write_bytes(first.read_bytes())  # a valid record of another chunk: only the key differs

    assert told("verify", tmp_path / "cache")["wrong"] == {}
    assert told("verify", tmp_path / "cache", "--config", config, code=1)["wrong"] == {"tag": 1}


def test_the_rate_is_limited(root, monkeypatch):
    waits = []
    real = asyncio.sleep

    async def sleep(seconds):
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr("lmcache_async.maintenance.concurrency.asyncio.sleep", sleep)

    found = told("verify", root, "--limit-rate", "1KiB")

    # The bytes beyond those of the first second have to wait; the clock hardly advances here.
    assert max(waits) == pytest.approx(found["bytes"] / 1024 - 1, abs=5)


def test_a_config_is_read_once(root, tmp_path, caplog):
    config = tmp_path / "lmcache.yaml"
    config.write_text(f"local_cpu: true\nlocal_disk: {root}\nmax_local_disk_size: 1\nenable_blending: true\n")

    for arguments in (["verify", "--tier", "disk"], ["copy", "disk", tmp_path / "there"]):
        caplog.clear()
        told(*arguments, "--config", config)

        assert [record.levelname for record in caplog.records] == ["WARNING"], "of a setting without effect"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_closed_standard_streams_do_not_matter(root, command):
    command = [sys.executable, "-m", "lmcache_async.cli", command, str(root)]

    ran = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=False, timeout=250)

    assert ran.returncode == 0


@pytest.mark.parametrize("variables", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_output_that_cannot_be_written_is_an_error(root, variables):
    command = [sys.executable, "-m", "lmcache_async.cli", "verify", str(root)]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command,
            check=False,
            timeout=250,
            env=others | variables,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )

    assert (ran.returncode, ran.stderr) == (2, "the output cannot be written: No space left on device\n")


def test_a_closed_pipe_ends_the_command_without_a_message(root):
    command = [sys.executable, "-m", "lmcache_async.cli", "verify", str(root)]
    read_end, write_end = os.pipe()
    os.close(read_end)

    ran = subprocess.run(
        command, check=False, timeout=250, stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)

    assert (ran.returncode, ran.stderr) == (1, "")


HUNG = """
import sys, threading
from lmcache_async.cli.app import app
from lmcache_async.plugins.disk import offline
def hung(*given):
    print("reading", flush=True)
    threading.Event().wait(60)
    return iter(())
offline.pieces = hung
app(["verify", *sys.argv[1:]])
"""


def test_a_second_ctrl_c_ends_the_command_although_the_disk_hangs(root):
    command = [sys.executable, "-c", HUNG, str(root), "--in-flight", "1"]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "reading\n"

        child.send_signal(signal.SIGINT)
        line = child.stderr.readline()
        child.send_signal(signal.SIGINT)

        assert child.wait(50) == 130
    assert line == "stopping when the running calls end; Ctrl-C again stops at once\n"


def test_sigterm_ends_the_command_although_the_disk_hangs(root):
    command = [sys.executable, "-c", HUNG, str(root), "--in-flight", "1"]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "reading\n"

        child.send_signal(signal.SIGTERM)

        assert child.wait(50) == 128 + signal.SIGTERM, "the cursor was shown again"


def test_ctrl_c_is_a_keyboard_interrupt_again_after_the_records_are_read(root):
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        invoke("verify", root)

        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
