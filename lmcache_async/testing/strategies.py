"""Hypothesis strategies for tokens, keys, records, layouts and tiers. All options are keyword-only."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from lmcache_async.device.layout import KVLayout
from lmcache_async.logging import LimitedLogger
from lmcache_async.testing.caches import DTYPES, cache_forms
from lmcache_async.testing.fakes import DictConfig, DictTier, Fault, FaultKind, FaultPlan, FaultyTier
from lmcache_async.testing.records import MAX_PAYLOAD_BYTES, ODD_KEYS, SLAB_BYTES
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.stack import StackedTier, TierStack
from lmcache_async.tiers.writer import TierWriter
from lmcache_async.types import KEY_BYTES, ChunkKey

ODD_LENGTHS = (0, 1, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 8193, 65_535, MAX_PAYLOAD_BYTES)
"""Payload lengths around the sizes of sectors and pages."""

HARMLESS: tuple[FaultKind, ...] = ("error", "refuse", "bug", "delay", "drop", "lie", "flip", "cut")
"""All kinds of faults except `hang`, which needs a deadline to end."""


@st.composite
def token_streams(
    draw: st.DrawFn, *, min_size: int = 1, max_size: int = 36, vocabulary: int = 2, stems: int = 2
) -> list[int]:
    """Prompts as lists of token ids. Most share a prefix with others, as conversations and documents do.

    Args:
        min_size: Tokens of the shortest prompt.
        max_size: Tokens of the longest prompt.
        vocabulary: Number of different tokens; ids are below it.
        stems: Number of shared prefixes; 0 for independent prompts.
    """
    size = draw(st.integers(min_size, max_size))
    shared = draw(st.integers(0, size)) if stems else 0
    stem = draw(st.integers(0, stems - 1)) if shared else 0
    tail = draw(st.lists(st.integers(0, vocabulary - 1), min_size=size - shared, max_size=size - shared))
    return [(stem + position // 3) * (stem + 1) % vocabulary for position in range(shared)] + tail


def chunk_keys() -> st.SearchStrategy[ChunkKey]:
    """Keys of 16 bytes: random ones, consecutive ones, and ones that need escaping in paths or commands."""
    few = st.integers(0, 9).map(lambda number: number.to_bytes(KEY_BYTES, "big"))
    return (st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES) | few | st.sampled_from(ODD_KEYS)).map(ChunkKey)


def payloads(*, max_bytes: int = MAX_PAYLOAD_BYTES) -> st.SearchStrategy[bytes]:
    """Payloads of records: incompressible bytes of any length, often of a length in ODD_LENGTHS.

    Args:
        max_bytes: Bytes of the longest payload.
    """
    odd = [length for length in ODD_LENGTHS if length <= max_bytes]
    lengths = st.integers(0, max_bytes) | st.sampled_from(odd)
    return st.builds(
        lambda length, seed: np.random.default_rng(seed).bytes(length), lengths, st.integers(0, 255)
    )


@st.composite
def kv_layouts(
    draw: st.DrawFn,
    *,
    max_blocks: int = 8,
    granularities: Sequence[str] = ("block", "token"),
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> KVLayout:
    """Layouts of small paged KV caches in host memory, in every supported form, filled with random bytes.

    Args:
        max_blocks: Maximum number of blocks.
        granularities: Granularities to draw from.
        dtypes: Element types to draw from.
    """
    form = draw(cache_forms(granularities=granularities, dtypes=dtypes))
    return form.build(draw(st.integers(1, max_blocks)), seed=draw(st.integers(0, 255))).layout


@st.composite
def fault_plans(
    draw: st.DrawFn,
    *,
    max_size: int = 12,
    kinds: Sequence[FaultKind] = HARMLESS,
    max_delay_s: float = 0.0,
) -> FaultPlan:
    """Plans for a FaultyTier. About half of the calls have no fault.

    Args:
        max_size: Maximum number of calls of the plan.
        kinds: Kinds of faults to draw from. `hang` needs a timeout above the tier.
        max_delay_s: Maximum of a `delay`, in seconds; 0 yields to the event loop and takes no time.
    """
    fault = st.builds(
        Fault,
        kind=st.sampled_from(list(kinds)),
        seconds=st.floats(0, max_delay_s),
        position=st.integers(-64, -1) | st.integers(0, 2 * SLAB_BYTES),
    )
    return FaultPlan(tuple(draw(st.lists(st.none() | fault, max_size=max_size))))


@st.composite
def tier_stacks(
    draw: st.DrawFn,
    *,
    max_tiers: int = 3,
    max_slabs: int = 8,
    fault_kinds: Sequence[FaultKind] = HARMLESS,
    timeout_s: float = 30.0,
) -> TierStack:
    """Stacks of tiers, not opened, built as an engine builds them: a handle and a write queue for each tier.

    Each tier is a FaultyTier with its own plan around a DictTier. Some have a capacity of a few slabs (of
    `lmcache_async.testing.records`).

    Args:
        max_tiers: Maximum number of tiers.
        max_slabs: Maximum capacity of a limited tier, in slabs.
        fault_kinds: Kinds of faults to draw from; empty for tiers without faults.
        timeout_s: Timeout of the tiers' calls and of writes, in seconds.
    """
    stacked = []
    logger = LimitedLogger(logging.getLogger("lmcache_async.testing"))
    for index in range(draw(st.integers(1, max_tiers))):
        limit = draw(st.none() | st.integers(1, max_slabs))
        inner = DictTier(DictConfig(max_bytes=None if limit is None else limit * SLAB_BYTES))
        faulty = FaultyTier(inner, draw(fault_plans(kinds=fault_kinds)) if fault_kinds else None)
        handle = TierHandle(faulty, name=f"tier{index}", logger=logger, timeout_s=timeout_s)
        writer = TierWriter(handle, max_bytes=64 * SLAB_BYTES)
        stacked.append(StackedTier(f"tier{index}", handle, writer))
    return TierStack(stacked, write_timeout_s=timeout_s)
