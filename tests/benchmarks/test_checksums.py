"""The limit of the benchmark `checksums`."""

from __future__ import annotations

import pytest

from lmcache_async.bench.disk import make_cache, probes
from lmcache_async.memory.header import read_header
from tools.benchmarks import checksums


@pytest.mark.one_loop
async def test_the_limit_is_a_store_without_checksums(tmp_path):
    cache = make_cache(1, 2)
    async with checksums.open_without(cache, tmp_path) as engine:
        store, _ = probes(cache, engine)
        await checksums.without_checksums(store)()

    records = [read_header(memoryview(path.read_bytes())) for path in tmp_path.glob("??/*")]
    assert [record.checksum for record in records] == [bytes(16)] * 2
