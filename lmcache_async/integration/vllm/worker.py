"""The worker half: owns the cache engine, its event loop and the lookup server of one rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import EngineClosedError
from lmcache_async.hashing import hash_key_id
from lmcache_async.integration.vllm.feed import StatsFeed
from lmcache_async.integration.vllm.layerwise import LayerwiseLoads
from lmcache_async.integration.vllm.lookup_server import LookupServer
from lmcache_async.integration.vllm.metadata import StepMetadata, WorkerReport
from lmcache_async.integration.vllm.notices import Notices
from lmcache_async.integration.vllm.transfers import Transfers
from lmcache_async.integration.vllm.wire import PROTOCOL, Identity
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lmcache_async.config import EngineConfig
    from lmcache_async.device.layout import KVLayout
    from lmcache_async.hashing import Namespace
    from lmcache_async.integration.vllm.metadata import Job
    from lmcache_async.observability.families import Family
    from lmcache_async.tiers.layers.notice import Watcher

logger = LimitedLogger(logging.getLogger(__name__))


class OpenEngine(Protocol):
    def __call__(
        self,
        config: EngineConfig,
        *,
        layout: KVLayout,
        namespace: Namespace,
        watcher: Watcher | None = None,
        replica: int = 0,
    ) -> AbstractAsyncContextManager[Any]: ...


class WorkerHalf:
    """Forwarded to by the connector in a vLLM worker. Only `open` and `close` wait.

    Attributes:
        config: The engine's.
        rank: Of this worker in the engine.

    Args:
        rank: Of this worker in the engine; says which keys of a job are its own.
        socket: Where lookups are answered.
        open_engine: Makes the engine.
        kv_events: VLLM publishes KV events; the first rank tells of its tiers.
        replica: The number of the data-parallel replica.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        block_size: int,
        socket: Path,
        open_engine: OpenEngine = CacheEngine.open,
        kv_events: bool = False,
        replica: int = 0,
    ) -> None:
        self.config = config
        self._replica = replica
        self.rank = rank
        self._block_size = block_size
        self._socket = socket
        self._open_engine = open_engine
        self._loop: LoopThread | None = None
        self._serving: concurrent.futures.Future[None] | None = None
        self._stop = asyncio.Event()
        self._transfers: Transfers | None = None
        self._layerwise: LayerwiseLoads | None = None
        self._feed: StatsFeed | None = None
        self._notices = Notices(config.chunk_size) if kv_events and rank == 0 else None
        self._loads_early = False
        self._loads: Sequence[Job] = ()
        self._stores: Sequence[Job] = ()

    def open(self, layout: KVLayout, namespace: Namespace) -> None:
        """Open the engine over the registered KV cache, and serve.

        Raises:
            ConfigError: The engine cannot be made as configured.
        """
        # On a CPU the forward is done when its call returns, and new blocks were zeroed before: a load
        # may begin with the step. On a device it waits behind the forward that was just launched.
        self._loads_early = layout.device.type == "cpu"
        opened: concurrent.futures.Future[Transfers] = concurrent.futures.Future()
        self._loop = LoopThread("lmcache-async")
        self._serving = self._loop.submit(self._serve(layout, namespace, opened))
        try:
            self._transfers = opened.result()
            self._layerwise = LayerwiseLoads(self._transfers, layout.layer_ends, layout.num_planes)
        except BaseException:
            self._loop.close()
            raise

    def begin_step(self, metadata: StepMetadata) -> bool:
        """For bind_connector_metadata; True like all parts of a step: it was done."""
        self._loads, self._stores = metadata.loads, metadata.stores
        self._running.tell(metadata.plans)
        return self.start_loads() if self._loads_early else True

    def start_loads(self) -> bool:
        """For start_load_kv."""
        loads, self._loads = self._loads, ()
        progress = self._waits.start([job for job in loads if job.layerwise])
        self._running.load(loads, progress)
        return True

    def wait_for_layer(self, layer_name: str) -> bool:
        """For wait_for_layer_load: its part of this step's layer-wise loads must be there."""
        self._waits.wait(layer_name)
        return True

    def start_stores(self) -> bool:
        """For wait_for_save: the forward has been launched. Does not wait."""
        stores, self._stores = self._stores, ()
        self._running.store(stores)
        return True

    def abandon_step(self) -> None:
        """Something of ours broke: report all that has not been started as failed or dropped."""
        loads, stores, self._loads, self._stores = self._loads, self._stores, (), ()
        self._running.lose_loads(loads)
        self._running.drop_stores(stores)

    def take_finished(self) -> set[str]:
        return self._running.take_finished()

    def take_failed_blocks(self) -> set[int]:
        self._waits.settle()  # the forward is over
        return self._running.take_failed_blocks()

    def take_report(self) -> WorkerReport | None:
        copied, unshared = self._running.take_copied(), self._running.take_unshared()
        notices = self._notices.take() if self._notices is not None else ()
        return WorkerReport(copied, unshared, notices) if copied or unshared or notices else None

    def take_stats(self) -> list[Family]:
        """For get_kv_connector_stats: what is new of the engine's metrics."""
        return self._feed.take() if self._feed is not None else []

    def close(self) -> None:
        """Close the engine and the loop; waits at most the configured time and a little more."""
        if self._loop is None or self._serving is None:
            return
        loop, self._loop = self._loop, None
        try:
            loop.call_soon(self._stop.set)
            self._serving.result(self.config.shutdown_timeout_s + 0.5)
        except (TimeoutError, concurrent.futures.CancelledError, EngineClosedError):
            logger.report("close", "the engine did not close in time; what was not written is lost")
        finally:
            loop.close(0.5)

    @property
    def _running(self) -> Transfers:
        if self._transfers is None:
            raise RuntimeError("the KV cache was never registered")
        return self._transfers

    @property
    def _waits(self) -> LayerwiseLoads:
        if self._layerwise is None:
            raise RuntimeError("the KV cache was never registered")
        return self._layerwise

    async def _serve(
        self, layout: KVLayout, namespace: Namespace, opened: concurrent.futures.Future[Transfers]
    ) -> None:
        """Hold engine and server open until told to stop, in one task from the first to the last."""
        try:
            watched = {} if self._notices is None else {"watcher": self._notices}
            opening = self._open_engine(
                self.config, layout=layout, namespace=namespace, replica=self._replica, **watched
            )
            async with opening as engine:
                transfers = Transfers(
                    engine,
                    self._loop_thread,
                    rank=self.rank,
                    chunk_size=self.config.chunk_size,
                    block_size=self._block_size,
                    notices=self._notices,
                )
                server = LookupServer(engine, self._identity(namespace), self._socket, clear=transfers.clear)
                await server.start()
                try:
                    self._feed = StatsFeed(engine)
                    opened.set_result(transfers)
                    await self._stop.wait()
                finally:
                    if self._feed is not None:
                        self._feed.close()
                    await server.aclose()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    @property
    def _loop_thread(self) -> LoopThread:
        if self._loop is None:
            raise RuntimeError("the worker half is closed")
        return self._loop

    def _identity(self, namespace: Namespace) -> Identity:
        return Identity(
            protocol=PROTOCOL,
            root=namespace.root(),
            algorithm=self.config.hash_algorithm,
            chunk_size=self.config.chunk_size,
            block_size=self._block_size,
            hash_key_id=hash_key_id(namespace.hash_key),
        )
