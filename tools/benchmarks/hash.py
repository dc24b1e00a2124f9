"""Chunk keys from tokens: every algorithm and form of token ids, for whole prompts and step by step.

The limit is the hash function alone on the same bytes, one call per chunk, without chaining; for a list of
Python integers also its conversion to an array.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmcache_async.bench.measure import Case, Frame, Probe, Row
from lmcache_async.hashing import ALGORITHMS, ChunkHasher, digest_function
from tools.benchmarks.command import option
from tools.benchmarks.repetition import mean_seconds

ROOT = b"benchmark of key"
UNIT = "M tokens/s"


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes are options; see docs/benchmarks.md."""

    tokens: int = option(131072, "tokens of the prompt")
    step: int = option(2048, "tokens of a step of a growing prompt")
    chunk_size: int = option(256, "tokens of a chunk")


QUICK = Settings(tokens=4096, step=1024)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    prompt = np.random.default_rng(0).integers(1000, 128000, settings.tokens)
    forms: dict[str, Any] = {
        "int32 array": prompt.astype(np.int32),
        "int64 array": prompt.astype(np.int64),
        "list": prompt.tolist(),
    }
    algorithms = [name for name in ALGORITHMS if name != "blake3" or importlib.util.find_spec("blake3")]
    cases = [
        _case(settings, frame, algorithm, form, tokens, steps=steps)
        for algorithm in algorithms
        for form, tokens in forms.items()
        for steps in (False, True)
    ]
    for row in await frame.compare(cases):
        yield row


def _case(settings: Settings, frame: Frame, algorithm: str, form: str, tokens: Any, *, steps: bool) -> Case:
    size = settings.step if steps else settings.tokens
    pieces = [tokens[start : start + size] for start in range(0, settings.tokens, size)]

    def rate(function: Callable[[], object]) -> Probe:
        async def probe() -> float:
            return settings.tokens / mean_seconds(frame, function) / 1e6

        return probe

    def keys() -> None:
        hasher = ChunkHasher(ROOT, chunk_size=settings.chunk_size, algorithm=algorithm)
        for piece in pieces:
            hasher.extend_keys(piece)

    limits = {
        f"bare {name}, chunk by chunk": rate(_bare(name, np.asarray(tokens, np.int32), settings.chunk_size))
        for name in dict.fromkeys(("xxh3_128", algorithm))
    }
    if form == "list":
        limits["np.array(list, int32)"] = rate(lambda: _as_arrays(pieces))
    return Case(
        name=f"{algorithm}, {form}, {'in steps' if steps else 'whole'}",
        unit=UNIT,
        measure=rate(keys),
        limits=limits,
        parameters={"tokens": settings.tokens, "step": size, "chunk_size": settings.chunk_size},
    )


def _bare(algorithm: str, tokens: Any, chunk_size: int) -> Callable[[], None]:
    digest = digest_function(algorithm)
    chunks = [tokens[at : at + chunk_size].tobytes() for at in range(0, len(tokens), chunk_size)]

    def hash_all() -> None:
        for chunk in chunks:
            digest(chunk)

    return hash_all


def _as_arrays(pieces: Sequence[list[int]]) -> None:
    for piece in pieces:
        np.array(piece, np.int32)
