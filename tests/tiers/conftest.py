"""Fixtures for tests of tiers."""

from __future__ import annotations

import pytest

from lmcache_async.plugins.disk import DiskConfig
from lmcache_async.testing.records import SLAB_BYTES, allocator, small_arena
from tests.support.forks import Children
from tests.support.mooncake_pool import running
from tests.support.processes import started
from tests.support.s3_server import S3Server


@pytest.fixture
def arena():
    arena = small_arena(48)
    yield arena
    leased = arena.statistics().leased_slabs
    arena.close()
    assert leased == 0, "leases were not released"


@pytest.fixture
def allocate(arena):
    return allocator(arena)


@pytest.fixture
def config(tmp_path):
    return DiskConfig(path=tmp_path / "kv", max_bytes=16 * SLAB_BYTES)


@pytest.fixture(scope="module")
def children():
    """Runs functions of tests.tiers.disk_child in child processes."""
    children = Children("tests.tiers.disk_child")
    yield children
    children.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """A real S3 server for all tests; each test has its own prefix."""
    with started(S3Server(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_pool(tmp_path_factory):
    """A real master with memory in another process, for all tests; each test has its own prefix."""
    with running(tmp_path_factory.mktemp("mooncake")) as pool:
        yield pool
