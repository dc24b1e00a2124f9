"""Records between two processes through the peer tier and a daemon, beside bare sockets in the same pattern.

Both ends are processes of this machine. Both have as many connections, and move as many records at a time, over
the loopback, from and into memory of the same size.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import Case, option
from lmcache_async.bench.moved import TIMEOUT_S, Moved
from lmcache_async.bench.peer_servers import bare_server, daemon
from lmcache_async.bench.tier_probes import get_probe, opened_tier, put_probe
from lmcache_async.bench.valkey import UNIT
from lmcache_async.bench.valkey_clients import BareSockets
from lmcache_async.memory.arena import Arena
from lmcache_async.testing.records import FORMAT, write_record
from lmcache_async.tiers.base import Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager

    from lmcache_async.bench.frame import Frame, Parameter, Row
    from lmcache_async.memory.buffer import Buffer

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    mib: int = option(256, "MiB that each put and each get moves")
    connections: int = option(4, "records that are on their way at a time")
    record_mib: tuple[int, ...] = field(default=(4, 32))


QUICK = Settings(mib=2, record_mib=(1,))


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    for mib in settings.record_mib:
        count = max(settings.mib // mib, 1)
        nbytes = mib * MIB
        arena = Arena((count + 1) * nbytes, nbytes, huge_pages=True, prefault=True)
        with (
            contextlib.closing(arena),
            _record(arena, nbytes) as record,
            bare_server(count * nbytes, nbytes) as bare_port,
            daemon(2 * count * nbytes + 64 * MIB, nbytes) as port,
        ):
            bare = Moved(f"valkey://127.0.0.1:{bare_port}", arena, record, count, settings.connections)
            ours = Moved(f"valkey://127.0.0.1:{port}", arena, record, count, settings.connections)
            async with _opened(ours, port) as tier:
                for row in await frame.compare(
                    _cases(ours, tier, BareSockets(bare), f"records of {mib} MiB")
                ):
                    yield row


def _cases(moved: Moved, tier: Tier, bare: BareSockets, name: str) -> list[Case]:
    parameters: dict[str, Parameter] = {
        "record_bytes": moved.record.nbytes,
        "records": moved.count,
        "connections": moved.connections,
    }
    return [
        Case(f"put, {name}", UNIT, put_probe(moved, tier), {"bare sockets": bare.put}, parameters),
        Case(f"get, {name}", UNIT, get_probe(moved, tier), {"bare sockets": bare.get}, parameters),
    ]


@contextlib.contextmanager
def _record(arena: Arena, nbytes: int) -> Iterator[Buffer]:
    """A daemon looks whether what it takes begins as a record."""
    record = arena.lease_nowait(nbytes)
    if record is None:
        raise RuntimeError("the arena has no room for the record")
    with record:
        write_record(record, 1, nbytes - FORMAT.header_bytes)
        yield record


def _opened(moved: Moved, port: int) -> AbstractAsyncContextManager[Tier]:
    options = {
        "peers": [f"127.0.0.1:{port}"],
        "write_to": "rendezvous",
        "connections": moved.connections,
        "transfer_timeout_s": TIMEOUT_S,
        "lookup_timeout_s": TIMEOUT_S,
    }
    return opened_tier("peer", options, moved.arena, where="peer")
