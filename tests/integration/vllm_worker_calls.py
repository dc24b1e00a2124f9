"""Functions that tests run in vLLM's worker, on its main thread, to inspect the cache engine."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

_holds: list[tuple[threading.Event, Any, Any]] = []


def statistics(worker: Any) -> dict[str, Any]:
    """Counts of running calls, leases and stored chunks, summed over all engines of the worker."""
    del worker
    found = [engine.statistics() for engine in _engines()]
    return {
        "running": sum(each.running for each in found),
        "pinned_chunks": sum(each.pinned_chunks for each in found),
        "leased_slabs": sum(each.arena.leased_slabs for each in found),
        "pinned": all(
            each.arena.pinned_bytes >= each.arena.num_slabs * each.arena.slab_bytes for each in found
        ),
        "chunks": {name: sum(each.tiers[name].chunks for each in found) for name in found[0].tiers},
        "corrupt": sum(each.tiers["disk"].corrupt for each in found if "disk" in each.tiers),
        "counts": dict(sum((Counter(each.counts) for each in found), Counter[str]())),
    }


def run_once(worker: Any) -> None:
    """Run the model without a request: a later pipeline stage allocates its buffers in such a run."""
    worker.model_runner.profile_run()


def hold_copies(worker: Any) -> None:
    """Block copies to and from vLLM's KV cache until `let_copies_go` is called."""
    del worker
    threads = _engine().copier._threads
    gate = threading.Event()
    _holds.append((gate, threads, threads.queue))
    threads.queue = None  # later copies wait for threads of the pool
    for _ in range(threads.num):
        threads.pool.submit(gate.wait)


def let_copies_go(worker: Any) -> None:
    del worker
    for gate, threads, queue in _holds:
        threads.queue = queue
        gate.set()
    _holds.clear()


def _engine() -> Any:
    (engine,) = _engines()
    return engine


def _engines() -> list[Any]:
    """Return the engine of the worker, or those of the shards of its KV heads."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return [each.engine for each in own_connector(get_kv_transfer_group()).worker.engines]


def own_connector(connector: Any) -> Any:
    """Return our connector, which may be in a MultiConnector."""
    from lmcache_async.integration.vllm.connector import LMCacheAsyncConnector

    children = getattr(connector, "sub_connectors", [connector])
    return next(each for each in children if isinstance(each, LMCacheAsyncConnector))
