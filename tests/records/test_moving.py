"""`export` and `import` from place to place: what an engine had stored here, an engine loads there."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import uuid

import pytest

from tests.records.filled import TOKENS, content, damage, filled, invoke, loaded, record_files, rig_of, told
from tests.support.daemons import ThreadedDaemon, socket_path
from tests.support.valkey_servers import running


def test_from_directory_to_directory(root, tmp_path):
    made = told("export", root, tmp_path / "a.lmcar")
    done = told("import", tmp_path / "a.lmcar", tmp_path / "there")

    assert (made["records"], made["complete"]) == (8, True)
    assert (done["records"], done["complete"], done["there"]) == (8, True, 0)
    assert content(tmp_path / "there") == content(root)
    assert [path.name for path in record_files(tmp_path / "there")] == [
        path.name for path in record_files(root)
    ]
    assert loaded(rig_of(), tmp_path / "there") == 40
    assert [path.stat().st_mode & 0o777 for path in record_files(tmp_path / "there")] == [0o600] * 8
    assert (tmp_path / "a.lmcar").stat().st_mode & 0o777 == 0o600


def test_an_import_that_is_repeated_takes_what_is_missing(root, tmp_path):
    told("export", root, tmp_path / "a.lmcar")
    told("import", tmp_path / "a.lmcar", tmp_path / "there")
    record_files(tmp_path / "there")[2].unlink()

    again = told("import", tmp_path / "a.lmcar", tmp_path / "there")

    assert (again["records"], again["there"]) == (1, 7)
    assert content(tmp_path / "there") == content(root)


def test_one_namespace_on_either_side(root, tmp_path):
    filled(root, TOKENS[:16], rig=rig_of("model-b"))
    told("export", root, tmp_path / "all.lmcar")

    one = told("export", root, tmp_path / "b.lmcar", "--namespace", "model=model-b")
    other = told("import", tmp_path / "all.lmcar", tmp_path / "there", "--namespace", "model=model-a")

    assert (one["records"], one["passed_over"]) == (2, 8)
    assert (other["records"], other["passed_over"]) == (8, 2)
    assert loaded(rig_of("model-b"), tmp_path / "there") == 0


def test_a_folder_of_parts(root, tmp_path):
    made = told("export", root, tmp_path / "parts", "--part-bytes", "20KiB")

    assert made["parts"] == len(list((tmp_path / "parts").iterdir())) > 1
    assert told("import", tmp_path / "parts", tmp_path / "there")["records"] == 8
    assert content(tmp_path / "there") == content(root)

    max((tmp_path / "parts").iterdir()).unlink()
    lacking = told("import", tmp_path / "parts", tmp_path / "there", code=1)
    assert "further parts belong to it" in lacking["damage"][0]["what"]


def test_wrong_records_are_left_out_on_the_way_out(root, tmp_path):
    damage(record_files(root)[3])

    made = told("export", root, tmp_path / "a.lmcar", code=1)

    assert (made["records"], made["refused"]) == (7, {"checksum": 1})
    assert "7 records" in invoke("export", root, tmp_path / "b.lmcar").stdout


def test_wrong_records_are_refused_on_the_way_in(root, tmp_path):
    archive = tmp_path / "a.lmcar"
    told("export", root, archive)
    data = bytearray(archive.read_bytes())
    data[5000] ^= 1
    archive.write_bytes(data)

    done = told("import", archive, tmp_path / "there", code=1)

    assert (done["records"], done["refused"]) == (7, {"archive": 1})
    assert content(tmp_path / "there").items() <= content(root).items()


def test_what_does_not_fit_is_refused_and_the_best_is_there(root, tmp_path):
    told("export", root, tmp_path / "a.lmcar")

    done = told(
        "import", tmp_path / "a.lmcar", tmp_path / "there", "--max-bytes", 5 * 8192, "--in-flight", 1, code=1
    )

    assert (done["records"], done["refused"]) == (5, {"full": 3})
    assert record_files(tmp_path / "there")[0].name == record_files(root)[0].name
    assert sorted(content(tmp_path / "there")) == sorted(path.name for path in record_files(root)[:5])


def test_the_limit_of_a_tier_in_a_config_holds(root, tmp_path):
    told("export", root, tmp_path / "a.lmcar")
    config = tmp_path / "config.yaml"
    config.write_text(f"tiers: [{{name: disk, path: {tmp_path}/there, max_bytes: 24KiB}}]\n")

    done = told("import", tmp_path / "a.lmcar", "--config", config, "--tier", "disk", code=1)

    assert done["refused"] == {"full": 5}


def test_encrypted_records_stay_encrypted_and_who_has_the_key_loads_them(tmp_path):
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(secrets.token_hex(32))
    encrypted = {"encryption.key_file": str(keys)}
    filled(tmp_path / "cache", **encrypted)

    made = told("export", tmp_path / "cache", tmp_path / "a.lmcar")
    done = told("import", tmp_path / "a.lmcar", tmp_path / "there")

    assert (made["encrypted"], done["encrypted"]) == (5, 5)
    assert content(tmp_path / "there") == content(tmp_path / "cache")
    assert b"model-a" not in (tmp_path / "a.lmcar").read_bytes()
    assert loaded(rig_of(), tmp_path / "there", **encrypted) == 40
    assert loaded(rig_of(), tmp_path / "there") == 0
    assert "encrypted: 5 records" in invoke("export", tmp_path / "cache", tmp_path / "b.lmcar").stdout


def test_times_of_the_future_are_not_taken_over(root, tmp_path):
    newest = record_files(root)[0]
    os.utime(newest, ns=(1 << 61, 1 << 61))
    told("export", root, tmp_path / "a.lmcar")

    told("import", tmp_path / "a.lmcar", tmp_path / "there")

    assert record_files(tmp_path / "there")[0].name == newest.name
    assert record_files(tmp_path / "there")[0].stat().st_mtime_ns <= time.time_ns()


def test_through_a_pipe_between_two_processes(root, tmp_path):
    command = f"{sys.executable} -m lmcache_async.cli"

    done = subprocess.run(
        [
            "bash",
            "-o",
            "pipefail",
            "-c",
            f"{command} export {root} - | {command} import - {tmp_path / 'there'}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert "8 records saved" in done.stdout
    assert content(tmp_path / "there") == content(root)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "{root}"], "name the archive behind the directory"),
        (["import", "{tmp}/none.lmcar", "{tmp}/there"], "No such file"),
        (["import", "{tmp}", "{tmp}/there"], "has no archive in it"),
        (["import", "{tmp}/begun.lmcar", "{tmp}/there"], "its export has not ended"),
        (["export", "{root}", "{tmp}/missing/a.lmcar"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_ends_with_2_and_says_why(root, tmp_path, arguments, message):
    (tmp_path / "begun.lmcar.partial").touch()

    result = invoke(*(argument.format(root=root, tmp=tmp_path) for argument in arguments))

    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def valkey_tier(server):
    return {"name": "valkey", "url": server.url}


@pytest.fixture(scope="module")
def server():
    with running() as started:
        yield started


def json_of(tier):
    return json.dumps(tier)


def test_to_a_valkey_server_and_back(root, tmp_path, server):
    told("export", root, tmp_path / "a.lmcar")
    tier = valkey_tier(server) | {"key_prefix": uuid.uuid4().hex}

    there = told("import", tmp_path / "a.lmcar", "--tier", json_of(tier))
    again = told("import", tmp_path / "a.lmcar", "--tier", json_of(tier))

    assert (there["records"], again["records"], again["there"]) == (8, 0, 8)
    assert loaded(rig_of(), None, tiers=[tier]) == 40
    assert told("inspect", "--tier", json_of(tier))["namespaces"][0]["records"] == 8
    assert told("verify", "--tier", json_of(tier))["keys"] == {"linked": 7, "root": 1}

    told("export", tmp_path / "back.lmcar", "--tier", json_of(tier))
    told("import", tmp_path / "back.lmcar", tmp_path / "back")
    assert content(tmp_path / "back") == content(root)
    assert told("gc", "--tier", json_of(tier), "--namespace", "model=model-a")["freed_records"] == 8
    assert told("inspect", "--tier", json_of(tier))["records"] == 0


def test_a_wrong_record_in_a_valkey_server_is_found_and_removed(root, tmp_path, server):
    told("export", root, tmp_path / "a.lmcar")
    tier = valkey_tier(server) | {"key_prefix": uuid.uuid4().hex}
    told("import", tmp_path / "a.lmcar", "--tier", json_of(tier))
    name = next(key for key in server.ask("KEYS", f"*{tier['key_prefix']}*") if key)
    value = bytearray(server.ask("GET", name))
    value[4200] ^= 1
    server.ask("SET", name, bytes(value))

    found = told("verify", "--tier", json_of(tier), "--remove", code=1)

    assert (found["records"], found["wrong"], found["remedied"]) == (7, {"checksum": 1}, 1)
    assert told("verify", "--tier", json_of(tier))["records"] == 7


def test_of_a_tier_neither_age_nor_room_is_judged(server):
    for options in (["--older-than", "1d"], ["--max-bytes", "1GiB"]):
        refused = invoke("gc", "--tier", json_of(valkey_tier(server)), *options)

        assert refused.exit_code == 2
        assert "does not tell when records were used" in refused.stderr


def test_a_server_that_does_not_answer_ends_with_2(tmp_path):
    tier = {"name": "valkey", "url": f"unix://{tmp_path}/none", "open_timeout_s": 5, "timeout_s": 5}

    assert invoke("verify", "--tier", json_of(tier)).exit_code == 2


def test_to_the_pool_of_a_host(root, tmp_path):
    told("export", root, tmp_path / "a.lmcar")
    with socket_path() as path, ThreadedDaemon(path):
        tier = {"name": "host", "socket": str(path), "prefault": False}

        there = told("import", tmp_path / "a.lmcar", "--tier", json_of(tier))

        assert there["records"] == 8
        assert loaded(rig_of(), None, tiers=[tier]) == 40
        assert told("verify", "--tier", json_of(tier))["records"] == 8
