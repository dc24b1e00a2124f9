"""Options of the daemon, valid and invalid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcache_async.daemon import address
from lmcache_async.daemon.address import check_directory, default_socket
from lmcache_async.daemon.config import load_daemon_config
from lmcache_async.errors import ConfigError

FILE = """
socket: /run/kv/host.sock
max_bytes: 20GiB
allow_uids: [1000, 1001]
max_client_bytes: 4GiB
tenants:
  chat: {reserved_bytes: 8GiB}
  batch: {max_bytes: 6GiB}
other_tenants: {max_bytes: 1GiB}
"""


def test_options_take_precedence_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "host.yaml"
    file.write_text(FILE)
    config = load_daemon_config(file, {"max_bytes": "30GiB", "socket": None})

    assert (config.max_bytes, config.client_bytes) == (30 << 30, 4 << 30)
    assert config.socket == Path("/run/kv/host.sock")
    assert config.tenants["chat"].reserved_bytes == 8 << 30
    assert config.tenants["batch"].max_bytes == 6 << 30
    assert config.other_tenants.max_bytes == 1 << 30
    assert config.allow_uids == (1000, 1001)


def test_the_file_in_the_docs_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/tiers/host.md").read_text(encoding="utf-8")
    [text] = [block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "max_bytes" in block]
    file = tmp_path / "host.yaml"
    file.write_text(text)

    assert load_daemon_config(file, {}).max_bytes == 20 << 30


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_daemon_config(tmp_path / "none.yaml", {})


def test_the_default_socket_is_in_a_directory_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == tmp_path / "lmcache-async" / "host.sock"
    tmp_path.chmod(0o777)  # world-writable
    assert default_socket().parts[1] == "tmp"


def test_a_default_directory_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own" / "sock"  # a socket's path has at most 100 bytes
    monkeypatch.setattr(address, "default_socket", lambda: path)
    check_directory(path, make=True)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others cannot write"):
        check_directory(path, make=False)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than"):
        check_directory(tmp_path / ("x" * 120), make=True)
