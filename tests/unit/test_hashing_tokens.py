"""Token input: every common form gives the same int32 array, and errors name the invalid token id."""

from __future__ import annotations

from array import array
from collections import UserList

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lmcache_async.hashing import as_tokens

MAX = 2**31 - 1
# NumPy warns about values that a future version rejects.
NUMPY_TRUE = pytest.param(np.True_, marks=pytest.mark.filterwarnings("ignore:In future"))
ids = st.lists(st.integers(0, MAX) | st.integers(0, 2), max_size=40)

FORMS = {
    "list": list,
    "tuple": tuple,
    "numpy scalars": lambda values: list(np.array(values, np.int64)),
    "array i": lambda values: array("i", values),
    "array q": lambda values: array("q", values),
    "int32": lambda values: np.array(values, np.int32),
    "int64": lambda values: np.array(values, np.int64),
    "uint32": lambda values: np.array(values, np.uint32),
    "uint64": lambda values: np.array(values, np.uint64),
    "big endian": lambda values: np.array(values, ">i4"),
    "strided": lambda values: np.repeat(np.array(values, np.int32), 3)[::3],
    "torch int32": lambda values: torch.tensor(values, dtype=torch.int32),
    "torch int64": lambda values: torch.tensor(values, dtype=torch.int64),
    "bytes": lambda values: np.array(values, "<i4").tobytes(),
    "bytearray": lambda values: bytearray(np.array(values, "<i4").tobytes()),
    "memoryview of int": lambda values: memoryview(array("i", values)),
    "memoryview of bytes": lambda values: memoryview(np.array(values, "<i4").tobytes()),
}


@pytest.mark.parametrize("form", FORMS)
@given(values=ids)
def test_every_form_gives_the_same_contiguous_int32(form, values):
    tokens = as_tokens(FORMS[form](values))

    assert tokens.dtype == np.int32
    assert tokens.dtype.isnative
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == values


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(-30, 30).filter(bool))
def test_a_range_is_its_list(start, stop, step):
    span = range(start, stop, step)
    assume(not span or min(span) >= 0)

    assert as_tokens(span).tolist() == list(span)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_small_torch_types_are_taken(dtype):
    assert as_tokens(torch.tensor([0, 7, 100], dtype=dtype)).tolist() == [0, 7, 100]


def test_an_int32_array_is_not_copied():
    values = np.arange(10, dtype=np.int32)

    assert np.shares_memory(as_tokens(values), values)
    assert np.shares_memory(as_tokens(torch.from_numpy(values)), values)
    assert np.shares_memory(as_tokens(memoryview(values)), values)


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31, 2**40, -(2**70), 2**70])
@given(before=st.lists(st.integers(0, MAX), max_size=5), after=st.lists(st.integers(-5, 5), max_size=5))
def test_an_id_out_of_range_is_named_with_its_position(bad, before, after):
    with pytest.raises(ValueError, match=f"^token {len(before)} is {bad};"):
        as_tokens([*before, bad, *after])


@pytest.mark.parametrize("bad", [-1, 2**31])
@pytest.mark.parametrize("make", [lambda v: np.array(v), lambda v: array("q", v), lambda v: torch.tensor(v)])
def test_an_array_names_the_id_out_of_range_too(make, bad):
    with pytest.raises(ValueError, match=f"token 2 is {bad};"):
        as_tokens(make([5, 6, bad, 7]))


@pytest.mark.parametrize(
    ("span", "position", "value"),
    [(range(3, -3, -1), 4, -1), (range(MAX - 1, MAX + 9), 2, MAX + 1), (range(-2, 5), 0, -2)],
)
def test_a_range_names_its_first_id_out_of_range(span, position, value):
    with pytest.raises(ValueError, match=f"token {position} is {value};"):
        as_tokens(span)


@pytest.mark.parametrize(
    "bad",
    [
        True,
        False,
        NUMPY_TRUE,
        1.0,
        float("nan"),
        "7",
        None,
        np.float32(2),
        [1],
        torch.tensor(1.0),
        np.array([1]),
    ],
)
@pytest.mark.parametrize("form", [list, tuple])
def test_values_that_are_no_integers_are_named_with_their_position(form, bad):
    with pytest.raises(TypeError, match=r"^token 2 is .*expected an integer"):
        as_tokens(form([1, 0, bad, 4]))


def test_a_batch_of_prompts_is_refused_with_a_short_message():
    with pytest.raises(TypeError, match=r"^token 0 is \[0, 1, .*expected an integer") as raised:
        as_tokens([list(range(10_000))])

    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "bad",
    [
        np.array([1.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([1], object),
        array("d", [1.5]),
        torch.tensor([1.5]),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([True]),
        {1, 2},
        7,
        None,
        "abc",
    ],
    ids=repr,
)
def test_other_types_are_refused(bad):
    with pytest.raises(TypeError, match="token"):
        as_tokens(bad)


@pytest.mark.parametrize(
    "bad",
    [np.zeros((2, 2), np.int32), torch.zeros((1, 3), dtype=torch.int64), np.array(3), b"12345"],
)
def test_other_shapes_are_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        as_tokens(bad)


def test_a_sequence_of_another_class_is_taken():
    assert as_tokens(UserList([4, 1, 0])).tolist() == [4, 1, 0]
