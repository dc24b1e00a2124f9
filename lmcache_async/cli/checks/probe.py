"""Probe of a remote tier: open it, and store, read and remove one record."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from lmcache_async.config import TierSpec
from lmcache_async.errors import LMCacheAsyncError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.diagnosis import Check, fail, ok, warn
from lmcache_async.types import KEY_BYTES, Chunk, ChunkKey

T = TypeVar("T")

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


def probe_tier(spec: TierSpec, tier: Tier) -> list[Check]:
    """Open the tier; look up, store, read and remove a record with a random key; close the tier."""
    return asyncio.run(_probe(spec, tier))


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
        checks.append(ok("opens", f"in {_ms(begin)}"))
        try:
            await _use(spec, tier, arena, checks)
        except ProbeError as error:
            checks.append(error.check)
        finally:
            await asyncio.wait_for(tier.__aexit__(None, None, None), spec.timeout_s)
    except LMCacheAsyncError as error:
        checks.append(fail("opens", str(error), _todo(error)))
    except TimeoutError:
        checks.append(warn("opens", f"not closed after {spec.timeout_s:g} s", "see the log of its server"))
    finally:
        arena.close()
    return checks


async def _use(spec: TierSpec, tier: Tier, arena: Arena, checks: list[Check]) -> None:
    key = ChunkKey(secrets.token_bytes(KEY_BYTES))
    times = []
    for _ in range(LOOKUPS):
        begin = time.perf_counter()
        if await _step(spec, "a lookup", tier.contains(key)):
            checks.append(fail("record", "it reports a record that was never stored", "report this as a bug"))
            return
        times.append(time.perf_counter() - begin)
    seconds = sorted(times)[LOOKUPS // 2]
    found = f"a lookup takes {seconds * 1e3:.1f} ms"
    slow = warn("round trip", found, "use a nearer server: every request waits for lookups")
    checks.append(slow if seconds > SLOW_S else ok("round trip", found))
    if not tier.capabilities.writes:
        checks.append(ok("record", "the tier is read-only: nothing was written"))
        return
    with await arena.lease(FORMAT.record_bytes(PAYLOAD_BYTES), timeout_s=spec.timeout_s) as record:
        record.view[FORMAT.header_bytes :] = secrets.token_bytes(PAYLOAD_BYTES)
        seal(
            record.view,
            format=FORMAT,
            chunk=Chunk(key, 0, np.arange(16, dtype=np.int32)),
            request_namespace="",
            shape=(PAYLOAD_BYTES,),
            payload_bytes=PAYLOAD_BYTES,
        )
        try:
            check, passed = await _store_and_read(spec, tier, key, arena, record), True
        except ProbeError as error:
            check, passed = error.check, False
    checks.append(await _removed(spec, tier, key, check, passed=passed))


async def _store_and_read(spec: TierSpec, tier: Tier, key: ChunkKey, arena: Arena, record: Buffer) -> Check:
    begin = time.perf_counter()
    await _step(spec, "a put", tier.put(key, record))
    stored, begin = _ms(begin), time.perf_counter()
    found = await _step(
        spec, "a get", tier.get(key, lambda nbytes: arena.lease(nbytes, timeout_s=spec.timeout_s))
    )
    same = found is not None and bytes(found.view) == bytes(record.view)
    if found is not None:
        found.release()
    if not same:
        lost = "the stored record was not returned"
        raise ProbeError(fail("record", lost, "check that its server has room"))
    return ok("record", f"put in {stored}, read back in {_ms(begin)}")


async def _removed(spec: TierSpec, tier: Tier, key: ChunkKey, check: Check, *, passed: bool) -> Check:
    """Remove the record, also after a failed put, which may have stored it; add a remainder to the check."""
    if not tier.capabilities.removes:
        rest = "stays" if passed else "may stay"
        return replace(check, found=f"{check.found}; the record of 64 KiB {rest}: the tier cannot remove it")
    try:
        uncertain = not await _step(spec, "a removal", tier.remove(key)) and passed
    except ProbeError as error:
        check, uncertain = (error.check if passed else check), True
    return replace(check, found=f"{check.found}; the record of 64 KiB may stay") if uncertain else check


async def _step(spec: TierSpec, step: str, call: Awaitable[T]) -> T:
    """Return the result of a call within `timeout_s`.

    Raises:
        ProbeError: It failed or took longer.
    """
    try:
        async with asyncio.timeout(spec.timeout_s):
            return await call
    except LMCacheAsyncError as error:
        raise ProbeError(fail("record", f"{step} failed: {error}", _todo(error))) from error
    except TimeoutError as error:
        found = f"{step} took longer than timeout_s of {spec.timeout_s:g} s"
        raise ProbeError(fail("record", found, "check its server")) from error
    except Exception as error:  # a bug of a third-party tier
        found = f"{step} failed: {type(error).__name__}: {error!s:.300}"
        raise ProbeError(fail("record", found, "report this line as a bug of the tier")) from error


def _todo(error: LMCacheAsyncError) -> str:
    if isinstance(error, TierUnavailableError):
        return "check that its server runs and can be reached from this machine"
    return "check the user's permissions on its server, and its options: lmcache-async tiers"


def _ms(begin: float) -> str:
    return f"{(time.perf_counter() - begin) * 1e3:.1f} ms"
