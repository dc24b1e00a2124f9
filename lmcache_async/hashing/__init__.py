"""Chunk keys from token ids: pure and incremental functions, with the same result on every machine."""

from lmcache_async.hashing.chain import ChunkHasher, Extra, packed_keys, partial_candidates
from lmcache_async.hashing.digest import (
    ALGORITHMS,
    CRYPTOGRAPHIC,
    HASH_KEY_BYTES,
    digest_function,
    hash_key_id,
)
from lmcache_async.hashing.fingerprint import FingerprintMode, processor_fingerprint, weights_fingerprint
from lmcache_async.hashing.namespace import (
    Namespace,
    RequestNamespace,
    boundary_root,
    canonical_text,
    engine_root,
    group_keys,
)
from lmcache_async.hashing.tokens import TokenIds, as_tokens

__all__ = [
    "ALGORITHMS",
    "CRYPTOGRAPHIC",
    "HASH_KEY_BYTES",
    "ChunkHasher",
    "Extra",
    "FingerprintMode",
    "Namespace",
    "RequestNamespace",
    "TokenIds",
    "as_tokens",
    "boundary_root",
    "canonical_text",
    "digest_function",
    "engine_root",
    "group_keys",
    "hash_key_id",
    "packed_keys",
    "partial_candidates",
    "processor_fingerprint",
    "weights_fingerprint",
]
