"""Cutting batches into parts, and finding runs: pure functions."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_async.device.plan import (
    UNBOUNDED,
    PlaneTable,
    cut,
    plane_steps,
)
from lmcache_async.device.planes import Plane, RowStrides

planes = st.lists(
    st.integers(1, 40).map(lambda size: Plane(0, 0, size, RowStrides(64))), min_size=1, max_size=4
)


@st.composite
def ranges(draw, planes):
    """The first of some planes and the one after the last."""
    low = draw(st.integers(0, len(planes)))
    return low, draw(st.integers(low, len(planes)))


@given(
    planes,
    st.data(),
    st.lists(st.integers(0, 9), max_size=5),
    st.integers(1, 300),
    st.sampled_from([UNBOUNDED, *range(1, 10)]),
)
def test_a_cut_of_all_or_some_planes_holds_their_entries_once_in_order_and_within_its_bounds(
    planes, data, counts, max_bytes, max_entries
):
    table = PlaneTable(planes)
    some = data.draw(st.none() | ranges(planes))
    low, high = some or (0, len(planes))

    parts = list(cut(table, counts, max_bytes=max_bytes, max_entries=max_entries, planes=some))

    pieces = [piece for part in parts for piece in part]
    entries = [(piece.job, entry) for piece in pieces for entry in range(piece.start, piece.stop)]
    assert entries == [
        (job, entry) for job, count in enumerate(counts) for entry in range(low * count, high * count)
    ]
    for piece in pieces:
        count = counts[piece.job]
        sizes = [planes[entry // count].row_bytes for entry in range(piece.stop)]
        assert piece.offset == sum(sizes[: piece.start])
        assert piece.nbytes == sum(sizes[piece.start :])
    for part in parts:
        count = sum(piece.stop - piece.start for piece in part)
        assert count >= 1
        assert sum(piece.nbytes for piece in part) <= max_bytes or count == 1
        assert count <= max_entries


def test_the_first_part_of_a_batch_is_known_before_the_other_jobs_are_cut():
    read = []

    def counts():
        for count in (4, 4, 4):
            read.append(count)
            yield count

    parts = cut(PlaneTable([Plane(0, 0, 8, RowStrides(64))]), counts(), max_bytes=16)

    assert [piece.nbytes for piece in next(parts)] == [16]
    assert read == [4]


@given(planes, st.integers(0, 40))
@example([Plane(0, 0, size, RowStrides(64)) for size in (10, 10, 1)], 5)
def test_steps_are_all_planes_in_order_none_smaller_than_asked_and_as_many_as_that_allows(planes, step_bytes):
    steps = plane_steps(PlaneTable(planes), step_bytes)

    assert [plane for low, high in steps for plane in range(low, high)] == list(range(len(planes)))
    assert all(low < high for low, high in steps)
    sizes = [sum(plane.row_bytes for plane in planes[low:high]) for low, high in steps]
    assert len(steps) == 1 or min(sizes) >= step_bytes
    for low, high in steps[:-1]:
        assert high - low == 1 or sum(plane.row_bytes for plane in planes[low : high - 1]) < step_bytes


@given(planes, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_equal_shares_need_no_more_parts_than_threads(planes, counts, threads):
    table = PlaneTable(planes)
    largest = max(plane.row_bytes for plane in planes)
    total = sum(counts) * sum(plane.row_bytes for plane in planes)

    assert len(list(cut(table, counts, max_bytes=-(-total // threads) + largest))) <= threads
