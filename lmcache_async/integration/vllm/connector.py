"""LMCacheAsyncConnector, the class that vLLM loads. It forwards to the scheduler or the worker connector.

After the constructor and the registration of the KV cache, a failure is logged, at most once per cause and interval,
and becomes a miss or a dropped store. Only the methods that report results of loads and stores may raise an error into
vLLM, because without these results it might use KV that was not loaded.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from lmcache_async.integration.vllm.config import (
    engine_config,
    layerwise_always,
    unsupported_reason,
    uses_tcp,
)
from lmcache_async.integration.vllm.events import hit_sources, kv_events
from lmcache_async.integration.vllm.groups import KVGroups
from lmcache_async.integration.vllm.jobs import LookupAddress, StepMetadata, WorkerReport
from lmcache_async.integration.vllm.metrics import PARTS, LMCacheAsyncPromMetrics, LMCacheAsyncStats
from lmcache_async.logging import LimitedLogger, NamedHandler
from lmcache_async.metrics.samples import Samples

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

    from lmcache_async.integration.vllm.scheduler import SchedulerConnector
    from lmcache_async.integration.vllm.worker import WorkerConnector

T = TypeVar("T")
SideT = TypeVar("SideT")

logger = LimitedLogger(logging.getLogger(__name__))


class LMCacheAsyncConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV cache connector of vLLM with tiers in memory, on disk and in remote stores.

    Attributes:
        scheduler: The scheduler side; None for the role of a worker, or if the model is not supported.
        worker: The worker side; None for the role of the scheduler, if the model is not supported, or if the KV cache could
            not be registered.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_to_vllm()
        self.scheduler: SchedulerConnector | None = None
        self.worker: WorkerConnector | None = None
        configs = _configs_of_scheduler(vllm_config.kv_transfer_config)
        self._beside_others = len(configs) > 1
        # A process imports only its own side.
        reason = unsupported_reason(vllm_config, kv_cache_config)
        if reason is not None:
            if role == KVConnectorRole.SCHEDULER:  # not in the workers, which would log the same reason
                logger.report("unsupported", "LMCacheAsyncConnector is off: %s", reason)
            return
        groups = KVGroups.of(kv_cache_config)
        config = engine_config(vllm_config, groups.block_size)
        if role == KVConnectorRole.SCHEDULER:
            _recompute_failed_loads(configs)
            from lmcache_async.integration.vllm.scheduler import SchedulerConnector

            self.scheduler = SchedulerConnector.of_vllm(
                vllm_config, kv_cache_config, config, groups, beside_others=self._beside_others
            )
            if self.scheduler.roles.loads:
                _defer_frees(configs)
        else:
            from lmcache_async.integration.vllm.worker import WorkerConnector

            self.worker = WorkerConnector.of_vllm(vllm_config, kv_cache_config, config, groups)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether loads are awaited layer by layer, which a full CUDA graph cannot do."""
        return layerwise_always(extra_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost store is a later miss

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler is not None:
            self.scheduler.bind_cache_manager(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        side, tp_size = self.scheduler, self._vllm_config.parallel_config.tensor_parallel_size
        if side is not None:
            ranks = {
                (pp_rank * tp_size + tp_rank) * len(each.addresses) + shard: address
                for (pp_rank, tp_rank), each in metadata.items()
                if isinstance(each, LookupAddress)  # MultiConnector passes those of other connectors too
                for shard, address in enumerate(each.addresses)
            }
            if not ranks and uses_tcp(side.config, self._vllm_config):
                logger.report(
                    "addresses",
                    "all lookups are misses: vLLM's MultiConnector forwards the handshake of one connector only, and not that of"
                    " LMCacheAsyncConnector, which contains the TCP addresses of the workers. If all workers are on this host, set"
                    " vllm.lookup_transport to unix; otherwise remove the other connector (such as NixlConnector)",
                )
            local = [each.local for each in metadata.values() if isinstance(each, LookupAddress)]
            _guarded(side, lambda side: side.connect(ranks, local[0] if len(local) == 1 else None), None)

    def on_new_request(self, request: Any) -> None:
        _guarded(self.scheduler, lambda side: side.on_new_request(request), None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        miss: tuple[int | None, bool] = (0, False)
        return _guarded(self.scheduler, lambda side: side.match(request, num_computed_tokens), miss)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        planned = _guarded(
            self.scheduler, lambda side: side.allocated(request, blocks, num_external_tokens), False
        )
        if num_external_tokens and not planned:
            # vLLM waits for these tokens, so the failure must be reported.
            _guarded(self.scheduler, lambda side: side.fail_load(request, blocks), None)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        return _guarded(
            self.scheduler,
            lambda side: hit_sources(
                side.tokens_by_tier(request, num_external_tokens), num_external_tokens, side.tier_media
            ),
            hit_sources({}, num_external_tokens, {}),
        )

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if (side := self.scheduler) is None:
            return StepMetadata()
        metadata = _guarded(side, lambda side: side.plan_step(scheduler_output), None)
        return metadata if metadata is not None else StepMetadata(loads=side.take_loads())

    def update_connector_output(self, connector_output: Any) -> None:
        _guarded(self.scheduler, lambda side: side.update(connector_output), None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids  # the block table is read only if something is left to store
        promise = _guarded(self.scheduler, lambda side: side.finished(request), None)
        # Blocks that stores still read are pinned by references of our own, so vLLM may release its own.
        return False, promise.params() if promise is not None else None

    def take_events(self) -> Iterable[KVCacheEvent]:
        nothing: list[KVCacheEvent] = []
        return _guarded(
            self.scheduler, lambda side: kv_events(side.take_chunk_events(), side.tier_media), nothing
        )

    def has_pending_push_work(self) -> bool:
        return _guarded(self.scheduler, lambda side: side.has_work, False)

    def has_pending_block_frees(self) -> bool:
        return _guarded(self.scheduler, lambda side: side.would_free_blocks, False)

    def reset_cache(self) -> bool | None:
        def reset(side: SchedulerConnector) -> bool:
            side.reset()
            return True

        return self.scheduler is None or _guarded(self.scheduler, reset, False)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if (side := self.worker) is not None and not side.register(
            self._vllm_config, self._kv_cache_config, kv_caches
        ):
            self.worker = None

    def get_handshake_metadata(self) -> LookupAddress | None:
        engines = self.worker.engines if self.worker is not None else ()
        addresses = tuple(each.tcp_address for each in engines if each.tcp_address is not None)
        # MultiConnector passes on one handshake only, and another connector may not work without its own.
        local = engines[0].server if len(engines) == 1 and not self._beside_others else None
        return LookupAddress(addresses, local) if addresses or local else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            _guarded(self.worker, lambda side: side.begin_step(connector_metadata), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        _guarded(self.worker, lambda side: side.start_loads(), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        _guarded(self.worker, lambda side: side.wait_for_layer(layer_name), None)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: stores read whole blocks of all layers after the forward."""

    def wait_for_save(self) -> None:
        _guarded(self.worker, lambda side: side.start_stores(), None)

    def clear_connector_metadata(self) -> None:
        """Start the stores at the end of a step without a forward pass. For other steps they are started already.

        vLLM 0.30 calls wait_for_save only for a step with a forward pass.
        """
        _guarded(self.worker, lambda side: side.start_stores(), None)
        super().clear_connector_metadata()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        del finished_req_ids
        if (side := self.worker) is None:
            return None, None
        return None, side.take_finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads have ended, and those of them that failed as a whole."""
        results = super().get_transfer_results(finished_req_ids)
        if (side := self.worker) is not None:  # no guard: an empty set would mean that nothing failed
            results.failed_recving |= side.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        side = self.worker  # no guard: an empty set would mean that nothing failed
        return set() if side is None else side.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        side = self.worker
        return None if side is None else side.take_report()

    # Both sides.

    def get_kv_connector_stats(self) -> LMCacheAsyncStats | None:
        parts: list[list[Any]] = []
        for name, take in self._stats_sources():
            if samples := _guarded(take, lambda take: take(), Samples()):
                parts.append([name, samples.to_plain()])
        return LMCacheAsyncStats({PARTS: parts}) if parts else None

    def _stats_sources(self) -> list[tuple[str, Callable[[], Samples]]]:
        if self.scheduler is not None:
            return [("scheduler", self.scheduler.metrics.take)]
        engines = self.worker.engines if self.worker is not None else ()
        return [(f"rank {each.rank}", each.take_stats) for each in engines]

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LMCacheAsyncStats:
        return LMCacheAsyncStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        return LMCacheAsyncPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        _guarded(self.scheduler, lambda side: side.close(), None)
        _guarded(self.worker, lambda side: side.close(), None)


def _guarded(side: SideT | None, call: Callable[[SideT], T], otherwise: T) -> T:
    """Return the result of a call of a side, or `otherwise` if that side is off or the call fails."""
    if side is None:
        return otherwise
    try:
        return call(side)
    except Exception:  # no request may fail because of the connector
        logger.exception("an unexpected error of LMCacheAsyncConnector, please report it")
        return otherwise


def _log_to_vllm() -> None:
    """Send our log lines, with the product's name, to vLLM's handlers. vLLM configures only its own loggers."""
    ours, theirs = logging.getLogger("lmcache_async"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.addHandler(NamedHandler(theirs))
        ours.propagate = theirs.propagate
        ours.setLevel(theirs.level)


def _configs_of_scheduler(own: Any) -> list[Any]:
    """Return the connector's `kv_transfer_config`, and those of the MultiConnectors that are creating it.

    The scheduler reads the configuration of the outermost one. vLLM gives a child connector only a copy of its own
    configuration, and sets no current configuration while it creates the scheduler. Therefore the call stack is searched.
    """
    configs, frame = [own], inspect.currentframe()
    while frame is not None:
        creator = frame.f_locals.get("self")
        if isinstance(creator, MultiConnector):
            configs.append(creator._vllm_config.kv_transfer_config)
        frame = frame.f_back
    return configs


def _recompute_failed_loads(kv_transfer_configs: Sequence[Any]) -> None:
    """Set `kv_load_failure_policy` to `recompute`, so that a failed load is a miss and not a failed request.

    The scheduler reads the policy after it has created the connector.
    """
    changed = [each for each in kv_transfer_configs if each.kv_load_failure_policy != "recompute"]
    for config in changed:
        config.kv_load_failure_policy = "recompute"
    if changed:
        logger.log(
            logging.INFO, "policy", "kv_load_failure_policy is set to recompute: a failed load is a miss"
        )


def _defer_frees(kv_transfer_configs: Sequence[Any]) -> None:
    """Set `kv_role` to `kv_both`, so that vLLM does not give blocks of a running step to a load.

    vLLM's scheduler defers frees only for consumers, but a producer with this connector loads too. The scheduler reads
    the role after it has created the connector.
    """
    changed = [each for each in kv_transfer_configs if not each.is_kv_consumer]
    for config in changed:
        config.kv_role = "kv_both"
    if changed:
        logger.log(logging.INFO, "role", "kv_role is set to kv_both, because a kv_producer loads too")
