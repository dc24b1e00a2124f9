"""Namespaces: the dependencies of KV other than tokens, as canonical text and as the root of chunk keys.

Two namespaces have the same text only if they are equal, for any characters in their names. The text is
stored in the header of each record. Its hash is the root of the chain of keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import UnionType

from lmcache_async.hashing.digest import digest_function, hash_key_id
from lmcache_async.types import KEY_BYTES, ChunkKey

Pairs = tuple[tuple[str, str], ...]
"""Names with values, sorted in the canonical text."""

# The message of a chunk ends in a token or in a number of tokens, never in one of these marks: see chain.py.
_ENGINE_MARK = 0xFFFFFFFF
_REQUEST_MARK = 0xFFFFFFFE
_BOUNDARY_MARK = 0xFFFFFFFD
_GROUP_MARK = 0xFFFFFFFC


_ENGINE_TYPES: tuple[tuple[str, type | UnionType, str], ...] = (
    *((name, str | None, "a string") for name in ("model", "weights", "dtype", "layout", "quantization")),
    *(
        (name, int, "an integer")
        for name in ("world_size", "tp_rank", "tp_size", "tp_replicas", "pp_rank", "pp_size", "chunk_size")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Namespace of all chunks of one rank of an engine.

    Attributes:
        model: Name of the model as requested.
        weights: Fingerprint of the weights (`weights_fingerprint`), or another text that identifies them.
        dtype: Element type of the KV cache.
        layout: Text of the KV layout, independent of addresses and the number of blocks.
        quantization: Quantisation of the weights or the KV; empty for none.
        world_size: Number of ranks of the model.
        tp_rank: Tensor-parallel rank.
        tp_size: Number of tensor-parallel ranks.
        replicated: All tensor-parallel ranks have the same KV (MLA) and therefore the same keys. A tier that
            they share stores it once.
        tp_replicas: Consecutive tensor-parallel ranks with the same KV, as with more ranks than KV heads. They have
            the same keys too.
        pp_rank: Pipeline-parallel rank.
        pp_size: Number of pipeline-parallel ranks.
        chunk_size: Tokens of a full chunk.
        algorithm: Hash algorithm of the keys.
        format_version: Version of keys and records. Different versions are different namespaces.
        extra: Further names and values that the KV depends on.
        hash_key: Secret of a keyed hash. The text contains only its id.

    Raises:
        TypeError: A value is not of its type.
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
    tp_replicas: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    chunk_size: int = 256
    algorithm: str = "xxh3_128"
    format_version: int = 1
    extra: Pairs = ()
    hash_key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        # An integer as a string, for example, would be another namespace than the integer.
        for name, type_, expected in _ENGINE_TYPES:
            value = getattr(self, name)
            if not isinstance(value, type_):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}); expected {expected}")
        object.__setattr__(self, "extra", _sorted_pairs(self.extra))

    @property
    def rank(self) -> int:
        """Global rank. The tensor-parallel ranks of one pipeline rank are consecutive."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def text(self) -> str:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        secret = values.pop("hash_key")
        replicas = values.pop("tp_replicas")
        values["tp_rank"] = 0 if values.pop("replicated") else self.tp_rank - self.tp_rank % replicas
        return canonical_text(values | {"hash_key": hash_key_id(secret)} if secret else values)

    def root(self) -> bytes:
        """Return the root, 16 bytes, of the keys of requests with an empty request namespace."""
        return engine_root(self.text, self.algorithm, self.hash_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNamespace:
    """Namespace of all chunks of one request, within the namespace of the engine.

    Attributes:
        lora: Name of the LoRA adapter.
        lora_path: Path of the adapter, or preferably a fingerprint of its weights.
        cache_salt: Secret of the tenant. Requests with different salts never share a chunk.
        tags: Tags of the request. Requests with different tags never share a chunk.

    Raises:
        TypeError: A value is not a string. A salt of 0, for example, would count as no salt, and tenants
            would share chunks.
    """

    lora: str = ""
    lora_path: str = ""
    cache_salt: str = ""
    tags: Pairs = ()

    def __post_init__(self) -> None:
        for name in ("lora", "lora_path", "cache_salt"):
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, "")
            elif not isinstance(value, str):  # the message omits the value, because a salt is a secret
                raise TypeError(f"{name} is of type {type(value).__name__}; expected a string or None")
        if not isinstance(self.tags, tuple | list):
            raise TypeError(
                f"tags are of type {type(self.tags).__name__}; expected pairs of a name and a value"
            )
        for pair in self.tags:
            match pair:
                case [str(), str()]:
                    continue
            raise TypeError(f"tag {pair!r} is not a pair of strings, a name and a value")
        object.__setattr__(self, "tags", _sorted_pairs(self.tags))

    @property
    def text(self) -> str:
        """Canonical text; empty if all attributes are empty."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        own = {name: value for name, value in fields.items() if value}
        return canonical_text(own) if own else ""

    @property
    def label(self) -> str:
        """Digest of the text, which replaces it in records, because the text may contain a secret."""
        return self.keyed_label(b"")

    def keyed_label(self, hash_key: bytes) -> str:
        """Return the label for a hash key. Salts cannot be guessed from such labels without the key."""
        text = self.text.encode("utf-8")
        if not text:
            return ""
        if hash_key:
            return hmac.digest(hash_key, b"lmcache-async label" + text, "sha256").hex()[:32]
        return hashlib.sha256(text).hexdigest()[:32]

    def root(self, engine_root: bytes, algorithm: str = "xxh3_128", hash_key: bytes = b"") -> bytes:
        """Return the root, 16 bytes, of the keys of the request; `engine_root` if the namespace is empty."""
        text = self.text.encode("utf-8")
        return _root(engine_root, text, _REQUEST_MARK, algorithm, hash_key) if text else engine_root


def namespace_id(text: str) -> str:
    """Return the id of a namespace for logs and commands: 12 hex digits of the hash of its text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def engine_root(text: str, algorithm: str, hash_key: bytes = b"") -> bytes:
    """Return `Namespace.root` for the text of a namespace, as stored in records."""
    return _root(bytes(KEY_BYTES), text.encode("utf-8"), _ENGINE_MARK, algorithm, hash_key)


def boundary_root(engine_root: bytes, key: bytes, algorithm: str, hash_key: bytes = b"") -> bytes:
    """Return the root, 16 bytes, of the keys of chunks that a KV cache group needs to continue at a boundary.

    Args:
        engine_root: Root of the group's namespace.
        key: Key of the chunk, full or partial, that ends at the boundary. It covers all tokens before.
    """
    return _root(engine_root, key, _BOUNDARY_MARK, algorithm, hash_key)


def group_keys(
    engine_root: bytes, keys: Iterable[bytes], algorithm: str, hash_key: bytes = b""
) -> list[ChunkKey]:
    """Return the keys, 16 bytes each, under which a further KV cache group of full attention is stored.

    Args:
        engine_root: Root of the group's namespace.
        keys: Keys of the chunks in the leading group, each of 16 bytes. A key covers all tokens up to the end of its
            chunk.
    """
    digest, end = digest_function(algorithm, hash_key), struct.pack("<II", KEY_BYTES, _GROUP_MARK)
    return [ChunkKey(digest(b"".join((engine_root, key, end)))) for key in keys]


def canonical_text(value: object) -> str:
    """Return JSON with sorted keys and without spaces. The mapping of values to texts is one-to-one.

    A lone surrogate, which is possible in the JSON of a request but not in UTF-8, is written as an escape.
    Other characters are never escaped like this, so the two cannot be confused.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _root(parent: bytes, body: bytes, mark: int, algorithm: str, hash_key: bytes) -> bytes:
    message = b"".join((parent, body, struct.pack("<II", len(body), mark)))
    return digest_function(algorithm, hash_key)(message)


def _sorted_pairs(pairs: Pairs) -> Pairs:
    return tuple(sorted((name, value) for name, value in pairs))
