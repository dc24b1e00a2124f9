"""`python -m tools.scale.measure [host] [valkey] [mooncake]`: CPU time of servers per operation.

The client runs on the same machine, so wall-clock time says little about the server. Measured is the CPU time of the
server process over many calls, including the kernel (Linux only). Records have one page, so that copies do not count;
`get ... MiB` measures large records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import uvloop

from lmcache_async.bench.tier import FORMAT, open_tier, seal_record
from lmcache_async.config import TierSpec
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Tier
from lmcache_async.types import KEY_BYTES, ChunkKey
from tools.benchmarks import servers

MIB = 1 << 20
COUNTS = (1, 64, 512, 4096)
SECONDS = 1.0  # per figure
LARGE_BYTES = 32 * MIB
SMALL = 2 * FORMAT.header_bytes


def cpu_s(command: str) -> float:
    """Return the CPU time of our child process with `word` in its command line, including ended threads."""
    total = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and command in (process / "cmdline").read_text():
                total += time.clock_gettime((~int(process.name) << 3) | 2)  # clock_getcpuclockid(3)
    return total


async def idle(command: str) -> None:
    """Wait until the server has finished its start."""
    before = -1.0
    while (now := cpu_s(command)) - before > 1e-3:
        before = now
        await asyncio.sleep(0.1)


async def repeat(name: str, command: str, items: int, call: Callable[[], Awaitable[object]]) -> None:
    """Call repeatedly and print the server's cost per call and per item, and the duration of a call."""
    await call()
    calls = 0
    cpu, start = cpu_s(command), time.perf_counter()
    while (took := time.perf_counter() - start) < SECONDS or not calls:
        await call()
        calls += 1
    spent = (cpu_s(command) - cpu) / calls
    show(name, spent, items, f"{took / calls * 1e6:11.1f} us waited")


def show(name: str, spent_s: float, items: int, more: str = "") -> None:
    each = f"{spent_s * 1e6:10.1f} us of CPU a call {spent_s / items * 1e6:9.3f} an item"
    sys.stdout.write(f"{name:<24} {each} {more}\n")
    sys.stdout.flush()


def keys(count: int) -> list[ChunkKey]:
    return [ChunkKey(number.to_bytes(KEY_BYTES, "big")) for number in range(count)]


@contextlib.contextmanager
def records(arena: Arena, count: int) -> Iterator[list[tuple[ChunkKey, Buffer]]]:
    with contextlib.ExitStack() as stack:
        items = []
        for number in range(count):
            buffer = arena.lease_nowait(arena.slab_bytes)
            assert buffer is not None, "the arena is as large as its records"
            stack.callback(buffer.release)
            items.append((seal_record(buffer, keys(number + 1)[number]), buffer))
        yield items


async def get(tier: Tier, asked: list[ChunkKey], arena: Arena) -> None:
    async def allocate(nbytes: int) -> Buffer:
        return await arena.lease(nbytes, timeout_s=30.0)

    got = await tier.get_many(asked, allocate)
    there = [buffer for buffer in got if isinstance(buffer, Buffer)]
    for buffer in there:
        buffer.release()
    assert len(there) == len(asked), f"{len(asked) - len(there)} of {len(asked)} are not there"


async def small(spec: TierSpec, command: str) -> None:
    """Measure puts, lookups and gets of many small records."""
    async with contextlib.AsyncExitStack() as stack:
        arena = Arena(2 * max(COUNTS) * SMALL, SMALL, huge_pages=False, prefault=True)
        stack.callback(arena.close)
        tier = await stack.enter_async_context(open_tier(spec, arena))
        items = stack.enter_context(records(arena, max(COUNTS)))
        await idle(command)
        for batch in (1, 64):
            await tier.clear()
            await puts(tier, command, [items[i : i + batch] for i in range(0, len(items), batch)])
        for count in COUNTS:
            await repeat(f"lookup of {count}", command, count, partial(tier.count_prefix, keys(count)))
        for count in (1, 64):
            await repeat(f"get of {count}", command, count, partial(get, tier, keys(count), arena))


async def puts(tier: Tier, command: str, batches: list[list[tuple[ChunkKey, Buffer]]]) -> None:
    """Put each record once, because stored records are not put again."""
    batch = len(batches[0])
    before = cpu_s(command)
    for items in batches:
        answers = await tier.put_many(items)
        assert not any(answers), answers
    spent = (cpu_s(command) - before) / len(batches)
    show(f"put of {batch}", spent, batch)


async def large(tier: Tier, command: str, arena: Arena) -> None:
    """Measure the cost per MiB of records as large as the arena's slabs."""
    count = 8
    mib = count * arena.slab_bytes // MIB
    with records(arena, count) as items:
        await repeat(f"put of {count} large, a MiB", command, mib, lambda: tier.put_many(items))
        await repeat(f"get of {count} large, a MiB", command, mib, partial(get, tier, keys(count), arena))


async def pool(tier: Tier, command: str, arena: Arena) -> None:
    """Measure Mooncake's master. Payloads do not pass through it."""
    with records(arena, 8) as items:
        await tier.put_many(items)
        for count in COUNTS:
            await repeat(f"lookup of {count}", command, count, partial(tier.count_prefix, keys(count)))
        await repeat("get of 8", command, 8, partial(get, tier, keys(8), arena))


async def measure(name: str) -> None:
    sys.stdout.write(f"{name}\n")
    waits: dict[str, object] = dict.fromkeys(("lookup_timeout_s", "transfer_timeout_s"), 30.0)
    with contextlib.closing(Arena(24 * LARGE_BYTES, LARGE_BYTES, prefault=True)) as arena:
        if name == "host":
            with servers.host_daemon(256 * MIB) as path:
                await small(TierSpec(name=name, options={"socket": path, **waits}), "host_daemon")
        elif name == "valkey":
            with servers.valkey_server() as url:
                spec = TierSpec(name=name, options={"url": url, **waits})
                await small(spec, "valkey-server")
                async with open_tier(spec, arena) as tier:
                    await large(tier, "valkey-server", arena)
        else:
            with servers.mooncake_pool(2048 * MIB) as url:
                spec = TierSpec(name=name, options={"url": url, "hostname": "127.0.0.1"})
                async with open_tier(spec, arena) as tier:
                    await pool(tier, "mooncake_master", arena)


if __name__ == "__main__":
    for one in sys.argv[1:] or ["host", "valkey", "mooncake"]:
        uvloop.run(measure(one))
