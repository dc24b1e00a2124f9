"""Construction of an engine's parts from its configuration: memory, copier, tiers, cipher and chains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from lmcache_async.config import EngineConfig
from lmcache_async.device import open_copiers
from lmcache_async.device.copier import Copier
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.tiers import stacked_tiers
from lmcache_async.errors import BudgetExceededError, ConfigError
from lmcache_async.hashing import Namespace, hash_key_id
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.budget import ByteBudget
from lmcache_async.memory.encryption import ENVELOPE_BYTES, RecordCipher
from lmcache_async.memory.record import RecordFormat
from lmcache_async.memory.threads import WorkerPool, reserve_descriptors
from lmcache_async.metrics.metrics import EngineMetrics
from lmcache_async.pipeline.batch import Batch, RetrieveRequest, StoreRequest
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.report import BatchStored, Drops
from lmcache_async.pipeline.runner import Runner
from lmcache_async.pipeline.stage import build_stage
from lmcache_async.registry import STAGES, Registry
from lmcache_async.tiers.handle import Watcher
from lmcache_async.tiers.stack import TierStack
from lmcache_async.types import RetrieveReport

logger = logging.getLogger(__name__)

ChainName: TypeAlias = Literal["store", "retrieve"]

CHAIN_ENDS: dict[ChainName, tuple[type, type]] = {
    "store": (StoreRequest, BatchStored),
    "retrieve": (RetrieveRequest, RetrieveReport),
}
"""Input and result type of each chain."""

PRIORITIES = {"low": 0, "high": -1}
"""Priorities of CUDA streams. The streams of the model have 0."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """A KV cache group: layers of the model that share a block table.

    Attributes:
        layout: Layout of the paged cache of these layers.
        namespace: Everything besides tokens that their KV depends on. No two groups of an engine have the same.
    """

    layout: KVLayout
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The parts of an engine that exist once per KV cache group. `prefetch` is `retrieve` without its last stage."""

    copier: Copier
    store: Runner[BatchStored]
    retrieve: Runner[RetrieveReport]
    prefetch: Runner[Any]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine. Lookups may pin `max_pinned` slabs of the arena. `free` releases threads and memory."""

    arena: Arena
    stack: TierStack
    groups: tuple[GroupParts, ...]
    max_pinned: int
    free: Callable[[], None]


def build(
    config: EngineConfig,
    groups: Sequence[EngineGroup],
    logger: LimitedLogger,
    registry: Registry,
    watcher: Watcher | None,
    *,
    memory_watcher: Watcher | None,
    replica: int,
) -> EngineParts:
    """Build the parts. The arena and the copiers are allocated; the tiers are not opened yet.

    Raises:
        ConfigError: A name or an option is wrong.
        ChainError: The stages of a chain do not fit together.
        ValueError: Two groups have the same namespace.
    """
    _check_groups(config, groups)
    cipher = _open_cipher(config)
    try:
        formats = [
            RecordFormat(
                namespace=group.namespace.text,
                layout=group.layout.text,
                dtype=group.layout.dtype,
                chunk_size=config.chunk_size,
                reserved_bytes=ENVELOPE_BYTES if cipher else 0,
            )
            for group in groups
        ]
    except ValueError as error:
        # The header of a record, which has the token ids of a chunk, would be too long.
        raise ConfigError(f"chunk_size: {error}") from error
    record_bytes = max(
        record_format.record_bytes(
            group.layout.payload_bytes(config.chunk_size // group.layout.tokens_per_row)
        )
        for record_format, group in zip(formats, groups, strict=True)
    )
    device = groups[0].layout.device  # all groups are on one device
    metrics = EngineMetrics()
    tiers = stacked_tiers(
        registry,
        config,
        groups[0].namespace,
        logger,
        watcher,
        memory_watcher=memory_watcher,
        metrics=metrics,
        chunk_bytes=record_bytes,
        replica=replica,
    )
    stack = TierStack(
        tiers,
        write_timeout_s=config.store.allocate_timeout_s,
        encrypted=cipher is not None,
        metrics=metrics,
        logger=logger,
    )
    reserve_descriptors()
    with contextlib.ExitStack() as undo:
        arena = Arena(
            config.arena.max_bytes,
            record_bytes,
            pin=device.type == "cuda",
            pin_device=device.index,
            huge_pages=config.arena.huge_pages,
            prefault=config.arena.prefault,
        )
        undo.callback(arena.close)
        copiers = open_copiers(
            [group.layout for group in groups],
            threads=config.copy_threads,
            huge_pages=config.arena.huge_pages,
            staging_bytes=config.gpu.staging_bytes,
            store_priority=PRIORITIES[config.gpu.store_priority],
            load_priority=PRIORITIES[config.gpu.load_priority],
        )
        for copier in copiers:
            undo.callback(copier.close)
        workers = WorkerPool(config.copy_threads, thread_name_prefix="lmcache-async-work")
        undo.callback(workers.shutdown)  # its calls do not wait for I/O, so the running ones end soon
        max_pinned = int(arena.num_slabs * config.vllm.max_pinned_fraction)
        runners = _RunnerMaker(config, registry, arena, stack, max_pinned)
        built = []
        for record_format, group, copier in zip(formats, groups, copiers, strict=True):
            # Resources that the constructor of a stage can request by parameter name.
            resources: dict[str, Any] = {
                "arena": arena,
                "cipher": cipher,
                "config": config,
                "copier": copier,
                "layout": group.layout,
                "logger": logger,
                "namespace": group.namespace,
                "record_format": record_format,
                "stack": stack,
                "workers": workers,
            }
            built.append(GroupParts(copier, runners.store(resources), *runners.retrieve(resources)))
        return EngineParts(arena, stack, tuple(built), max_pinned, undo.pop_all().close)


def _check_groups(config: EngineConfig, groups: Sequence[EngineGroup]) -> None:
    namespaces = [group.namespace.text for group in groups]
    for index, group in enumerate(groups):
        if (first := namespaces.index(namespaces[index])) < index:
            raise ValueError(
                f"group {index} has the namespace of group {first}: their chunks would have the same keys"
            )
        unit = group.layout.tokens_per_row
        if config.chunk_size % unit:
            raise ConfigError(
                f"chunk_size is {config.chunk_size}; expected a multiple of the {unit} tokens of a"
                f" block, such as {-(-config.chunk_size // unit) * unit}"
            )
        if config.read_hash_key() != group.namespace.hash_key:  # the keys of its chunks would not be secret
            found = hash_key_id(group.namespace.hash_key) or "none"
            raise ConfigError(
                f"hash_key: the hash key of the namespace ({found}) is not the configured one: create the namespace with"
                " hash_key=config.read_hash_key()"
            )


def default_logger() -> LimitedLogger:
    return LimitedLogger(logging.getLogger("lmcache_async"))


def _open_cipher(config: EngineConfig) -> RecordCipher | None:
    if not config.encryption.enabled:
        return None
    cipher = RecordCipher(config.encryption.read_keys())
    if not config.read_hash_key():
        logger.warning(
            "encryption is enabled (key %s), but the names of records are hashes without a secret key: anyone who can"
            " list them can confirm a guess of a whole prompt; set hash_key_file and hash_algorithm",
            cipher.key_id,
        )
    return cipher


def chain_stages(config: EngineConfig, chain: ChainName) -> tuple[str, ...]:
    """The stages of a chain, with `encrypt` or `decrypt` if encryption is enabled."""
    if chain == "store":
        stages, stage, before = config.store.stages, "encrypt", "write"
    else:
        stages, stage, before = config.retrieve.stages, "decrypt", "verify"
    if not config.encryption.enabled or stage in stages:
        return stages
    if before not in stages:
        raise ConfigError(
            f"{chain}.stages: encryption is enabled, but the stages contain neither {stage!r} nor {before!r}"
        )
    place = stages.index(before)
    return (*stages[:place], stage, *stages[place:])


class _RunnerMaker:
    """Makes the runners of the KV cache groups. They share two budgets of bytes in flight.

    Half of the arena is reserved for the queues of slower tiers. Retrieved batches in flight hold their leases while
    they wait for earlier batches. All of them together fit in the arena next to all pinned slabs, so that a later
    batch never holds memory that an earlier one needs.
    """

    def __init__(
        self, config: EngineConfig, registry: Registry, arena: Arena, stack: TierStack, max_pinned: int
    ) -> None:
        self._config = config
        self._registry = registry
        self._arena = arena
        self._stack = stack
        slab, half = arena.slab_bytes, arena.num_slabs * arena.slab_bytes // 2
        unpinned = max(1, arena.num_slabs - max_pinned) * slab
        self._store_budget = ByteBudget(max(slab, min(config.store.max_in_flight_bytes, half)))
        self._retrieve_budget = ByteBudget(max(slab, min(config.retrieve.max_in_flight_bytes, unpinned)))
        # A batch of a store has at most a quarter of the arena, so that one batch is copied while another one is
        # written. It also fits in the queue of a slower tier.
        self._store_batch_bytes = min(config.store.batch_bytes, half // 2, config.max_pending_write_bytes)
        self._retrieve_batch_bytes = min(config.retrieve.batch_bytes, self._retrieve_budget.max_bytes)

    def store(self, resources: Mapping[str, Any]) -> Runner[BatchStored]:
        return Runner(
            chain=self._chain("store", resources),
            batch_chunks=max(1, self._store_batch_bytes // self._arena.slab_bytes),
            chunk_bytes=self._arena.slab_bytes,
            budget=self._store_budget,
            failed=_store_failed,
            admit=partial(self._admit_store, resources["copier"]),
            logger=resources["logger"],
        )

    def retrieve(self, resources: Mapping[str, Any]) -> tuple[Runner[RetrieveReport], Runner[Any]]:
        """Return runners of the retrieve chain, and of the same chain without its last stage (prefetch)."""
        chain = self._chain("retrieve", resources)
        make = partial(
            Runner[Any],
            batch_chunks=max(1, self._retrieve_batch_bytes // self._arena.slab_bytes),
            chunk_bytes=self._arena.slab_bytes,
            budget=self._retrieve_budget,
            logger=resources["logger"],
        )
        retrieve = make(
            chain=chain,
            failed=lambda _, cause: RetrieveReport(cause=cause),
            ends=lambda batch, report: bool(report.cause) or report.hit_chunks < len(batch.chunks),
            admit=partial(self._admit_retrieve, resources["copier"]),
        )
        prefetch = make(
            chain=Chain(chain.stages[:-1]),
            failed=lambda batch, _: batch.part(0, 0),
            ends=lambda batch, read: bool(getattr(read, "cause", "")) or len(read.chunks) < len(batch.chunks),
        )
        return retrieve, prefetch

    def _chain(self, name: ChainName, resources: Mapping[str, Any]) -> Chain[Any, Any]:
        load = partial(self._registry.load, STAGES, third_party=self._config.plugins.third_party)
        stages = chain_stages(self._config, name)
        chain = Chain.named([(stage, build_stage(stage, load(stage), resources)) for stage in stages])
        chain.check_ends(*CHAIN_ENDS[name])
        return chain

    async def _admit_store(self, copier: Copier, batch: Batch, num_chunks: int, timeout_s: float) -> None:
        """Wait for the fence of the store, and for slower tiers if the prompt is larger than the arena.

        Before its fence is reached, a store reserves nothing: stores with later fences would hold all bytes in flight that
        one with an earlier fence needs.

        Only slower tiers can store all of a prompt that is larger than the arena. Other stores do not wait for them. They are
        copied as soon as memory is free, and chunks that do not fit in the queue of a slower tier are then kept in memory
        only.

        Raises:
            BudgetExceededError: The fence was not reached, or the tiers did not write enough, within `timeout_s`.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        await _wait_fence(copier, batch, timeout_s)
        if num_chunks > self._arena.num_slabs:
            keys = [chunk.key for chunk in batch.chunks]
            batch.scope.add(await self._stack.reserve_writes(keys, timeout_s=deadline - clock()))

    async def _admit_retrieve(self, copier: Copier, batch: Batch, num_chunks: int, timeout_s: float) -> None:
        """Wait for the fence of the load. If no other load has bytes in flight, do not wait: its first batch is read meanwhile.

        Raises:
            BudgetExceededError: The fence was not reached within `timeout_s`.
        """
        del num_chunks
        if batch.request.fence is not None and self._retrieve_budget.statistics().used_bytes:
            await _wait_fence(copier, batch, timeout_s)


async def _wait_fence(copier: Copier, batch: Batch, timeout_s: float) -> None:
    if batch.request.fence is None:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await copier.wait_fence(batch.request.fence)
    except TimeoutError as error:
        raise BudgetExceededError(f"the device did not reach the fence in {timeout_s:.3g} s") from error


def _store_failed(batch: Batch, cause: str) -> BatchStored:
    drops = Drops(batch.drops)
    drops.add(batch.chunks, cause)
    return BatchStored(present=getattr(batch, "present", 0), dropped=drops)
