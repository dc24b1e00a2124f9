"""Chunk keys of one request, and the identity of everything besides token ids that they depend on.

`RequestKeys` is written by the lookup client's thread, or by the scheduler's thread in `LookupClient.peek` before the
client has it, and read by the scheduler's thread. Both threads write `requested`. The readers see
immutable bytes that are replaced by longer ones, and `num_hashed` is written after the bytes that it counts.
Reading up to `num_hashed` therefore needs no lock, and a slice is one copy.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_async.config.values import expand_home
from lmcache_async.hashing import (
    CRYPTOGRAPHIC,
    ChunkHasher,
    Extra,
    FingerprintMode,
    boundary_root,
    group_keys,
    packed_keys,
    partial_candidates,
    weights_fingerprint,
)
from lmcache_async.integration.vllm.groups import KVGroup
from lmcache_async.integration.vllm.lookup_server import Identity
from lmcache_async.logging import LimitedLogger
from lmcache_async.types import KEY_BYTES, Chunk, Tokens

logger = LimitedLogger(logging.getLogger(__name__))

PIECE_TOKENS = 8192
"""Tokens hashed without a pause, about 200 µs. Other threads can take the GIL between pieces."""

_TOKEN_BYTES = 4

PROMISE_FIELD = "lmcache_async"
"""Our key in vLLM's `kv_transfer_params`, in the producer's answer and in the consumer's request."""

_PROMISE_VERSION = 1
_MAX_PROMISED_TOKENS = 1 << 31
_PROMISE_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as vLLM names it. `load_id` changes when it is unloaded and loaded again."""

    name: str
    path: str
    reloaded_in_place: bool = False
    load_id: int = 0


@dataclass(frozen=True, slots=True)
class Tail:
    """The whole blocks after the last full chunk of a prompt, as one partial chunk; one key per rank."""

    start: int
    num_tokens: int
    keys: tuple[bytes, ...]
    text: str


@dataclass(slots=True, eq=False)
class RequestKeys:
    """The chained chunk keys of one request, for each rank.

    Attributes:
        source: Token ids of the request. vLLM appends to it.
        reset: Random name of the last cache reset that changed the namespace; "" if there was none.
        requested: Number of tokens that the scheduler's thread asked to be hashed.
        num_hashed: Number of tokens whose full chunks have keys.
        keys: Per rank, the keys of the full chunks, 16 bytes each.
        tokens: The hashed token ids, int32.
        texts: Extra text of the full chunks that have one, by chunk index.
        tail: The partial end of the prompt, once the prompt is hashed; None if it has no whole block.
        failed: The tokens cannot be hashed; the request has no keys.
        adapter_changed: The adapter had other weights before, and vLLM's own prefix cache may still have KV of these.
    """

    request_id: str
    source: Sequence[int]
    num_prompt_tokens: int
    adapter: Adapter | None = None
    cache_salt: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    extras: tuple[Extra, ...] = ()
    reset: str = ""
    requested: int = 0
    num_hashed: int = 0
    keys: tuple[bytes, ...] = ()
    tokens: bytes = b""
    texts: dict[int, str] = field(default_factory=dict)
    tail: Tail | None = None
    request_namespace: str = ""
    failed: bool = False
    adapter_changed: bool = False
    _identity: Identity | None = None
    _hash_key: bytes = field(default=b"", repr=False)
    _roots: tuple[bytes, ...] = ()
    _group_roots: tuple[tuple[bytes, ...], ...] = ()
    _hashers: dict[bytes, ChunkHasher] = field(default_factory=dict)

    def after_reset(self, reset: str) -> RequestKeys:
        """The keys of the same request in the namespace of another reset, not hashed yet."""
        return RequestKeys(
            self.request_id,
            self.source,
            self.num_prompt_tokens,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
            tags=self.tags,
            extras=self.extras,
            reset=reset,
        )

    def key(self, rank: int, chunk: int) -> bytes:
        return self.keys[rank][chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]

    def packed_keys(self, first: int, stop: int) -> tuple[bytes, ...]:
        return tuple(keys[first * KEY_BYTES : stop * KEY_BYTES] for keys in self.keys)

    def texts_of(self, first: int, stop: int) -> dict[int, str]:
        """Extra texts of the full chunks first..stop, by index from `first`."""
        if not self.texts:
            return {}
        texts = dict(self.texts)  # a copy, because the client's thread may add to it
        return {chunk - first: text for chunk, text in texts.items() if first <= chunk < stop}

    @property
    def event_lora_name(self) -> str | None:
        """The adapter's name for KV events, "" without one; None if token ids do not identify the chunks."""
        if self.cache_salt or self.tags or self.extras:
            return None
        return self.adapter.name if self.adapter is not None else ""

    def packed_tokens(self, start: int, stop: int) -> bytes:
        return self.tokens[start * _TOKEN_BYTES : stop * _TOKEN_BYTES]

    def boundary_keys(self, group: KVGroup, boundary: int, before: Sequence[bytes] = ()) -> tuple[bytes, ...]:
        """Return, per rank, the keys of the chunks that a group needs to continue after `boundary` hashed tokens.

        The chunks begin at token `group.first_needed(boundary)`. Their keys, 16 bytes each, have their own root. `before` is
        `keys_before(boundary)`, which is the same for all groups.
        """
        identity, secret = self.identity, self._hash_key
        tokens = self.packed_tokens(group.first_needed(boundary), boundary)
        packed = []
        for rank, key in enumerate(before or self.keys_before(boundary)):
            own = self._group_roots[rank][group.index]
            root = boundary_root(own, key, identity.algorithm, secret)
            keys = packed_keys(
                root,
                tokens,
                chunk_size=identity.chunk_size,
                algorithm=identity.algorithm,
                hash_key=secret,
            )
            packed.append(keys)
        return tuple(packed)

    def chunk_keys(self, group: KVGroup, leading: Sequence[bytes]) -> tuple[bytes, ...]:
        """Per rank, the keys of chunks in a group of full attention, from their keys in the leading group."""
        pairs = [(roots[group.index], keys) for roots, keys in zip(self._group_roots, leading, strict=True)]
        made: dict[tuple[bytes, bytes], bytes] = {}  # ranks with equal roots have equal keys
        for own, packed in set(pairs):
            keys = (packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
            made[own, packed] = b"".join(group_keys(own, keys, self.identity.algorithm, self._hash_key))
        return tuple(made[pair] for pair in pairs)

    def keys_before(self, boundary: int) -> Sequence[bytes]:
        """Return, per rank, the key of the full or partial chunk that ends after `boundary` tokens, which must be hashed."""
        chunk_size = self.identity.chunk_size
        if known := self.keys_at(boundary, chunk_size):
            return known
        chunk, unit = divmod(boundary, chunk_size)
        return [candidates[0].key for candidates in self._partials(chunk, unit, boundary)]

    def keys_at(self, num_tokens: int, chunk_size: int) -> tuple[bytes, ...]:
        """Per rank, the key of the chunk that ends after `num_tokens` tokens; empty if there is none yet."""
        full, rest = divmod(num_tokens, chunk_size)
        if not 0 < num_tokens <= self.num_hashed:
            return ()
        if not rest:
            return tuple(self.key(rank, full - 1) for rank in range(len(self.keys)))
        ends = self.tail is not None and self.tail.start + self.tail.num_tokens == num_tokens
        return self.tail.keys if self.tail is not None and ends else ()

    def digests(self, num_tokens: int, chunk_size: int) -> tuple[str, str] | None:
        """Digests of the namespace and of the first `num_tokens` tokens, for another process to compare.

        None if no chunk ends there, or if it is not hashed yet.
        """
        keys = self.keys_at(num_tokens, chunk_size)
        return (_digest(self._roots), _digest(keys)) if keys else None

    # The methods below run on the lookup client's thread, or in `LookupClient.peek` before that thread has the keys.

    @property
    def identity(self) -> Identity:
        """Identity of the first rank. The ranks differ only in their roots."""
        if self._identity is None:
            raise RuntimeError(f"the keys of request {self.request_id} were never opened")
        return self._identity

    @property
    def opened(self) -> bool:
        return self._identity is not None

    def open(
        self,
        roots: Sequence[bytes],
        identity: Identity,
        request_namespace: str,
        hash_key: bytes = b"",
        group_roots: Sequence[Sequence[bytes]] = (),
    ) -> None:
        """Start hashing. Ranks with equal roots are hashed once.

        Args:
            roots: The root of each rank for this request.
            request_namespace: Label of the request's namespace, stored in records.
            group_roots: Per rank, the roots of the namespaces of the KV groups.
        """
        self._identity = identity
        self._group_roots = tuple(map(tuple, group_roots))
        self._hash_key = hash_key
        self._roots = tuple(roots)
        self._hashers = {
            root: ChunkHasher(
                root,
                chunk_size=identity.chunk_size,
                algorithm=identity.algorithm,
                hash_key=hash_key,
                extras=self.extras,
            )
            for root in roots
        }
        self.request_namespace = request_namespace
        self.keys = (b"",) * len(roots)

    def extend(self, num_tokens: int, pause: Callable[[], None]) -> None:
        """Hash up to `num_tokens` tokens, calling `pause` between pieces of `PIECE_TOKENS`.

        Raises:
            ValueError: A value is not a token id.
        """
        while self.num_hashed < num_tokens:
            start = self.num_hashed
            stop = min(num_tokens, start + PIECE_TOKENS)
            if start < self.num_prompt_tokens:
                stop = min(stop, self.num_prompt_tokens)
            piece = np.frombuffer(array("i", self.source[start:stop]), np.int32)
            self.tokens += piece.tobytes()
            new = {root: self._new_keys(hasher, piece) for root, hasher in self._hashers.items()}
            if any(new.values()):
                self.keys = tuple(keys + new[root] for keys, root in zip(self.keys, self._roots, strict=True))
            if stop == self.num_prompt_tokens:
                self.tail = self._prompt_tail()
            self.num_hashed = stop
            if stop < num_tokens:
                pause()

    def end_candidates(self) -> list[list[Chunk]]:
        """Per rank, the partial chunks that can follow the last full chunk, longest first."""
        unit = self.identity.block_size
        made = {root: hasher.partials(unit) for root, hasher in self._hashers.items()}
        return [made[root] for root in self._roots]

    def hole_candidates(self, chunk: int) -> list[list[Chunk]]:
        """Per rank, the partial chunks that may be stored in place of the full chunk with index `chunk`."""
        return self._partials(chunk, self.identity.block_size, (chunk + 1) * self.identity.chunk_size)

    def _partials(self, chunk: int, unit: int, stop: int) -> list[list[Chunk]]:
        """Per rank, the partial chunks of multiples of `unit` tokens up to `stop`, in place of a full chunk."""
        identity = self.identity
        start = chunk * identity.chunk_size
        tokens: Tokens = np.frombuffer(self.packed_tokens(start, stop), np.int32)
        made = {
            root: partial_candidates(
                self.key(self._roots.index(root), chunk - 1) if chunk else root,
                tokens,
                start=start,
                unit=unit,
                chunk_size=identity.chunk_size,
                algorithm=identity.algorithm,
                hash_key=self._hash_key,
                extras=self.extras,
            )
            for root in self._hashers  # ranks with equal roots have equal keys
        }
        return [made[root] for root in self._roots]

    def _new_keys(self, hasher: ChunkHasher, piece: Tokens) -> bytes:
        if not self.extras:
            return b"".join(hasher.extend_keys(piece))
        size, chunks = self.identity.chunk_size, hasher.extend(piece)
        self.texts.update({chunk.start // size: chunk.extra for chunk in chunks if chunk.extra})
        return b"".join(chunk.key for chunk in chunks)

    def _prompt_tail(self) -> Tail | None:
        candidates = self.end_candidates()
        if not candidates[0]:
            return None
        longest = candidates[0][0]
        return Tail(longest.start, len(longest.tokens), tuple(c[0].key for c in candidates), longest.extra)


def _digest(keys: Sequence[bytes]) -> str:
    """A digest that does not reveal the keys."""
    return hashlib.sha256(b"lmcache-async/handover/1:" + b"".join(keys)).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Promise:
    """Statement of a producer that a shared tier has, or will have shortly, leading tokens of a request.

    A promise travels through clients and proxies. It contains no secret, and the receiver checks every field.

    Attributes:
        request_id: The producer's id of the request, for log lines.
        tokens: Number of promised tokens.
        namespace: Digest that distinguishes models, adapters and tenants.
        end: Digest that distinguishes prompts.
        wait_s: Seconds after which missing tokens will not be stored any more.
    """

    request_id: str
    tokens: int
    namespace: str
    end: str
    wait_s: float

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Promise | None:
        """The promise in `kv_transfer_params`; None if there is none, or if it is malformed."""
        match params.get(PROMISE_FIELD):
            case None:
                return None
            case {
                "version": 1,
                "request_id": str(request_id),
                "tokens": int(tokens),
                "namespace": str(namespace),
                "end": str(end),
                "wait_s": int() | float() as wait_s,
            } if (
                0 < tokens < _MAX_PROMISED_TOKENS
                and _PROMISE_DIGEST.fullmatch(namespace)
                and _PROMISE_DIGEST.fullmatch(end)
                and 0 <= wait_s <= sys.float_info.max
            ):
                return cls(request_id[:64], tokens, namespace, end, float(wait_s))
        logger.report(
            "no promise", "kv_transfer_params: the value of %s is malformed; it is ignored", PROMISE_FIELD
        )
        return None

    def params(self) -> dict[str, Any]:
        """The promise as `kv_transfer_params`."""
        return {PROMISE_FIELD: {"version": _PROMISE_VERSION, **asdict(self)}}

    def mismatch(self, keys: RequestKeys, chunk_size: int) -> str:
        """Return the reason why the promise is not for the request with these hashed keys; "" if it may be."""
        if self.tokens > keys.num_prompt_tokens:
            return f"it is for {self.tokens} tokens, but the prompt has only {keys.num_prompt_tokens}"
        digests = keys.digests(self.tokens, chunk_size)
        if digests is None:
            return f"no chunk of this request ends after {self.tokens} tokens"
        if digests[0] != self.namespace:
            return "it is for another model, configuration, adapter or tenant"
        return "" if digests[1] == self.end else "it is for another prompt"


class AdapterFingerprints:
    """Computes fingerprints of LoRA adapters from their files. Do not use it on the scheduler's thread.

    The same adapter has the same fingerprint on all machines, and a changed adapter has another one. A cryptographic hash
    algorithm is configured if hostile tenants may provide adapters. Every byte of the files is then hashed.
    """

    def __init__(self, algorithm: str = "xxh3_128") -> None:
        self._algorithm = algorithm
        self._mode: FingerprintMode = "full" if algorithm in CRYPTOGRAPHIC else "sampled"
        self._known: dict[Adapter, str] = {}
        # By name and path, which identify an adapter in vLLM's own prefix cache.
        self._first: dict[tuple[str, str], str] = {}
        self._changed: set[tuple[str, str]] = set()

    def of(self, adapter: Adapter) -> str:
        """Return the fingerprint of the adapter's files. If they cannot be read, return a random value."""
        known = self._known.get(adapter)
        if known is None:
            known = self._read(adapter)
            if not adapter.reloaded_in_place:  # else the next request may see other weights under this name
                self._known[adapter] = known
            place = adapter.name, adapter.path
            if self._first.setdefault(place, known) != known:
                self._changed.add(place)
        return known

    def changed(self, adapter: Adapter) -> bool:
        """Return whether `of` has returned different fingerprints for adapters of this name and path."""
        return (adapter.name, adapter.path) in self._changed

    def _read(self, adapter: Adapter) -> str:
        try:
            return weights_fingerprint(local_path(adapter.path), mode=self._mode, algorithm=self._algorithm)
        except (OSError, ValueError) as error:
            logger.report(
                adapter.path,
                "adapter %s: the weights in %s cannot be read (%s); its cached KV is used by this process only",
                adapter.name,
                adapter.path,
                error,
            )
            return f"unknown:{uuid.uuid4().hex}"


def local_path(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """Directory of a model or an adapter: a path, or a name on the hub that was downloaded before.

    Args:
        name: The path or the name.
        revision: Branch, tag or commit on the hub; None for the default branch.
        cache: Directory of downloads; None for that of huggingface_hub.

    Raises:
        OSError: The files are not on this machine (or ValueError).
    """
    path = expand_home(name)
    if path.exists() or path.is_absolute():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))


# An adapter's name and a colon may precede either: vLLM's `InputProcessor._get_mm_identifier`.
_COUNTER = re.compile(r"(?:.*:)?renderer\d+-mm-\d+-.*-\d+", re.DOTALL)  # `BaseRenderer._process_mm_uuids`
_DIGEST = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)  # `MultiModalHasher.hash_kwargs`


@dataclass(frozen=True, slots=True)
class MediaIdentity:
    """Distinguishes content identifiers of images, audio and video from numbers that vLLM counts up.

    vLLM identifies a media item by a hash of its content, or by the `uuid` that the client sent with it. With
    prefix caching off and `mm_processor_cache_gb=0` it counts instead of hashing. The count starts again in
    each process, so the same identifier can name different images. `hashed` is whether vLLM hashes content.
    """

    hashed: bool = True

    @classmethod
    def of(cls, vllm_config: Any) -> MediaIdentity:
        media = vllm_config.model_config.multimodal_config
        caches = vllm_config.cache_config.enable_prefix_caching
        return cls(hashed=media is None or caches or media.mm_processor_cache_gb > 0)

    def all_by_content(self, features: list[Any]) -> bool:
        """Whether every item of a request's `mm_features` is identified by its content. The cause is logged if not."""
        if all(self.is_content(feature.identifier) for feature in features):
            return True
        logger.report(
            "counted media",
            "requests with images, audio or video are not cached: with prefix caching off and "
            "mm_processor_cache_gb=0 vLLM counts them instead of hashing them. Start vLLM with "
            "--enable-prefix-caching or with --mm-processor-cache-gb above 0, or send a uuid with each item "
            "(other than a bare hexadecimal hash)",
        )
        return False

    def is_content(self, identifier: str) -> bool:
        """Whether the identifier always names the same content.

        If vLLM does not hash content, it still hashes its count together with the request's
        `mm_processor_kwargs`. Such a hash cannot be distinguished from a client's `uuid`, so neither is accepted.
        """
        if not identifier or _COUNTER.fullmatch(identifier):
            return False
        return self.hashed or not _DIGEST.fullmatch(identifier)
