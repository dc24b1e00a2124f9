"""Real vLLM engines, and what they are compared to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.vllm_driver import Engines, Reference


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("e2e"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def reference(engines: Engines) -> Reference:
    return Reference(engines.start())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module's engines have their disk tier."""
    return tmp_path_factory.mktemp("disk")
