"""LMCacheAsyncConnector: what vLLM calls. It forwards to one of the two halves and nothing else.

Nothing of ours is raised into vLLM once the constructor and the KV cache's registration have ended: what
fails is logged, at most once an interval for each cause, and becomes a miss or a drop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from lmcache_async.integration.vllm.build import build_scheduler_half, build_worker_half, open_worker_half
from lmcache_async.integration.vllm.config import layerwise_always
from lmcache_async.integration.vllm.hits import hit_sources
from lmcache_async.integration.vllm.kv_events import kv_events
from lmcache_async.integration.vllm.metadata import StepMetadata
from lmcache_async.integration.vllm.stats import PARTS, LMCacheAsyncStats, part_of
from lmcache_async.integration.vllm.support import unsupported_reason
from lmcache_async.integration.vllm.versions import CacheHitSource
from lmcache_async.observability.logging import LimitedLogger, NamedHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.distributed.kv_events import KVCacheEvent

    from lmcache_async.integration.vllm.metadata import WorkerReport
    from lmcache_async.integration.vllm.scheduler import SchedulerHalf
    from lmcache_async.integration.vllm.worker import WorkerHalf
    from lmcache_async.observability.families import Family

T = TypeVar("T")

logger = LimitedLogger(logging.getLogger(__name__))


class LMCacheAsyncConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV of earlier prompts from memory, disk and remote stores, loaded and stored asynchronously."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_where_vllm_does()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        reason = unsupported_reason(vllm_config, kv_cache_config)
        if reason is not None:
            if role == KVConnectorRole.SCHEDULER:  # the workers have the same reason
                logger.report("unsupported", "LMCacheAsyncConnector is off: %s", reason)
        elif role == KVConnectorRole.SCHEDULER:
            _recompute_failed_loads(vllm_config.kv_transfer_config)
            self._scheduler = build_scheduler_half(vllm_config, kv_cache_config)
            if self._scheduler.roles.loads:
                _defer_frees(vllm_config.kv_transfer_config)
        else:
            self._worker = build_worker_half(vllm_config, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A captured graph of whole forwards would wait for no layer."""
        return layerwise_always(extra_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is lost is a later miss

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        if (half := self._scheduler) is not None:
            self._guard(lambda: half.on_new_request(request), None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        miss: tuple[int | None, bool] = (0, False)
        if (half := self._scheduler) is None:
            return miss
        return self._guard(lambda: half.match(request, num_computed_tokens), miss)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if (half := self._scheduler) is None:
            return
        planned = self._guard(lambda: half.allocated(request, blocks, num_external_tokens), False)
        if num_external_tokens and not planned:  # vLLM waits for these tokens, so their loss is reported
            self._guard(lambda: half.lose_load(request, blocks), None)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        if (half := self._scheduler) is None:
            return hit_sources({}, num_external_tokens, {})
        nothing: dict[CacheHitSource, int] = {}
        return self._guard(
            lambda: hit_sources(half.hit_tiers(request), num_external_tokens, half.tier_kinds), nothing
        )

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if (half := self._scheduler) is None:
            return StepMetadata()
        metadata = self._guard(lambda: half.plan_step(scheduler_output), None)
        return metadata if metadata is not None else StepMetadata(loads=half.take_loads())

    def update_connector_output(self, connector_output: Any) -> None:
        if (half := self._scheduler) is not None:
            self._guard(lambda: half.update(connector_output), None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids  # the block table is read where there is something left to store
        promise = None
        if (half := self._scheduler) is not None:
            promise = self._guard(lambda: half.finished(request), None)
        # Blocks that are still read are held by references of our own, so vLLM may free its own.
        return False, promise.params() if promise is not None else None

    def take_events(self) -> Iterable[KVCacheEvent]:
        nothing: list[KVCacheEvent] = []
        if (half := self._scheduler) is None:
            return nothing
        return self._guard(lambda: kv_events(half.take_notices(), half.tier_kinds), nothing)

    def has_pending_push_work(self) -> bool:
        half = self._scheduler
        return half is not None and half.has_work

    def has_pending_block_frees(self) -> bool:
        half = self._scheduler
        return half is not None and self._guard(lambda: half.would_free_blocks, False)

    def reset_cache(self) -> bool | None:
        if (half := self._scheduler) is not None:
            self._guard(half.reset, None)
        return True

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None and not open_worker_half(
            self._worker, self._vllm_config, self._kv_cache_config, kv_caches
        ):
            self._worker = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if (half := self._worker) is not None and isinstance(connector_metadata, StepMetadata):
            self._guard_step(half, lambda: half.begin_step(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        if (half := self._worker) is not None:
            self._guard_step(half, half.start_loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if (half := self._worker) is not None:
            self._guard(lambda: half.wait_for_layer(layer_name), False)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: stores read whole blocks of all layers after the forward."""

    def wait_for_save(self) -> None:
        if (half := self._worker) is not None:
            self._guard_step(half, half.start_stores)

    def clear_connector_metadata(self) -> None:
        """The end of a step. What is to be stored is under way by now, unless there was no forward.

        vLLM 0.30 calls wait_for_save with a forward alone.
        """
        if (half := self._worker) is not None:
            self._guard_step(half, half.start_stores)
        super().clear_connector_metadata()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        del finished_req_ids
        if (half := self._worker) is None:
            return None, None
        return None, half.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        half = self._worker  # no guard: no answer here would mean that nothing failed
        return set() if half is None else half.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        half = self._worker
        return None if half is None else half.take_report()

    # Both sides.

    def get_kv_connector_stats(self) -> LMCacheAsyncStats | None:
        half: SchedulerHalf | WorkerHalf | None = self._scheduler or self._worker
        if half is None:
            return None
        nothing: list[Family] = []
        families = self._guard(half.take_stats, nothing)
        if not families:
            return None
        source = f"rank {self._worker.rank}" if self._worker is not None else "scheduler"
        return LMCacheAsyncStats({PARTS: [part_of(source, families)]})

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
        from lmcache_async.integration.vllm.prom import LMCacheAsyncPromMetrics

        return LMCacheAsyncPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                self._guard(half.close, None)

    def _guard(self, call: Callable[[], T], otherwise: T) -> T:
        """The call's result; `otherwise` if it fails."""
        try:
            return call()
        except Exception as error:  # the border to vLLM: no request fails because of us
            cause = f"{type(error).__name__}: {error}"
            logger.log(logging.ERROR, cause, "LMCacheAsyncConnector: %s", cause, exc_info=True)
            return otherwise

    def _guard_step(self, half: WorkerHalf, call: Callable[[], bool]) -> None:
        """Run a part of a step; if it fails, report its jobs as failed, or vLLM would wait for them."""
        done = self._guard(call, False)
        if done is False:
            self._guard(half.abandon_step, None)


def _log_where_vllm_does() -> None:
    """VLLM gives handlers to its own loggers alone. Lines of ours go there too, with the product's name."""
    ours, theirs = logging.getLogger("lmcache_async"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.addHandler(NamedHandler(theirs))
        ours.propagate = theirs.propagate
        ours.setLevel(theirs.level)


def _recompute_failed_loads(kv_transfer_config: Any) -> None:
    """A load that fails is a miss, never a failed request, whatever vLLM's default is.

    The scheduler reads the policy after it has made the connector.
    """
    if kv_transfer_config.kv_load_failure_policy != "recompute":
        kv_transfer_config.kv_load_failure_policy = "recompute"
        logger.log(
            logging.INFO, "policy", "kv_load_failure_policy is set to recompute: a failed load is a miss"
        )


def _defer_frees(kv_transfer_config: Any) -> None:
    """A producer of ours loads too: blocks of a step that still runs must not be given to a load.

    The scheduler frees them later only for what consumes, and reads the role after it has made the
    connector.
    """
    if not kv_transfer_config.is_kv_consumer:
        kv_transfer_config.kv_role = "kv_both"
        logger.log(logging.INFO, "role", "a kv_producer loads too, so vLLM is told that it is kv_both")
