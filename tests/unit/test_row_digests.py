"""Checksums taken while rows are copied: equal to the library's for every length and split, or none at all."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.device import cpu, rows
from lmcache_async.device.copier import CopyJob
from lmcache_async.device.cpu import CpuCopier
from lmcache_async.memory.copies import compiled
from lmcache_async.testing.caches import CacheForm, cache_forms

UNIT = 64

needs_module = pytest.mark.parametrize("module", [] if compiled is None else [compiled])


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@needs_module
@given(
    row=st.sampled_from([64, 128, 192, 1024, 1088, 4096]),
    order=st.permutations(range(12)),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    shift=st.integers(0, 70),
    to_payload=st.booleans(),
    stream=st.booleans(),
)
def test_a_digest_equals_that_of_the_library_for_the_copied_bytes(
    module, row, order, cuts, shift, to_payload, stream
):
    memory, payload = noise(12 * row + shift)[shift:], noise(12 * row + shift, 1)[shift:]
    starts = np.array(order, np.int64) * row
    edges = [0, *sorted(cuts), 12]
    pieces = [
        (memory, starts[low:high], payload[low * row : high * row], row)
        for low, high in itertools.pairwise(edges)
    ]

    digest = module.copy(pieces, to_payload, stream, True)

    assert np.array_equal(memory.reshape(12, row)[order], payload.reshape(12, row))
    assert digest == xxhash.xxh3_128_digest(payload)


@needs_module
@pytest.mark.parametrize("units", [*range(4, 40), 16 * 16, 16 * 16 + 1, 16 * 17 - 1, 4096])
def test_every_number_of_units_is_right_also_at_the_ends_of_blocks(module, units):
    memory = noise(units * UNIT, units)
    payload = np.empty_like(memory)

    digest = module.copy([(memory, np.arange(units) * UNIT, payload, UNIT)], True, False, True)

    assert digest == xxhash.xxh3_128_digest(memory)


@needs_module
@pytest.mark.parametrize(
    ("starts", "size", "message"),
    [
        ([0], 320 - 1, "cannot include rows of 319 bytes"),
        ([0], 32, "cannot include rows of 32 bytes"),
        ([0, -1, 0, 0], 64, "row 1 is skipped"),
        ([0], 192, "at least 256 bytes, not 192"),
        ([], 64, "at least 256 bytes, not 0"),
    ],
)
def test_rows_unsupported_by_digests_are_not_copied(module, starts, size, message):
    memory, payload = noise(1024), np.zeros(1024, np.uint8)
    piece = (memory, np.array(starts, np.int64), payload[: len(starts) * size], size)

    with pytest.raises(ValueError, match=message):
        module.copy([piece], True, False, True)

    assert not payload.any()


def gather(form, chunks, *, threads=2, digest=True):
    """The payloads of `chunks`, and the digests from the copier."""
    cache = form.build(8)
    jobs = [CopyJob(np.array(c, np.int64), noise(cache.layout.payload_bytes(len(c)), 7)) for c in chunks]
    copier = CpuCopier(cache.layout, threads=threads)
    try:
        digests = asyncio.run(copier.gather(jobs, digest=digest))
    finally:
        copier.close()
    return [job.payload for job in jobs], digests


@needs_module
@given(st.data(), cache_forms())
def test_a_gather_with_digests_copies_the_same_and_returns_correct_digests(module, data, form):
    del module
    num_rows = form.build(8).layout.num_rows
    order = data.draw(st.permutations(range(num_rows)))
    edges = sorted({0, num_rows, *data.draw(st.lists(st.integers(0, num_rows), max_size=3))})
    chunks = [order[low:high] for low, high in itertools.pairwise(edges)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "MIN_THREAD_BYTES", 1)
        patch.setattr(cpu, "STREAM_BYTES", data.draw(st.sampled_from((1, 1 << 30))))
        threads = data.draw(st.integers(1, 3))
        payloads, digests = gather(form, chunks, threads=threads)
        expected, none = gather(form, chunks, digest=False)

    assert none is None
    assert all(map(np.array_equal, payloads, expected))
    assert digests is None or digests == [xxhash.xxh3_128_digest(payload) for payload in payloads]


WIDE = CacheForm(separate=True)  # rows of 128 bytes


@needs_module
def test_digests_are_returned_where_the_module_can_compute_them(module, monkeypatch):
    payloads, digests = gather(WIDE, [range(4), range(4, 8)])
    assert digests == [xxhash.xxh3_128_digest(payload) for payload in payloads]
    assert gather(WIDE, [[0, -1], [2, 3]])[1] is None  # skipped rows
    monkeypatch.setattr(rows, "compiled", None)
    assert gather(WIDE, [range(4)])[1] is None
