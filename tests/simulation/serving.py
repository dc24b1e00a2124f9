"""A simulation of vLLM's scheduler, the connector and the engine, in virtual time and with faults."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import patch

from lmcache_async.config.secrets import SECRET_BYTES
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.integration.vllm.config import namespace_of
from lmcache_async.integration.vllm.lookup import LookupClient
from lmcache_async.integration.vllm.lookup_server import LookupServer
from lmcache_async.integration.vllm.worker import RankEngine
from lmcache_async.metrics.instrument import Instrument
from lmcache_async.metrics.samples import Samples
from lmcache_async.registry import Registry
from lmcache_async.testing.fakes import FakeRegistry
from tests.simulation.base import Simulation, run_simulation
from tests.simulation.faults import ODDS, FaultInjector, Faults
from tests.simulation.loop import ProcessCrashed, SimulatedLoop, Violation, abandon, new_loop
from tests.simulation.network import Network
from tests.simulation.scenario import draw_layers
from tests.simulation.tiers import Backend, tier_over
from tests.simulation.world import check_metrics
from tests.support.vllm_simulator import MODELS, Setup, SimulatedVLLM, scheduler_of, several_groups_served
from tests.support.vllm_traffic import Traffic, another_connector, related_prompts


@contextlib.asynccontextmanager
async def open_vllm(
    setup: Setup, registry: Registry, loop: SimulatedLoop, network: Network, *, in_process: bool
) -> AsyncIterator[tuple[SimulatedVLLM, list[CacheEngine]]]:
    """Run a simulated vLLM with our connector, whose threads and sockets are on this loop.

    Args:
        in_process: Whether the only rank is in the scheduler's process, which then looks up new requests in its index.
    """
    workers: list[tuple[RankEngine, Any]] = []
    clients: list[LookupClient] = []

    def client(*args: Any, **options: Any) -> LookupClient:
        clients.append(LookupClient(*args, **options, clock=loop.time, loop=loop))
        return clients[-1]

    def opened(side: RankEngine, config: Any, cache_config: Any, caches: Any, _: object) -> bool:
        workers.append((side, (config, cache_config, caches)))
        return True

    with (
        patch("lmcache_async.integration.vllm.scheduler.LookupClient", client),
        patch("lmcache_async.integration.vllm.scheduler.Registry", lambda: registry),
        patch.object(RankEngine, "register", opened),
    ):
        sim = SimulatedVLLM(setup)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(network.connected())
        engines = [await _open_rank(registry, loop, network, stack, side, *given) for side, given in workers]
        if in_process:
            ((rank, _),) = workers
            scheduler_of(sim).connect({}, rank.server)
        try:
            yield sim, engines
        finally:
            for one in clients:
                one.close(0.0)
                await asyncio.wait({one._main_task})


async def _open_rank(
    registry: Registry,
    loop: SimulatedLoop,
    network: Network,
    stack: contextlib.AsyncExitStack,
    side: RankEngine,
    config: Any,
    cache_config: Any,
    caches: Any,
) -> CacheEngine:
    groups = side._engine_groups(cache_config, caches, namespace_of(config, cache_config, side.config, ""))
    engine = await stack.enter_async_context(
        CacheEngine.open(
            side.config,
            layout=groups[0].layout,
            namespace=groups[0].namespace,
            more_groups=groups[1:],
            instrument=Instrument(),
            registry=registry,
            memory_watcher=side._memory,
        )
    )
    server = side.attach(engine, _Steps(loop), *groups)
    network.listen(side.address, server.accept)
    stack.push_async_callback(_hang_up, server)
    return engine


class _Steps:
    """Runs the coroutines of the model thread on the same loop."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        self._loop.create_task(coroutine)
        return Future()


async def _hang_up(server: LookupServer) -> None:
    connections = list(server._connections)
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


PATIENCE_S = 120.0
"""Time limit, in virtual seconds, for the end of a next request after faults end."""

SETTLE_S = 10.0
"""Time limit for the release of all leases. Shorter than the lifetime of a pin that is never released."""

PIN_TTL_S = 30.0
"""Lifetime of a pin, in seconds. It applies if the message that releases the pin was lost."""


class Serving(Simulation):
    """A sequence of processes over the same backend, each serving requests."""

    serving = True

    def __init__(self, seed: int, steps: int, faults: Faults, folder: Path) -> None:
        super().__init__(steps)
        self.rng = Random(f"serving {seed} {faults}")
        odds = ODDS[faults].scaled(2 * self.rng.random())
        self._injector = FaultInjector(self.rng, odds, call_timeout_s=0.5)
        self._encrypted = self.rng.random() < 0.3
        overlapped, stages = self.rng.random() < 0.5, self.rng.choice((1, 1, 2, 3))
        multi = self.rng.random() < 0.3
        models = list(MODELS.values()) if several_groups_served() else [MODELS["full"]]
        groups = () if multi or self.rng.random() < 0.4 else self.rng.choice(models)
        # The simulated vLLM knows no drafts in several stages.
        drafts = self.rng.choice((0, 0, 3, 5)) if stages == 1 and not multi else 0
        tables = max(1, len(groups))
        self._reset_cache = self.rng.choice(("all", "memory", "new_namespace"))
        self._backend = Backend(
            self._injector,
            max_records=self.rng.choice((None, 8 * tables)),
            local_index=True,
            encrypted=self._encrypted,
            persistent=self.rng.random() < 0.7,
        )
        registry = FakeRegistry(tiers={"simulated": tier_over(self._backend)})
        self._registry = registry
        self._setup = Setup(
            folder=folder / "model",
            options=self._options(folder),
            num_blocks=self.rng.choice((24, 40, 200)) * tables,
            ranks=self.rng.choice((1, 2)),
            max_num_batched_tokens=self.rng.choice((64, 256)),
            max_num_seqs=self.rng.choice((2, 8)),
            prefix_caching=self.rng.random() < 0.5,
            overlapped=overlapped,
            stages=stages,
            by_priority=not multi and self.rng.random() < 0.3,
            groups=groups,
            drafts=drafts,
            multi=multi,
            first=self.rng.random() < 0.5,
            kv_role=self.rng.choice(("kv_both", "kv_both", "kv_producer")),
            others=(another_connector(seed, sync_failures=not overlapped and stages == 1),) if multi else (),
        )
        # VLLM's initialization of a process is done now.
        SimulatedVLLM(Setup(folder=folder / "first", options=None))
        self._in_process = self._setup.ranks == 1 and not multi and self.rng.random() < 0.5
        self._prompts = list(related_prompts(self.rng, num_tokens=200, count=6).values())

    def live(self) -> None:
        loop = new_loop(self.rng, self.trace, start=self.now, thread_delay=self._injector.thread_delay)
        loop.deadline = self.now + 1000.0
        if self.rng.random() < 0.4:
            loop.crash_at = self.trace.decisions + int(self.rng.expovariate(1 / 8000))
        try:
            loop.run_until_complete(self._live(loop))
        except ProcessCrashed:
            self.counts["crash"] += 1
            self._backend.crash()
        finally:
            if not self._backend.persistent:
                self._backend.records.clear()
            self.now = loop.time()
            abandon(loop)
            self._injector.forget()

    def _options(self, folder: Path) -> dict[str, Any]:
        return {
            "chunk_size": self.rng.choice((16, 32, 64)),
            "arena.max_bytes": self.rng.choice(("256KiB", "1MiB")),
            "arena.prefault": False,
            "arena.huge_pages": False,
            "tiers": [
                "cpu",
                {"name": "simulated", "id": "slow", "timeout_s": 0.5, "layers": draw_layers(self.rng)},
            ],
            "vllm.lookup_timeout_s": self.rng.choice((1e-4, 0.1, 1.0)),
            "vllm.lookup_pin_ttl_s": self.rng.choice((0.05, PIN_TTL_S)),
            "vllm.wait_for_producer_s": self.rng.choice((0.01, 1.0)),
            "vllm.load_policy": self.rng.choice(("auto", "always")),
            "vllm.layerwise_load": "never",  # it blocks the only thread here
            "vllm.reset_cache": self._reset_cache,
            "vllm.socket_dir": str(folder),
            "shutdown_timeout_s": 1.0,
        } | (self._secrets(folder) if self._encrypted else {})

    def _secrets(self, folder: Path) -> dict[str, Any]:
        files = {"encryption.key_file": folder / "encryption", "hash_key_file": folder / "hash"}
        for file in files.values():
            file.write_text(self.rng.randbytes(SECRET_BYTES).hex())
            file.chmod(0o600)
        return {name: str(file) for name, file in files.items()} | {"hash_algorithm": "sha256"}

    async def _live(self, loop: SimulatedLoop) -> None:
        self.counts["start"] += 1
        self._injector.start()
        network = Network(loop, self.rng, cut=self._injector.odds.error)
        opened = open_vllm(self._setup, self._registry, loop, network, in_process=self._in_process)
        async with opened as (sim, engines):
            # Without another namespace, tiers keep the KV of former weights. The other connector keeps it anyway.
            updates = not self._setup.multi and self._reset_cache != "memory"
            traffic = Traffic(sim, self.rng, self._prompts, updates=updates)
            await self._serve(traffic, self.rng.randint(20, 200))
            self._injector.stop()
            network.reliable = True
            traffic.resume()
            await self._finish(sim, loop)
            traffic.check()
            await self._check(sim, engines, loop.time() + SETTLE_S + (PIN_TTL_S if network.has_cut else 0.0))
        if loop.unhandled:
            raise Violation(f"error reported to the event loop only: {loop.unhandled[0]}")

    async def _serve(self, traffic: Traffic, turns: int) -> None:
        """Let vLLM step while requests are added and other events happen."""
        for _ in range(turns):
            self.step += 1
            if event := traffic.event():
                self.note(event)
            traffic.sim.step()
            # A step of vLLM, or a pause in which a store or a lookup can end.
            await asyncio.sleep(2e-3 * self.rng.random() if self.rng.random() < 0.8 else 0.05)

    async def _finish(self, sim: SimulatedVLLM, loop: SimulatedLoop) -> None:
        start, ended = loop.time(), 0
        while sim.busy:
            if len(sim.finish_reasons) != ended:
                start, ended = loop.time(), len(sim.finish_reasons)
            waited = loop.time() - start
            if waited > PATIENCE_S:
                raise Violation(f"no request has ended in {PATIENCE_S} s without faults")
            sim.step()
            # A request that never ends costs 800 steps, not 120 000.
            await asyncio.sleep(max(1e-3, waited / 100))

    async def _check(self, sim: SimulatedVLLM, engines: list[CacheEngine], deadline: float) -> None:
        """Check that neither vLLM's block pool nor an engine holds anything."""
        loop = asyncio.get_running_loop()
        side = scheduler_of(sim)
        free = sim.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if (side.has_work, side.num_requests, free) != (False, 0, self._setup.num_blocks - 1):
            raise Violation(f"vLLM is idle, but {self._setup.num_blocks - 1 - free} blocks are held")
        for engine in engines:
            await engine.flush(timeout_s=SETTLE_S)
            while _held(engine):
                if loop.time() > deadline:
                    raise Violation(f"everything has ended, but {_held(engine)}")
                await asyncio.sleep(0.01)
            check_metrics(engine.metrics.read(), Samples())
        check_scheduler_metrics(side.metrics.read())
        self.counts["hit tokens"] += sum(external for _, external in sim.cached_tokens.values())


def check_scheduler_metrics(samples: Samples) -> None:
    """Check that the sums agree after all requests have ended."""

    def value(name: str, *labels: str) -> float:
        return cast("float", samples.get(name, *labels) or 0.0)

    decided = value("decided_total", "load") + value("decided_total", "partial")
    if value("loads_total") != decided:
        raise Violation(f"{value('loads_total')} loads were planned, but {decided} decided")
    parts = [("failed_loads_total", (), "loads_total", ())]
    parts += [("decided_total", (), "lookups_total", ("hit",))]
    tiers = [labels for series, labels, _ in samples if series.name == "load_tokens_total"]
    parts += [("load_tokens_total", tier, "lookup_hit_tokens_total", tier) for tier in tiers]
    parts += [("lookup_hit_tokens_total", (), "lookup_asked_tokens_total", ())]
    for part, labels, whole, of in parts:
        found = value(part, *labels) if labels else samples.total(part)
        most = value(whole, *of) if of else samples.total(whole)
        if found > most:
            raise Violation(f"{part} {labels} is {found}, more than {whole} {of} of {most}")


def _held(engine: CacheEngine) -> str:
    found = engine.statistics()
    leased = found.arena.leased_slabs - found.tiers["cpu"].chunks
    calls = found.running + found.late_calls + int(engine.metrics.read().total("tier_calls_in_flight"))
    if leased or calls or found.pinned_chunks:
        return f"{leased} slabs are leased, {calls} calls run, {found.pinned_chunks} chunks are pinned"
    return ""


simulate_serving = functools.partial(run_simulation, Serving)
