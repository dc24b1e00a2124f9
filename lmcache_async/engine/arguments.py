"""Validation and conversion of the arguments of engine calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        kv_caches: The paged KV cache; required until the engine is open.
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


_UNSUPPORTED = {
    "hashes": "keys are computed from tokens",
    "offset": "leading tokens are skipped with the mask",
    "offsets": "keys are computed from tokens",
    "search_range": "the tiers are looked up in order",
    "transfer_spec": "records are written to every tier of the config",
}
"""Arguments of LMCache that do not exist here, with the reason or the replacement."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Checked keyword arguments of a call; `slot_mapping` is not checked."""

    kv_caches: Layers | None
    slot_mapping: Any
    request_id: str
    namespace: RequestNamespace


def check_arguments(call: str, given: RequestArguments, *others: str) -> Arguments:
    """Check the keyword arguments of a call.

    An unknown argument is refused, because it might be a misspelt argument that identifies a tenant. A salt of 0, for
    example, is refused too, because treating it as no salt would share the chunks of a tenant. `others` are the names of
    further arguments of the call.

    Raises:
        TypeError: An argument is unknown, has the wrong type, or is given by both of its names. The message contains the
            nearest valid name.
    """
    names = [*RequestArguments.__annotations__, *others]
    for name in given:
        if name in RequestArguments.__annotations__:
            continue
        if name in _UNSUPPORTED:
            advice = f"it is an argument of LMCache; {_UNSUPPORTED[name]}"
        elif choice := nearest(name, names):
            advice = f"did you mean {choice!r}?"
        else:
            advice = f"expected one of {', '.join(names)}"
        raise TypeError(f"{call}() has no argument {name!r}; {advice}")
    caches = [given[name] for name in ("kv_caches", "kvcaches") if given.get(name) is not None]
    if len(caches) > 1:
        raise TypeError("kv_caches= and kvcaches= are the same argument; pass one of them")
    tags = _by_name("tags", given.get("tags"))
    configs = _by_name("request_configs", given.get("request_configs"))
    tags |= {name: value for name, value in configs.items() if name.startswith(_TAG_PREFIX)}
    for name, value in tags.items():
        if not isinstance(value, str | int | float):
            kind = type(value).__name__
            raise TypeError(f"the value of tag {name!r} is a {kind}; expected a string or a number")
    request_id = given.get("req_id")
    return Arguments(
        kv_caches=caches[0] if caches else None,
        slot_mapping=given.get("slot_mapping"),
        request_id="" if request_id is None else str(request_id),
        namespace=RequestNamespace(
            lora=given.get("lora"),  # type: ignore[arg-type]  # None is no adapter, and other types are refused
            cache_salt=given.get("cache_salt"),  # type: ignore[arg-type]
            tags=tuple((name, str(value)) for name, value in tags.items()),
        ),
    )


def leading_false(mask: Mask | None, num_tokens: int) -> int:
    """Return the number of leading False values of a mask.

    Raises:
        TypeError: The values are not booleans.
        ValueError: The mask has the wrong length, or not the form F* T*.
    """
    if mask is None:
        return 0
    values = _host_array(mask, "the mask is", "mask value", "b", (bool, np.bool_), "booleans")
    if values.shape != (num_tokens,):
        raise ValueError(f"the mask has shape {values.shape}, but there are {num_tokens} tokens")
    skip = int(num_tokens - values.sum())
    if values[:skip].any():
        raise ValueError("the mask has a False after a True; expected leading False values, then True")
    return skip


def row_ids(rows: Any, num_tokens: int, tokens_per_row: int, num_rows: int) -> BlockIds:
    """Copy the rows of the tokens from a tensor, an array or a sequence to an int64 array. Extra rows are ignored.

    Raises:
        TypeError: The rows are not integers.
        ValueError: There are too few rows, or a row is neither in the cache nor -1.
    """
    given = _host_array(rows, "rows are", "row", "iu", (int, np.integer), "integers").reshape(-1)
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


def _host_array(
    values: Any, name: str, item: str, kinds: str, types: tuple[type, ...], expected: str
) -> npt.NDArray[Any]:
    """Return a tensor, an array or a sequence as an array; of dtype object if no NumPy type holds all values.

    Values must be of these NumPy `kinds` or Python `types`; the texts are for messages.
    """
    if isinstance(values, torch.Tensor):
        is_real = values.is_floating_point() or values.is_complex()
        if ("f" if is_real else "b" if values.dtype == torch.bool else "i") not in kinds:
            raise TypeError(f"{name} a tensor of {values.dtype}; expected {expected}")
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if not array.size or array.dtype.kind in kinds:
        return array
    if not isinstance(values, list | tuple):
        kind = f"an array of {array.dtype}" if values is array else f"a {type(values).__name__}"
        raise TypeError(f"{name} {kind}; expected {expected}")
    for position, value in enumerate(values):
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"{item} {position} is {value!r} ({type(value).__name__}); expected {expected}")
    return np.array(values, object)
