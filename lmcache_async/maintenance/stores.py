"""Resolve command-line arguments to an offline store, and offline access through a tier's own methods."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from lmcache_async.config import EngineConfig, TierSpec, load_config
from lmcache_async.config.validation import Origin, validate_options
from lmcache_async.engine.tiers import make_tier
from lmcache_async.errors import (
    BudgetExceededError,
    ChunkCorruptError,
    ConfigError,
    LMCacheAsyncError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.logging import LimitedLogger
from lmcache_async.maintenance.concurrency import for_each, no_progress
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.registry import TIERS, Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.bundled import BundledTier
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.middleware.base import LayerContext
from lmcache_async.tiers.middleware.retry import RetryConfig, RetryLayer
from lmcache_async.tiers.offline import OfflineOptions, OfflineStore, StoredRecord, Visit
from lmcache_async.tiers.results import unwrap
from lmcache_async.types import ChunkKey

T = TypeVar("T")

MAX_RECORD_BYTES = 256 << 20
_ALLOCATE_S = 600.0  # long, because each call that holds memory has its own deadline
_LOOKUPS = 64
"""Number of concurrent lookups."""


@dataclass(frozen=True)
class Stores:
    """Opens the stores that the arguments of a command name."""

    config: Path | None = None
    rank: int | None = None
    in_flight: int = 4
    max_record_bytes: int = MAX_RECORD_BYTES

    @functools.cached_property
    def loaded(self) -> EngineConfig | None:
        """The configuration, which is read on first use."""
        return None if self.config is None else load_config(self.config)

    @property
    def third_party(self) -> bool:
        return self.loaded is None or self.loaded.plugins.third_party

    def open(
        self,
        path: Path | str | None,
        tier: str | None = None,
        *,
        change: bool = False,
        create: bool = False,
        argument: str = "--tier",
    ) -> OfflineStore:
        """Return the store of a directory or a tier, to be opened with `async with`.

        With `change`, a directory is locked. With `change` and `create`, a directory that does not exist is created.
        `argument` names the tier's argument in errors.
        """
        options = OfflineOptions(
            change=change, in_flight=self.in_flight, max_record_bytes=self.max_record_bytes, create=create
        )
        if path is not None and tier is not None:
            raise ConfigError(f"--tier {tier} and the directory {path} exclude each other; name one of them")
        if path is not None:
            return self._open_directory(path, options)
        if tier is None:
            raise ConfigError(
                "name a directory, or a tier with --tier: the id of a tier in --config, or a tier as JSON"
            )
        spec = self.spec(tier, argument)
        made = make_tier(spec, Registry(), third_party=self.third_party, rank=self.rank)
        if (store := made.offline(made.config, options)) is not None:
            return store
        if made.capabilities.in_arena:
            raise ConfigError(
                f"tier {spec.id!r} is memory of the engine's own process: other processes cannot read it"
            )
        list_timeout_s: float | None = spec.timeout_s
        if isinstance(made, BundledTier):
            made.removes_invalid = False  # a record may only be longer than the memory of the command
            list_timeout_s = None  # each request has a deadline, and many may be needed for the next key
        logger = LimitedLogger(logging.getLogger("lmcache_async.maintenance"))
        context = LayerContext(spec.id, "retry", spec.timeout_s, logger)
        handle = TierHandle(
            made,
            name=spec.id,
            logger=logger,
            timeout_s=spec.timeout_s,
            layers=[RetryLayer(RetryConfig(), context)],  # one failed call would end a long run
            open_timeout_s=spec.open_timeout_s,
        )
        return TierStore(handle, options, list_timeout_s=list_timeout_s)

    def _open_directory(self, name: Path | str, options: OfflineOptions) -> OfflineStore:
        """Return the store of the first tier that keeps records in directories, bundled tiers first."""
        path = Path(name)
        if not str(name):  # as a path it would be the working directory
            raise ConfigError("the name of the directory is empty; write the working directory as .")
        if re.match("[a-z0-9+.-]{2,}:/", str(name), re.IGNORECASE) and not path.exists():
            raise ConfigError(
                f"{name} is a URL and not a directory: write a directory as a plain path, and a tier as JSON, such as"
                ' {"name": "valkey", "url": "valkey://host:6379"}'
            )
        registry = Registry()
        plugins = registry.available(TIERS, third_party=self.third_party)
        if str(path) in plugins and not path.exists():
            raise ConfigError(
                f"{path} is the name of a tier, and there is no such directory: name a tier by its id in --config, or as"
                f' JSON, such as {{"name": "valkey", "url": "valkey://host:6379"}}; write a directory of this name as an'
                f" absolute path, {path.absolute()}"
            )
        for plugin in sorted(plugins.values(), key=lambda plugin: (not plugin.bundled, plugin.name)):
            try:
                tier_class = registry.load_class(
                    TIERS, plugin.name, Tier, where=str(path), third_party=self.third_party
                )
            except LMCacheAsyncError:  # a tier that is not installed completely
                continue
            if (config := tier_class.directory_config(path)) is not None:
                store = tier_class.offline(config.for_process(rank=self.rank), options)
                if store is not None:
                    return store
        raise ConfigError(f"{path}: no installed tier keeps records in directories")

    def keys(self) -> tuple[RecordCipher | None, bytes]:
        """Return the cipher and the hash key of the configuration; None and b"" without them."""
        if (config := self.loaded) is None:
            return None, b""
        cipher = RecordCipher(config.encryption.read_keys()) if config.encryption.enabled else None
        return cipher, config.read_hash_key()

    def spec(self, text: str, argument: str) -> TierSpec:
        """Return the tier of an argument: a tier as JSON, or the id of a tier of the configuration."""
        if text.lstrip().startswith("{"):
            try:
                spec = validate_options(TierSpec, json.loads(text), argument, beside=())
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f'{argument}: expected a tier as JSON, such as {{"name": "valkey", ...}}: {error}'
                ) from None
            return spec.placed(Origin(argument))
        if self.loaded is None:
            raise ConfigError(
                f"{argument} {text} is not a tier as JSON, so it is the id of a tier: name the config file with --config"
            )
        for tier in self.loaded.tiers:
            if tier.id == text:
                return tier
        ids = ", ".join(tier.id for tier in self.loaded.tiers)
        advice = (
            f"; a directory is written with a slash, such as ./{text}" if argument in {"SRC", "DST"} else ""
        )
        raise ConfigError(f"{self.config} has no tier {text!r}; its tiers are {ids}{advice}")

    def reachable(self) -> list[str]:
        """Return the ids of the tiers that are not memory of the engine's process, fastest first."""
        if self.loaded is None:
            raise ConfigError("give the engine's config file with --config, or a server with --url")
        made = {
            spec.id: make_tier(spec, Registry(), third_party=self.third_party) for spec in self.loaded.tiers
        }
        return [id for id, tier in made.items() if not tier.capabilities.in_arena]


class TierStore(OfflineStore):
    """The records of a tier that is opened in this process.

    A record is always read as a whole: a tier has no method to read a part of one. `list_timeout_s` limits the wait
    between two keys of a listing, None for no limit; other calls have the deadline of the handle.
    """

    def __init__(self, tier: TierHandle, options: OfflineOptions, *, list_timeout_s: float | None) -> None:
        self.name = f"tier {tier.name!r}"
        self.in_flight = options.in_flight
        self._tier = tier
        self._list_timeout_s = list_timeout_s
        self._max_evictions = 0  # by the writes of a copy
        # Two for each call, because a call past its deadline keeps its buffer until it ends.
        self._arena = options.make_arena(2 * self.in_flight + 2)
        self._workers = WorkerPool(self.in_flight, thread_name_prefix="lmcache-records")

    async def list(self) -> Sequence[StoredRecord]:
        self._require(self._tier.capabilities.lists, "list its records")
        found: list[StoredRecord] = []
        keys = aiter(self._tier.keys())
        while True:
            try:
                async with asyncio.timeout(self._list_timeout_s):
                    found.append(StoredRecord(await anext(keys)))
            except StopAsyncIteration:
                return found
            except TimeoutError as error:
                raise TierUnavailableError(
                    f"{self.name} listed {len(found)} keys, and then did not answer in {self._list_timeout_s} s"
                ) from error

    async def examine(self, record: StoredRecord, visit: Visit[T], *, header_only: bool = False) -> T | None:
        del header_only
        buffer = await self.load(record)
        if buffer is None:
            return None
        with buffer:
            return await in_thread(self._workers, functools.partial(visit, iter([buffer.view])))

    async def load(self, record: StoredRecord) -> Buffer | None:
        try:
            (result,) = await self._tier.get([record.key], self._lease)
            return unwrap(result)
        except (BudgetExceededError, ChunkCorruptError) as error:
            raise TierError(
                f"record {record.key.hex()}: {error}; raise --max-record-bytes if records are longer"
            ) from error

    async def allocate(self, nbytes: int) -> Buffer | None:
        return await self._lease(nbytes) if nbytes <= self._arena.slab_bytes else None

    async def has(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        there: dict[ChunkKey, bool] = {}

        async def look_up(key: ChunkKey) -> int:
            # A tier with an eviction order takes the keys of one lookup for consecutive chunks of a prompt.
            (there[key],) = await self._tier.lookup([key], exact=True)
            return 0

        await for_each("lookups", keys, look_up, no_progress, in_flight=_LOOKUPS)
        held = self._tier.statistics()
        # Other records may be evicted for those of a copy, but not the records of the copy itself.
        self._max_evictions = held.evictions + max(0, held.chunks - sum(there.values()))
        return [there[key] for key in keys]

    async def prepare_writes(self) -> None:
        self._require(self._tier.capabilities.writes, "be written to: it is read-only")

    async def write(self, key: ChunkKey, record: Buffer, used_ns: int) -> None:
        del used_ns  # a tier has its own order of use
        if self._tier.statistics().evictions > self._max_evictions:
            raise TierFullError(f"{self.name} evicts copied records to make room for others")
        (error,) = await self._tier.put([(key, record)])
        if error is not None:
            raise error

    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        self._require(self._tier.capabilities.removes, "delete records")
        for key in keys:
            await self._tier.remove(key)

    async def quarantine(self, key: ChunkKey, cause: str) -> None:
        self._require(self._tier.capabilities.removes, "delete records")
        await self._tier.reject(key, cause)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as opened:
            opened.callback(self._arena.close)
            opened.callback(self._workers.shutdown)
            self._tier.bind(self._arena)
            await opened.enter_async_context(self._tier)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._opened.aclose()

    async def _lease(self, nbytes: int) -> Buffer:
        return await self._arena.lease(nbytes, timeout_s=_ALLOCATE_S)

    def _require(self, able: bool, what: str) -> None:
        if not able:
            raise ConfigError(f"{self.name} cannot {what}")
