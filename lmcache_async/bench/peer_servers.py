"""The other ends of the benchmark of the peer tier: a daemon, and bare sockets that answer the same commands."""

from __future__ import annotations

import contextlib
import mmap
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_HEAD = 64 << 10
_KEY = re.compile(rb"[0-9a-f]{32}\r\n")


@contextlib.contextmanager
def daemon(max_bytes: int, record_bytes: int) -> Iterator[int]:
    """`lmcache-async serve` with peers who may write; its port."""
    with tempfile.TemporaryDirectory(prefix="lmca-") as directory:
        config = Path(directory) / "daemon.yaml"
        config.write_text(
            f"socket: {directory}/s\nmax_bytes: {max_bytes}\nmax_client_bytes: {max_bytes}\n"
            f"segment_bytes: {max(record_bytes, 64 << 20)}\npeer:\n  listen: 127.0.0.1:0\n  writable: true\n"
        )
        command = [sys.executable, "-m", "lmcache_async.cli", "serve", "--config", str(config)]
        with _started(command, r"peers may connect to .*:(\d+)$") as port:
            yield port


@contextlib.contextmanager
def bare_server(memory_bytes: int, record_bytes: int) -> Iterator[int]:
    """A blocking socket and a thread for each connection, and nothing else; its port."""
    command = [sys.executable, "-m", __name__, str(memory_bytes), str(record_bytes)]
    with _started(command, r"^(\d+)$") as port:
        yield port


@contextlib.contextmanager
def _started(command: Sequence[str], pattern: str) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        for line in process.stdout or ():
            if found := re.search(pattern, line):
                break
        else:
            raise ConfigError(f"{' '.join(command)} does not start: run it, and see what it says")
        yield int(found.group(1))
    finally:
        process.terminate()
        process.communicate()


def main(arguments: Sequence[str]) -> None:
    """Serve until killed: GET, SET and EXISTS of records of one length, whose keys are their numbers."""
    memory_bytes, record_bytes = map(int, arguments)
    memory = memoryview(mmap.mmap(-1, memory_bytes))
    memory[:] = bytes(memory_bytes)
    known: set[int] = set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(
                target=_serve, args=(connection, memory, record_bytes, known), daemon=True
            ).start()


def _serve(connection: socket.socket, memory: memoryview, record_bytes: int, known: set[int]) -> None:
    with connection:
        while head := connection.recv(_MAX_HEAD, socket.MSG_PEEK):
            keys = [int(key, 16) for key in _KEY.findall(head)]
            if head[8:11] == b"SET":
                after = b"$%d\r\n" % record_bytes
                connection.recv(head.index(after) + len(after), socket.MSG_WAITALL)
                target = memory[keys[0] * record_bytes : (keys[0] + 1) * record_bytes]
                got = 0
                while got < record_bytes:
                    got += connection.recv_into(target[got:])
                connection.recv(2, socket.MSG_WAITALL)
                known.add(keys[0])
                connection.sendall(b"+OK\r\n")
            elif head[8:11] == b"GET":
                connection.recv(len(head))
                connection.sendall(b"$%d\r\n" % record_bytes)
                connection.sendall(memory[keys[0] * record_bytes : (keys[0] + 1) * record_bytes])
                connection.sendall(b"\r\n")
            else:
                connection.recv(len(head))
                connection.sendall(b":%d\r\n" % len(known.intersection(keys)))


if __name__ == "__main__":
    main(sys.argv[1:])
