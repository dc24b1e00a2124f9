"""Hash functions of namespaces and keys, with digests of 16 bytes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import TypeAlias

import xxhash

from lmcache_async.errors import ConfigError, MissingDependencyError
from lmcache_async.types import KEY_BYTES

ALGORITHMS = ("xxh3_128", "blake3", "sha256")
CRYPTOGRAPHIC = ("blake3", "sha256")
"""Collision-resistant algorithms. They accept a secret key."""

HASH_KEY_BYTES = 32

Digest: TypeAlias = Callable[[bytes], bytes]
"""`digest(message)` returns the first 16 bytes of the hash of the message."""


def digest_function(algorithm: str, key: bytes = b"") -> Digest:
    """Return the hash function of an algorithm.

    Args:
        algorithm: One of `ALGORITHMS`.
        key: Secret of 32 bytes, which is needed to compute a digest; b"" for none.

    Raises:
        ConfigError: The algorithm is unknown or takes no key, or the key has the wrong length.
        MissingDependencyError: The algorithm needs a package that is not installed.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"hash algorithm {algorithm!r} is unknown; expected one of {', '.join(ALGORITHMS)}")
    if key and algorithm not in CRYPTOGRAPHIC:
        raise ConfigError(
            f"hash algorithm {algorithm!r} does not support a key: set hash_algorithm to {' or '.join(CRYPTOGRAPHIC)}"
        )
    if key and len(key) != HASH_KEY_BYTES:
        raise ConfigError(f"the hash key has {len(key)} bytes; expected {HASH_KEY_BYTES}")
    if algorithm == "xxh3_128":
        return xxhash.xxh3_128_digest
    if algorithm == "sha256":
        if key:
            return lambda message: hmac.digest(key, message, "sha256")[:KEY_BYTES]
        return lambda message: hashlib.sha256(message).digest()[:KEY_BYTES]
    try:
        from blake3 import blake3
    except ImportError as error:
        raise MissingDependencyError(
            "hash_algorithm: blake3 needs the package blake3: pip install 'lmcache-async[blake3]'"
        ) from error
    if key:
        return lambda message: blake3(message, key=key).digest(length=KEY_BYTES)
    return lambda message: blake3(message).digest(length=KEY_BYTES)


def hash_key_id(key: bytes) -> str:
    """Return the id of a hash key, which is not secret. Different keys have different ids; no key has ""."""
    return hmac.digest(key, b"lmcache-async hash key id", "sha256")[:8].hex() if key else ""
