"""Stores and loads through an engine, with checks of the content, and the chunks of a prompt."""

from __future__ import annotations

import torch

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


async def store(rig, engine, tokens, **options):
    """Compute the prompt in the first slots, store it and wait for slower tiers."""
    slots = range(len(tokens))
    rig.write(slots, rig.content(tokens))
    report = await engine.store(tokens, slots, **options)
    assert await engine.flush(timeout_s=30)
    return report


async def retrieve(rig, engine, tokens, **options):
    """Load the prompt into the last slots and return the mask, after checking the content of all slots."""
    rig.wipe()
    slots = list(range(rig.num_slots - 1, rig.num_slots - 1 - len(tokens), -1))

    result = await engine.retrieve(tokens, slots, **options)

    hit = torch.nonzero(result).flatten().tolist()
    used = [slots[i] for i in hit]
    assert torch.equal(rig.read(used), rig.content(tokens)[:, :, hit])
    assert (rig.read(sorted(set(range(rig.num_slots)) - set(used))) == -7.0).all()
    return result.tolist()


async def hits(rig, engine, tokens, **options):
    """Load the prompt as `retrieve` does and return the number of loaded tokens."""
    return sum(await retrieve(rig, engine, tokens, **options))


def leased(engine):
    """Slabs that are not free and do not belong to the cpu tier."""
    statistics = engine.statistics()
    kept = statistics.tiers["cpu"].chunks if "cpu" in statistics.tiers else 0
    return statistics.arena.leased_slabs - kept
