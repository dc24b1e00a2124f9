"""Every invalid config has its message."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_async.cli.app import app
from lmcache_async.cli.config import check_daemon_file, check_file
from lmcache_async.errors import ConfigError
from lmcache_async.registry import Registry
from tests.wrong_config.at_start import AT_START, LONG
from tests.wrong_config.cases import DAEMON, ENGINE

REGISTRY = Registry()
KEY = bytes(range(32)).hex()
SECRETS = {
    "key": KEY,
    "open": KEY,
    "empty": "",
    "short": "abc",
    "zeros": "00" * 32,
    "two": f"{KEY}\n{KEY[::-1]}",
    "twice": f"{KEY},{KEY}",
    "words": "a b c",
    "blank": "# nothing\n",
    "tenant": "a/b " + "x" * 20,
}


@pytest.fixture(autouse=True)
def folder(monkeypatch) -> Iterator[Path]:
    """A folder of secrets and short paths for sockets, in an environment without our settings."""
    with tempfile.TemporaryDirectory(prefix="lma-") as directory:
        folder = Path(directory)
        for name, text in SECRETS.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o644 if name == "open" else 0o600)
        monkeypatch.delenv("LMCACHE_ASYNC_CONFIG_FILE", raising=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


def written(folder: Path, text: str) -> Path:
    file = folder / "kv.yaml"
    file.write_text(text.replace("{dir}", str(folder)))
    return file


def checked(file: Path) -> list[str]:
    return check_file(file, registry=REGISTRY)[0]


def expected(folder: Path, lines: list[str]) -> list[str]:
    return [line.replace("{file}", str(folder / "kv.yaml")).replace("{dir}", str(folder)) for line in lines]


@pytest.mark.parametrize(("text", "lines"), ENGINE, ids=[text[:60] for text, _ in ENGINE])
def test_an_invalid_engine_config_is_reported(folder, text, lines):
    assert checked(written(folder, text)) == expected(folder, lines)


@pytest.mark.parametrize(("text", "lines"), DAEMON, ids=[text[:60] for text, _ in DAEMON])
def test_an_invalid_daemon_config_is_reported(folder, text, lines):
    assert check_daemon_file(written(folder, text))[0] == expected(folder, lines)


@pytest.mark.parametrize(("start", "text"), AT_START, ids=[text[:60] for _, text in AT_START])
def test_refusals_at_start(folder, start, text):
    with pytest.raises(ConfigError) as caught:
        start(folder)

    names = {"user": os.getuid(), "long": LONG, "engine": sha256(b"engine").hexdigest()[:16]}
    for name, value in ({"dir": folder} | names).items():
        text = text.replace(f"{{{name}}}", str(value))
    assert str(caught.value) == text


def test_the_command_prints_the_lines_and_ends_with_1(folder):
    text, lines = next(case for case in ENGINE if len(case[1]) > 1)
    file = written(folder, text)

    plain = CliRunner().invoke(app, ["config", "check", str(file)])
    as_json = CliRunner().invoke(app, ["config", "check", str(file), "--json"])

    assert plain.exit_code == as_json.exit_code == 1
    assert plain.stdout.splitlines() == expected(folder, lines)
    assert json.loads(as_json.stdout)["problems"] == expected(folder, lines)
