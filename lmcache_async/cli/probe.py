"""Probe of a remote tier: open it, and store, read and remove one record."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from lmcache_async.bench.tier import FORMAT, seal_record
from lmcache_async.config import TierSpec
from lmcache_async.errors import BudgetExceededError, LMCacheAsyncError, TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.arena import Arena
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.diagnosis import Check, Outcome, fail, ok, warn
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.results import unwrap
from lmcache_async.types import KEY_BYTES, ChunkKey

PAYLOAD_BYTES = 64 << 10
LOOKUPS = 5
SLOW_S = 0.1


def probe_timeout_s(spec: TierSpec) -> float:
    """Return the maximum duration of a probe in seconds, provided that no call blocks the thread."""
    return spec.open_timeout_s + (LOOKUPS + 6) * spec.timeout_s + 5.0


def probe_tier(spec: TierSpec, tier: Tier) -> list[Check]:
    """Open the tier; look up, store, read and remove a record with a random key; close the tier."""
    return asyncio.run(_probe(spec, tier))


async def _probe(spec: TierSpec, tier: Tier) -> list[Check]:
    handle = TierHandle(
        tier,
        name=spec.id,
        logger=LimitedLogger(logging.getLogger("lmcache_async.doctor")),
        timeout_s=spec.timeout_s,
        open_timeout_s=spec.open_timeout_s,
    )
    slab_bytes = FORMAT.record_bytes(PAYLOAD_BYTES)
    arena = Arena(4 * slab_bytes, slab_bytes, huge_pages=False, prefault=False)
    async with AsyncExitStack() as stack:
        stack.callback(arena.close)
        begin = time.perf_counter()
        try:
            handle.bind(arena)
            await stack.enter_async_context(handle)
        except LMCacheAsyncError as error:
            return [fail("opens", str(error), _todo(error))]
        except Exception as error:  # noqa: BLE001 - of a tier of another distribution
            return [fail("opens", f"{type(error).__name__}: {describe(error)}", _todo(error))]
        checks = [ok("opens", f"in {_ms(begin)}")]
        try:
            checks.append(await _look_up(handle))
            checks.append(await _check_record(handle, arena, spec.timeout_s))
        except TierError as error:
            checks.append(_failed("a lookup", error))
        return checks


async def _look_up(tier: TierHandle) -> Check:
    key, times = _random_key(), []
    for _ in range(LOOKUPS):
        begin = time.perf_counter()
        if await tier.lookup([key], exact=True) == [True]:
            raise TierError("the tier reports a record that was never stored")
        times.append(time.perf_counter() - begin)
    seconds = sorted(times)[LOOKUPS // 2]
    found = f"a lookup takes {seconds * 1e3:.1f} ms"
    slow = warn(
        "round trip", found, "use a server with a shorter round trip: every request waits for lookups"
    )
    return slow if seconds > SLOW_S else ok("round trip", found)


async def _check_record(tier: TierHandle, arena: Arena, timeout_s: float) -> Check:
    if not tier.capabilities.writes:
        return ok("record", "the tier is read-only: nothing was written")
    with await arena.lease(FORMAT.record_bytes(PAYLOAD_BYTES), timeout_s=timeout_s) as record:
        record.view[FORMAT.header_bytes :] = secrets.token_bytes(PAYLOAD_BYTES)
        key = seal_record(record, _random_key())
        step, begin = "a put", time.perf_counter()
        try:
            (error,) = await tier.put([(key, record)])
            if error is not None:
                raise error
            stored, step, begin = _ms(begin), "a get", time.perf_counter()
            (result,) = await tier.get([key], partial(arena.lease, timeout_s=timeout_s))
            check = fail("record", "the stored record was not returned", "check that its server has room")
            if (found := unwrap(result)) is not None:
                with found:
                    if found.view == record.view:
                        check = ok("record", f"put in {stored}, read back in {_ms(begin)}")
        except (TierError, BudgetExceededError) as failure:
            check = _failed(step, failure)
    # Also after a failed put, which may have stored the record.
    passed = check.outcome is Outcome.OK
    if not tier.capabilities.removes:
        rest = "stays" if passed else "may stay"
        return replace(check, found=f"{check.found}; the record of 64 KiB {rest}: the tier cannot remove it")
    try:
        certain = await tier.remove(key) or not passed
    except TierError as error:
        check, certain = (_failed("a removal", error) if passed else check), False
    return check if certain else replace(check, found=f"{check.found}; the record of 64 KiB may stay")


def _failed(step: str, error: LMCacheAsyncError) -> Check:
    return fail("record", f"{step} failed: {error}", _todo(error))


def _todo(error: Exception) -> str:
    if isinstance(error, TierUnavailableError):
        return "check that its server runs and can be reached from this machine"
    return "check the user's permissions on its server, and its options: lmcache-async tiers"


def _random_key() -> ChunkKey:
    return ChunkKey(secrets.token_bytes(KEY_BYTES))


def _ms(begin: float) -> str:
    return f"{(time.perf_counter() - begin) * 1e3:.1f} ms"
