from __future__ import annotations

import pytest

from lmcache_async.registry import Registry


@pytest.fixture(scope="session")
def installed() -> Registry:
    """The installed plug-ins, read once."""
    return Registry()
