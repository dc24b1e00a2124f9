"""A whole daemon: what engines of its host put, engines of other hosts read."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_async.daemon.config import load_daemon_config
from lmcache_async.errors import ConfigError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.peer import PeerConfig, PeerTier
from lmcache_async.testing.records import SLAB_BYTES, key_of
from lmcache_async.tiers.base import Allocate
from tests.daemon.daemons import ThreadedDaemon, host_tier, socket_path
from tests.tiers.outcomes import get, put

WAITS = {"connect_timeout_s": 10, "lookup_timeout_s": 10, "transfer_timeout_s": 10}
TOKEN = "0123456789abcdef"


@pytest.fixture
def arena():
    arena = Arena(16 * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)
    yield arena
    assert arena.statistics().leased_slabs == 0
    arena.close()


@pytest.fixture
def allocate(arena: Arena) -> Allocate:
    async def allocate(nbytes: int) -> Buffer:
        return await arena.lease(nbytes, timeout_s=5)

    return allocate


def reading(port: int, **options: object) -> PeerTier:
    return PeerTier(PeerConfig.model_validate({"peers": [f"127.0.0.1:{port}"], **WAITS, **options}))


async def test_what_an_engine_puts_into_its_hosts_pool_another_host_reads(
    arena: Arena, allocate: Allocate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"team {TOKEN}\nother {TOKEN}x\n")
    tokens.chmod(0o600)
    monkeypatch.setenv("TOKEN", TOKEN)
    peer = {"listen": "127.0.0.1:0", "token_file": tokens}
    with socket_path() as path, ThreadedDaemon(path, peer=peer) as daemon:
        port = daemon.call(lambda: daemon.daemon.peers.port)
        host = host_tier(path, tenant="team")
        host.bind(arena)
        async with host, reading(port, username="team", password_variable="TOKEN") as tier:
            assert await put(host, arena, 1, 2, 3) == [None] * 3
            assert await get(tier, allocate, 1, 2, 3, 4) == ["hit", "hit", "hit", "miss"]
            assert await host.remove(key_of(2))
            assert await get(tier, allocate, 1, 2, 3) == ["hit", "miss", "hit"]
        monkeypatch.setenv("TOKEN", f"{TOKEN}x")
        async with reading(port, username="other", password_variable="TOKEN") as tier:
            assert await get(tier, allocate, 1, 2, 3) == ["miss"] * 3
        await daemon.until_leases((0, 0), "team")


def test_a_port_that_is_taken_stops_the_start() -> None:
    with (
        socket_path() as path,
        socket_path() as second,
        ThreadedDaemon(path, peer={"listen": "127.0.0.1:0"}) as daemon,
    ):
        port = daemon.call(lambda: daemon.daemon.peers.port)
        with (
            pytest.raises(ConfigError, match=rf"peer\.listen: cannot listen at 127\.0\.0\.1:{port}"),
            ThreadedDaemon(second, peer={"listen": f"127.0.0.1:{port}"}),
        ):
            pass
        assert not second.exists()


async def test_a_daemon_killed_by_the_kernel_costs_hits_and_is_found_again(
    arena: Arena, allocate: Allocate, tmp_path: Path
) -> None:
    with socket_path() as path:
        first, port = start(tmp_path, path, 0)
        try:
            async with reading(port, write_to="rendezvous", retry_s=0.01) as tier:
                assert await put(tier, arena, 1) == [None]
                assert await get(tier, allocate, 1) == ["hit"]
                first.send_signal(signal.SIGKILL)
                first.communicate()
                assert await get(tier, allocate, 1) == ["TierUnavailableError"]
                with pytest.raises(TierUnavailableError):
                    await tier.contains(key_of(1))
                first, _ = start(tmp_path, path, port)
                while await put(tier, arena, 2) != [None]:
                    await asyncio.sleep(0)
                assert await get(tier, allocate, 1, 2) == ["miss", "hit"]
        finally:
            first.terminate()
            first.communicate()
    assert first.returncode == 0


def test_the_config_of_the_page_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "tiers" / "peer.md"
    [text] = re.findall(r"^```text\n(# daemon.yaml\n.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "daemon.yaml"
    file.write_text(text)
    peer = load_daemon_config(file, {}).peer
    assert peer is not None
    assert (str(peer.listen), peer.writable) == ("0.0.0.0:7420", False)
    named = set(re.findall(r"`peer\.([a-z_]+)", page.read_text()))
    assert named == set(type(peer).model_fields)


def start(folder: Path, path: Path, port: int) -> tuple[subprocess.Popen[str], int]:
    """`lmcache-async serve`, once peers may connect, and where."""
    config = folder / "daemon.yaml"
    config.write_text(
        f"socket: {path}\nmax_bytes: 32MiB\nprefault: false\nhuge_pages: false\n"
        f"peer:\n  listen: 127.0.0.1:{port}\n  writable: true\n"
    )
    command = [sys.executable, "-m", "lmcache_async.cli", "serve", "--config", str(config)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"peers may connect to .*:(\d+)$", line):
            return process, int(found.group(1))
    raise AssertionError("it has ended")
