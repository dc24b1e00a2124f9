"""Strategies for damaged records: bit flips, truncation, growth, swaps, wrong sizes in the header."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

Damage = Callable[[bytes], bytes]

# Offset and length of each size field in the fixed part of a record: header, fields, payload.
SIZES = [(8, 2), (10, 4), (14, 4), (18, 8)]
LIKELY = [0, 1, 4095, 4096, 4097, 8192, 1 << 20, (1 << 20) + 4096, 1 << 31, (1 << 34) + 1, (1 << 63) + 1]


@contextmanager
def bounded_memory(max_bytes: int) -> Iterator[None]:
    """Limit the peak of memory allocated in the block."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < max_bytes, f"{peak} bytes were allocated"


def flip(position: int, mask: int) -> Damage:
    def damage(data: bytes) -> bytes:
        if not data:
            return data
        at = position % len(data)
        return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]

    return damage


def resize(place: tuple[int, int], value: int) -> Damage:
    offset, length = place
    packed = (value % (1 << (8 * length))).to_bytes(length, "little")
    return lambda data: data[:offset] + packed + data[offset + length :]


def damages(other: bytes = b"") -> st.SearchStrategy[Damage]:
    """One change, usually small; `other` is a record from which pieces are taken."""
    positions = st.integers(0, 200) | st.integers(0, 1 << 20)
    flips = st.builds(flip, positions, st.integers(1, 255))
    sizes = st.builds(resize, st.sampled_from(SIZES), st.sampled_from(LIKELY) | st.integers(0, 1 << 64))
    cuts = st.one_of(positions, st.integers(0, 20).map(lambda pages: 4096 * pages)).map(
        lambda length: lambda data: data[:length]
    )
    growth = st.binary(min_size=1, max_size=5000).map(lambda more: lambda data: data + more)
    pages = st.integers(1, 5).map(lambda count: lambda data: data + bytes(4096 * count))
    holes = st.tuples(positions, st.integers(1, 9000)).map(
        lambda hole: (
            lambda data: (
                data[: hole[0]] + bytes(min(hole[1], max(0, len(data) - hole[0]))) + data[sum(hole) :]
            )
        )
    )
    inserted = st.tuples(positions, st.binary(min_size=1, max_size=50)).map(
        lambda part: lambda data: data[: part[0]] + part[1] + data[part[0] :]
    )
    spliced = st.tuples(positions, positions).map(
        lambda part: lambda data: data[: part[0]] + other[part[0] : part[0] + part[1]] + data[sum(part) :]
    )
    whole = st.sampled_from([b"", other, bytes(4096), b"\xff" * 8192]).map(lambda data: lambda _: data)
    return st.one_of(flips, flips, sizes, cuts, growth, pages, holes, inserted, spliced, whole)


def apply(damages: list[Damage], data: bytes) -> bytes:
    for damage in damages:
        data = damage(data)
    return data
