"""Real servers that several engines have one tier at, started, killed, stopped and started again in one manner."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from tests.support.mooncake_pool import MooncakePool, kill_master, kill_store
from tests.support.s3_server import ACCESS_KEY_ID, BUCKET, SECRET_KEY, S3Server
from tests.support.valkey_servers import Server

PATIENCE_S = 60.0
"""What the tiers themselves would wait for a server: far longer than the engine's deadlines."""


class SharedServer(Protocol):
    """One server; a context manager that ends it.

    Attributes:
        tier: The settings of the tier, the same for every engine.
    """

    tier: dict[str, Any]

    def start(self) -> None:
        """Returns when it serves; also after it was killed."""

    def kill(self) -> None:
        """As kill -9 does."""

    def hang(self) -> None:
        """It keeps its connections and answers nothing, until it is killed."""

    def stop(self) -> None:
        """End it for good."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class _Started(SharedServer):
    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class ValkeyShared(_Started):
    """One Valkey; killed, it loses what it had."""

    def __init__(self, directory: Path) -> None:
        del directory  # it makes one of its own
        self._server = Server()
        self.tier = {"name": "valkey", "url": self._server.tcp_url, "transfer_timeout_s": PATIENCE_S}

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def hang(self) -> None:
        self._server.signal(signal.SIGSTOP)

    def stop(self) -> None:
        self._server.stop()


class S3Shared(_Started):
    """SeaweedFS; what is killed is the process that speaks S3, so its records stay."""

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
            "part_bytes": "256KiB",  # a chunk is 516 KiB: it is read in parts
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


class MooncakeShared(_Started):
    """Mooncake's master, and a process that gives the memory; killed, both at once, they lose what they had."""

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
    """`lmcache-async serve`, for one host; killed, it loses what it had.

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


class HostShared(_Started):
    """The daemon of a host."""

    def __init__(self, directory: Path) -> None:
        del directory  # its path may be too long for a socket's
        self._directory = Path(tempfile.mkdtemp(prefix="lmca-"))
        self._daemon = Daemon(self._directory)
        self.tier = {
            "name": "host",
            "socket": str(self._daemon.socket),
            "transfer_timeout_s": PATIENCE_S,
        }

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
"""By the tier's name; each makes its server in a directory of its own."""
