"""`lmcache-async doctor`: the whole command."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from lmcache_async.cli import doctor
from lmcache_async.tiers.diagnosis import Outcome, ok
from tests.cli.site import GOOD, install


def quick(monkeypatch) -> None:
    """Skip the import of vLLM."""
    monkeypatch.setattr(doctor.host, "check_plugin", lambda: [ok("vllm plug-in", "skipped")])


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
    assert f"ok    config: valid ({file})" in text.stdout
    assert "speed" not in text.stdout
    assert text.stdout.splitlines()[-1].endswith("0 fail")


DIAGNOSED = f"""{GOOD}
from lmcache_async.tiers.diagnosis import ok, warn

class DiagnosedShelf(Shelf):
    def diagnose(self, *, sample_bytes=None):
        yield warn("boards", f"{{self.config.boards}} boards", "buy more")
        yield ok("sample", str(sample_bytes))
"""


def test_a_third_party_tier_diagnoses_itself_and_is_probed(invoke, others, tmp_path, monkeypatch):
    quick(monkeypatch)
    install(others, "shelf", {"shelf": "DiagnosedShelf"}, DIAGNOSED)
    file = tmp_path / "kv.yaml"
    file.write_text("tiers: [cpu, {name: shelf, id: wall, colour: red}]\n")

    result = invoke("doctor", "--config", file, "--sample", "4MiB")

    assert "warn  boards (wall): 3 boards\n      buy more\n" in result.stdout
    assert f"ok    sample (wall): {4 << 20}\n" in result.stdout
    assert "ok    opens (wall): in " in result.stdout
    assert "fail  record (wall): the stored record was not returned" in result.stdout


def test_errors_of_the_config_fail_and_the_rest_is_checked(invoke, tmp_path, monkeypatch):
    quick(monkeypatch)
    file = tmp_path / "kv.yaml"
    file.write_text("tiers:\n- {name: disk, path: /x}\n- {name: dsk}\n")

    result = invoke("doctor", "--config", file, "--no-speed")

    assert result.exit_code == 1
    assert f"fail  config: {file}, line 2: tiers[0] (disk): max_bytes is missing" in result.stdout
    assert "there is no tier dsk" in result.stdout
    assert "open files" in result.stdout


@pytest.mark.parametrize(
    ("broken", "failed"),
    [("torch.cuda.is_available", "pinned memory"), (f"{doctor.__name__}.survey_config", "config")],
)
def test_an_exception_in_a_check_fails_this_check_only(invoke, monkeypatch, broken, failed):
    quick(monkeypatch)
    monkeypatch.setattr(broken, lambda *_: 1 // 0)

    result = invoke("doctor", "--json", "--no-speed")

    told = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 1
    assert [name for name, check in told.items() if check["outcome"] == "fail"] == [failed]
    assert told[failed]["found"].startswith("the check itself failed: ZeroDivisionError")
    assert {"cores", "memory", "huge pages", "shared memory", "open files"} <= set(told)


def test_a_sample_that_is_not_a_size_is_refused(invoke):
    result = invoke("doctor", "--sample", "much")

    assert (result.exit_code, result.stderr) == (
        2,
        "--sample is 'much': expected a size in bytes, such as 8GiB, 500MB or 1048576\n",
    )


def test_the_tiers_of_a_config_whose_check_hangs_are_not_created(tmp_path, monkeypatch):
    """The main thread would otherwise wait for the same plug-in without a deadline."""
    file = tmp_path / "kv.yaml"
    file.write_text(f"tiers: [cpu, {{name: disk, path: {tmp_path}/kv, max_bytes: 1MiB}}]\n")
    begun, ended = threading.Event(), threading.Event()

    def hang(*_):
        begun.set()
        ended.wait(60)
        return []

    monkeypatch.setattr(doctor, "all_problems", hang)
    names = []
    for name, seconds, work in doctor.groups(file, None):
        names.append(name)
        if name == "config":
            thread = threading.Thread(target=work)
            thread.start()
            assert begun.wait(60), seconds
    ended.set()
    thread.join(60)

    assert "open files" in names
    assert "tier (disk)" not in names


PROGRAM = """
import sys, threading
from lmcache_async.cli import doctor
from lmcache_async.cli.app import app
def wait(*given, **options):
    raise KeyboardInterrupt
if "interrupted" in sys.argv:
    doctor.wait = wait
doctor.groups = lambda *given: [("stuck", float(sys.argv[1]), threading.Event().wait)]
app(["doctor"])
"""


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["0.1"], 1, "fail  stuck: the check did not end within 0.1 s"),
        (
            ["600", "interrupted"],
            130,
            "stopping when the check stuck ends, within 600 s; Ctrl-C again stops at once",
        ),
    ],
    ids=["deadline", "second Ctrl-C"],
)
def test_the_command_ends_although_a_check_hangs(arguments, status, line):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=250
    )

    assert ran.returncode == status
    assert line in (ran.stdout if status == 1 else ran.stderr)


def test_a_restart_is_checked_for_persistent_tiers_only(tmp_path):
    disk = f"{{name: disk, id: slow, path: {tmp_path}/kv, max_bytes: 1GiB}}"
    found = []
    for tiers in (f"[cpu, {disk}]", "[cpu]"):
        (file := tmp_path / "kv.yaml").write_text(f"shutdown_timeout_s: 5\ntiers: {tiers}\n")
        groups = ((name, work) for name, _, work in doctor.groups(file, None))
        checks = [check for name, work in groups if name in {"config", "restart"} for check in work()]
        found.append([check for check in checks if check.name == "restart"])

    [[option, queue], without] = found
    assert "slow" in option.found
    assert "--shutdown-timeout 30" in option.todo
    assert queue.outcome is Outcome.WARN
    assert "waits 5 s" in queue.found
    assert "20 s (store.max_pending_write_s)" in queue.found
    assert without == []
