"""The chunks of a prompt in the namespace of an engine."""

from __future__ import annotations

from lmcache_async.hashing import ChunkHasher


def chunks_of(engine, tokens):
    """Return the full chunks, then the partial one if there are tokens left."""
    namespace = engine.namespace
    hasher = ChunkHasher(
        namespace.root(),
        chunk_size=namespace.chunk_size,
        algorithm=namespace.algorithm,
        hash_key=namespace.hash_key,
    )
    chunks, tail = hasher.extend(tokens), hasher.tail()
    return (*chunks, tail) if tail else tuple(chunks)
