"""Validation and conversion of the arguments of engine calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from lmcache_async.config.validation import nearest
from lmcache_async.device.layout import Layers
from lmcache_async.hashing import RequestNamespace
from lmcache_async.types import BlockIds

Mask: TypeAlias = torch.Tensor | npt.NDArray[np.bool_] | Sequence[bool]
"""One boolean per token: a bool tensor, a bool array or a list."""

_TAG_PREFIX = "lmcache.tag."  # in LMCache's request_configs


class RequestArguments(TypedDict, total=False):
    """Keyword arguments of the synchronous engine's calls with tokens. None is the same as no argument.

    Attributes:
        kv_caches: The paged KV cache; required once.
        kvcaches: The same, with LMCache's name.
        slot_mapping: Slot of each token; required by `store` and `retrieve`, unused by the other calls.
        req_id: Name of the request in log lines.
        cache_salt: Secret of the tenant.
        lora: Name of the LoRA adapter.
        tags: Names and values that separate the chunks of requests.
        request_configs: LMCache's settings of a request. Those named `lmcache.tag.<name>` are tags.
    """

    kv_caches: Layers | None
    kvcaches: Layers | None
    slot_mapping: Any
    req_id: str | None
    cache_salt: str | None
    lora: str | None
    tags: Mapping[str, str | int | float] | None
    request_configs: Mapping[str, Any] | None


_ELSEWHERE = {
    "hashes": "keys are computed from tokens",
    "offset": "leading tokens are skipped with the mask",
    "offsets": "keys are computed from tokens",
    "search_range": "the tiers are looked up in order",
    "transfer_spec": "records are written to every tier of the config",
}
"""Arguments of LMCache that do not exist here, with the reason or the replacement."""


def check_names(call: str, given: Mapping[str, object], *others: str) -> None:
    """Refuse unknown keyword arguments. An ignored one might be the misspelt name of a tenant.

    Args:
        call: Name of the call.
        given: The keyword arguments.
        others: Arguments of the call besides `RequestArguments`, for the message.

    Raises:
        TypeError: An argument is unknown. The message contains the nearest valid name.
    """
    names = [*RequestArguments.__annotations__, *others]
    for name in given:
        if name in RequestArguments.__annotations__:
            continue
        if name in _ELSEWHERE:
            advice = f"it is LMCache's, but here {_ELSEWHERE[name]}"
        elif choice := nearest(name, names):
            advice = f"did you mean {choice!r}?"
        else:
            advice = f"expected one of {', '.join(names)}"
        raise TypeError(f"{call}() has no argument {name!r}; {advice}")


def paged_cache(given: RequestArguments) -> Layers | None:
    """Return the paged KV cache, given by either of its names.

    Raises:
        TypeError: Both names are given.
    """
    ours, theirs = given.get("kv_caches"), given.get("kvcaches")
    if ours is not None and theirs is not None:
        raise TypeError("kv_caches= and kvcaches= are the same argument; pass one of them")
    return theirs if ours is None else ours


def slots_of(given: RequestArguments) -> Any:
    """Return the slot mapping.

    Raises:
        ValueError: It is missing.
    """
    if given.get("slot_mapping") is None:
        raise ValueError("slot_mapping= is missing; expected the slot of each token in the paged KV cache")
    return given["slot_mapping"]


def request_id(given: RequestArguments) -> str:
    name = given.get("req_id")
    return "" if name is None else str(name)


def request_namespace(given: RequestArguments) -> RequestNamespace:
    """Return the namespace of a request.

    Raises:
        TypeError: An argument or a tag has the wrong type. A salt of 0, for example, is refused, because
            treating it as no salt would share the chunks of a tenant.
    """
    tags = _by_name("tags", given.get("tags"))
    configs = _by_name("request_configs", given.get("request_configs"))
    tags |= {name: value for name, value in configs.items() if name.startswith(_TAG_PREFIX)}
    for name, value in tags.items():
        if not isinstance(value, str | int | float):
            kind = type(value).__name__
            raise TypeError(f"the value of tag {name!r} is a {kind}; expected a string or a number")
    lora, cache_salt = given.get("lora"), given.get("cache_salt")
    return RequestNamespace(
        lora="" if lora is None else lora,
        cache_salt="" if cache_salt is None else cache_salt,
        tags=tuple((name, str(value)) for name, value in tags.items()),
    )


def leading_false(mask: Mask | None, num_tokens: int) -> int:
    """Return the number of leading False values of a mask.

    Raises:
        TypeError: The values are not booleans.
        ValueError: The mask has the wrong length, or not the form F* T*.
    """
    if mask is None:
        return 0
    values = _booleans(mask)
    if values.shape != (num_tokens,):
        raise ValueError(f"the mask has shape {values.shape}, but there are {num_tokens} tokens")
    skip = int(num_tokens - values.sum())
    if values[:skip].any():
        raise ValueError("the mask has a False after a True; expected leading False values, then True")
    return skip


def row_ids(rows: Any, num_tokens: int, tokens_per_row: int, num_rows: int) -> BlockIds:
    """Return the rows of the tokens as an int64 copy.

    Args:
        rows: A tensor, an array or a sequence of integers; extra rows are ignored.
        num_tokens: Number of tokens.
        tokens_per_row: Tokens of a row.
        num_rows: Rows of the KV cache.

    Raises:
        TypeError: The rows are not integers.
        ValueError: There are too few rows, or a row is neither in the cache nor -1.
    """
    given = _integers(rows).reshape(-1)
    wanted = num_tokens // tokens_per_row
    if len(given) < wanted:
        raise ValueError(f"{num_tokens} tokens need {wanted} rows, but {len(given)} were given")
    used = given[:wanted]
    outside = used >= num_rows  # before the cast: 2**64 - 1 is -1 as int64
    if used.dtype.kind != "u":
        outside |= used < -1
    if (bad := used[outside]).size:
        raise ValueError(f"row {bad[0]} is out of bounds; expected 0 to {num_rows - 1}, or -1 to skip a row")
    return used.astype(np.int64)


def _by_name(argument: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} is a {type(given).__name__}; expected a mapping of names to values")
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"{argument} has the name {name!r}, a {type(name).__name__}; expected a string")
    return dict(given)


def _booleans(mask: object) -> npt.NDArray[np.bool_]:
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(f"the mask is a tensor of {mask.dtype}; expected booleans")
        values: npt.NDArray[np.bool_] = mask.detach().cpu().numpy()
        return values
    if isinstance(mask, np.ndarray):
        if mask.dtype != np.bool_:
            raise TypeError(f"the mask is an array of {mask.dtype}; expected booleans")
        return mask
    if isinstance(mask, str | bytes) or not isinstance(mask, Sequence):
        raise TypeError(
            f"the mask is a {type(mask).__name__}; expected a tensor, an array or a list of booleans"
        )
    for position, value in enumerate(mask):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                f"value {position} of the mask is {value!r} ({type(value).__name__}); expected a boolean"
            )
    return np.array(mask, np.bool_)


def _integers(rows: Any) -> npt.NDArray[Any]:
    """The rows as an array of integers; of dtype object if no NumPy integer type holds all of them."""
    if isinstance(rows, torch.Tensor):
        if rows.is_floating_point() or rows.is_complex():
            raise TypeError(f"rows are a tensor of {rows.dtype}; expected integers")
        rows = rows.detach().cpu().numpy()
    given = np.asarray(rows)
    if not given.size or given.dtype.kind in "iu":
        return given
    if isinstance(rows, list | tuple):
        for position, value in enumerate(rows):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"row {position} is {value!r} ({type(value).__name__}); expected an integer")
        return np.array(rows, object)
    raise TypeError(f"rows are an array of {given.dtype}; expected integers")
