"""A whole vLLM on one simulated loop: its scheduler, and our connector with its threads and sockets as steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.integration.vllm import connector as connector_module
from lmcache_async.integration.vllm.config import namespace_of
from lmcache_async.integration.vllm.layerwise import LayerwiseLoads
from lmcache_async.integration.vllm.lookup_client import LookupClient
from lmcache_async.integration.vllm.lookup_server import LookupServer
from lmcache_async.integration.vllm.transfers import Transfers
from lmcache_async.observability.instrument import Instrument
from lmcache_async.registry import Registry
from lmcache_async.testing.simulation.loop import SimulatedLoop
from lmcache_async.testing.simulation.streams import Network
from lmcache_async.testing.vllm_setup import Setup
from lmcache_async.testing.vllm_simulator import SimulatedVLLM

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from lmcache_async.integration.vllm.worker import WorkerHalf


@contextlib.asynccontextmanager
async def open_vllm(
    setup: Setup, registry: Registry, loop: SimulatedLoop, network: Network
) -> AsyncIterator[tuple[SimulatedVLLM, list[CacheEngine]]]:
    """All of vLLM, and in it our connector, with its threads and sockets on this loop."""
    halves: list[tuple[WorkerHalf, Any]] = []
    clients: list[LookupClient] = []

    def client(*args: Any, **options: Any) -> LookupClient:
        clients.append(LookupClient(*args, **options, clock=loop.time, loop=loop))
        return clients[-1]

    def opened(half: WorkerHalf, config: Any, cache_config: Any, caches: Any) -> bool:
        halves.append((half, (config, cache_config, caches)))
        return True

    with (
        patch("lmcache_async.integration.vllm.lookup_client.LookupClient", client),
        patch.object(connector_module, "open_worker_half", opened),
    ):
        sim = SimulatedVLLM(setup)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(network.connected())
        engines = [
            await _open_rank(setup, registry, loop, network, stack, half, *given) for half, given in halves
        ]
        try:
            yield sim, engines
        finally:
            for one in clients:
                one.close(0.0)
                await asyncio.wait({one._main_task})


async def _open_rank(
    setup: Setup,
    registry: Registry,
    loop: SimulatedLoop,
    network: Network,
    stack: contextlib.AsyncExitStack,
    half: WorkerHalf,
    config: Any,
    cache_config: Any,
    caches: Any,
) -> CacheEngine:
    size = setup.block_size
    layout = KVLayout.from_block_views(caches, num_blocks=setup.num_blocks, block_size=size)
    namespace = namespace_of(config, cache_config, half.config, layout.text)
    engine = await stack.enter_async_context(
        CacheEngine.open(
            half.config,
            layout=layout,
            namespace=namespace,
            instrument=Instrument(),
            registry=registry,
        )
    )
    transfers = Transfers(
        engine, _Steps(loop), rank=half.rank, chunk_size=half.config.chunk_size, block_size=size
    )
    half._transfers = transfers
    half._layerwise = LayerwiseLoads(transfers, layout.layer_ends, layout.num_planes)
    server = LookupServer(engine, half._identity(namespace), half._socket, clear=transfers.clear)
    network.listen(half._socket, server._accept)
    stack.push_async_callback(_hang_up, server)
    return engine


class _Steps:
    """What runs coroutines for the model's thread: the same loop."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        self._loop.create_task(coroutine)
        return Future()


async def _hang_up(server: LookupServer) -> None:
    connections = list(server._connections)
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
