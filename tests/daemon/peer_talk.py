"""A blocking connection to a peer server, for what no client of ours would say."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Self

from lmcache_async.resp.wire import ErrorReply, Reply, encode, parse_reply
from tests.tiers.peer_hosts import DEADLINE_S, Host


class Talk:
    """Says words, and reads replies."""

    def __init__(self, host: Host, context: ssl.SSLContext | None = None) -> None:
        raw = socket.create_connection(("127.0.0.1", host.port), timeout=DEADLINE_S)
        self.socket = raw if context is None else context.wrap_socket(raw, server_hostname="127.0.0.1")
        self._data = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, *words: bytes) -> Reply:
        self.socket.sendall(encode(*words))
        return self.reply()

    def refused(self, *words: bytes) -> str:
        reply = self.ask(*words)
        assert isinstance(reply, ErrorReply), reply
        return reply.text

    def reply(self) -> Reply:
        while (found := parse_reply(self._data, 0, len(self._data))) is None:
            piece = self.socket.recv(1 << 16)
            assert piece, f"it closed the connection after {bytes(self._data)!r}"
            self._data += piece
        reply, end = found
        del self._data[:end]
        return reply

    def ended(self) -> bool:
        """Whether it closes the connection, which is waited for; what it says before is thrown away."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True


@contextlib.contextmanager
def talking(host: Host, context: ssl.SSLContext | None = None) -> Iterator[Talk]:
    with Talk(host, context) as talk:
        yield talk


def wait_until(true: Callable[[], bool]) -> None:
    """The other end of a connection notices in its own time, so it is asked again and again."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s"
        time.sleep(0.001)
