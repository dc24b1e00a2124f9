"""From a config to the parts of an engine: names resolved, both chains checked."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_async.config import EngineConfig
from lmcache_async.device.copier import Copier, open_copier
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.secrets import check_hash_key, open_cipher, retrieve_stages, store_stages
from lmcache_async.engine.tiers import stacked_tiers
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import Namespace
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.encryption import ENVELOPE_BYTES
from lmcache_async.memory.record import RecordFormat
from lmcache_async.memory.threads import WorkerPool
from lmcache_async.observability.instrument import Instrument, LogInstrument, Several
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.observability.tracing import TracingInstrument
from lmcache_async.pipeline.batch import RetrieveRequest, StoreRequest
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.report import BatchStored
from lmcache_async.pipeline.stage import build_stage
from lmcache_async.registry import STAGES, Registry
from lmcache_async.tiers.layers.notice import Watcher
from lmcache_async.tiers.stack import TierStack
from lmcache_async.types import RetrieveReport

PRIORITIES = {"low": 0, "high": -1}
"""Of CUDA streams; the model's own have 0."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of; `resources` is what a stage's constructor may ask for by name."""

    arena: Arena
    copier: Copier
    stack: TierStack
    workers: WorkerPool
    record_format: RecordFormat
    store: Chain[StoreRequest, BatchStored]
    retrieve: Chain[RetrieveRequest, RetrieveReport]
    resources: Mapping[str, Any]

    def free(self) -> None:
        """Give back threads and memory."""
        self.workers.shutdown()  # what runs there waits for nothing and ends by itself
        self.copier.close()
        self.arena.close()


def build(
    config: EngineConfig,
    layout: KVLayout,
    namespace: Namespace,
    logger: LimitedLogger,
    registry: Registry,
    watcher: Watcher | None = None,
    *,
    replica: int = 0,
) -> Parts:
    """Make the parts; nothing is opened yet but the arena's memory and the copier.

    Args:
        replica: The data-parallel replica.

    Raises:
        ConfigError: A name or an option is wrong.
        ChainError: The stages of a chain do not fit.
    """
    if config.chunk_size % layout.tokens_per_row:
        raise ConfigError(
            f"chunk_size is {config.chunk_size}, which is no multiple of the {layout.tokens_per_row} "
            f"tokens of a block: set it to {-(-config.chunk_size // layout.tokens_per_row) * layout.tokens_per_row}"
        )
    check_hash_key(config, namespace)
    cipher = open_cipher(config)
    record_format = RecordFormat(
        namespace=namespace.text,
        layout=layout.text,
        dtype=layout.dtype,
        chunk_size=config.chunk_size,
        reserved_bytes=ENVELOPE_BYTES if cipher else 0,
    )
    record_bytes = record_format.record_bytes(
        layout.payload_bytes(config.chunk_size // layout.tokens_per_row)
    )
    stack = TierStack(
        stacked_tiers(
            registry, config, namespace, logger, watcher, chunk_bytes=record_bytes, replica=replica
        ),
        write_timeout_s=config.store.allocate_timeout_s,
        encrypted=cipher is not None,
    )
    with contextlib.ExitStack() as undo:
        arena = Arena(
            config.arena.max_bytes,
            record_bytes,
            pin=layout.device.type == "cuda",
            pin_device=layout.device.index,
            huge_pages=config.arena.huge_pages,
            prefault=config.arena.prefault,
        )
        undo.callback(arena.close)
        copier = _copier(config, layout)
        undo.callback(copier.close)
        workers = WorkerPool(config.copy_threads, thread_name_prefix="lmcache-async-work")
        undo.callback(workers.shutdown)
        resources: dict[str, Any] = {
            "arena": arena,
            "cipher": cipher,
            "config": config,
            "copier": copier,
            "layout": layout,
            "logger": logger,
            "namespace": namespace,
            "record_format": record_format,
            "stack": stack,
            "workers": workers,
        }
        store = _chain(registry, store_stages(config), resources, third_party=config.plugins.third_party)
        store.check_ends(StoreRequest, BatchStored)
        retrieve = _chain(
            registry, retrieve_stages(config), resources, third_party=config.plugins.third_party
        )
        retrieve.check_ends(RetrieveRequest, RetrieveReport)
        undo.pop_all()
    return Parts(arena, copier, stack, workers, record_format, store, retrieve, resources)


def _copier(config: EngineConfig, layout: KVLayout) -> Copier:
    return open_copier(
        layout,
        threads=config.copy_threads,
        staging_bytes=config.gpu.staging_bytes,
        store_priority=PRIORITIES[config.gpu.store_priority],
        load_priority=PRIORITIES[config.gpu.load_priority],
    )


def _chain(
    registry: Registry, names: Sequence[str], resources: Mapping[str, Any], *, third_party: bool
) -> Chain[Any, Any]:
    return Chain.named(
        [
            (name, build_stage(name, registry.load(STAGES, name, third_party=third_party), resources))
            for name in names
        ]
    )


def instrument_of(config: EngineConfig, logger: LimitedLogger, given: Instrument | None) -> Instrument:
    """Who is told what the engine does: who was given, or the log; and whoever the config wants.

    Raises:
        MissingDependencyError: Tracing is on, and OpenTelemetry is not installed.
    """
    instrument = given or LogInstrument(logger.logger)
    return Several(instrument, TracingInstrument()) if config.tracing.enabled else instrument


def default_logger() -> LimitedLogger:
    return LimitedLogger(logging.getLogger("lmcache_async"))
