"""Prefixes of prompts copied from a slower tier into faster ones, each record proven to be of those tokens."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmcache_async.errors import ConfigError, TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.records.chains import Chain, chain_of, namespaces_of
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
        copied: Records by the target that they are new in.
        there: Records that a target had already, by target.
        refused: Records that did not get there, by cause.
        skipped: Records that were left for `max_bytes`.
    """

    source: str
    namespaces: int = 0
    prompts: int = 0
    tokens: int = 0
    found_tokens: int = 0
    copied: Counter[str] = field(default_factory=Counter)
    there: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    skipped: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "namespaces": self.namespaces,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "found_tokens": self.found_tokens,
            "copied": dict(self.copied),
            "there": dict(self.there),
            "bytes": self.bytes,
            "refused": dict(sorted(self.refused.items())),
            "skipped": self.skipped,
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
        workers = WorkerPool(2, thread_name_prefix="lmcache-prove")
        undo.callback(workers.shutdown)
        for target in targets:
            await target.begin_saves()
        copy = functools.partial(_copy, source, targets, options, workers, report)
        async with contextlib.aclosing(in_order(each(wanted), copy, in_flight=source.in_flight)) as results:
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


async def _copy(
    source: Target,
    targets: Sequence[Target],
    options: WarmOptions,
    workers: Executor,
    report: Warming,
    one: _Wanted,
) -> int:
    """Into each target that lacks it; the bytes of the record where it was copied."""
    lacking = []
    for target in targets:
        if (await target.has([one.kept.key]))[0]:
            report.there[target.name] += 1
        else:
            lacking.append(target)
    if not lacking:
        return 0
    if report.skipped:  # what comes behind the limit may continue what was left out
        report.skipped += 1
        return 0
    try:
        buffer = await source.load(one.kept)
    except TierUnavailableError:
        raise
    except TierError:
        report.refused["error"] += 1
        return 0
    if buffer is None:
        report.refused["gone"] += 1
        return 0
    with buffer:
        checked = await in_thread(workers, functools.partial(_prove, one, buffer.view, options.cipher))
        if checked.cause or checked.looked is None:
            report.refused[checked.cause or "gone"] += 1
            return 0
        with _trimmed(buffer, checked.looked.record_bytes) as record:
            if options.max_bytes is not None and report.bytes + record.nbytes > options.max_bytes:
                report.skipped += 1
                return 0
            report.bytes += record.nbytes
            for target in lacking:
                await _save(target, one, record, report)
            return record.nbytes


async def _save(target: Target, one: _Wanted, record: Buffer, report: Warming) -> None:
    memory = await target.allocate(record.nbytes)
    if memory is None:
        report.refused["too_long"] += 1
        return
    with memory:
        memory.view[:] = record.view  # a tier reads from memory that it knows
        try:
            await target.save(one.kept.key, memory, one.kept.stamp)
        except TierUnavailableError:
            raise
        except TierFullError:
            report.refused["full"] += 1
        except TierError:
            report.refused["error"] += 1
        else:
            report.copied[target.name] += 1


def _prove(one: _Wanted, record: memoryview, cipher: RecordCipher | None) -> Checked:
    """The record, if it is right and, as far as it is not secret, of exactly these tokens."""
    checked = check(one.kept, iter([record]), selection=EVERYTHING, cipher=cipher)
    header = checked.header
    if checked.cause or header is None:
        return checked
    same = header.namespace == one.namespace and np.array_equal(header.tokens, one.chunk.tokens)
    return checked if same else Checked(checked.looked, cause="tokens", message="it is of other tokens")


def _trimmed(buffer: Buffer, nbytes: int) -> Buffer:
    """A lease of its own, without what pads the record."""
    record = buffer.retain()
    record.resize(nbytes)
    return record
