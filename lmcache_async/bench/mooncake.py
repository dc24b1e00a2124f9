"""Records through the mooncake tier, beside Mooncake's own client in the same pattern.

Both move the same batches between one pool and the same registered memory, as many at a time. Without `--url`
the master is one of our own on the loopback, with memory in another process.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import Case, option
from lmcache_async.bench.mooncake_clients import Peer, own_pool
from lmcache_async.bench.moved import PREFIX, Moved, made_record
from lmcache_async.bench.tier_probes import get_probe, opened_tier, put_probe
from lmcache_async.memory.arena import Arena
from lmcache_async.tiers.base import Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from lmcache_async.bench.frame import Frame, Parameter, Probe, Row

UNIT = "GB/s"
MIB = 1 << 20
BATCH_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    url: str = option("", "master to use, as the tier's url; one of our own by default", parse=str)
    mib: int = option(256, "MiB that each put and each get moves")
    threads: int = option(1, "calls of Mooncake's client at a time")
    record_mib: tuple[int, ...] = field(default=(4, 32))


QUICK = Settings(mib=2, record_mib=(1,))


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:  # a library of the system's is missing; docs/tiers/mooncake.md
        frame.leave_out("all of it", f"Mooncake's library cannot be loaded: {error}")
        return
    with contextlib.ExitStack() as stack:
        # What is moved, under two names each, and room for the master to let go of the last round's.
        url = settings.url or stack.enter_context(own_pool((settings.mib + 64) * 4 * MIB))
        for mib in settings.record_mib:
            count = max(settings.mib // mib, 1)
            arena = Arena((count + 1) * mib * MIB, mib * MIB, huge_pages=True, prefault=True)
            with contextlib.closing(arena), made_record(arena, mib * MIB) as record:
                moved = Moved(url, arena, record, count, settings.threads)
                async with _opened(moved) as tier:
                    with Peer.open(moved, BATCH_BYTES) as peer:
                        for row in await frame.compare(_cases(moved, tier, peer, f"records of {mib} MiB")):
                            yield row
                        peer.clear()
                    await _clear(moved, tier)


def _cases(moved: Moved, tier: Tier, peer: Peer, name: str) -> list[Case]:
    parameters: dict[str, Parameter] = {
        "record_bytes": moved.record.nbytes,
        "records": moved.count,
        "threads": moved.connections,
        "batch_bytes": BATCH_BYTES,
    }
    puts: dict[str, Probe] = {"Mooncake's client": peer.put, "Mooncake's client, one call": peer.put_at_once}
    gets: dict[str, Probe] = {"Mooncake's client": peer.get, "Mooncake's client, one call": peer.get_at_once}
    return [
        Case(f"put, {name}", UNIT, put_probe(moved, tier, _clear), puts, parameters),
        Case(f"get, {name}", UNIT, get_probe(moved, tier), gets, parameters),
    ]


async def _clear(moved: Moved, tier: Tier) -> None:
    """What is there already is not moved again."""
    for key in moved.keys:
        await tier.remove(key)


def _opened(moved: Moved) -> AbstractAsyncContextManager[Tier]:
    options = {
        "url": moved.url,
        "hostname": "127.0.0.1",
        "prefix": f"{PREFIX}tier:",
        "threads": moved.connections,
        "batch_bytes": BATCH_BYTES,
    }
    return opened_tier("mooncake", options, moved.arena, where="--url")
