"""A directory that an engine has filled once, and a copy of it for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.maintenance.filled import TOKENS, filled


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts with a common beginning: eight records."""
    root = tmp_path_factory.mktemp("stored") / "cache"
    filled(root, TOKENS, [*TOKENS[:16], *range(7, 27)])
    return root


@pytest.fixture
def root(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "cache"))
