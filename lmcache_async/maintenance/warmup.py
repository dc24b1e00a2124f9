"""Copy the prefixes of prompts from a slower tier to faster ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from lmcache_async.errors import ConfigError
from lmcache_async.hashing import ChunkHasher, engine_root, hash_key_id
from lmcache_async.maintenance.concurrency import Progress, no_progress
from lmcache_async.maintenance.copy import CopyCounts, RecordCopier
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection, fields_of
from lmcache_async.maintenance.prompts import Encode, Prompt
from lmcache_async.maintenance.record import RecordInfo, check, examine, read_headers
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.tiers.offline import OfflineStore, StoredRecord
from lmcache_async.types import Chunk, ChunkKey, Tokens

SAMPLES = 64
"""Number of records read as a whole to find namespaces, if their headers cannot be read alone."""


@dataclass(kw_only=True)
class Warmup(CopyCounts):
    """Result of `warm`."""

    namespaces: int = 0
    prompts: int = 0
    tokens: int = 0
    found_tokens: int = 0  # of prefixes that the source has, in the namespace with the longest one
    copied: Counter[str] = field(default_factory=Counter)
    there: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class KeyChain:
    """Computes the keys of prompts in one namespace. Partial chunks have a multiple of `unit` tokens."""

    namespace: str
    hasher: Callable[[], ChunkHasher]
    unit: int

    def prefix(self, tokens: Tokens, stored: Mapping[ChunkKey, StoredRecord]) -> list[Chunk]:
        """Return the chunks of the longest stored prefix, with at most one partial chunk at its end."""
        hasher = self.hasher()
        prefix: list[Chunk] = []
        for chunk in hasher.extend(tokens):
            if chunk.key not in stored:
                return prefix
            prefix.append(chunk)
        return prefix + [chunk for chunk in hasher.partials(self.unit) if chunk.key in stored][:1]


async def warm(
    source: OfflineStore,
    destinations: Sequence[OfflineStore],
    prompts: Sequence[tuple[Prompt, int]],
    progress: Progress = no_progress,
    *,
    selection: Selection = EVERYTHING,
    by_use: bool = False,
    max_bytes: int | None = None,
    encode: Encode | None = None,
    hash_key: bytes = b"",
    cipher: RecordCipher | None = None,
) -> Warmup:
    """Copy the prompts' prefixes to each destination that lacks them.

    If cancelled, the records copied so far stay, and the next call copies the rest.

    With `by_use`, the chunks that most prompts contain are copied first, and prefixes before suffixes; else prompt
    by prompt. `hash_key` and `cipher` are those of the config, for namespaces with a keyed hash and encrypted records.
    """
    stored = {one.key: one for one in await source.list()}
    namespaces = await _namespaces(source, tuple(stored.values()), cipher, progress)
    chains = [
        chain
        for text in namespaces
        if selection.takes(text) and (chain := key_chain(text, hash_key)) is not None
    ]
    if not chains:
        raise ConfigError(
            f"{source.name} has no records of a selected namespace whose keys can be computed here:"
            " `lmcache-async inspect` shows its namespaces; keyed and encrypted ones need --config with their keys"
        )
    report = Warmup(source=source.name, namespaces=len(chains))
    wanted: dict[ChunkKey, tuple[Chunk, str]] = {}  # chunk and namespace by key, in the order of the prompts
    uses = Counter[ChunkKey]()
    for prompt, times in prompts:
        tokens = _tokens(prompt, encode)
        report.prompts += 1
        report.tokens += len(tokens)
        longest = 0
        for chain in chains:
            prefix = chain.prefix(tokens, stored)
            longest = max(longest, sum(len(chunk.tokens) for chunk in prefix))
            for chunk in prefix:
                wanted.setdefault(chunk.key, (chunk, chain.namespace))
                uses[chunk.key] += times
        report.found_tokens += longest
    # A prefix is used at least as often as its continuations, and starts before them.
    keys = sorted(wanted, key=lambda key: (-uses[key], wanted[key][0].start)) if by_use else wanted
    verify = partial(_check, wanted=wanted, cipher=cipher)
    copier = RecordCopier(source=source, counts=report, verify=verify, max_bytes=max_bytes)
    await copier.run([stored[key] for key in keys], destinations, progress)
    report.copied, report.there = +copier.copied, +copier.there
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
    try:
        root = engine_root(namespace, algorithm, own)
        hasher = partial(ChunkHasher, root, chunk_size=chunk_size, algorithm=algorithm, hash_key=own)
        hasher()
        unit = max(1, int(str(dict(fields.get("extra", [])).get("block_size", 1))))
    except (ConfigError, TypeError, ValueError):  # an unknown algorithm, too long a chunk, or invalid pairs
        return None
    return KeyChain(namespace, hasher, min(unit, chunk_size))


async def _namespaces(
    store: OfflineStore, records: Sequence[StoredRecord], cipher: RecordCipher | None, progress: Progress
) -> list[str]:
    """Return the texts of the namespaces.

    All headers are read if the store can read them without the payload. Otherwise, and for encrypted headers,
    a sample of records is read as a whole.
    """
    found: dict[str, None] = {}
    hidden: list[StoredRecord] = []

    def add(info: RecordInfo) -> None:
        if info.header is not None and not info.cause:
            found[info.header.namespace] = None
        elif info.key_id and cipher is not None:
            hidden.append(info.stored)

    if store.reads_headers:
        await read_headers(store, records, add, progress)
    else:
        hidden += records
    for one in hidden[:: max(1, len(hidden) // SAMPLES)][:SAMPLES]:
        add(await examine(store, one, cipher=cipher))
    return list(found)


def _tokens(prompt: Prompt, encode: Encode | None) -> Tokens:
    if isinstance(prompt, bytes):
        return np.frombuffer(prompt, dtype=np.int32)
    if encode is None:
        raise ConfigError("there are prompts of text: name the model's tokenizer with --tokenizer")
    return np.asarray(encode(prompt), dtype=np.int32)


def _check(
    stored: StoredRecord,
    pieces: Iterator[memoryview],
    *,
    wanted: Mapping[ChunkKey, tuple[Chunk, str]],
    cipher: RecordCipher | None,
) -> RecordInfo:
    """Verify the record and, unless it stays encrypted, that it has the tokens and the namespace of its chunk."""
    found = check(stored, pieces, cipher=cipher)
    header, (chunk, namespace) = found.header, wanted[stored.key]
    if found.cause or header is None:
        return found
    same = header.namespace == namespace and np.array_equal(header.tokens, chunk.tokens)
    return found if same else replace(found, cause="tokens", message="it has other tokens")
