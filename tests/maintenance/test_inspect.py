"""`lmcache-async inspect` on directories filled by a real engine."""

from __future__ import annotations

import json
import time

import pytest

from lmcache_async.cli import inspect as cli_inspect
from lmcache_async.hashing.namespace import namespace_id
from lmcache_async.maintenance.inspection import Inspection
from tests.maintenance.filled import (
    TOKENS,
    damage,
    filled,
    invoke,
    key_file,
    plant,
    record_files,
    rig_of,
    told,
)


@pytest.fixture
def root(tmp_path):
    filled(tmp_path / "cache", rig=rig_of("model-a"))
    filled(tmp_path / "cache", TOKENS[:20], rig=rig_of("model-b"))
    return tmp_path / "cache"


def test_totals_and_a_line_for_each_namespace(root):
    damage(record_files(root)[0])  # the payload is not read
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    id_b = namespace_id(rig_of("model-b").namespace.text)

    found = told("inspect", root)
    table = invoke("inspect", root).stdout

    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert f"{root}: 8 records" in table
    assert id_b in table
    assert "model-b" in table
    for pattern in ("model=model-b", id_b[:6]):
        [only] = told("inspect", root, "--namespace", pattern)["namespaces"]
        assert only["fields"]["model"] == "model-b"

    assert (found["records"], found["tokens"]) == (8, 60)
    first, second = found["namespaces"]
    assert first["fields"]["model"] == "model-a"
    assert first["id"] == namespace_id(rig_of("model-a").namespace.text)
    assert (first["records"], first["tokens"], first["chunk_tokens"]) == (5, 40, {"8": 5})
    assert (second["records"], second["chunk_tokens"]) == (3, {"4": 1, "8": 2})
    assert first["shapes"][0]["dtype"] == "float32"
    assert first["shapes"][0]["layout"] == rig_of().layout.text
    assert 0 < first["oldest_ns"] <= first["newest_ns"] <= time.time_ns()


def test_one_record_in_full(root):
    newest = record_files(root)[0]

    record = told("inspect", root, newest.name)

    assert record["key"] == newest.name
    assert record["tokens"] == TOKENS[:8]
    assert record["file_bytes"] == newest.stat().st_size
    assert record["record_bytes"] == record["header_bytes"] + record["payload_bytes"]
    assert record["used_s_ago"] >= 0
    assert f"key: {newest.name}" in invoke("inspect", root, newest.name).stdout


def test_headers_that_cannot_be_read_are_counted_by_cause(root):
    first, second, third, *_ = record_files(root)
    damage(first, at=0)  # the magic
    damage(second, at=8)  # the version
    damage(third, at=40)  # a field

    found = told("inspect", root, code=1)

    assert found["unreadable"] == {"header": 1, "magic": 1, "version": 1}
    assert found["records"] == 8
    assert told("inspect", root, first.name, code=1)["unreadable"] == "magic"


def test_a_long_header_is_read_whole(tmp_path):
    tokens = list(range(5000))
    rig = rig_of(chunk_size=4096, blocks=2048, slabs=4)
    filled(
        tmp_path / "cache", tokens, rig=rig, **{"store.batch_bytes": "2MiB", "retrieve.batch_bytes": "2MiB"}
    )

    found = told("inspect", tmp_path / "cache")

    assert found["namespaces"][0]["chunk_tokens"] == {"904": 1, "4096": 1}
    assert found["namespaces"][0]["shapes"][0]["header_bytes"] > 16 << 10


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("a[/b]c", "a[/b]c"),
        ("\x1b]0;PWNED\x07\x1b[31mred", "�]0;PWNED��[31mred"),
        ("org/:warning:x", "org/:warning:x"),
        ("half of a pair \ud800", "half of a pair �"),
        ("two\nlines \u202ebackwards", "two�lines �backwards"),
    ],
)
def test_control_characters_in_names_are_escaped(tmp_path, model, shown):
    filled(tmp_path / "cache", rig=rig_of(model))

    table = invoke("inspect", tmp_path / "cache")
    record = invoke("inspect", tmp_path / "cache", record_files(tmp_path / "cache")[0].name)

    assert (table.exit_code, record.exit_code) == (0, 0), (table.exception, record.exception)
    assert shown in table.stdout
    assert all(line.isprintable() for line in (table.stdout + record.stdout).splitlines())


def test_encrypted_records_show_their_key_id_only(tmp_path):
    filled(tmp_path / "cache", **{"encryption.key_file": str(key_file(tmp_path))})

    found = told("inspect", tmp_path / "cache")
    [group] = found["namespaces"]
    record = told("inspect", tmp_path / "cache", record_files(tmp_path / "cache")[0].name)

    assert group["title"].startswith("encrypted with key ")
    assert (group["records"], group["tokens"], group["fields"]) == (5, 0, {})
    assert record["encrypted_with_key"] == group["title"].rpartition(" ")[2]
    assert "tokens" not in record
    assert told("inspect", tmp_path / "cache", "--namespace", "encrypted")["records"] == 5
    assert told("inspect", tmp_path / "cache", "--namespace", "model=model-a")["records"] == 0


def test_a_tier_of_a_config_by_its_id_and_rank(tmp_path):
    filled(tmp_path / "cache" / "rank-1")
    config = tmp_path / "config.yaml"
    config.write_text(f"tiers: [cpu, {{name: disk, id: slow, path: {tmp_path}/cache, max_bytes: 1GiB}}]\n")

    assert told("inspect", "--config", config, "--tier", "slow", "--rank", 1)["records"] == 5
    assert told("inspect", tmp_path / "cache" / "rank-1")["records"] == 5
    assert "its tiers are cpu, slow" in invoke("inspect", "--config", config, "--tier", "disk").stderr
    refused = invoke("inspect", tmp_path / "cache")
    assert (refused.exit_code, "name one of them" in refused.stderr) == (2, True)


NO_ENGINE_MAKES = [
    "[" * 20_000,
    '{"model":' + 400 * "[" + 400 * "]" + "}",
    '{"model":"\ud800","chunk_size":8,"algorithm":"xxh3_128"}',
    "[/model]",
    '{"chunk_size":' + 5000 * "9" + "}",
    '{"chunk_size":1' + 30 * "0" + ',"algorithm":"xxh3_128"}',
    '{"chunk_size":8,"algorithm":"crc32"}',
    *(f'{{"chunk_size":{size},"algorithm":"xxh3_128"}}' for size in (16777217, 8.0, '"8"')),
    '{"chunk_size":8,"algorithm":"xxh3_128","extra":5}',
    '{"chunk_size":8,"algorithm":"xxh3_128","extra":[[[1],2],5]}',
    '{"chunk_size":8,"algorithm":"xxh3_128","extra":[["block_size","²"],["x",[1]]]}',
]


def test_foreign_namespaces_do_not_stop_a_command(root, tmp_path):
    planted = [plant(root, text, number) for number, text in enumerate(NO_ENGINE_MAKES)]
    records = 8 + len(planted)
    there = tmp_path / "there"
    config, prompts = tmp_path / "config.yaml", tmp_path / "prompts.jsonl"
    tiers = [
        {"name": "disk", "id": id, "path": str(path), "max_bytes": "1GiB"}
        for id, path in (("there", tmp_path / "warm"), ("here", root))
    ]
    config.write_text(json.dumps({"tiers": tiers}))
    prompts.write_text(json.dumps(TOKENS))

    assert len(told("inspect", root)["namespaces"]) == 2 + len(planted)
    assert invoke("inspect", root).exit_code == 0
    assert [invoke("inspect", root, path.name).exit_code for path in planted] == [0] * len(planted)
    assert told("verify", root)["records"] == records
    assert told("copy", root, there)["records"] == records
    assert told("inspect", there, "--namespace", "model=model-a")["records"] == 5
    assert told("warm", "--config", config, "--prompts", prompts)["copied"] == {str(tmp_path / "warm"): 7}
    assert told("gc", root, "--namespace", "model=model-a")["freed_records"] == 5


@pytest.mark.parametrize("columns", [20, 60, 80, 119, 120])
def test_a_narrow_terminal_does_not_cut_figures(monkeypatch, columns):
    group = {
        "id": "75d24694a31e",
        "title": "meta-llama/Llama-3.1-8B-Instruct, tp 3/8",
        "records": 24576,
        "bytes": 750 << 30,
        "tokens": 6291456,
        "chunk_tokens": {"64": 1, "256": 24575},
        "request_labels": 1234,
        "oldest_ns": time.time_ns() - 13 * 86400 * 10**9,
        "newest_ns": time.time_ns() - 35 * 60 * 10**9,
    }
    found = Inspection("cache", None, namespaces=[{**group, "shapes": []}])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))

    text = "\n".join(cli_inspect._lines(found))

    rows = [line for line in text.splitlines() if "75d24694a31e" in line]
    assert [" ".join(row.split()[-10:]) for row in rows] == ["24576 750 GiB 6291456 64-256 1234 13 d 35 min"]
    assert max(map(len, text.splitlines())) <= max(columns, 80)


def test_the_table_names_the_labels_that_separate_requests(tmp_path):
    filled(tmp_path / "plain")
    rig = filled(tmp_path / "labelled")
    for number in range(2):
        filled(tmp_path / "labelled", rig=rig, cache_salt=f"salt-{number}")

    head, row = (invoke("inspect", tmp_path / "labelled").stdout.splitlines()[index] for index in (1, 2))
    [plain] = told("inspect", tmp_path / "plain")["namespaces"]
    [labelled] = told("inspect", tmp_path / "labelled")["namespaces"]

    assert "LoRAs, salts, tags" in head
    assert row.split()[-5] == "2"
    assert (plain["request_labels"], labelled["request_labels"]) == (0, 2)
    assert labelled["request_namespaces"] == 3
    assert "salt-" not in str(labelled)
    assert invoke("inspect", tmp_path / "plain").stdout.splitlines()[2].split()[-5] == "-"
