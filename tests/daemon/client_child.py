"""A client in its own process: `hold SOCKET` holds a lease and a half-written reservation, `store SOCKET` stores.

It prints one line when done, then waits until it is killed or its input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from lmcache_async.daemon.messages import RESERVATION, Op
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.records import SLAB_BYTES, key_of, record
from lmcache_async.testing.rig import Rig
from tests.support import engines
from tests.support.daemons import host_tier

TOKENS = list(range(100, 136))


async def hold(path: Path) -> None:
    arena = Arena(4 * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)
    tier = host_tier(path, tenant="held")
    tier.bind(arena)
    async with tier:
        with record(arena, 1) as buffer:
            await tier.put(key_of(1), buffer)
            got = await tier.get(key_of(1), no_memory)
            assert got is not None
            connection = tier._opened.connection  # type: ignore[union-attr]
            reservation = RESERVATION.pack(key_of(2), buffer.nbytes)
            [grant] = await tier._request_grants(connection, Op.RESERVE, reservation, 1)
            connection.mapping.target(grant)[:5000] = buffer.array[:5000]
        read, _ = os.pipe()
        child = os.fork()  # it inherits the connection and outlives this process
        if not child:
            os.read(read, 1)
        print(f"holding {child}", flush=True)  # noqa: T201
        await asyncio.to_thread(sys.stdin.read)


async def store(path: Path) -> None:
    rig = Rig(slabs=32)
    tiers = [{"name": "host", "socket": str(path), "prefault": False, "connect_timeout_s": 10}]
    async with rig.open(tiers=tiers) as engine:
        report = await engines.store(rig, engine, TOKENS)
        print(f"stored {report.stored}", flush=True)  # noqa: T201


async def no_memory(nbytes: int) -> Buffer:
    raise AssertionError(f"{nbytes} bytes are asked for, and nothing is to be copied")


if __name__ == "__main__":
    asyncio.run({"hold": hold, "store": store}[sys.argv[1]](Path(sys.argv[2])))
