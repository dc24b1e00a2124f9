"""A lease covers one slab, ends exactly once, and its views never show the content of another lease."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import PAGE, Buffer

VIEWS = {
    "slice": lambda buffer: buffer.view[3:9],
    "slice of the padded view": lambda buffer: buffer.padded_view[3:9],
    "array": lambda buffer: buffer.array,
    "part of an array": lambda buffer: buffer.array[3:9],
    "array of the view": lambda buffer: np.frombuffer(buffer.view, dtype=np.uint8),
    "memoryview of the view": lambda buffer: memoryview(buffer.view),
    "tensor": lambda buffer: buffer.tensor(torch.uint8, (6,), 3),
    "part of a tensor": lambda buffer: buffer.tensor(torch.float16, (2, 5))[1],
}


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(2 * PAGE, PAGE)
    yield arena
    assert arena.statistics().leased_slabs == 0
    arena.close()


def leased(arena: Arena, nbytes: int = 100) -> Buffer:
    buffer = arena.lease_nowait(nbytes)
    assert buffer is not None
    return buffer


def test_view_array_tensor_and_address_are_the_same_bytes(arena: Arena) -> None:
    with leased(arena) as buffer:
        buffer.view[:4] = b"\x00\x3c\x00\x40"

        assert buffer.tensor(torch.float16, (2,)).tolist() == [1.0, 2.0]
        assert buffer.array[:4].tolist() == [0, 0x3C, 0, 0x40]
        assert buffer.array.ctypes.data == buffer.address
        assert buffer.address % PAGE == 0
        buffer.tensor(torch.bfloat16, (3, 4), offset=8).fill_(1.0)
        assert bytes(buffer.view[8:32]) == b"\x80\x3f" * 12


@given(st.integers(0, PAGE))
def test_a_buffer_has_the_requested_length(nbytes: int) -> None:
    arena = Arena(PAGE, PAGE, prefault=False)
    with leased(arena, nbytes) as buffer:
        assert buffer.nbytes == len(buffer.view) == len(buffer.array) == nbytes
        assert len(buffer.padded_view) == (PAGE if nbytes else 0)
        assert not buffer.view.readonly
    arena.close()


@pytest.mark.parametrize(("shape", "offset"), [((51,), 0), ((1,), 99), ((1,), -2), ((1,), 200)])
def test_a_tensor_beyond_the_buffer_is_refused(arena: Arena, shape: tuple[int, ...], offset: int) -> None:
    with leased(arena) as buffer, pytest.raises(ValueError, match="not all within the 100"):
        buffer.tensor(torch.float16, shape, offset)


def test_resize_sets_the_length_of_this_lease_alone(arena: Arena) -> None:
    with leased(arena) as buffer, buffer.retain() as other:
        buffer.resize(4000)

        assert len(buffer.view) == buffer.nbytes == 4000
        assert len(other.view) == other.nbytes == 100
        with pytest.raises(ValueError, match="4097 bytes is not within the 4096 bytes"):
            buffer.resize(PAGE + 1)


def test_a_lease_given_back_twice_is_an_error_and_ends_no_other_one(arena: Arena) -> None:
    buffer = leased(arena)
    with buffer.retain() as other:
        buffer.release()

        assert buffer.released
        with pytest.raises(RuntimeError, match="released twice"):
            buffer.release()
        other.view[:] = b"x" * 100


@pytest.mark.parametrize(
    "use",
    [
        lambda buffer: buffer.view,
        lambda buffer: buffer.padded_view,
        lambda buffer: buffer.array,
        lambda buffer: buffer.tensor(torch.uint8, (1,)),
        lambda buffer: buffer.retain(),
        lambda buffer: buffer.resize(1),
    ],
)
def test_a_released_lease_gives_nothing(arena: Arena, use: Any) -> None:
    buffer = leased(arena)
    buffer.release()

    with pytest.raises(ValueError, match="was released"):
        use(buffer)


def test_a_view_kept_beyond_the_release_is_unusable(arena: Arena) -> None:
    buffer = leased(arena)
    view, padded = buffer.view, buffer.padded_view
    buffer.release()

    for kept in (view, padded):
        with pytest.raises(ValueError, match="released memoryview"):
            kept[0] = 1
    assert arena.statistics().leased_slabs == 0


class Owner:
    """Records retained leases."""

    def __init__(self) -> None:
        self.leases: list[Buffer] = []

    def retained(self, lease: Buffer) -> None:
        self.leases.append(lease)


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("take", VIEWS.values(), ids=VIEWS.keys())
def test_a_slab_is_not_used_again_while_a_view_of_it_lives(arena: Arena, take: Any, readonly: bool) -> None:
    buffer = leased(arena)
    address = buffer.address
    lease = buffer.lend(Owner()) if readonly else buffer.retain()
    view = take(lease)
    lease.release()
    buffer.release()

    is_copy = readonly and isinstance(view, torch.Tensor)
    assert arena.statistics().lingering_slabs == (0 if is_copy else 1)
    if not is_copy:
        with leased(arena) as other:
            assert other.address != address
            assert arena.lease_nowait(1) is None
    del view
    gc.collect()
    assert arena.statistics().lingering_slabs == 0
    with leased(arena) as one, leased(arena) as two:
        assert address in {one.address, two.address}


def test_a_lent_lease_cannot_be_written_through(arena: Arena) -> None:
    with leased(arena) as buffer:
        buffer.view[:] = b"x" * 100
        lease = buffer.lend(Owner())
        array, tensor = lease.array, lease.tensor(torch.uint8, (100,))

        for view in (lease.view, lease.padded_view, lease.view[3:9], memoryview(array)):
            assert view.readonly
            with pytest.raises(TypeError, match="read-only memory"):
                view[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with lease.retain() as further:
            assert further.readonly
            assert further.view.readonly
        tensor.fill_(7)
        assert (lease.readonly, buffer.readonly) == (True, False)
        assert array.ctypes.data == lease.address == buffer.address  # without a copy
        assert bytes(lease.view) == bytes(buffer.view) == b"x" * 100
        del array, tensor, view
        lease.release()


def test_a_read_copies_the_start_of_a_buffer_and_no_other_bytes(arena: Arena) -> None:
    with leased(arena) as buffer, leased(arena) as other:
        buffer.view[:], other.view[:] = b"x" * 100, b"y" * 100

        head = other.read(4)
        other.view[:] = b"z" * 100

        assert head == b"yyyy"
        assert buffer.read(101) == b"x" * 100
        with other.lend(Owner()) as lease:
            assert lease.read(3) == b"zzz"
    with pytest.raises(ValueError, match="released"):
        buffer.read(4)


def test_bytes_are_written_to_the_start_of_a_buffer_only(arena: Arena) -> None:
    with leased(arena) as buffer, leased(arena) as other:
        for each in (buffer, other):
            each.view[:] = b"x" * 100
        other.write(bytearray(b"head"))

        assert bytes(other.view) == b"head" + b"x" * 96
        assert bytes(buffer.view) == b"x" * 100
        with pytest.raises(ValueError, match="101 bytes to a buffer of 100 bytes"):
            other.write(bytes(101))
        with other.lend(Owner()) as lease, pytest.raises(ValueError, match="read-only buffer"):
            lease.write(b"head")
    with pytest.raises(ValueError, match="released"):
        buffer.write(b"head")


def test_an_owned_lease_may_be_released_twice_and_its_owner_is_notified_of_further_leases(
    arena: Arena,
) -> None:
    owner = Owner()
    with leased(arena) as buffer:
        lease = buffer.lend(owner)
        further = lease.retain()
        for _ in range(2):
            lease.release()

        assert owner.leases == [further]
        assert arena.statistics().leased_slabs == 1
        further.release()
        buffer.view[:] = b"z" * 100


def test_a_lease_that_is_taken_over_is_out_of_reach_of_the_former_buffer(arena: Arena) -> None:
    former = leased(arena)
    former.owner = Owner()
    view = former.view
    former.resize(50)
    buffer = former.take_over()

    assert former.released
    former.release()
    with pytest.raises(ValueError, match="released memoryview"):
        view[0] = 1
    with pytest.raises(ValueError, match="was released"):
        former.retain()
    assert (buffer.nbytes, buffer.readonly, buffer.owner, buffer.shared) == (50, False, None, False)
    buffer.view[:] = b"w" * 50
    assert arena.statistics().leased_slabs == 1
    buffer.release()
