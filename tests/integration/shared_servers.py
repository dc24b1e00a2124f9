"""Servers of shared tiers, with one interface to start, kill, hang and stop them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.support.mooncake_pool import MooncakePool, kill_master, kill_store
from tests.support.s3_server import ACCESS_KEY_ID, BUCKET, SECRET_KEY, S3Server
from tests.support.valkey_servers import Server

PATIENCE_S = 60.0
"""Timeouts of the tiers, far longer than the deadlines of the engine whose server hangs."""
TIMEOUTS = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s"), PATIENCE_S)


class SharedServer(Protocol):
    """One server.

    Attributes:
        tier: The settings of the tier, the same for every engine.
    """

    tier: dict[str, Any]

    def start(self) -> None:
        """Start the server, also after a kill, and wait until it is ready."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def hang(self) -> None:
        """Stop answering without closing connections, until the server is killed."""

    def stop(self) -> None:
        """Stop the server and remove its files."""


class ValkeyShared(SharedServer):
    """One Valkey server. Its records are lost when it is killed."""

    def __init__(self, directory: Path) -> None:
        del directory  # it creates its own
        self._server = Server()
        self.tier = {"name": "valkey", "url": self._server.tcp_url, **TIMEOUTS}

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def hang(self) -> None:
        self._server.signal(signal.SIGSTOP)

    def stop(self) -> None:
        self._server.stop()


class S3Shared(SharedServer):
    """SeaweedFS. Only the S3 gateway is killed, so the records remain."""

    def __init__(self, directory: Path) -> None:
        self._server = S3Server(directory)
        self._has_storage = False
        self.tier = {
            "name": "s3",
            "url": f"s3://{BUCKET}/engines",
            "endpoint": f"http://127.0.0.1:{self._server.port}",
            "region": "us-east-1",
            "allow_http": True,
            "access_key_id": ACCESS_KEY_ID,
            "secret_key": SECRET_KEY,
            "part_bytes": "256KiB",  # a chunk has 516 KiB, so it is read in parts
            "connect_timeout_s": PATIENCE_S,
            "request_timeout_s": PATIENCE_S,
        }

    def start(self) -> None:
        if self._has_storage:
            self._server.start_gateway()
            return
        self._has_storage = True
        self._server.start()

    def kill(self) -> None:
        self._server.kill_gateway()

    def hang(self) -> None:
        self._server.signal_gateway(signal.SIGSTOP)

    def stop(self) -> None:
        self._server.stop()


class MooncakeShared(SharedServer):
    """Mooncake's master and a process with memory. Both are killed together, and their records are lost."""

    def __init__(self, directory: Path) -> None:
        self._pool = MooncakePool(directory)
        self.tier = self._pool.tier

    def start(self) -> None:
        self._pool.start()

    def kill(self) -> None:
        kill_master(self._pool)
        kill_store(self._pool)

    def hang(self) -> None:
        self._pool.signal_master(signal.SIGSTOP)

    def stop(self) -> None:
        self._pool.stop()


class Daemon:
    """`lmcache-async serve`, for one host. Its records are lost when it is killed.

    Args:
        directory: A short path, for its socket.
    """

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "s"
        self._config = directory / "daemon.yaml"
        self._config.write_text(
            json.dumps({"socket": str(self.socket), "max_bytes": "512MiB", "prefault": False})  # also YAML
        )
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "lmcache_async.cli", "serve", f"--config={self._config}"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert any("is ready at" in line for line in self._process.stdout), "the daemon has ended"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)


class HostShared(SharedServer):
    """The daemon of one host."""

    def __init__(self, directory: Path) -> None:
        del directory  # its path may be too long for a socket
        self._directory = Path(tempfile.mkdtemp(prefix="lmca-"))
        self._daemon = Daemon(self._directory)
        self.tier = {"name": "host", "socket": str(self._daemon.socket), **TIMEOUTS}

    def start(self) -> None:
        self._daemon.start()

    def kill(self) -> None:
        self._daemon.kill()

    def hang(self) -> None:
        self._daemon.hang()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self._directory)


SERVERS: Mapping[str, Callable[[Path], SharedServer]] = {
    "valkey": ValkeyShared,
    "s3": S3Shared,
    "mooncake": MooncakeShared,
    "host": HostShared,
}
"""Servers by the name of their tier. Each has its own directory."""
