"""The daemon and its clients in separate processes: killed, forked and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import uvloop

from lmcache_async.testing.records import check_record, key_of, small_arena
from lmcache_async.testing.rig import Rig
from tests.daemon.client_child import TOKENS, no_memory
from tests.support.daemons import DEADLINE_S, ThreadedDaemon, host_tier, socket_path
from tests.support.engines import retrieve
from tests.support.outcomes import put
from tests.support.traffic import Traffic

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def test_a_killed_client_leaves_no_lease_even_if_its_child_lives() -> None:
    with (
        socket_path() as path,
        ThreadedDaemon(path, max_bytes="2MiB") as daemon,
        process("tests.daemon.client_child", "hold", str(path)) as client,
    ):
        word, child = line(client).split()
        assert word == "holding"
        assert daemon.leases("held") == (1, 1)
        client.kill()
        client.wait(DEADLINE_S)
        os.kill(int(child), 0)  # it exists
        try:
            uvloop.run(daemon.until_leases((0, 0), "held"))
        finally:
            os.kill(int(child), signal.SIGKILL)
        there = daemon.call(lambda: daemon.pool.contains("held", [key_of(1), key_of(2)]))
        assert there == [True, False], "a record that was half written is found"


def test_an_engine_in_another_process_retrieves_stored_records() -> None:
    async def load(path: Path) -> None:
        rig = Rig(slabs=32)
        tiers = [{"name": "host", "socket": str(path), "prefault": False, "connect_timeout_s": 10}]
        async with rig.open(tiers=tiers) as engine:
            assert await engine.lookup(TOKENS) == len(TOKENS)
            assert all(await retrieve(rig, engine, TOKENS))
            statistics = engine.statistics()
        assert statistics.counts["host.hits"] == 5
        assert statistics.arena.peak_leased_slabs == 0, "a hit took memory of the engine's own"

    with (
        socket_path() as path,
        ThreadedDaemon(path, max_bytes="2MiB") as daemon,
        process("tests.daemon.client_child", "store", str(path)) as client,
    ):
        assert line(client) == "stored 5"
        client.wait(DEADLINE_S)
        uvloop.run(load(path))
        uvloop.run(daemon.until_leases((0, 0)))


async def _kill_and_restart(path: Path) -> None:
    arena = small_arena(8)
    command = ("lmcache_async.cli", "serve", "--socket", str(path), "--max-bytes", "2MiB")
    tier = host_tier(path, tenant="t")
    tier.bind(arena)
    traffic = Traffic(tier.put_many, tier.get_many, arena, no_memory)
    with process(*command) as first:
        assert "ready" in await asyncio.to_thread(line, first)
        async with tier, traffic.running():
            await traffic.seen_again("hit")
            assert await put(tier, arena, 0) == [None]
            kept = await tier.get(key_of(0), no_memory)
            assert kept is not None
            first.kill()
            await traffic.seen_again("TierUnavailableError")
            with process(*command) as second:
                assert "ready" in await asyncio.to_thread(line, second)
                await traffic.seen_again("hit")
                check_record(kept, 0)
                kept.release()
                second.terminate()
                assert await asyncio.to_thread(second.wait, DEADLINE_S) == 0
                assert not await asyncio.to_thread(path.exists)
    assert traffic.seen <= {"hit", "miss", "drop", "TierUnavailableError"}
    assert arena.statistics().leased_slabs == 0
    arena.close()


def test_a_killed_daemon_causes_misses_until_its_restart() -> None:
    with socket_path() as path:
        uvloop.run(_kill_and_restart(path))
