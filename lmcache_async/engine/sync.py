"""The synchronous cache engine, with the names and arguments of LMCache's engine.

Each `LMCacheEngine` runs an asynchronous engine on its own event loop thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias, TypeVar, Unpack, cast

import torch
from prometheus_client import Metric

from lmcache_async.config import EngineConfig
from lmcache_async.device.layout import KVLayout, Layers, named_tensors
from lmcache_async.engine.arguments import Mask, RequestArguments, check_arguments
from lmcache_async.engine.check import load_engine_config
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.loop import LoopThread
from lmcache_async.engine.metrics import EngineStatistics
from lmcache_async.engine.tiers import TIER_CLOSE_S
from lmcache_async.errors import ConfigError, EngineClosedError
from lmcache_async.hashing import Namespace, TokenIds

T = TypeVar("T")

CLEAR_S = 120.0
"""Longest wait for the deletion of the content of an engine before another one is created with its id."""

INTERRUPT_S = 30.0
"""Longest wait for the end of a call that was interrupted, such as by Ctrl+C."""

_Memory: TypeAlias = list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]]

logger = logging.getLogger("lmcache_async")


@dataclass(frozen=True, slots=True, kw_only=True)
class LMCacheEngineMetadata:
    """Properties of the model that the KV cache depends on, with the names of LMCache's metadata.

    Attributes:
        model_name: Name of the model.
        world_size: Number of ranks of the model.
        worker_id: This rank.
        weights: Fingerprint of the weights (`lmcache_async.hashing.weights_fingerprint`), or any text that
            changes with them. Without it, a change of weights under the same model name is not detected.
        kv_dtype: Element type of the KV cache; by default that of the tensors.
        block_size: Tokens per block. Required if the shape of the tensors is ambiguous, as for pairs of
            K and V of shape [blocks, block size, heads, head size].
        kv_order: Order of the dimensions, one letter each, as in `KVLayout.from_token_slots` (`2BNHD`,
            `BHNC`). Required if the shape is ambiguous even with `block_size`.
    """

    model_name: str = ""
    world_size: int = 1
    worker_id: int = 0
    weights: str = ""
    kv_dtype: torch.dtype | None = None
    block_size: int | None = None
    kv_order: str | None = None

    def layout_of(self, kv_caches: Layers) -> KVLayout:
        """Return the layout of the paged cache with token slots as rows.

        Raises:
            ValueError: The shapes are unknown, ambiguous, or differ from the metadata.
        """
        return KVLayout.from_token_slots(kv_caches, order=self.kv_order, block_size=self.block_size)

    def namespace_of(self, layout: KVLayout, config: EngineConfig) -> Namespace:
        return Namespace(
            model=self.model_name,
            weights=self.weights,
            dtype=str(self.kv_dtype) if self.kv_dtype is not None else layout.dtype,
            layout=layout.text,
            world_size=self.world_size,
            tp_rank=self.worker_id,
            tp_size=self.world_size,
            chunk_size=config.chunk_size,
            algorithm=config.hash_algorithm,
            hash_key=config.read_hash_key(),
        )


class LMCacheEngine:
    """A cache engine for code without an event loop. Thread-safe.

    The engine opens with the first call that has `kv_caches`. Before that, lookups find nothing. Later calls
    must give the same tensors, or none. An engine that is collected without `close` is closed in the background.

    A forked child cannot use the engine of its parent: each call raises EngineClosedError there, and the
    parent's engine is not affected. The child may open its own engine.

    Args:
        config: Configuration, as from `load_config`.
        metadata: Properties of the model that the KV cache depends on.
        kv_caches: The paged KV cache: for each layer a tensor, or a pair of K and V; by name or in order.
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
        self._memory: _Memory = []
        self._closed = False
        self._collected = weakref.finalize(
            self, _close_collected, self._loop, self._exit, config, self._close_limit_s
        )
        self._collected.atexit = False
        if kv_caches is not None:
            try:
                self._open(kv_caches)
            except BaseException:
                self.close()
                raise

    def store(self, tokens: TokenIds, mask: Mask | None = None, **kwargs: Unpack[RequestArguments]) -> None:
        """Store the KV cache of `tokens`. Returns when every tier has stored or refused it.

        Args:
            tokens: Token ids of the whole prefix: a list, an array or a tensor.
            mask: Booleans of shape (len(tokens),), of the form F* T*: False tokens are not stored. A tensor, an
                array or a list.
            **kwargs: `kv_caches` (or `kvcaches`), `slot_mapping` of shape (len(tokens),), `req_id`,
                `cache_salt`, `lora`, `tags`, `request_configs`; see `RequestArguments`.

        Raises:
            TypeError: An argument is unknown or has the wrong type.
            ValueError: The value of an argument does not fit the tokens or the cache.
        """
        engine, rows, options = self._transfer("store", mask, kwargs)
        self._wait(partial(engine.store, _on_host(tokens), rows, **options))

    def retrieve(
        self, tokens: TokenIds, mask: Mask | None = None, **kwargs: Unpack[RequestArguments]
    ) -> torch.Tensor:
        """Load the longest stored prefix into its slots; arguments and errors as in `store`.

        Returns:
            Bool of shape (len(tokens),) on the CPU: True for each loaded token. Loaded tokens are
            consecutive, except that tokens with slot -1 are always False.
        """
        engine, rows, options = self._transfer("retrieve", mask, kwargs)
        return self._wait(partial(engine.retrieve, _on_host(tokens), rows, **options))

    def lookup(
        self,
        tokens: TokenIds,
        *,
        lookup_id: str | None = None,
        pin: bool = False,
        **kwargs: Unpack[RequestArguments],
    ) -> int:
        """Return the number of leading tokens that are stored; arguments and errors as in `store`.

        Args:
            tokens: Token ids of the prompt.
            lookup_id: Name of the lookup; required with `pin`.
            pin: Whether to pin chunks in host memory until `lookup_unpin(lookup_id)`.
            **kwargs: As in `store`.
        """
        given = check_arguments("lookup", kwargs, "lookup_id", "pin")
        if pin and lookup_id is None:
            raise ValueError("pin=True requires a lookup_id, which lookup_unpin needs")
        engine = self._ready(given.kv_caches)
        if engine is None:
            return 0
        pinned_id = lookup_id if pin else None
        return self._wait(
            partial(engine.lookup, _on_host(tokens), namespace=given.namespace, lookup_id=pinned_id)
        )

    def lookup_unpin(self, lookup_ids: Sequence[str] | str) -> None:
        """Release the pins of these lookups. Unknown ids are ignored."""
        engine = self._ready(None)
        for lookup_id in [lookup_ids] if isinstance(lookup_ids, str) else lookup_ids:
            if engine is not None:
                self._loop.call_soon(engine.unpin, lookup_id)

    def prefetch(self, tokens: TokenIds, **kwargs: Unpack[RequestArguments]) -> int:
        """Load the longest stored prefix into host memory and return its number of tokens.

        Args and errors: as in `store`.
        """
        given = check_arguments("prefetch", kwargs)
        engine = self._ready(given.kv_caches)
        if engine is None:
            return 0
        return self._wait(partial(engine.prefetch, _on_host(tokens), namespace=given.namespace))

    def clear(self, *, memory_only: bool = False) -> int:
        """Delete the chunks of all tiers, or of memory only; return their number."""
        engine = self._ready(None)
        return 0 if engine is None else self._wait(partial(engine.clear, memory_only=memory_only))

    def statistics(self) -> EngineStatistics | None:
        """Return a snapshot of the statistics of the engine; None before it has opened."""
        engine = self._ready(None)
        return None if engine is None else self._wait(partial(_call, engine.statistics))

    def metrics(self) -> list[Metric]:
        """Return the metric families of prometheus_client; empty before the engine has opened."""
        engine = self._ready(None)
        if engine is None:
            return []
        return self._wait(partial(_call, lambda: engine.metrics.read().families()))

    def close(self) -> None:
        """Write queued records within the configured deadline, and free all resources. Persistent tiers keep their content.

        Raises:
            EngineClosedError: The engine belongs to the parent of this forked process.
        """
        if not self._closed:
            self._loop.check_process()
        elif self._loop.inherited:
            return  # a thread of the parent may have held the lock at the fork
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._collected.detach()
            try:
                _close(self._loop, self._exit, self.config, self._close_limit_s)
            finally:
                self._engine = None

    @property
    def _close_limit_s(self) -> float:
        """Longest time in seconds that the tiers take to close."""
        queue_s = self.config.shutdown_timeout_s  # for the queue, and for calls that were cancelled
        return 2 * (queue_s + min(queue_s, TIER_CLOSE_S)) + 1.0

    @property
    def closed(self) -> bool:
        return self._closed

    def attach(self, kv_caches: Layers) -> None:
        """Open the engine with these tensors, if it is not open yet.

        Raises:
            ValueError: The engine was opened with other tensors.
        """
        self._ready(kv_caches)

    def __enter__(self) -> Self:
        self._loop.check_process()
        return self

    def __exit__(self, *error: object) -> None:
        # A forked child has nothing to close, and an error of the block must propagate.
        if not self._loop.inherited:
            self.close()

    def _ready(self, kv_caches: Layers | None) -> CacheEngine | None:
        self._loop.check_process()
        if self._closed:  # before the lock, which `close` holds until everything is closed
            raise EngineClosedError("the engine was closed")
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine was closed")
            if kv_caches is not None and self._engine is None:
                self._open(kv_caches)
            elif kv_caches is not None and _memory_of(kv_caches) != self._memory:
                raise ValueError("kv_caches= are not the tensors with which the engine was opened")
            return self._engine

    def _transfer(
        self, call: str, mask: Mask | None, kwargs: RequestArguments
    ) -> tuple[CacheEngine, Any, dict[str, Any]]:
        """Return the engine, the rows and the options of a store or a retrieve."""
        given = check_arguments(call, kwargs, "mask")
        engine = self._ready(given.kv_caches)
        if engine is None:
            raise ValueError(f"the first {call} needs kv_caches=, the paged KV cache of all layers")
        if given.slot_mapping is None:
            raise ValueError(
                "slot_mapping= is missing; expected the slot of each token in the paged KV cache"
            )
        options = {
            "mask": _on_host(mask),
            "namespace": given.namespace,
            "request_id": given.request_id,
            "fence": engine.copier.fence(),
        }
        return engine, _on_host(given.slot_mapping), options

    def _open(self, kv_caches: Layers) -> None:
        layout = self.metadata.layout_of(kv_caches)
        opened = CacheEngine.open(
            self.config, layout=layout, namespace=self.metadata.namespace_of(layout, self.config)
        )

        async def enter() -> None:
            # Assigned here, because the wait may be interrupted when the engine is open.
            self._engine = await self._exit.enter_async_context(opened)

        self._memory = _memory_of(kv_caches)
        self._wait(enter)

    def _wait(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call on the loop and return its result. If it is interrupted, it is cancelled and its end awaited.

        A running copy is awaited too, because it accesses memory that the caller may use again.
        """
        task: asyncio.Task[Any] | None = None
        started, ended = threading.Event(), threading.Event()

        async def run() -> T:
            nonlocal task
            task = asyncio.current_task()
            started.set()
            try:
                return await call()
            finally:
                task = None  # breaks the reference cycle of an error and this frame
                ended.set()

        async def cancel() -> None:
            if task is not None:
                task.cancel()

        work = None
        try:
            work = run()
            return self._loop.submit(work).result()
        except concurrent.futures.CancelledError as error:
            raise EngineClosedError(self._loop.closed or "the engine was closed during the call") from error
        except BaseException:
            # The interrupt may come before the future of the submitted call is known here.
            if not ended.is_set():
                with contextlib.suppress(EngineClosedError, concurrent.futures.CancelledError, TimeoutError):
                    self._loop.submit(cancel()).result(INTERRUPT_S)  # runs after the start of `run`
                    if started.is_set():
                        ended.wait(INTERRUPT_S)
            if work is not None and not started.is_set():
                work.close()
            raise


def _close(loop: LoopThread, exit: contextlib.AsyncExitStack, config: EngineConfig, limit_s: float) -> None:
    """Close the tiers of an engine, within `limit_s`, and end its thread."""
    try:
        loop.submit(exit.aclose()).result(limit_s)
    except TimeoutError:
        logger.warning("the tiers of the engine did not close within %.0f s and are abandoned", limit_s)
    except EngineClosedError as error:
        logger.warning("the tiers of the engine were not closed: %s", error)
    finally:
        loop.close(min(config.shutdown_timeout_s, TIER_CLOSE_S))


def _close_collected(loop: LoopThread, *arguments: Any) -> None:
    """Close an engine that was collected without `close`, on a thread of its own: the collector must not wait."""
    if not loop.inherited:
        with contextlib.suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=_close, args=(loop, *arguments), daemon=True).start()


@dataclass(slots=True)
class _Destruction:
    """The destruction of an engine by a thread.

    Attributes:
        limit_s: Longest time in seconds that others wait for its end.
        ended: Set when the tiers of the engine are closed.
    """

    limit_s: float
    ended: threading.Event = field(default_factory=threading.Event)


class LMCacheEngineBuilder:
    """Engines of this process by instance id, as in LMCache.

    In a forked child, the ids of engines that the parent had open raise EngineClosedError.
    """

    _engines: ClassVar[dict[str, LMCacheEngine]] = {}
    _destroying: ClassVar[dict[str, _Destruction]] = {}
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
        """Return the engine with this id; create it if there is none or it was closed.

        If another thread is destroying it, wait until its tiers are closed, because the new engine may use their directories.

        Raises:
            ConfigError: The engine exists with another config or other metadata.
            EngineClosedError: The engine belongs to the parent of this forked process, or its destruction takes longer than
                `CLEAR_S` and the time limit of its closing.
            ValueError: The engine was opened with other tensors.
        """
        while True:
            with cls._lock:
                engine, destruction = cls._engines.get(instance_id), cls._destroying.get(instance_id)
                if engine is None and (destruction is None or destruction.ended.is_set()):
                    engine = LMCacheEngine(config or load_engine_config(), metadata, kv_caches=kv_caches)
                    cls._engines[instance_id] = engine
                    return engine
                if engine is not None and not engine.closed:
                    engine._loop.check_process()
                    wanted = (config or engine.config, metadata or engine.metadata)
                    if wanted != (engine.config, engine.metadata):
                        raise ConfigError(
                            f"engine {instance_id!r} exists with another config or other metadata; "
                            f"destroy it first, or use another instance id"
                        )
                    if kv_caches is not None:
                        engine.attach(kv_caches)
                    return engine
            if engine is not None:  # it was closed
                cls.destroy(instance_id)
            elif destruction is not None and not destruction.ended.wait(destruction.limit_s):
                raise EngineClosedError(
                    f"engine {instance_id!r} is still being destroyed after {destruction.limit_s:.0f} s;"
                    " use another instance id"
                )

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """Return the engine with this id; None if there is none or it was closed.

        Raises:
            EngineClosedError: The engine belongs to the parent of this forked process.
        """
        with cls._lock:
            return cls._find(instance_id)

    @classmethod
    def destroy(cls, instance_id: str, *, clear: bool = False) -> None:
        """Close the engine and free all of its resources. Unknown ids are ignored.

        Args:
            instance_id: Id of the engine.
            clear: Whether to delete the content of all tiers, also on disk.

        Raises:
            EngineClosedError: The engine belongs to the parent of this forked process.
        """
        with cls._lock:
            cls._find(instance_id)
            engine = cls._engines.get(instance_id)
            if engine is None:
                return
            destruction = _Destruction(CLEAR_S + engine._close_limit_s)
            cls._destroying[instance_id] = destruction
            del cls._engines[instance_id]
        try:
            if clear and not engine.closed:
                engine.clear()
        finally:
            try:
                engine.close()
            finally:
                # Without the lock: an interrupt while waiting for it would leave the id unusable.
                destruction.ended.set()

    @classmethod
    def _find(cls, instance_id: str) -> LMCacheEngine | None:
        engine = cls._engines.get(instance_id)
        if engine is None or engine.closed:
            return None
        engine._loop.check_process()
        return engine

    @classmethod
    def _renew_lock(cls) -> None:
        cls._lock = threading.Lock()
        cls._destroying = {}


# A thread of the parent may have held the lock at the fork; the child could never release it.
os.register_at_fork(after_in_child=LMCacheEngineBuilder._renew_lock)


async def _call(function: Callable[[], T]) -> T:
    return function()


def _on_host(values: T) -> T:
    """Copy a tensor to the host. The copy waits for the current stream of this thread, which may still compute the tensor."""
    return cast("T", values.detach().cpu()) if isinstance(values, torch.Tensor) else values


def _memory_of(kv_caches: Layers) -> _Memory:
    """Address and form of each tensor, to determine whether two caches are the same memory."""
    return [
        (part.data_ptr(), tuple(part.shape), part.stride(), part.dtype)
        for _, part in named_tensors(kv_caches)
    ]
