import pytest

from lmcache_async.registry import Registry


@pytest.fixture(scope="session")
def installed():
    """The installed plug-ins, read once."""
    return Registry()
