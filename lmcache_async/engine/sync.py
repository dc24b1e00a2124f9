"""The synchronous facade: LMCache's names and argument names over the async engine.

Each `LMCacheEngine` owns one event loop thread and waits for it; calls may come from any thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar, Unpack

import torch

from lmcache_async.config import EngineConfig
from lmcache_async.device.layout import Layers
from lmcache_async.engine.arguments import (
    Mask,
    RequestArguments,
    check_names,
    paged_cache,
    request_id,
    request_namespace,
    slots_of,
)
from lmcache_async.engine.check import load_engine_config
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.loop import LoopThread
from lmcache_async.engine.metadata import LMCacheEngineMetadata, Memory, memory_of
from lmcache_async.engine.metrics import engine_families
from lmcache_async.engine.results import EngineStatistics
from lmcache_async.engine.tiers import TIER_CLOSE_S
from lmcache_async.errors import ConfigError, EngineClosedError
from lmcache_async.hashing import TokenIds
from lmcache_async.observability.families import Family

T = TypeVar("T")

logger = logging.getLogger("lmcache_async")


class LMCacheEngine:
    """A cache engine for code without an event loop.

    It opens with the first call that gives `kv_caches` (all later ones must give the same tensors, or
    none); until then a lookup finds nothing.

    A process that is forked from the engine's cannot use it: each call raises EngineClosedError there, and the
    parent's engine is not touched. The child may open an engine of its own.

    Args:
        config: As from `load_config`.
        metadata: What the KV depends on.
        kv_caches: The paged KV cache: a tensor, or a pair for K and V, for each layer; by name or in order.
    """

    def __init__(
        self,
        config: EngineConfig,
        metadata: LMCacheEngineMetadata | None = None,
        *,
        kv_caches: Layers | None = None,
    ) -> None:
        self.config = config
        self.metadata = metadata or LMCacheEngineMetadata()
        self._loop = LoopThread()
        self._exit = contextlib.AsyncExitStack()
        self._lock = threading.Lock()
        self._engine: CacheEngine | None = None
        self._memory: Memory = []
        self._closed = False
        if kv_caches is not None:
            try:
                self._open(kv_caches)
            except BaseException:
                self.close()
                raise

    def store(self, tokens: TokenIds, mask: Mask | None = None, **kwargs: Unpack[RequestArguments]) -> None:
        """Store the KV of `tokens`; returns when every tier has taken or refused it.

        Args:
            tokens: Token ids of the whole prefix: a list, an array or a tensor.
            mask: Booleans of shape (len(tokens),), of the form F* T*: False tokens are not stored. A tensor, an
                array or a list.
            **kwargs: `kv_caches` (or `kvcaches`), `slot_mapping` of shape (len(tokens),), `req_id`,
                `cache_salt`, `lora`, `tags`, `request_configs`; see `RequestArguments`.

        Raises:
            TypeError: There is another argument, or one is of another type.
            ValueError: An argument has a value that fits neither the tokens nor the cache.
        """
        check_names("store", kwargs, "mask")
        engine = self._ready(paged_cache(kwargs))
        if engine is None:
            raise ValueError("the first store must give kv_caches=, the paged KV cache of all layers")
        self._wait(
            engine.store(
                tokens,
                slots_of(kwargs),
                mask=mask,
                namespace=request_namespace(kwargs),
                request_id=request_id(kwargs),
                fence=engine.copier.fence(),
            )
        )

    def retrieve(
        self, tokens: TokenIds, mask: Mask | None = None, **kwargs: Unpack[RequestArguments]
    ) -> torch.Tensor:
        """Load the longest prefix that is there into its slots; arguments as in `store`.

        Returns:
            Bool of shape (len(tokens),) on the CPU: True for the tokens loaded. It has the form F* T* F*, but
            that tokens with a slot of -1 are False everywhere.
        """
        check_names("retrieve", kwargs, "mask")
        engine = self._ready(paged_cache(kwargs))
        if engine is None:
            raise ValueError("the first retrieve must give kv_caches=, the paged KV cache of all layers")
        return self._wait(
            engine.retrieve(
                tokens,
                slots_of(kwargs),
                mask=mask,
                namespace=request_namespace(kwargs),
                request_id=request_id(kwargs),
                fence=engine.copier.fence(),
            )
        )

    def lookup(
        self,
        tokens: TokenIds,
        *,
        lookup_id: str | None = None,
        pin: bool = False,
        **kwargs: Unpack[RequestArguments],
    ) -> int:
        """How many leading tokens are there. With `pin`, those in host memory stay until `lookup_unpin`.

        Args and errors: `tokens` and `**kwargs` as in `store`.
        """
        check_names("lookup", kwargs, "lookup_id", "pin")
        namespace = request_namespace(kwargs)
        engine = self._ready(paged_cache(kwargs))
        if engine is None:
            return 0
        if pin and lookup_id is None:
            raise ValueError("pin=True needs a lookup_id, by which lookup_unpin ends it")
        return self._wait(engine.lookup(tokens, namespace=namespace, lookup_id=lookup_id if pin else None))

    def lookup_unpin(self, lookup_ids: Sequence[str] | str) -> None:
        """End the pins of these lookups; unknown ids are fine."""
        engine = self._ready(None)
        for lookup_id in [lookup_ids] if isinstance(lookup_ids, str) else lookup_ids:
            if engine is not None:
                self._loop.call_soon(engine.unpin, lookup_id)

    def prefetch(self, tokens: TokenIds, **kwargs: Unpack[RequestArguments]) -> int:
        """Bring what slower tiers have of `tokens` into host memory; how many leading tokens are there.

        Args and errors: as in `store`.
        """
        check_names("prefetch", kwargs)
        namespace = request_namespace(kwargs)
        engine = self._ready(paged_cache(kwargs))
        return 0 if engine is None else self._wait(engine.prefetch(tokens, namespace=namespace))

    def clear(self, *, memory_only: bool = False) -> int:
        """Forget every chunk of every tier, or of memory alone; how many there were."""
        engine = self._ready(None)
        return 0 if engine is None else self._wait(engine.clear(memory_only=memory_only))

    def statistics(self) -> EngineStatistics | None:
        """A snapshot; None before the engine has opened."""
        engine = self._ready(None)
        return None if engine is None else self._wait(_call(engine.statistics))

    def metrics(self) -> list[Family]:
        """All that there is to be measured; `exposition` makes Prometheus' text of it. Nothing before it has opened."""
        engine = self._ready(None)
        if engine is None:
            return []
        return self._wait(_call(lambda: engine_families(engine.statistics(), engine.totals)))

    def close(self) -> None:
        """Write what is queued, within the configured deadline, and free everything. Disk content stays.

        Raises:
            EngineClosedError: The process was forked, and the engine is the parent's.
        """
        if not self._closed:
            self._loop.check_process()
        elif self._loop.inherited:
            return  # the lock may be held for ever here
        with self._lock:
            if self._closed:
                return
            self._closed = True
            queue_s = self.config.shutdown_timeout_s  # for the queue, and for calls that were cancelled
            timeout_s = 2 * (queue_s + min(queue_s, TIER_CLOSE_S)) + 1.0
            try:
                self._loop.submit(self._exit.aclose()).result(timeout_s)
            except TimeoutError:
                logger.warning("the engine's tiers did not close in time; they are left as they are")
            except EngineClosedError as error:
                logger.warning("the engine's tiers were not closed: %s", error)
            finally:
                self._engine = None
                self._loop.close(min(queue_s, TIER_CLOSE_S))

    @property
    def closed(self) -> bool:
        return self._closed

    def attach(self, kv_caches: Layers) -> None:
        """Open the engine over these tensors, if no call has done so yet.

        Raises:
            ValueError: It was opened over others.
        """
        self._ready(kv_caches)

    def __enter__(self) -> Self:
        self._check_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A forked child that leaves the block has nothing to close, and the block's own error goes on.
        if not self._loop.inherited:
            self.close()

    def _check_process(self) -> None:
        """Raises EngineClosedError: this process was forked from the one that opened the engine."""
        self._loop.check_process()

    def _ready(self, kv_caches: Layers | None) -> CacheEngine | None:
        self._check_process()
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine was closed")
            if kv_caches is not None and self._engine is None:
                self._open(kv_caches)
            elif kv_caches is not None and memory_of(kv_caches) != self._memory:
                raise ValueError("kv_caches= are other tensors than those the engine was opened with")
            return self._engine

    def _open(self, kv_caches: Layers) -> None:
        layout = self.metadata.layout_of(kv_caches)
        opened = self._exit.enter_async_context(
            CacheEngine.open(
                self.config, layout=layout, namespace=self.metadata.namespace_of(layout, self.config)
            )
        )
        self._engine = self._wait(opened)
        self._memory = memory_of(kv_caches)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._loop.submit(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise EngineClosedError(self._loop.closed or "the engine was closed during the call") from error
        except BaseException:
            future.cancel()
            raise


class LMCacheEngineBuilder:
    """Engines of this process by instance id, as LMCache's users find them.

    In a forked child the ids of the parent's open engines raise EngineClosedError; others can be used.
    """

    _engines: ClassVar[dict[str, LMCacheEngine]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: EngineConfig | None = None,
        metadata: LMCacheEngineMetadata | None = None,
        *,
        kv_caches: Layers | None = None,
    ) -> LMCacheEngine:
        """The engine of that id; made if there is none, or if it was closed.

        Raises:
            ConfigError: There is one with another config or other metadata.
            EngineClosedError: The process was forked, and the engine is the parent's.
            ValueError: There is one over another cache.
        """
        with cls._lock:
            engine = cls._find(instance_id)
            if engine is None:
                engine = LMCacheEngine(config or load_engine_config(), metadata, kv_caches=kv_caches)
                cls._engines[instance_id] = engine
            elif (config or engine.config) != engine.config or (
                metadata or engine.metadata
            ) != engine.metadata:
                raise ConfigError(
                    f"engine {instance_id!r} exists with another config or other metadata; "
                    f"destroy it first, or take another instance id"
                )
            elif kv_caches is not None:
                engine.attach(kv_caches)
            return engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """The engine of that id, or None; None also once it was closed.

        Raises:
            EngineClosedError: The process was forked, and the engine is the parent's.
        """
        with cls._lock:
            return cls._find(instance_id)

    @classmethod
    def destroy(cls, instance_id: str, *, clear: bool = False) -> None:
        """Close the engine and free everything; content on disk stays unless `clear`. Unknown ids are fine.

        Raises:
            EngineClosedError: The process was forked, and the engine is the parent's.
        """
        with cls._lock:
            cls._find(instance_id)
            engine = cls._engines.pop(instance_id, None)
        if engine is None:
            return
        try:
            if clear and not engine.closed:
                engine.clear()
        finally:
            engine.close()

    @classmethod
    def _find(cls, instance_id: str) -> LMCacheEngine | None:
        engine = cls._engines.get(instance_id)
        if engine is None or engine.closed:
            return None
        engine._check_process()
        return engine

    @classmethod
    def _renew_lock(cls) -> None:
        cls._lock = threading.Lock()


# Another thread of the parent may have held the lock at the fork; a child could never release it.
os.register_at_fork(after_in_child=LMCacheEngineBuilder._renew_lock)


async def _call(function: Any) -> Any:
    return function()
