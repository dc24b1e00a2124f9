"""Create the scheduler and worker connectors from vLLM's configuration. Each imports only what it needs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lmcache_async.engine.check import tier_capabilities
from lmcache_async.errors import ConfigError, MissingDependencyError
from lmcache_async.integration.vllm.config import (
    backend_reason,
    block_size_of,
    engine_config,
    layerwise_tokens,
    namespace_of,
    replica_of,
    roles_of,
    steps_overlap,
)
from lmcache_async.integration.vllm.lookup_protocol import socket_path
from lmcache_async.integration.vllm.versions import shutdown_timeout_s
from lmcache_async.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_async.config import EngineConfig
    from lmcache_async.integration.vllm.scheduler import SchedulerConnector
    from lmcache_async.integration.vllm.worker import WorkerConnector
    from lmcache_async.tiers.base import Capabilities

logger = logging.getLogger(__name__)


def build_scheduler(vllm_config: Any, kv_cache_config: Any) -> SchedulerConnector:
    """Start the scheduler connector. Its thread connects to the workers when they are ready.

    Raises:
        ConfigError: A key or value is wrong.
    """
    from lmcache_async.integration.vllm.keys import MediaIdentity
    from lmcache_async.integration.vllm.lookup import LookupClient
    from lmcache_async.integration.vllm.scheduler import SchedulerConnector

    transfer = vllm_config.kv_transfer_config
    block_size = block_size_of(kv_cache_config)
    world_size = vllm_config.parallel_config.world_size
    config = engine_config(vllm_config, block_size)
    capabilities = tier_capabilities(config, Registry())
    _warn_of_lost_writes(vllm_config, config, capabilities)
    client = LookupClient(
        [socket_path(config.vllm.socket_dir, transfer.engine_id, rank) for rank in range(world_size)],
        chunk_size=config.chunk_size,
        block_size=block_size,
        lookup_timeout_s=config.vllm.lookup_timeout_s,
        hash_key=config.read_hash_key(),
        adapter_algorithm=config.hash_algorithm,
    )
    roles = roles_of(transfer, config)
    return SchedulerConnector(
        config,
        block_size=block_size,
        world_size=world_size,
        roles=roles,
        client=client,
        layerwise_tokens=layerwise_tokens(config, vllm_config),
        overlapped=steps_overlap(vllm_config),
        media=MediaIdentity.of(vllm_config),
        tier_media={name: each.medium for name, each in capabilities.items()},
    )


def _warn_of_lost_writes(
    vllm_config: Any, config: EngineConfig, capabilities: Mapping[str, Capabilities]
) -> None:
    """Name the flag that leaves the engine time to write its queue to persistent tiers."""
    timeout_s = shutdown_timeout_s(vllm_config)
    if timeout_s is None or timeout_s >= config.shutdown_timeout_s:
        return
    if tiers := [name for name, each in capabilities.items() if each.persistent]:
        logger.warning(
            "stopping vllm serve loses writes queued for %s: vLLM kills its workers after %g s, and closing takes up to"
            " %g s (shutdown_timeout_s). Start vLLM with --shutdown-timeout 30",
            ", ".join(tiers),
            timeout_s,
            config.shutdown_timeout_s,
        )


def build_worker(vllm_config: Any, kv_cache_config: Any) -> WorkerConnector:
    """Create this rank's worker connector. It is opened when the KV cache is registered.

    Raises:
        ConfigError: A key or value is wrong.
    """
    from lmcache_async.integration.vllm.worker import WorkerConnector

    block_size = block_size_of(kv_cache_config)
    config = engine_config(vllm_config, block_size)
    rank = vllm_config.parallel_config.rank
    socket = socket_path(config.vllm.socket_dir, vllm_config.kv_transfer_config.engine_id, rank)
    events = vllm_config.kv_events_config
    kv_events = events is not None and events.enable_kv_cache_events
    return WorkerConnector(
        config,
        rank=rank,
        block_size=block_size,
        socket=socket,
        kv_events=kv_events,
        replica=replica_of(vllm_config),
    )


def open_worker(
    worker: WorkerConnector, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]
) -> bool:
    """Open the worker connector over the KV cache. False if that fails: then all lookups are misses.

    Raises:
        ConfigError: The configuration is invalid, so vLLM must not start with it.
        MissingDependencyError: A tier or stage needs a package.
    """
    from lmcache_async.device.layout import KVLayout

    if reason := backend_reason(vllm_config, kv_cache_config):
        logger.warning("LMCacheAsyncConnector is off: %s", reason)
        return False
    block_size = block_size_of(kv_cache_config)
    try:
        layout = KVLayout.from_block_views(
            kv_caches, num_blocks=kv_cache_config.num_blocks, block_size=block_size
        )
        worker.open(layout, namespace_of(vllm_config, kv_cache_config, worker.config, layout.text))
    except (ConfigError, MissingDependencyError):
        raise
    except Exception:
        logger.exception("LMCacheAsyncConnector is off: the engine could not be opened")
        return False
    return True
