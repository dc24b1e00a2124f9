"""Every invalid config has its message, and every statement that refuses one is tested."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_async.cli.app import app
from lmcache_async.cli.config import check_daemon_file, check_file
from lmcache_async.config import load_config
from lmcache_async.errors import ConfigError
from lmcache_async.registry import Registry
from tests.unit import test_config_errors as errors
from tests.wrong_config.at_start import AT_START, LONG
from tests.wrong_config.cases import DAEMON, ENGINE
from tests.wrong_config.elsewhere import ELSEWHERE
from tests.wrong_config.sites import ROOT, executed, sites, was_passed

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


def test_every_statement_that_refuses_a_config_is_tested(folder):
    everywhere = sites()
    lines = executed(runs(folder))
    missed = {site.name for site in everywhere if not was_passed(site, lines)}
    named = {}
    for file, part, *_ in ELSEWHERE:
        [named[file, part]] = [site.name for site in everywhere if site.file == file and part in site.text]

    assert missed - set(named.values()) == set(), "give each a case in cases.py, or its test in elsewhere.py"


@pytest.mark.parametrize(("file", "text"), sorted({(file, text) for _, _, file, text in ELSEWHERE}))
def test_statements_listed_as_tested_elsewhere_are_tested(file, text):
    assert text in (ROOT / file).read_text(encoding="utf-8")


def runs(folder: Path) -> Iterator[Callable[[], object]]:
    """Return all cases of this file and of the tests of the loader, except YAML beyond the loader's limits.

    Such a text takes half a second to parse, and other cases pass the same place.
    """
    for text, _ in ENGINE:
        yield lambda text=text: checked(written(folder, text))
    for text, _ in DAEMON:
        yield lambda text=text: check_daemon_file(written(folder, text))[0]
    for extra, _ in table_of(errors.test_an_invalid_mapping_is_reported):
        yield lambda extra=extra: refused(extra=extra)
    for name, value, _ in table_of(errors.test_an_invalid_variable_is_reported):
        yield lambda name=name, value=value: refused(env={f"LMCACHE_ASYNC_{name}": value})
    for text, _ in table_of(errors.test_an_invalid_file_is_reported):
        if len(text) < 1000:
            yield lambda text=text: refused(path=written(folder, text))
    yield lambda: refused(path=folder / "none")
    for number, (start, _) in enumerate(AT_START):
        yield lambda start=start, number=number: refused_at_start(start, folder / f"start-{number}")


def table_of(test: Callable[..., None]) -> list[tuple]:
    """The cases of a parametrized test."""
    [mark] = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    return list(mark.args[1])


def refused_at_start(start: Callable[[Path], object], folder: Path) -> None:
    folder.mkdir()
    (folder / "key").write_text(KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        with pytest.raises(ConfigError):
            start(folder)


def refused(**sources: object) -> None:
    with pytest.raises(ConfigError):
        load_config(**{"env": {}, **sources})  # type: ignore[arg-type]
