"""Free ports for servers of tests."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from tests.support import processes


def test_no_connection_gets_a_free_port() -> None:
    low, high = map(int, processes.EPHEMERAL.read_text().split())
    ports = processes.free_ports(64)
    assert len(set(ports)) == 64
    assert not [port for port in ports if low <= port <= high]


def server_on_one_of(ports: range) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("all ports are in use")


def test_a_port_is_given_once_and_not_while_a_server_uses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few = tmp_path / "range"
    few.write_text("10000\t65499\n")
    monkeypatch.setattr(processes, "EPHEMERAL", few)
    monkeypatch.setattr(
        processes, "PORT_NAME", f"\0test-of-ports-{os.getpid()}-"
    )  # another test run may reserve all
    with server_on_one_of(range(65_500, 65_536)) as server:
        given = processes.free_ports(100)

        assert given
        assert server.getsockname()[1] not in given
        assert not processes.free_ports(100)
