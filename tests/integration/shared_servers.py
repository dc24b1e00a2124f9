"""Servers of shared tiers, with one interface to start, kill, hang and stop them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from tests.support.mooncake_pool import MooncakePool, kill_master, kill_store
from tests.support.s3_server import ACCESS_KEY_ID, BUCKET, SECRET_KEY, S3Server
from tests.support.valkey_servers import Server

PATIENCE_S = 60.0
"""Timeouts of the tiers, far longer than the deadlines of the engine whose server hangs."""
TIMEOUTS = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s"), PATIENCE_S)


@dataclass(frozen=True, slots=True)
class SharedServer:
    """One server.

    Attributes:
        tier: The settings of the tier, the same for every engine.
        start: Start the server, also after a kill, and wait until it is ready.
        kill: Send SIGKILL.
        hang: Stop answering without closing connections, until the server is killed.
        stop: Stop the server and remove its files.
    """

    tier: dict[str, Any]
    start: Callable[[], None]
    kill: Callable[[], None]
    hang: Callable[[], None]
    stop: Callable[[], None]


def valkey(directory: Path) -> SharedServer:
    """One Valkey server. Its records are lost when it is killed."""
    del directory  # it creates its own
    server = Server()
    tier = {"name": "valkey", "url": server.tcp_url, **TIMEOUTS}
    return SharedServer(tier, server.start, server.kill, partial(server.signal, signal.SIGSTOP), server.stop)


def s3(directory: Path) -> SharedServer:
    """SeaweedFS. Only the S3 gateway is killed, so the records remain."""
    server = S3Server(directory)
    starts = chain([server.start], repeat(server.start_gateway))
    tier = {
        "name": "s3",
        "url": f"s3://{BUCKET}/engines",
        "endpoint": f"http://127.0.0.1:{server.port}",
        "region": "us-east-1",
        "allow_http": True,
        "access_key_id": ACCESS_KEY_ID,
        "secret_key": SECRET_KEY,
        "part_bytes": "256KiB",  # a chunk has 516 KiB, so it is read in parts
        "connect_timeout_s": PATIENCE_S,
        "request_timeout_s": PATIENCE_S,
    }
    hang = partial(server.signal_gateway, signal.SIGSTOP)
    return SharedServer(tier, lambda: next(starts)(), server.kill_gateway, hang, server.stop)


def mooncake(directory: Path) -> SharedServer:
    """Mooncake's master and a process with memory. Both are killed together, and their records are lost."""
    pool = MooncakePool(directory)

    def kill() -> None:
        kill_master(pool)
        kill_store(pool)

    return SharedServer(pool.tier, pool.start, kill, partial(pool.signal_master, signal.SIGSTOP), pool.stop)


def host(directory: Path) -> SharedServer:
    """`lmcache-async serve`, for one host. Its records are lost when it is killed."""
    del directory  # its path may be too long for a socket
    own = Path(tempfile.mkdtemp(prefix="lmca-"))
    config = {"socket": str(own / "s"), "max_bytes": "512MiB", "prefault": False}
    (own / "daemon.yaml").write_text(json.dumps(config))  # also YAML
    running: list[subprocess.Popen[str]] = []

    def start() -> None:
        command = [sys.executable, "-m", "lmcache_async.cli", "serve", f"--config={own / 'daemon.yaml'}"]
        running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True))
        assert running[0].stdout is not None
        assert any("is ready at" in line for line in running[0].stdout), "the daemon has ended"

    def kill() -> None:
        while running:
            process = running.pop()
            process.kill()
            process.communicate()

    def stop() -> None:
        kill()
        shutil.rmtree(own)

    tier = {"name": "host", "socket": str(own / "s"), **TIMEOUTS}
    return SharedServer(tier, start, kill, lambda: running[0].send_signal(signal.SIGSTOP), stop)


SERVERS: Mapping[str, Callable[[Path], SharedServer]] = {
    each.__name__: each for each in (valkey, s3, mooncake, host)
}
"""Servers by the name of their tier. Each has its own directory."""
