"""The hash functions behind namespaces and keys: one call, 16 bytes out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import xxhash

from lmcache_async.errors import ConfigError, MissingDependencyError
from lmcache_async.types import KEY_BYTES

ALGORITHMS = ("xxh3_128", "blake3", "sha256")

Digest: TypeAlias = Callable[[bytes], bytes]
"""`digest(message)` gives the first 16 bytes of the message's hash."""


def digest_function(algorithm: str) -> Digest:
    """The hash function of that name.

    Raises:
        ConfigError: No such algorithm.
        MissingDependencyError: It needs a package that is not installed.
    """
    if algorithm == "xxh3_128":
        return xxhash.xxh3_128_digest
    if algorithm == "sha256":
        return _sha256
    if algorithm == "blake3":
        return _blake3()
    raise ConfigError(f"hash algorithm {algorithm!r} is unknown; there are {', '.join(ALGORITHMS)}")


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()[:KEY_BYTES]


def _blake3() -> Digest:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise MissingDependencyError(
            "hash algorithm 'blake3' needs the package blake3: pip install 'lmcache-async[blake3]'"
        ) from error

    def digest(message: bytes) -> bytes:
        result: bytes = blake3(message).digest(length=KEY_BYTES)
        return result

    return digest
