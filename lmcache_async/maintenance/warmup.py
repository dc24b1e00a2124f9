"""Copies of prompts' prefixes from a slower tier to faster ones."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lmcache_async.errors import ConfigError, TierError
from lmcache_async.hashing import ChunkHasher, engine_root, hash_key_id
from lmcache_async.maintenance.concurrency import Meter, map_in_order
from lmcache_async.maintenance.copy import VERIFY_THREADS, Copier, CopyCounts
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection, fields_of
from lmcache_async.maintenance.prompts import Encode, Prompt
from lmcache_async.maintenance.record import RecordInfo, check, read_headers, verify_record
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.memory.threads import WorkerPool
from lmcache_async.tiers.offline import OfflineStore, StoredRecord
from lmcache_async.types import Chunk, ChunkKey, Tokens

SAMPLES = 64
"""Number of records read as a whole to find namespaces, if their headers cannot be read alone."""


@dataclass(slots=True)
class Warmup:
    """Result of `warm`.

    Attributes:
        source: Name of the source.
        namespaces: Namespaces in which prompts were looked up.
        prompts: Distinct prompts.
        tokens: Their tokens.
        found_tokens: Of these, tokens of prefixes that the source has, in the namespace with the longest one.
        there: Records that a destination had already, by its name.
        counts: Counts of the records that the destination lacked, by outcome.
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
    """Options of a warmup.

    Attributes:
        selection: Namespaces in which prompts are looked up.
        by_use: Copy chunks in the order of how many prompts contain them, prefixes first; else prompt by
            prompt.
        max_bytes: Maximum bytes to copy.
        encode: Tokenizer; None accepts prompts of token ids only.
        hash_key: Secret of a keyed hash; b"" if there is none.
        cipher: Decrypts encrypted records; None if there is none.
    """

    selection: Selection = EVERYTHING
    by_use: bool = False
    max_bytes: int | None = None
    encode: Encode | None = None
    hash_key: bytes = b""
    cipher: RecordCipher | None = None


@dataclass(frozen=True, slots=True)
class KeyChain:
    """Computes the keys of prompts in one namespace.

    Attributes:
        namespace: Text of the namespace.
        unit: The number of tokens of a partial chunk is a multiple of this.
    """

    namespace: str
    root: bytes
    chunk_size: int
    algorithm: str
    hash_key: bytes
    unit: int

    def prefix(self, tokens: Tokens, stored: Mapping[ChunkKey, StoredRecord]) -> list[Chunk]:
        """Return the chunks of the longest stored prefix, at most one partial chunk at its end."""
        hasher = ChunkHasher(
            self.root, chunk_size=self.chunk_size, algorithm=self.algorithm, hash_key=self.hash_key
        )
        prefix: list[Chunk] = []
        for chunk in hasher.extend(tokens):
            if chunk.key not in stored:
                return prefix
            prefix.append(chunk)
        return prefix + [chunk for chunk in hasher.partials(self.unit) if chunk.key in stored][:1]


@dataclass(slots=True)
class _Wanted:
    """A chunk that the source has."""

    chunk: Chunk
    stored: StoredRecord
    namespace: str
    uses: int = 0


async def warm(
    source: OfflineStore,
    destinations: Sequence[OfflineStore],
    prompts: Sequence[Prompt],
    options: WarmOptions,
    meter: Meter,
) -> Warmup:
    """Copy the prompts' prefixes to each destination that lacks them.

    If cancelled, the records copied so far stay, and the next call copies the rest.

    Raises:
        ConfigError: A prompt is text and there is no tokenizer, or the keys of no selected namespace can be
            computed.
        TierUnavailableError: The source or a destination does not answer.
    """
    report = Warmup(source.name)
    stored = {one.key: one for one in await source.list()}
    namespaces = await _namespaces(source, tuple(stored.values()), options, meter)
    chains = [chain for text in namespaces if (chain := key_chain(text, options.hash_key)) is not None]
    if not chains:
        raise ConfigError(
            f"{source.name} has no records of a selected namespace whose keys can be computed here:"
            " `lmcache-async inspect` shows its namespaces; keyed and encrypted ones need --config with their keys"
        )
    report.namespaces = len(chains)
    wanted = _wanted(chains, stored, prompts, options, report)
    meter.begin("records", records=len(wanted))
    with contextlib.ExitStack() as undo:
        workers = WorkerPool(VERIFY_THREADS, thread_name_prefix="lmcache-verify")
        undo.callback(workers.shutdown)
        for destination in destinations:
            await destination.prepare_writes()
        copier = Copier(source, workers, report.counts, max_bytes=options.max_bytes)

        async def work(one: _Wanted) -> int:
            lacking = []
            for destination in destinations:
                if (await destination.has([one.stored.key]))[0]:
                    report.there[destination.name] += 1
                else:
                    lacking.append(destination)
            if not lacking:
                return 0
            return await copier.copy(
                one.stored, lacking, functools.partial(_check, wanted=one, cipher=options.cipher)
            )

        try:
            async with contextlib.aclosing(map_in_order(wanted, work, in_flight=source.in_flight)) as results:
                async for nbytes in results:
                    meter.advance(1, nbytes)
        finally:
            for destination in destinations:
                await destination.sync()
    return report


def key_chain(namespace: str, hash_key: bytes) -> KeyChain | None:
    """Return the key chain of a namespace; None for invalid parameters or another hash key."""
    fields = fields_of(namespace)
    chunk_size, algorithm, keyed = fields.get("chunk_size"), fields.get("algorithm"), fields.get("hash_key")
    if type(chunk_size) is not int or not isinstance(algorithm, str):
        return None
    if keyed and (not hash_key or hash_key_id(hash_key) != keyed):
        return None
    own = hash_key if keyed else b""
    extra = fields.get("extra", [])
    if not isinstance(extra, list) or not all(map(_is_pair, extra)):
        return None
    try:
        root = engine_root(namespace, algorithm, own)
        ChunkHasher(root, chunk_size=chunk_size, algorithm=algorithm, hash_key=own)
        unit = max(1, int(str(dict(extra).get("block_size", 1))))
    except (ConfigError, ValueError):  # an unknown algorithm, too long a chunk, or not a number
        return None
    return KeyChain(namespace, root, chunk_size, algorithm, own, min(unit, chunk_size))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


async def _namespaces(
    store: OfflineStore, records: Sequence[StoredRecord], options: WarmOptions, meter: Meter
) -> list[str]:
    """Return the texts of the selected namespaces.

    All headers are read if the store can read them without the payload. Otherwise, and for encrypted headers,
    a sample of records is read as a whole.
    """
    found: dict[str, None] = {}
    hidden = list(records)
    if store.reads_headers:
        hidden = []
        async with contextlib.aclosing(read_headers(store, records, meter)) as headers:
            async for info in headers:
                if info is None or isinstance(info, TierError):
                    continue
                if info.header is not None:
                    found[info.header.namespace] = None
                elif info.key_id and options.cipher is not None:
                    hidden.append(info.stored)
    for one in hidden[:: max(1, len(hidden) // SAMPLES)][:SAMPLES]:
        verified = await verify_record(store, one, EVERYTHING, options.cipher)
        if verified is not None and not verified.cause and verified.header is not None:
            found[verified.header.namespace] = None
    return [text for text in found if options.selection.takes(text)]


def _wanted(
    chains: Sequence[KeyChain],
    stored: Mapping[ChunkKey, StoredRecord],
    prompts: Sequence[Prompt],
    options: WarmOptions,
    report: Warmup,
) -> list[_Wanted]:
    """Return the chunks to copy, in order."""
    found: dict[ChunkKey, _Wanted] = {}
    for prompt in prompts:
        tokens = _tokens(prompt, options.encode)
        best = 0
        for chain in chains:
            prefix = chain.prefix(tokens, stored)
            best = max(best, sum(len(chunk.tokens) for chunk in prefix))
            for chunk in prefix:
                one = found.setdefault(chunk.key, _Wanted(chunk, stored[chunk.key], chain.namespace))
                one.uses += prompt.times
        report.prompts += 1
        report.tokens += len(tokens)
        report.found_tokens += best
    if not options.by_use:
        return list(found.values())
    # A prefix is used at least as often as its continuations, and starts before them.
    return sorted(found.values(), key=lambda one: (-one.uses, one.chunk.start))


def _tokens(prompt: Prompt, encode: Encode | None) -> Tokens:
    if prompt.tokens is not None:
        return prompt.tokens
    if encode is None:
        raise ConfigError("there are prompts of text: name the model's tokenizer with --tokenizer")
    return np.asarray(encode(prompt.text), dtype=np.int32)


def _check(
    stored: StoredRecord, pieces: Iterator[memoryview], *, wanted: _Wanted, cipher: RecordCipher | None
) -> RecordInfo:
    """Verify that the record is undamaged and, unless it stays encrypted, of exactly these tokens."""
    found = check(stored, pieces, selection=EVERYTHING, cipher=cipher)
    header = found.header
    if found.cause or header is None:
        return found
    same = header.namespace == wanted.namespace and np.array_equal(header.tokens, wanted.chunk.tokens)
    return found if same else replace(found, cause="tokens", message="it has other tokens")
