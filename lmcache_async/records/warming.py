"""Prefixes of prompts copied from a slower tier into faster ones, each record proven to be of those tokens."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmcache_async.errors import ConfigError
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.memory.threads import WorkerPool
from lmcache_async.records.chains import Chain, chain_of, namespaces_of
from lmcache_async.records.copy import VERIFY_THREADS, Copier, CopyCounts
from lmcache_async.records.flight import Meter, each, in_order
from lmcache_async.records.namespaces import EVERYTHING, Selection
from lmcache_async.records.prompts import Encode, Prompt
from lmcache_async.records.proving import Checked, check
from lmcache_async.records.target import Target
from lmcache_async.tiers.rest import Kept
from lmcache_async.types import Chunk, ChunkKey, Tokens


@dataclass(slots=True)
class Warming:
    """What a warming came to.

    Attributes:
        prompts: Different prompts that were asked for.
        tokens: Their tokens.
        found_tokens: Of these, how many the source has as a prefix; of several namespaces, in the best of them.
        there: Records that a target had already, by target.
    """

    source: str
    namespaces: int = 0
    prompts: int = 0
    tokens: int = 0
    found_tokens: int = 0
    there: Counter[str] = field(default_factory=Counter)
    counts: CopyCounts = field(default_factory=CopyCounts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "namespaces": self.namespaces,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "found_tokens": self.found_tokens,
            "copied": dict(self.counts.copied),
            "there": dict(self.there),
            **self.counts.as_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOptions:
    """How to warm.

    Attributes:
        by_use: Chunks of the most prompts first, prefixes before what follows them; else prompt by prompt.
        max_bytes: Copy no more than that.
        encode: Makes token ids of texts; None takes prompts of ids alone.
    """

    selection: Selection = EVERYTHING
    by_use: bool = False
    max_bytes: int | None = None
    encode: Encode | None = None
    hash_key: bytes = b""
    cipher: RecordCipher | None = None


@dataclass(slots=True)
class _Wanted:
    """A chunk that the source has."""

    chunk: Chunk
    kept: Kept
    namespace: str
    uses: int = 0


async def warm(
    source: Target, targets: Sequence[Target], prompts: Sequence[Prompt], options: WarmOptions, meter: Meter
) -> Warming:
    """Copy what the source has of the prompts' prefixes into each target that lacks it.

    Cancelled, what was copied stays, whole; the same again goes on with what is missing.

    Raises:
        ConfigError: A prompt is text and there is no tokenizer; or the source has no namespace that is meant.
        TierUnavailableError: The source does not answer.
    """
    report = Warming(source.name)
    kept = {one.key: one for one in await source.list()}
    texts = await namespaces_of(source, tuple(kept.values()), options.selection, options.cipher, meter)
    chains = [chain for text in texts if (chain := chain_of(text, options.hash_key)) is not None]
    if not chains:
        raise ConfigError(
            f"{source.name} has no records of a namespace that is meant and whose keys can be made here:"
            " `lmcache-async inspect` tells what it has; keyed and encrypted ones need --config with their keys"
        )
    report.namespaces = len(chains)
    wanted = _wanted(chains, kept, prompts, options, report)
    meter.begin("records", records=len(wanted))
    with contextlib.ExitStack() as undo:
        workers = WorkerPool(VERIFY_THREADS, thread_name_prefix="lmcache-verify")
        undo.callback(workers.shutdown)
        for target in targets:
            await target.begin_saves()
        copier = Copier(source, workers, report.counts, max_bytes=options.max_bytes)

        async def work(one: _Wanted) -> int:
            lacking = []
            for target in targets:
                if (await target.has([one.kept.key]))[0]:
                    report.there[target.name] += 1
                else:
                    lacking.append(target)
            if not lacking:
                return 0
            return await copier.copy(
                one.kept, lacking, functools.partial(_prove, one=one, cipher=options.cipher)
            )

        async with contextlib.aclosing(in_order(each(wanted), work, in_flight=source.in_flight)) as results:
            async for nbytes in results:
                meter.advance(1, nbytes)
        for target in targets:
            await target.sync()
    return report


def _wanted(
    chains: Iterable[Chain],
    kept: dict[ChunkKey, Kept],
    prompts: Sequence[Prompt],
    options: WarmOptions,
    report: Warming,
) -> list[_Wanted]:
    """The chunks to copy, in order."""
    found: dict[ChunkKey, _Wanted] = {}
    chains = tuple(chains)
    for prompt in prompts:
        tokens = _tokens(prompt, options.encode)
        best = 0
        for chain in chains:
            run = prefix_of(chain, tokens, kept)
            best = max(best, sum(len(chunk.tokens) for chunk in run))
            for chunk in run:
                one = found.setdefault(chunk.key, _Wanted(chunk, kept[chunk.key], chain.text))
                one.uses += prompt.times
        report.prompts += 1
        report.tokens += len(tokens)
        report.found_tokens += best
    if not options.by_use:
        return list(found.values())
    # A prefix is used at least as often as what follows it; where as often, its place is before.
    return sorted(found.values(), key=lambda one: (-one.uses, one.chunk.start))


def prefix_of(chain: Chain, tokens: Tokens, kept: dict[ChunkKey, Kept]) -> list[Chunk]:
    """The chunks of the longest prefix that is there."""
    full, partials = chain.chunks(tokens)
    run: list[Chunk] = []
    for chunk in full:
        if chunk.key not in kept:
            return run
        run.append(chunk)
    return run + [chunk for chunk in partials if chunk.key in kept][:1]


def _tokens(prompt: Prompt, encode: Encode | None) -> Tokens:
    if prompt.tokens is not None:
        return prompt.tokens
    if encode is None:
        raise ConfigError("there are prompts of text: name the model's tokenizer with --tokenizer")
    return np.asarray(encode(prompt.text), dtype=np.int32)


def _prove(kept: Kept, pieces: Iterator[memoryview], *, one: _Wanted, cipher: RecordCipher | None) -> Checked:
    """The record, if it is right and, as far as it is not secret, of exactly these tokens."""
    checked = check(kept, pieces, selection=EVERYTHING, cipher=cipher)
    header = checked.header
    if checked.cause or header is None:
        return checked
    same = header.namespace == one.namespace and np.array_equal(header.tokens, one.chunk.tokens)
    return checked if same else Checked(checked.looked, cause="tokens", message="it is of other tokens")
