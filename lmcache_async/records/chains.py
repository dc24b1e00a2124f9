"""A prompt's chunks in each namespace that a place has records of."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_async.errors import ConfigError, TierError
from lmcache_async.hashing import ChunkHasher, engine_root, hash_key_id
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.records.flight import Meter
from lmcache_async.records.heads import heads
from lmcache_async.records.namespaces import Selection, fields_of
from lmcache_async.records.proving import check
from lmcache_async.records.target import Target
from lmcache_async.tiers.rest import Kept
from lmcache_async.types import Chunk, Tokens

SAMPLES = 64
"""Records that are read whole to learn namespaces, where headers alone do not tell them."""
_UNIT = 1  # tokens that a partial chunk is a multiple of, where the namespace does not say


@dataclass(frozen=True, slots=True)
class Chain:
    """What the keys of a namespace's prompts are made with."""

    text: str
    root: bytes
    chunk_size: int
    algorithm: str
    hash_key: bytes
    unit: int

    def chunks(self, tokens: Tokens) -> tuple[list[Chunk], list[Chunk]]:
        """The full chunks of a prompt, and the partial ones that a store may have left behind them, longest first."""
        hasher = ChunkHasher(
            self.root, chunk_size=self.chunk_size, algorithm=self.algorithm, hash_key=self.hash_key
        )
        return hasher.extend(tokens), hasher.partials(self.unit)


def chain_of(text: str, hash_key: bytes) -> Chain | None:
    """Of a namespace as records have it; None where its keys cannot be made."""
    fields = fields_of(text)
    chunk_size, algorithm, keyed = fields.get("chunk_size"), fields.get("algorithm"), fields.get("hash_key")
    if type(chunk_size) is not int or not isinstance(algorithm, str):
        return None
    if keyed and (not hash_key or hash_key_id(hash_key) != keyed):
        return None
    own = hash_key if keyed else b""
    extra = fields.get("extra", [])
    if not isinstance(extra, list) or not all(map(_is_pair, extra)):
        return None
    try:
        root = engine_root(text, algorithm, own)
        ChunkHasher(root, chunk_size=chunk_size, algorithm=algorithm, hash_key=own)
    except ConfigError:  # no such algorithm, it takes no key, or a chunk is too long
        return None
    return Chain(text, root, chunk_size, algorithm, own, min(_unit(dict(extra)), chunk_size))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def _unit(extra: Mapping[str, Any]) -> int:
    try:
        return max(1, int(str(extra.get("block_size", _UNIT))))
    except ValueError:
        return _UNIT


async def namespaces_of(
    target: Target, kept: Sequence[Kept], selection: Selection, cipher: RecordCipher | None, meter: Meter
) -> list[str]:
    """The texts of the namespaces there, as far as they are meant and can be read.

    Where headers can be read alone all of them are; else, and where they are secret, those of some records.
    """
    found: dict[str, None] = {}
    secret = list(kept)
    if target.reads_heads:
        secret = []
        meter.begin("headers", records=len(kept))
        async with contextlib.aclosing(heads(target, kept, meter)) as looks:
            async for looked in looks:
                if looked is None or isinstance(looked, TierError):
                    continue
                if looked.header is not None:
                    found[looked.header.namespace] = None
                elif looked.key_id:
                    secret.append(looked.kept)
    step = max(1, len(secret) // SAMPLES)
    for one in secret[::step][:SAMPLES] if cipher is not None or not target.reads_heads else ():
        opened = await target.examine(
            one, functools.partial(check, one, selection=Selection(), cipher=cipher)
        )
        if opened is not None and (header := opened.header) is not None:
            found[header.namespace] = None
    return [text for text in found if selection.takes(text)]
