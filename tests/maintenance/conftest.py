"""A directory filled once by an engine, and a copy of it for each test."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.maintenance.filled import TOKENS, filled
from tests.support.daemons import WAITS
from tests.support.valkey_servers import Server, running


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store two prompts with a common prefix: eight records."""
    root = tmp_path_factory.mktemp("stored") / "cache"
    filled(root, TOKENS, [*TOKENS[:16], *range(7, 27)])
    return root


@pytest.fixture
def root(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "cache"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running() as started:
        yield started


@pytest.fixture
def valkey(server: Server) -> str:
    """Return a tier with its own prefix, as JSON."""
    return json.dumps({"name": "valkey", "url": server.url, "key_prefix": uuid.uuid4().hex, **WAITS})
