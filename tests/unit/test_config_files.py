"""Files and paths that a configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_async.config import EngineConfig
from lmcache_async.config.files import read_bounded
from lmcache_async.daemon.config import DaemonConfig


def test_a_refused_directory_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 10)

    assert tmp_path not in [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]


def test_a_home_is_expanded_in_the_paths_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    engine = EngineConfig.model_validate({"vllm": {"socket_dir": "~/kv"}})
    daemon = DaemonConfig.model_validate({"socket": "~/kv.sock", "max_bytes": "1GiB"})

    assert engine.vllm.socket_dir == Path("/home/me/kv")
    assert daemon.socket == Path("/home/me/kv.sock")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_an_error_of_the_file(name: str) -> None:
    with pytest.raises(OSError, match="null character or invalid Unicode"):
        read_bounded(Path(name), 10)
    with pytest.raises(ValueError, match="without null characters or invalid Unicode"):
        EngineConfig.model_validate({"hash_key_file": name})
