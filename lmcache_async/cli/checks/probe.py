"""A tier that is elsewhere: it is opened, and one record goes there and back."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from lmcache_async.cli.checks.check import Check, Outcome, fail, ok, warn
from lmcache_async.config import TierSpec
from lmcache_async.errors import LMCacheAsyncError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.tiers.base import Tier
from lmcache_async.types import KEY_BYTES, Chunk, ChunkKey

T = TypeVar("T")

PAYLOAD_BYTES = 64 << 10
FORMAT = RecordFormat(namespace='{"doctor":"probe"}', layout="probe", dtype="uint8", chunk_size=16)
LOOKUPS = 5
SLOW_S = 0.1


def probe_timeout_s(spec: TierSpec) -> float:
    """After so many seconds all of its calls have ended, or one of them blocks."""
    return spec.open_timeout_s + (LOOKUPS + 6) * spec.timeout_s + 5.0


def check_tier(spec: TierSpec, tier: Tier) -> Iterator[Check]:
    """Open it, look up, put, get and remove a record that is nobody's, and close it."""
    yield from asyncio.run(_check(spec, tier))


async def _check(spec: TierSpec, tier: Tier) -> list[Check]:
    slab_bytes = FORMAT.record_bytes(PAYLOAD_BYTES)
    arena = Arena(4 * slab_bytes, slab_bytes, huge_pages=False, prefault=False)
    opened = f"opens ({spec.id})"
    checks: list[Check] = []
    try:
        tier.bind(arena)
        begin = time.perf_counter()
        try:
            await asyncio.wait_for(tier.__aenter__(), spec.open_timeout_s)
        except TimeoutError:
            found = f"it was not open after {spec.open_timeout_s:g} s"
            return [fail(opened, found, "see whether its server answers from this machine")]
        checks.append(ok(opened, f"in {_ms(time.perf_counter() - begin)}"))
        try:
            checks += await _use(spec, tier, arena)
        finally:
            await asyncio.wait_for(tier.__aexit__(None, None, None), spec.timeout_s)
    except LMCacheAsyncError as error:
        return [
            *checks,
            fail(opened, str(error), _todo(error)),
        ]
    except TimeoutError:
        checks.append(warn(opened, f"it was not closed in {spec.timeout_s:g} s", "see the server's log"))
    finally:
        arena.close()
    return checks


async def _use(spec: TierSpec, tier: Tier, arena: Arena) -> list[Check]:
    name = f"record ({spec.id})"
    key = ChunkKey(secrets.token_bytes(KEY_BYTES))
    try:
        times = []
        for _ in range(LOOKUPS):
            begin = time.perf_counter()
            if await _in_time(spec, tier.contains(key)):
                return [fail(name, "it says that it has a record that nobody stored", "report it")]
            times.append(time.perf_counter() - begin)
    except (TimeoutError, LMCacheAsyncError) as error:
        return [_failed(spec, "a lookup", error)]
    checks = [_round_trip(spec, sorted(times)[LOOKUPS // 2])]
    if not tier.capabilities.writes:
        return [*checks, ok(name, "this tier only reads: nothing was written")]
    record = _record(arena, key)
    try:
        check = await _there_and_back(spec, tier, key, arena, record)
    finally:
        record.release()
        removed = await _remove(spec, tier, key)
    return [*checks, _with_rest(spec, tier, check, removed)]


async def _there_and_back(spec: TierSpec, tier: Tier, key: ChunkKey, arena: Arena, record: Buffer) -> Check:
    name, step = f"record ({spec.id})", "a put"
    try:
        begin = time.perf_counter()
        await _in_time(spec, tier.put(key, record))
        put = time.perf_counter() - begin
        step = "a get"
        begin = time.perf_counter()
        same = await _same(spec, tier, key, arena, record)
        get = time.perf_counter() - begin
    except (TimeoutError, LMCacheAsyncError) as error:
        return _failed(spec, step, error)
    if not same:
        return fail(name, "what was stored did not come back", "see whether its server has room")
    return ok(name, f"put in {_ms(put)}, got back the same in {_ms(get)}")


async def _remove(spec: TierSpec, tier: Tier, key: ChunkKey) -> bool | Exception:
    """The probe, also where its put failed or was late: it may be there all the same."""
    try:
        return await _in_time(spec, tier.remove(key)) if tier.capabilities.removes else False
    except (TimeoutError, LMCacheAsyncError) as error:
        return error


def _with_rest(spec: TierSpec, tier: Tier, check: Check, removed: bool | Exception) -> Check:
    """What came of the record, and what is left of it there."""
    went_well = check.outcome is Outcome.OK
    if isinstance(removed, Exception) and went_well:
        check = _failed(spec, "a removal", removed)
    if not tier.capabilities.removes:
        stays = "stays: this tier removes nothing" if went_well else "may stay: this tier removes nothing"
    elif isinstance(removed, Exception) or (went_well and not removed):
        stays = "may stay"
    else:
        return check
    return replace(check, found=f"{check.found}; the probe, of 64 KiB, {stays}")


def _failed(spec: TierSpec, step: str, error: Exception) -> Check:
    name = f"record ({spec.id})"
    if isinstance(error, LMCacheAsyncError):
        return fail(name, f"{step} failed: {error}", _todo(error))
    return fail(name, f"{step} took longer than timeout_s of {spec.timeout_s:g} s", "see its server")


async def _same(spec: TierSpec, tier: Tier, key: ChunkKey, arena: Arena, record: Buffer) -> bool:
    async def allocate(nbytes: int) -> Buffer:
        return await arena.lease(nbytes, timeout_s=spec.timeout_s)

    found = await _in_time(spec, tier.get(key, allocate))
    if found is None:
        return False
    try:
        return bytes(found.view) == bytes(record.view)
    finally:
        found.release()


def _record(arena: Arena, key: ChunkKey) -> Buffer:
    record = arena.lease_nowait(FORMAT.record_bytes(PAYLOAD_BYTES))
    assert record is not None, "an arena of four slabs has one"
    record.view[FORMAT.header_bytes :] = secrets.token_bytes(PAYLOAD_BYTES)
    chunk = Chunk(key=key, start=0, tokens=np.arange(16, dtype=np.int32))
    seal(
        record.view,
        format=FORMAT,
        chunk=chunk,
        request_namespace="",
        shape=(PAYLOAD_BYTES,),
        payload_bytes=PAYLOAD_BYTES,
    )
    return record


def _round_trip(spec: TierSpec, seconds: float) -> Check:
    name, found = f"round trip ({spec.id})", f"a lookup takes {_ms(seconds)}"
    if seconds > SLOW_S:
        return warn(name, found, "move it nearer: each request waits for lookups")
    return ok(name, found)


async def _in_time(spec: TierSpec, call: Awaitable[T]) -> T:
    async with asyncio.timeout(spec.timeout_s):
        return await call


def _todo(error: LMCacheAsyncError) -> str:
    if isinstance(error, TierUnavailableError):
        return "see whether its server runs and can be reached from this machine"
    return "see what its server allows this user, and its options: lmcache-async tiers"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
