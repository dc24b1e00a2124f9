"""Notices as vLLM's own KV events, for routers that send a prompt to where its prefix is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent

from lmcache_async.integration.vllm.notices import Kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lmcache_async.integration.vllm.notices import Notice

_MEMORY = {"cpu", "host"}
_LOCAL = {*_MEMORY, "disk"}


def kv_events(notices: Iterable[Notice], kinds: Mapping[str, str]) -> list[KVCacheEvent]:
    """One event a chunk that a tier has got, and one for those that it has given up.

    Hashes are our chunk keys, a block is a chunk, and its parent the chunk before it: a consumer learns what
    they stand for from the token ids, as with blocks of the device.

    Args:
        kinds: The tiers' names by their ids.
    """
    return [_event(notice, kinds.get(notice.tier, "")) for notice in notices]


def _event(notice: Notice, kind: str) -> KVCacheEvent:
    medium = MEDIUM_CPU if kind in _MEMORY else MEDIUM_STORAGE
    locality = "LOCAL" if kind in _LOCAL else "REMOTE"
    if isinstance(notice, Kept):
        tokens = np.frombuffer(notice.tokens, np.int32).tolist()
        return BlockStored(
            block_hashes=[notice.key],
            parent_block_hash=notice.parent or None,
            token_ids=tokens,
            block_size=len(tokens),
            lora_id=None,
            medium=medium,
            lora_name=notice.lora_name or None,
            locality=locality,
            ownership=notice.tier,
        )
    return BlockRemoved(
        block_hashes=list(notice.keys), medium=medium, locality=locality, ownership=notice.tier
    )
