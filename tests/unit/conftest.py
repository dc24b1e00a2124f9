"""Fixtures for unit tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def collector_off() -> Iterator[None]:
    """As in vLLM, which freezes existing objects and rarely collects garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
