"""Conversion of token ids to one checked int32 array."""

from __future__ import annotations

import operator
import reprlib
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_async.types import Tokens

if TYPE_CHECKING:
    import torch

TokenIds: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[np.integer[Any]] | torch.Tensor | bytes | bytearray | memoryview"
"""Token ids that `as_tokens` accepts."""

MAX_TOKEN = 2**31 - 1

_LITTLE_INT32 = np.dtype("<i4")


def as_tokens(tokens: TokenIds) -> Tokens:
    """Convert token ids to a C-contiguous int32 array of shape (num_tokens,).

    The result shares the memory of the caller if it already has this form.

    Args:
        tokens: Token ids. A tensor on another device is copied to the host. Bytes are little-endian int32.

    Raises:
        TypeError: An id is not an integer, or is a boolean.
        ValueError: An id is negative or above 2**31 - 1, or there is more than one dimension.
    """
    if isinstance(tokens, np.ndarray):
        return _from_numpy(tokens)
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        return _from_buffer(memoryview(tokens))
    if isinstance(tokens, array):
        return _from_numpy(np.asarray(tokens))
    # Do not import torch here, which takes seconds: a tensor exists only if torch is already imported.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tokens, torch.Tensor):
        if tokens.is_floating_point() or tokens.is_complex():
            raise TypeError(f"tokens are a tensor of {tokens.dtype}; expected integers")
        return _from_numpy(tokens.detach().cpu().numpy())
    if isinstance(tokens, Sequence):
        return _from_sequence(tokens)
    raise TypeError(f"tokens are a {type(tokens).__name__}; expected a sequence of integers")


def _from_numpy(values: npt.NDArray[Any]) -> Tokens:
    if values.dtype.kind not in "iu":
        where = f"; the first is {values.flat[0]!r}" if values.size else ""
        raise TypeError(f"tokens are an array of {values.dtype}{where}; expected integers")
    if values.ndim != 1:
        raise ValueError(f"tokens have the shape {values.shape}; expected one dimension")
    if values.size and (values.min() < 0 or (values.dtype != np.int32 and values.max() > MAX_TOKEN)):
        position = int(np.flatnonzero((values < 0) | (values > MAX_TOKEN))[0])
        _refuse_value(position, values[position])
    return np.ascontiguousarray(values, dtype=np.int32)


def _from_buffer(view: memoryview) -> Tokens:
    if view.format not in ("B", "b", "c"):
        return _from_numpy(np.asarray(view))
    if not view.c_contiguous or view.nbytes % 4:
        raise ValueError(f"tokens are {view.nbytes} bytes; expected contiguous int32, 4 bytes each")
    if not view.nbytes:
        return np.empty(0, np.int32)
    return _from_numpy(np.frombuffer(view, _LITTLE_INT32))


def _from_sequence(values: Sequence[Any]) -> Tokens:
    try:
        packed = array("i", values)  # the fastest conversion of Python integers; raises TypeError for a float
    except (TypeError, OverflowError):
        _refuse_first(values)
    result = np.frombuffer(packed, np.int32) if packed else np.empty(0, np.int32)
    # A boolean is converted to 0 or 1, so only these values are checked. Few prompts contain many of them.
    suspects = map(values.__getitem__, np.flatnonzero(result <= 1).tolist())
    if not {bool, np.bool_}.isdisjoint(map(type, suspects)) or (packed and result.min() < 0):
        _refuse_first(values)
    return result


def _refuse_first(values: Sequence[Any]) -> NoReturn:
    for position, value in enumerate(values):
        if isinstance(value, (bool, np.bool_)) or not _is_integer(value):
            raise TypeError(
                f"token {position} is {reprlib.repr(value)} ({type(value).__name__}); expected an integer"
            )
        if not 0 <= value <= MAX_TOKEN:
            _refuse_value(position, value)
    raise TypeError(f"tokens are a {type(values).__name__} that changed while it was read")


def _is_integer(value: Any) -> bool:
    """Whether the value converts to an integer. Tensors and arrays have `__index__`, which fails for most of them."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _refuse_value(position: int, value: Any) -> NoReturn:
    raise ValueError(f"token {position} is {value}; expected 0 to {MAX_TOKEN}")
