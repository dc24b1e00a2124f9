"""Functions that tests run in vLLM's worker, on its main thread, to inspect the cache engine."""

from __future__ import annotations

import threading
from typing import Any

_holds: list[threading.Event] = []


def statistics(worker: Any) -> dict[str, Any]:
    """Counts of running calls, leases and stored chunks of the engine."""
    del worker
    found = _engine().statistics()
    return {
        "running": found.running,
        "pinned_chunks": found.pinned_chunks,
        "leased_slabs": found.arena.leased_slabs,
        "chunks": {name: tier.chunks for name, tier in found.tiers.items()},
        "corrupt": found.tiers["disk"].corrupt if "disk" in found.tiers else 0,
        "counts": dict(found.counts),
    }


def run_once(worker: Any) -> None:
    """Run the model without a request: a later pipeline stage makes its buffers in such a run."""
    worker.model_runner.profile_run()


def status_url(worker: Any) -> str | None:
    """Where the engine's status page is."""
    del worker
    url: str | None = _engine().status_url
    return url


def hold_copies(worker: Any) -> None:
    """From now on nothing is copied to or from vLLM's KV cache, until `let_copies_go`."""
    del worker
    copier = _engine().copier
    gate = threading.Event()
    _holds.append(gate)
    for _ in range(copier._threads):
        copier._executor.submit(gate.wait)


def let_copies_go(worker: Any) -> None:
    del worker
    for gate in _holds:
        gate.set()
    _holds.clear()


def _engine() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return connector.worker.engine
