"""Probe of a remote tier: open it, and store, read and remove one record."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from lmcache_async.config import TierSpec
from lmcache_async.errors import LMCacheAsyncError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.diagnosis import Check, Outcome, fail, ok, warn
from lmcache_async.types import KEY_BYTES, Chunk, ChunkKey

PAYLOAD_BYTES = 64 << 10
FORMAT = RecordFormat(namespace='{"doctor":"probe"}', layout="probe", dtype="uint8", chunk_size=16)
LOOKUPS = 5
SLOW_S = 0.1


class ProbeError(Exception):
    """A call of the tier failed or timed out; has the check to report."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.found)
        self.check = check


def probe_timeout_s(spec: TierSpec) -> float:
    """Return the time by which all calls of a probe have ended, unless one of them blocks."""
    return spec.open_timeout_s + (LOOKUPS + 6) * spec.timeout_s + 5.0


def probe_tier(spec: TierSpec, tier: Tier) -> Iterator[Check]:
    """Open the tier; look up, store, read and remove a record with a random key; close the tier."""
    yield from asyncio.run(_probe(spec, tier))


async def _probe(spec: TierSpec, tier: Tier) -> list[Check]:
    slab_bytes = FORMAT.record_bytes(PAYLOAD_BYTES)
    arena = Arena(4 * slab_bytes, slab_bytes, huge_pages=False, prefault=False)
    checks: list[Check] = []
    try:
        tier.bind(arena)
        begin = time.perf_counter()
        try:
            await asyncio.wait_for(tier.__aenter__(), spec.open_timeout_s)
        except TimeoutError:
            found = f"not open after {spec.open_timeout_s:g} s"
            return [fail("opens", found, "check that its server answers from this machine")]
        checks.append(ok("opens", f"in {_ms(time.perf_counter() - begin)}"))
        try:
            checks += await _use(spec, tier, arena)
        finally:
            await asyncio.wait_for(tier.__aexit__(None, None, None), spec.timeout_s)
    except LMCacheAsyncError as error:
        checks.append(fail("opens", str(error), _todo(error)))
    except TimeoutError:
        checks.append(warn("opens", f"not closed after {spec.timeout_s:g} s", "see the log of its server"))
    finally:
        arena.close()
    return checks


async def _use(spec: TierSpec, tier: Tier, arena: Arena) -> list[Check]:
    key = ChunkKey(secrets.token_bytes(KEY_BYTES))
    times = []
    try:
        for _ in range(LOOKUPS):
            begin = time.perf_counter()
            async with _step(spec, "a lookup"):
                found = await tier.contains(key)
            if found:
                return [fail("record", "it reports a record that was never stored", "report this as a bug")]
            times.append(time.perf_counter() - begin)
    except ProbeError as error:
        return [error.check]
    checks = [_round_trip(sorted(times)[LOOKUPS // 2])]
    if not tier.capabilities.writes:
        return [*checks, ok("record", "the tier is read-only: nothing was written")]
    record = _record(arena, key)
    try:
        check = await _store_and_read(spec, tier, key, arena, record)
    except ProbeError as error:
        check = error.check
    finally:
        record.release()
    return [*checks, await _removed(spec, tier, key, check)]


async def _store_and_read(spec: TierSpec, tier: Tier, key: ChunkKey, arena: Arena, record: Buffer) -> Check:
    begin = time.perf_counter()
    async with _step(spec, "a put"):
        await tier.put(key, record)
    stored = time.perf_counter()
    async with _step(spec, "a get"):
        found = await tier.get(key, lambda nbytes: arena.lease(nbytes, timeout_s=spec.timeout_s))
    same = False
    if found is not None:
        same = bytes(found.view) == bytes(record.view)
        found.release()
    read = time.perf_counter()
    if not same:
        return fail("record", "the stored record was not returned", "check that its server has room")
    return ok("record", f"put in {_ms(stored - begin)}, read back in {_ms(read - stored)}")


async def _removed(spec: TierSpec, tier: Tier, key: ChunkKey, check: Check) -> Check:
    """Remove the record, also after a failed put, which may have stored it; add a remainder to the check."""
    passed = check.outcome is Outcome.OK
    if not tier.capabilities.removes:
        rest = "stays" if passed else "may stay"
        return replace(check, found=f"{check.found}; the record of 64 KiB {rest}: the tier cannot remove it")
    try:
        async with _step(spec, "a removal"):
            uncertain = not await tier.remove(key) and passed
    except ProbeError as error:
        check, uncertain = (error.check if passed else check), True
    return replace(check, found=f"{check.found}; the record of 64 KiB may stay") if uncertain else check


@asynccontextmanager
async def _step(spec: TierSpec, step: str) -> AsyncIterator[None]:
    """Run a call within `timeout_s`.

    Raises:
        ProbeError: It failed or took longer.
    """
    try:
        async with asyncio.timeout(spec.timeout_s):
            yield
    except LMCacheAsyncError as error:
        raise ProbeError(fail("record", f"{step} failed: {error}", _todo(error))) from error
    except TimeoutError as error:
        found = f"{step} took longer than timeout_s of {spec.timeout_s:g} s"
        raise ProbeError(fail("record", found, "check its server")) from error


def _record(arena: Arena, key: ChunkKey) -> Buffer:
    record = arena.lease_nowait(FORMAT.record_bytes(PAYLOAD_BYTES))
    assert record is not None, "the arena has four slabs"
    record.view[FORMAT.header_bytes :] = secrets.token_bytes(PAYLOAD_BYTES)
    seal(
        record.view,
        format=FORMAT,
        chunk=Chunk(key=key, start=0, tokens=np.arange(16, dtype=np.int32)),
        request_namespace="",
        shape=(PAYLOAD_BYTES,),
        payload_bytes=PAYLOAD_BYTES,
    )
    return record


def _round_trip(seconds: float) -> Check:
    name, found = "round trip", f"a lookup takes {_ms(seconds)}"
    if seconds > SLOW_S:
        return warn(name, found, "use a nearer server: every request waits for lookups")
    return ok(name, found)


def _todo(error: LMCacheAsyncError) -> str:
    if isinstance(error, TierUnavailableError):
        return "check that its server runs and can be reached from this machine"
    return "check the user's permissions on its server, and its options: lmcache-async tiers"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
