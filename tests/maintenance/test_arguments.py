"""Invalid arguments of the commands on records: exit code 2, a reason, and nothing is changed."""

from __future__ import annotations

import gzip
import json
import shlex

import pytest

from tests.maintenance.filled import content, invoke

NO_SERVER = '{"name": "valkey", "url": "unix:///none", "open_timeout_s": 5, "timeout_s": 5}'
ADDRESSES = (
    "ftp://x",
    "http://localhost:abc",
    "http://[::1",
    "'http://a b'",
    "http://h:99999",
    "http://a..b",
)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("inspect missing", "missing: name the `path` of a disk tier"),
        ("inspect", "name a directory, or a tier"),
        ("verify cache --tier disk", "--tier disk and the directory cache exclude each other"),
        ("inspect --tier disk", "name the config file with --config"),
        ("inspect --tier '{nonsense'", "expected a tier as JSON"),
        pytest.param("inspect --tier NESTED", "expected a tier as JSON", id="nested"),
        (
            'inspect --tier \'{"url": "valkey://u:secret@h"}\'',
            "--tier: {'url': 'valkey://***@h'}: expected a tier's name, or a mapping",
        ),
        (
            'inspect --tier \'{"name": "host", "timeout_s": 0}\'',
            "--tier: timeout_s is 0: expected a number of seconds above 0",
        ),
        ('inspect --tier \'{"name": "cpu"}\'', "memory of the engine's own process"),
        ('inspect --tier \'{"name": "dsik"}\'', "did you mean disk"),
        ("inspect . not-a-key", "expected a key of 32 hex digits"),
        ("inspect . --namespace xyz", "expected at least 4 digits of an id"),
        ("inspect cache " + "00" * 16, "has no record"),
        ("verify cache --remove --quarantine", "exclude each other"),
        ("verify none", "there is no directory"),
        ("verify none --remove", "there is no directory"),
        (f"verify --tier '{NO_SERVER}'", "No such file"),
        ("gc none", "there is no directory"),
        ("gc none --dry-run", "there is no directory"),
        *((f"gc cache --older-than={age}", "such as 7d") for age in ("7", "d", "-1d", "1y", "'7 d d'")),
        (f"copy cache '{NO_SERVER}'", "No such file"),
        (f"copy '{NO_SERVER}' there", "No such file"),
        ("copy cache", "Missing argument 'DST'"),
        ("copy '{nonsense' there", "SRC: expected a tier as JSON"),
        ('copy cache \'{"name": "disk"}\'', "DST: path is missing"),
        ("copy none there", "there is no directory"),
        (
            "copy ./cache valky --config kv.yaml",
            "has no tier 'valky'; its tiers are cpu, valkey; a directory is written with a slash, such as ./valky",
        ),
        ("copy ./cache cpu --config kv.yaml", "memory of the engine's own process"),
        (
            "copy cache valkey://host:6379",
            'tier as JSON, such as {"name": "valkey", "url": "valkey://host:6379"}',
        ),
        (
            "copy cache valkey",
            "valkey is the name of a tier, and there is no such directory: name a tier by its id in",
        ),
        *(
            (command, "the name of the directory is empty")
            for command in ("inspect ''", "verify ''", "gc ''", "copy '' there", "copy cache ''")
        ),
        ("copy ./cache s3://b/kv --config kv.yaml", "s3://b/kv is a URL and not a directory"),
        ("copy file:///cache there", "is a URL and not a directory"),
        ("copy cache kv.yaml", "Not a directory; name the directory of a disk tier that user"),
        (f"copy cache {'x' * 300}", "to change it: File name too long"),
        ("copy cache there --max-record-bytes 1000TiB", "lower --max-record-bytes or --in-flight"),
        (f"copy '{NO_SERVER}' there --max-record-bytes 1000TiB", "lower --max-"),
        ("warm --prompts prompts", "give the engine's config file"),
        ("warm --config kv.yaml", "give either --prompts or --trace"),
        ("warm --config kv.yaml --prompts prompts --trace prompts", "give either --prompts"),
        ("warm --url http://x --config kv.yaml --prompts prompts", "--url excludes --config"),
        ("warm --config cpu.yaml --prompts prompts", "outside of the engine: none. To warm"),
        ("warm --config kv.yaml --prompts prompts --to cpu", "tier cpu cannot be reached outside"),
        ("warm --url http://127.0.0.1:9 --prompts damaged.gz", "cannot read damaged.gz"),
        ("warm --url http://127.0.0.1:9 --prompts cut.gz", "cannot read cut.gz"),
        ("warm --url http://127.0.0.1:9 --prompts prompts", "Connection refused"),
        ("warm --url http://u:secret@127.0.0.1:9 --prompts prompts", "at http://***@127.0.0.1:9/v1/models"),
        ("warm --url http://127.0.0.1:9/\u00e9 --prompts prompts", ""),
        *(
            (f"warm --url {url} --prompts prompts", f"--url {url.strip(chr(39))}: expected")
            for url in ADDRESSES
        ),
    ],
)
def test_an_invalid_argument_ends_with_2_and_a_reason(root, tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kv.yaml").write_text("tiers: [cpu, {name: valkey, url: 'unix:///none'}]\n")
    (tmp_path / "cpu.yaml").write_text("tiers: [cpu]\n")
    (tmp_path / "prompts").write_text("[1]\n")
    data = gzip.compress(json.dumps(list(range(1000))).encode())
    (tmp_path / "damaged.gz").write_bytes(data[:40] + bytes(40) + data[80:])
    (tmp_path / "cut.gz").write_bytes(data[:-9])
    before = {path.name for path in tmp_path.iterdir()}
    records = content(root)

    nested = '{"name":' * 100_000
    result = invoke(*(nested if each == "NESTED" else each for each in shlex.split(command)))

    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
    assert content(root) == records
    assert {path.name for path in tmp_path.iterdir()} <= before | {"there"}
    assert content(tmp_path / "there") == {}
