"""What a chunk's KV depends on besides its tokens, as canonical text and as the root of its keys.

Two namespaces have the same text only if they are equal, whatever characters their names hold. The
text goes into each record's header; its hash is where the chain of keys begins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field

from lmcache_async.hashing.digest import digest_function, hash_key_id
from lmcache_async.types import KEY_BYTES

Pairs = tuple[tuple[str, str], ...]
"""Names with values; the order does not matter and is made canonical."""

# A message that gives a key ends in a token or in a number of tokens, never in one of these: see chain.py.
_ENGINE_MARK = 0xFFFFFFFF
_REQUEST_MARK = 0xFFFFFFFE


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What all chunks of one engine's rank share.

    Attributes:
        model: The model's name as it was asked for.
        weights: Fingerprint of its weights (`weights_fingerprint`), or a text that stands for it.
        dtype: Element type of the KV cache.
        layout: Text of the KV layout, free of addresses and of the number of blocks.
        quantization: How the weights or the KV are quantised; empty if they are not.
        world_size: Ranks of the whole model.
        replicated: All tensor-parallel ranks have the same KV (MLA), and so the same keys: a tier that they
            share has it once.
        format_version: Version of keys and records; another one is another namespace.
        extra: Further names and values that the KV depends on.
        hash_key: The secret of a keyed hash; the text has its id alone.
    """

    model: str
    weights: str
    dtype: str
    layout: str
    quantization: str = ""
    world_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    replicated: bool = False
    pp_rank: int = 0
    pp_size: int = 1
    chunk_size: int = 256
    algorithm: str = "xxh3_128"
    format_version: int = 1
    extra: Pairs = ()
    hash_key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", _sorted_pairs(self.extra))

    @property
    def rank(self) -> int:
        """This rank's number among all of the model, tensor ranks of one pipeline rank beside each other."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def text(self) -> str:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        secret = values.pop("hash_key")
        if values.pop("replicated"):
            values["tp_rank"] = 0
        return canonical_text(values | {"hash_key": hash_key_id(secret)} if secret else values)

    def root(self) -> bytes:
        """The 16 bytes that the keys of all requests without a namespace of their own begin with."""
        return engine_root(self.text, self.algorithm, self.hash_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNamespace:
    """What all chunks of one request share, beyond the engine's namespace.

    Attributes:
        lora: Name of the LoRA adapter.
        lora_path: Where the adapter came from, or better a fingerprint of its weights.
        cache_salt: The tenant's secret; requests with different salts never share a chunk.
        tags: Tags of the request that keep its chunks apart.

    Raises:
        TypeError: A value is no text. A salt of 0, say, would read as none, and tenants would share chunks.
    """

    lora: str = ""
    lora_path: str = ""
    cache_salt: str = ""
    tags: Pairs = ()

    def __post_init__(self) -> None:
        for name in ("lora", "lora_path", "cache_salt"):
            object.__setattr__(self, name, _text(name, getattr(self, name)))
        object.__setattr__(self, "tags", _sorted_pairs(_checked_tags(self.tags)))

    @property
    def text(self) -> str:
        """Canonical text; empty when the request has nothing of its own."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        own = {name: value for name, value in fields.items() if value}
        return canonical_text(own) if own else ""

    @property
    def label(self) -> str:
        """What stands for the text in records: its digest, since a record is no place for a secret."""
        return self.keyed_label(b"")

    def keyed_label(self, hash_key: bytes) -> str:
        """The label where a hash key is set: who reads records cannot even try salts until one fits."""
        text = self.text.encode("utf-8")
        if not text:
            return ""
        if hash_key:
            return hmac.digest(hash_key, b"lmcache-async label" + text, "sha256").hex()[:32]
        return hashlib.sha256(text).hexdigest()[:32]

    def root(self, engine_root: bytes, algorithm: str = "xxh3_128", hash_key: bytes = b"") -> bytes:
        """The 16 bytes that this request's keys begin with; the engine's own root for an empty one."""
        text = self.text
        return _root(engine_root, text, _REQUEST_MARK, algorithm, hash_key) if text else engine_root


def engine_root(text: str, algorithm: str, hash_key: bytes = b"") -> bytes:
    """`Namespace.root` from the namespace's text, as records have it."""
    return _root(bytes(KEY_BYTES), text, _ENGINE_MARK, algorithm, hash_key)


def canonical_text(value: object) -> str:
    """JSON with sorted keys and without spaces, one text per value and one value per text.

    Half of a surrogate pair, which a request's JSON may hold and UTF-8 may not, is written as an
    escape. A whole character never is, so the two stay apart.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _root(parent: bytes, text: str, mark: int, algorithm: str, hash_key: bytes) -> bytes:
    body = text.encode("utf-8")
    message = b"".join((parent, body, struct.pack("<II", len(body), mark)))
    return digest_function(algorithm, hash_key)(message)


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):  # without the value: a salt is a secret
        raise TypeError(f"{name} is of type {type(value).__name__}; expected a text, or None for none")
    return value


def _checked_tags(tags: object) -> Pairs:
    if not isinstance(tags, tuple | list):
        raise TypeError(f"tags are of type {type(tags).__name__}; expected pairs of a name and a value")
    for pair in tags:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(x, str) for x in pair)):
            raise TypeError(f"tag {pair!r} is no pair of two texts, a name and a value")
    return tuple((name, value) for name, value in tags)


def _sorted_pairs(pairs: Pairs) -> Pairs:
    return tuple(sorted((name, value) for name, value in pairs))
